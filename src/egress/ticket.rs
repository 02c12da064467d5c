//! What a caller holds of an item that he has handed over.
#![deny(unsafe_code)]

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::outputs::Channel;
use crate::error::{Error, Kind, Refused, Result};
use crate::sync::{Condvar, Mutex};

/// An item under way. It gives what the consumer made of it, or the output itself: by [`wait`](Ticket::wait),
/// [`try_wait`](Ticket::try_wait), [`wait_timeout`](Ticket::wait_timeout) or `.await` on any runtime.
///
/// Dropping or forgetting it is fine: the item is delivered all the same, and what comes of it is dropped.
#[must_use = "what comes of the item is given by `wait`, `try_wait` or `.await`"]
pub struct Ticket<R>(Arc<Item<R>>);

pub(super) struct Item<R> {
    pub(super) number: u64,
    state: Mutex<State<R>>,
    changed: Condvar,
    /// Where the result goes instead, under which number.
    channel: Option<(Arc<Channel<R>>, u64)>,
}

enum State<R> {
    /// On its way.
    Open {
        cancelled: bool,
        waker: Option<Waker>,
    },
    /// With its consumer: too late to cancel.
    Begun {
        waker: Option<Waker>,
    },
    Done(Result<R>),
    Taken,
}

impl<R> Item<R> {
    pub(super) fn new(number: u64, channel: Option<(Arc<Channel<R>>, u64)>) -> Arc<Self> {
        let state = Mutex::new(State::Open { cancelled: false, waker: None });
        Arc::new(Self { number, state, changed: Condvar::new(), channel })
    }

    /// Whether it is to be delivered: from here on it can not be cancelled.
    pub(super) fn begin(&self) -> bool {
        let mut state = self.state.lock();
        match &mut *state {
            State::Open { cancelled: false, waker } => {
                *state = State::Begun { waker: waker.take() };
                true
            }
            _ => false,
        }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        matches!(*self.state.lock(), State::Open { cancelled: true, .. })
    }

    fn cancel(&self) -> bool {
        match &mut *self.state.lock() {
            State::Open { cancelled, .. } => {
                *cancelled = true;
                true
            }
            _ => false,
        }
    }

    /// Gives the result to who waits for it. The first one stays.
    pub(super) fn finish(&self, result: Result<R>) {
        let mut state = self.state.lock();
        if matches!(*state, State::Done(_) | State::Taken) {
            // Not under the lock: a caller's value is dropped.
            drop(state);
            return drop(result);
        }
        if let Some((channel, number)) = &self.channel {
            *state = State::Taken;
            drop(state);
            return channel.put(*number, result);
        }
        let before = std::mem::replace(&mut *state, State::Done(result));
        drop(state);
        self.changed.notify_all();
        if let State::Open { waker: Some(waker), .. } | State::Begun { waker: Some(waker) } = before {
            waker.wake();
        }
    }

    /// The result, if it is there; an error stays there.
    fn take(state: &mut State<R>) -> Option<Result<R>> {
        match state {
            State::Open { .. } | State::Begun { .. } => None,
            State::Done(Err(error)) => Some(Err(error.clone())),
            State::Done(Ok(_)) => match std::mem::replace(state, State::Taken) {
                State::Done(result) => Some(result),
                _ => None,
            },
            State::Taken => Some(Err(Error::unsupported("polling a ticket again", "it has already given its result"))),
        }
    }
}

impl<R> Ticket<R> {
    pub(super) fn new(item: Arc<Item<R>>) -> Self {
        Self(item)
    }

    /// The item's number: 0 for the first that the pool took, and so on.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// Takes the item back before it is delivered; whether there was time for that. Its copy runs to its end, its result is
    /// [`Error::is_cancelled`].
    pub fn cancel(&self) -> bool {
        self.0.cancel()
    }

    /// Blocks until the item is delivered.
    ///
    /// # Errors
    /// The copy failed, the device faulted, the consumer panicked, the item was cancelled, or the pool was shut down before.
    pub fn wait(self) -> Result<R> {
        let mut state = self.0.state.lock();
        loop {
            if let Some(result) = Item::take(&mut state) {
                return result;
            }
            self.0.changed.wait(&mut state);
        }
    }

    /// The result if it is there, else the ticket again.
    ///
    /// # Errors
    /// [`Error::is_not_ready`] while the item is under way; those of [`wait`](Ticket::wait). The ticket comes back.
    pub fn try_wait(self) -> Result<R, Refused<Self>> {
        self.wait_timeout(Duration::ZERO)
    }

    /// Blocks until the item is delivered or `timeout` is over.
    ///
    /// # Errors
    /// As [`try_wait`](Ticket::try_wait).
    pub fn wait_timeout(self, timeout: Duration) -> Result<R, Refused<Self>> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.0.state.lock();
        let result = loop {
            if let Some(result) = Item::take(&mut state) {
                break result;
            }
            match deadline {
                Some(deadline) if Instant::now() >= deadline => break Err(Error::new(Kind::NotReady)),
                Some(deadline) => drop(self.0.changed.wait_until(&mut state, deadline)),
                None => self.0.changed.wait(&mut state),
            }
        };
        drop(state);
        result.map_err(|error| Refused { error, value: self })
    }
}

impl<R> Future for Ticket<R> {
    type Output = Result<R>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<R>> {
        let mut state = self.0.state.lock();
        match &mut *state {
            State::Open { waker, .. } | State::Begun { waker } => {
                match waker {
                    Some(waker) => waker.clone_from(context.waker()),
                    None => *waker = Some(context.waker().clone()),
                }
                Poll::Pending
            }
            done => Item::take(done).map_or(Poll::Pending, Poll::Ready),
        }
    }
}

impl<R> fmt::Debug for Ticket<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("number", &self.0.number).finish_non_exhaustive()
    }
}

#[cfg(all(test, transfer_tensor_loom))]
mod loom_tests {
    use loom::thread;

    use super::*;

    #[test]
    fn who_waits_is_told_and_a_cancelled_item_is_not_begun() {
        loom::model(|| {
            let item = Item::new(0, None);
            let (ticket, worker) = (Ticket::new(item.clone()), item);
            let worker = thread::spawn(move || {
                let begun = worker.begin();
                worker.finish(if begun { Ok(7) } else { Err(Error::new(Kind::Withdrawn)) });
                worker.finish(Ok(8));
                begun
            });
            let cancelled = ticket.cancel();
            let result = ticket.wait();
            let begun = worker.join().unwrap();
            assert!(cancelled != begun);
            assert_eq!(result.ok(), begun.then_some(7));
        });
    }
}
