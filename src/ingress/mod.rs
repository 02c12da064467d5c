//! Batches on their way to the device, ahead of the work on them.
//!
//! ```text
//! source ─► loader thread: host side of a free tensor ─► copy on a stream of ours ─► line (in order) ─► batch ─► device guard
//!                    └─────────────────────────── dropped: free again ◄────────────────────────┘
//! ```
//!
//! A batch is a tensor that goes round: its host side is filled when nothing reads it any more, its device side is written when the work on
//! the batch before is over, and the guard that the caller takes comes after the copy. All of that is the tensor's own (`tensor/region.rs`).
#![deny(unsafe_code)]

mod batch;
mod shared;

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;

pub use batch::IngressBatch;

use self::shared::{Shared, Source};
use crate::device::Device;
use crate::driver::check_not_forked;
use crate::element::{Element, write_bytes};
use crate::error::{Error, Result};
use crate::layout::Shape;
use crate::os::{Files, spawn};
use crate::plan::Access;
use crate::trace;

/// Why a batch is not there.
#[derive(Debug)]
#[non_exhaustive]
pub enum IngressError<E> {
    /// The source said so.
    Source(E),
    /// The source panicked, gave more than a batch holds, or the batch could not be brought to the device.
    Transfer(Error),
}

impl<E: fmt::Display> fmt::Display for IngressError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IngressError::Source(error) => write!(f, "the source failed: {error}"),
            IngressError::Transfer(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for IngressError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            IngressError::Source(error) => Some(error),
            IngressError::Transfer(error) => Some(error),
        }
    }
}

/// What an [`IngressPrefetcher`] gives: a batch, or why it is not there.
pub type IngressResult<T, E> = Result<IngressBatch<T, E>, IngressError<E>>;

/// Loads batches ahead of the work on them: threads have a source fill host memory and submit the copies, on a stream of the crate's own, while
/// the device is at the batches before. An iterator over [`IngressBatch`]es, in the source's order; it blocks while the next one is not loaded.
///
/// Batches go round: each is filled again when it was dropped and the work on it is over. On machines where the device's memory is the host's, what the
/// source fills is the batch itself.
///
/// ```
/// # cuda_sim::install().unwrap();
/// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
/// # let stream = transfer_tensor::cudarc::driver::CudaContext::new(gpu.ordinal())?.new_stream()?;
/// use transfer_tensor::{Device, IngressPrefetcher};
///
/// let device = Device::new(&stream)?;
/// let data: Vec<f32> = (0..1000).map(|i| i as f32).collect();
/// let batches = IngressPrefetcher::builder(&device, [64, 10]).depth(3).fill(move |index, rows: &mut [f32]| {
///     let rest = data.chunks(640).nth(index as usize).unwrap_or_default(); // read a file, decode, shuffle
///     rows[..rest.len()].copy_from_slice(rest);
///     Ok::<_, std::io::Error>(rest.len() / 10) // so many rows; 0: the end
/// })?;
/// let mut rows = 0;
/// for batch in batches {
///     let batch = batch?;
///     let view = batch.view()?; // the rows that were filled
///     let guard = view.device(&stream)?; // a kernel's argument: comes after the copy
///     rows += view.shape().dims()[0];
/// }
/// assert_eq!(rows, 100);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// | | |
/// |---|---|
/// | how far ahead | [`depth`](IngressBuilder::depth) batches: the source is asked for no more than that beyond what was taken |
/// | order | the source's, however many threads load |
/// | an error of the source, a panic | at its position; the batches behind it come all the same, but for an iterator's that panicked, which is not asked again |
/// | a fault of the device | at its position, and then it is the end |
/// | [`reset`](IngressPrefetcher::reset) | from the beginning; nothing that was loaded before comes out |
/// | dropped early | the threads end after what they are at, and are waited for: also where one waits for the device to be done with a batch; batches that are out stay what they are |
pub struct IngressPrefetcher<T: Element, E: Send + 'static> {
    shared: Arc<Shared<T, E>>,
    threads: Vec<JoinHandle<()>>,
    /// Its user knows that this is a forked child.
    told: bool,
}

/// Makes an [`IngressPrefetcher`].
#[derive(Debug)]
pub struct IngressBuilder<'d> {
    device: &'d Device,
    shape: Shape,
    depth: usize,
    threads: usize,
    access: Access,
    name: String,
    cpus: Option<Vec<usize>>,
}

