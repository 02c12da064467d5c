//! Making tensors: from nothing, or from memory that exists.

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::CudaSlice;

use super::region::{Owner, Region};
use super::store::{State, Store, pageable_region, pinned_region};
use super::{TransferTensor, check_elements};
use crate::device::Device;
use crate::driver::memory::{Managed, Registration, SharedSlice, adopt_slice, slice_address};
use crate::driver::{Event, Stream};
use crate::element::{Element, bytes_of, validate};
use crate::error::{Error, Kind, Refused, Result};
use crate::layout::Shape;
use crate::os::Block;
use crate::plan::{Access, Backing, Decision, Direction, HostMemory, Request, Strategy, plan};
use crate::platform::{MemoryFigures, Platform};
use crate::ranges::RangeSet;

const SHARED_MEMORY: &str = "its memory is shared with others";

/// How a tensor is to be made; from [`Device::tensor`].
///
/// ```
/// # cuda_sim::install().unwrap();
/// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
/// # let device = transfer_tensor::Device::open(gpu.ordinal())?;
/// use transfer_tensor::{Access, Strategy};
///
/// let weights = device.tensor().access(Access::reuse(100)?).from_vec(vec![0.5f32; 12], [3, 4])?;
/// assert_eq!(weights.strategy(), Strategy::Streamed);
/// println!("{}", weights.decision());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct TensorOptions<'d> {
    device: Option<&'d Device>,
    request: Request,
    pin: bool,
}

/// What fresh memory begins with.
enum Init<'a> {
    Zero,
    Copy(&'a [u8]),
}

impl<'d> TensorOptions<'d> {
    pub(crate) fn new(device: &'d Device) -> Self {
        Self { device: Some(device), request: Request::new(0), pin: false }
    }

