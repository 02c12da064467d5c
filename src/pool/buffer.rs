//! A block that is lent, until it is dropped.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use super::Lender;
use crate::driver::pinned::Pinned;

/// Page-locked memory, lent by a [`PinnedPool`](crate::PinnedPool) until it is dropped, on any thread.
///
/// It is the caller's alone: he who hands its address to a copy keeps the buffer until that has run.
pub struct PinnedBuffer {
    pub(super) block: Option<Pinned>,
    pub(super) len: usize,
    pub(super) lender: Arc<Lender>,
}

impl PinnedBuffer {
    /// The bytes that may be used; at least as many as the buffer's length.
    pub fn capacity(&self) -> usize {
        self.block.as_ref().map_or(0, Pinned::bytes)
    }

    /// The address at which the device sees it, if it does.
    pub fn device_address(&self) -> Option<u64> {
        self.block.as_ref().and_then(Pinned::device)
    }

    pub(crate) fn host(&self) -> NonNull<u8> {
        self.block.as_ref().map_or(NonNull::dangling(), Pinned::host)
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.block.as_ref().map_or(&[], |block| block.slice(self.len))
    }
}

impl DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        self.block.as_mut().map_or(&mut [], |block| block.slice_mut(len))
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer").field("len", &self.len).field("capacity", &self.capacity()).finish()
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.lender.give_back(block);
        }
    }
}
