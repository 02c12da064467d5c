//! The tensor that is handed between CPU and GPU.

mod chunks;
mod copying;
mod device_guard;
mod dynamic;
mod existing;
pub(crate) mod fetch;
mod give;
mod hints;
mod host_guard;
mod landed;
#[cfg(feature = "safetensors")]
mod landing;
mod leaving;
mod options;
mod parts;
mod region;
mod room;
mod slices;
mod store;
mod track;
mod transfer;
pub(crate) mod unpinned;
mod view;

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

use cudarc::driver::CudaStream;

pub use chunks::Chunks;
pub use copying::{BothEnds, Copying};
pub use device_guard::{DeviceMut, DeviceRef};
pub use dynamic::DynTensor;
pub use host_guard::{HostMut, HostRef};
pub use landed::HostTensor;
#[cfg(feature = "safetensors")]
pub(crate) use landing::Landing;
pub use options::TensorOptions;
pub use room::OffloadTensor;
pub(crate) use room::{Home, Place, Room};
pub use slices::DeviceMemory;
pub use transfer::Transfer;
pub use view::{SharedTensor, TensorView, TensorViewMut};

use self::store::Store;
use self::view::{Window, part_doc};
use crate::device::Device;
use crate::element::{DType, Element};
use crate::error::{Error, Kind, Refused, Result};
use crate::layout::Shape;
use crate::plan::{Backing, Decision, Strategy};

/// A contiguous, row-major tensor that CPU and GPU work on in turn.
///
/// Where its bytes lie follows from the [`Decision`] it was made with: in one allocation that both sides see (zero-copy,
/// coherent), or on the device with pinned memory on the host side (streamed); then an access on one side first copies
/// what the other side has written. Reading and writing is always through guards:
///
/// | | read | write |
/// |---|---|---|
/// | host | [`host`](Self::host) → `&[T]` | [`host_mut`](Self::host_mut) → `&mut [T]` |
/// | device, on a stream | [`device`](Self::device) → kernel argument, `DevicePtr` | [`device_mut`](Self::device_mut) → kernel argument, `DevicePtrMut` |
///
/// A host guard is given only when nothing that conflicts is running on the device; a device guard makes its stream wait
/// for what conflicts. So this is safe, however the two are mixed, dropped, forgotten or moved between threads:
///
/// ```
/// # cuda_sim::install().unwrap();
/// # let gpu = cuda_sim::device("dgx_spark_gb10").unwrap();
/// # let stream = cudarc::driver::CudaContext::new(gpu.ordinal())?.default_stream();
/// use transfer_tensor::{Access, Device, TransferTensor, cudarc};
///
/// let device = Device::new(&stream)?;
/// let mut tensor: TransferTensor<f32> = device.tensor().access(Access::Streaming).zeros([2, 3])?;
/// tensor.host_mut()?.fill(1.5);
/// stream.memset_zeros(&mut tensor.view_mut(1..)?.device_mut(&stream)?)?; // any work on the stream
/// assert_eq!(&*tensor.host()?, [1.5, 1.5, 1.5, 0.0, 0.0, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// References can not outlive their guards, nor guards their tensor:
///
/// ```compile_fail,E0505
/// let mut tensor = transfer_tensor::TransferTensor::from_vec(vec![1u8], [1]).unwrap();
/// let guard = tensor.host().unwrap();
/// drop(tensor);
/// println!("{}", guard[0]);
/// ```
///
/// ```compile_fail,E0502
/// let mut tensor = transfer_tensor::TransferTensor::from_vec(vec![1u8], [1]).unwrap();
/// let read = tensor.host().unwrap();
/// let write = tensor.host_mut().unwrap(); // while `read` lives
/// println!("{}", read[0]);
/// ```
///
/// ```compile_fail,E0597
/// let slice: &[u8] = {
///     let tensor = transfer_tensor::TransferTensor::from_vec(vec![1u8], [1]).unwrap();
///     &tensor.host().unwrap()[..]
/// };
/// println!("{}", slice[0]);
/// ```
///
/// A device write can not run beside a host reference:
///
/// ```compile_fail,E0502
/// # fn f(stream: &std::sync::Arc<transfer_tensor::cudarc::driver::CudaStream>) {
/// let mut tensor = transfer_tensor::TransferTensor::from_vec(vec![1u8], [1]).unwrap();
/// let read = tensor.host().unwrap();
/// let write = tensor.device_mut(stream).unwrap();
/// println!("{}", read[0]);
/// # }
/// ```
///
/// Device guards stay on their thread:
///
/// ```compile_fail,E0277
/// # fn f(stream: &std::sync::Arc<transfer_tensor::cudarc::driver::CudaStream>) {
/// let tensor = transfer_tensor::TransferTensor::from_vec(vec![1u8], [1]).unwrap();
/// let guard = tensor.device(stream).unwrap();
/// std::thread::scope(|scope| { scope.spawn(|| drop(guard)); });
/// # }
/// ```
pub struct TransferTensor<T: Element> {
    store: Arc<Store>,
    shape: Shape,
    _element: PhantomData<T>,
}

