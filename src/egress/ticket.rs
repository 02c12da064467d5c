//! What a caller holds of an item that he has handed over.
#![deny(unsafe_code)]

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::outputs::Channel;
use crate::driver::check_not_forked;
use crate::error::{Error, Kind, Refused, Result};
use crate::sync::{Condvar, Mutex};
use crate::trace;

/// An item under way. It gives what the consumer made of it, or the output itself: by [`wait`](Ticket::wait),
/// [`try_wait`](Ticket::try_wait), [`wait_timeout`](Ticket::wait_timeout) or `.await` on any runtime.
///
/// Dropping it is fine: the item is delivered all the same, and what comes of it is dropped. Forgetting it keeps what comes of it for ever; where
/// that is the output itself, its room too.
#[must_use = "what comes of the item is given by `wait`, `try_wait` or `.await`"]
pub struct Ticket<R>(Held<R>);

/// What is known of an item, for who waits for it and for who delivers it.
pub(super) struct Item<R> {
    state: Mutex<State<R>>,
    changed: Condvar,
    /// Where it goes back to.
    spare: Arc<Spare<R>>,
}

struct State<R> {
    number: u64,
    /// Where the result goes instead, under which number.
    channel: Option<(Arc<Channel<R>>, u64)>,
    phase: Phase<R>,
    holders: u8,
}

enum Phase<R> {
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

/// Items that are over, for new ones: in the steady state none is allocated.
pub(super) struct Spare<R>(Mutex<Idle<R>>);

struct Idle<R> {
    items: Vec<Arc<Item<R>>>,
    /// How many are kept; none, once the pool is gone, since each of them keeps this.
    most: usize,
}

impl<R> Spare<R> {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Idle { items: Vec::new(), most })))
    }

    /// Keeps none any more.
    pub(super) fn close(&self) {
        let left = std::mem::replace(&mut *self.0.lock(), Idle { items: Vec::new(), most: 0 });
        drop(left);
    }
}

/// One of the two hands in which an item is: the ticket's and the pool's. The last one to let go gives it back.
pub(super) struct Held<R> {
    pub(super) number: u64,
    bytes: trace::Bytes,
    item: Arc<Item<R>>,
}

impl<R> Held<R> {
    /// An item in two hands.
    pub(super) fn pair(
        spare: &Arc<Spare<R>>,
        number: u64,
        bytes: u64,
        channel: Option<(Arc<Channel<R>>, u64)>,
    ) -> (Self, Self) {
        let state = State { number, channel, phase: Phase::Open { cancelled: false, waker: None }, holders: 2 };
        let used = spare.0.lock().items.pop();
        let item = match used {
            Some(item) => {
                *item.state.lock() = state;
                item
            }
            None => Arc::new(Item { state: Mutex::new(state), changed: Condvar::new(), spare: spare.clone() }),
        };
        let bytes = bytes.into();
        (Self { number, bytes, item: item.clone() }, Self { number, bytes, item })
    }

    /// A look at it, which is no hand: it may become another item.
    pub(super) fn item(&self) -> &Arc<Item<R>> {
        &self.item
    }

    pub(super) fn finish(&self, result: Result<R>) {
        self.item.finish(self.number, result);
    }
}

impl<R> Drop for Held<R> {
    fn drop(&mut self) {
        if check_not_forked().is_err() {
            return;
        }
        let mut state = self.item.state.lock();
        state.holders -= 1;
        if state.holders > 0 {
            return;
        }
        let left = (std::mem::replace(&mut state.phase, Phase::Taken), state.channel.take());
        drop(state);
        let mut idle = self.item.spare.0.lock();
        if idle.items.len() < idle.most {
            idle.items.push(self.item.clone());
        }
        drop(idle);
        // Not under a lock: a caller's value.
        drop(left);
    }
}

impl<R> Item<R> {
    /// Whether it is to be delivered: from here on it can not be cancelled.
    pub(super) fn begin(&self) -> bool {
        let phase = &mut self.state.lock().phase;
        match phase {
            Phase::Open { cancelled: false, waker } => {
                *phase = Phase::Begun { waker: waker.take() };
                true
            }
            _ => false,
        }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        match &self.state.lock().phase {
            Phase::Open { cancelled, .. } => *cancelled,
            Phase::Done(Err(error)) => error.is_cancelled(),
            _ => false,
        }
    }

