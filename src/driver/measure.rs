//! What a calibration needs of the driver: memory to copy between, and copies that are timed.
//!
//! The link is timed by events, on the device's own clock; what the caller waits for, by the wall.

use std::ffi::c_uint;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Way, synchronize};
use super::copy;
use super::event::Event;
use super::load::Driver;
use super::memory::{Pinned, Registered, Registration};
use super::stream::Stream;
use crate::calibrate::crew::crew;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::os::Block;

/// What a thread copies at once when copying on the host is timed, in bytes.
pub(crate) const PIECE: usize = 1 << 20;

/// The memory that a calibration copies between, and the streams it copies on. Both streams are idle between two calls that
/// succeeded; dropping it waits for them.
#[derive(Debug)]
pub(crate) struct Rig {
    context: Arc<Context>,
    up: Stream,
    down: Stream,
    elapsed: ElapsedFn,
    events: [TimedEvent; 2],
    /// `None` only while it is dropped.
    memory: Option<Memory>,
}

#[derive(Debug)]
struct Memory {
    device: DeviceBlock,
    pinned: PinnedBlock,
    pinned_bytes: usize,
    pageable: Block,
    /// Of the device's memory and of the ordinary.
    bytes: usize,
}

/// How much of each a [`Rig`] has, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Of page-locked memory.
    pub(crate) pinned: usize,
    /// Of device memory, and as much ordinary memory.
    pub(crate) copied: usize,
}

/// Page-locked memory: registering memory that was touched is many times faster than `cuMemHostAlloc` where either locks
/// pages.
#[derive(Debug)]
enum PinnedBlock {
    Registered { host: NonNull<u8>, _memory: Registered<Block> },
    Allocated(Pinned),
}

impl PinnedBlock {
    fn new(context: &Arc<Context>, bytes: usize, register: bool) -> Result<Self> {
        if register {
            let block = Block::zeroed(bytes)?;
            let host = block.address();
            // SAFETY: the block is ours and stays mapped until `Registered` has unpinned it.
            if let Ok(registration) = unsafe { Registration::new(context, host, bytes, false) } {
                return Ok(Self::Registered { host, _memory: Registered::new(registration, block) });
            }
        }
        Pinned::alloc(context, bytes).map(Self::Allocated)
    }

    fn host(&self) -> *mut u8 {
        match self {
            Self::Registered { host, .. } => host.as_ptr(),
            Self::Allocated(pinned) => pinned.host().as_ptr(),
        }
    }
}

#[derive(Debug)]
struct DeviceBlock {
    address: u64,
    context: Arc<Context>,
}

impl DeviceBlock {
    fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _bound = context.enter()?;
        let mut address = 0;
        // SAFETY: the context is current; the call writes one address.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut address, bytes) })?;
        Ok(Self { address, context: context.clone() })
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        let freed = self.context.enter().and_then(|_bound| {
            // SAFETY: from `cuMemAlloc`, freed once; the rig has waited for its streams.
            check("cuMemFree", unsafe { sys::cuMemFree_v2(self.address) })
        });
        if freed.is_err() {
            self.context.counters().free_errors.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The signature under the plain name, which drivers keep; cudarc binds that of its level.
type ElapsedFn = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> c_uint;

/// An event that keeps the time.
#[derive(Debug)]
struct TimedEvent {
    raw: sys::CUevent,
    context: Arc<Context>,
}

impl TimedEvent {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let _bound = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: the context is current; the call writes one handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Self { raw, context: context.clone() })
    }

    /// The context is current.
    fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles are alive and of the current context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.handle()) })
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.enter() {
            // SAFETY: ours, and nobody else has the handle.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

/// An address that threads of a crew share; each touches its own part.
#[derive(Clone, Copy)]
struct Shared(*mut u8);

// SAFETY: an address only; `Rig`'s methods give each thread a part of its own.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// A method rather than the field, so that a closure captures the whole.
    ///
    /// # Safety
    /// `offset` lies within the memory.
    unsafe fn at(self, offset: usize) -> *mut u8 {
        // SAFETY: the caller's.
        unsafe { self.0.add(offset) }
    }
}