impl<T: Element> TransferTensor<T> {
    /// A host-only tensor of zeros. See [`Device::tensor`] for one that a GPU can use.
    ///
    /// # Errors
    /// The shape is too large.
    pub fn zeros(shape: impl Into<Shape>) -> Result<Self> {
        TensorOptions::host_only().zeros(shape)
    }

    /// A host-only tensor that owns `values`; nothing is copied.
    ///
    /// # Errors
    /// The shape does not have as many elements.
    pub fn from_vec(values: Vec<T>, shape: impl Into<Shape>) -> Result<Self, Refused<Vec<T>>> {
        TensorOptions::host_only().from_vec(values, shape)
    }

    /// A tensor of nothing.
    pub(crate) fn hollow() -> Self {
        Self::new(options::empty_store::<T>(), Shape::from([0]))
    }

    fn new(store: Arc<Store>, shape: Shape) -> Self {
        Self { store, shape, _element: PhantomData }
    }

    /// The extents.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.store.bytes() / size_of::<T>()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.store.bytes() == 0
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.store.bytes()
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// The number of elements differs; the tensor comes back.
    pub fn reshape(mut self, shape: impl Into<Shape>) -> Result<Self, Refused<Self>> {
        let shape = shape.into();
        match check_elements(&shape, self.len()) {
            Ok(()) => {
                self.shape = shape;
                Ok(self)
            }
            Err(error) => Err(Refused { error, value: self }),
        }
    }

    /// How it is handed between CPU and GPU.
    pub fn strategy(&self) -> Strategy {
        self.store.strategy()
    }

    /// The kind of memory that serves the device (the host, where there is none).
    pub fn backing(&self) -> Backing {
        self.store.backing()
    }

    /// The kind of memory on the host side; `None` while there is none.
    pub fn host_backing(&self) -> Option<Backing> {
        self.store.host_backing()
    }

    /// Whether the host side is page-locked, so that copies run asynchronously and at the speed of the link.
    pub fn is_pinned(&self) -> bool {
        matches!(self.host_backing(), Some(Backing::Pinned | Backing::Registered))
    }

    /// Whether host and device use the same bytes.
    pub fn is_zero_copy(&self) -> bool {
        matches!(self.strategy(), Strategy::ZeroCopy | Strategy::Coherent)
    }

    /// What was decided when the tensor was made, and why. Where a route was then refused, the reasons say so and
    /// [`backing`](Self::backing) tells what serves instead.
    pub fn decision(&self) -> &Decision {
        self.store.decision()
    }

    /// Bytes copied so far: to the device, and to the host.
    pub fn copied_bytes(&self) -> (u64, u64) {
        self.store.copied()
    }

    /// The device it was made for.
    pub fn device_handle(&self) -> Option<&Device> {
        self.store.device_handle()
    }

