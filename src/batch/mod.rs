//! Many small pieces of memory, handed over together.
#![deny(unsafe_code)]

pub(crate) mod plan;

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use crate::device::Device;
use crate::driver::pieces::{DeviceEnd, HostTarget, Work};
use crate::element::{Element, bytes_of};
use crate::error::{Error, Kind, Result};
use crate::tensor::DeviceMemory;

/// Many pieces between host and device memory, brought over together by [`run`](Batch::run); from [`Device::batch`].
///
/// A copy of a few KiB costs the driver as much as one of 100 KiB. So pieces from and to ordinary memory are packed through
/// page-locked buffers (two of 2 MiB, whatever the size of the batch), pieces that are neighbours on the device become one
/// copy, and what lies apart there goes in one call where the driver has it (`cuMemcpyBatchAsync`, CUDA 12.8); since that
/// refuses default streams, one of the crate's own does it in their place, ordered before and after. Pieces of 64 KiB and more
/// are copied from where they are if that is page-locked memory, or the device reads ordinary memory itself (Grace).
///
/// Many scattered pieces up are brought to their places by a small kernel of the crate's, which takes a fraction of the time. The
/// first batch of 256 or more in a context loads it, and that waits for what the device is doing, as allocating page-locked memory
/// does, and it takes longer where the driver has yet to compile it. Where it can not be had (before CUDA 12.0, or
/// without the driver's compiler), copies do.
///
/// All memory is borrowed until the batch has run; a batch that is dropped instead did nothing. Pieces of 0 bytes and empty
/// batches are fine, and make no driver call.
///
/// ```
/// # cuda_sim::install().unwrap();
/// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
/// # let ordinal = gpu.ordinal();
/// use transfer_tensor::{Device, cudarc::driver::CudaContext};
///
/// let stream = CudaContext::new(ordinal)?.new_stream()?;
/// let device = Device::new(&stream)?;
/// let mut cache = stream.alloc_zeros::<f32>(1000)?;
///
/// let (first, second) = (vec![1.0f32; 10], vec![2.0f32; 20]);
/// let mut batch = device.batch(&stream);
/// batch.upload_parts(&mut cache, [(300, &first[..]), (700, &second)])?;
/// let report = batch.run()?;
/// assert_eq!((report.pieces, report.bytes), (2, 120));
///
/// let mut back = [0.0f32; 5];
/// let view = cache.slice(700..705);
/// let mut batch = device.batch(&stream);
/// batch.download(&view, &mut back)?;
/// batch.run()?;
/// assert_eq!(back, [2.0; 5]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a batch does nothing before it is run"]
pub struct Batch<'a> {
    device: &'a Device,
    stream: &'a Arc<CudaStream>,
    work: Work<'a>,
    report: BatchReport,
}

/// What a [`Batch`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct BatchReport {
    /// Pieces handed over, those of 0 bytes included.
    pub pieces: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Blocks that the device was told to move.
    pub copies: u64,
    /// Driver calls that told it to; the launch of a kernel is one.
    pub calls: u64,
}

impl Device {
    /// Starts a batch of pieces, to run in the order of `stream`. Nothing is asked of the driver before [`Batch::run`].
    pub fn batch<'a>(&'a self, stream: &'a Arc<CudaStream>) -> Batch<'a> {
        Batch { device: self, stream, work: Work::default(), report: BatchReport::default() }
    }
}

impl<'a> Batch<'a> {
    /// Adds a piece to bring to the device: `target` gets all of `source`.
    ///
    /// The target is a `CudaSlice`, a view of one, or a guard of this crate on the batch's stream.
    ///
    /// # Errors
    /// The lengths differ, or the target is on another context; the batch is as before.
    pub fn upload<T: Element, D: DevicePtrMut<T> + DeviceMemory>(
        &mut self,
        source: &'a [T],
        target: &'a mut D,
    ) -> Result<&mut Self> {
        check_length(target.len(), source.len())?;
        self.upload_parts(target, [(0, source)])
    }

