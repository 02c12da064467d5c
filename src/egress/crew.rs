//! Who does what of a pool's threads. No CUDA here: loom explores it.
//!
//! The threads are alike. At most one of them *leads*: it asks for what is under way. What it finds is consumed by whoever is free, itself
//! included, so that an item which comes alone is consumed where it was found, without another thread having to wake up. There is one
//! thread more than may consume at a time: somebody can always lead.
//!
//! Invariants: what arrives is handed out exactly once, in order; while something is under way or may be consumed, some thread that is not
//! consuming is awake or has been woken, unless all that may consume do; at the end what is left is handed out, and then every
//! thread ends.
#![deny(unsafe_code)]

use std::time::Duration;

use crate::order::{Order, Sorter};
use crate::sync::{Condvar, Mutex};

#[derive(Debug)]
pub(super) struct Crew<I> {
    state: Mutex<State<I>>,
    /// For threads that have nothing to do.
    work: Condvar,
    /// For the leader, which rests between two questions.
    news: Condvar,
    /// How many consume at a time.
    most: usize,
    /// Somebody always leads, and does not rest.
    awake: bool,
}

#[derive(Debug)]
struct State<I> {
    ready: Sorter<I>,
    /// Under way. The leader may find an item before it was counted.
    flying: isize,
    /// Goes up with each that is under way.
    news: u64,
    threads: usize,
    consuming: usize,
    leading: bool,
    resting: bool,
    /// Threads asleep that nobody has woken, and those that were woken and sleep yet.
    asleep: usize,
    woken: usize,
    closed: bool,
}

/// What a thread is to do.
#[derive(Debug)]
pub(super) enum Task<I> {
    Consume(I),
    Lead,
    End,
}

/// What a thread did before.
#[derive(Debug)]
pub(super) enum Done<'a, I> {
    /// It begins.
    Nothing,
    Consumed,
    /// It led, and found these.
    Led(&'a mut Vec<(u64, I)>),
}

impl<I> Crew<I> {
    pub(super) fn new(order: Order, most: usize, awake: bool) -> Self {
        let state = State {
            ready: Sorter::new(order),
            flying: 0,
            news: 0,
            threads: 0,
            consuming: 0,
            leading: false,
            resting: false,
            asleep: 0,
            woken: 0,
            closed: false,
        };
        Self { state: Mutex::new(state), work: Condvar::new(), news: Condvar::new(), most: most.max(1), awake }
    }

    /// Blocks for something to do.
    pub(super) fn next(&self, done: Done<'_, I>) -> Task<I> {
        let mut state = self.state.lock();
        match done {
            Done::Nothing => state.threads += 1,
            Done::Consumed => state.consuming -= 1,
            Done::Led(found) => {
                state.leading = false;
                state.flying -= found.len() as isize;
                for (number, item) in found.drain(..) {
                    state.ready.put(number, item);
                }
            }
        }
        loop {
            if state.consuming < self.most
                && let Some((_, item)) = state.ready.take()
            {
                state.consuming += 1;
                self.hand_on(&mut state);
                return Task::Consume(item);
            }
            if !state.leading && (state.flying > 0 || self.awake && !state.closed) {
                state.leading = true;
                return Task::Lead;
            }
            if state.closed {
                return Task::End;
            }
            state.asleep += 1;
            while state.woken == 0 {
                self.work.wait(&mut state);
            }
            state.woken -= 1;
        }
    }

    /// Wakes another thread if there is something to do for it and nobody about to.
    fn hand_on(&self, state: &mut State<I>) {
        let work =
            state.consuming < self.most && state.ready.has_next() || !state.leading && (state.flying > 0 || self.awake);
        let about = state.threads - state.asleep - state.consuming - usize::from(state.leading);
        if work && about == 0 && state.asleep > 0 {
            state.asleep -= 1;
            state.woken += 1;
            self.work.notify_one();
        }
    }

    /// An item is under way: asking for it will find it.
    pub(super) fn launched(&self) {
        let mut state = self.state.lock();
        state.flying += 1;
        state.news += 1;
        if state.resting {
            state.resting = false;
            self.news.notify_one();
        }
        self.hand_on(&mut state);
    }

    /// An item that was not under way here has come.
    pub(super) fn arrived(&self, number: u64, item: I) {
        let mut state = self.state.lock();
        state.ready.put(number, item);
        self.hand_on(&mut state);
    }

    /// For the leader, before it asks.
    pub(super) fn news(&self) -> u64 {
        self.state.lock().news
    }

    /// For the leader: sleeps for `pause` at most, and not at all if there is news since `seen`.
    pub(super) fn rest(&self, seen: u64, pause: Duration) {
        let mut state = self.state.lock();
        if state.news == seen && !state.closed {
            state.resting = true;
            self.news.wait_for(&mut state, pause);
            state.resting = false;
        }
    }

    /// Nothing more will be under way.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.woken += std::mem::take(&mut state.asleep);
        drop(state);
        self.work.notify_all();
        self.news.notify_all();
    }

    /// How many have come and were not handed out.
    pub(super) fn len(&self) -> usize {
        self.state.lock().ready.len()
    }
}
