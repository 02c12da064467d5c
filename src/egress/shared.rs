//! What a pool's threads share: the way of an item from its copy to its consumer.
#![deny(unsafe_code)]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::gate::Gate;
use super::line::Line;
use super::output::{Output, Permit};
use super::source::EgressSource;
use super::source::sealed::Waits;
use super::stats::{EgressHealth, EgressStats};
use super::ticket::Item;
use super::{OnError, Stage};
use crate::complete::on_waiter;
use crate::device::Device;
use crate::error::{Error, Kind, Refused, Result, quietly};
use crate::pool::WhenFull;

pub(super) type Consumer<O, R> = Box<dyn Fn(Output<O>) -> R + Send + Sync>;
pub(super) type Observer = Box<dyn Fn(u64, Stage) + Send + Sync>;

pub(super) struct Shared<S: EgressSource, R: Send + 'static> {
    pub(super) device: Device,
    pub(super) gate: Arc<Gate>,
    /// Where workers find items; without workers items are consumed where they arrive.
    pub(super) line: Option<Line<Arrived<S, R>>>,
    /// Nobody takes from the line but who puts into it.
    pub(super) inline: bool,
    pub(super) consumer: Consumer<S::Output, R>,
    pub(super) observer: Option<Observer>,
    pub(super) when_full: WhenFull,
    pub(super) on_error: OnError,
    pub(super) state: Mutex<State>,
    /// Those that are not delivered, by number.
    pub(super) open: Mutex<BTreeMap<u64, Arc<Item<R>>>>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) stats: EgressStats,
    pub(super) panics: u64,
    pub(super) last_error: Option<Error>,
    pub(super) faulted: bool,
    /// Nothing is delivered any more.
    pub(super) stopped: Option<Error>,
}

/// An item whose copy is over, one way or another.
pub(super) struct Arrived<S: EgressSource, R> {
    item: Arc<Item<R>>,
    output: Result<Output<S::Output>>,
    at: Instant,
}

thread_local! {
    /// The items that this thread runs callers' functions for, by their pool's gate and their number: it must not wait for room,
    /// which may be for itself to make.
    static INSIDE: RefCell<Vec<(usize, u64)>> = const { RefCell::new(Vec::new()) };
}

/// While this lives the thread is at an item.
pub(super) struct Inside(());

impl Inside {
    fn of(gate: &Arc<Gate>, number: u64) -> Self {
        let _ = INSIDE.try_with(|inside| inside.borrow_mut().push((Arc::as_ptr(gate).addr(), number)));
        Self(())
    }

    /// At the start of a worker, which is at no item.
    pub(super) fn start() -> Self {
        let _ = INSIDE.try_with(|inside| inside.borrow_mut().push((0, 0)));
        Self(())
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.borrow_mut().pop());
    }
}

/// The items of a pool that this thread is at.
pub(super) fn delivering(gate: &Arc<Gate>) -> BTreeSet<u64> {
    let gate = Arc::as_ptr(gate).addr();
    let of_gate = |inside: &RefCell<Vec<(usize, u64)>>| {
        inside.borrow().iter().filter(|(of, _)| *of == gate).map(|(_, number)| *number).collect()
    };
    INSIDE.try_with(of_gate).unwrap_or_default()
}

/// Whether items may wait for this thread, which then must not wait for them.
pub(super) fn must_not_wait() -> bool {
    on_waiter() || INSIDE.try_with(|inside| !inside.borrow().is_empty()).unwrap_or_default()
}

