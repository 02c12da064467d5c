//! The pieces of a batch: what each end is, and bringing them over.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};

use super::Event;
use super::batch::{Copies, Counted, allocation, is_pinned};
use super::context::{Context, Way};
use super::memory::given;
use super::scatter::{Kernel, WORTH_LOADING};
use super::slots::{ROUND, Slots, drain};
use super::stream::Stream;
use crate::batch::plan::{Layout, Part, Placed, check_apart, sort};
use crate::copy::pieces::Part as Whole;
use crate::copy::{Sink, Source};
use crate::device::Device;
use crate::element::{Element, validate};
use crate::error::{Error, Kind, Result};
use crate::tensor::DeviceMemory;

/// A block of device memory at least this long is staged by several threads, whatever pieces it comes from.
const LONG: usize = 4 * ROUND;

/// Page-locked pieces at least this long are copied from where they lie: asking what memory they are (half a microsecond)
/// takes less than packing them.
pub(super) const DIRECT: usize = 64 << 10;

/// For this many pieces it is worth the two events to have another stream do them than a default one.
const WORTH_A_STREAM: usize = 16;

/// Device memory that is borrowed until the transfer is over. Its address is asked for when that begins: asking makes the
/// stream wait.
pub(crate) struct DeviceEnd<'a> {
    object: NonNull<()>,
    ask: unsafe fn(NonNull<()>, &'a CudaStream) -> (u64, SyncOnDrop<'a>),
    bytes: usize,
    _borrow: PhantomData<&'a mut ()>,
}

/// # Safety
/// `object` is a `D` that is borrowed exclusively for `'a`.
unsafe fn to_write<'a, T: 'a, D: DevicePtrMut<T> + 'a>(
    object: NonNull<()>,
    stream: &'a CudaStream,
) -> (u64, SyncOnDrop<'a>) {
    // SAFETY: the caller's.
    unsafe { object.cast::<D>().as_mut() }.device_ptr_mut(stream)
}

/// # Safety
/// `object` is a `D` that is borrowed for `'a`.
unsafe fn to_read<'a, T: 'a, D: DevicePtr<T> + 'a>(
    object: NonNull<()>,
    stream: &'a CudaStream,
) -> (u64, SyncOnDrop<'a>) {
    // SAFETY: the caller's.
    unsafe { object.cast::<D>().as_ref() }.device_ptr(stream)
}

impl<'a> DeviceEnd<'a> {
    pub(crate) fn written<T: Element, D: DevicePtrMut<T> + DeviceMemory>(target: &'a mut D) -> Self {
        let bytes = target.num_bytes();
        Self { object: NonNull::from(target).cast(), ask: to_write::<T, D>, bytes, _borrow: PhantomData }
    }

    pub(crate) fn read<T: Element, D: DevicePtr<T> + DeviceMemory>(source: &'a D) -> Self {
        let bytes = source.num_bytes();
        Self { object: NonNull::from(source).cast(), ask: to_read::<T, D>, bytes, _borrow: PhantomData }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Lets cudarc order the stream, and gives the address, and what is to be dropped when the work is submitted. The
    /// context is current.
    pub(super) fn address(self, context: &Context, stream: &'a Arc<CudaStream>) -> Result<(u64, SyncOnDrop<'a>)> {
        // SAFETY: the object is of the type that the function was made for, and borrowed for 'a as it says.
        let ask = || unsafe { (self.ask)(self.object, stream) };
        let (address, sync) = context.unparked(stream.context(), "cuStreamWaitEvent", ask)?;
        Ok((given(address)?, sync))
    }
}

/// Host memory that is written to, borrowed exclusively until the transfer is over.
pub(crate) struct HostTarget<'a> {
    start: NonNull<u8>,
    bytes: usize,
    /// Whether bytes are elements.
    validate: fn(&[u8]) -> Result<()>,
    /// Some bytes are no elements: what the device has must be looked at before it is written here.
    choosy: bool,
    _borrow: PhantomData<&'a mut [u8]>,
}