    /// The elements, to read on the host.
    ///
    /// # Ordering
    /// Copies from the device what is newer there; blocks until that, and every earlier write of the device, has run.
    ///
    /// # Errors
    /// The device faulted, a stream that used the tensor is being captured, host memory could not be had, or (`bool`) a
    /// byte is no value of the type.
    pub fn host(&self) -> Result<HostRef<'_, T>> {
        HostRef::new(&self.store, &(0..self.store.bytes()))
    }

    /// The elements, to read and write on the host.
    ///
    /// # Ordering
    /// As [`host`](Self::host), and blocks also until every earlier read of the device has run.
    ///
    /// # Errors
    /// As [`host`](Self::host); the tensor is read-only.
    pub fn host_mut(&mut self) -> Result<HostMut<'_, T>> {
        HostMut::new(&self.store, &(0..self.store.bytes()))
    }

    /// The elements, for work on `stream` to read.
    ///
    /// # Ordering
    /// Does not block. `stream` waits for earlier writes; what is newer on the host is copied in the stream's order (a
    /// pageable source is read before this returns).
    ///
    /// # Errors
    /// The tensor is host-only, the stream belongs to another context or is being captured, device memory could not be
    /// had, the driver refused a call.
    pub fn device(&self, stream: &Arc<CudaStream>) -> Result<DeviceRef<'_, T>> {
        DeviceRef::new(&self.store, &(0..self.store.bytes()), stream)
    }

    /// The elements, for work on `stream` to read and write.
    ///
    /// # Ordering
    /// As [`device`](Self::device); `stream` waits also for earlier reads.
    ///
    /// # Errors
    /// As [`device`](Self::device); the tensor is read-only.
    pub fn device_mut(&mut self, stream: &Arc<CudaStream>) -> Result<DeviceMut<'_, T>> {
        DeviceMut::new(&self.store, &(0..self.store.bytes()), stream)
    }

    #[doc = part_doc!(rows)]
    pub fn view(&self, rows: impl RangeBounds<usize>) -> Result<TensorView<'_, T>> {
        Ok(TensorView::new(&self.store, self.window().rows::<T>(rows)?))
    }

    #[doc = part_doc!(rows)]
    pub fn view_mut(&mut self, rows: impl RangeBounds<usize>) -> Result<TensorViewMut<'_, T>> {
        let window = self.window().rows::<T>(rows)?;
        Ok(TensorViewMut::new(&self.store, window))
    }

    #[doc = part_doc!(bytes)]
    pub fn byte_range(&self, bytes: impl RangeBounds<usize>) -> Result<TensorView<'_, T>> {
        Ok(TensorView::new(&self.store, self.window().bytes::<T>(bytes)?))
    }

    #[doc = part_doc!(bytes)]
    pub fn byte_range_mut(&mut self, bytes: impl RangeBounds<usize>) -> Result<TensorViewMut<'_, T>> {
        let window = self.window().bytes::<T>(bytes)?;
        Ok(TensorViewMut::new(&self.store, window))
    }

    #[doc = part_doc!(strided)]
    pub fn strided(&self, offset: usize, shape: impl Into<Shape>, strides: &[isize]) -> Result<TensorView<'_, T>> {
        Ok(TensorView::new(&self.store, self.window().strided::<T>(offset, shape.into(), strides)?))
    }

    fn window(&self) -> Window {
        Window::whole(&self.store, &self.shape)
    }

    /// Starts bringing the elements to the device, if they are not there; the ticket gives the tensor back.
    ///
    /// # Ordering
    /// Does not block (a pageable source is read before this returns). The copy runs on a stream of its own, after earlier
    /// uses of the tensor.
    ///
    /// # Errors
    /// As [`device`](Self::device); the tensor comes back.
    pub fn to_device(self) -> Result<Transfer<T>, Refused<Self>> {
        match transfer::start_to_device(&self.store) {
            Ok(pending) => Ok(Transfer::new(self, pending)),
            Err(error) => Err(Refused { error, value: self }),
        }
    }

    /// Starts bringing the elements to the host, if they are not there; the ticket gives the tensor back.
    ///
    /// # Ordering
    /// Does not block where the host side is pinned. The copy runs on a stream of its own, after earlier writes of the
    /// tensor.
    ///
    /// # Errors
    /// As [`host`](Self::host); the tensor comes back.
    pub fn to_host(self) -> Result<Transfer<T>, Refused<Self>> {
        match transfer::start_to_host(&self.store) {
            Ok(pending) => Ok(Transfer::new(self, pending)),
            Err(error) => Err(Refused { error, value: self }),
        }
    }

    /// Makes it read-only and cheap to clone.
    pub fn into_shared(self) -> SharedTensor<T> {
        SharedTensor::new(self.store, self.shape)
    }

    /// A shared tensor that nobody else shares, to write to again.
    ///
    /// # Errors
    /// Another handle lives, or this one is a part; it comes back.
    pub fn from_shared(shared: SharedTensor<T>) -> Result<Self, Refused<SharedTensor<T>>> {
        match shared.into_store() {
            Ok((store, shape)) => Ok(Self::new(store, shape)),
            Err(value) => Err(Refused { error: Error::new(Kind::Shared { what: "the tensor" }), value }),
        }
    }

    /// Gives up the device's copy, after bringing what is newer there to the host. Where both sides share the bytes,
    /// nothing changes. Returns how many bytes of device memory it released.
    ///
    /// # Errors
    /// As [`host`](Self::host).
    pub fn release_device(&mut self) -> Result<u64> {
        if self.is_empty() {
            return Ok(0);
        }
        let all = 0..self.store.bytes();
        let region = self.store.on_host(&all, false)?;
        region.wait(&all, false)?;
        let released = self.store.with_state(|state| {
            state.device_current.remove(&all);
            if state.shared { None } else { state.device.take() }
        });
        Ok(released.map_or(0, |region| region.bytes() as u64))
    }

    /// Gives up the host's copy, after bringing what is newer there to the device on `stream`. Where both sides share the
    /// bytes, nothing changes. Returns how many bytes of host memory it released (they are freed once the copy has run).
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn release_host(&mut self, stream: &Arc<CudaStream>) -> Result<u64> {
        if self.strategy() != Strategy::Streamed || self.is_empty() {
            return Ok(0);
        }
        drop(self.device(stream)?);
        let all = 0..self.store.bytes();
        let released = self.store.with_state(|state| {
            state.host_current.remove(&all);
            state.host.take()
        });
        Ok(released.map_or(0, |region| region.bytes() as u64))
    }
}