    /// Whether its consumer has yet to begin.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.state.lock().phase, Phase::Open { .. })
    }

    fn cancel(&self) -> bool {
        match &mut self.state.lock().phase {
            Phase::Open { cancelled, .. } => {
                *cancelled = true;
                true
            }
            _ => false,
        }
    }

    /// Gives the result to who waits for the item with this number. The first one stays.
    pub(super) fn finish(&self, number: u64, result: Result<R>) {
        let mut state = self.state.lock();
        if state.number != number || matches!(state.phase, Phase::Done(_) | Phase::Taken) {
            // Not under the lock: a caller's value is dropped.
            drop(state);
            return drop(result);
        }
        // Whoever cancelled it in time was told so.
        let result = match (&state.phase, result) {
            (Phase::Open { cancelled: true, .. }, Err(error)) if error.is_closed() => Err(Error::new(Kind::Withdrawn)),
            (_, result) => result,
        };
        if let Some((channel, number)) = state.channel.take() {
            state.phase = Phase::Taken;
            drop(state);
            return channel.put(number, result);
        }
        let before = std::mem::replace(&mut state.phase, Phase::Done(result));
        drop(state);
        self.changed.notify_all();
        if let Phase::Open { waker: Some(waker), .. } | Phase::Begun { waker: Some(waker) } = before {
            waker.wake();
        }
    }
}

impl<R> State<R> {
    /// The result, if it is there; an error stays there.
    fn take(&mut self) -> Option<Result<R>> {
        match &self.phase {
            Phase::Open { .. } | Phase::Begun { .. } => None,
            Phase::Done(Err(error)) => Some(Err(error.clone())),
            Phase::Done(Ok(_)) => match std::mem::replace(&mut self.phase, Phase::Taken) {
                Phase::Done(result) => Some(result),
                _ => None,
            },
            Phase::Taken => Some(Err(Error::unsupported("polling a ticket again", "it has already given its result"))),
        }
    }
}

impl<R> Ticket<R> {
    pub(super) fn new(held: Held<R>) -> Self {
        Self(held)
    }

    /// The item's number: 0 for the first that the pool took, and so on.
    pub fn number(&self) -> u64 {
        self.0.number
    }

    /// Takes the item back before it is delivered; whether there was time for that. Its copy runs to its end, its result is
    /// [`Error::is_cancelled`].
    pub fn cancel(&self) -> bool {
        check_not_forked().is_ok() && self.0.item.cancel()
    }

    /// Blocks until the item is delivered.
    ///
    /// # Errors
    /// The copy failed, the device faulted, the consumer panicked, the item was cancelled, or the pool was shut down before. The process is a
    /// forked child, to which nothing is delivered.
    pub fn wait(self) -> Result<R> {
        check_not_forked()?;
        let mut waits = None;
        let mut state = self.0.item.state.lock();
        loop {
            if let Some(result) = state.take() {
                return result;
            }
            waits.get_or_insert_with(|| trace::range(c"egress wait", self.0.bytes));
            self.0.item.changed.wait(&mut state);
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
        if let Err(error) = check_not_forked() {
            return Err(Refused { error, value: self });
        }
        let deadline = Instant::now().checked_add(timeout);
        let mut waits = None;
        let mut state = self.0.item.state.lock();
        let result = loop {
            if let Some(result) = state.take() {
                break result;
            }
            if !timeout.is_zero() {
                waits.get_or_insert_with(|| trace::range(c"egress wait", self.0.bytes));
            }
            match deadline {
                Some(deadline) if Instant::now() >= deadline => break Err(Error::new(Kind::NotReady)),
                Some(deadline) => drop(self.0.item.changed.wait_until(&mut state, deadline)),
                None => self.0.item.changed.wait(&mut state),
            }
        };
        drop(state);
        result.map_err(|error| Refused { error, value: self })
    }
}

impl<R> Future for Ticket<R> {
    type Output = Result<R>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<R>> {
        check_not_forked()?;
        let mut state = self.0.item.state.lock();
        match &mut state.phase {
            Phase::Open { waker, .. } | Phase::Begun { waker } => {
                if waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
                    return Poll::Pending;
                }
                let before = waker.replace(context.waker().clone());
                // Not under the lock: a caller's task may go with it.
                drop(state);
                drop(before);
                Poll::Pending
            }
            Phase::Done(_) | Phase::Taken => state.take().map_or(Poll::Pending, Poll::Ready),
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
            let (ticket, worker) = Held::pair(&Spare::new(1), 0, 0, None);
            let ticket = Ticket::new(ticket);
            let worker = thread::spawn(move || {
                let begun = worker.item.begin();
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

    #[test]
    fn an_item_is_given_back_once_by_the_last_hand_and_is_a_new_one_then() {
        loom::model(|| {
            let spare = Spare::new(2);
            let (ticket, worker) = Held::pair(&spare, 0, 0, None);
            let late = worker.item.clone();
            let worker = thread::spawn(move || worker.finish(Ok(7)));
            drop(ticket);
            worker.join().unwrap();
            assert_eq!(spare.0.lock().items.len(), 1);
            let (ticket, _worker) = Held::pair(&spare, 1, 0, None);
            // Who gives up the earlier one does not meet this.
            late.finish(0, Ok(9));
            assert!(Ticket::new(ticket).try_wait().is_err());
            spare.close();
        });
    }
}
