//! Tensors whose element type is known at run time only, as readers of files have them.

use std::fmt;

use super::{TensorOptions, TransferTensor};
use crate::element::{DType, Element};
use crate::error::{Error, Kind, Refused, Result};
use crate::layout::Shape;

/// A tensor with a run-time element type: its bytes, their [`DType`] and a shape.
///
/// ```
/// use transfer_tensor::{DType, DynTensor, TensorOptions, TransferTensor};
///
/// let mut tensor = DynTensor::zeros(TensorOptions::host_only(), DType::F32, [2, 2])?;
/// tensor.bytes_mut().host_mut()?[..4].copy_from_slice(&1f32.to_le_bytes());
/// let tensor: TransferTensor<f32> = tensor.downcast()?;
/// assert_eq!(*tensor.host()?, [1.0, 0.0, 0.0, 0.0]);
/// # Ok::<(), transfer_tensor::Error>(())
/// ```
pub struct DynTensor {
    bytes: TransferTensor<u8>,
    dtype: DType,
    shape: Shape,
}

impl DynTensor {
    /// A tensor of zero bytes.
    ///
    /// # Errors
    /// As [`TensorOptions::zeros`].
    pub fn zeros(options: TensorOptions<'_>, dtype: DType, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let bytes = options.zeros(shape.bytes(dtype.size())?)?;
        Ok(Self { bytes, dtype, shape })
    }

    /// Names the type and shape of bytes.
    ///
    /// # Errors
    /// Their number is not that of the shape's elements; the bytes come back.
    pub fn from_bytes(
        bytes: TransferTensor<u8>,
        dtype: DType,
        shape: impl Into<Shape>,
    ) -> Result<Self, Refused<TransferTensor<u8>>> {
        let shape = shape.into();
        match shape.bytes(dtype.size()) {
            Ok(needs) if needs == bytes.len() => Ok(Self { bytes, dtype, shape }),
            Ok(needs) => {
                let error = Error::new(Kind::Shape {
                    shape: shape.dims().to_vec(),
                    needs: needs / dtype.size(),
                    got: bytes.len() / dtype.size(),
                });
                Err(Refused { error, value: bytes })
            }
            Err(error) => Err(Refused { error, value: bytes }),
        }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The extents, in elements.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The bytes, as a tensor of one axis.
    pub fn bytes(&self) -> &TransferTensor<u8> {
        &self.bytes
    }

    /// The bytes, to write to.
    pub fn bytes_mut(&mut self) -> &mut TransferTensor<u8> {
        &mut self.bytes
    }

    /// The bytes alone.
    pub fn into_bytes(self) -> TransferTensor<u8> {
        self.bytes
    }

    /// The tensor with its element type known. Nothing is copied, except that for `bool` the bytes are looked at on the host.
    ///
    /// # Errors
    /// The type is another one, the bytes are not aligned for it, or (`bool`) one is no value of it; the tensor comes back.
    pub fn downcast<T: Element>(self) -> Result<TransferTensor<T>, Refused<Self>> {
        if self.dtype != T::DTYPE {
            let error = Error::new(Kind::DType { expected: T::DTYPE.name(), got: self.dtype.name() });
            return Err(Refused { error, value: self });
        }
        let Self { bytes, dtype, shape } = self;
        bytes.retype(shape).map_err(|(error, bytes, shape)| Refused { error, value: Self { bytes, dtype, shape } })
    }
}

impl<T: Element> From<TransferTensor<T>> for DynTensor {
    fn from(tensor: TransferTensor<T>) -> Self {
        let shape = tensor.shape().clone();
        Self { bytes: tensor.into_bytes(), dtype: T::DTYPE, shape }
    }
}

impl fmt::Debug for DynTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynTensor")
            .field("dtype", &self.dtype)
            .field("shape", &self.shape)
            .field("strategy", &self.bytes.strategy())
            .finish_non_exhaustive()
    }
}
