//! Blocks that wait to be used again, and how many bytes there may be in all. No CUDA here: loom explores it.
//!
//! Invariants: `reserved` counts every block that exists or is being made, lent ones too, and never exceeds the budget;
//! who waits for room is woken by every block that comes back and every grant that is given up.
#![deny(unsafe_code)]

use std::time::{Duration, Instant};

use super::classes::{CLASSES, class};
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

#[derive(Debug)]
pub(crate) struct Shelf<B> {
    classes: Vec<Mutex<Vec<B>>>,
    /// Blocks above the classes.
    large: Mutex<Vec<B>>,
    budget: u64,
    reserved: AtomicU64,
    idle: AtomicU64,
    waiting: AtomicU64,
    gate: Mutex<()>,
    freed: Condvar,
}

/// A block knows its size.
pub(crate) trait Block {
    fn capacity(&self) -> usize;
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
            classes: (0..if cfg!(all(test, transfer_tensor_loom)) { 1 } else { CLASSES })
                .map(|_| Mutex::new(Vec::new()))
                .collect(),
            large: Mutex::new(Vec::new()),
            budget,
            reserved: AtomicU64::new(0),
            idle: AtomicU64::new(0),
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

    pub(crate) fn idle(&self) -> u64 {
        self.idle.load(Ordering::SeqCst)
    }