impl Rig {
    /// `register`: page-lock memory of our own; where that is refused, and without it, the driver allocates.
    ///
    /// # Errors
    /// No room, or a refused call. Nothing is left behind.
    pub(crate) fn new(context: &Arc<Context>, sizes: Sizes, register: bool) -> Result<Self> {
        // SAFETY: the signature of the function's first version.
        let elapsed: ElapsedFn = unsafe { Driver::get()?.optional("cuEventElapsedTime") }
            .ok_or_else(|| Error::unsupported("calibration", "the driver has no cuEventElapsedTime"))?;
        let (up, down) = (context.fresh_stream()?, context.fresh_stream()?);
        let events = [TimedEvent::new(context)?, TimedEvent::new(context)?];
        let memory = Memory {
            device: DeviceBlock::new(context, sizes.copied)?,
            pinned: PinnedBlock::new(context, sizes.pinned, register)?,
            pinned_bytes: sizes.pinned,
            pageable: Block::zeroed(sizes.copied)?,
            bytes: sizes.copied,
        };
        Ok(Self { context: context.clone(), up, down, elapsed, events, memory: Some(memory) })
    }

    fn memory(&self) -> Result<&Memory> {
        self.memory.as_ref().ok_or_else(|| Error::unsupported("calibration", "it is over"))
    }

    fn stream(&self, way: Way) -> &Stream {
        match way {
            Way::Up => &self.up,
            Way::Down => &self.down,
        }
    }

    fn idle(&self) -> Result<()> {
        self.up.synchronize().and(self.down.synchronize())
    }