impl<S: EgressSource, R: Send + 'static> Shared<S, R> {
    /// Submits the copies of `source`, and tells `item` once it is known which number it has.
    pub(super) fn submit(
        self: &Arc<Self>,
        source: S,
        when_full: Option<WhenFull>,
        item: impl FnOnce(u64) -> Arc<Item<R>>,
    ) -> Result<Arc<Item<R>>, Refused<Option<S>>> {
        let bytes = source.bytes();
        let when_full = if must_not_wait() { WhenFull::Refuse } else { when_full.unwrap_or(self.when_full) };
        if let Err(error) = self.gate.enter(bytes, when_full) {
            return Err(Refused { error, value: Some(source) });
        }
        // From here on it is open, and must be delivered or given up.
        let permit = Permit::new(self.gate.clone(), bytes);
        let mut waits = Waits::default();
        // What it can not give back is dropped there, and a tag is the caller's own.
        let begun = quietly(|| source.begin(&self.device, &mut waits));
        let begun = match begun.unwrap_or_else(|error| Err(Refused { error, value: None })) {
            Ok(begun) => begun,
            Err(refused) => {
                drop(permit);
                self.gate.delivered();
                return Err(refused);
            }
        };
        let start = Instant::now();
        let number = {
            let mut state = self.state.lock();
            state.stats.submitted += 1;
            state.stats.in_flight += 1;
            state.stats.submitted - 1
        };
        let item = item(number);
        self.open.lock().insert(number, item.clone());
        // Who gives up what is open says so first, and then looks.
        let stopped = self.state.lock().stopped.clone();
        if let Some(error) = stopped
            && self.open.lock().remove(&number).is_some()
        {
            let _ = quietly(|| item.finish(Err(error)));
        }
        self.observe(number, Stage::Submitted { bytes });
        let (shared, told) = (self.clone(), item.clone());
        let then = Box::new(move |passed: Result<()>| shared.arrived(told, passed, begun, permit, start));
        if let Err((error, then)) = self.device.waiter().submit(waits.0, then) {
            // There is no thread to wait: the copies go on, and keep their memory.
            then(Err(error));
        }
        Ok(item)
    }

    /// The copies have run, or never will.
    fn arrived(&self, item: Arc<Item<R>>, passed: Result<()>, begun: S::Flying, permit: Permit, start: Instant) {
        let number = item.number;
        let bytes = permit.bytes();
        let inside = Inside::of(&self.gate, number);
        // A tag in it may be the caller's own.
        let landed = match passed {
            Ok(()) => quietly(|| S::land(begun)).and_then(|landed| landed),
            Err(error) => {
                let _ = quietly(|| drop(begun));
                Err(error)
            }
        };
        // Without a value, the room is free.
        let output = landed.map(|value| Output::new(value, number, permit));
        let at = Instant::now();
        {
            let mut state = self.state.lock();
            state.stats.in_flight -= 1;
            state.stats.waiting += 1;
            state.stats.copying_time += at.saturating_duration_since(start);
            if output.is_ok() {
                state.stats.bytes += bytes;
            }
        }
        if output.is_ok() {
            self.observe(number, Stage::Copied { bytes });
        }
        drop(inside);
        let arrived = Arrived { item, output, at };
        let Some(line) = &self.line else { return self.deliver(arrived) };
        line.put(number, arrived);
        while self.inline
            && let Some(next) = line.try_take()
        {
            self.deliver(next);
        }
    }

    /// Has an item consumed, and tells who waits for it.
    pub(super) fn deliver(&self, arrived: Arrived<S, R>) {
        let Arrived { item, output, at } = arrived;
        let begun = Instant::now();
        let stopped = {
            let mut state = self.state.lock();
            state.stats.waiting -= 1;
            state.stats.consuming += 1;
            state.stats.waiting_time += begun.saturating_duration_since(at);
            state.stopped.clone()
        };
        let inside = Inside::of(&self.gate, item.number);
        let result = match (output, stopped) {
            (Err(error), _) => Err(error),
            (Ok(output), None) if item.begin() => quietly(|| (self.consumer)(output)),
            (Ok(output), stopped) => {
                // A tag in it may be the caller's own.
                let _ = quietly(|| drop(output));
                let stopped = stopped.filter(|_| !item.is_cancelled());
                Err(stopped.unwrap_or_else(|| Error::new(Kind::Withdrawn)))
            }
        };
        let taken = begun.elapsed();
        let given_up = self.open.lock().remove(&item.number).is_none();
        let stopped = if given_up { self.state.lock().stopped.clone() } else { None };
        let result = match (result, stopped) {
            (Ok(late), Some(stopped)) => {
                // Who waited was told so.
                let _ = quietly(|| drop(late));
                Err(stopped)
            }
            (result, _) => result,
        };
        self.note(item.number, &result, taken);
        // A result that nobody wants is dropped here, and a waker is a caller's.
        let _ = quietly(|| item.finish(result));
        let _ = quietly(|| drop(item));
        drop(inside);
        self.gate.delivered();
    }

    fn note(&self, number: u64, result: &Result<R>, taken: Duration) {
        let mut state = self.state.lock();
        state.stats.consuming -= 1;
        state.stats.consuming_time += taken;
        let stage = match result {
            Ok(_) => {
                state.stats.delivered += 1;
                Stage::Delivered
            }
            Err(error) if error.is_cancelled() => {
                state.stats.cancelled += 1;
                Stage::Cancelled
            }
            Err(error) => {
                state.stats.failed += 1;
                state.panics += u64::from(error.is_panic());
                state.faulted |= error.is_fault();
                // That it was stopped or closed is no news.
                if !error.is_closed() {
                    state.last_error = Some(error.clone());
                    if self.on_error == OnError::Stop && state.stopped.is_none() {
                        let why = format!("item {number} failed: {error}");
                        state.stopped = Some(Error::new(Kind::Closed { why: why.clone() }));
                        self.gate.close(Error::new(Kind::Closed { why }));
                    }
                }
                Stage::Failed { error: error.clone() }
            }
        };
        drop(state);
        self.observe(number, stage);
    }

    /// Tells the observer; what it does wrong is not the item's.
    fn observe(&self, number: u64, stage: Stage) {
        if let Some(observer) = &self.observer {
            let _inside = Inside::of(&self.gate, number);
            let _ = quietly(|| observer(number, stage));
        }
    }

    /// Nothing is delivered any more; who waits for an open item is told. How many those are.
    pub(super) fn abandon(&self) -> u64 {
        let error = Error::new(Kind::Closed { why: "the pool was shut down before the item was delivered".into() });
        self.state.lock().stopped.get_or_insert_with(|| error.clone());
        // Not those that this thread is at.
        let own = delivering(&self.gate);
        let open: BTreeMap<_, _> = {
            let mut all = self.open.lock();
            let (own, open) = std::mem::take(&mut *all).into_iter().partition(|(number, _)| own.contains(number));
            *all = own;
            open
        };
        for item in open.values() {
            let _ = quietly(|| item.finish(Err(error.clone())));
        }
        open.len() as u64
    }

    pub(super) fn stats(&self) -> EgressStats {
        let (items, bytes, _) = self.gate.level();
        let stats = self.state.lock().stats;
        EgressStats { kept: items as u64, kept_bytes: bytes, ..stats }
    }

    pub(super) fn health(&self, workers: usize) -> EgressHealth {
        let state = self.state.lock();
        EgressHealth {
            workers,
            panics: state.panics,
            last_error: state.last_error.clone(),
            faulted: state.faulted,
            closed: self.gate.closed().is_some(),
        }
    }
}
