//! A batch that is out.
#![deny(unsafe_code)]

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::shared::Shared;
use crate::driver::check_not_forked;
use crate::element::Element;
use crate::error::Result;
use crate::tensor::{DeviceMut, TensorView, TransferTensor};

/// A batch that an [`IngressPrefetcher`](crate::IngressPrefetcher) has loaded: a tensor, whose device guards come after its copy. When it is
/// dropped, anywhere, its memory is filled again, once the work on it is over.
pub struct IngressBatch<T: Element, E: Send + 'static> {
    tensor: TransferTensor<T>,
    number: u64,
    rows: usize,
    shared: Arc<Shared<T, E>>,
}

impl<T: Element, E: Send + 'static> IngressBatch<T, E> {
    pub(super) fn new(tensor: TransferTensor<T>, number: u64, rows: usize, shared: Arc<Shared<T, E>>) -> Self {
        Self { tensor, number, rows, shared }
    }

    /// Its number in the source's order, from 0 on.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// How many rows were filled; the others hold what was there before.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// As [`TransferTensor::device_mut`]: to change the batch in place.
    ///
    /// # Errors
    /// As there.
    pub fn device_mut(&mut self, stream: &Arc<CudaStream>) -> Result<DeviceMut<'_, T>> {
        self.tensor.device_mut(stream)
    }

    /// The rows that were filled.
    ///
    /// # Errors
    /// None that are known.
    pub fn view(&self) -> Result<TensorView<'_, T>> {
        self.tensor.view(..self.rows)
    }

    /// The tensor, for good: the prefetcher makes another one.
    pub fn into_tensor(mut self) -> TransferTensor<T> {
        std::mem::replace(&mut self.tensor, TransferTensor::hollow())
    }
}

impl<T: Element, E: Send + 'static> Deref for IngressBatch<T, E> {
    type Target = TransferTensor<T>;

    fn deref(&self) -> &TransferTensor<T> {
        &self.tensor
    }
}

impl<T: Element, E: Send + 'static> Drop for IngressBatch<T, E> {
    fn drop(&mut self) {
        // In a forked child the lock may never be free.
        if check_not_forked().is_err() {
            return;
        }
        self.shared.give_back(std::mem::replace(&mut self.tensor, TransferTensor::hollow()));
    }
}

impl<T: Element, E: Send + 'static> fmt::Debug for IngressBatch<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IngressBatch").field("number", &self.number).field("rows", &self.rows).finish_non_exhaustive()
    }
}
