//! Rows that lie apart from each other, on the host or on the device.
#![deny(unsafe_code)]

pub(crate) mod geometry;

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};

use crate::device::Device;
use crate::driver::pieces::{DeviceEnd, HostTarget};
use crate::driver::rows::{download, upload};
use crate::element::{Element, bytes_of};
use crate::error::{Error, Kind, Result};
use crate::tensor::DeviceMemory;
use geometry::Geometry;

/// A block of rows, for [`Device::upload_rows`] and [`Device::download_rows`]. All lengths are in elements.
///
/// The device has the elements of a row one after the other, and the rows [`device_pitch`](Self::device_pitch) apart. On the
/// host both distances are free, so that columns and transposed matrices travel too:
///
/// | host memory | on the device, without gaps | |
/// |---|---|---|
/// | `[1000, 64]`, its columns 16 to 24 | `[1000, 8]` | `Rows::new(1000, 8).host_pitch(64)`, from element 16 on |
/// | `[1000, 2]`, its second column | `[1000]` | `Rows::new(1000, 1).host_pitch(2)`, from element 1 on |
/// | `[30, 40]`, transposed | `[40, 30]` | `Rows::new(40, 30).host_pitch(1).host_step(40)` |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Rows {
    rows: usize,
    width: usize,
    host_pitch: usize,
    host_step: usize,
    device_pitch: usize,
}

impl Rows {
    /// `rows` rows of `width` elements, without gaps on either side.
    pub fn new(rows: usize, width: usize) -> Self {
        Self { rows, width, host_pitch: width, host_step: 1, device_pitch: width }
    }

    /// How far the first elements of two rows are apart on the host. In an upload rows may overlap there: 0 repeats one.
    pub fn host_pitch(mut self, elements: usize) -> Self {
        self.host_pitch = elements;
        self
    }

    /// How far two elements of a row are apart on the host; 1 if not said.
    pub fn host_step(mut self, elements: usize) -> Self {
        self.host_step = elements;
        self
    }

    /// How far the first elements of two rows are apart on the device.
    pub fn device_pitch(mut self, elements: usize) -> Self {
        self.device_pitch = elements;
        self
    }

    fn geometry<T>(&self, host: usize, device: usize) -> Result<Geometry> {
        let strides = [self.host_pitch, self.host_step, self.device_pitch];
        let geometry = Geometry::new([self.rows, self.width], strides, size_of::<T>())?;
        let fits = |reach: usize, len: usize| {
            let end = reach / size_of::<T>();
            if end <= len { Ok(()) } else { Err(Error::new(Kind::Range { start: 0, end, len, unit: "elements" })) }
        };
        fits(geometry.on_host(), host)?;
        fits(geometry.on_device(), device)?;
        Ok(geometry)
    }
}

impl Device {
    /// Brings rows to the device, in the order of `stream`.
    ///
    /// Rows that are one block on the device are packed by the CPU, whatever they are on the host. Where they are apart there,
    /// rows of 512 bytes and more go by the device's two-dimensional copy (`cuMemcpy2DAsync`), from where they are if that is
    /// page-locked memory, else packed before; up to 64 narrower ones too. **More and narrower rows that are apart on the
    /// device are refused**: the copy engine takes hundreds of times longer for them than for one block.
    ///
    /// Returns when the source has been read; the device has the rows once the stream has passed. Blocks for what was
    /// submitted to the stream before where more than 4 MiB are packed, or page-locked memory is read from where it is.
    ///
    /// # Errors
    /// The rows do not lie within `source` or `target`, or overlap on the device; they would have to be contiguous there
    /// ([`Error::is_non_contiguous`]); the stream is being captured or belongs to another context; the driver refused a call.
    /// Nothing is in flight then, except if the device has faulted.
    ///
    /// ```
    /// # cuda_sim::install().unwrap();
    /// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
    /// # let ordinal = gpu.ordinal();
    /// use transfer_tensor::{Device, Rows, cudarc::driver::CudaContext};
    ///
    /// let stream = CudaContext::new(ordinal)?.new_stream()?;
    /// let device = Device::new(&stream)?;
    /// let matrix = [1, 2, 3, 4, 5, 6]; // [2, 3]
    /// let mut transposed = stream.alloc_zeros::<i32>(6)?;
    /// device.upload_rows(&stream, &matrix, &Rows::new(3, 2).host_pitch(1).host_step(3), &mut transposed)?;
    /// assert_eq!(stream.clone_dtoh(&transposed)?, [1, 4, 2, 5, 3, 6]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn upload_rows<'a, T: Element, D: DevicePtrMut<T> + DeviceMemory>(
        &'a self,
        stream: &'a Arc<CudaStream>,
        source: &'a [T],
        rows: &Rows,
        target: &'a mut D,
    ) -> Result<()> {
        self.check_context([stream, target.stream()])?;
        let geometry = rows.geometry::<T>(source.len(), target.len())?;
        let _range = crate::trace::range(c"upload rows", geometry.bytes());
        upload(self, &geometry, bytes_of(source), DeviceEnd::written(target), stream)
    }

    /// Brings rows to the host, in the order of `stream`; done when it returns. Elements of `target` between the rows stay as
    /// they are.
    ///
    /// As [`upload_rows`](Self::upload_rows), but many narrow rows that are apart on the device are brought over with all that
    /// lies between them, and picked by the CPU, if that is at most eight times their bytes.
    ///
    /// # Errors
    /// As [`upload_rows`](Self::upload_rows); rows overlap on the host; the device holds something
    /// that is no `bool`. The target may be partly written.
    pub fn download_rows<'a, T: Element, D: DevicePtr<T> + DeviceMemory>(
        &'a self,
        stream: &'a Arc<CudaStream>,
        source: &'a D,
        rows: &Rows,
        target: &'a mut [T],
    ) -> Result<()> {
        self.check_context([stream, source.stream()])?;
        let geometry = rows.geometry::<T>(target.len(), source.len())?;
        let _range = crate::trace::range(c"download rows", geometry.bytes());
        download(self, &geometry, HostTarget::new(target), DeviceEnd::read(source), stream)
    }

    fn check_context(&self, streams: [&CudaStream; 2]) -> Result<()> {
        if streams.into_iter().all(|stream| self.owns(stream)) {
            Ok(())
        } else {
            Err(Error::new(Kind::WrongContext { operation: "rows" }))
        }
    }
}
