//! Stands in for the pool and the copy engine until they are here.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::memory::Pinned;
use super::stream::Stream;
use super::{Event, copy};
use crate::copy::{STAGED_PIECE, chunks};
use crate::device::Device;
use crate::error::Result;

pub(crate) trait Source: Sync {
    fn fill(&self, offset: usize, into: &mut [u8]) -> Result<()>;
}

pub(crate) trait Sink: Sync {
    fn take(&self, offset: usize, from: &[u8]) -> Result<()>;
}

#[derive(Debug)]
pub(crate) struct PinnedBuffer {
    memory: Pinned,
    bytes: usize,
}

impl PinnedBuffer {
    pub(crate) fn host(&self) -> NonNull<u8> {
        self.memory.host()
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: ours, as long, set when it was made.
        unsafe { std::slice::from_raw_parts(self.memory.host().as_ptr(), self.bytes) }
    }
}

impl DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.memory.host().as_ptr(), self.bytes) }
    }
}

pub(crate) struct Pool<'d>(&'d Device);

impl Pool<'_> {
    pub(crate) fn try_acquire(&self, bytes: usize) -> Result<PinnedBuffer> {
        let memory = Pinned::alloc(self.0.context(), bytes)?;
        // SAFETY: ours, as long.
        unsafe { memory.host().as_ptr().write_bytes(0, bytes) };
        Ok(PinnedBuffer { memory, bytes })
    }
}

impl Device {
    pub(crate) fn pool(&self) -> Pool<'_> {
        Pool(self)
    }

    pub(crate) unsafe fn stage_up(
        &self,
        target: u64,
        source: &dyn Source,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        let mut slot = self.pool().try_acquire(bytes.min(STAGED_PIECE))?;
        chunks(bytes, STAGED_PIECE).try_for_each(|(_, range)| {
            source.fill(range.start, slot.get_mut(..range.len()).unwrap_or_default())?;
            // SAFETY: the caller's; waited for below.
            unsafe {
                copy::host_to_device(target + range.start as u64, slot.host().as_ptr(), range.len(), stream)
                    .and(Event::record(self.context(), stream).map(drop))
                    .and(stream.synchronize())
            }
        })
    }

    pub(crate) unsafe fn stage_down(&self, sink: &dyn Sink, source: u64, bytes: usize, stream: &Stream) -> Result<()> {
        let slot = self.pool().try_acquire(bytes.min(STAGED_PIECE))?;
        chunks(bytes, STAGED_PIECE).try_for_each(|(_, range)| {
            // SAFETY: the caller's; waited for before the slot is looked at.
            unsafe {
                copy::device_to_host(slot.host().as_ptr(), source + range.start as u64, range.len(), stream)
                    .and(stream.synchronize())?;
            }
            sink.take(range.start, slot.get(..range.len()).unwrap_or_default())
        })
    }
}
