//! Activations that are on the host between the forward pass that makes them and the backward pass that uses them.

use std::any::Any;
use std::fmt;

use cudarc::driver::CudaSlice;

use crate::device::Device;
use crate::driver::{LentStream, Stream};
use crate::element::{DType, Element};
use crate::error::{Error, Kind, Refused, Result};
use crate::layout::Shape;
use crate::tensor::{OffloadTensor, TransferTensor};
use crate::trace;

/// Activations, last in, first out: those that will be used next are on the device, the others on the host.
///
/// ```
/// # cuda_sim::install().unwrap();
/// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
/// # let stream = transfer_tensor::cudarc::driver::CudaContext::new(gpu.ordinal())?.new_stream()?;
/// use transfer_tensor::{ActivationStack, Device};
///
/// let device = Device::new(&stream)?;
/// let mut activations = ActivationStack::new(&device, 2)?;
/// for layer in 0..6u8 {
///     let made = stream.memcpy_stod(&vec![layer; 1 << 16])?; // any work of the forward pass
///     activations.push_slice(made)?; // goes out once it is made, when two others lie on it
/// }
/// for layer in (0..6u8).rev() {
///     let used = activations.pop::<u8>()?.expect("six were pushed"); // comes back, and those below it follow
///     let guard = used.device(&stream)?; // a kernel's argument: comes after the copy
///     # assert_eq!(stream.memcpy_dtov(&guard)?, vec![layer; 1 << 16]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// The copies run on streams of the crate's own: out after the work that made the tensor, back while those above are used. The device's memory
/// of what is out is freed in stream order, behind the copy, and that of what comes back is allocated in stream order. Where CPU and GPU have one memory,
/// nothing is copied.
///
/// Dropping or forgetting it is fine: memory stays until the copies have run.
pub struct ActivationStack {
    device: Device,
    up: LentStream,
    down: LentStream,
    depth: usize,
    /// The host's memory is another than the device's.
    moves: bool,
    entries: Vec<Box<dyn Entry>>,
    stats: ActivationStats,
}

/// What an [`ActivationStack`] has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ActivationStats {
    /// Tensors that went to the host.
    pub out: u64,
    /// Bytes of device memory that this gave up.
    pub out_bytes: u64,
    /// Bytes that came back.
    pub back_bytes: u64,
}

/// A tensor of some type.
trait Entry: Any + Send {
    fn leave(&mut self, lane: &Stream) -> Result<u64>;
    fn come_back(&mut self, lane: &Stream) -> Result<u64>;
    fn dtype(&self) -> DType;
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
    fn into_tensor(self: Box<Self>) -> OffloadTensor;
}

impl<T: Element> Entry for TransferTensor<T> {
    fn leave(&mut self, lane: &Stream) -> Result<u64> {
        TransferTensor::leave(self, lane)
    }

    fn come_back(&mut self, lane: &Stream) -> Result<u64> {
        TransferTensor::come_back(self, lane)
    }

    fn dtype(&self) -> DType {
        T::DTYPE
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }

    fn into_tensor(self: Box<Self>) -> OffloadTensor {
        (*self).into()
    }
}

