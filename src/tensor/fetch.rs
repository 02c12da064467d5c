//! A slice of the device's on its way to page-locked memory, on a stream of ours. Both ends are kept until the copy has run.

use std::sync::Arc;

use cudarc::driver::CudaSlice;

use super::landed::HostTensor;
use crate::complete::free_later;
use crate::device::Device;
use crate::driver::lane::Passed;
use crate::driver::memory::{SharedSlice, adopt_slice, free_shared, free_slice, note_write, slice_address};
use crate::driver::{Context, Event, Pending, Stream, copy};
use crate::element::Element;
use crate::error::{Error, Refused, Result};
use crate::pool::PinnedBuffer;

pub(super) const SUBMIT: &str = "submitting to an egress pool";

/// A copy from an `S`: prepared by who has it, launched by anybody.
#[allow(missing_debug_implementations)] // No caller sees one.
pub struct Fetch<S: Source> {
    ends: Option<(S, PinnedBuffer)>,
    address: u64,
    elements: usize,
    /// What the stream comes after.
    after: Points,
    /// It may be under way.
    launched: bool,
    device: Device,
    stream: Arc<Stream>,
}

/// What is read: it is let go when nothing reads it any more.
pub trait Source: Send + Sized + 'static {
    #[doc(hidden)]
    fn let_go(self, device: &Device);
}

impl<T: Element> Source for CudaSlice<T> {
    fn let_go(self, device: &Device) {
        free_landed(device, self, free_slice);
    }
}

impl<T: Element> Source for SharedSlice<T> {
    fn let_go(self, device: &Device) {
        // Whoever has the last handle frees it.
        if let Some(slice) = self.into_last() {
            free_landed(device, slice, free_shared);
        }
    }
}

/// Frees a slice by `free`; by the waiter, where its stream is captured, or cudarc would block.
fn free_landed<T: Element>(device: &Device, slice: CudaSlice<T>, free: fn(&Arc<Context>, CudaSlice<T>)) {
    let (context, stream) = (device.context(), Stream::of_caller(slice.stream()));
    let mut pending = Vec::new();
    // A thread's own stream is this thread's here, which has nothing on it.
    if !stream.is_per_thread() {
        let asked = context.to_submit().and_then(|_bound| stream.check_not_capturing("freeing device memory"));
        if asked.is_err_and(|error| error.is_capturing()) {
            pending.push(Pending::Capture(stream.clone()));
        }
        if !context.cuda().has_async_alloc() {
            pending.push(Pending::Stream(stream));
        }
    }
    match pending.is_empty() {
        true => free(context, slice),
        false => free_later(context, slice.context().clone(), device.waiter(), Box::new(slice), pending),
    }
}

/// Where a slice goes on the host.
pub(crate) enum Room {
    /// Page-locked memory.
    Pinned(PinnedBuffer),
    /// Ordinary memory: there is no page-locked to be had at once.
    Ordinary,
    /// The way of a tensor: there is nothing to copy, or nothing that can be.
    Tensor,
}

/// Where a slice is to go. Waits for nobody who may give page-locked memory back.
///
/// # Errors
/// There is none, and the pool is strict.
pub(crate) fn room<T: Element>(device: &Device, slice: &CudaSlice<T>) -> Result<Room> {
    if slice.num_bytes() == 0 || !device.owns(slice.stream()) {
        return Ok(Room::Tensor);
    }
    match device.pool().try_acquire(slice.num_bytes()) {
        Ok(buffer) => Ok(Room::Pinned(buffer)),
        Err(_) if !device.pool().is_strict() => Ok(Room::Ordinary),
        Err(error) => Err(error),
    }
}

/// What copies come after.
pub(super) type Points = [Option<Event>; 2];

/// What `producer`, which is not being captured, has been given so far. A `Bound` is held.
///
/// # Errors
/// The legacy stream is being captured, or the driver refused.
pub(super) fn points(context: &Arc<Context>, producer: &Stream) -> Result<Points> {
    let mut points = [Some(Event::record(context, producer)?), None];
    if producer.is_per_thread() {
        // Other threads' too, for which the legacy stream waits.
        let legacy = Stream::of_caller(&context.cuda().default_stream());
        legacy.check_not_capturing(SUBMIT)?;
        points[1] = Some(Event::record(context, &legacy)?);
    }
    Ok(points)
}

impl<S: Source> Fetch<S> {
    /// Prepares a copy of `elements` elements of `T`, at what `address` says, after what `producer` has been given.
    ///
    /// # Errors
    /// A stream is being captured, or the driver refused; the source comes back.
    fn prepare<T: Element>(
        device: &Device,
        mut source: S,
        elements: usize,
        target: PinnedBuffer,
        (producer, stream): (&Stream, Arc<Stream>),
        address: impl FnOnce(&mut S, &Stream) -> Result<u64>,
    ) -> Result<Self, Refused<S>> {
        let context = device.context();
        let prepare = || {
            let _bound = context.to_submit()?;
            producer.check_not_capturing(SUBMIT)?;
            if target.len() != elements * size_of::<T>() {
                return Err(Error::unsupported(SUBMIT, "the buffer is of another size"));
            }
            let address = address(&mut source, producer)?;
            Ok((address, points(context, producer)?))
        };
        match prepare() {
            Ok((address, after)) => {
                let (ends, device) = (Some((source, target)), device.clone());
                Ok(Self { ends, address, elements, after, launched: false, device, stream })
            }
            Err(error) => Err(Refused { error, value: source }),
        }
    }