    fn lane(&self, way: Way) -> Result<Lane<'_>> {
        Ok(Lane { context: &self.context, stream: self.stream(way), way, device: self.memory()?.device.address })
    }

    /// Seconds between the two events, which have passed.
    fn elapsed(&self) -> Result<f64> {
        let mut milliseconds = 0f32;
        let [start, end] = &self.events;
        let _bound = self.context.to_submit()?;
        // SAFETY: both were recorded; the call writes one number.
        let code = unsafe { (self.elapsed)(&mut milliseconds, start.raw, end.raw) };
        if code != 0 {
            return Err(Error::new(crate::error::Kind::Driver {
                call: "cuEventElapsedTime",
                code,
                name: "refused".into(),
            }));
        }
        Ok(f64::from(milliseconds) * 1e-3)
    }

    /// The largest copy that [`link`](Rig::link) and [`both`](Rig::both) make, in bytes: half of each memory.
    pub(crate) fn largest(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.pinned_bytes.min(memory.bytes) / 2)
    }

    /// Seconds on the device's clock that `times` copies of `bytes` bytes from or to page-locked memory take, one behind the
    /// other; of at most the [`largest`](Rig::largest) size.
    pub(crate) fn link(&self, way: Way, bytes: usize, times: usize) -> Result<f64> {
        let bytes = bytes.min(self.largest());
        let (host, offset) = self.half(way)?;
        let (lane, stream) = (self.lane(way)?, self.stream(way));
        {
            let _bound = self.context.to_submit()?;
            self.events[0].record(stream)?;
            for _ in 0..times {
                // SAFETY: this direction's half of both memories; nobody else touches it before the wait below.
                unsafe { lane.submit(host, offset, bytes)? };
            }
            self.events[1].record(stream)?;
        }
        stream.synchronize()?;
        self.elapsed()
    }

    /// Seconds on the device's clock until both directions have made `times` copies at once.
    pub(crate) fn both(&self, up: usize, down: usize, times: usize) -> Result<f64> {
        let most = self.largest();
        let (to, from) = (self.half(Way::Up)?, self.half(Way::Down)?);
        let (up_lane, down_lane) = (self.lane(Way::Up)?, self.lane(Way::Down)?);
        {
            let _bound = self.context.to_submit()?;
            self.events[0].record(&self.up)?;
            self.down.wait_for(&Event::record(&self.context, &self.up)?)?;
            for _ in 0..times {
                // SAFETY: each direction has a half of both memories for itself, until the waits below.
                unsafe { up_lane.submit(to.0, to.1, up.min(most))? };
                // SAFETY: as above.
                unsafe { down_lane.submit(from.0, from.1, down.min(most))? };
            }
            self.up.wait_for(&Event::record(&self.context, &self.down)?)?;
            self.events[1].record(&self.up)?;
        }
        self.idle()?;
        self.elapsed()
    }

    /// This direction's half of the page-locked memory and of the device's.
    fn half(&self, way: Way) -> Result<(*mut u8, usize)> {
        let (host, half) = (self.memory()?.pinned.host(), self.largest());
        match way {
            Way::Up => Ok((host, 0)),
            // SAFETY: at most the middle of the block.
            Way::Down => Ok((unsafe { host.add(half) }, half)),
        }
    }

    /// How long the caller waits for one copy of `bytes` bytes of page-locked memory.
    pub(crate) fn latency(&self, way: Way, bytes: usize) -> Result<Duration> {
        let (host, offset) = self.half(way)?;
        let bytes = bytes.min(self.largest());
        let lane = self.lane(way)?;
        let start = Instant::now();
        let event = {
            let _bound = self.context.to_submit()?;
            // SAFETY: as in `link`; the wait below ends it.
            unsafe { lane.submit(host, offset, bytes)? };
            Event::record(&self.context, lane.stream)?
        };
        event.wait()?;
        Ok(start.elapsed())
    }

    /// Copies `bytes` bytes of ordinary memory the driver's own way: seconds on the device's clock, and the caller's wait.
    pub(crate) fn by_driver(&self, way: Way, bytes: usize) -> Result<(f64, Duration)> {
        let memory = self.memory()?;
        let bytes = bytes.min(memory.bytes);
        let (lane, stream) = (self.lane(way)?, self.stream(way));
        let start = Instant::now();
        {
            let _bound = self.context.to_submit()?;
            self.events[0].record(stream)?;
            // SAFETY: nobody else touches the memory before the wait below.
            unsafe { lane.submit(memory.pageable.address().as_ptr(), 0, bytes)? };
            self.events[1].record(stream)?;
        }
        stream.synchronize()?;
        let waited = start.elapsed();
        Ok((self.elapsed()?, waited))
    }

    /// How long the caller waits for `bytes` bytes of ordinary memory to go the way that transfers take.
    pub(crate) fn by_engine(&self, device: &Device, way: Way, bytes: usize) -> Result<Duration> {
        let memory = self.memory()?;
        let bytes = bytes.min(memory.bytes);
        let (host, address) = (memory.pageable.address().as_ptr(), memory.device.address);
        let stream = self.stream(way);
        let start = Instant::now();
        let _bound = self.context.to_submit()?;
        // SAFETY: both memories are `bytes` long and nobody else touches them before the wait below.
        unsafe {
            match way {
                Way::Up => device.staging_up().up(&self.context, address, host, bytes, stream)?,
                Way::Down => device.staging_down().down(&self.context, host, address, bytes, stream)?,
            }
        }
        stream.synchronize()?;
        Ok(start.elapsed())
    }

    /// Whether [`staged`](Rig::staged) has room for that.
    pub(crate) fn fits(&self, chunk: usize, threads: usize) -> bool {
        let (threads, chunk) = (threads.max(1), chunk.max(1));
        // Each thread has slots and places of its own; two places at least, since two pieces are under way.
        self.memory.as_ref().is_some_and(|memory| {
            memory.bytes / chunk / threads >= 2
                && threads.checked_mul(2 * chunk).is_some_and(|needs| needs <= memory.pinned_bytes)
        })
    }

    /// How long `threads` threads take to carry `bytes` bytes between ordinary memory and the device, each through two slots of
    /// `chunk` bytes of page-locked memory. More bytes than there are go round.
    pub(crate) fn staged(&self, way: Way, chunk: usize, threads: usize, bytes: usize) -> Result<Duration> {
        let memory = self.memory()?;
        let (threads, chunk) = (threads.max(1), chunk.max(1));
        let places = memory.bytes / chunk / threads;
        if !self.fits(chunk, threads) {
            return Err(Error::overflow(format!("{threads} threads with slots of {chunk} bytes")));
        }
        let (pinned, pageable) = (Shared(memory.pinned.host()), Shared(memory.pageable.address().as_ptr()));
        let (next, pieces, lane) = (AtomicUsize::new(0), bytes / chunk, self.lane(way)?);
        let taken = crew(threads, &|worker| {
            let mut slots = Slots { lane, chunk, worker, pinned, pageable, busy: [None, None] };
            let (mut result, mut turn) = (Ok(()), 0);
            while result.is_ok() && next.fetch_add(1, Ordering::Relaxed) < pieces {
                result = slots.carry(turn, worker * places + turn % places);
                turn += 1;
            }
            result.and(slots.finish())
        });
        self.idle()?;
        taken
    }

    /// How long `threads` threads take to copy `pieces` pieces of [`PIECE`] bytes each from ordinary to page-locked memory.
    pub(crate) fn memcpy(&self, threads: usize, pieces: usize) -> Result<Duration> {
        let memory = self.memory()?;
        let threads = threads.max(1);
        let (from, to) = (memory.bytes / threads / PIECE, memory.pinned_bytes / threads / PIECE);
        if from == 0 || to == 0 {
            return Err(Error::overflow(format!("a piece for each of {threads} threads")));
        }
        let (source, target) = (Shared(memory.pageable.address().as_ptr()), Shared(memory.pinned.host()));
        crew(threads, &|worker| {
            for index in 0..pieces {
                let read = (worker * from + index % from) * PIECE;
                let write = (worker * to + index % to) * PIECE;
                // SAFETY: this thread's part of both blocks; the streams are idle.
                unsafe { std::ptr::copy_nonoverlapping(source.at(read), target.at(write), PIECE) };
            }
            Ok(())
        })
    }
}

