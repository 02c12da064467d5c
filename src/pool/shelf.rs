//! Blocks that wait to be used again, and how many bytes there may be in all. No CUDA here: loom explores it.
//!
//! The blocks lie in shards. A request asks its own first, and in the steady state nothing else is written. Who finds no block
//! in any of them locks all at once, and then nothing moves: there is a block, or room, or neither.
//!
//! Invariants: `reserved` counts every block that exists or is being made, lent ones too, and never exceeds the budget;
//! who waits for room is woken by every block that comes back and every grant that is given up.
#![deny(unsafe_code)]

use std::time::{Duration, Instant};

use super::shard::{Block, Locked, Shard};
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering, fence};

/// What happens when a pool has no room within its budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub enum WhenFull {
    /// An error at once.
    #[default]
    Refuse,
    /// Wait for others to give back what they have, as long as it takes.
    Block,
    /// Wait, but no longer than this.
    Wait(Duration),
}

/// More than there are threads that do nothing but lease, and few enough to look at all of them.
pub(crate) const SHARDS: usize = if cfg!(all(test, transfer_tensor_loom)) { 2 } else { 32 };

#[derive(Debug)]
pub(crate) struct Shelf<B> {
    shards: [Shard<B>; SHARDS],
    budget: u64,
    reserved: AtomicU64,
    waiting: AtomicU64,
    gate: Mutex<()>,
    freed: Condvar,
}

/// What a request gets.
#[derive(Debug)]
pub(crate) enum Taken<B> {
    /// A block that was used before.
    Block(B),
    /// Leave to make one, for which these must go first.
    Grant(Vec<B>),
}

impl<B: Block> Shelf<B> {
    pub(crate) fn new(budget: u64) -> Self {
        Self {
            shards: std::array::from_fn(|_| Shard::new()),
            budget,
            reserved: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            gate: Mutex::new(()),
            freed: Condvar::new(),
        }
    }

    pub(crate) fn budget(&self) -> u64 {
        self.budget
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::SeqCst)
    }

    /// Exact while nothing comes or goes.
    pub(crate) fn idle(&self) -> u64 {
        self.shards.iter().map(Shard::idle).sum()
    }

    /// How many requests got a block that was used before.
    pub(crate) fn reused(&self) -> u64 {
        self.shards.iter().map(Shard::reused).sum()
    }

    /// A block of `capacity` bytes (as `classes::capacity` gives them), or leave to make one; `None` when there is no room.
    /// The shard `home` is the first that is asked.
    pub(crate) fn take(&self, home: usize, capacity: usize, when_full: WhenFull) -> Option<Taken<B>> {
        let home = home % SHARDS;
        // One after the other, and none that has too little: what moves meanwhile is missed.
        let near = (home..home + SHARDS).filter_map(|shard| self.shards.get(shard % SHARDS));
        let mut full = near.filter(|shard| shard.idle() >= capacity as u64);
        if let Some(block) = full.find_map(|shard| shard.lock().take(capacity)) {
            return Some(Taken::Block(block));
        }
        if capacity as u64 > self.budget {
            return None;
        }
        if let Some(taken) = self.grant(capacity) {
            return Some(taken);
        }
        let deadline = match when_full {
            WhenFull::Refuse => return None,
            WhenFull::Block => None,
            // A time-out beyond what a clock can say is none.
            WhenFull::Wait(limit) => Instant::now().checked_add(limit),
        };
        let _range = crate::trace::range(c"wait for room", capacity);
        let mut gate = self.gate.lock();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // Either this thread sees what was given up, or who did that sees this thread.
        fence(Ordering::SeqCst);
        let taken = loop {
            if let Some(taken) = self.grant(capacity) {
                break Some(taken);
            }
            match deadline {
                None => self.freed.wait(&mut gate),
                Some(deadline) => {
                    if self.freed.wait_until(&mut gate, deadline).timed_out() {
                        break None;
                    }
                }
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        taken
    }

    /// Counts a block that is to be made, and takes out what must go for it; or a block that lies ready.
    fn grant(&self, capacity: usize) -> Option<Taken<B>> {
        let mut shards = self.lock();
        if let Some(block) = shards.iter_mut().find_map(|shard| shard.take(capacity)) {
            return Some(Taken::Block(block));
        }
        // As long as nobody else has the locks, what is reserved only becomes less.
        let (reserved, idle) = (self.reserved(), self.idle());
        reserved.saturating_sub(idle).checked_add(capacity as u64).filter(|&sum| sum <= self.budget)?;
        let (mut evicted, mut room) = (Vec::new(), 0);
        while reserved.saturating_sub(room) > self.budget - capacity as u64 {
            let Some(block) = take_largest(&mut shards) else { break };
            room += block.capacity() as u64;
            evicted.push(block);
        }
        // In one step: nobody sees more than the budget.
        self.reserved.fetch_add((capacity as u64).wrapping_sub(room), Ordering::SeqCst);
        Some(Taken::Grant(evicted))
    }

    /// All shards, always in the same order: each idle block is in one of them, and stays there.
    fn lock(&self) -> [Locked<'_, B>; SHARDS] {
        self.shards.each_ref().map(Shard::lock)
    }

    /// Takes the largest idle block out for good.
    pub(crate) fn evict(&self) -> Option<B> {
        let mut shards = self.lock();
        let block = take_largest(&mut shards)?;
        self.reserved.fetch_sub(block.capacity() as u64, Ordering::SeqCst);
        Some(block)
    }

    /// All idle blocks, for the end; without a lock.
    pub(crate) fn drain(&mut self) -> Vec<B> {
        self.shards.iter_mut().flat_map(Shard::drain).collect()
    }

    /// Takes a block that nothing uses back into the shard `home`.
    pub(crate) fn put(&self, home: usize, block: B) {
        if let Some(shard) = self.shards.get(home % SHARDS) {
            shard.lock().push(block);
        }
        // Who waits said so before he looked into the shard, under its lock: he found the block, or is seen here.
        self.tell();
    }

    /// A block that was granted was not made, or is gone.
    pub(crate) fn give_up(&self, capacity: usize) {
        self.reserved.fetch_sub(capacity as u64, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.tell();
    }

    fn tell(&self) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // Not between a waiter's look and its sleep.
            drop(self.gate.lock());
            self.freed.notify_all();
        }
    }
}