// SAFETY: as `&mut [u8]`; through a shared reference only `put` writes, whose callers keep its ranges apart.
unsafe impl Send for HostTarget<'_> {}
// SAFETY: as above.
unsafe impl Sync for HostTarget<'_> {}

impl<'a> HostTarget<'a> {
    pub(crate) fn new<T: Element>(target: &'a mut [T]) -> Self {
        let bytes = size_of_val(target);
        let choosy = T::DTYPE == crate::element::DType::Bool;
        Self { start: NonNull::from(target).cast(), bytes, validate: validate::<T>, choosy, _borrow: PhantomData }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Whether the device may write here by itself.
    pub(super) fn takes_anything(&self) -> bool {
        !self.choosy
    }

    /// # Errors
    /// A byte is no element of the target.
    pub(super) fn check(&self, from: &[u8]) -> Result<()> {
        (self.validate)(from)
    }

    /// Writes checked bytes `offset` bytes behind the start; what lies outside is left out.
    ///
    /// # Safety
    /// Nobody else writes to or reads these bytes meanwhile.
    pub(super) unsafe fn put(&self, offset: usize, from: &[u8]) {
        let len = from.len().min(self.bytes.saturating_sub(offset));
        // SAFETY: inside the target (just cut), which is borrowed exclusively; the rest is the caller's.
        unsafe { self.start.add(offset.min(self.bytes)).copy_from_nonoverlapping(NonNull::from(from).cast(), len) };
    }
}

/// What a batch is made of. All memory is borrowed for `'a`; nothing happens before [`run`](Work::run).
#[derive(Default)]
pub(crate) struct Work<'a> {
    ends: Vec<DeviceEnd<'a>>,
    ups: Vec<(At, &'a [u8])>,
    downs: Vec<(At, HostTarget<'a>)>,
}

/// A place in one of the ends.
#[derive(Debug, Clone, Copy)]
struct At {
    end: usize,
    offset: usize,
}

/// How much of a [`Work`] there is, to come back to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark(usize, usize, usize);

impl<'a> Work<'a> {
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.ends.len(), self.ups.len(), self.downs.len())
    }

    pub(crate) fn back_to(&mut self, mark: Mark) {
        self.ends.truncate(mark.0);
        self.ups.truncate(mark.1);
        self.downs.truncate(mark.2);
    }

    /// Adds a block of device memory; pieces name the last one added.
    pub(crate) fn end(&mut self, end: DeviceEnd<'a>) {
        self.ends.push(end);
    }

    /// Where `bytes` bytes at `offset` lie in the last end.
    fn at(&self, offset: usize, bytes: usize) -> Result<At> {
        let len = self.ends.last().map_or(0, DeviceEnd::bytes);
        match offset.checked_add(bytes) {
            Some(end) if end <= len => Ok(At { end: self.ends.len().saturating_sub(1), offset }),
            end => {
                let end = end.unwrap_or(usize::MAX);
                Err(Error::new(Kind::Range { start: offset, end, len, unit: "bytes" }))
            }
        }
    }

    /// A piece to the last end, `offset` bytes behind its start.
    pub(crate) fn up(&mut self, offset: usize, source: &'a [u8]) -> Result<()> {
        let at = self.at(offset, source.len())?;
        self.ups.push((at, source));
        Ok(())
    }

    /// A piece from the last end, `offset` bytes behind its start.
    pub(crate) fn down(&mut self, offset: usize, target: HostTarget<'a>) -> Result<()> {
        let at = self.at(offset, target.bytes())?;
        self.downs.push((at, target));
        Ok(())
    }