    /// Adds a piece to bring to the host: all of `source` goes to `target`.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn download<T: Element, D: DevicePtr<T> + DeviceMemory>(
        &mut self,
        source: &'a D,
        target: &'a mut [T],
    ) -> Result<&mut Self> {
        check_length(source.len(), target.len())?;
        self.download_parts(source, [(0, target)])
    }

    /// Adds pieces to bring to places of one block of device memory: each with the index of its first element there. Cheaper
    /// than as many views.
    ///
    /// # Errors
    /// A piece does not lie within the target, or that is on another context; the batch is as before. Pieces that overlap are
    /// an error of [`run`](Self::run).
    pub fn upload_parts<T: Element, D: DevicePtrMut<T> + DeviceMemory>(
        &mut self,
        target: &'a mut D,
        parts: impl IntoIterator<Item = (usize, &'a [T])>,
    ) -> Result<&mut Self> {
        self.check_context(target.stream())?;
        let len = target.len();
        let mut end = Some(DeviceEnd::written(target));
        self.add(|work, report| {
            for (start, source) in parts {
                let offset = check_part::<T>(start, source.len(), len)?;
                count(report, size_of_val(source));
                if !source.is_empty() {
                    end.take().into_iter().for_each(|end| work.end(end));
                    work.up(offset, bytes_of(source))?;
                }
            }
            Ok(())
        })
    }

    /// Adds pieces to bring from places of one block of device memory: each with the index of its first element there.
    /// Cheaper than as many views. They may overlap there.
    ///
    /// # Errors
    /// As [`upload_parts`](Self::upload_parts).
    pub fn download_parts<T: Element, D: DevicePtr<T> + DeviceMemory>(
        &mut self,
        source: &'a D,
        parts: impl IntoIterator<Item = (usize, &'a mut [T])>,
    ) -> Result<&mut Self> {
        self.check_context(source.stream())?;
        let len = source.len();
        let mut end = Some(DeviceEnd::read(source));
        self.add(|work, report| {
            for (start, target) in parts {
                let offset = check_part::<T>(start, target.len(), len)?;
                count(report, size_of_val(target));
                if !target.is_empty() {
                    end.take().into_iter().for_each(|end| work.end(end));
                    work.down(offset, HostTarget::new(target))?;
                }
            }
            Ok(())
        })
    }

    /// All of it or nothing.
    fn add(&mut self, add: impl FnOnce(&mut Work<'a>, &mut BatchReport) -> Result<()>) -> Result<&mut Self> {
        let (mark, report) = (self.work.mark(), self.report);
        match add(&mut self.work, &mut self.report) {
            Ok(()) => Ok(self),
            Err(error) => {
                self.work.back_to(mark);
                self.report = report;
                Err(error)
            }
        }
    }

    fn check_context(&self, stream: &CudaStream) -> Result<()> {
        if self.device.owns(stream) { Ok(()) } else { Err(Error::new(Kind::WrongContext { operation: "a batch" })) }
    }

    /// Brings all pieces over, uploads before downloads, after what was submitted to the stream.
    ///
    /// Blocks until sources on the host have been read and targets on the host are written; it does not wait for the device
    /// to have the uploads: that is so once the stream has passed. It waits for what was submitted to the stream before, if
    /// there are downloads, page-locked pieces of 64 KiB or more, or more than 4 MiB to pack; and for the device, the first time that
    /// there are many scattered pieces (see [`Batch`]).
    ///
    /// # Errors
    /// The stream is being captured or belongs to another context, two uploads overlap, the device holds something that is no
    /// `bool`, or the driver refused a call. Nothing is in flight then, except if the device has faulted; targets may be partly
    /// written.
    pub fn run(self) -> Result<BatchReport> {
        self.check_context(self.stream)?;
        let _range = crate::trace::range(c"batch", self.report.bytes);
        let counted = self.work.run(self.device, self.stream)?;
        Ok(BatchReport { copies: counted.copies, calls: counted.calls, ..self.report })
    }
}

fn count(report: &mut BatchReport, bytes: usize) {
    report.pieces += 1;
    report.bytes = report.bytes.saturating_add(bytes as u64);
}

fn check_length(device: usize, host: usize) -> Result<()> {
    if device == host { Ok(()) } else { Err(Error::new(Kind::Shape { shape: vec![device], needs: device, got: host })) }
}

/// The offset in bytes of a part that lies within `len` elements.
fn check_part<T>(start: usize, elements: usize, len: usize) -> Result<usize> {
    match start.checked_add(elements) {
        Some(end) if end <= len => Ok(start * size_of::<T>()),
        end => {
            let end = end.unwrap_or(usize::MAX);
            Err(Error::new(Kind::Range { start, end, len, unit: "elements" }))
        }
    }
}

impl fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BatchReport { pieces, bytes, .. } = self.report;
        f.debug_struct("Batch").field("pieces", &pieces).field("bytes", &bytes).finish_non_exhaustive()
    }
}