    /// A block of `capacity` bytes (as `classes::capacity` gives them), or leave to make one; `None` when there is no room.
    pub(crate) fn take(&self, capacity: usize, when_full: WhenFull) -> Option<Taken<B>> {
        if let Some(block) = self.reuse(capacity) {
            return Some(Taken::Block(block));
        }
        let granted = self.grant(capacity);
        if let Some(Taken::Grant(evicted)) = granted {
            return Some(Taken::Grant(evicted));
        }
        // What `grant` looked through may just have been missed by somebody who waits.
        self.tell();
        if granted.is_some() {
            return granted;
        }
        let deadline = match when_full {
            _ if capacity as u64 > self.budget => return None,
            WhenFull::Refuse => return None,
            WhenFull::Block => None,
            // A time-out beyond what a clock can say is none.
            WhenFull::Wait(limit) => Instant::now().checked_add(limit),
        };
        let mut gate = self.gate.lock();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // Either this thread sees what `tell` was called for, or `tell` sees this thread.
        fence(Ordering::SeqCst);
        let taken = loop {
            if let Some(block) = self.reuse(capacity) {
                break Some(Taken::Block(block));
            }
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

    fn reuse(&self, capacity: usize) -> Option<B> {
        let block = match class(capacity) {
            Some(class) => self.classes.get(class)?.lock().pop(),
            None => {
                // Exact sizes: one that is at most an eighth larger.
                let mut large = self.large.lock();
                let fits = |block: &B| (capacity..=capacity + capacity / 8).contains(&block.capacity());
                let best = (0..large.len()).filter(|&i| large.get(i).is_some_and(fits));
                best.min_by_key(|&i| large.get(i).map(B::capacity)).map(|i| large.swap_remove(i))
            }
        }?;
        self.idle.fetch_sub(block.capacity() as u64, Ordering::SeqCst);
        Some(block)
    }

    /// Counts a block that is to be made, and takes out what must go for it; or a block of this size that came back just now.
    fn grant(&self, capacity: usize) -> Option<Taken<B>> {
        if capacity as u64 > self.budget {
            return None;
        }
        let (mut evicted, mut room) = (Vec::new(), 0);
        let taken = loop {
            // What was taken out counts until this succeeds: somebody else would use the room, and it may have to stay.
            let add = |reserved: u64| {
                reserved.checked_sub(room)?.checked_add(capacity as u64).filter(|&sum| sum <= self.budget)
            };
            if self.reserved.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add).is_ok() {
                return Some(Taken::Grant(evicted));
            }
            match self.take_idle() {
                Some(block) if block.capacity() == capacity => break Some(Taken::Block(block)),
                Some(block) => {
                    room += block.capacity() as u64;
                    evicted.push(block);
                }
                None => break None,
            }
        };
        // Not enough, or not needed: they stay.
        evicted.into_iter().for_each(|block| self.shelve(block));
        taken
    }

    /// Takes the largest idle block out for good.
    pub(crate) fn evict(&self) -> Option<B> {
        let block = self.take_idle()?;
        self.reserved.fetch_sub(block.capacity() as u64, Ordering::SeqCst);
        Some(block)
    }

    /// The largest idle block; it still counts.
    fn take_idle(&self) -> Option<B> {
        let from_large = self.large.lock().pop();
        let block = from_large.or_else(|| self.classes.iter().rev().find_map(|class| class.lock().pop()))?;
        self.idle.fetch_sub(block.capacity() as u64, Ordering::SeqCst);
        Some(block)
    }

    /// All idle blocks, for the end; without a lock.
    pub(crate) fn drain(&mut self) -> Vec<B> {
        let classes = self.classes.iter_mut().chain([&mut self.large]);
        classes.flat_map(|class| std::mem::take(class.get_mut())).collect()
    }

    /// Takes back a block that nothing uses.
    pub(crate) fn put(&self, block: B) {
        self.shelve(block);
        self.tell();
    }

    fn shelve(&self, block: B) {
        let capacity = block.capacity();
        // Counted first: who takes it out again counts it back.
        self.idle.fetch_add(capacity as u64, Ordering::SeqCst);
        match class(capacity).and_then(|class| self.classes.get(class)) {
            Some(class) => class.lock().push(block),
            None => self.large.lock().push(block),
        }
    }

    /// A block that was granted was not made, or is gone.
    pub(crate) fn give_up(&self, capacity: usize) {
        self.reserved.fetch_sub(capacity as u64, Ordering::SeqCst);
        self.tell();
    }

    fn tell(&self) {
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            // Not between a waiter's look and its sleep.
            drop(self.gate.lock());
            self.freed.notify_all();
        }
    }
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
        fn the_sums_are_right(steps in proptest::collection::vec((any::<bool>(), 0usize..(64 << 20)), 1..200)) {
            const BUDGET: u64 = 256 << 20;
            let shelf: Shelf<usize> = Shelf::new(BUDGET);
            let (mut lent, mut exist) = (Vec::new(), 0u64);
            for (take, bytes) in steps {
                if take {
                    let wanted = capacity(bytes).unwrap();
                    match shelf.take(wanted, WhenFull::Refuse) {
                        Some(Taken::Block(block)) => {
                            prop_assert!(block >= bytes);
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
                    shelf.put(lent.swap_remove(bytes % lent.len()));
                }
                prop_assert!(exist <= BUDGET);
                prop_assert_eq!(shelf.reserved(), exist);
                prop_assert_eq!(shelf.idle() + lent.iter().sum::<usize>() as u64, exist);
            }
            lent.into_iter().for_each(|block| shelf.put(block));
            while shelf.evict().is_some() {}
            prop_assert_eq!((shelf.reserved(), shelf.idle()), (0, 0));
        }
    }

    #[test]
    fn a_wait_ends() {
        let shelf: Shelf<usize> = Shelf::new(1 << 20);
        assert!(matches!(shelf.take(1 << 20, WhenFull::Refuse), Some(Taken::Grant(_))));
        assert!(shelf.take(4096, WhenFull::Wait(Duration::from_millis(5))).is_none());
        // What can never fit does not wait.
        assert!(shelf.take(2 << 20, WhenFull::Block).is_none());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| shelf.take(4096, WhenFull::Block));
            while shelf.waiting.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            shelf.put(1 << 20);
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
            assert!(matches!(shelf.take(4096, WhenFull::Refuse), Some(Taken::Grant(_))));
            let other = shelf.clone();
            let waiter = thread::spawn(move || other.take(4096, WhenFull::Block).is_some());
            shelf.put(4096);
            assert!(waiter.join().unwrap());
        });
    }

    #[test]
    fn who_waits_for_room_gets_it_when_a_grant_is_given_up() {
        model(|| {
            let shelf: Arc<Shelf<usize>> = Arc::new(Shelf::new(4096));
            assert!(matches!(shelf.take(4096, WhenFull::Refuse), Some(Taken::Grant(_))));
            let other = shelf.clone();
            let waiter = thread::spawn(move || other.take(4096, WhenFull::Block).is_some());
            shelf.give_up(4096);
            assert!(waiter.join().unwrap());
            assert_eq!(shelf.reserved(), 4096);
        });
    }

    /// It takes idle blocks out, finds that they are too few, and puts them back.
    #[test]
    fn who_is_refused_leaves_no_more_than_there_may_be() {
        model(|| {
            let shelf: Arc<Shelf<usize>> = Arc::new(Shelf::new(8192));
            for _ in 0..2 {
                assert!(matches!(shelf.take(4096, WhenFull::Refuse), Some(Taken::Grant(_))));
            }
            shelf.put(4096);
            let other = shelf.clone();
            let taker = thread::spawn(move || other.take(4096, WhenFull::Refuse).is_some());
            assert!(shelf.take(8192, WhenFull::Refuse).is_none());
            taker.join().unwrap();
            assert_eq!(shelf.reserved(), 8192);
        });
    }

    #[test]
    fn two_takers_never_exceed_the_budget() {
        model(|| {
            let shelf: Arc<Shelf<usize>> = Arc::new(Shelf::new(4096));
            let other = shelf.clone();
            let taker = thread::spawn(move || other.take(4096, WhenFull::Refuse).is_some());
            let here = shelf.take(4096, WhenFull::Refuse).is_some();
            assert!(taker.join().unwrap() != here);
            assert_eq!(shelf.reserved(), 4096);
        });
    }
}
