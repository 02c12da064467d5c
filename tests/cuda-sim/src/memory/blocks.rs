//! Blocks of address space and their reuse: the block freed last is handed out first.

#![deny(unsafe_code)]

use super::arena::{self, Access};

/// A piece of a segment that one allocation owns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub(crate) front: u64,
    pub(crate) alias: u64,
    pub(crate) capacity: u64,
    /// Whether the block was in use before (and so holds poison).
    pub(crate) used: bool,
}

/// Allocations below this share segments.
const SMALL: u64 = 1 << 20;
/// The segment they share.
const SLAB: u64 = 4 << 20;
/// Alignment of device memory.
const ALIGN: u64 = 512;
/// Freed bytes kept for reuse; older blocks are given back to the system.
const KEEP: u64 = 512 << 20;

/// The blocks of one kind of memory on one device.
#[derive(Debug)]
pub(crate) struct Pool {
    access: Access,
    /// Whole pages for every block, so that a freed one can be taken from the program.
    paged: bool,
    free: Vec<Block>,
    free_bytes: u64,
    slab: Option<Block>,
}

impl Pool {
    /// Device memory: packed, with the given protection for the host.
    pub(crate) fn packed(access: Access) -> Self {
        Self { access, paged: false, free: Vec::new(), free_bytes: 0, slab: None }
    }

    /// Host-visible memory: whole pages.
    pub(crate) fn paged() -> Self {
        Self { paged: true, ..Self::packed(Access::ReadWrite) }
    }

    /// A block of at least `len` bytes.
    pub(crate) fn take(&mut self, len: u64) -> Option<Block> {
        let unit = if self.paged { arena::page_size() } else { ALIGN };
        let want = len.max(1).checked_next_multiple_of(unit)?;
        let most = want.saturating_mul(4);
        let found = self.free.iter().rposition(|block| (want..=most).contains(&block.capacity));
        if let Some(index) = found {
            let block = self.free.remove(index);
            self.free_bytes -= block.capacity;
            if self.paged {
                arena::protect(block.front, block.capacity, self.access);
            }
            return Some(block);
        }
        self.fresh(want)
    }

    fn fresh(&mut self, want: u64) -> Option<Block> {
        if self.paged || want >= SMALL {
            let segment = arena::map(want, self.access)?;
            let capacity = segment.len;
            return Some(Block { front: segment.front, alias: segment.alias, capacity, used: false });
        }
        if self.slab.is_none_or(|slab| slab.capacity < want) {
            let segment = arena::map(SLAB, self.access)?;
            self.slab = Some(Block { front: segment.front, alias: segment.alias, capacity: segment.len, used: false });
        }
        let slab = self.slab.as_mut()?;
        let block = Block { capacity: want, ..*slab };
        slab.front += want;
        slab.alias += want;
        slab.capacity -= want;
        Some(block)
    }

    /// Takes a freed (and poisoned) block back.
    pub(crate) fn give(&mut self, block: Block) {
        if self.paged {
            arena::protect(block.front, block.capacity, Access::None);
        }
        self.free_bytes += block.capacity;
        self.free.push(Block { used: true, ..block });
        while self.free_bytes > KEEP && self.free.len() > 1 {
            let oldest = self.free.remove(0);
            self.free_bytes -= oldest.capacity;
            arena::discard(oldest.alias, oldest.capacity);
        }
    }

    /// Gives all free memory back to the system.
    pub(crate) fn discard_free(&mut self) {
        for block in self.free.drain(..) {
            arena::discard(block.alias, block.capacity);
        }
        self.free_bytes = 0;
    }
}
