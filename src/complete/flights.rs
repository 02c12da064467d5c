//! What flies on one stream, and the marks behind it: a mark that has passed says that all before it has. No CUDA here: loom explores it.
//!
//! A mark (a recorded event) costs the driver's time. So whoever pushes makes one only where none is under way and nobody just asks, or
//! where enough bytes lie behind the last one; what flies behind that is marked together, by who asks, once the last mark has passed.
//!
//! Invariants: a mark covers those that were pushed before it was made, and nothing else; each is landed exactly once, in the order
//! of pushing, and not before a mark that covers it has passed.
#![deny(unsafe_code)]

use std::collections::VecDeque;

use crate::sync::Mutex;

/// So many bytes are worth a mark of their own: a link of 55 GB/s takes 5 µs for them.
const WORTH_A_MARK: usize = 256 << 10;

#[derive(Debug)]
pub(crate) struct Flights<F, M> {
    state: Mutex<State<F, M>>,
}

#[derive(Debug)]
struct State<F, M> {
    /// Not submitted yet, with their bytes.
    deferred: VecDeque<(F, usize)>,
    flying: VecDeque<F>,
    /// The number of the first that flies.
    first: u64,
    marks: VecDeque<(Span, M)>,
    /// Of those for which nobody was told to make a mark.
    unmarked: usize,
    /// The first mark is with who asks.
    asked: bool,
}

/// What a mark is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    /// All below this number.
    pub(crate) below: u64,
    /// The bytes of those that no earlier mark is for.
    pub(crate) bytes: usize,
}

/// What is to be asked next.
#[derive(Debug)]
pub(crate) enum Next<M> {
    /// Whether this has passed; then [`Flights::land`], else [`Flights::back`].
    Mark(Span, M),
    /// These have no mark: make one, and ask that.
    Unmarked(Span),
    /// Nothing flies.
    Nothing,
}

impl<F, M> Flights<F, M> {
    pub(crate) fn new() -> Self {
        let (deferred, flying, marks) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        Self { state: Mutex::new(State { deferred, flying, first: 0, marks, unmarked: 0, asked: false }) }
    }

    /// Leaves it to who asks to submit this, and push it.
    pub(crate) fn defer(&self, flight: F, bytes: usize) {
        self.state.lock().deferred.push_back((flight, bytes));
    }

    /// For the one that asks: the first that is to be submitted.
    pub(crate) fn deferred(&self) -> Option<(F, usize)> {
        self.state.lock().deferred.pop_front()
    }

    /// What has just been submitted; `asked_for`, if somebody is just going to ask. Whether the caller is to make a mark, and what that is for.
    pub(crate) fn push(&self, flight: F, bytes: usize, asked_for: bool) -> Option<Span> {
        let mut state = self.state.lock();
        state.flying.push_back(flight);
        state.unmarked = state.unmarked.saturating_add(bytes);
        let idle = state.marks.is_empty() && !state.asked && !asked_for;
        (idle || state.unmarked >= WORTH_A_MARK).then(|| state.span())
    }

    /// A mark that was made after `span` was given out.
    pub(crate) fn mark(&self, span: Span, mark: M) {
        let mut state = self.state.lock();
        // Landed meanwhile, by a later mark.
        if span.below <= state.first {
            return;
        }
        // Two that push at a time may come in another order.
        let at = state.marks.partition_point(|(before, _)| before.below < span.below);
        state.marks.insert(at, (span, mark));
    }

    /// For the one that asks.
    pub(crate) fn next(&self) -> Next<M> {
        let mut state = self.state.lock();
        if let Some((span, mark)) = state.marks.pop_front() {
            state.asked = true;
            return Next::Mark(span, mark);
        }
        if state.flying.is_empty() {
            return Next::Nothing;
        }
        // Those whose mark is just being made are in it too: it may never come.
        state.asked = true;
        Next::Unmarked(state.span())
    }

    /// It has not passed.
    pub(crate) fn back(&self, span: Span, mark: M) {
        let mut state = self.state.lock();
        state.marks.push_front((span, mark));
        state.asked = false;
    }

    /// It has passed, or never will: hands out what it is for.
    pub(crate) fn land(&self, span: Span, landed: &mut Vec<F>) {
        let mut state = self.state.lock();
        let count = span.below.saturating_sub(state.first) as usize;
        let count = count.min(state.flying.len());
        landed.extend(state.flying.drain(..count));
        state.first += count as u64;
        state.asked = false;
        let first = state.first;
        while state.marks.front().is_some_and(|(span, _)| span.below <= first) {
            state.marks.pop_front();
        }
    }
}

