//! Contiguous parts of a tensor: borrowed, or shared.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Range, RangeBounds};
use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::store::Store;
use super::{DeviceMut, DeviceRef, HostMut, HostRef};
use crate::element::Element;
use crate::error::{Error, Kind, Result};
use crate::layout::{Shape, resolve};

/// Which bytes of a store, in which shape.
#[derive(Debug, Clone)]
pub(super) struct Window {
    pub(super) range: Range<usize>,
    pub(super) shape: Shape,
}

impl Window {
    pub(super) fn whole(store: &Store, shape: &Shape) -> Self {
        Self { range: 0..store.bytes(), shape: shape.clone() }
    }

    /// Rows of the first axis.
    pub(super) fn rows<T: Element>(&self, rows: impl RangeBounds<usize>) -> Result<Self> {
        let (shape, span) = self.shape.rows(rows)?;
        let (start, end) = (span.start * size_of::<T>(), span.end * size_of::<T>());
        Ok(Self { range: self.range.start + start..self.range.start + end, shape })
    }

    /// Bytes, as elements of one axis. Both ends must lie on elements.
    pub(super) fn bytes<T: Element>(&self, bytes: impl RangeBounds<usize>) -> Result<Self> {
        let bytes = resolve(bytes, self.range.len(), "bytes")?;
        for (what, value) in [("the start of the byte range", bytes.start), ("the end of the byte range", bytes.end)] {
            if value % size_of::<T>() != 0 {
                return Err(Error::new(Kind::Misaligned { what, value, align: size_of::<T>() }));
            }
        }
        let shape = Shape::from(bytes.len() / size_of::<T>());
        Ok(Self { range: self.range.start + bytes.start..self.range.start + bytes.end, shape })
    }

    /// A view given by offset and strides in elements, if it is one contiguous block.
    pub(super) fn strided<T: Element>(&self, offset: usize, shape: Shape, strides: &[isize]) -> Result<Self> {
        crate::layout::check_contiguous(&shape, strides)?;
        let elements = shape.elements()?;
        let len = self.range.len() / size_of::<T>();
        let end = offset.checked_add(elements).filter(|&end| end <= len);
        let Some(end) = end else {
            let end = offset.saturating_add(elements);
            return Err(Error::new(Kind::Range { start: offset, end, len, unit: "elements" }));
        };
        let base = self.range.start;
        Ok(Self { range: base + offset * size_of::<T>()..base + end * size_of::<T>(), shape })
    }
}

macro_rules! part_doc {
    (rows) => {
        "Rows `rows` of the first axis.\n\n# Errors\nThe range must lie within the first axis; a scalar has none."
    };
    (bytes) => {
        "A range of bytes, as elements of one axis.\n\n# Errors\nThe range must lie within the tensor and both its ends on elements."
    };
    (strided) => {
        "The view of `shape` that begins at element `offset` and has these strides (in elements), which must be one contiguous row-major block.\n\n# Errors\n[`Error::is_non_contiguous`] for a strided, overlapping or reversed view; it must lie within the tensor."
    };
}
pub(super) use part_doc;

/// A part of a tensor, borrowed to read.
#[derive(Clone)]
pub struct TensorView<'a, T: Element> {
    store: &'a Store,
    window: Window,
    _element: PhantomData<T>,
}

/// A part of a tensor, borrowed to read and write.
pub struct TensorViewMut<'a, T: Element> {
    store: &'a Store,
    window: Window,
    _element: PhantomData<&'a mut [T]>,
}

/// A tensor that is only read, or a part of one: cheap to clone, to use from any thread. The bytes stay as long as any
/// handle, or any use of the device, needs them.
#[derive(Clone)]
pub struct SharedTensor<T: Element> {
    store: Arc<Store>,
    window: Window,
    _element: PhantomData<T>,
}

macro_rules! read_access {
    () => {
        /// The extents.
        pub fn shape(&self) -> &Shape {
            &self.window.shape
        }

        /// The number of elements.
        pub fn len(&self) -> usize {
            self.window.range.len() / size_of::<T>()
        }

        /// Whether there is no element.
        pub fn is_empty(&self) -> bool {
            self.window.range.is_empty()
        }

        /// The elements, to read on the host. See [`TransferTensor::host`](super::TransferTensor::host).
        ///
        /// # Errors
        /// As [`TransferTensor::host`](super::TransferTensor::host).
        pub fn host(&self) -> Result<HostRef<'_, T>> {
            HostRef::new(&self.store, &self.window.range)
        }

        /// The elements, for work on `stream` to read. See
        /// [`TransferTensor::device`](super::TransferTensor::device).
        ///
        /// # Errors
        /// As [`TransferTensor::device`](super::TransferTensor::device).
        pub fn device(&self, stream: &Arc<CudaStream>) -> Result<DeviceRef<'_, T>> {
            DeviceRef::new(&self.store, &self.window.range, stream)
        }
    };
}

