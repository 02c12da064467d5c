//! Tensors whose bytes come from elsewhere than a tensor's own host side: from files.

use std::ops::Range;
use std::sync::Arc;

use super::TransferTensor;
use super::dynamic::DynTensor;
use super::existing::{Keep, SHARED_MEMORY, kept};
use super::options::{Init, TensorOptions, both_sides};
use super::region::{Region, Submitted};
use super::store::{State, Store};
use crate::copy::Source;
use crate::copy::pieces::Part;
use crate::device::Device;
use crate::driver::{Event, Stream};
use crate::element::DType;
use crate::error::{Error, Kind, Result};
use crate::layout::Shape;
use crate::plan::Decision;
use crate::ranges::RangeSet;

/// Device memory of tensors that one source is going to fill, one after another.
#[derive(Debug)]
pub(crate) struct Landing<'d> {
    device: &'d Device,
    stream: &'d Stream,
    decision: Decision,
    waiting: Vec<(Arc<Store>, Arc<Region>)>,
    parts: Vec<Part>,
}

impl<'d> Landing<'d> {
    /// # Errors
    /// The stream is being captured.
    pub(crate) fn new(device: &'d Device, stream: &'d Stream, decision: Decision) -> Result<Self> {
        let _bound = device.context().to_submit()?;
        stream.check_not_capturing("loading a checkpoint")?;
        Ok(Self { device, stream, decision, waiting: Vec::new(), parts: Vec::new() })
    }

    /// A tensor in device memory of its own, whose bytes are the source's next. They are zeros until [`land`](Self::land).
    pub(crate) fn allocate(&mut self, dtype: DType, shape: Shape) -> Result<DynTensor> {
        let bytes = shape.bytes(dtype.size())?;
        let store =
            Store::of_dtype(Some(self.device.clone()), bytes, dtype, self.decision.clone(), None, State::default());
        if bytes > 0 {
            let region = Arc::new(store.allocate_device(self.device, self.stream)?);
            let start = self.parts.last().map_or(0, |part| part.source.end);
            self.parts.push(Part { source: start..start + bytes, target: region.device()? });
            self.waiting.push((store.clone(), region));
        }
        DynTensor::from_bytes(TransferTensor::new(store, Shape::from(bytes)), dtype, shape).map_err(Error::from)
    }

    /// Fills what was allocated since the last call. The source has been read when this returns, and the tensors' uses come
    /// after the copies.
    ///
    /// # Errors
    /// The source's, or the driver refused a call. What was submitted has run, and the tensors are zeros.
    pub(crate) fn land(&mut self, source: &dyn Source) -> Result<()> {
        let (waiting, parts) = (std::mem::take(&mut self.waiting), std::mem::take(&mut self.parts));
        if parts.is_empty() {
            return Ok(());
        }
        let _bound = self.device.context().to_submit()?;
        self.stream.check_not_capturing("loading a checkpoint")?;
        let mut submitted = Submitted::default();
        for (_, region) in &waiting {
            let write = region.open(self.stream, &(0..region.bytes()), true);
            submitted.push(region, write);
        }
        // SAFETY: each part is the whole of a region, which tracks the write and outlives it.
        unsafe { self.device.stage_up_scattered(&parts, source, self.stream)? };
        submitted.close(&Arc::new(Event::record(self.device.context(), self.stream)?));
        for (store, region) in waiting {
            store.count_upload(region.bytes());
            store.with_state(|state| {
                state.device_current = RangeSet::full(region.bytes());
                state.device = Some(region);
            });
        }
        Ok(())
    }
}

impl DynTensor {
    /// A read-only tensor over part of bytes that others share, planned already.
    pub(crate) fn over_shared<O>(
        device: &Device,
        decision: Decision,
        owner: Arc<O>,
        range: Range<usize>,
        dtype: DType,
        shape: Shape,
    ) -> Result<Self>
    where
        O: AsRef<[u8]> + Send + Sync + 'static,
    {
        let all = AsRef::<[u8]>::as_ref(&*owner);
        let outside = || Error::new(Kind::Range { start: range.start, end: range.end, len: all.len(), unit: "bytes" });
        let part = all.get(range.clone()).ok_or_else(outside)?;
        let (host, bytes) = (std::ptr::NonNull::from(part).cast::<u8>(), part.len());
        let keep = |registration| kept(registration, Keep(owner.clone()));
        let options = TensorOptions::new(device);
        // SAFETY: the `Arc` keeps the bytes where they are; it is only shared, so nobody writes to them.
        let store = unsafe { options.over_host::<u8>(host, bytes, Some(SHARED_MEMORY), decision, keep)? };
        Self::from_bytes(TransferTensor::new(store, Shape::from(bytes)), dtype, shape).map_err(Error::from)
    }

    /// A tensor in memory that both sides use, planned already, whose bytes `fill` sets.
    ///
    /// # Errors
    /// There is no room, or `fill` failed.
    pub(crate) fn filled(
        device: &Device,
        mut decision: Decision,
        dtype: DType,
        shape: Shape,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<Self> {
        let bytes = shape.bytes(dtype.size())?;
        let state = if bytes == 0 {
            State::default()
        } else {
            let region = TensorOptions::new(device).shared_region(&mut decision, bytes, &Init::Later)?;
            // SAFETY: the region is ours alone and `bytes` long; the system has set its pages, if nobody else.
            fill(unsafe { std::slice::from_raw_parts_mut(region.host()?.as_ptr(), bytes) })?;
            both_sides(region)
        };
        let store = Store::of_dtype(Some(device.clone()), bytes, dtype, decision, None, state);
        Self::from_bytes(TransferTensor::new(store, Shape::from(bytes)), dtype, shape).map_err(Error::from)
    }
}
