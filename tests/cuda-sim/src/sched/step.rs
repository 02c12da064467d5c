//! One piece of work on a stream, and what it comes before.

#![deny(unsafe_code)]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What everybody may know about a step, also after it is done.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) id: u64,
    pub(crate) what: &'static str,
    pub(crate) stream: u64,
    /// Its place on the stream.
    pub(crate) seq: u64,
    pub(crate) ctx: u64,
    pub(crate) device: usize,
    /// When it was submitted, in ticks of the process.
    pub(crate) submitted: u64,
    /// For every other stream: the last step that is ordered before this one. Steps that had finished when this one
    /// was submitted are left out.
    pub(crate) clock: Vec<(u64, u64)>,
    done: AtomicU64,
    status: AtomicU32,
    end_ns: AtomicU64,
    seen_ns: AtomicU64,
}

impl Step {
    pub(crate) fn new(id: u64, what: &'static str, place: Place, submitted: u64, clock: Vec<(u64, u64)>) -> Self {
        Self {
            id,
            what,
            stream: place.stream,
            seq: place.seq,
            ctx: place.ctx,
            device: place.device,
            submitted,
            clock,
            done: AtomicU64::new(0),
            status: AtomicU32::new(0),
            end_ns: AtomicU64::new(0),
            seen_ns: AtomicU64::new(0),
        }
    }

    /// Marks it done at a tick; `end_ns` is its virtual end, `seen_ns` when the host can know.
    pub(crate) fn finish(&self, tick: u64, status: u32, end_ns: u64, seen_ns: u64) {
        self.status.store(status, Ordering::Relaxed);
        self.end_ns.store(end_ns, Ordering::Relaxed);
        self.seen_ns.store(seen_ns, Ordering::Relaxed);
        self.done.store(tick, Ordering::Release);
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire) != 0
    }

    pub(crate) fn done_tick(&self) -> Option<u64> {
        match self.done.load(Ordering::Acquire) {
            0 => None,
            tick => Some(tick),
        }
    }

    /// How it ended; meaningful once it is done.
    pub(crate) fn status(&self) -> u32 {
        self.status.load(Ordering::Relaxed)
    }

    pub(crate) fn end_ns(&self) -> u64 {
        self.end_ns.load(Ordering::Relaxed)
    }

    pub(crate) fn seen_ns(&self) -> u64 {
        self.seen_ns.load(Ordering::Relaxed)
    }

    /// Whether this step is ordered before another: by stream, by event, or because it had finished when the other
    /// was submitted.
    pub(crate) fn before(&self, other: &Step) -> bool {
        if self.stream == other.stream {
            return self.seq < other.seq;
        }
        self.done_tick().is_some_and(|tick| tick < other.submitted)
            || other.clock.iter().any(|&(stream, seq)| stream == self.stream && seq >= self.seq)
    }

    pub(crate) fn ordered(&self, other: &Step) -> bool {
        self.before(other) || other.before(self)
    }
}

/// Where a step stands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) stream: u64,
    pub(crate) seq: u64,
    pub(crate) ctx: u64,
    pub(crate) device: usize,
}

/// Adds everything ordered before `from`, and `from` itself, to a clock.
pub(crate) fn merge(clock: &mut Vec<(u64, u64)>, from: &Step) {
    raise(clock, from.stream, from.seq);
    for &(stream, seq) in &from.clock {
        raise(clock, stream, seq);
    }
}

fn raise(clock: &mut Vec<(u64, u64)>, stream: u64, seq: u64) {
    match clock.iter_mut().find(|entry| entry.0 == stream) {
        Some(entry) => entry.1 = entry.1.max(seq),
        None => clock.push((stream, seq)),
    }
}