    /// Brings all pieces over: when it returns, sources have been read and targets written, or, after an error, nothing is in
    /// flight.
    pub(crate) fn run(self, device: &Device, cuda: &'a Arc<CudaStream>) -> Result<Counted> {
        let Work { ends, ups, downs } = self;
        if ends.is_empty() {
            return Ok(Counted::default());
        }
        around(device, cuda, ends, "a batch", |stream, addresses| {
            let place = |index: usize, at: &At, bytes: usize| {
                let address = addresses.get(at.end).map_or(0, |address| address + at.offset as u64);
                Placed { address, bytes, index, object: at.end }
            };
            let up = ups.iter().enumerate().map(|(i, (at, source))| place(i, at, source.len()));
            let down = downs.iter().enumerate().map(|(i, (at, target))| place(i, at, target.bytes()));
            let (mut up, mut down): (Vec<_>, Vec<_>) = (up.collect(), down.collect());
            sort(&mut up);
            sort(&mut down);
            check_apart(&up)?;
            let sum = |placed: &[Placed]| placed.iter().fold(0usize, |sum, placed| sum.saturating_add(placed.bytes));
            let slots = Slots::new(device, sum(&up).max(sum(&down)));
            on_own(device, stream, up.len() + down.len(), |stream| {
                let mut way = Transfer { device, stream, slots, counted: Counted::default() };
                way.up(&ups, up)?;
                way.down(&downs, down)?;
                Ok(way.counted)
            })
        })
    }
}

/// Does `work` on `stream`; where that is a default stream, which takes no batches, on one of ours in its place, for many
/// pieces.
fn on_own<R>(device: &Device, stream: &Stream, pieces: usize, work: impl FnOnce(&Stream) -> Result<R>) -> Result<R> {
    let context = device.context();
    if !stream.is_default() || pieces < WORTH_A_STREAM || !context.has_batches() {
        return work(stream);
    }
    let own = context.copy_stream(Way::Up)?;
    own.wait_for(&Event::record(context, stream)?)?;
    let done = work(&own).and_then(|done| {
        stream.wait_for(&Event::record(context, &own)?)?;
        Ok(done)
    });
    if done.is_err() {
        // Others wait for the caller's stream only. Why the work failed says more than that the wait did.
        let _ = drain(device, &own);
    }
    done
}

/// Asks for the addresses of some device memory and does `work` on it, as one with what cudarc tracks: the stream comes after
/// what else uses the memory, and others after the work. After an error nothing is in flight, except if the device has faulted.
/// The context is current for the work, and the stream is not being captured.
pub(super) fn around<'a, R>(
    device: &Device,
    cuda: &'a Arc<CudaStream>,
    ends: Vec<DeviceEnd<'a>>,
    operation: &'static str,
    work: impl FnOnce(&Stream, &[u64]) -> Result<R>,
) -> Result<R> {
    let context = device.context();
    let _bound = context.to_submit()?;
    let stream = Stream::of_caller(cuda);
    stream.check_not_capturing(operation)?;
    let (mut addresses, mut syncs) = (Vec::with_capacity(ends.len()), Vec::with_capacity(ends.len()));
    let mut asked = Ok(());
    for end in ends {
        match end.address(context, cuda) {
            Ok((address, sync)) => {
                addresses.push(address);
                syncs.push(sync);
            }
            Err(error) => asked = asked.and(Err(error)),
        }
    }
    let done = asked.and_then(|()| work(&stream, &addresses));
    let drained = if done.is_err() { drain(device, &stream) } else { Ok(()) };
    // cudarc notes where the stream is now. Where it can not, nothing is left for it to know.
    if context.unparked(cuda.context(), "cuEventRecord", || drop(syncs)).is_err() && done.is_ok() {
        drain(device, &stream)?;
    }
    // Why it failed says more than that the wait did.
    done.and_then(|done| drained.map(|()| done))
}

struct Transfer<'t> {
    device: &'t Device,
    stream: &'t Stream,
    slots: Slots<'t>,
    counted: Counted,
}

