//! A layer: its tensors, and the guard of its use.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::element::{DType, Element};
use crate::error::{Error, Result};
use crate::layout::Shape;
use crate::tensor::{DeviceMut, DeviceRef, OffloadTensor, Room};

/// The tensors that are used together: a layer's weights, and what else belongs to them, such as an optimizer's state.
#[derive(Debug, Default)]
pub struct OffloadLayer {
    pub(super) tensors: Vec<OffloadTensor>,
}

impl OffloadLayer {
    /// Without tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor; its number is how many there were before.
    #[must_use]
    pub fn tensor(mut self, tensor: impl Into<OffloadTensor>) -> Self {
        self.tensors.push(tensor.into());
        self
    }

    /// The tensors.
    pub fn into_tensors(self) -> Vec<OffloadTensor> {
        self.tensors
    }
}

impl<T: Into<OffloadTensor>> FromIterator<T> for OffloadLayer {
    fn from_iter<I: IntoIterator<Item = T>>(tensors: I) -> Self {
        Self { tensors: tensors.into_iter().map(Into::into).collect() }
    }
}

/// A layer in use on one stream, from [`Offloader::layer`](crate::Offloader::layer). Its tensors are there for work on that stream.
///
/// When it is dropped the next layer may be asked for; that one's copies come after the work that was submitted.
#[derive(Debug)]
pub struct ActiveLayer<'a> {
    pub(super) number: usize,
    pub(super) tensors: Vec<ActiveTensor<'a>>,
}

/// A tensor of a layer in use.
pub struct ActiveTensor<'a> {
    pub(super) tensor: &'a OffloadTensor,
    pub(super) at: At<'a>,
    pub(super) stream: Arc<CudaStream>,
}

/// Where its bytes are for the device.
pub(super) enum At<'a> {
    /// In its own memory.
    Own,
    /// In a slot; whether it was written to there.
    Slot { room: &'a Room, range: &'a Range<usize>, written: &'a mut bool },
}

impl<'a> ActiveLayer<'a> {
    /// The layer's number.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Its tensors, in the order in which they were given.
    pub fn tensors(&self) -> &[ActiveTensor<'a>] {
        &self.tensors
    }

    /// Its tensors, to write to several at once.
    pub fn tensors_mut(&mut self) -> &mut [ActiveTensor<'a>] {
        &mut self.tensors
    }

    fn get(&self, tensor: usize) -> Result<&ActiveTensor<'a>> {
        self.tensors.get(tensor).ok_or_else(|| Error::absent(tensor, self.tensors.len(), "tensors"))
    }

    /// A tensor, for work on the stream to read. See [`DeviceRef`] for the ordering.
    ///
    /// # Errors
    /// There is no such tensor, it has another element type, or as [`TransferTensor::device`](crate::TransferTensor::device).
    pub fn device<T: Element>(&self, tensor: usize) -> Result<DeviceRef<'_, T>> {
        self.get(tensor)?.device()
    }

    /// A tensor, for work on the stream to read and write. What was written is copied home after that work, beside what follows.
    ///
    /// # Errors
    /// As [`device`](Self::device); the tensor is shared, or may only be read.
    pub fn device_mut<T: Element>(&mut self, tensor: usize) -> Result<DeviceMut<'_, T>> {
        let tensors = self.tensors.len();
        self.tensors.get_mut(tensor).ok_or_else(|| Error::absent(tensor, tensors, "tensors"))?.device_mut()
    }
}

impl ActiveTensor<'_> {
    /// The element type.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// The extents, in elements.
    pub fn shape(&self) -> &Shape {
        self.tensor.shape()
    }

    /// Whether it was brought to the device for this use, rather than being there (or readable from there) all the time.
    pub fn is_offloaded(&self) -> bool {
        matches!(self.at, At::Slot { .. })
    }

    /// As [`ActiveLayer::device`].
    ///
    /// # Errors
    /// As there.
    pub fn device<T: Element>(&self) -> Result<DeviceRef<'_, T>> {
        match &self.at {
            At::Own => self.tensor.read(&self.stream),
            At::Slot { room, range, .. } => room.read(self.tensor, range, &self.stream),
        }
    }

    /// As [`ActiveLayer::device_mut`].
    ///
    /// # Errors
    /// As there.
    pub fn device_mut<T: Element>(&mut self) -> Result<DeviceMut<'_, T>> {
        match &mut self.at {
            At::Own => self.tensor.write(&self.stream),
            At::Slot { room, range, written } => {
                let guard = room.write(self.tensor, range, &self.stream)?;
                **written = true;
                Ok(guard)
            }
        }
    }
}

impl fmt::Debug for ActiveTensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ActiveTensor")
            .field("dtype", &self.dtype())
            .field("shape", self.shape())
            .field("offloaded", &self.is_offloaded())
            .finish_non_exhaustive()
    }
}