/// Fails unless `shape` has `len` elements.
fn check_elements(shape: &Shape, len: usize) -> Result<()> {
    let needs = shape.elements()?;
    if needs == len { Ok(()) } else { Err(Error::new(Kind::Shape { shape: shape.dims().to_vec(), needs, got: len })) }
}

impl<T: Element> fmt::Debug for TransferTensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferTensor")
            .field("dtype", &T::DTYPE)
            .field("shape", &self.shape)
            .field("strategy", &self.strategy())
            .field("backing", &self.backing())
            .finish_non_exhaustive()
    }
}

impl TransferTensor<u8> {
    /// Whether every element is a value of `T`. Once it is, cudarc may be asked to copy them to a `Vec<T>`, where nobody
    /// looks at them before. Only `bool` takes looking.
    fn check_values<T: Element>(&self) -> Result<()> {
        if T::DTYPE == DType::Bool { crate::element::validate::<T>(&self.host()?) } else { Ok(()) }
    }

    /// The same bytes as elements of another type, if they are aligned for it.
    fn retype<T: Element>(mut self, shape: Shape) -> Result<TransferTensor<T>, (Error, Self, Shape)> {
        let misaligned = self.store.with_state(|state| {
            let regions = [&state.host, &state.device].into_iter().flatten();
            let addresses =
                regions.flat_map(|r| [r.host().ok().map(|p| p.as_ptr() as usize), r.device().ok().map(|a| a as usize)]);
            addresses.flatten().find(|address| address % align_of::<T>() != 0)
        });
        if let Some(value) = misaligned {
            let error = Error::new(Kind::Misaligned { what: "the address", value, align: align_of::<T>() });
            return Err((error, self, shape));
        }
        if let Err(error) = self.check_values::<T>() {
            return Err((error, self, shape));
        }
        if let Some(store) = Arc::get_mut(&mut self.store) {
            store.retype::<T>();
        }
        Ok(TransferTensor::new(self.store, shape))
    }
}

impl<T: Element> TransferTensor<T> {
    /// The same bytes as `u8`, which every address is aligned for.
    fn into_bytes(self) -> TransferTensor<u8> {
        let bytes = self.store.bytes();
        TransferTensor::new(self.store, Shape::from(bytes))
    }
}
