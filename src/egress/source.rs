//! What can be handed to an egress pool, and what comes out for it.
#![deny(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::CudaSlice;

use crate::device::Device;
use crate::driver::lane::{Lanes, Passed};
use crate::driver::memory::SharedSlice;
use crate::driver::{Pending, Stream};
use crate::element::Element;
use crate::error::{Refused, Result};
use crate::tensor::fetch::{self, Fetch, Room, Source};
use crate::tensor::unpinned::Unpinned;
use crate::tensor::{Chunks, HostTensor, TransferTensor};

/// A result on the device, or several of one step, to be brought to the host by an [`EgressPool`](crate::EgressPool).
///
/// | source | what comes out |
/// |---|---|
/// | [`TransferTensor<T>`] | [`HostTensor<T>`]; nothing is copied where host and device share the memory |
/// | `CudaSlice<T>`, `Arc<CudaSlice<T>>` | [`HostTensor<T>`] of one dimension, copied once |
/// | [`Chunked<T>`](Chunked) | [`Chunks<T>`](crate::Chunks), for a consumer that asks for one chunk after another |
/// | `Vec<S>`, `(A, B)`, `(A, B, C)` | the same of what comes out for each |
/// | [`Tagged<S, K>`](crate::Tagged) | the same, with the tag |
///
/// # Ordering
/// As for the tensors made of them: the copy comes after what uses the tensor, and after what the slice's stream was given before
/// [`submit`](crate::EgressPool::submit). What others do with a shared slice meanwhile is theirs to order after the delivery.
pub trait EgressSource: sealed::Sealed<Landed = Self::Output> + Sized + Send + 'static {
    /// What a consumer gets.
    type Output: Send + 'static;
}

pub(crate) mod sealed {
    use super::{Passed, Refused, Result, Way};

    pub trait Sealed: Sized {
        /// The source while it is copied.
        type Flying: Send + 'static;
        type Landed: Send + 'static;

        fn bytes(&self) -> u64;

        /// Prepares the copies of slices, and submits those of tensors; what to wait for is noted in `way`. What comes back may have been
        /// partly copied; nothing does where the device faulted meanwhile.
        fn begin(self, way: &mut Way<'_>) -> Result<Self::Flying, Refused<Option<Self>>>;

        /// Submits the copies that were prepared.
        fn launch(flying: &mut Self::Flying) -> Result<()>;

        /// What is on the host, when all of that has passed.
        fn land(flying: Self::Flying, passed: &Passed) -> Result<Self::Landed>;

        /// The source again.
        fn back(flying: Self::Flying) -> Option<Self>;
    }
}

/// How the copies of one item go.
#[derive(Debug)]
pub struct Way<'a> {
    device: &'a Device,
    lanes: &'a Lanes,
    /// The stream that carries all of its slices.
    lane: Option<(usize, Arc<Stream>)>,
    waits: Vec<Pending>,
}

/// What an item waits for.
#[derive(Debug)]
pub(super) enum Ahead {
    /// What is to be submitted to the stream with this number.
    Lane(usize, Arc<Stream>),
    /// All of this, and what is to be submitted to that.
    All(Vec<Pending>, Option<Arc<Stream>>),
}

impl<'a> Way<'a> {
    pub(super) fn new(device: &'a Device, lanes: &'a Lanes) -> Self {
        Self { device, lanes, lane: None, waits: Vec::new() }
    }

    fn lane(&mut self, producer: &Stream, bytes: usize) -> Result<Arc<Stream>> {
        let lane = match self.lane.take() {
            Some(lane) => lane,
            None => self.lanes.of(producer, bytes)?,
        };
        Ok(self.lane.insert(lane).1.clone())
    }

    pub(super) fn ahead(self) -> Ahead {
        match self.lane {
            Some((number, stream)) if self.waits.is_empty() => Ahead::Lane(number, stream),
            lane => Ahead::All(self.waits, lane.map(|(_, stream)| stream)),
        }
    }
}

use sealed::Sealed;

impl<T: Element> EgressSource for TransferTensor<T> {
    type Output = HostTensor<T>;
}

impl<T: Element> Sealed for TransferTensor<T> {
    type Flying = TransferTensor<T>;
    type Landed = HostTensor<T>;

    fn bytes(&self) -> u64 {
        TransferTensor::bytes(self) as u64
    }

    fn begin(self, way: &mut Way<'_>) -> Result<Self, Refused<Option<Self>>> {
        match self.to_host() {
            Ok(transfer) => {
                let (tensor, all) = transfer.into_parts();
                way.waits.extend(all);
                Ok(tensor)
            }
            Err(Refused { error, value }) => Err(Refused { error, value: Some(value) }),
        }
    }

