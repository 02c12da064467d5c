//! A slice's way to ordinary memory, for where there is no page-locked. The device's own thread copies it, and waits for it: who hands it over
//! does not.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use cudarc::driver::CudaSlice;
use parking_lot::Mutex;

use super::fetch::{Ends, Points, SUBMIT, Source, points};
use super::landed::HostTensor;
use crate::complete::{Job, Signal};
use crate::device::Device;
use crate::driver::lane::Passed;
use crate::driver::memory::{SharedSlice, adopt_slice, slice_address};
use crate::driver::{Pending, Stream, Way};
use crate::element::Element;
use crate::error::{Error, Kind, Refused, Result};

/// A copy from an `S` of `T`: prepared by who has it, launched by anybody.
#[allow(missing_debug_implementations)] // No caller sees one.
pub struct Unpinned<T: Element, S: Source> {
    /// Until it is launched.
    source: Option<S>,
    address: u64,
    elements: usize,
    after: Points,
    jobs: Sender<Job>,
    landed: Arc<Mutex<Option<Landed<T, S>>>>,
    told: Arc<Signal>,
    device: Device,
}

type Landed<T, S> = (Ends<S, ()>, Vec<T>);

/// Tells, also if the job is never run.
struct Teller(Arc<Signal>);

impl Drop for Teller {
    fn drop(&mut self) {
        self.0.set(Err(Error::new(Kind::Thread { what: "transfer-stage did not get to the copy".into() })));
    }
}

impl<T: Element, S: Source> Unpinned<T, S> {
    /// Prepares a copy of `elements` elements, at what `address` says, after what `producer` has been given.
    ///
    /// # Errors
    /// A stream is being captured, the driver refused, or there is no thread; the source comes back.
    fn prepare(
        device: &Device,
        mut source: S,
        elements: usize,
        producer: &Stream,
        address: impl FnOnce(&mut S, &Stream) -> Result<u64>,
    ) -> Result<Self, Refused<S>> {
        let context = device.context();
        let prepare = || {
            let jobs = device.background().queue()?;
            let _bound = context.to_submit()?;
            producer.check_not_capturing(SUBMIT)?;
            let address = address(&mut source, producer)?;
            Ok((jobs, address, points(context, producer)?))
        };
        match prepare() {
            Ok((jobs, address, after)) => Ok(Self {
                source: Some(source),
                address,
                elements,
                after,
                jobs,
                landed: Arc::default(),
                told: Arc::new(Signal::new()),
                device: device.clone(),
            }),
            Err(error) => Err(Refused { error, value: source }),
        }
    }

    /// What is to be waited for.
    pub(crate) fn pending(&self) -> Pending {
        Pending::Told(self.told.clone())
    }

    /// Leaves the copy to the device's thread, once.
    pub(crate) fn launch(&mut self) {
        let Some(source) = self.source.take() else { return };
        let (device, landed, teller) = (self.device.clone(), self.landed.clone(), Teller(self.told.clone()));
        let (address, elements, after) = (self.address, self.elements, std::mem::take(&mut self.after));
        let ends = Ends::new(source, (), &self.device);
        let job = move || {
            let bytes = elements.saturating_mul(size_of::<T>());
            let copied = device.on_copy_stream(Way::Down, bytes, after.iter().flatten(), |lane| {
                // SAFETY: the source has as many elements (`prepare`) and is kept until the copy has run, which comes after what its
                // stream was given.
                unsafe { device.download_from::<T>(address, elements, lane) }
            });
            teller.0.set(match copied {
                Ok((values, Ok(()))) => values.map(|values| *landed.lock() = Some((ends, values))),
                Ok((_, Err(error))) => {
                    ends.leak();
                    Err(error)
                }
                // Nothing was submitted.
                Err(error) => Err(error),
            });
        };
        // One that can not be sent is dropped, and tells.
        let _ = self.jobs.send(Box::new(job));
    }

    /// The elements, which have come.
    ///
    /// # Errors
    /// It was not launched.
    pub(crate) fn land(self, _passed: &Passed) -> Result<HostTensor<T>> {
        let landed = self.landed.lock().take();
        let Some((ends, values)) = landed else {
            return Err(Error::unsupported("landing a copy", "it was not launched"));
        };
        drop(ends);
        Ok(HostTensor::of_values(&self.device, values))
    }

    /// The source again, if it is not being copied.
    pub(crate) fn back(self) -> Option<S> {
        self.source
    }
}

impl<T: Element> Unpinned<T, CudaSlice<T>> {
    /// Takes a slice over.
    ///
    /// # Errors
    /// See [`prepare`](Unpinned::prepare).
    pub(crate) fn owned(device: &Device, slice: CudaSlice<T>) -> Result<Self, Refused<CudaSlice<T>>> {
        let (elements, producer) = (slice.len(), Stream::of_caller(slice.stream()));
        Self::prepare(device, slice, elements, &producer, |slice, producer| {
            adopt_slice(device.context(), slice, producer)
        })
    }
}

impl<T: Element> Unpinned<T, SharedSlice<T>> {
    /// Reads what others may read too.
    ///
    /// # Errors
    /// See [`prepare`](Unpinned::prepare).
    pub(crate) fn shared(device: &Device, slice: Arc<CudaSlice<T>>) -> Result<Self> {
        let (elements, producer) = (slice.len(), Stream::of_caller(slice.stream()));
        let shared = SharedSlice::new(device.context(), slice);
        let prepared = Self::prepare(device, shared, elements, &producer, |slice, producer| {
            slice.with(|slice| slice_address(device.context(), slice, producer))
        });
        prepared.map_err(|refused| refused.error)
    }
}