/// Pieces in the order in which they are packed, as bytes from 0 on.
struct Packed<'p, P> {
    layout: &'p Layout,
    sorted: &'p [Placed],
    pieces: &'p [(At, P)],
    /// Where these bytes begin among all of the layout's.
    start: usize,
}

impl<P> Packed<'_, P> {
    /// Calls `each` with the pieces of some bytes: which, what part of it, and where that lies in the bytes.
    fn each(
        &self,
        offset: usize,
        len: usize,
        mut each: impl FnMut(&P, Range<usize>, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let mut at = 0;
        let from = self.start + offset;
        for (place, part) in self.layout.pieces(from..from + len) {
            let piece = self.sorted.get(place).and_then(|placed| self.pieces.get(placed.index));
            let Some((_, piece)) = piece else { continue };
            let next = at + part.len();
            each(piece, part, at..next)?;
            at = next;
        }
        Ok(())
    }
}

impl Source for Packed<'_, &[u8]> {
    fn fill(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.each(offset, into.len(), |piece, part, at| {
            if let (Some(from), Some(to)) = (piece.get(part), into.get_mut(at)) {
                to.copy_from_slice(from);
            }
            Ok(())
        })
    }
}

impl Sink for Packed<'_, HostTarget<'_>> {
    fn take(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.each(offset, from.len(), |piece, part, at| {
            let from = from.get(at).unwrap_or_default();
            piece.check(from)?;
            // SAFETY: each byte of a target is one of the packed bytes, and threads take different ones.
            unsafe { piece.put(part.start, from) };
            Ok(())
        })
    }
}

