//! What a pool's threads share: the way of an item from its copy to its consumer.
#![deny(unsafe_code)]

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::crew::{Crew, Done, Task};
use super::gate::Gate;
use super::output::{Output, Permit};
use super::outputs::Channel;
use super::source::{Ahead, EgressSource, Way};
use super::stats::{EgressHealth, EgressStats};
use super::ticket::{Held, Item, Spare, Ticket};
use super::{OnError, Stage};
use crate::complete::on_device_thread;
use crate::device::Device;
use crate::driver::check_not_forked;
use crate::driver::lane::{Asked, LANES, Lane, Lanes, Passed};
use crate::error::{Error, Kind, Refused, Result, quietly};
use crate::pool::WhenFull;
use crate::trace;

/// How long the leader asks again and again after the last news, ...
const AWAKE: Duration = Duration::from_micros(60);

/// ... and its pauses after that: a 16th of how long there was none, within these bounds.
const PAUSE: std::ops::RangeInclusive<Duration> = Duration::from_micros(20)..=Duration::from_millis(1);

pub(super) type Consumer<O, R> = Box<dyn Fn(Output<O>) -> R + Send + Sync>;
pub(super) type Observer = Box<dyn Fn(u64, Stage) + Send + Sync>;

pub(super) struct Shared<S: EgressSource, R: Send + 'static> {
    pub(super) device: Device,
    pub(super) gate: Arc<Gate>,
    /// Streams for copies, and what is on its way on each.
    pub(super) lanes: Lanes,
    pub(super) flights: [Lane<Flight<S, R>>; LANES],
    /// What has come, and the threads that bring it in and consume it.
    pub(super) crew: Crew<Arrived<S, R>>,
    pub(super) consumer: Consumer<S::Output, R>,
    pub(super) observer: Option<Observer>,
    pub(super) when_full: WhenFull,
    pub(super) on_error: OnError,
    pub(super) state: Mutex<State<R>>,
    pub(super) spare: Arc<Spare<R>>,
}

pub(super) struct State<R> {
    /// Those that are not delivered, by number.
    open: HashMap<u64, Arc<Item<R>>>,
    pub(super) stats: EgressStats,
    pub(super) panics: u64,
    pub(super) last_error: Option<Error>,
    pub(super) faulted: bool,
    /// Nothing is delivered any more.
    pub(super) stopped: Option<Error>,
}

impl<R> Default for State<R> {
    fn default() -> Self {
        let (open, stats) = (HashMap::new(), EgressStats::default());
        Self { open, stats, panics: 0, last_error: None, faulted: false, stopped: None }
    }
}

/// An item whose copy is under way.
pub(super) struct Flight<S: EgressSource, R> {
    item: Held<R>,
    begun: S::Flying,
    permit: Permit,
    era: u64,
    start: Instant,
}

/// An item whose copy is over, one way or another.
pub(super) struct Arrived<S: EgressSource, R> {
    item: Held<R>,
    output: Result<Output<S::Output>>,
    era: u64,
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
    on_device_thread() || INSIDE.try_with(|inside| !inside.borrow().is_empty()).unwrap_or_default()
}