impl ActivationStack {
    /// The last `depth` that were pushed stay on the device, or are on their way there; at least 1.
    ///
    /// # Errors
    /// The driver makes no stream.
    pub fn new(device: &Device, depth: usize) -> Result<Self> {
        let context = device.context();
        let (up, down) = (context.lend_stream(c"activations-in")?, context.lend_stream(c"activations-out")?);
        let moves = !device.platform().model().is_one_memory();
        let (device, depth) = (device.clone(), depth.max(1));
        Ok(Self { device, up, down, depth, moves, entries: Vec::new(), stats: ActivationStats::default() })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// What was done so far.
    pub fn stats(&self) -> ActivationStats {
        self.stats
    }

    /// Puts a tensor on top; the one that now lies below `depth` others goes to the host.
    ///
    /// # Ordering
    /// Does not block, unless the one that goes has ordinary host memory, or no page-locked memory is to be had. The copy comes after what uses the tensor on its streams now.
    ///
    /// # Errors
    /// The tensor has no device, or that of another context; or the one below can not go: there is no host memory, the device faulted, or the driver refused a copy. It stays where it is, and the new one comes back.
    pub fn push<T: Element>(&mut self, tensor: TransferTensor<T>) -> Result<(), Refused<TransferTensor<T>>> {
        if let Err(error) = self.check(tensor.device_handle()).and_then(|()| self.make_room()) {
            return Err(Refused { error, value: tensor });
        }
        self.entries.push(Box::new(tensor));
        Ok(())
    }

    /// Puts a slice on top, as a tensor of one axis: what was submitted to its stream makes it.
    ///
    /// # Errors
    /// As [`push`](Self::push), and as [`TensorOptions::from_cuda_slice`](crate::TensorOptions::from_cuda_slice).
    pub fn push_slice<T: Element>(&mut self, slice: CudaSlice<T>) -> Result<(), Refused<CudaSlice<T>>> {
        if let Err(error) = self.make_room() {
            return Err(Refused { error, value: slice });
        }
        let shape = Shape::from(slice.len());
        self.entries.push(Box::new(self.device.tensor().from_cuda_slice(slice, shape)?));
        Ok(())
    }

    fn check(&self, device: Option<&Device>) -> Result<()> {
        const OPERATION: &str = "a stack of activations";
        match device {
            None => Err(Error::new(Kind::HostOnly { operation: OPERATION })),
            Some(device) if device.context().cuda().cu_ctx() != self.device.context().cuda().cu_ctx() => {
                Err(Error::new(Kind::WrongContext { operation: OPERATION }))
            }
            Some(_) => Ok(()),
        }
    }

    /// Sends out the one that will lie below `depth` others.
    fn make_room(&mut self) -> Result<()> {
        let below = self.entries.len().checked_sub(self.depth).and_then(|below| self.entries.get_mut(below));
        let Some(below) = below.filter(|_| self.moves) else { return Ok(()) };
        let _range = trace::wait(c"offload out");
        let bytes = below.leave(&self.down)?;
        self.stats.out += u64::from(bytes > 0);
        self.stats.out_bytes += bytes;
        Ok(())
    }

    /// Takes the tensor on top, on the device or on its way there; the one that comes to lie below fewer than `depth` others is brought back.
    /// `None` where there is none.
    ///
    /// # Ordering
    /// Does not block. Device guards of the tensor come after its copy.
    ///
    /// # Errors
    /// It has another element type, there is no device memory, the device faulted, or the driver refused a copy. It stays on top.
    pub fn pop<T: Element>(&mut self) -> Result<Option<TransferTensor<T>>> {
        let Some(top) = self.entries.last_mut() else { return Ok(None) };
        if top.dtype() != T::DTYPE {
            return Err(Error::new(Kind::DType { expected: T::DTYPE.name(), got: top.dtype().name() }));
        }
        self.stats.back_bytes += top.come_back(&self.up)?;
        let top = self.entries.pop().and_then(|top| top.into_any().downcast::<TransferTensor<T>>().ok());
        let below = self.entries.len().checked_sub(self.depth).and_then(|below| self.entries.get_mut(below));
        if let Some(below) = below {
            let _range = trace::wait(c"offload back");
            // What fails is tried again when it is taken.
            self.stats.back_bytes += below.come_back(&self.up).unwrap_or(0);
        }
        Ok(top.map(|top| *top))
    }
}

impl ActivationStack {
    /// All tensors, the one on top last, wherever they are now: nothing is copied.
    pub fn into_tensors(self) -> Vec<OffloadTensor> {
        self.entries.into_iter().map(Entry::into_tensor).collect()
    }
}

impl fmt::Debug for ActivationStack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActivationStack")
            .field("len", &self.len())
            .field("depth", &self.depth)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}
