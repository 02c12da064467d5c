//! A tensor that has come to the host for good.

use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use super::TransferTensor;
use super::host_guard::HostRef;
use super::options::TensorOptions;
use super::region::Region;
use crate::device::Device;
use crate::element::{Element, validate};
use crate::error::{Error, Refused, Result};
use crate::layout::Shape;
use crate::pool::PinnedBuffer;

/// A tensor's elements on the host, to read: nothing of it is on its way any more, and nobody else has it. Dereferences to `&[T]`.
///
/// It may be kept, sent to another thread, or made a tensor or a `Vec` again. Its memory goes back where it came from, such as the
/// device's pinned pool, when it is dropped.
pub struct HostTensor<T: Element> {
    start: NonNull<T>,
    len: usize,
    kept: Kept<T>,
}

/// What holds the elements.
enum Kept<T: Element> {
    /// A tensor, and what keeps its elements where they are.
    Tensor { region: Option<Arc<Region>>, tensor: TransferTensor<T> },
    /// Page-locked memory that they were copied to.
    Buffer { buffer: PinnedBuffer, shape: Shape, device: Device },
    /// Ordinary memory that they were copied to.
    Values { values: Vec<T>, shape: Shape, device: Device },
}

// SAFETY: as `&[T]` with its owner: what holds the elements is behind this value alone, so nobody writes to them.
unsafe impl<T: Element> Send for HostTensor<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for HostTensor<T> {}

impl<T: Element> HostTensor<T> {
    /// Waits for what is on its way; copies what the host does not have.
    ///
    /// # Errors
    /// As [`TransferTensor::host`]; the tensor comes back.
    pub(crate) fn new(tensor: TransferTensor<T>) -> Result<Self, Refused<TransferTensor<T>>> {
        match HostRef::new(&tensor.store, &(0..tensor.bytes())).map(HostRef::into_parts) {
            Ok((start, len, region)) => Ok(Self { start, len, kept: Kept::Tensor { region, tensor } }),
            Err(error) => Err(Refused { error, value: tensor }),
        }
    }

    /// `len` elements at the start of a buffer that nothing uses any more.
    ///
    /// # Errors
    /// They do not fit, or a byte is no value of the type (`bool`).
    pub(crate) fn in_buffer(device: &Device, buffer: PinnedBuffer, len: usize) -> Result<Self> {
        let start = buffer.host().cast::<T>();
        if len.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > buffer.capacity()) || !start.is_aligned() {
            return Err(Error::unsupported("elements in a buffer", "they do not fit it"));
        }
        validate::<T>(&buffer)?;
        Ok(Self { start, len, kept: Kept::Buffer { buffer, shape: Shape::from(len), device: device.clone() } })
    }

    /// Elements that were copied to ordinary memory.
    pub(super) fn of_values(device: &Device, mut values: Vec<T>) -> Self {
        let (start, len) = (NonNull::from(values.as_mut_slice()).cast(), values.len());
        Self { start, len, kept: Kept::Values { values, shape: Shape::from(len), device: device.clone() } }
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        match &self.kept {
            Kept::Tensor { tensor, .. } => tensor.shape(),
            Kept::Buffer { shape, .. } | Kept::Values { shape, .. } => shape,
        }
    }

    /// Whether the elements are in page-locked memory.
    pub fn is_pinned(&self) -> bool {
        match &self.kept {
            Kept::Tensor { tensor, .. } => tensor.is_pinned(),
            Kept::Buffer { .. } => true,
            Kept::Values { .. } => false,
        }
    }

    /// How many bytes were copied to have it here: 0 where host and device use the same memory.
    pub fn copied_bytes(&self) -> u64 {
        match &self.kept {
            Kept::Tensor { tensor, .. } => tensor.copied_bytes().1,
            Kept::Buffer { .. } | Kept::Values { .. } => size_of_val::<[T]>(self) as u64,
        }
    }

    /// The tensor again, to be used on the device or written to.
    ///
    /// # Errors
    /// As [`TensorOptions::zeros`](crate::TensorOptions::zeros), for what was not a tensor before.
    pub fn into_tensor(self) -> Result<TransferTensor<T>> {
        match self.kept {
            Kept::Tensor { tensor, .. } => Ok(tensor),
            Kept::Buffer { buffer, shape, device } => TensorOptions::new(&device).in_buffer(buffer, shape),
            Kept::Values { values, shape, device } => Ok(TensorOptions::new(&device).from_vec(values, shape)?),
        }
    }

    /// The elements in ordinary memory of their own: a copy, unless they lie in such memory.
    ///
    /// # Errors
    /// As [`TransferTensor::into_vec`]; the tensor comes back.
    pub fn into_vec(self) -> Result<Vec<T>, Refused<TransferTensor<T>>> {
        match self.kept {
            Kept::Tensor { region, tensor } => {
                // A tensor does not give memory away that something else keeps.
                drop(region);
                tensor.into_vec()
            }
            Kept::Buffer { .. } => Ok(self.to_vec()),
            Kept::Values { values, .. } => Ok(values),
        }
    }
}

impl<T: Element> Deref for HostTensor<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the elements were found current, valid and used by nobody; what keeps them, and could write to them, is behind this
        // value.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> fmt::Debug for HostTensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostTensor").field("shape", self.shape()).field("pinned", &self.is_pinned()).finish()
    }
}