impl<S: EgressSource, R: Send + 'static> Shared<S, R> {
    /// Submits the copies of `source`, and asks where its result is to go once it is known to be taken.
    pub(super) fn submit(
        self: &Arc<Self>,
        source: S,
        when_full: Option<WhenFull>,
        channel: impl FnOnce() -> Option<(Arc<Channel<R>>, u64)>,
    ) -> Result<Ticket<R>, Refused<Option<S>>> {
        // In a forked child there is nobody who makes room.
        if let Err(error) = check_not_forked() {
            return Err(Refused { error, value: Some(source) });
        }
        let bytes = source.bytes();
        let _range = trace::range(c"egress submit", bytes);
        let when_full = if must_not_wait() { WhenFull::Refuse } else { when_full.unwrap_or(self.when_full) };
        let era = match self.gate.enter(bytes, when_full) {
            Ok(era) => era,
            Err(error) => return Err(Refused { error, value: Some(source) }),
        };
        // From here on it is open, and must be delivered or given up.
        let permit = Permit::new(self.gate.clone(), bytes);
        let start = Instant::now();
        let leave_it = self.crew.launch();
        let refuse = |permit: Permit, error, value| {
            self.crew.withdraw();
            drop(permit);
            self.gate.delivered(era);
            Err(Refused { error, value })
        };
        let mut way = Way::new(&self.device, &self.lanes);
        // What it can not give back is dropped there, and a tag is the caller's own.
        let begun = quietly(|| source.begin(&mut way));
        let mut begun = match begun.unwrap_or_else(|error| Err(Refused { error, value: None })) {
            Ok(begun) => begun,
            Err(Refused { error, value }) => return refuse(permit, error, value),
        };
        let ahead = way.ahead();
        // Submitting is most of the time that it takes.
        let deferred = leave_it && matches!(ahead, Ahead::Lane(..));
        if !deferred && let Err(error) = S::launch(&mut begun) {
            return refuse(permit, error, quietly(|| S::back(begun)).ok().flatten());
        }
        let channel = channel();
        let (ticket, item, stopped) = {
            let mut state = self.state.lock();
            let number = state.stats.submitted;
            state.stats.submitted += 1;
            state.stats.in_flight += 1;
            let (ticket, item) = Held::pair(&self.spare, number, bytes, channel);
            if state.stopped.is_none() {
                state.open.insert(number, item.item().clone());
            }
            (ticket, item, state.stopped.clone())
        };
        let number = item.number;
        if let Some(error) = stopped {
            let _ = quietly(|| item.finish(Err(error)));
        }
        self.observe(number, Stage::Submitted { bytes });
        let flight = Flight { item, begun, permit, era, start };
        match ahead {
            Ahead::Lane(lane, stream) => {
                let (lane, bytes) = (&self.flights[lane], usize::try_from(bytes).unwrap_or(usize::MAX));
                if deferred {
                    lane.defer(flight, bytes);
                } else {
                    lane.push(self.device.context(), &stream, flight, bytes, self.device.most_gbs());
                }
                self.crew.launched();
            }
            Ahead::All(mut pending, stream) => {
                self.crew.withdraw();
                pending.extend(stream.map(|stream| self.device.point(&stream)));
                let shared = self.clone();
                let then = Box::new(move |passed: Result<()>| {
                    let (number, arrived) = shared.landed(flight, passed.map(|()| Passed::seen()));
                    shared.crew.arrived(number, arrived);
                });
                if let Err((error, then)) = self.device.waiter().submit(pending, then) {
                    // There is no thread to wait: the copies go on, and keep their memory.
                    then(Err(error));
                }
            }
        }
        Ok(Ticket::new(ticket))
    }

    /// The work of one of the pool's threads.
    pub(super) fn work(&self) {
        // For good: else each call would make it current, and put back what was. (Without it, each call says why.)
        let _bound = self.device.context().to_submit();
        let (mut found, mut batch) = (Vec::new(), Vec::new());
        let mut task = self.crew.next(Done::Nothing);
        loop {
            task = match task {
                Task::Consume(arrived) => {
                    self.deliver(arrived);
                    self.crew.next(Done::Consumed)
                }
                Task::Lead => {
                    self.lead(&mut found, &mut batch);
                    self.crew.next(Done::Led(&mut found))
                }
                Task::End => return,
            };
        }
    }

    /// Asks for what is under way, until something has come, or nothing is, or this thread is needed to consume.
    fn lead(&self, found: &mut Vec<(u64, Arrived<S, R>)>, batch: &mut Vec<Flight<S, R>>) {
        let (context, gbs) = (self.device.context(), self.device.most_gbs());
        let (mut since, mut last) = (Instant::now(), None);
        loop {
            let news = self.crew.news();
            let (mut idle, mut due) = (true, None);
            for (lane, stream) in self.lanes.streams() {
                let mut launch = |flight: &mut Flight<S, R>| S::launch(&mut flight.begun);
                let mut landed = |flight, passed| found.push(self.landed(flight, passed));
                let asked = self.flights[lane].ask(context, stream, gbs, batch, &mut launch, &mut landed);
                if let Asked::Waiting(from) = asked {
                    // The first one of several; any time, if one of them does not know.
                    due = if idle { from } else { due.min(from) };
                    idle = false;
                }
            }
            let over = || self.crew.is_closed() || self.crew.is_called();
            if !found.is_empty() || !self.crew.awake && !self.crew.is_flying() || over() {
                return;
            }
            if idle && self.crew.awake {
                // Without touching what those who submit write to.
                while self.crew.news() == news && !over() {
                    std::hint::spin_loop();
                }
                continue;
            }
            let now = Instant::now();
            if last.replace(news) != Some(news) {
                since = now;
            }
            since = due.map_or(since, |due| since.max(due));
            if self.crew.awake {
                std::hint::spin_loop();
            } else if now >= since && now - since < AWAKE {
                breathe();
            } else if now < since {
                self.crew.rest(news, since - now);
            } else {
                self.crew.rest(news, ((now - since) / 16).clamp(*PAUSE.start(), *PAUSE.end()));
            }
        }
    }

    /// The copies have run, or never will.
    fn landed(&self, flight: Flight<S, R>, passed: Result<Passed>) -> (u64, Arrived<S, R>) {
        let Flight { item, begun, permit, era, start } = flight;
        let (number, bytes) = (item.number, permit.bytes());
        let _range = trace::range(c"egress landing", bytes);
        let inside = Inside::of(&self.gate, number);
        // A tag in it may be the caller's own.
        let landed = match passed {
            Ok(passed) => quietly(|| S::land(begun, &passed)).and_then(|landed| landed),
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
        (number, Arrived { item, output, era, at })
    }

    /// Has an item consumed, and tells who waits for it.
    fn deliver(&self, arrived: Arrived<S, R>) {
        let Arrived { item, output, era, at } = arrived;
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
            (Ok(output), None) if item.item().begin() => quietly(|| (self.consumer)(output)),
            (Ok(output), stopped) => {
                // A tag in it may be the caller's own.
                let _ = quietly(|| drop(output));
                let stopped = stopped.filter(|_| !item.item().is_cancelled());
                Err(stopped.unwrap_or_else(|| Error::new(Kind::Withdrawn)))
            }
        };
        let result = self.note(item.number, result, begun.elapsed());
        // A result that nobody wants is dropped here, and a waker is a caller's.
        let _ = quietly(|| item.finish(result));
        let _ = quietly(|| drop(item));
        drop(inside);
        self.gate.delivered(era);
    }

    /// Counts an item that is over. What comes too late, after its ticket was told that it would not come, is dropped.
    fn note(&self, number: u64, result: Result<R>, taken: Duration) -> Result<R> {
        let mut state = self.state.lock();
        state.stats.consuming -= 1;
        state.stats.consuming_time += taken;
        let given_up = state.open.remove(&number).is_none();
        let (result, late) = match (result, state.stopped.clone().filter(|_| given_up)) {
            (Ok(late), Some(stopped)) => (Err(stopped), Some(late)),
            (result, _) => (result, None),
        };
        let stage = match &result {
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
        // A caller's value.
        let _ = quietly(|| drop(late));
        self.observe(number, stage);
        result
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
        // Not those that this thread consumes.
        let own = delivering(&self.gate);
        let (open, abandoned): (HashMap<_, _>, _) = {
            let mut state = self.state.lock();
            state.stopped.get_or_insert_with(|| error.clone());
            let all = std::mem::take(&mut state.open);
            let (own, open) = all.into_iter().partition(|(number, item)| own.contains(number) && !item.is_open());
            state.open = own;
            // Under the lock: later they may be over, and other items.
            let abandoned = open.values().filter(|item| !item.is_cancelled()).count();
            (open, abandoned)
        };
        for (number, item) in &open {
            let _ = quietly(|| item.finish(*number, Err(error.clone())));
        }
        abandoned as u64
    }

    /// (In a forked child a lock may never be free.)
    pub(super) fn stats(&self) -> EgressStats {
        if check_not_forked().is_err() {
            return EgressStats::default();
        }
        let (items, bytes, _) = self.gate.level();
        let stats = self.state.lock().stats;
        EgressStats { kept: items as u64, kept_bytes: bytes, ..stats }
    }

    pub(super) fn health(&self, workers: usize) -> EgressHealth {
        if let Err(error) = check_not_forked() {
            return EgressHealth { workers: 0, panics: 0, last_error: Some(error), faulted: false, closed: true };
        }
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

/// A µs or so: who asks the driver without a pause holds up those who submit.
fn breathe() {
    for _ in 0..16 {
        std::hint::spin_loop();
    }
}
