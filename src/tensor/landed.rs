//! A tensor that has come to the host for good.

use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;

use super::TransferTensor;
use super::host_guard::HostRef;
use super::region::Region;
use crate::element::Element;
use crate::error::{Refused, Result};
use crate::layout::Shape;

/// A tensor's elements on the host, to read: nothing of it is on its way any more, and nobody else has it. Dereferences to `&[T]`.
///
/// It may be kept, sent to another thread, or made a tensor or a `Vec` again. Its memory goes back where it came from, such as the
/// device's pinned pool, when it is dropped.
pub struct HostTensor<T: Element> {
    start: NonNull<T>,
    len: usize,
    /// Keeps the elements where they are.
    region: Option<Arc<Region>>,
    tensor: TransferTensor<T>,
}

// SAFETY: as `&[T]` with its owner: the tensor is behind this value alone, so nobody writes to the elements.
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
            Ok((start, len, region)) => Ok(Self { start, len, region, tensor }),
            Err(error) => Err(Refused { error, value: tensor }),
        }
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        self.tensor.shape()
    }

    /// How many bytes were copied to have it here: 0 where host and device use the same memory.
    pub fn copied_bytes(&self) -> u64 {
        self.tensor.copied_bytes().1
    }

    /// The tensor again, to be used on the device or written to.
    pub fn into_tensor(self) -> TransferTensor<T> {
        self.tensor
    }

    /// The elements in ordinary memory of their own: a copy, unless the tensor was made from a `Vec`.
    ///
    /// # Errors
    /// As [`TransferTensor::into_vec`]; the tensor comes back.
    pub fn into_vec(self) -> Result<Vec<T>, Refused<TransferTensor<T>>> {
        // A tensor does not give memory away that something else keeps.
        drop(self.region);
        self.tensor.into_vec()
    }
}

impl<T: Element> Deref for HostTensor<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `new` found the elements current, valid and used by nobody; the region keeps them, and the tensor, through which
        // they could be written, is behind this value.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> fmt::Debug for HostTensor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostTensor").field("shape", self.shape()).field("pinned", &self.tensor.is_pinned()).finish()
    }
}
