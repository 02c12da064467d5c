//! What waits for a worker, in the order in which it is to be taken. No CUDA here: loom explores it.
//!
//! Invariants: what is put in is taken exactly once, by order of submission or of arrival; a worker that sleeps is woken by what
//! it may take and by the end; after the end what is left is taken, and then nothing more.
#![deny(unsafe_code)]

use crate::order::{Order, Sorter};
use crate::sync::{Condvar, Mutex};

#[derive(Debug)]
pub(super) struct Line<I> {
    state: Mutex<State<I>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<I> {
    items: Sorter<I>,
    closed: bool,
}

impl<I> Line<I> {
    pub(super) fn new(order: Order) -> Self {
        Self { state: Mutex::new(State { items: Sorter::new(order), closed: false }), changed: Condvar::new() }
    }

    /// Puts in the item with a number; each number from 0 on comes once.
    pub(super) fn put(&self, number: u64, item: I) {
        self.state.lock().items.put(number, item);
        self.changed.notify_all();
    }

    /// Blocks for the next item; `None` at the end.
    pub(super) fn take(&self) -> Option<I> {
        let mut state = self.state.lock();
        loop {
            if let Some((_, item)) = state.items.take() {
                return Some(item);
            }
            if state.closed {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }

    /// The next item, if it is there.
    pub(super) fn try_take(&self) -> Option<I> {
        self.state.lock().items.take().map(|(_, item)| item)
    }

    /// Nothing will be put in any more.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.state.lock().items.len()
    }
}

#[cfg(all(test, transfer_tensor_loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn each_item_is_taken_once_and_then_there_is_an_end() {
        for order in [Order::Completion, Order::Submission] {
            let mut model = loom::model::Builder::new();
            model.preemption_bound = Some(2);
            model.check(move || {
                let line = Arc::new(Line::new(order));
                let workers: Vec<_> = (0..2)
                    .map(|_| {
                        let line = line.clone();
                        thread::spawn(move || std::iter::from_fn(|| line.take()).collect::<Vec<u64>>())
                    })
                    .collect();
                line.put(1, 1);
                line.put(0, 0);
                line.close();
                let mut all: Vec<u64> = workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect();
                all.sort_unstable();
                assert_eq!(all, [0, 1]);
            });
        }
    }
}
