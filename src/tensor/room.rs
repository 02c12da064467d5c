//! Tensors of any type whose bytes stay on the host, and device memory in which they take turns.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::parts;
use super::region::{Region, Submitted};
use super::store::{Store, buffer_region, device_room, pageable_region};
use super::view::Window;
use super::{DeviceMut, DeviceRef, DynTensor, SharedTensor, TransferTensor};
use crate::device::Device;
use crate::driver::{Stream, Way};
use crate::element::{DType, Element};
use crate::error::{Error, Kind, Refused, Result};
use crate::layout::Shape;
use crate::plan::Strategy;

/// A tensor of any element type for an [`Offloader`](crate::Offloader): owned, which the device may then write to, or shared, which it may only read.
///
/// Made `From` a [`TransferTensor`], a [`DynTensor`], or a [`SharedTensor`]: of shared ones that lie in the same memory (tied weights, parts of a
/// fused matrix) the bytes are kept once.
pub struct OffloadTensor {
    store: Arc<Store>,
    window: Window,
    dtype: DType,
    owned: bool,
}

impl<T: Element> From<TransferTensor<T>> for OffloadTensor {
    fn from(tensor: TransferTensor<T>) -> Self {
        let window = Window::whole(&tensor.store, &tensor.shape);
        Self { store: tensor.store, window, dtype: T::DTYPE, owned: true }
    }
}

impl From<DynTensor> for OffloadTensor {
    fn from(tensor: DynTensor) -> Self {
        let (dtype, shape) = (tensor.dtype(), tensor.shape().clone());
        let TransferTensor { store, .. } = tensor.into_bytes();
        let window = Window::whole(&store, &shape);
        Self { store, window, dtype, owned: true }
    }
}

impl<T: Element> From<SharedTensor<T>> for OffloadTensor {
    fn from(shared: SharedTensor<T>) -> Self {
        let (store, window) = shared.into_window();
        Self { store, window, dtype: T::DTYPE, owned: false }
    }
}

impl OffloadTensor {
    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The extents, in elements.
    pub fn shape(&self) -> &Shape {
        &self.window.shape
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.window.range.len()
    }

    /// The tensor, if it was given as an owned one. Nothing is copied.
    ///
    /// # Errors
    /// It is shared; it comes back.
    pub fn into_dyn(self) -> Result<DynTensor, Refused<Self>> {
        if !self.owned {
            return Err(Refused { error: Error::new(Kind::Shared { what: "the tensor" }), value: self });
        }
        let Self { store, window: Window { range, shape }, dtype, .. } = self;
        let bytes = TransferTensor::new(store, Shape::from(range.len()));
        DynTensor::from_bytes(bytes, dtype, shape).map_err(|Refused { error, value }| Refused {
            error,
            value: Self { window: Window { range, shape: value.shape }, store: value.store, dtype, owned: true },
        })
    }

    /// The tensor with its element type known, if it was given as an owned one.
    ///
    /// # Errors
    /// It is shared, the type is another one, or as [`DynTensor::downcast`]; it comes back.
    pub fn downcast<T: Element>(self) -> Result<TransferTensor<T>, Refused<Self>> {
        let downcast = self.into_dyn()?.downcast::<T>();
        downcast.map_err(|Refused { error, value }| Refused { error, value: value.into() })
    }

    /// The device that it was made for.
    pub(crate) fn device(&self) -> Result<&Device> {
        self.store.need_device("offloading")
    }

    /// CPU and GPU see the same bytes.
    pub(crate) fn is_in_place(&self) -> bool {
        self.store.with_state(|state| state.shared)
    }

    /// Tells which tensors lie in the same memory.
    pub(crate) fn memory(&self) -> usize {
        Arc::as_ptr(&self.store) as usize
    }

    /// Where it lies there.
    pub(crate) fn range(&self) -> Range<usize> {
        self.window.range.clone()
    }

    /// All bytes of that memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.store.bytes()
    }

    fn check<T: Element>(&self) -> Result<()> {
        if self.dtype == T::DTYPE {
            return Ok(());
        }
        Err(Error::new(Kind::DType { expected: T::DTYPE.name(), got: self.dtype.name() }))
    }

    fn check_writable(&self) -> Result<()> {
        if self.owned { self.store.check_writable() } else { Err(Error::new(Kind::ReadOnly { why: "it is shared" })) }
    }

    /// Brings it to the device, where it stays.
    pub(crate) fn settle(&self) -> Result<()> {
        if self.window.range.is_empty() || self.store.strategy() == Strategy::Host {
            return Ok(());
        }
        let device = self.device()?;
        self.store.bring(&self.window.range, &device.context().copy_stream(Way::Up)?).map(drop)
    }

    /// To read it where it is.
    pub(crate) fn read<T: Element>(&self, stream: &Arc<CudaStream>) -> Result<DeviceRef<'_, T>> {
        self.check::<T>()?;
        aligned::<T, _>(DeviceRef::new(&self.store, &self.window.range, stream)?, DeviceRef::address)
    }

    /// To write to it where it is; the caller holds it exclusively.
    pub(crate) fn write<T: Element>(&self, stream: &Arc<CudaStream>) -> Result<DeviceMut<'_, T>> {
        self.check::<T>()?;
        self.check_writable()?;
        aligned::<T, _>(DeviceMut::new(&self.store, &self.window.range, stream)?, DeviceMut::address)
    }
}

fn aligned<T, G>(guard: G, address: impl FnOnce(&G) -> u64) -> Result<G> {
    let (value, align) = (address(&guard) as usize, align_of::<T>());
    if value % align == 0 { Ok(guard) } else { Err(Error::new(Kind::Misaligned { what: "the address", value, align })) }
}

