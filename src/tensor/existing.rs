//! Tensors over memory that exists: in place where the machine can use it so.

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::CudaSlice;

use super::options::{Init, TensorOptions, both_sides, on_host_only};
use super::region::{Owner, Region};
use super::store::{State, Store};
use super::{TransferTensor, check_elements};
use crate::device::Device;
use crate::driver::memory::{Registered, Registration, SharedSlice, adopt_slice, slice_address};
use crate::driver::{Event, Stream};
use crate::element::{Element, validate};
use crate::error::{Error, Kind, Refused, Result};
use crate::layout::Shape;
use crate::os::is_file_backed;
use crate::plan::{Backing, Decision, HostMemory, Strategy};
use crate::platform::MemoryModel;
use crate::ranges::RangeSet;

pub(super) const SHARED_MEMORY: &str = "its memory is shared with others";

impl<'d> TensorOptions<'d> {
    /// A tensor that owns `values`. Where the device can use that memory (directly, or registered) nothing is copied; on
    /// other machines copies of it go through pinned staging, unless it is [pinned](Self::pin).
    ///
    /// # Errors
    /// As [`from_slice`](Self::from_slice); the values come back.
    pub fn from_vec<T: Element>(
        self,
        mut values: Vec<T>,
        shape: impl Into<Shape>,
    ) -> Result<TransferTensor<T>, Refused<Vec<T>>> {
        let shape = shape.into();
        let prepared = check_elements(&shape, values.len())
            .and_then(|()| self.decide(size_of_val(values.as_slice()), HostMemory::Pageable));
        let decision = match prepared {
            Ok(decision) => decision,
            Err(error) => return Err(Refused { error, value: values }),
        };
        let bytes = size_of_val(values.as_slice());
        let host = NonNull::from(values.as_mut_slice()).cast::<u8>();
        let mut values = Some(values);
        let keep = |registration| match (registration, values.take()) {
            (Some(registration), Some(values)) => {
                Box::new(Registered::new(registration, values)) as Box<dyn Any + Send>
            }
            (_, values) => Box::new(values.unwrap_or_default()),
        };
        // SAFETY: the Vec owns the bytes, and does not move them when it is moved itself.
        match unsafe { self.over_host::<T>(host, bytes, None, decision, keep) } {
            Ok(store) => Ok(TransferTensor::new(store, shape)),
            Err(error) => Err(Refused { error, value: values.unwrap_or_default() }),
        }
    }

    /// The storage over host memory that exists: in place where the machine can use it so, else a copy.
    ///
    /// # Errors
    /// `keep` has not been called.
    ///
    /// # Safety
    /// `bytes` initialised bytes are at `host`; what `keep` makes, given the registration (which it drops first), holds them
    /// there until it is dropped, and nobody else writes to them.
    pub(super) unsafe fn over_host<T: Element>(
        &self,
        host: NonNull<u8>,
        bytes: usize,
        read_only: Option<&'static str>,
        mut decision: Decision,
        keep: impl FnOnce(Option<Registration>) -> Box<dyn Any + Send>,
    ) -> Result<Arc<Store>> {
        if bytes == 0 {
            return Ok(Store::new::<T>(self.device.cloned(), 0, decision, read_only, State::default()));
        }
        let (state, copied) = match self.place(&mut decision, host, bytes, read_only.is_some())? {
            Place::InPlace { registration, device, shared } => {
                let registered = registration.is_some();
                let kept = keep(registration);
                let (backing, owner) = match registered {
                    true => (Backing::Registered, Owner::Slow(kept)),
                    false => (Backing::Pageable, Owner::Host(kept)),
                };
                // SAFETY: the caller's.
                let region = unsafe { Region::new(Some(host), device, bytes, backing, self.device.cloned(), owner) };
                (if shared { both_sides(region) } else { on_host_only(region) }, 0)
            }
            Place::Copy => {
                // SAFETY: the caller's.
                let values = unsafe { std::slice::from_raw_parts(host.as_ptr(), bytes) };
                (both_sides(self.shared_region(&mut decision, bytes, &Init::Copy(values))?), bytes)
            }
        };
        let store = Store::new::<T>(self.device.cloned(), bytes, decision, read_only, state);
        store.count_upload(copied);
        Ok(store)
    }

