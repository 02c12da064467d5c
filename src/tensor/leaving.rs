//! A tensor that is on the host between two uses on the device.

use std::sync::Arc;

use cudarc::driver::CudaSlice;

use super::TransferTensor;
use super::region::Region;
use crate::driver::memory::{free_behind, free_slice};
use crate::driver::{Stream, Way};
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
            free_on::<T>(region, lane);
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
        let device = self.store.need_device("offloading")?;
        let _bound = device.context().to_submit()?;
        let (_, mut submitted) = self.store.on_device(&all, false, lane)?;
        let event = device.behind_copy(lane, Way::Up, submitted.in_flight())?;
        submitted.close(&Arc::new(event));
        Ok(self.store.copied().0 - before)
    }
}

/// Frees device memory behind its uses on `lane`: on its own stream, which is the one that computes, the free would make all work that follows
/// wait for the copy.
fn free_on<T: Element>(region: Arc<Region>, lane: &Stream) {
    let Some(device) = region.on().cloned() else { return };
    // Who looks at it still frees it, as does a slice that others have too.
    let Some(region) = Arc::into_inner(region) else { return };
    let (pending, stream) = (region.uses(), region.stream());
    match (region.reclaim::<CudaSlice<T>>(), stream) {
        (Ok(slice), Some(stream)) => free_behind(device.context(), device.waiter(), (slice, stream), pending, lane),
        (Ok(slice), None) => free_slice(device.context(), slice),
        // Others may have it too, or know it by another type.
        (Err(region), _) => {
            if let Some(region) = Arc::into_inner(region) {
                region.free_by_waiter();
            }
        }
    }
}