    fn launch(_: &mut Self) -> Result<()> {
        Ok(())
    }

    fn land(mut flying: Self, _: &Passed) -> Result<HostTensor<T>> {
        // The device's memory is free for the next step.
        flying.release_device()?;
        Ok(HostTensor::new(flying)?)
    }

    fn back(flying: Self) -> Option<Self> {
        Some(flying)
    }
}

/// A slice on its way: to page-locked memory, to ordinary memory, or as a tensor.
#[allow(missing_debug_implementations)] // No caller sees one.
pub enum SliceFlying<T: Element, S: Source, K> {
    Fetch(Fetch<S>),
    Unpinned(Unpinned<T, S>),
    Tensor(TransferTensor<T>, K),
}

impl<T: Element, S: Source, K> SliceFlying<T, S, K> {
    fn launch(&mut self) -> Result<()> {
        match self {
            SliceFlying::Fetch(fetch) => fetch.launch(),
            SliceFlying::Unpinned(unpinned) => {
                unpinned.launch();
                Ok(())
            }
            SliceFlying::Tensor(..) => Ok(()),
        }
    }
}

impl<T: Element> EgressSource for CudaSlice<T> {
    type Output = HostTensor<T>;
}

impl<T: Element> Sealed for CudaSlice<T> {
    type Flying = SliceFlying<T, Self, ()>;
    type Landed = HostTensor<T>;

    fn bytes(&self) -> u64 {
        self.num_bytes() as u64
    }

    fn begin(self, way: &mut Way<'_>) -> Result<Self::Flying, Refused<Option<Self>>> {
        let some = |Refused { error, value }| Refused { error, value: Some(value) };
        let room = match fetch::room(way.device, &self) {
            Ok(room) => room,
            Err(error) => return Err(Refused { error, value: Some(self) }),
        };
        match room {
            Room::Pinned(buffer) => {
                let producer = Stream::of_caller(self.stream());
                let stream = match way.lane(&producer, self.num_bytes()) {
                    Ok(stream) => stream,
                    Err(error) => return Err(Refused { error, value: Some(self) }),
                };
                Fetch::owned(way.device, self, buffer, (&producer, stream)).map(SliceFlying::Fetch).map_err(some)
            }
            Room::Ordinary => {
                let unpinned = Unpinned::owned(way.device, self).map_err(some)?;
                way.waits.push(unpinned.pending());
                Ok(SliceFlying::Unpinned(unpinned))
            }
            Room::Tensor => {
                let len = self.len();
                let tensor = way.device.tensor().from_cuda_slice(self, [len]).map_err(some)?;
                match tensor.begin(way) {
                    Ok(tensor) => Ok(SliceFlying::Tensor(tensor, ())),
                    Err(Refused { error, value }) => {
                        Err(Refused { error, value: value.and_then(|tensor| tensor.into_cuda_slice().ok()) })
                    }
                }
            }
        }
    }

    fn launch(flying: &mut Self::Flying) -> Result<()> {
        flying.launch()
    }

    fn land(flying: Self::Flying, passed: &Passed) -> Result<HostTensor<T>> {
        match flying {
            SliceFlying::Fetch(fetch) => fetch.land(passed),
            SliceFlying::Unpinned(unpinned) => unpinned.land(passed),
            SliceFlying::Tensor(tensor, ()) => <TransferTensor<T> as Sealed>::land(tensor, passed),
        }
    }

    fn back(flying: Self::Flying) -> Option<Self> {
        match flying {
            SliceFlying::Fetch(fetch) => fetch.back(),
            SliceFlying::Unpinned(unpinned) => unpinned.back(),
            SliceFlying::Tensor(tensor, ()) => tensor.into_cuda_slice().ok(),
        }
    }
}

impl<T: Element> EgressSource for Arc<CudaSlice<T>> {
    type Output = HostTensor<T>;
}

impl<T: Element> Sealed for Arc<CudaSlice<T>> {
    type Flying = SliceFlying<T, SharedSlice<T>, SharedSlice<T>>;
    type Landed = HostTensor<T>;

    fn bytes(&self) -> u64 {
        self.num_bytes() as u64
    }

