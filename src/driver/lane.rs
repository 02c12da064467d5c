//! Streams of ours that carry results to the host, and what is on its way on them.

use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::context::Context;
use super::event::{EARLY, Event};
use super::stream::Stream;
use crate::complete::flights::{Flights, Next, Span};
use crate::error::Result;

/// Each producer has two.
pub(crate) const LANES: usize = 8;

/// Results of such a size take turns: the device's order of one, and the mark behind it, cost a few µs, in which the other's copy goes
/// on. Less than that is not worth two marks; of more, none is to be late because of the next.
const TURNS: std::ops::Range<usize> = 256 << 10..8 << 20;

/// Of so many producers it is remembered which stream carries theirs.
const PRODUCERS: usize = 64;

/// Streams of ours, each for some of the streams that results are made on: what is held up on one of those holds up no other.
#[derive(Debug)]
pub(crate) struct Lanes {
    context: Arc<Context>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    streams: Vec<Arc<Stream>>,
    producers: Vec<(usize, Option<ThreadId>)>,
    turn: usize,
}

impl Lanes {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self { context: context.clone(), state: Mutex::default() }
    }

    /// Which lane is to carry `bytes` that are made on `producer`, and its stream.
    ///
    /// # Errors
    /// The driver makes no stream.
    pub(crate) fn of(&self, producer: &Stream, bytes: usize) -> Result<(usize, Arc<Stream>)> {
        let mut state = self.state.lock();
        let name = producer.name();
        let at = match state.producers.iter().position(|known| *known == name) {
            Some(at) => at,
            None => {
                if state.producers.len() == PRODUCERS {
                    state.producers.clear();
                }
                state.producers.push(name);
                state.producers.len() - 1
            }
        };
        let turn = if TURNS.contains(&bytes) { state.turn ^ 1 } else { 0 };
        state.turn = turn;
        let lane = (2 * at + turn) % LANES;
        while state.streams.len() <= lane {
            state.streams.push(Arc::new(self.context.fresh_stream(c"transfer-out")?));
        }
        Ok((lane, state.streams[lane].clone()))
    }
}

/// That what lies before it has run was seen.
#[derive(Debug)]
pub struct Passed(());

impl Passed {
    /// For who saw it.
    pub(crate) fn seen() -> Self {
        Self(())
    }
}

/// What is on its way on one stream.
#[derive(Debug)]
pub(crate) struct Lane<F> {
    flights: Flights<F, Mark>,
    /// The stream; none before the first.
    stream: OnceLock<Arc<Stream>>,
}

#[derive(Debug)]
struct Mark {
    event: Event,
    /// Before this it can not have passed.
    due: Option<Instant>,
}

/// How things stand on a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Nothing is on its way.
    Idle,
    /// What comes next can not be there before this.
    Waiting(Option<Instant>),
}

impl<F> Lane<F> {
    pub(crate) fn new() -> Self {
        Self { flights: Flights::new(), stream: OnceLock::new() }
    }

    /// The copies of `flight`, which has so many bytes, have been submitted to `stream`, always the same one.
    pub(crate) fn push(&self, context: &Arc<Context>, stream: &Arc<Stream>, flight: F, bytes: usize, gbs: f64) {
        self.stream.get_or_init(|| stream.clone());
        self.fly(context, stream, flight, bytes, gbs, false);
    }

    /// Leaves it to who asks to submit the copies of `flight`.
    pub(crate) fn defer(&self, stream: &Arc<Stream>, flight: F, bytes: usize) {
        self.stream.get_or_init(|| stream.clone());
        self.flights.defer(flight, bytes);
    }

    fn fly(&self, context: &Arc<Context>, stream: &Stream, flight: F, bytes: usize, gbs: f64, asked_for: bool) {
        if let Some(span) = self.flights.push(flight, bytes, asked_for)
            // Who asks makes one where this fails.
            && let Ok(event) = context.to_submit().and_then(|_bound| Event::record(context, stream))
        {
            let due = due(span, gbs, Instant::now());
            self.flights.mark(span, Mark { event, due });
        }
    }

    /// Submits what was deferred by `launch`, and hands out what has landed, or never will, to `landed`. One thread at a time.
    pub(crate) fn ask(
        &self,
        context: &Arc<Context>,
        gbs: f64,
        batch: &mut Vec<F>,
        launch: &mut impl FnMut(&mut F) -> Result<()>,
        landed: &mut impl FnMut(F, Result<Passed>),
    ) -> Asked {
        let Some(stream) = self.stream.get() else { return Asked::Idle };
        while let Some((mut flight, bytes)) = self.flights.deferred() {
            match launch(&mut flight) {
                Ok(()) => self.fly(context, stream, flight, bytes, gbs, true),
                Err(error) => landed(flight, Err(error)),
            }
        }
        let mut since = None;
        loop {
            let (span, mut mark) = match self.flights.next() {
                Next::Nothing => return Asked::Idle,
                Next::Mark(span, mark) => (span, Ok(mark)),
                Next::Unmarked(span) => {
                    let event = context.to_submit().and_then(|_bound| Event::record(context, stream));
                    (span, event.map(|event| Mark { event, due: None }))
                }
            };
            if let (Ok(mark), Some(since)) = (&mut mark, since) {
                // It began when the one before it was over.
                mark.due = mark.due.max(due(span, gbs, since));
            }
            let error = match mark {
                Ok(mark) => match mark.event.query() {
                    Ok(true) => None,
                    // A capture ends, and then it can be asked again.
                    Ok(false) => return self.not_yet(span, mark),
                    Err(error) if error.is_capturing() => return self.not_yet(span, mark),
                    Err(error) => Some(error),
                },
                Err(error) => Some(error),
            };
            self.flights.land(span, batch);
            for flight in batch.drain(..) {
                landed(flight, error.clone().map_or(Ok(Passed(())), Err));
            }
            since = Some(Instant::now());
        }
    }

    fn not_yet(&self, span: Span, mark: Mark) -> Asked {
        let due = mark.due;
        self.flights.back(span, mark);
        Asked::Waiting(due)
    }
}

/// When what began at `since` can be over at the earliest, less what a sleep takes too long.
fn due(span: Span, gbs: f64, since: Instant) -> Option<Instant> {
    let least = Duration::try_from_secs_f64(span.bytes as f64 / gbs * 1e-9).ok()?;
    since.checked_add(least.checked_sub(EARLY)?)
}
