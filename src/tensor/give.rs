//! Giving a tensor's memory away: as a `Vec`, or as cudarc's slice.

use std::sync::Arc;

use cudarc::driver::CudaSlice;

use super::TransferTensor;
use super::existing::slice_region;
use crate::driver::memory::{Registered, note_write, rehome_slice};
use crate::driver::{Event, Stream};
use crate::element::Element;
use crate::error::{Error, Refused, Result};
use crate::plan::Strategy;

impl<T: Element> TransferTensor<T> {
    /// The elements as a `Vec`: the very one it was made from, where there is one and the host has the newest bytes;
    /// else a copy in ordinary memory.
    ///
    /// # Errors
    /// As [`host`](Self::host); the tensor comes back.
    pub fn into_vec(self) -> Result<Vec<T>, Refused<Self>> {
        match self.settle_host() {
            Ok(()) => self.take_vec(),
            Err(error) => Err(Refused { error, value: self }),
        }
    }

    /// Makes the host's bytes current, and waits until nothing uses them.
    fn settle_host(&self) -> Result<()> {
        drop(self.host()?);
        let all = 0..self.store.bytes();
        match self.store.with_state(|state| state.host.clone()) {
            Some(region) => region.wait(&all, true),
            None => Ok(()),
        }
    }

    fn take_vec(self) -> Result<Vec<T>, Refused<Self>> {
        let region = self.store.with_state(|state| {
            if state.shared {
                state.device = None;
            }
            state.host.take()
        });
        let Some(region) = region else { return Ok(Vec::new()) };
        let taken = Arc::try_unwrap(region).and_then(|region| {
            let region = match region.reclaim::<Vec<T>>() {
                Ok(values) => return Ok(values),
                Err(region) => Arc::try_unwrap(region)?,
            };
            region.reclaim::<Registered<Vec<T>>>().map(Registered::into_vec)
        });
        taken.or_else(|region| {
            self.store.with_state(|state| {
                if state.shared {
                    state.device = Some(region.clone());
                }
                state.host = Some(region);
            });
            let copied = self.host().map(|guard| guard.to_vec());
            copied.map_err(|error| Refused { error, value: self })
        })
    }

    /// The elements as cudarc's slice: on the device, in its allocation, without a copy there.
    ///
    /// # Ordering
    /// Does not block: the slice's stream waits for what runs on it.
    ///
    /// # Errors
    /// The tensor's bytes are not device memory of its own (they are host-visible, shared, or there is no device); it
    /// comes back.
    pub fn into_cuda_slice(self) -> Result<CudaSlice<T>, Refused<Self>> {
        match self.bring_whole_slice() {
            Ok(stream) => self.take_slice(&stream),
            Err(error) => Err(Refused { error, value: self }),
        }
    }

    fn bring_whole_slice(&self) -> Result<Stream> {
        let device = self.store.need_device("into_cuda_slice")?;
        if self.strategy() != Strategy::Streamed {
            return Err(Error::unsupported(
                "a CudaSlice",
                "the tensor's memory is host-visible, not the device's alone",
            ));
        }
        if self.is_empty() {
            return Err(Error::unsupported("a CudaSlice", "there is no element, so no device memory"));
        }
        self.store.check_writable()?;
        let _bound = device.context().enter()?;
        let all = 0..self.store.bytes();
        let existing = self.store.with_state(|state| state.device.as_ref().and_then(|region| region.stream()));
        // A stream of ours stays ours. And a per-thread stream is this thread's from here on.
        let existing = existing.filter(|stream| !stream.is_ours());
        let stream = Stream::of_caller(existing.as_ref().map_or(device.stream(), Stream::cuda));
        stream.check_not_capturing("into_cuda_slice")?;
        let (region, mut submitted) = self.store.on_device(&all, true, &stream)?;
        region.order(&stream, &all, true)?;
        submitted.close(&Arc::new(Event::record(device.context(), &stream)?));
        Ok(stream)
    }

    fn take_slice(self, stream: &Stream) -> Result<CudaSlice<T>, Refused<Self>> {
        let refuse = |why: &str, value| Err(Refused { error: Error::unsupported("a CudaSlice", why), value });
        let Some(region) = self.store.with_state(|state| state.device.take()) else {
            return refuse("there is no device memory", self);
        };
        let region = match Arc::try_unwrap(region) {
            Ok(region) => region,
            Err(region) => {
                self.store.with_state(|state| state.device = Some(region));
                return refuse("its device memory is in use", self);
            }
        };
        // The stream, which may be ours, is kept until the slice is the caller's.
        let (Ok(address), Some(own)) = (region.device(), region.stream()) else {
            self.store.with_state(|state| state.device = Some(Arc::new(region)));
            return refuse("its device memory has no stream", self);
        };
        match (region.reclaim::<CudaSlice<T>>(), self.store.device_handle()) {
            (Ok(slice), Some(device)) => {
                let context = device.context();
                let mut slice = match rehome_slice(context, slice, stream) {
                    Ok(slice) => slice,
                    Err((error, slice)) => {
                        let region = slice_region(device, slice, (address, own), stream);
                        self.store.with_state(|state| state.device = Some(Arc::new(region)));
                        return Err(Refused { error, value: self });
                    }
                };
                // A failure here is a fault: the slice's next use reports it.
                let _ = note_write(context, &mut slice, stream);
                Ok(slice)
            }
            (Ok(_), None) => refuse("there is no device", self),
            (Err(region), _) => {
                self.store.with_state(|state| state.device = Some(region));
                refuse("its device memory is not a slice of this element type that only it holds", self)
            }
        }
    }
}
