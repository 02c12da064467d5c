//! What a pool's threads share: the way of an item from its copy to its consumer.
#![deny(unsafe_code)]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
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
use crate::device::Device;
use crate::error::{Error, Kind, Refused, Result, panic_message};
use crate::pool::WhenFull;

pub(super) type Consumer<O, R> = Box<dyn Fn(Output<O>) -> R + Send + Sync>;
pub(super) type Observer = Box<dyn Fn(u64, Stage) + Send + Sync>;

pub(super) struct Shared<S: EgressSource, R: Send + 'static> {
    pub(super) device: Device,
    pub(super) gate: Arc<Gate>,
    /// Where workers find items; without workers items are consumed where they arrive.
    pub(super) line: Option<Line<Arrived<S, R>>>,
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
    /// How many items this thread is delivering: it must not wait for room, which may be for itself to make.
    static DELIVERING: Cell<usize> = const { Cell::new(0) };
}

pub(super) fn delivering() -> usize {
    DELIVERING.get()
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
        let when_full = if delivering() > 0 { WhenFull::Refuse } else { when_full.unwrap_or(self.when_full) };
        if let Err(error) = self.gate.enter(bytes, when_full) {
            return Err(Refused { error, value: Some(source) });
        }
        // From here on it is open, and must be delivered or given up.
        let permit = Permit::new(self.gate.clone(), bytes);
        let mut waits = Waits::default();
        let begun = match source.begin(&self.device, &mut waits) {
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
        let output = match passed {
            Ok(()) => S::land(begun).map(|value| Output::new(value, number, permit)),
            Err(error) => {
                drop(begun);
                drop(permit);
                Err(error)
            }
        };
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
        let arrived = Arrived { item, output, at };
        match &self.line {
            Some(line) => line.put(number, arrived),
            None => self.deliver(arrived),
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
        DELIVERING.set(DELIVERING.get() + 1);
        let result = match (output, stopped) {
            (Err(error), _) => Err(error),
            (Ok(output), None) if item.begin() => quietly(|| (self.consumer)(output)),
            (Ok(output), stopped) => {
                // A tag in it may be the caller's own.
                let _ = quietly(|| drop(output));
                Err(stopped.unwrap_or_else(|| Error::new(Kind::Withdrawn)))
            }
        };
        let taken = begun.elapsed();
        self.note(item.number, &result, taken);
        self.open.lock().remove(&item.number);
        // A result that nobody wants is dropped here, and a waker is a caller's.
        let _ = quietly(|| item.finish(result));
        drop(item);
        DELIVERING.set(DELIVERING.get() - 1);
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
            let _ = quietly(|| observer(number, stage));
        }
    }

    /// Nothing is delivered any more; who waits for an open item is told. How many those are.
    pub(super) fn abandon(&self) -> u64 {
        let error = Error::new(Kind::Closed { why: "the pool was shut down before the item was delivered".into() });
        self.state.lock().stopped.get_or_insert_with(|| error.clone());
        let open = std::mem::take(&mut *self.open.lock());
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

/// Runs what is the caller's; a panic of it ends no thread of ours.
fn quietly<T>(run: impl FnOnce() -> T) -> Result<T> {
    let caught = catch_unwind(AssertUnwindSafe(run));
    caught.map_err(|panic| Error::new(Kind::Panicked { message: panic_message(&*panic) }))
}
