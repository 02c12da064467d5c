//! A slice of the device's on its way to page-locked memory, on a stream of ours. Both ends are kept until the copy has run.

use std::sync::Arc;

use cudarc::driver::CudaSlice;

use super::landed::HostTensor;
use super::store::retry_after_drain;
use crate::complete::free_later;
use crate::device::Device;
use crate::driver::lane::Passed;
use crate::driver::memory::{SharedSlice, adopt_slice, drop_bound, note_write, slice_address};
use crate::driver::{Event, Pending, Stream, copy};
use crate::element::Element;
use crate::error::{Error, Kind, Refused, Result};
use crate::pool::PinnedBuffer;

/// A copy that was submitted, from an `S`.
#[allow(missing_debug_implementations)] // No caller sees one.
pub struct Fetch<S: Send + 'static> {
    ends: Option<(S, PinnedBuffer)>,
    elements: usize,
    device: Device,
    producer: Stream,
    stream: Stream,
}

/// Page-locked memory for a slice, if that is to be had at once. (Else the slice goes the way of a tensor, which can do without.)
pub(crate) fn room<T: Element>(device: &Device, slice: &CudaSlice<T>) -> Option<PinnedBuffer> {
    if slice.num_bytes() == 0 || !device.owns(slice.stream()) {
        return None;
    }
    let acquire = || device.pool().try_acquire(slice.num_bytes());
    acquire().or_else(|error| retry_after_drain(device, error, acquire)).ok()
}

/// Keeps `owner` until `stream` has passed what it was given.
fn keep(device: &Device, producer: &Stream, stream: &Stream, owner: impl Send + 'static) {
    let (cuda, pending) = (producer.cuda().context().clone(), vec![Pending::Stream(stream.clone())]);
    free_later(device.context(), cuda, device.waiter(), Box::new(owner), pending);
}

impl<S: Send + 'static> Fetch<S> {
    /// Submits a copy of `elements` elements of `T` at `address` to `stream`, after what `producer` was given.
    ///
    /// # Errors
    /// A stream is being captured, or the driver refused; the source comes back.
    fn begin<T: Element>(
        device: &Device,
        mut source: S,
        elements: usize,
        target: PinnedBuffer,
        (producer, stream): (Stream, Stream),
        address: impl FnOnce(&mut S, &Stream) -> Result<u64>,
    ) -> Result<Self, Refused<S>> {
        const SUBMIT: &str = "submitting to an egress pool";
        let (context, bytes) = (device.context(), elements * size_of::<T>());
        let submit = || {
            let _range = crate::trace::range(c"download", bytes);
            let _bound = context.to_submit()?;
            producer.check_not_capturing(SUBMIT)?;
            let address = address(&mut source, &producer)?;
            stream.wait_for(&Event::record(context, &producer)?)?;
            if producer.is_per_thread() {
                // Other threads' too, for which the legacy stream waits.
                let legacy = Stream::of_caller(&context.cuda().default_stream());
                legacy.check_not_capturing(SUBMIT)?;
                stream.wait_for(&Event::record(context, &legacy)?)?;
            }
            if bytes > target.capacity() {
                return Err(Error::new(Kind::TooLarge { bytes: bytes as u64, most: target.capacity() as u64 }));
            }
            // SAFETY: the source has as many bytes, the target room for them, and both are kept until the copy has run.
            unsafe { copy::device_to_host(target.host().as_ptr(), address, bytes, &stream) }
        };
        match submit() {
            Ok(()) => Ok(Self { ends: Some((source, target)), elements, device: device.clone(), producer, stream }),
            Err(error) => {
                // A part of it may be under way.
                keep(device, &producer, &stream, target);
                Err(Refused { error, value: source })
            }
        }
    }

    /// The elements, which have come; nothing else is left of it.
    ///
    /// # Errors
    /// A byte is no value of the type (`bool`).
    pub(crate) fn land<T: Element>(mut self, _passed: &Passed) -> Result<HostTensor<T>> {
        let Some((source, target)) = self.ends.take() else {
            return Err(Error::unsupported("landing a copy", "it has landed"));
        };
        drop_bound(self.device.context(), self.producer.cuda().context(), source);
        HostTensor::in_buffer(&self.device, target, self.elements)
    }
}

impl<T: Element> Fetch<CudaSlice<T>> {
    /// Takes a slice over.
    ///
    /// # Errors
    /// See [`begin`](Fetch::begin).
    pub(crate) fn owned(
        device: &Device,
        slice: CudaSlice<T>,
        target: PinnedBuffer,
        streams: (Stream, Stream),
    ) -> Result<Self, Refused<CudaSlice<T>>> {
        let elements = slice.len();
        Self::begin::<T>(device, slice, elements, target, streams, |slice, producer| {
            adopt_slice(device.context(), slice, producer)
        })
    }

    /// The slice again while the copy runs, for which its stream waits. `None` where that can not be had.
    pub(crate) fn back(mut self) -> Option<CudaSlice<T>> {
        let context = self.device.context();
        let producer = Stream::of_caller(self.producer.cuda());
        let order = || {
            let _bound = context.to_submit()?;
            producer.wait_for(&Event::record(context, &self.stream)?)
        };
        order().ok()?;
        let (mut slice, target) = self.ends.take()?;
        keep(&self.device, &producer, &self.stream, target);
        // A failure here is a fault: the slice's next use reports it.
        let _ = note_write(context, &mut slice, &producer);
        Some(slice)
    }
}

impl<T: Element> Fetch<SharedSlice<T>> {
    /// Reads what others may read too.
    ///
    /// # Errors
    /// See [`begin`](Fetch::begin).
    pub(crate) fn shared(
        device: &Device,
        slice: SharedSlice<T>,
        elements: usize,
        target: PinnedBuffer,
        streams: (Stream, Stream),
    ) -> Result<Self> {
        let begun = Self::begin::<T>(device, slice, elements, target, streams, |slice, producer| {
            slice.with(|slice| slice_address(device.context(), slice, producer))
        });
        begun.map_err(|refused| refused.error)
    }

    /// Another handle of the slice, which may be read while the copy runs.
    pub(crate) fn handle(&self) -> Option<Arc<CudaSlice<T>>> {
        self.ends.as_ref().and_then(|(slice, _)| slice.handle())
    }
}

impl<S: Send + 'static> Drop for Fetch<S> {
    fn drop(&mut self) {
        // Whether it has run is not known here.
        if let Some(ends) = self.ends.take() {
            keep(&self.device, &self.producer, &self.stream, ends);
        }
    }
}
