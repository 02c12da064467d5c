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
    /// Each is made when something is to go on it.
    streams: [OnceLock<Arc<Stream>>; LANES],
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    producers: Vec<(usize, Option<ThreadId>)>,
    turn: usize,
}

impl Lanes {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self { context: context.clone(), streams: Default::default(), state: Mutex::default() }
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
        // Under the lock: nobody else makes it meanwhile.
        let stream = match self.streams[lane].get() {
            Some(stream) => stream.clone(),
            None => {
                let stream = Arc::new(self.context.fresh_stream(c"transfer-out")?);
                self.streams[lane].get_or_init(|| stream).clone()
            }
        };
        Ok((lane, stream))
    }

    /// Those that carry something, or did, by their numbers.
    pub(crate) fn streams(&self) -> impl Iterator<Item = (usize, &Stream)> {
        self.streams.iter().enumerate().filter_map(|(lane, stream)| Some((lane, &**stream.get()?)))
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

/// What is on its way on one stream, always the same one.
#[derive(Debug)]
pub(crate) struct Lane<F>(Flights<F, Mark>);

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
        Self(Flights::new())
    }

    /// The copies of `flight`, which has so many bytes, have been submitted to `stream`.
    pub(crate) fn push(&self, context: &Arc<Context>, stream: &Stream, flight: F, bytes: usize, gbs: f64) {
        self.fly(context, stream, flight, bytes, gbs, false);
    }

    /// Leaves it to who asks to submit the copies of `flight`.
    pub(crate) fn defer(&self, flight: F, bytes: usize) {
        self.0.defer(flight, bytes);
    }

    fn fly(&self, context: &Arc<Context>, stream: &Stream, flight: F, bytes: usize, gbs: f64, asked_for: bool) {
        if let Some(span) = self.0.push(flight, bytes, asked_for)
            // Who asks makes one where this fails.
            && let Ok(event) = context.to_submit().and_then(|_bound| Event::record(context, stream))
        {
            let due = due(span, gbs, Instant::now());
            self.0.mark(span, Mark { event, due });
        }
    }

    /// Submits what was deferred by `launch`, and hands out what has landed, or never will, to `landed`. One thread at a time.
    pub(crate) fn ask(
        &self,
        context: &Arc<Context>,
        stream: &Stream,
        gbs: f64,
        batch: &mut Vec<F>,
        launch: &mut impl FnMut(&mut F) -> Result<()>,
        landed: &mut impl FnMut(F, Result<Passed>),
    ) -> Asked {
        while let Some((mut flight, bytes)) = self.0.deferred() {
            match launch(&mut flight) {
                Ok(()) => self.fly(context, stream, flight, bytes, gbs, true),
                Err(error) => landed(flight, Err(error)),
            }
        }
        let mut since = None;
        loop {
            let (span, mut mark) = match self.0.next() {
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
            self.0.land(span, batch);
            for flight in batch.drain(..) {
                landed(flight, error.clone().map_or(Ok(Passed(())), Err));
            }
            since = Some(Instant::now());
        }
    }

    fn not_yet(&self, span: Span, mark: Mark) -> Asked {
        let due = mark.due;
        self.0.back(span, mark);
        Asked::Waiting(due)
    }
}

/// When what began at `since` can be over at the earliest, less what a sleep takes too long.
fn due(span: Span, gbs: f64, since: Instant) -> Option<Instant> {
    let least = Duration::try_from_secs_f64(span.bytes as f64 / gbs * 1e-9).ok()?;
    since.checked_add(least.checked_sub(EARLY)?)
}