impl<F, M> State<F, M> {
    fn span(&mut self) -> Span {
        let below = self.first + self.flying.len() as u64;
        Span { below, bytes: std::mem::take(&mut self.unmarked) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Marks are numbers of what the stream was given before them; the stream passes them in order.
        #[test]
        fn each_lands_once_in_order_and_not_before_its_mark(steps in prop::collection::vec((0..4u8, 0..400_000usize), 1..80)) {
            let flights = Flights::<u64, u64>::new();
            let (mut given, mut passed, mut landed, mut owed) = (0u64, 0u64, Vec::new(), Vec::new());
            for (step, bytes) in steps {
                match step {
                    0 => {
                        owed.extend(flights.push(given, bytes, bytes % 2 == 0));
                        given += 1;
                    }
                    1 => if let Some(span) = owed.pop() {
                        flights.mark(span, given);
                    }
                    2 => passed = (passed + 1).min(given),
                    _ => match flights.next() {
                        Next::Mark(span, mark) if mark <= passed => flights.land(span, &mut landed),
                        Next::Mark(span, mark) => flights.back(span, mark),
                        Next::Unmarked(span) if given <= passed => flights.land(span, &mut landed),
                        Next::Unmarked(span) => flights.back(span, given),
                        Next::Nothing => prop_assert_eq!(landed.len() as u64, given),
                    }
                }
                prop_assert!(landed.len() as u64 <= passed);
                prop_assert!(landed.iter().copied().eq(0..landed.len() as u64));
            }
            for _ in 0..=2 * given {
                match flights.next() {
                    Next::Mark(span, _) | Next::Unmarked(span) => flights.land(span, &mut landed),
                    Next::Nothing => {}
                }
            }
            prop_assert!(landed.into_iter().eq(0..given));
        }
    }

    /// Small ones share a mark, large ones have their own.
    #[test]
    fn a_mark_is_made_where_it_pays() {
        let flights = Flights::<u8, ()>::new();
        assert_eq!(flights.push(0, 10, false), Some(Span { below: 1, bytes: 10 }));
        flights.mark(Span { below: 1, bytes: 10 }, ());
        assert_eq!(flights.push(1, 20, false), None);
        assert_eq!(flights.push(2, 30, false), None);
        assert_eq!(flights.push(3, WORTH_A_MARK, true), Some(Span { below: 4, bytes: WORTH_A_MARK + 50 }));
        let mut landed = Vec::new();
        let Next::Mark(span, ()) = flights.next() else { panic!("no mark") };
        // In hand, it counts as under way.
        assert_eq!(flights.push(4, 5, false), None);
        flights.land(span, &mut landed);
        assert_eq!(landed, [0]);
        assert!(matches!(flights.next(), Next::Unmarked(Span { below: 5, bytes: 5 })));
    }
}

#[cfg(all(test, transfer_tensor_loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, Ordering};
    use loom::thread;

    use super::*;

    /// Two push, one asks: what lands was on the stream before its mark was made.
    #[test]
    fn a_mark_covers_what_was_submitted_before_it() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            // The stream is a counter: who submits takes a number, and a mark is a number that all before it are below.
            let (flights, stream) = (Arc::new(Flights::<u64, u64>::new()), Arc::new(AtomicU64::new(0)));
            let pushers: Vec<_> = (0..2)
                .map(|_| {
                    let (flights, stream) = (flights.clone(), stream.clone());
                    thread::spawn(move || {
                        let number = stream.fetch_add(1, Ordering::SeqCst);
                        if let Some(span) = flights.push(number, 1, false) {
                            flights.mark(span, stream.load(Ordering::SeqCst));
                        }
                    })
                })
                .collect();
            let mut all = Vec::new();
            let mut ask = || {
                let mut landed = Vec::new();
                let (span, mark) = match flights.next() {
                    Next::Mark(span, mark) => (span, mark),
                    Next::Unmarked(span) => (span, stream.load(Ordering::SeqCst)),
                    Next::Nothing => return false,
                };
                flights.land(span, &mut landed);
                assert!(landed.iter().all(|number| *number < mark), "{landed:?} before {mark}");
                all.extend(landed);
                true
            };
            ask();
            for pusher in pushers {
                pusher.join().unwrap();
            }
            while ask() {}
            all.sort_unstable();
            assert_eq!(all, [0, 1]);
        });
    }
}
