//! Recorded events. An [`Event`] exists only after a successful record, so "never recorded", which the driver reports as
//! complete, can not be mistaken for "done".

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, RawEvent};
use super::stream::Stream;
use crate::error::Result;

/// How long a wait asks again and again before it begins to sleep between two questions.
const POLL: Duration = Duration::from_micros(30);

/// What is known to be short is asked for so long.
const POLL_SHORT: Duration = Duration::from_micros(500);

/// So long before a copy should be done its wait is awake again: a sleep takes longer than it should.
pub(super) const EARLY: Duration = Duration::from_micros(120);

/// The sleeps: a 64th of what the wait took so far, so that it ends at most that much late, within these bounds.
const SLEEP: std::ops::RangeInclusive<Duration> = Duration::from_micros(20)..=Duration::from_millis(1);

/// A point on a stream that was recorded.
#[derive(Debug)]
pub(crate) struct Event {
    raw: Option<RawEvent>,
    context: Arc<Context>,
    /// Before this it can not have passed: no link is as fast.
    not_before: Option<Instant>,
    /// How long a wait asks, from then on, before it sleeps.
    poll: Duration,
}

impl Event {
    /// Records what is on `stream` now. `context` must be the one the stream belongs to, and current (a `Bound` is held).
    pub(crate) fn record(context: &Arc<Context>, stream: &Stream) -> Result<Event> {
        let raw = context.take_event()?;
        // From here on `event` gives the handle back; a handle whose record failed may be recorded again.
        let event = Event { raw: Some(raw), context: context.clone(), not_before: None, poll: POLL };
        // SAFETY: the event and the stream belong to the current context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.handle(), stream.handle()) })?;
        Ok(event)
    }

    /// Says that what lies before it takes at least this from now.
    pub(crate) fn not_before(mut self, least: Duration) -> Event {
        self.not_before = least.checked_sub(EARLY).and_then(|early| Instant::now().checked_add(early));
        self
    }

    /// Says that what lies before it should take this. For who waits and does nothing else.
    pub(crate) fn expecting(mut self, expected: Duration) -> Event {
        if expected <= POLL_SHORT {
            self.poll = POLL + expected * 5 / 4;
        }
        self
    }

    pub(super) fn handle(&self) -> sys::CUevent {
        self.raw.as_ref().map_or(std::ptr::null_mut(), |raw| raw.0)
    }

    /// Whether the point has passed.
    ///
    /// # Errors
    /// The context faulted.
    pub(crate) fn query(&self) -> Result<bool> {
        let _bound = self.context.enter()?;
        self.query_bound()
    }

    /// As [`query`](Event::query), where the caller has entered the context.
    pub(super) fn query_bound(&self) -> Result<bool> {
        // SAFETY: the handle is alive and was recorded.
        match unsafe { sys::cuEventQuery(self.handle()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Blocks until the point has passed.
    ///
    /// # Errors
    /// The context faulted.
    pub(crate) fn wait(&self) -> Result<()> {
        if let Some(left) = self.not_before.and_then(|early| early.checked_duration_since(Instant::now())) {
            std::thread::sleep(left);
        }
        self.wait_polling(self.poll)
    }

    /// As [`wait`](Event::wait), for what is known to be short: does not sleep for half a millisecond.
    pub(crate) fn wait_awake(&self) -> Result<()> {
        self.wait_polling(POLL_SHORT)
    }

    fn wait_polling(&self, poll: Duration) -> Result<()> {
        let _bound = self.context.enter()?;
        let start = Instant::now();
        loop {
            // SAFETY: the handle is alive and was recorded.
            match unsafe { sys::cuEventQuery(self.handle()) } {
                sys::CUresult::CUDA_ERROR_NOT_READY => {}
                code => return check("cuEventQuery", code),
            }
            let waited = start.elapsed();
            if waited < poll {
                std::hint::spin_loop();
            } else {
                std::thread::sleep((waited / 64).clamp(*SLEEP.start(), *SLEEP.end()));
            }
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(raw) = self.raw.take() {
            // A later record replaces what this one stood for; waits that were submitted keep the old point.
            self.context.give_event(raw);
        }
    }
}
