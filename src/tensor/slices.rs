//! One-shot copies between cudarc's slices and ordinary memory, for who has both already.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut};

use super::{DeviceMut, DeviceRef};
use crate::device::Device;
use crate::driver::Stream;
use crate::driver::memory::{alloc_device, read_address, write_address};
use crate::element::{DType, Element, bytes_of, validate};
use crate::error::{Error, Kind, Result};
use crate::os::advise_huge;
use crate::trace;

/// Device memory that is there for sure: cudarc's slices and views, and this crate's guards. Anybody may implement cudarc's
/// `DevicePtr`, and give whatever address he likes.
pub trait DeviceMemory: sealed::Sealed {}

impl<S: sealed::Sealed> DeviceMemory for S {}

mod sealed {
    pub trait Sealed {}
}

impl<T> sealed::Sealed for CudaSlice<T> {}
impl<T> sealed::Sealed for CudaView<'_, T> {}
impl<T> sealed::Sealed for CudaViewMut<'_, T> {}
impl<T: Element> sealed::Sealed for DeviceRef<'_, T> {}
impl<T: Element> sealed::Sealed for DeviceMut<'_, T> {}

/// Fresh memory from this size on is asked for on huge pages.
const HUGE_FROM: usize = 4 << 20;

impl Device {
    /// Copies `source`, ordinary memory, to the start of `target`, at the speed of the link: what cudarc's `memcpy_htod`
    /// does, in safe code and with several threads.
    ///
    /// ```
    /// # cuda_sim::install().unwrap();
    /// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
    /// # let stream = cudarc::driver::CudaContext::new(gpu.ordinal())?.new_stream()?;
    /// let device = transfer_tensor::Device::new(&stream)?;
    /// let values = vec![1.5f32; 1 << 20];
    /// let mut slice = device.upload_new(&stream, &values)?; // or `upload`, to a slice that there is
    /// stream.memset_zeros(&mut slice)?;
    /// assert_eq!(device.download_vec(&stream, &slice)?, vec![0.0; 1 << 20]); // or `download`
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Ordering
    /// In the order of `stream`. On return the source has been read; the target has the elements once the stream has passed.
    ///
    /// # Errors
    /// The target is shorter, one of the streams belongs to another context or is being captured, or the driver refused a
    /// call; then the target may be partly written.
    pub fn upload<T: Element, D: DevicePtrMut<T> + DeviceMemory>(
        &self,
        stream: &Arc<CudaStream>,
        source: &[T],
        target: &mut D,
    ) -> Result<()> {
        fits(source.len(), target.len())?;
        let queue = self.queue(stream, target.stream(), "upload")?;
        if source.is_empty() {
            return Ok(());
        }
        let bytes = bytes_of(source);
        let _range = trace::range(c"upload", bytes.len());
        let _bound = self.context().to_submit()?;
        write_address(self.context(), target, &queue, |to| {
            // SAFETY: the target is as long and borrowed exclusively, `queue` comes after its uses, and cudarc is told that it
            // was used there; the source is borrowed until the return.
            unsafe { self.copy_up(to, bytes.as_ptr(), bytes.len(), &queue) }
        })
    }

    /// Copies `source` to fresh device memory, allocated on `stream`: cudarc's `clone_htod`.
    ///
    /// # Ordering
    /// As [`upload`](Self::upload).
    ///
    /// # Errors
    /// As [`upload`](Self::upload); there is no device memory; the source is empty (the driver allocates no 0 bytes).
    pub fn upload_new<T: Element>(&self, stream: &Arc<CudaStream>, source: &[T]) -> Result<CudaSlice<T>> {
        let queue = self.queue(stream, stream, "upload")?;
        if source.is_empty() {
            return Err(Error::unsupported("an empty CudaSlice", "the driver allocates no 0 bytes"));
        }
        let mut target = alloc_device::<T>(self.context(), &queue, source.len())?;
        self.upload(stream, source, &mut target)?;
        Ok(target)
    }