    /// For tensors that no device uses.
    pub fn host_only() -> TensorOptions<'static> {
        TensorOptions { device: None, request: Request::new(0), pin: false }
    }

    /// How often the GPU touches the elements; streaming (once) if not said.
    pub fn access(mut self, access: Access) -> Self {
        self.request.access = access;
        self
    }

    /// Which way the elements go; host to device if not said.
    pub fn direction(mut self, direction: Direction) -> Self {
        self.request.direction = direction;
        self
    }

    /// Forces a strategy instead of the planned one. One that the machine does not have is an error.
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.request.strategy = Some(strategy);
        self
    }

    /// Forces the kind of memory. One that can not be had is an error, where the planned one would be replaced.
    pub fn backing(mut self, backing: Backing) -> Self {
        self.request.backing = Some(backing);
        self
    }

    /// Registers (page-locks) the memory that a tensor is made from, so that copies of it are asynchronous. Worth it for
    /// memory that is copied several times: registering 1 GiB takes some 46 ms on an H200's host. Where it is refused, copies
    /// go through pinned staging, and [`TransferTensor::is_pinned`] says `false`. Not for maps of files that were just written:
    /// the kernel may make it wait for their write-back.
    pub fn pin(mut self, pin: bool) -> Self {
        self.pin = pin;
        self
    }

    fn decide(&self, bytes: usize, host: HostMemory) -> Result<Decision> {
        let mut request = self.request.clone();
        request.bytes = bytes as u64;
        request.host = host;
        match self.device {
            Some(device) => device.plan(&request),
            None => {
                let no_limit = MemoryFigures::new(u64::MAX, u64::MAX);
                plan(&Platform::host_only("no device was given"), &no_limit, &request)
            }
        }
    }

    /// A tensor of zeros. Where the bytes live on the device alone, no memory is touched before the first access.
    ///
    /// # Errors
    /// The shape is too large, a forced strategy or backing is not to be had here, or there is no memory.
    pub fn zeros<T: Element>(self, shape: impl Into<Shape>) -> Result<TransferTensor<T>> {
        let shape = shape.into();
        let bytes = shape.bytes(size_of::<T>())?;
        self.fresh(shape, bytes, Init::Zero)
    }

    /// A tensor with a copy of `values`, in memory of the planned kind.
    ///
    /// # Errors
    /// As [`zeros`](Self::zeros); the shape does not have as many elements.
    pub fn from_slice<T: Element>(self, values: &[T], shape: impl Into<Shape>) -> Result<TransferTensor<T>> {
        let shape = shape.into();
        check_elements(&shape, values.len())?;
        self.fresh(shape, size_of_val(values), Init::Copy(bytes_of(values)))
    }

    fn fresh<T: Element>(self, shape: Shape, bytes: usize, init: Init<'_>) -> Result<TransferTensor<T>> {
        let mut decision = self.decide(bytes, HostMemory::Any)?;
        let state = match decision.strategy {
            _ if bytes == 0 => State::default(),
            Strategy::Streamed => match (init, self.device) {
                (Init::Copy(values), Some(device)) => {
                    let region =
                        pinned_region(device, bytes).or_else(|_| pageable_region(bytes, Some(device.clone())))?;
                    on_host_only(filled(region, &Init::Copy(values))?)
                }
                // Current nowhere: zeros, made where they are first asked for.
                _ => State::default(),
            },
            _ => both_sides(self.shared_region(&mut decision, bytes, &init)?),
        };
        let store = Store::new::<T>(self.device.cloned(), bytes, decision, None, state);
        Ok(TransferTensor::new(store, shape))
    }

    /// Memory that both sides see, of the decided kind; of another kind where that is refused and none was forced.
    fn shared_region(&self, decision: &mut Decision, bytes: usize, init: &Init<'_>) -> Result<Region> {
        let Some(device) = self.device else { return filled(pageable_region(bytes, None)?, init) };
        let planned = decision.backing;
        let refused = match region_of(device, planned, bytes).and_then(|region| filled(region, init)) {
            Ok(region) => return Ok(region),
            Err(error) if self.request.backing.is_some() => return Err(error),
            Err(error) => error,
        };
        for backing in [Backing::Pinned, Backing::Registered, Backing::Pageable, Backing::Managed] {
            if backing == planned {
                continue;
            }
            if let Ok(region) = region_of(device, backing, bytes).and_then(|region| filled(region, init)) {
                decision.backing = backing;
                decision
                    .reasons
                    .push(format!("{planned} memory was refused ({refused}); {backing} memory serves instead"));
                return Ok(region);
            }
        }
        Err(refused)
    }

    /// A tensor that owns `values`. Where the device can use that memory (directly, or registered) nothing is copied; on
    /// other machines copies of it go through pinned staging, unless it is [pinned](Self::pin).
    ///
    /// # Errors
    /// As [`from_slice`](Self::from_slice); the values come back.
    pub fn from_vec<T: Element>(
        self,
        values: Vec<T>,
        shape: impl Into<Shape>,
    ) -> Result<TransferTensor<T>, Refused<Vec<T>>> {
        let shape = shape.into();
        let prepared = check_elements(&shape, values.len())
            .and_then(|()| self.decide(size_of_val(values.as_slice()), HostMemory::Pageable));
        let decision = match prepared {
            Ok(decision) => decision,
            Err(error) => return Err(Refused { error, value: values }),
        };
        self.adopt_vec(values, shape, decision)
    }

    fn adopt_vec<T: Element>(
        self,
        mut values: Vec<T>,
        shape: Shape,
        mut decision: Decision,
    ) -> Result<TransferTensor<T>, Refused<Vec<T>>> {
        let bytes = size_of_val(values.as_slice());
        let Some(host) = NonNull::new(values.as_mut_ptr()).map(NonNull::cast::<u8>).filter(|_| bytes > 0) else {
            let store = Store::new::<T>(self.device.cloned(), 0, decision, None, State::default());
            return Ok(TransferTensor::new(store, shape));
        };
        let place = match self.place(&mut decision, host, bytes, false) {
            Ok(place) => place,
            Err(error) => return Err(Refused { error, value: values }),
        };
        let state = match place {
            Place::InPlace { registration, device, shared } => {
                let (backing, owner): (_, Box<dyn Any + Send>) = match registration {
                    Some(registration) => (Backing::Registered, Box::new(RegisteredVec { registration, values })),
                    None => (Backing::Pageable, Box::new(values)),
                };
                let owner = if backing == Backing::Registered { Owner::Slow(owner) } else { Owner::Host(owner) };
                // SAFETY: the Vec owns the bytes, and does not move them when it is moved itself.
                let region = unsafe { Region::new(Some(host), device, bytes, backing, self.device.cloned(), owner) };
                if shared { both_sides(region) } else { on_host_only(region) }
            }
            Place::Copy => match self.shared_region(&mut decision, bytes, &Init::Copy(bytes_of(&values))) {
                Ok(region) => both_sides(region),
                Err(error) => return Err(Refused { error, value: values }),
            },
        };
        let copied =
            if state.shared && state.host.as_ref().is_some_and(|r| r.host().ok() != Some(host)) { bytes } else { 0 };
        let store = Store::new::<T>(self.device.cloned(), bytes, decision, None, state);
        store.count_upload(copied);
        Ok(TransferTensor::new(store, shape))
    }

    /// Where memory that exists is used from.
    fn place(&self, decision: &mut Decision, host: NonNull<u8>, bytes: usize, read_only: bool) -> Result<Place> {
        let Some(device) = self.device else {
            return Ok(Place::InPlace { registration: None, device: None, shared: true });
        };
        let register = || {
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
        let mut decision = self.decide(bytes.len(), HostMemory::ReadOnly)?;
        let read_only = Some(SHARED_MEMORY);
        if bytes.is_empty() {
            let store = Store::new::<T>(self.device.cloned(), 0, decision, read_only, State::default());
            return Ok(TransferTensor::new(store, shape));
        }
        let host = NonNull::from(part).cast::<u8>();
        let (state, copied) = match self.place(&mut decision, host, bytes.len(), true)? {
            Place::InPlace { registration, device, shared } => {
                let backing = if registration.is_some() { Backing::Registered } else { Backing::Pageable };
                let kept: Box<dyn Any + Send> = Box::new((registration, Keep(owner)));
                let owner = if backing == Backing::Registered { Owner::Slow(kept) } else { Owner::Host(kept) };
                // SAFETY: the `Arc` keeps the bytes where they are; it is only shared, so nobody writes to them.
                let region =
                    unsafe { Region::new(Some(host), device, bytes.len(), backing, self.device.cloned(), owner) };
                (if shared { both_sides(region) } else { on_host_only(region) }, 0)
            }
            Place::Copy => {
                (both_sides(self.shared_region(&mut decision, bytes.len(), &Init::Copy(part))?), bytes.len())
            }
        };
        let store = Store::new::<T>(self.device.cloned(), bytes.len(), decision, read_only, state);
        store.count_upload(copied);
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
        let mut decision = self.decide(bytes, HostMemory::Pageable)?;
        let host = start.cast::<u8>();
        if bytes == 0 {
            let store = Store::new::<T>(self.device.cloned(), 0, decision, None, State::default());
            return Ok(TransferTensor::new(store, shape));
        }
        let (state, copied) = match self.place(&mut decision, host, bytes, false)? {
            Place::InPlace { registration, device, shared } => {
                let backing = if registration.is_some() { Backing::Registered } else { Backing::Pageable };
                let kept: Box<dyn Any + Send> = Box::new((registration, owner));
                let owner = if backing == Backing::Registered { Owner::Slow(kept) } else { Owner::Host(kept) };
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
        let store = Store::new::<T>(self.device.cloned(), bytes, decision, None, state);
        store.count_upload(copied);
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

/// A `Vec` and the registration of its memory, which ends first.
#[derive(Debug)]
pub(super) struct RegisteredVec<T> {
    registration: Registration,
    values: Vec<T>,
}

impl<T> RegisteredVec<T> {
    pub(super) fn into_vec(self) -> Vec<T> {
        drop(self.registration);
        self.values
    }
}

/// An `Arc` that is only kept.
struct Keep<O: ?Sized>(#[allow(dead_code)] Arc<O>);

fn both_sides(region: Region) -> State {
    let region = Arc::new(region);
    let all = RangeSet::full(region.bytes());
    State {
        host: Some(region.clone()),
        device: Some(region),
        shared: true,
        host_current: all.clone(),
        device_current: all.clone(),
        unfenced: all,
    }
}

fn on_host_only(region: Region) -> State {
    let host_current = RangeSet::full(region.bytes());
    State { host: Some(Arc::new(region)), host_current, ..State::default() }
}

/// A tensor of nothing.
pub(super) fn empty_store<T: Element>() -> Arc<Store> {
    Store::new::<T>(None, 0, Decision::host_only(), None, State::default())
}

/// The device's side of a tensor again, from a slice that was taken out of one.
pub(super) fn slice_region<T: Element>(device: &Device, slice: CudaSlice<T>, used_by: &Stream) -> Result<Region> {
    let stream = Stream::of_caller(slice.stream());
    let (address, bytes) = (slice_address(device.context(), &slice, &stream)?, slice.num_bytes());
    let owner = Owner::Device { slice: Box::new(slice), stream, shared: false };
    // SAFETY: the slice owns `bytes` bytes at its address.
    let region = unsafe { Region::new(None, Some(address), bytes, Backing::Device, Some(device.clone()), owner) };
    // Left open: who comes next waits for the whole stream.
    let _ = region.open(used_by, &(0..bytes), true);
    Ok(region)
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

/// Memory of one kind that both sides see; not yet set, except pageable and registered, which are zeros.
fn region_of(device: &Device, backing: Backing, bytes: usize) -> Result<Region> {
    let capabilities = device.platform().capabilities();
    let region = match backing {
        Backing::Pinned => pinned_region(device, bytes)?,
        Backing::Managed if !capabilities.concurrent_managed => {
            // Any later work on the device would make a live host reference fault.
            return Err(Error::unsupported(
                "managed memory",
                "the device has no concurrent managed access: the host may not touch it while the device works",
            ));
        }
        Backing::Managed => {
            let managed = Managed::alloc(device.context(), bytes)?;
            let address = managed.address();
            let owner = Owner::Slow(Box::new(managed));
            // SAFETY: the allocation owns `bytes` bytes at its one address.
            unsafe {
                let device_address = Some(address.as_ptr() as u64);
                Region::new(Some(address), device_address, bytes, backing, Some(device.clone()), owner)
            }
        }
        Backing::Registered => {
            let block = Block::zeroed(bytes)?;
            let host = block.address();
            // SAFETY: the block is kept beside the registration, and dropped after it (fields in order).
            let registration = unsafe { Registration::new(device.context(), host, bytes, false)? };
            let address = Some(registration.device());
            let owner = Owner::Slow(Box::new((registration, block)));
            // SAFETY: the block owns `bytes` bytes, which the device sees at the registration's address.
            unsafe { Region::new(Some(host), address, bytes, backing, Some(device.clone()), owner) }
        }
        Backing::Pageable => pageable_region(bytes, Some(device.clone()))?,
        Backing::Device => {
            return Err(Error::unsupported("memory for both sides", "the host does not see the device's memory"));
        }
    };
    region.device()?;
    Ok(region)
}

/// Sets the bytes of a region that nobody else has.
fn filled(region: Region, init: &Init<'_>) -> Result<Region> {
    let host = region.host()?;
    match init {
        // Already zeros.
        Init::Zero if matches!(region.backing(), Backing::Pageable | Backing::Registered) => {}
        // SAFETY: the region is ours alone and `bytes` long.
        Init::Zero => unsafe { host.as_ptr().write_bytes(0, region.bytes()) },
        // SAFETY: as above; the values are as long as the region.
        Init::Copy(values) => unsafe {
            let len = values.len().min(region.bytes());
            std::ptr::copy_nonoverlapping(values.as_ptr(), host.as_ptr(), len);
        },
    }
    Ok(region)
}