impl IngressPrefetcher<u8, std::convert::Infallible> {
    /// Batches of this shape; its first dimension counts the rows, of which the last batch may have fewer.
    pub fn builder(device: &Device, shape: impl Into<Shape>) -> IngressBuilder<'_> {
        IngressBuilder {
            device,
            shape: shape.into(),
            depth: 2,
            threads: 1,
            access: Access::Streaming,
            name: "transfer-in".into(),
            cpus: None,
        }
    }
}

impl IngressBuilder<'_> {
    /// How many batches are loaded ahead; 2, if not said, and at least 1.
    pub fn depth(mut self, depth: usize) -> Self {
        self.depth = depth.max(1);
        self
    }

    /// How many threads load; 1, if not said, and at least that. More than the depth have nothing to do.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// How often the device touches a batch: what the strategy is planned with.
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// The name of the loader threads, which a number follows; `transfer-in`, if not said.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// The CPUs that the loader threads run on, by the system's numbers: those of the GPU's NUMA node, say. On Linux only.
    pub fn cpus(mut self, cpus: impl IntoIterator<Item = usize>) -> Self {
        self.cpus = Some(cpus.into_iter().collect());
        self
    }

    /// Batches that `fill` writes: it gets the batch's number, from 0 on, and all its elements, with whatever they held before, and says how many
    /// rows it has filled; 0 is the end. Several threads call it at once, if there are several, in any order.
    ///
    /// # Errors
    /// The shape has no rows or is too large; a thread can not be started, or bound to its CPUs.
    pub fn fill<T: Element, E: Send + 'static>(
        self,
        fill: impl Fn(u64, &mut [T]) -> Result<usize, E> + Send + Sync + 'static,
    ) -> Result<IngressPrefetcher<T, E>> {
        let threads = self.threads;
        self.build(Source::Fill(Box::new(fill)), threads)
    }

    /// Batches that an iterator gives, whole rows each; `make` makes it, again after a reset. One thread asks it.
    ///
    /// # Errors
    /// As [`fill`](Self::fill). An item that is no whole number of rows, or more than a batch holds, is an error at its position.
    pub fn items<T: Element, E: Send + 'static, V, I>(
        self,
        make: impl Fn() -> I + Send + Sync + 'static,
    ) -> Result<IngressPrefetcher<T, E>>
    where
        V: AsRef<[T]>,
        I: Iterator<Item = Result<V, E>> + Send + 'static,
    {
        let row = self.shape.row_elements()?;
        let all = self.shape.elements()?;
        let make = move || -> shared::Items<T, E> {
            let mut items = make();
            Box::new(move |into: &mut [T]| {
                let values = match items.next() {
                    Some(Ok(values)) => values,
                    Some(Err(error)) => return Err(IngressError::Source(error)),
                    None => return Ok(0),
                };
                let values = values.as_ref();
                match into.get_mut(..values.len()) {
                    Some(into) if values.len() % row == 0 && !values.is_empty() => into.copy_from_slice(values),
                    _ => {
                        let what =
                            format!("an item of {} elements, in batches of {all} with rows of {row}", values.len());
                        return Err(IngressError::Transfer(Error::unsupported(what, "it is no whole number of rows")));
                    }
                }
                Ok(values.len() / row)
            })
        };
        self.build(Source::Items(Box::new(make)), 1)
    }

    /// Batches that are read from files: a batch for each range of a file's bytes, in the order given, straight to the memory that is copied from.
    /// The bytes are the elements, as the machine has them (little-endian). However many files there are, 64 are open: others are opened again when they are read, and must be
    /// there yet.
    ///
    /// ```
    /// # cuda_sim::install().unwrap();
    /// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
    /// # let stream = transfer_tensor::cudarc::driver::CudaContext::new(gpu.ordinal())?.new_stream()?;
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("samples.bin");
    /// # std::fs::write(&path, vec![1u8; 100 * 4096])?;
    /// use transfer_tensor::{Device, IngressPrefetcher};
    ///
    /// let device = Device::new(&stream)?;
    /// let ranges = (0..100).step_by(32).map(|first: u64| (&path, first * 4096..(first + 32).min(100) * 4096));
    /// let batches = IngressPrefetcher::builder(&device, [32, 4096]).threads(4).depth(4).file_ranges::<u8, _>(ranges)?;
    /// let rows: Vec<_> = batches.map(|batch| batch.map(|batch| batch.rows())).collect::<Result<_, _>>()?;
    /// assert_eq!(rows, [32, 32, 32, 4]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`fill`](Self::fill). A file can not be opened, or is no regular file; a range is empty, is no whole number of rows, is more than a batch, or
    /// reaches beyond the end of its file. Later, at its position: reading failed, the file is gone, or was changed (as far as its length and its time tell), a byte is no value of the type (`bool`).
    pub fn file_ranges<T: Element, P: AsRef<Path>>(
        self,
        ranges: impl IntoIterator<Item = (P, Range<u64>)>,
    ) -> Result<IngressPrefetcher<T, Error>> {
        let row = self.shape.row_elements()?.saturating_mul(size_of::<T>()) as u64;
        let most = self.shape.bytes(size_of::<T>())? as u64;
        let (mut files, mut all) = (Files::default(), Vec::new());
        for (path, range) in ranges {
            let (name, file) = files.add(path.as_ref())?;
            let (start, end) = (range.start, range.end);
            let bytes = end.saturating_sub(start);
            if end > file.bytes() {
                return Err(file.failed(format!("bytes {start}..{end} of {} were asked for", file.bytes())));
            }
            if row == 0 || bytes == 0 || bytes % row != 0 || bytes > most {
                let what = format!("bytes {start}..{end}, in batches of {most} bytes with rows of {row}");
                return Err(file.failed(format!("{what}: no whole number of rows, or too many")));
            }
            all.push((name, start, bytes));
        }
        self.fill(move |number, values: &mut [T]| {
            let Some((name, start, bytes)) = usize::try_from(number).ok().and_then(|number| all.get(number)) else {
                return Ok(0);
            };
            let values = values.get_mut(..*bytes as usize / size_of::<T>()).unwrap_or_default();
            let file = files.get(*name)?;
            write_bytes(values, |bytes| file.read_at(*start, bytes))?;
            file.check_unchanged()?;
            Ok((bytes / row) as usize)
        })
    }

    fn build<T: Element, E: Send + 'static>(
        self,
        source: Source<T, E>,
        threads: usize,
    ) -> Result<IngressPrefetcher<T, E>> {
        self.shape.bytes(size_of::<T>())?;
        if self.shape.row_elements()? == 0 || self.shape.elements()? == 0 {
            return Err(Error::unsupported(format!("batches of shape {:?}", self.shape.dims()), "they hold nothing"));
        }
        let shared = Arc::new(Shared::new(self.device, self.shape, self.access, self.depth, source));
        let mut prefetcher = IngressPrefetcher { shared, threads: Vec::new(), told: false };
        for number in 0..threads {
            let shared = prefetcher.shared.clone();
            let work = move || {
                trace::name_thread();
                shared.load();
            };
            // Those that run end with the prefetcher, which is dropped here.
            prefetcher.threads.push(spawn(format!("{}-{number}", self.name), self.cpus.as_deref(), work)?);
        }
        Ok(prefetcher)
    }
}

