//! How much may be under way. No CUDA here: loom explores it.
//!
//! Invariants: what was let in is counted until it leaves, and never exceeds the limits; who waits for room is woken by whoever
//! leaves and by the end, and who waits for all to be delivered by the last that is.
#![deny(unsafe_code)]

use std::collections::VecDeque;
use std::time::Instant;

use crate::error::{Error, Kind, Result};
use crate::pool::WhenFull;
use crate::sync::{Condvar, Mutex};
use crate::trace;

#[derive(Debug)]
pub(super) struct Gate {
    state: Mutex<State>,
    /// Told of every one that leaves, and of the end.
    room: Condvar,
    /// Told of every one that is delivered.
    delivered: Condvar,
    most_items: usize,
    most_bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    items: usize,
    bytes: u64,
    open: Open,
    closed: Option<Error>,
}

/// How many were let in and are not delivered, by era: a flush begins one, and waits for those before.
#[derive(Debug, Default)]
struct Open {
    eras: VecDeque<usize>,
    /// The number of the first of them.
    first: u64,
}

impl Open {
    /// One more, in the last era; which.
    fn add(&mut self) -> u64 {
        match self.eras.back_mut() {
            Some(open) => *open += 1,
            None => self.eras.push_back(1),
        }
        self.last()
    }

    fn last(&self) -> u64 {
        self.first + (self.eras.len() as u64).saturating_sub(1)
    }

    fn remove(&mut self, era: u64) {
        if let Some(open) = self.eras.get_mut((era - self.first) as usize) {
            *open -= 1;
        }
        while self.eras.len() > 1 && self.eras.front() == Some(&0) {
            self.eras.pop_front();
            self.first += 1;
        }
    }

    /// Begins an era; the one before.
    fn turn(&mut self) -> u64 {
        match self.eras.back() {
            // The last one is as good as new.
            Some(0) if self.eras.len() > 1 => self.last() - 1,
            // Nothing is open.
            Some(0) | None => self.last(),
            Some(_) => {
                self.eras.push_back(0);
                self.last() - 1
            }
        }
    }

    /// How many up to this era.
    fn up_to(&self, era: u64) -> usize {
        self.eras.iter().zip(self.first..=era).map(|(open, _)| open).sum()
    }
}

impl Gate {
    pub(super) fn new(most_items: usize, most_bytes: u64) -> Self {
        Self {
            state: Mutex::new(State::default()),
            room: Condvar::new(),
            delivered: Condvar::new(),
            most_items,
            most_bytes,
        }
    }

    /// Lets an item in, which then is open and takes room; its era.
    ///
    /// # Errors
    /// It never fits; there is no room, and `when_full` is over; the end.
    pub(super) fn enter(&self, bytes: u64, when_full: WhenFull) -> Result<u64> {
        if bytes > self.most_bytes {
            return Err(Error::new(Kind::TooLarge { bytes, most: self.most_bytes }));
        }
        let deadline = match when_full {
            WhenFull::Wait(most) => Instant::now().checked_add(most),
            _ => None,
        };
        let mut waits = None;
        let mut state = self.state.lock();
        loop {
            if let Some(error) = &state.closed {
                return Err(error.clone());
            }
            let all = state.bytes.checked_add(bytes).filter(|all| *all <= self.most_bytes);
            if let (Some(all), true) = (all, state.items < self.most_items) {
                state.bytes = all;
                state.items += 1;
                return Ok(state.open.add());
            }
            if when_full != WhenFull::Refuse {
                waits.get_or_insert_with(|| trace::range(c"egress room", bytes));
            }
            let over = match (when_full, deadline) {
                (WhenFull::Refuse, _) => true,
                (WhenFull::Wait(_), Some(deadline)) if Instant::now() >= deadline => true,
                // Looks again: there may be room just now.
                (WhenFull::Wait(_), Some(deadline)) => {
                    self.room.wait_until(&mut state, deadline);
                    false
                }
                _ => {
                    self.room.wait(&mut state);
                    false
                }
            };
            if over {
                let (items, bytes) = (state.items, state.bytes);
                let (most_items, most_bytes) = (self.most_items, self.most_bytes);
                return Err(Error::new(Kind::Full { items, bytes, most_items, most_bytes }));
            }
        }
    }

    /// The room that an item took is free.
    pub(super) fn leave(&self, bytes: u64) {
        let mut state = self.state.lock();
        state.items -= 1;
        state.bytes -= bytes;
        drop(state);
        self.room.notify_all();
    }

