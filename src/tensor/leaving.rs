//! A tensor that is on the host between two uses on the device.

use std::sync::Arc;

use super::TransferTensor;
use crate::driver::Stream;
use crate::element::Element;
use crate::error::Result;

impl<T: Element> TransferTensor<T> {
    /// Submits bringing what is newer on the device to the host on `lane`, behind which the device's memory is free. How many bytes it had
    /// there; none where both sides share them.
    pub(crate) fn leave(&mut self, lane: &Stream) -> Result<u64> {
        if self.is_empty() {
            return Ok(0);
        }
        let all = 0..self.store.bytes();
        // Also where nothing has to be copied: a forked child is told.
        let _bound = self.store.need_device("offloading")?.context().to_submit()?;
        self.store.on_host_by(&all, false, Some(lane))?;
        let left = self.store.with_state(|state| {
            state.device_current.remove(&all);
            if state.shared { None } else { state.device.take() }
        });
        Ok(left.map_or(0, |region| {
            let bytes = region.bytes() as u64;
            // On its own stream, which is the one that computes, the free would make all work that follows wait for the copy. Who looks at it still
            // frees it himself.
            if let Some(region) = Arc::into_inner(region) {
                region.free_on::<T>(lane);
            }
            bytes
        }))
    }

    /// Submits bringing it to the device on `lane`, in memory that is allocated and will be freed in its order. How many bytes come.
    pub(crate) fn come_back(&mut self, lane: &Stream) -> Result<u64> {
        let before = self.store.copied().0;
        let all = 0..self.store.bytes();
        if all.is_empty() {
            return Ok(0);
        }
        self.store.bring(&all, lane)?;
        Ok(self.store.copied().0 - before)
    }
}