impl Transfer<'_> {
    fn up(&mut self, pieces: &[(At, &[u8])], mut sorted: Vec<Placed>) -> Result<()> {
        let host = |placed: &Placed| pieces.get(placed.index).map(|(_, source)| source.as_ptr());
        let direct = self.direct(Way::Up, &mut sorted, host)?;
        let layout = Layout::new(&sorted, one_allocation());
        let kernel = self.kernel(&layout);
        let packed = |start| Packed { layout: &layout, sorted: &sorted, pieces, start };
        for part in self.parts(&layout) {
            match part {
                Part::Long(block) => {
                    let source = packed(block.packed.start);
                    let whole = [Whole { source: 0..block.packed.len(), target: block.address }];
                    let tuning = self.device.tuning();
                    // SAFETY: the block is borrowed device memory of that length.
                    let copies = unsafe { self.device.staging().up(&whole, &source, &tuning, self.stream)? };
                    self.counted.add_single(copies);
                }
                Part::Packed(range) => {
                    let Self { device, stream, slots, counted } = self;
                    let mut copies = Copies::new(slots.pinned());
                    let rounds = layout.rounds(range, ROUND, slots.most_copies());
                    slots.up(stream, rounds, &packed(0), |round, slot| {
                        if let Some(kernel) = kernel
                            && let Some(places) = slot.list(layout.copies(round.clone()))
                        {
                            // SAFETY: the slot and its table are ours until its event has passed; the targets are borrowed and
                            // apart.
                            return unsafe { kernel.launch(places, stream, counted) };
                        }
                        gather(&mut copies, &layout, round, slot.start());
                        // SAFETY: the slot is ours until its event has passed; the targets are borrowed and apart.
                        unsafe { copies.submit(device.context(), Way::Up, stream, counted) }
                    })?;
                }
            }
        }
        direct.map_or(Ok(()), |event| {
            let _range = crate::trace::wait(c"wait");
            event.wait()
        })
    }

    fn down(&mut self, pieces: &[(At, HostTarget<'_>)], mut sorted: Vec<Placed>) -> Result<()> {
        let host = |placed: &Placed| {
            let target = pieces.get(placed.index).map(|(_, target)| target).filter(|target| target.takes_anything());
            target.map(|target| target.start().as_ptr().cast_const())
        };
        let direct = self.direct(Way::Down, &mut sorted, host)?;
        let layout = Layout::new(&sorted, one_allocation());
        let packed = |start| Packed { layout: &layout, sorted: &sorted, pieces, start };
        for part in self.parts(&layout) {
            match part {
                Part::Long(block) => {
                    let sink = packed(block.packed.start);
                    let (at, bytes, tuning) = (block.address, block.packed.len(), self.device.tuning());
                    // SAFETY: the block is borrowed device memory of that length.
                    let copies = unsafe { self.device.staging().down(&sink, None, at, bytes, &tuning, self.stream)? };
                    self.counted.add_single(copies);
                }
                Part::Packed(range) => {
                    let Self { device, stream, slots, counted } = self;
                    let mut copies = Copies::new(slots.pinned());
                    slots.down(stream, range, ROUND, &packed(0), |round, slot| {
                        gather(&mut copies, &layout, round, slot);
                        // SAFETY: the slot is ours until its event has passed; the sources are borrowed.
                        unsafe { copies.submit(device.context(), Way::Down, stream, counted) }
                    })?;
                }
            }
        }
        direct.map_or(Ok(()), |event| {
            let _range = crate::trace::wait(c"wait");
            event.wait()
        })
    }

    /// Takes long pieces out that lie in page-locked memory (any memory, across a coherent link) and submits them; the event that
    /// says they are done. `host` gives a piece's host memory if it may be used as it is.
    fn direct(
        &mut self,
        way: Way,
        sorted: &mut Vec<Placed>,
        host: impl Fn(&Placed) -> Option<*const u8>,
    ) -> Result<Option<Event>> {
        let any = self.device.copies_pageable();
        let mut copies = Copies::new(!any);
        sorted.retain(|placed| {
            let host = if placed.bytes >= DIRECT { host(placed) } else { None };
            let taken = host.filter(|&host| any || is_pinned(host, placed.bytes));
            taken.into_iter().for_each(|host| copies.push(placed.address, host, placed.bytes));
            taken.is_none()
        });
        if copies.is_empty() {
            return Ok(None);
        }
        let context = self.device.context();
        // SAFETY: each piece is borrowed on both sides, those that are written exclusively, and waited for: by the event, or
        // where there is an error.
        unsafe { copies.submit(context, way, self.stream, &mut self.counted)? };
        Event::record(context, self.stream).map(Some)
    }

    /// The kernel that brings many small blocks to their places, where there are many and the device has it; the slots get room
    /// for its tables.
    fn kernel(&mut self, layout: &Layout) -> Option<Kernel> {
        let can = self.device.platform().capabilities();
        // Without I/O coherency the device would have to be idle before it sees what was packed.
        if layout.blocks() < WORTH_LOADING || !can.device_reads_pinned || !can.io_coherent {
            return None;
        }
        let kernel = Kernel::find(self.device.context())?;
        self.slots.with_table(layout.blocks());
        Some(kernel)
    }

    /// Long blocks by themselves, where there is page-locked memory to stage them.
    fn parts(&mut self, layout: &Layout) -> Vec<Part> {
        let staged = layout.bytes() >= LONG && self.slots.pinned();
        layout.parts(if staged { LONG } else { usize::MAX })
    }
}

/// Tells whether two adjacent pieces lie in one allocation, as the parts of a slice do.
fn one_allocation() -> impl FnMut(&Placed, &Placed) -> bool {
    let mut known = 0..0;
    move |first, second| {
        if !known.contains(&first.address) {
            known = allocation(first.address).unwrap_or(0..0);
        }
        known.contains(&first.address) && known.contains(&second.address) && second.end() <= known.end
    }
}

/// The copies of one round.
fn gather(copies: &mut Copies, layout: &Layout, round: Range<usize>, packed: NonNull<u8>) {
    copies.clear();
    for copy in layout.copies(round) {
        copies.push(copy.address, packed.as_ptr().wrapping_add(copy.offset), copy.bytes);
    }
}