fn take_largest<B: Block>(shards: &mut [Locked<'_, B>]) -> Option<B> {
    shards.iter_mut().max_by_key(|shard| shard.largest())?.take_largest()
}

#[cfg(test)]
impl Block for usize {
    fn capacity(&self) -> usize {
        *self
    }
}

#[cfg(all(test, not(transfer_tensor_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::super::classes::capacity;
    use super::*;

    proptest! {
        /// Against a plain account of what exists: blocks fit, the sums are right, the budget holds.
        #[test]
        fn the_sums_are_right(steps in proptest::collection::vec((any::<bool>(), 0usize..3, 0usize..(64 << 20)), 1..200)) {
            const BUDGET: u64 = 256 << 20;
            let shelf: Shelf<usize> = Shelf::new(BUDGET);
            let (mut lent, mut exist) = (Vec::new(), 0u64);
            let mut reused = 0;
            for (take, home, bytes) in steps {
                if take {
                    let wanted = capacity(bytes).unwrap();
                    match shelf.take(home, wanted, WhenFull::Refuse) {
                        Some(Taken::Block(block)) => {
                            prop_assert!(block >= bytes);
                            reused += 1;
                            lent.push(block);
                        }
                        Some(Taken::Grant(evicted)) => {
                            exist -= evicted.iter().map(|&block| block as u64).sum::<u64>();
                            exist += wanted as u64;
                            lent.push(wanted);
                        }
                        None => prop_assert!(lent.iter().sum::<usize>() as u64 + wanted as u64 > BUDGET),
                    }
                } else if !lent.is_empty() {
                    shelf.put(home, lent.swap_remove(bytes % lent.len()));
                }
                prop_assert!(exist <= BUDGET);
                prop_assert_eq!((shelf.reserved(), shelf.reused()), (exist, reused));
                prop_assert_eq!(shelf.idle() + lent.iter().sum::<usize>() as u64, exist);
            }
            lent.into_iter().for_each(|block| shelf.put(0, block));
            while shelf.evict().is_some() {}
            prop_assert_eq!((shelf.reserved(), shelf.idle()), (0, 0));
        }
    }

    #[test]
    fn a_wait_ends() {
        let shelf: Shelf<usize> = Shelf::new(1 << 20);
        assert!(matches!(shelf.take(0, 1 << 20, WhenFull::Refuse), Some(Taken::Grant(_))));
        assert!(shelf.take(1, 4096, WhenFull::Wait(Duration::from_millis(5))).is_none());
        // What can never fit does not wait.
        assert!(shelf.take(0, 2 << 20, WhenFull::Block).is_none());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| shelf.take(1, 4096, WhenFull::Block));
            while shelf.waiting.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            shelf.put(0, 1 << 20);
            assert!(matches!(waiter.join(), Ok(Some(Taken::Grant(evicted))) if evicted == [1 << 20]));
        });
    }
}