    fn begin(self, way: &mut Way<'_>) -> Result<Self::Flying, Refused<Option<Self>>> {
        let (context, len) = (way.device.context().clone(), self.len());
        let mut begin = || match fetch::room(way.device, &self)? {
            Room::Pinned(buffer) => {
                let producer = Stream::of_caller(self.stream());
                let stream = way.lane(&producer, self.num_bytes())?;
                let shared = SharedSlice::new(&context, self.clone());
                Fetch::shared(way.device, shared, len, buffer, (&producer, stream)).map(SliceFlying::Fetch)
            }
            Room::Ordinary => {
                let unpinned = Unpinned::shared(way.device, self.clone())?;
                way.waits.push(unpinned.pending());
                Ok(SliceFlying::Unpinned(unpinned))
            }
            Room::Tensor => {
                let tensor = way.device.tensor().from_shared_cuda_slice(self.clone(), [len])?;
                let tensor = tensor.begin(way).map_err(|refused| refused.error)?;
                Ok(SliceFlying::Tensor(tensor, SharedSlice::new(&context, self.clone())))
            }
        };
        match begin() {
            // Who drops the last handle may have to order that first: let it not be this one.
            Ok(flying) => {
                drop(self);
                Ok(flying)
            }
            Err(error) => Err(Refused { error, value: Some(self) }),
        }
    }

    fn launch(flying: &mut Self::Flying) -> Result<()> {
        flying.launch()
    }

    fn land(flying: Self::Flying, passed: &Passed) -> Result<HostTensor<T>> {
        match flying {
            SliceFlying::Fetch(fetch) => fetch.land(passed),
            SliceFlying::Unpinned(unpinned) => unpinned.land(passed),
            SliceFlying::Tensor(tensor, _shared) => <TransferTensor<T> as Sealed>::land(tensor, passed),
        }
    }

    fn back(flying: Self::Flying) -> Option<Self> {
        match flying {
            SliceFlying::Fetch(fetch) => fetch.handle(),
            SliceFlying::Unpinned(unpinned) => unpinned.back().and_then(|shared| shared.handle()),
            SliceFlying::Tensor(_, shared) => shared.handle(),
        }
    }
}

/// A slice that is brought to the host chunk by chunk, through two of them, however large it is: for results that are larger than all room, or
/// than page-locked memory should be. It takes room for two chunks.
///
/// ```
/// # cuda_sim::install().unwrap();
/// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
/// # let stream = transfer_tensor::cudarc::driver::CudaContext::new(gpu.ordinal())?.new_stream()?;
/// use transfer_tensor::{Chunked, Chunks, Device, EgressPool, Output};
///
/// let device = Device::new(&stream)?;
/// let pool = EgressPool::builder(&device).budget(64 << 10).consumer(|mut result: Output<Chunks<f32>>| {
///     let mut sum = 0.0;
///     while let Some(chunk) = result.next_chunk()? {
///         sum += chunk.iter().sum::<f32>(); // write it to a file; the next one comes meanwhile
///     }
///     Ok::<_, transfer_tensor::Error>(sum)
/// })?;
/// let result = stream.clone_htod(&vec![1.0f32; 100_000])?; // 400 kB
/// assert_eq!(pool.submit(Chunked::new(result, 32 << 10))?.wait()??, 100_000.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Chunked<T: Element> {
    slice: Arc<CudaSlice<T>>,
    elements: usize,
}

impl<T: Element> Chunked<T> {
    /// A slice, or an `Arc` of one, in chunks of so many bytes: whole elements, and at least one.
    pub fn new(slice: impl Into<Arc<CudaSlice<T>>>, bytes: usize) -> Self {
        Self { slice: slice.into(), elements: (bytes / size_of::<T>()).max(1) }
    }

    /// The slice.
    pub fn into_inner(self) -> Arc<CudaSlice<T>> {
        self.slice
    }
}

impl<T: Element> EgressSource for Chunked<T> {
    type Output = Chunks<T>;
}

impl<T: Element> Sealed for Chunked<T> {
    type Flying = Chunks<T>;
    type Landed = Chunks<T>;

    fn bytes(&self) -> u64 {
        let elements = self.slice.len().min(self.elements.saturating_mul(2));
        (elements as u64).saturating_mul(size_of::<T>() as u64)
    }

    fn begin(self, way: &mut Way<'_>) -> Result<Self::Flying, Refused<Option<Self>>> {
        let mut begin = || {
            let producer = Stream::of_caller(self.slice.stream());
            let stream = way.lane(&producer, usize::try_from(self.bytes()).unwrap_or(usize::MAX))?;
            let shared = SharedSlice::new(way.device.context(), self.slice.clone());
            Chunks::prepare(way.device, shared, self.elements, &producer, stream)
        };
        begin().map_err(|error| Refused { error, value: Some(self) })
    }

    fn launch(chunks: &mut Chunks<T>) -> Result<()> {
        chunks.launch()
    }

    fn land(chunks: Chunks<T>, passed: &Passed) -> Result<Chunks<T>> {
        Ok(chunks.land(passed))
    }

    fn back(chunks: Chunks<T>) -> Option<Self> {
        Some(Self { slice: chunks.handle()?, elements: chunks.chunk_len() })
    }
}