    /// Submits the copy, once.
    ///
    /// # Errors
    /// The driver refused. Part of it may be under way.
    pub(crate) fn launch(&mut self) -> Result<()> {
        let (Some((_, target)), false) = (&self.ends, self.launched) else { return Ok(()) };
        let _range = crate::trace::range(c"download", target.len());
        let _bound = self.device.context().to_submit()?;
        for event in self.after.iter_mut().filter_map(Option::take) {
            self.stream.wait_for(&event)?;
        }
        self.launched = true;
        // SAFETY: the source has as many bytes as the target (`prepare`), and both are kept until the copy has run.
        unsafe { copy::device_to_host(target.host().as_ptr(), self.address, target.len(), &self.stream) }
    }

    /// The elements, which have come; nothing else is left of it.
    ///
    /// # Errors
    /// It was not launched, or a byte is no value of the type (`bool`).
    pub(crate) fn land<T: Element>(mut self, _passed: &Passed) -> Result<HostTensor<T>> {
        let (Some((source, target)), true) = (self.ends.take(), self.launched) else {
            return Err(Error::unsupported("landing a copy", "it was not launched"));
        };
        source.let_go(&self.device);
        HostTensor::in_buffer(&self.device, target, self.elements)
    }
}

impl<T: Element> Fetch<CudaSlice<T>> {
    /// Takes a slice over.
    ///
    /// # Errors
    /// See [`prepare`](Fetch::prepare).
    pub(crate) fn owned(
        device: &Device,
        slice: CudaSlice<T>,
        target: PinnedBuffer,
        streams: (&Stream, Arc<Stream>),
    ) -> Result<Self, Refused<CudaSlice<T>>> {
        let elements = slice.len();
        Self::prepare::<T>(device, slice, elements, target, streams, |slice, producer| {
            adopt_slice(device.context(), slice, producer)
        })
    }

    /// The slice again: while the copy runs, if it does, for which its stream waits then. `None` where that can not be had.
    pub(crate) fn back(mut self) -> Option<CudaSlice<T>> {
        let context = self.device.context();
        let (slice, target) = self.ends.take()?;
        if !self.launched {
            return Some(slice);
        }
        let producer = Stream::of_caller(slice.stream());
        let order = || {
            let _bound = context.to_submit()?;
            producer.wait_for(&Event::record(context, &self.stream)?)
        };
        if order().is_err() {
            self.ends = Some((slice, target));
            return None;
        }
        let mut slice = slice;
        keep(&self.device, &self.stream, target);
        // A failure here is a fault: the slice's next use reports it.
        let _ = context.enter().and_then(|_bound| note_write(context, &mut slice, &producer));
        Some(slice)
    }
}

impl<T: Element> Fetch<SharedSlice<T>> {
    /// Reads what others may read too.
    ///
    /// # Errors
    /// See [`prepare`](Fetch::prepare).
    pub(crate) fn shared(
        device: &Device,
        slice: SharedSlice<T>,
        elements: usize,
        target: PinnedBuffer,
        streams: (&Stream, Arc<Stream>),
    ) -> Result<Self> {
        let prepared = Self::prepare::<T>(device, slice, elements, target, streams, |slice, producer| {
            slice.with(|slice| slice_address(device.context(), slice, producer))
        });
        prepared.map_err(|refused| refused.error)
    }

    /// Another handle of the slice, which may be read while the copy runs.
    pub(crate) fn handle(&self) -> Option<Arc<CudaSlice<T>>> {
        self.ends.as_ref().and_then(|(slice, _)| slice.handle())
    }
}

/// Keeps `owner` until `stream` has passed what it was given.
pub(super) fn keep(device: &Device, stream: &Stream, owner: impl Send + 'static) {
    let (context, pending) = (device.context(), vec![Pending::Stream(stream.clone())]);
    free_later(context, context.cuda().clone(), device.waiter(), Box::new(owner), pending);
}

/// Both ends of copies that nobody waits for. The source is let go as it has to be.
pub(super) struct Ends<S: Source, B> {
    ends: Option<(S, B)>,
    device: Device,
}

impl<S: Source, B> Ends<S, B> {
    pub(super) fn new(source: S, targets: B, device: &Device) -> Self {
        Self { ends: Some((source, targets)), device: device.clone() }
    }

    /// Gives them up for ever: the device may still be at them.
    pub(super) fn leak(mut self) {
        std::mem::forget(self.ends.take());
        self.device.context().count_leak();
    }
}

impl<S: Source, B> Drop for Ends<S, B> {
    fn drop(&mut self) {
        if let Some((source, _targets)) = self.ends.take() {
            source.let_go(&self.device);
        }
    }
}

impl<S: Source> Drop for Fetch<S> {
    fn drop(&mut self) {
        let Some((source, target)) = self.ends.take() else { return };
        let ends = Ends::new(source, target, &self.device);
        // Whether it has run is not known here.
        if self.launched {
            keep(&self.device, &self.stream, ends);
        }
    }
}
