//! The idle blocks that lie ready for some of the threads. No CUDA here: loom explores it.
#![deny(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use super::classes::fitting;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// A block knows its size.
pub(crate) trait Block {
    fn capacity(&self) -> usize;
}

/// In cache lines of its own, of which processors fetch two at once: a thread that is alone here writes no line that others
/// write. Such a write costs as much as a whole lease.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Shard<B> {
    blocks: Mutex<Blocks<B>>,
    /// Bytes of `blocks`. Written under the lock, read without it by who can do with the value of a moment ago.
    idle: AtomicU64,
    /// How many blocks were taken to be used again; written under the lock too.
    reused: AtomicU64,
}

#[derive(Debug)]
struct Blocks<B> {
    /// Here, rather than behind a pointer: the allocator may put what belongs to two shards into one cache line.
    few: [Option<B>; 4],
    /// By size. A list may be empty: it is kept, so that blocks that go in and out cost no allocation.
    rest: BTreeMap<usize, Vec<B>>,
}

impl<B: Block> Shard<B> {
    pub(super) fn new() -> Self {
        let blocks = Blocks { few: [const { None }; 4], rest: BTreeMap::new() };
        Self { blocks: Mutex::new(blocks), idle: AtomicU64::new(0), reused: AtomicU64::new(0) }
    }

    pub(super) fn idle(&self) -> u64 {
        self.idle.load(Ordering::Relaxed)
    }

    pub(super) fn reused(&self) -> u64 {
        self.reused.load(Ordering::Relaxed)
    }

    pub(super) fn lock(&self) -> Locked<'_, B> {
        Locked { blocks: self.blocks.lock(), shard: self }
    }

    /// All blocks, for the end; without a lock.
    pub(super) fn drain(&mut self) -> Vec<B> {
        let Blocks { few, rest } = self.blocks.get_mut();
        few.iter_mut().filter_map(Option::take).chain(std::mem::take(rest).into_values().flatten()).collect()
    }
}

/// A shard that nobody else changes.
pub(super) struct Locked<'a, B> {
    blocks: MutexGuard<'a, Blocks<B>>,
    shard: &'a Shard<B>,
}

impl<B: Block> Locked<'_, B> {
    /// A block for a request of `capacity` bytes.
    pub(super) fn take(&mut self, capacity: usize) -> Option<B> {
        let block = self.remove(fitting(capacity))?;
        self.shard.reused.store(self.shard.reused() + 1, Ordering::Relaxed);
        Some(block)
    }

    /// The size of the largest block; 0: there is none.
    pub(super) fn largest(&self) -> usize {
        let few = self.blocks.few.iter().flatten().map(B::capacity);
        let rest = self.blocks.rest.iter().rev().find(|(_, blocks)| !blocks.is_empty());
        few.chain(rest.map(|(&size, _)| size)).max().unwrap_or(0)
    }

    /// The largest block, which is not to be used again.
    pub(super) fn take_largest(&mut self) -> Option<B> {
        let largest = self.largest();
        self.remove(largest..=largest)
    }

    pub(super) fn push(&mut self, block: B) {
        let capacity = block.capacity();
        self.shard.idle.store(self.shard.idle() + capacity as u64, Ordering::Relaxed);
        match self.blocks.few.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = Some(block),
            None => self.blocks.rest.entry(capacity).or_default().push(block),
        }
    }

    fn remove(&mut self, sizes: RangeInclusive<usize>) -> Option<B> {
        let Blocks { few, rest } = &mut *self.blocks;
        let block = match few.iter_mut().find(|place| place.as_ref().is_some_and(|b| sizes.contains(&b.capacity()))) {
            Some(place) => place.take(),
            None => rest.range_mut(sizes).find_map(|(_, blocks)| blocks.pop()),
        }?;
        self.shard.idle.store(self.shard.idle().saturating_sub(block.capacity() as u64), Ordering::Relaxed);
        Some(block)
    }
}
