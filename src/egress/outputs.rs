//! What comes out of a pool one after another.
#![deny(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::driver::check_not_forked;
use crate::error::{Error, Kind, Result, quietly};
use crate::order::{Order, Sorter};
use crate::sync::{Condvar, Mutex};
use crate::trace;

/// One item's result.
#[derive(Debug)]
pub struct Delivered<R> {
    /// The item's number among those of its [`EgressSender`](crate::EgressSender): 0 for the first, and so on.
    pub number: u64,
    /// What the consumer made of it, or the output itself.
    pub result: Result<R>,
}

/// The results of what an [`EgressSender`](crate::EgressSender) submits, one after another: an iterator that blocks, and ends when the
/// sender is gone and all is delivered. Each item comes exactly once; failed and cancelled ones come with their error. In a forked child
/// nothing comes.
pub struct Outputs<R>(Arc<Channel<R>>);

pub(super) struct Channel<R> {
    state: Mutex<State<R>>,
    changed: Condvar,
}

struct State<R> {
    items: Sorter<Result<R>>,
    sent: u64,
    delivered: u64,
    /// The sender, or the receiver, is gone.
    ended: bool,
    abandoned: bool,
    waker: Option<Waker>,
}

impl<R> Channel<R> {
    pub(super) fn new(order: Order) -> Arc<Self> {
        let state =
            State { items: Sorter::new(order), sent: 0, delivered: 0, ended: false, abandoned: false, waker: None };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// The number of the next item, which is sure to come.
    pub(super) fn send(&self) -> u64 {
        let mut state = self.state.lock();
        state.sent += 1;
        state.sent - 1
    }

    pub(super) fn put(&self, number: u64, result: Result<R>) {
        let mut state = self.state.lock();
        if state.abandoned {
            // Not under the lock: a caller's value is dropped.
            drop(state);
            return drop(result);
        }
        state.items.put(number, result);
        self.tell(state);
    }

    /// No more will be sent.
    pub(super) fn end(&self) {
        if check_not_forked().is_err() {
            return;
        }
        let mut state = self.state.lock();
        state.ended = true;
        self.tell(state);
    }

    fn tell(&self, mut state: crate::sync::MutexGuard<'_, State<R>>) {
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_all();
        if let Some(waker) = waker {
            let _ = quietly(|| waker.wake());
        }
    }
}

impl<R> State<R> {
    /// The next one; `Some(None)` at the end, `None` where it has yet to come.
    fn next(&mut self) -> Option<Option<Delivered<R>>> {
        if let Some((number, result)) = self.items.take() {
            self.delivered += 1;
            return Some(Some(Delivered { number, result }));
        }
        (self.ended && self.delivered == self.sent).then_some(None)
    }
}

impl<R> Outputs<R> {
    pub(super) fn new(channel: Arc<Channel<R>>) -> Self {
        Self(channel)
    }

    /// As `next`, but waits no longer than `timeout`. `None` at the end.
    ///
    /// # Errors
    /// [`Error::is_not_ready`]: the time is over. The process is a forked child, to which nothing is delivered.
    pub fn next_timeout(&mut self, timeout: Duration) -> Result<Option<Delivered<R>>> {
        check_not_forked()?;
        let deadline = Instant::now().checked_add(timeout);
        let mut waits = None;
        let mut state = self.0.state.lock();
        loop {
            if let Some(next) = state.next() {
                return Ok(next);
            }
            if !timeout.is_zero() {
                waits.get_or_insert_with(|| trace::wait(c"egress wait"));
            }
            match deadline {
                Some(deadline) if Instant::now() >= deadline => return Err(Error::new(Kind::NotReady)),
                Some(deadline) => drop(self.0.changed.wait_until(&mut state, deadline)),
                None => self.0.changed.wait(&mut state),
            }
        }
    }

    /// For a `Stream`: as `futures_core::Stream::poll_next`, without the crate.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Delivered<R>>> {
        if check_not_forked().is_err() {
            return Poll::Ready(None);
        }
        let mut state = self.0.state.lock();
        match state.next() {
            Some(next) => Poll::Ready(next),
            None => {
                let before = state.waker.replace(context.waker().clone());
                // Not under the lock: a caller's task may go with it.
                drop(state);
                drop(before);
                Poll::Pending
            }
        }
    }

    /// The next one, to be awaited. `None` at the end.
    pub fn next_async(&mut self) -> impl Future<Output = Option<Delivered<R>>> + Send + '_
    where
        R: Send,
    {
        std::future::poll_fn(|context| self.poll_next(context))
    }
}

impl<R> Iterator for Outputs<R> {
    type Item = Delivered<R>;

    fn next(&mut self) -> Option<Delivered<R>> {
        check_not_forked().ok()?;
        let mut waits = None;
        let mut state = self.0.state.lock();
        loop {
            if let Some(next) = state.next() {
                return next;
            }
            waits.get_or_insert_with(|| trace::wait(c"egress wait"));
            self.0.changed.wait(&mut state);
        }
    }
}

impl<R> Drop for Outputs<R> {
    fn drop(&mut self) {
        if check_not_forked().is_err() {
            return;
        }
        let mut state = self.0.state.lock();
        state.abandoned = true;
        let left = (state.waker.take(), std::mem::replace(&mut state.items, Sorter::new(Order::Completion)));
        // Not under the lock: callers' values.
        drop(state);
        drop(left);
    }
}

impl<R> fmt::Debug for Outputs<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if check_not_forked().is_err() {
            return f.debug_struct("Outputs").finish_non_exhaustive();
        }
        let state = self.0.state.lock();
        f.debug_struct("Outputs")
            .field("waiting", &state.items.len())
            .field("sent", &state.sent)
            .finish_non_exhaustive()
    }
}