impl fmt::Debug for OffloadTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OffloadTensor").field("dtype", &self.dtype).field("shape", self.shape()).finish_non_exhaustive()
    }
}

/// The host memory of tensors that are not on the device.
#[derive(Debug, Clone)]
pub(crate) struct Home(Arc<Region>);

impl Home {
    /// Brings what is newer on the device to the host and gives up the device's memory. Where the host has no memory yet, or ordinary
    /// memory, it gets page-locked memory if `pin` says so and it is to be had: whether it got some. Nobody writes to the bytes from here on
    /// but through a [`Room`].
    pub(crate) fn of(tensor: &OffloadTensor, pin: bool) -> Result<(Self, bool)> {
        let (store, device) = (&tensor.store, tensor.device()?);
        let all = 0..store.bytes();
        let pinned = store.with_state(|state| state.host.as_ref().is_some_and(|host| host.is_pinned()));
        if !pin {
            store.with_state(|state| {
                if state.host.is_none() {
                    state.host = Some(Arc::new(pageable_region(all.len(), Some(device.clone()))?));
                }
                Ok::<_, Error>(())
            })?;
        }
        let mut region = store.on_host(&all, false)?;
        let shared = tensor.is_in_place();
        if pin && !shared && !region.is_pinned() && !device.copies_pageable() {
            region.wait(&all, false)?;
            if let Some(pinned) = pinned_copy(device, &region)? {
                region = Arc::new(pinned);
                store.with_state(|state| state.host = Some(region.clone()));
            }
        }
        if !shared {
            // Freed in the order of its stream, after the copy.
            drop(store.with_state(|state| {
                state.device_current.remove(&all);
                state.device.take()
            }));
        }
        let fresh = region.is_pinned() && !pinned;
        Ok((Self(region), fresh))
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.0.is_pinned()
    }

    /// Blocks until nothing writes to it any more.
    pub(crate) fn wait(&self) -> Result<()> {
        self.0.wait(&(0..self.0.bytes()), false)
    }
}

/// The bytes of ordinary memory in page-locked memory; `None` where that is refused and the pool is not strict.
fn pinned_copy(device: &Device, region: &Region) -> Result<Option<Region>> {
    let mut buffer = match device.pool().try_acquire(region.bytes()) {
        Ok(buffer) => buffer,
        Err(error) if device.pool().is_strict() => return Err(error),
        Err(_) => return Ok(None),
    };
    // SAFETY: the region owns so many bytes, nothing of the device's runs on them, and who calls keeps others from writing to them.
    let bytes = unsafe { std::slice::from_raw_parts(region.host()?.as_ptr(), region.bytes()) };
    match buffer.get_mut(..bytes.len()) {
        Some(into) => into.copy_from_slice(bytes),
        None => return Ok(None),
    }
    Ok(Some(buffer_region(device, buffer)))
}

/// Device memory that tensors take turns in.
#[derive(Debug)]
pub(crate) struct Room {
    region: Arc<Region>,
    device: Device,
}

/// A tensor's bytes in a [`Room`].
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) home: Home,
    /// In the home.
    pub(crate) from: usize,
    /// In the room.
    pub(crate) range: Range<usize>,
}

impl Room {
    /// Allocated in the order of `stream`, on which it is filled.
    pub(crate) fn new(device: &Device, bytes: usize, stream: &Stream) -> Result<Self> {
        Ok(Self { region: Arc::new(device_room(device, bytes, stream)?), device: device.clone() })
    }

    /// Submits bringing tensors here, after whatever used their places before. If it fails, what is there is of no use.
    pub(crate) fn fill(&self, places: &[Place], stream: &Stream) -> Result<()> {
        let context = self.device.context();
        let _bound = context.to_submit()?;
        let mut submitted = Submitted::default();
        let copied = places.iter().try_for_each(|Place { home, from, range }| {
            let (source, target) = ((&home.0, *from), (&self.region, range.start));
            parts::up(&self.device, source, target, range.len(), stream, &mut submitted)
        });
        // Also what was submitted before something failed.
        let event = self.device.behind_copy(stream, Way::Up, submitted.in_flight())?;
        submitted.close(&Arc::new(event));
        copied
    }

    /// Submits bringing a tensor back home, after its uses here.
    pub(crate) fn save(&self, Place { home, from, range }: &Place, stream: &Stream) -> Result<()> {
        let _bound = self.device.context().to_submit()?;
        parts::down(&self.device, (&self.region, range.start), (&home.0, *from), range.len(), stream)
    }

    /// Makes `stream` wait for the bytes that are on their way here.
    pub(crate) fn order(&self, stream: &Arc<CudaStream>) -> Result<()> {
        let _bound = self.device.context().to_submit()?;
        let stream = Stream::of_caller(stream);
        stream.check_not_capturing("device access")?;
        self.region.order(&stream, &(0..self.region.bytes()), false)
    }

    pub(crate) fn read<T: Element>(
        &self,
        tensor: &OffloadTensor,
        range: &Range<usize>,
        stream: &Arc<CudaStream>,
    ) -> Result<DeviceRef<'_, T>> {
        tensor.check::<T>()?;
        aligned::<T, _>(DeviceRef::over(&self.region, &self.device, range, stream)?, DeviceRef::address)
    }

    /// The caller holds the range exclusively.
    pub(crate) fn write<T: Element>(
        &self,
        tensor: &OffloadTensor,
        range: &Range<usize>,
        stream: &Arc<CudaStream>,
    ) -> Result<DeviceMut<'_, T>> {
        tensor.check::<T>()?;
        tensor.check_writable()?;
        aligned::<T, _>(DeviceMut::over(&self.region, &self.device, range, stream)?, DeviceMut::address)
    }
}