impl<'a, T: Element> TensorView<'a, T> {
    pub(super) fn new(store: &'a Store, window: Window) -> Self {
        Self { store, window, _element: PhantomData }
    }

    read_access!();

    #[doc = part_doc!(rows)]
    pub fn rows(&self, rows: impl RangeBounds<usize>) -> Result<TensorView<'a, T>> {
        Ok(Self::new(self.store, self.window.rows::<T>(rows)?))
    }
}

impl<'a, T: Element> TensorViewMut<'a, T> {
    /// The caller holds the tensor exclusively for `'a`.
    pub(super) fn new(store: &'a Store, window: Window) -> Self {
        Self { store, window, _element: PhantomData }
    }

    read_access!();

    /// The elements, to read and write on the host. See [`TransferTensor::host_mut`](super::TransferTensor::host_mut).
    ///
    /// # Errors
    /// As [`TransferTensor::host_mut`](super::TransferTensor::host_mut).
    pub fn host_mut(&mut self) -> Result<HostMut<'_, T>> {
        HostMut::new(self.store, &self.window.range)
    }

    /// The elements, for work on `stream` to read and write. See
    /// [`TransferTensor::device_mut`](super::TransferTensor::device_mut).
    ///
    /// # Errors
    /// As [`TransferTensor::device_mut`](super::TransferTensor::device_mut).
    pub fn device_mut(&mut self, stream: &Arc<CudaStream>) -> Result<DeviceMut<'_, T>> {
        DeviceMut::new(self.store, &self.window.range, stream)
    }

    /// Splits at row `row` of the first axis into two parts that can be used side by side.
    ///
    /// # Errors
    /// The row must lie within the first axis; a scalar has none.
    pub fn split_at(self, row: usize) -> Result<(TensorViewMut<'a, T>, TensorViewMut<'a, T>)> {
        let (head, tail) = (self.window.rows::<T>(..row)?, self.window.rows::<T>(row..)?);
        Ok((Self::new(self.store, head), Self::new(self.store, tail)))
    }
}

impl<T: Element> SharedTensor<T> {
    pub(super) fn new(store: Arc<Store>, shape: Shape) -> Self {
        let window = Window::whole(&store, &shape);
        Self { store, window, _element: PhantomData }
    }

    read_access!();

    #[doc = part_doc!(rows)]
    pub fn rows(&self, rows: impl RangeBounds<usize>) -> Result<SharedTensor<T>> {
        let window = self.window.rows::<T>(rows)?;
        Ok(Self { store: self.store.clone(), window, _element: PhantomData })
    }

    #[doc = part_doc!(bytes)]
    pub fn byte_range(&self, bytes: impl RangeBounds<usize>) -> Result<SharedTensor<T>> {
        let window = self.window.bytes::<T>(bytes)?;
        Ok(Self { store: self.store.clone(), window, _element: PhantomData })
    }

    /// The elements as a new `Vec`.
    ///
    /// # Errors
    /// As [`host`](SharedTensor::host).
    pub fn to_vec(&self) -> Result<Vec<T>> {
        Ok(self.host()?.to_vec())
    }

    pub(super) fn into_window(self) -> (Arc<Store>, Window) {
        (self.store, self.window)
    }

    /// The store, whole and unshared, or `self` again.
    pub(super) fn into_store(self) -> Result<(Arc<Store>, Shape), Self> {
        if self.window.range == (0..self.store.bytes()) && Arc::strong_count(&self.store) == 1 {
            Ok((self.store, self.window.shape))
        } else {
            Err(self)
        }
    }
}

macro_rules! debug {
    ($name:ident, $($lifetime:lifetime)?) => {
        impl<T: Element> fmt::Debug for $name<$($lifetime,)? T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("dtype", &T::DTYPE)
                    .field("shape", &self.window.shape)
                    .field("strategy", &self.store.strategy())
                    .finish_non_exhaustive()
            }
        }
    };
}
debug!(TensorView, '_);
debug!(TensorViewMut, '_);
debug!(SharedTensor,);