/// One direction's way between host memory and the device's.
#[derive(Clone, Copy)]
struct Lane<'a> {
    context: &'a Arc<Context>,
    stream: &'a Stream,
    way: Way,
    device: u64,
}

impl Lane<'_> {
    /// Submits one copy between `host` and the device memory from `offset` on. The context is current.
    ///
    /// # Safety
    /// `offset + bytes` lies within the device memory; `host` is valid for `bytes` bytes and left alone until the stream has
    /// passed.
    unsafe fn submit(&self, host: *mut u8, offset: usize, bytes: usize) -> Result<()> {
        let device = self.device + offset as u64;
        // SAFETY: the caller's.
        unsafe {
            match self.way {
                Way::Up => copy::host_to_device(device, host, bytes, self.stream),
                Way::Down => copy::device_to_host(host, device, bytes, self.stream),
            }
        }
    }
}

/// One thread's two slots in a staged copy.
struct Slots<'a> {
    lane: Lane<'a>,
    chunk: usize,
    worker: usize,
    pinned: Shared,
    pageable: Shared,
    /// The copies that still use them, with the place in ordinary memory that a download goes to.
    busy: [Option<(Event, usize)>; 2],
}

impl Slots<'_> {
    /// Carries the piece at `place` of ordinary memory through the slot whose turn it is.
    fn carry(&mut self, turn: usize, place: usize) -> Result<()> {
        let which = turn % 2;
        self.settle(which)?;
        let (slot, place) = ((2 * self.worker + which) * self.chunk, place * self.chunk);
        if self.lane.way == Way::Up {
            // SAFETY: the slot is this thread's and idle; nobody writes to the ordinary memory meanwhile.
            unsafe { std::ptr::copy_nonoverlapping(self.pageable.at(place), self.pinned.at(slot), self.chunk) };
        }
        let _bound = self.lane.context.to_submit()?;
        // SAFETY: the slot is left alone until its event has passed; the place exists in both memories.
        unsafe { self.lane.submit(self.pinned.at(slot), place, self.chunk)? };
        let event = Event::record(self.lane.context, self.lane.stream)?;
        if let Some(busy) = self.busy.get_mut(which) {
            *busy = Some((event, place));
        }
        Ok(())
    }

    /// Waits until a slot's copy has passed, and empties it after a download.
    fn settle(&mut self, which: usize) -> Result<()> {
        let Some((event, place)) = self.busy.get_mut(which).and_then(Option::take) else { return Ok(()) };
        event.wait()?;
        if self.lane.way == Way::Down {
            let slot = (2 * self.worker + which) * self.chunk;
            // SAFETY: the slot's copy has passed. `staged` gives each thread places of its own.
            unsafe { std::ptr::copy_nonoverlapping(self.pinned.at(slot), self.pageable.at(place), self.chunk) };
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.settle(0).and(self.settle(1))
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if self.idle().or_else(|_| synchronize(self.context.cuda())).is_err() {
            // Not known to be idle: never freed.
            self.context.count_leak();
            std::mem::forget(memory);
        }
    }
}