    /// Where memory that exists is used from.
    fn place(&self, decision: &mut Decision, host: NonNull<u8>, bytes: usize, read_only: bool) -> Result<Place> {
        let Some(device) = self.device else {
            return Ok(Place::InPlace { registration: None, device: None, shared: true });
        };
        let register = || {
            // Machines whose GPU uses the host's page tables do not page-lock at all; who forces it gets it.
            let locks = matches!(device.platform().model(), MemoryModel::Discrete | MemoryModel::Hmm);
            let start = host.as_ptr() as usize;
            let forced = self.request.backing == Some(Backing::Registered);
            if read_only && locks && !forced && is_file_backed(start..start.saturating_add(bytes)) {
                return Err(Error::unsupported(
                    "registering a map of a file",
                    "the kernel may try to page-lock a file's pages for ever (seen on an H200's host)",
                ));
            }
            // SAFETY: the owner of the memory is kept beside the registration, and dropped after it.
            unsafe { Registration::new(device.context(), host, bytes, read_only) }
        };
        let shared = match decision.strategy {
            Strategy::Host => return Ok(Place::InPlace { registration: None, device: None, shared: true }),
            Strategy::Streamed => false,
            Strategy::ZeroCopy | Strategy::Coherent => true,
        };
        if !shared {
            let registration = if self.pin {
                register().map_err(|error| decision.reasons.push(format!("not pinned: {error}"))).ok()
            } else {
                None
            };
            let address = registration.as_ref().map(Registration::device);
            return Ok(Place::InPlace { registration, device: address, shared });
        }
        let mut refused = None;
        if decision.backing == Backing::Registered {
            match register() {
                Ok(registration) => {
                    let address = registration.device();
                    return Ok(Place::InPlace { registration: Some(registration), device: Some(address), shared });
                }
                Err(error) if self.request.backing.is_some() => return Err(error),
                Err(error) => refused = Some(error),
            }
        }
        let in_place = matches!(decision.backing, Backing::Registered | Backing::Pageable);
        if in_place && device.platform().capabilities().device_reads_pageable {
            if let Some(error) = refused {
                decision
                    .reasons
                    .push(format!("registering was refused ({error}); the device reads the memory as it is"));
            }
            decision.backing = Backing::Pageable;
            return Ok(Place::InPlace { registration: None, device: Some(host.as_ptr() as u64), shared });
        }
        if let Some(error) = refused {
            decision.backing = Backing::Pinned;
            decision
                .reasons
                .push(format!("registering was refused ({error}); the elements were copied to pinned memory"));
        }
        Ok(Place::Copy)
    }

    /// A read-only tensor over bytes that others may read too: an `Arc` of a memory map, of a `Vec<u8>`, of a file's
    /// buffer. `bytes` names the part; it must hold the shape's elements exactly, aligned for them.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use transfer_tensor::{TensorOptions, TransferTensor};
    /// let file: Arc<Vec<u8>> = Arc::new(vec![0, 1, 1, 0]);
    /// let mask: TransferTensor<bool> = TensorOptions::host_only().from_shared_bytes(file, 1..4, [3])?;
    /// assert_eq!(*mask.host()?, [true, true, false]);
    /// # Ok::<(), transfer_tensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// The range lies outside, is misaligned or of another size; a byte is no value of the type (`bool`); as
    /// [`zeros`](Self::zeros).
    pub fn from_shared_bytes<T: Element, O>(
        self,
        owner: Arc<O>,
        bytes: Range<usize>,
        shape: impl Into<Shape>,
    ) -> Result<TransferTensor<T>>
    where
        O: AsRef<[u8]> + Send + Sync + ?Sized + 'static,
    {
        let shape = shape.into();
        let part = shared_part::<T>(AsRef::<[u8]>::as_ref(&*owner), &bytes, &shape)?;
        validate::<T>(part)?;
        let decision = self.decide(bytes.len(), HostMemory::ReadOnly)?;
        // Ends the borrow of the `Arc`, which moves while its bytes stay.
        let (host, len) = (NonNull::from(part).cast::<u8>(), part.len());
        let keep = |registration| kept(registration, Keep(owner));
        // SAFETY: the `Arc` keeps the bytes where they are; it is only shared, so nobody writes to them.
        let store = unsafe { self.over_host::<T>(host, len, Some(SHARED_MEMORY), decision, keep)? };
        Ok(TransferTensor::new(store, shape))
    }