impl<T: Element, E: Send + 'static> IngressPrefetcher<T, E> {
    /// Begins again with the source's first batch. What is loaded, or being loaded, does not come out any more; batches that were taken stay.
    pub fn reset(&mut self) {
        if check_not_forked().is_ok() {
            self.shared.reset();
        }
    }

    /// For a `Stream`: as `futures_core::Stream::poll_next`, without the crate.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<IngressResult<T, E>>> {
        match check_not_forked() {
            Ok(()) => self.shared.poll_next(context),
            Err(error) => Poll::Ready(self.forked(error)),
        }
    }

    fn forked(&mut self, error: Error) -> Option<IngressResult<T, E>> {
        (!std::mem::replace(&mut self.told, true)).then_some(Err(IngressError::Transfer(error)))
    }

    /// The next batch, to be awaited. `None` at the end.
    pub fn next_async(&mut self) -> impl Future<Output = Option<IngressResult<T, E>>> + Send + '_ {
        std::future::poll_fn(|context| self.poll_next(context))
    }
}

impl<T: Element, E: Send + 'static> Iterator for IngressPrefetcher<T, E> {
    type Item = IngressResult<T, E>;

    /// Blocks while the next batch is not loaded; not for its copy, which device guards wait for. In a forked child nothing is loaded: one
    /// error says so, and then it is the end.
    fn next(&mut self) -> Option<Self::Item> {
        match check_not_forked() {
            Ok(()) => self.shared.next(),
            Err(error) => self.forked(error),
        }
    }
}

impl<T: Element, E: Send + 'static> Drop for IngressPrefetcher<T, E> {
    fn drop(&mut self) {
        // A forked child has neither the threads nor, perhaps, a free lock.
        if check_not_forked().is_err() {
            return;
        }
        self.shared.close();
        for thread in self.threads.drain(..) {
            // A source may hold the last handle of what holds this.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

impl<T: Element, E: Send + 'static> fmt::Debug for IngressPrefetcher<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IngressPrefetcher").field("threads", &self.threads.len()).finish_non_exhaustive()
    }
}