#[cfg(all(test, transfer_tensor_loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    fn model(check: impl Fn() + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(check);
    }

    #[test]
    fn who_waits_for_a_block_gets_it() {
        model(|| {
            let shelf: Arc<Shelf<usize>> = Arc::new(Shelf::new(4096));
            assert!(matches!(shelf.take(0, 4096, WhenFull::Refuse), Some(Taken::Grant(_))));
            let other = shelf.clone();
            let waiter = thread::spawn(move || other.take(1, 4096, WhenFull::Block).is_some());
            shelf.put(0, 4096);
            assert!(waiter.join().unwrap());
        });
    }

    #[test]
    fn who_waits_for_room_gets_it_when_a_grant_is_given_up() {
        model(|| {
            let shelf: Arc<Shelf<usize>> = Arc::new(Shelf::new(4096));
            assert!(matches!(shelf.take(0, 4096, WhenFull::Refuse), Some(Taken::Grant(_))));
            let other = shelf.clone();
            let waiter = thread::spawn(move || other.take(1, 4096, WhenFull::Block).is_some());
            shelf.give_up(4096);
            assert!(waiter.join().unwrap());
            assert_eq!(shelf.reserved(), 4096);
        });
    }

    #[test]
    fn who_is_refused_leaves_no_more_than_there_may_be() {
        model(|| {
            let shelf: Arc<Shelf<usize>> = Arc::new(Shelf::new(8192));
            for _ in 0..2 {
                assert!(matches!(shelf.take(0, 4096, WhenFull::Refuse), Some(Taken::Grant(_))));
            }
            shelf.put(0, 4096);
            let other = shelf.clone();
            let taker = thread::spawn(move || other.take(1, 4096, WhenFull::Refuse).is_some());
            assert!(shelf.take(0, 8192, WhenFull::Refuse).is_none());
            taker.join().unwrap();
            assert_eq!(shelf.reserved(), 8192);
        });
    }

    #[test]
    fn two_takers_never_exceed_the_budget() {
        model(|| {
            let shelf: Arc<Shelf<usize>> = Arc::new(Shelf::new(4096));
            let other = shelf.clone();
            let taker = thread::spawn(move || other.take(1, 4096, WhenFull::Refuse).is_some());
            let here = shelf.take(0, 4096, WhenFull::Refuse).is_some();
            assert!(taker.join().unwrap() != here);
            assert_eq!(shelf.reserved(), 4096);
        });
    }

    /// Two blocks, of which the other thread never has more than one; but they move, against the order of the last look.
    #[test]
    fn a_block_that_lies_ready_is_found() {
        model(|| {
            let shelf = with_blocks([1, 1]);
            let other = shelf.clone();
            let mover = thread::spawn(move || {
                for _ in 0..2 {
                    if let Some(Taken::Block(block)) = other.take(1, 4096, WhenFull::Refuse) {
                        other.put(0, block);
                    }
                }
            });
            assert!(matches!(shelf.grant(4096), Some(Taken::Block(4096))));
            mover.join().unwrap();
            assert_eq!((shelf.reserved(), shelf.idle()), (8192, 4096));
        });
    }

    /// One needs both blocks out of the way, the other one of them: either gets what it wants.
    #[test]
    fn a_grant_takes_from_all_shards_or_from_none() {
        model(|| {
            let shelf = with_blocks([0, 1]);
            let other = shelf.clone();
            let taker = thread::spawn(move || other.take(1, 4096, WhenFull::Refuse).is_some());
            let granted = match shelf.take(0, 8192, WhenFull::Refuse) {
                Some(Taken::Grant(evicted)) => evicted == [4096, 4096],
                taken => taken.is_some(),
            };
            assert!(taker.join().unwrap() != granted);
            assert_eq!((shelf.reserved(), shelf.idle()), (8192, if granted { 0 } else { 4096 }));
        });
    }

    /// A budget of two blocks, which lie in these shards.
    fn with_blocks(homes: [usize; 2]) -> Arc<Shelf<usize>> {
        let shelf = Shelf::new(8192);
        for _ in homes {
            assert!(matches!(shelf.take(0, 4096, WhenFull::Refuse), Some(Taken::Grant(_))));
        }
        homes.into_iter().for_each(|home| shelf.put(home, 4096));
        Arc::new(shelf)
    }
}