    /// A tensor that owns a slice of the device's memory; nothing is copied.
    ///
    /// # Ordering
    /// Later uses come after what cudarc's tracking knows to be running on it, and after the slice's own stream.
    ///
    /// # Errors
    /// The shape does not have as many elements, or the slice belongs to another context; the slice comes back.
    pub fn from_cuda_slice<T: Element>(
        self,
        mut slice: CudaSlice<T>,
        shape: impl Into<Shape>,
    ) -> Result<TransferTensor<T>, Refused<CudaSlice<T>>> {
        let shape = shape.into();
        let adopted = self.adopting(&shape, slice.len(), &slice).and_then(|(device, decision)| {
            let stream = Stream::of_caller(slice.stream());
            let _bound = device.context().enter()?;
            stream.check_not_capturing("from_cuda_slice")?;
            let address = adopt_slice(device.context(), &mut slice, &stream)?;
            Ok((device, decision, stream, address))
        });
        match adopted {
            Ok((device, decision, stream, address)) => {
                let bytes = slice.num_bytes();
                let owner = Owner::Device { slice: Box::new(slice), stream: stream.clone(), shared: false };
                Ok(TransferTensor::new(
                    device_store::<T>(device, decision, None, address, bytes, owner, &stream),
                    shape,
                ))
            }
            Err(error) => Err(Refused { error, value: slice }),
        }
    }

    /// A read-only tensor over a slice that others hold too.
    ///
    /// # Ordering
    /// As [`from_cuda_slice`](Self::from_cuda_slice).
    ///
    /// # Errors
    /// As [`from_cuda_slice`](Self::from_cuda_slice).
    pub fn from_shared_cuda_slice<T: Element>(
        self,
        slice: Arc<CudaSlice<T>>,
        shape: impl Into<Shape>,
    ) -> Result<TransferTensor<T>> {
        let shape = shape.into();
        let (device, decision) = self.adopting(&shape, slice.len(), &slice)?;
        let stream = Stream::of_caller(slice.stream());
        let address = {
            let _bound = device.context().enter()?;
            stream.check_not_capturing("from_shared_cuda_slice")?;
            slice_address(device.context(), &slice, &stream)?
        };
        let bytes = slice.num_bytes();
        let kept = Box::new(SharedSlice::new(device.context(), slice));
        let owner = Owner::Device { slice: kept, stream: stream.clone(), shared: true };
        let store = device_store::<T>(device, decision, Some(SHARED_MEMORY), address, bytes, owner, &stream);
        Ok(TransferTensor::new(store, shape))
    }

    fn adopting<T: Element>(&self, shape: &Shape, len: usize, slice: &CudaSlice<T>) -> Result<(&'d Device, Decision)> {
        check_elements(shape, len)?;
        let device = self.device.ok_or_else(|| Error::new(Kind::HostOnly { operation: "adopting a CudaSlice" }))?;
        if !device.owns(slice.stream()) {
            return Err(Error::new(Kind::WrongContext { operation: "adopting a CudaSlice" }));
        }
        let mut options = self.clone();
        options.request.strategy = Some(Strategy::Streamed);
        options.request.backing = None;
        Ok((device, options.decide(slice.num_bytes(), HostMemory::Any)?))
    }

    /// A tensor over host memory given by address, kept by `owner`.
    ///
    /// # Errors
    /// As [`from_vec`](Self::from_vec); a misaligned address. The owner is dropped.
    ///
    /// # Safety
    /// The shape's elements at `start` are initialised, and until `owner` is dropped they stay valid, do not move, and are
    /// not accessed by anybody else, on the host or on a device. `owner` may be dropped on any thread.
    pub unsafe fn from_raw_host<T: Element>(
        self,
        start: NonNull<T>,
        shape: impl Into<Shape>,
        owner: impl Any + Send,
    ) -> Result<TransferTensor<T>> {
        let shape = shape.into();
        let bytes = shape.bytes(size_of::<T>())?;
        if !start.as_ptr().is_aligned() {
            let value = start.as_ptr() as usize;
            return Err(Error::new(Kind::Misaligned { what: "the address", value, align: align_of::<T>() }));
        }
        let decision = self.decide(bytes, HostMemory::Pageable)?;
        let keep = |registration| kept(registration, owner);
        // SAFETY: the caller's.
        let store = unsafe { self.over_host::<T>(start.cast(), bytes, None, decision, keep)? };
        Ok(TransferTensor::new(store, shape))
    }