    /// Copies all of `source` to the start of `target`, ordinary memory: cudarc's `memcpy_dtoh`.
    ///
    /// # Ordering
    /// In the order of `stream`; done on return.
    ///
    /// # Errors
    /// As [`upload`](Self::upload); (`bool`) a byte is no value of the type, then the target is as it was.
    pub fn download<T: Element, S: DevicePtr<T> + DeviceMemory>(
        &self,
        stream: &Arc<CudaStream>,
        source: &S,
        target: &mut [T],
    ) -> Result<()> {
        let len = source.len();
        fits(len, target.len())?;
        if T::DTYPE == DType::Bool {
            let values = self.download_vec(stream, source)?;
            if let Some(target) = target.get_mut(..len) {
                target.copy_from_slice(&values);
            }
            return Ok(());
        }
        // SAFETY: the target is at least as long, borrowed exclusively, and every byte is a value of its type.
        unsafe { self.download_to(stream, source, NonNull::from(target).cast()) }
    }

    /// Copies all of `source` to a new `Vec`, on huge pages where it is large: cudarc's `clone_dtoh`.
    ///
    /// # Ordering
    /// As [`download`](Self::download).
    ///
    /// # Errors
    /// As [`download`](Self::download); there is no host memory.
    pub fn download_vec<T: Element, S: DevicePtr<T> + DeviceMemory>(
        &self,
        stream: &Arc<CudaStream>,
        source: &S,
    ) -> Result<Vec<T>> {
        let queue = self.queue(stream, source.stream(), "download")?;
        if source.is_empty() {
            return Ok(Vec::new());
        }
        let _range = trace::range(c"download", source.len().saturating_mul(size_of::<T>()));
        let _bound = self.context().to_submit()?;
        read_address(self.context(), source, &queue, |from| {
            // SAFETY: the source is borrowed and `queue` comes after its writes.
            unsafe { self.download_from(from, source.len(), &queue) }
        })
    }

    /// Copies `len` elements from a device address to a new `Vec`; done when it returns.
    ///
    /// # Safety
    /// As [`Device::copy_down`]. The context is current.
    pub(super) unsafe fn download_from<T: Element>(&self, from: u64, len: usize, queue: &Stream) -> Result<Vec<T>> {
        let mut values = Vec::<T>::new();
        let bytes = len.saturating_mul(size_of::<T>());
        values.try_reserve_exact(len).map_err(|error| {
            Error::new(Kind::OutOfMemory { what: "host memory", bytes: bytes as u64, why: error.to_string() })
        })?;
        let start = NonNull::from(values.spare_capacity_mut()).cast::<u8>();
        let large = bytes >= HUGE_FROM;
        if large {
            advise_huge(start, bytes);
        }
        // SAFETY: `len` elements of room are there, ours alone; the source is the caller's word.
        unsafe { self.copy_down(start.as_ptr(), large, from, bytes, queue)? };
        // SAFETY: the bytes were written just now.
        validate::<T>(unsafe { std::slice::from_raw_parts(start.as_ptr(), bytes) })?;
        // SAFETY: as many elements were written, and each is a value of the type.
        unsafe { values.set_len(len) };
        Ok(values)
    }

    /// # Safety
    /// `target` is writable for all of `source`, and nobody looks there meanwhile.
    unsafe fn download_to<T: Element, S: DevicePtr<T> + DeviceMemory>(
        &self,
        stream: &Arc<CudaStream>,
        source: &S,
        target: NonNull<u8>,
    ) -> Result<()> {
        let queue = self.queue(stream, source.stream(), "download")?;
        let bytes = source.len().saturating_mul(size_of::<T>());
        if bytes == 0 {
            return Ok(());
        }
        let _range = trace::range(c"download", bytes);
        let _bound = self.context().to_submit()?;
        read_address(self.context(), source, &queue, |from| {
            // SAFETY: the source is borrowed and `queue` comes after its writes; the target is the caller's word.
            unsafe { self.copy_down(target.as_ptr(), false, from, bytes, &queue) }
        })
    }

    /// The caller's stream, checked.
    pub(super) fn queue(
        &self,
        stream: &Arc<CudaStream>,
        of_slice: &Arc<CudaStream>,
        operation: &'static str,
    ) -> Result<Stream> {
        if !self.owns(stream) || !self.owns(of_slice) {
            return Err(Error::new(Kind::WrongContext { operation }));
        }
        let queue = Stream::of_caller(stream);
        let _bound = self.context().to_submit()?;
        queue.check_not_capturing(operation)?;
        Ok(queue)
    }
}

/// Whether `len` elements have room.
fn fits(len: usize, room: usize) -> Result<()> {
    if len <= room { Ok(()) } else { Err(Error::new(Kind::Range { start: 0, end: len, len: room, unit: "elements" })) }
}