    /// An item of an era is delivered, one way or another.
    pub(super) fn delivered(&self, era: u64) {
        self.state.lock().open.remove(era);
        self.delivered.notify_all();
    }

    /// Lets nothing in any more; the first reason stays.
    pub(super) fn close(&self, why: Error) {
        self.state.lock().closed.get_or_insert(why);
        self.room.notify_all();
    }

    pub(super) fn closed(&self) -> Option<Error> {
        self.state.lock().closed.clone()
    }

    /// Blocks until no more than `rest` items are open, or until `deadline`; whether that is so.
    pub(super) fn wait_delivered(&self, rest: usize, deadline: Option<Instant>) -> bool {
        self.wait(|_| u64::MAX, rest, deadline)
    }

    /// As [`wait_delivered`](Self::wait_delivered), of those that were let in before the call.
    pub(super) fn flush(&self, rest: usize, deadline: Option<Instant>) -> bool {
        self.wait(Open::turn, rest, deadline)
    }

    fn wait(&self, last: impl FnOnce(&mut Open) -> u64, rest: usize, deadline: Option<Instant>) -> bool {
        let mut waits = None;
        let mut state = self.state.lock();
        let last = last(&mut state.open);
        while state.open.up_to(last) > rest {
            waits.get_or_insert_with(|| trace::wait(c"egress drain"));
            match deadline {
                Some(deadline) => {
                    if self.delivered.wait_until(&mut state, deadline).timed_out() {
                        return state.open.up_to(last) <= rest;
                    }
                }
                None => self.delivered.wait(&mut state),
            }
        }
        true
    }

    /// Items and bytes that take room, and how many items are open.
    pub(super) fn level(&self) -> (usize, u64, usize) {
        let state = self.state.lock();
        (state.items, state.bytes, state.open.up_to(u64::MAX))
    }
}

#[cfg(all(test, not(transfer_tensor_loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_open_is_counted_by_era() {
        let mut open = Open::default();
        assert_eq!((open.up_to(open.last()), open.turn()), (0, 0), "nothing before the first");
        let first = [open.add(), open.add()];
        let before = open.turn();
        let second = open.add();
        assert_eq!((open.up_to(before), open.up_to(u64::MAX)), (2, 3));
        // The later one first: the era of the others stays.
        open.remove(second);
        assert_eq!((open.up_to(before), open.up_to(u64::MAX)), (2, 2));
        let third = open.turn();
        assert_eq!((third, open.turn(), open.eras.len()), (before, before, 2), "no era without an item");
        first.into_iter().for_each(|era| open.remove(era));
        assert_eq!((open.up_to(before), open.up_to(third), open.eras.len()), (0, 0, 1));
        assert!(open.add() > third);
        assert_eq!((open.up_to(third), open.up_to(u64::MAX)), (0, 1));
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
    fn who_waits_for_room_gets_it_and_who_drains_sees_the_last() {
        model(|| {
            let gate = Arc::new(Gate::new(1, 10));
            let era = gate.enter(10, WhenFull::Block).unwrap();
            let other = gate.clone();
            let other = thread::spawn(move || {
                let era = other.enter(3, WhenFull::Block).unwrap();
                other.delivered(era);
                other.leave(3);
            });
            gate.leave(10);
            gate.delivered(era);
            assert!(gate.wait_delivered(0, None) || gate.level().2 > 0);
            other.join().unwrap();
            assert_eq!(gate.level(), (0, 0, 0));
        });
    }

    #[test]
    fn who_flushes_sees_the_last_of_those_before() {
        model(|| {
            let gate = Arc::new(Gate::new(3, 10));
            let era = gate.enter(1, WhenFull::Block).unwrap();
            let other = gate.clone();
            let other = thread::spawn(move || {
                other.delivered(era);
                // Of before the flush or after it.
                let late = other.enter(1, WhenFull::Block).unwrap();
                other.delivered(late);
            });
            assert!(gate.flush(0, None));
            let after = gate.enter(1, WhenFull::Block).unwrap();
            gate.delivered(after);
            other.join().unwrap();
            assert!(gate.level().2 == 0);
        });
    }

    #[test]
    fn the_end_wakes_who_waits_for_room() {
        model(|| {
            let gate = Arc::new(Gate::new(1, 10));
            gate.enter(1, WhenFull::Block).unwrap();
            let other = gate.clone();
            let other = thread::spawn(move || other.enter(1, WhenFull::Block).is_err());
            gate.close(Error::new(Kind::Closed { why: "the end".into() }));
            assert!(other.join().unwrap());
        });
    }
}