    /// A tensor over device memory given by address, kept by `owner`.
    ///
    /// # Errors
    /// The tensor options are host-only; a misaligned address; the device's own stream is being captured. The owner is
    /// dropped.
    ///
    /// # Safety
    /// As [`from_raw_host`](Self::from_raw_host), on this device. What was submitted before to streams other than
    /// [`Device::stream`] has run.
    pub unsafe fn from_raw_device<T: Element>(
        self,
        address: u64,
        shape: impl Into<Shape>,
        owner: impl Any + Send,
    ) -> Result<TransferTensor<T>> {
        let shape = shape.into();
        let bytes = shape.bytes(size_of::<T>())?;
        if !address.is_multiple_of(align_of::<T>() as u64) {
            let value = address as usize;
            return Err(Error::new(Kind::Misaligned { what: "the device address", value, align: align_of::<T>() }));
        }
        let device = self.device.ok_or_else(|| Error::new(Kind::HostOnly { operation: "adopting device memory" }))?;
        let mut options = self.clone();
        options.request.strategy = Some(Strategy::Streamed);
        options.request.backing = None;
        let decision = options.decide(bytes, HostMemory::Any)?;
        let stream = Stream::of_caller(device.stream());
        // Not freed in the order of a stream: the owner may be anything.
        let owner = Owner::Slow(Box::new(owner));
        Ok(TransferTensor::new(device_store::<T>(device, decision, None, address, bytes, owner, &stream), shape))
    }
}

enum Place {
    InPlace { registration: Option<Registration>, device: Option<u64>, shared: bool },
    Copy,
}

/// The owner of memory, and the registration of that memory, which ends first.
pub(super) fn kept<O: Any + Send>(registration: Option<Registration>, owner: O) -> Box<dyn Any + Send> {
    match registration {
        Some(registration) => Box::new(Registered::new(registration, owner)),
        None => Box::new(owner),
    }
}

/// An `Arc` that is only kept.
pub(super) struct Keep<O: ?Sized>(#[allow(dead_code)] pub(super) Arc<O>);

/// The device's side of a tensor again, from a slice that was taken out of one, with its address and its stream.
pub(super) fn slice_region<T: Element>(
    device: &Device,
    slice: CudaSlice<T>,
    (address, own): (u64, Stream),
    used_by: &Stream,
) -> Region {
    let bytes = slice.num_bytes();
    let owner = Owner::Device { slice: Box::new(slice), stream: own, shared: false };
    // SAFETY: the slice owns `bytes` bytes at its address.
    let region = unsafe { Region::new(None, Some(address), bytes, Backing::Device, Some(device.clone()), owner) };
    // Left open: who comes next waits for the whole stream.
    let _ = region.open(used_by, &(0..bytes), true);
    region
}

fn device_store<T: Element>(
    device: &Device,
    decision: Decision,
    read_only: Option<&'static str>,
    address: u64,
    bytes: usize,
    owner: Owner,
    stream: &Stream,
) -> Arc<Store> {
    // SAFETY: the owner holds `bytes` bytes at this device address.
    let region = unsafe { Region::new(None, Some(address), bytes, Backing::Device, Some(device.clone()), owner) };
    // Everything that was on the stream comes before every use of ours; with a per-thread stream, on that of every thread,
    // for which the legacy stream waits. If it can not be recorded, the use stays open and the whole stream is waited for.
    let all = 0..bytes;
    let legacy = stream.is_per_thread().then(|| Stream::of_caller(&device.context().cuda().default_stream()));
    for stream in [Some(stream), legacy.as_ref()].into_iter().flatten() {
        let before = region.open(stream, &all, true);
        let event = device.context().enter().and_then(|_bound| {
            stream.check_not_capturing("adopting device memory")?;
            Event::record(device.context(), stream)
        });
        if let Ok(event) = event {
            region.close(before, Arc::new(event));
        }
    }
    let state = State { device: Some(Arc::new(region)), device_current: RangeSet::full(bytes), ..State::default() };
    Store::new::<T>(Some(device.clone()), bytes, decision, read_only, state)
}

fn shared_part<'o, T: Element>(bytes: &'o [u8], range: &Range<usize>, shape: &Shape) -> Result<&'o [u8]> {
    let part = bytes.get(range.clone()).ok_or_else(|| {
        Error::new(Kind::Range { start: range.start, end: range.end, len: bytes.len(), unit: "bytes" })
    })?;
    if shape.bytes(size_of::<T>())? != part.len() {
        let got = part.len() / size_of::<T>();
        return Err(Error::new(Kind::Shape { shape: shape.dims().to_vec(), needs: shape.elements()?, got }));
    }
    let address = part.as_ptr() as usize;
    if !part.is_empty() && !address.is_multiple_of(align_of::<T>()) {
        return Err(Error::new(Kind::Misaligned { what: "the address", value: address, align: align_of::<T>() }));
    }
    Ok(part)
}
