//! Stand-in for the copy engine: two slots, one thread.

use std::sync::Arc;

use super::copy::host_to_device;
use super::event::Event;
use super::memory::Pinned;
use super::stream::Stream;
use crate::copy::{Part, STAGED_PIECE, Source, chunks};
use crate::device::Device;
use crate::error::Result;

impl Device {
    /// # Safety
    /// The targets are the device's, valid and undisturbed until the stream has passed.
    pub(crate) unsafe fn stage_up_scattered(&self, parts: &[Part], source: &dyn Source, stream: &Stream) -> Result<()> {
        let bytes = parts.last().map_or(0, |part| part.source.end);
        let context = self.context();
        let _bound = context.enter()?;
        let slots = [Pinned::alloc(context, STAGED_PIECE)?, Pinned::alloc(context, STAGED_PIECE)?];
        let mut busy: [Option<Arc<Event>>; 2] = [None, None];
        let mut step = |index: usize, start: usize, len: usize| -> Result<()> {
            if let Some(event) = busy[index % 2].take() {
                event.wait()?;
            }
            let host = slots[index % 2].host().as_ptr();
            // SAFETY: the slot is idle and at least `len` long.
            source.fill(start, unsafe { std::slice::from_raw_parts_mut(host, len) })?;
            let first = parts.partition_point(|part| part.source.end <= start);
            for part in parts[first..].iter().take_while(|part| part.source.start < start + len) {
                let from = part.source.start.max(start);
                let to = part.source.end.min(start + len);
                let target = part.target + (from - part.source.start) as u64;
                // SAFETY: the caller's; inside the slot.
                unsafe { host_to_device(target, host.add(from - start), to - from, stream)? };
            }
            busy[index % 2] = Some(Arc::new(Event::record(context, stream)?));
            Ok(())
        };
        let result = chunks(bytes, STAGED_PIECE).try_for_each(|(index, range)| step(index, range.start, range.len()));
        if let Err(error) = stream.synchronize() {
            context.count_leak();
            std::mem::forget(slots);
            return Err(error);
        }
        result
    }
}
