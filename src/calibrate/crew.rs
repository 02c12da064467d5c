//! A few threads that begin together, to be timed. They live for one measurement: a calibration is over in half a second and
//! leaves none behind.
#![deny(unsafe_code)]

use std::thread::Builder;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Kind, Result};

/// What a crew waits for before it begins.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: usize,
    /// Begin, or go home.
    begin: Option<bool>,
}

impl Gate {
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        state.waiting += 1;
        self.changed.notify_all();
        loop {
            match state.begin {
                Some(begin) => return begin,
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Opens when `hands` threads stand before it.
    fn open(&self, hands: usize, begin: bool) {
        let mut state = self.state.lock();
        while state.waiting < hands {
            self.changed.wait(&mut state);
        }
        state.begin = Some(begin);
        self.changed.notify_all();
    }
}

/// Runs `work` on `threads` threads, the caller's included, each with its number; how long it took from when all were there
/// until the last was done.
///
/// # Errors
/// A thread could not be started (then none works), or the first error of one of them.
pub(crate) fn crew(threads: usize, work: &(dyn Fn(usize) -> Result<()> + Sync)) -> Result<Duration> {
    let gate = Gate::default();
    std::thread::scope(|scope| {
        let (mut hands, mut refused) = (Vec::new(), None);
        for worker in 1..threads.max(1) {
            let gate = &gate;
            let hand = move || {
                let result = if gate.wait() { work(worker) } else { Ok(()) };
                (result, Instant::now())
            };
            match Builder::new().name("transfer-crew".into()).spawn_scoped(scope, hand) {
                Ok(hand) => hands.push(hand),
                Err(error) => {
                    refused = Some(Error::new(Kind::Thread { what: format!("one to measure with: {error}") }));
                    break;
                }
            }
        }
        gate.open(hands.len(), refused.is_none());
        let start = Instant::now();
        let mut result = match refused {
            Some(error) => Err(error),
            None => work(0),
        };
        let mut end = Instant::now();
        for hand in hands {
            match hand.join() {
                Ok((done, at)) => {
                    result = result.and(done);
                    end = end.max(at);
                }
                Err(_) => result = result.and(Err(Error::new(Kind::Thread { what: "one that measured".into() }))),
            }
        }
        result.map(|()| end.saturating_duration_since(start))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn all_work_once_with_a_number_of_their_own() {
        for threads in [0, 1, 2, 7] {
            let seen = AtomicUsize::new(0);
            crew(threads, &|worker| {
                seen.fetch_add(1 << (8 * worker), Ordering::SeqCst);
                Ok(())
            })
            .unwrap();
            let expected = (0..threads.max(1)).map(|worker| 1 << (8 * worker)).sum::<usize>();
            assert_eq!(seen.into_inner(), expected);
        }
    }

    #[test]
    fn one_error_is_the_crews() {
        let error = crew(3, &|worker| if worker == 2 { Err(Error::overflow("two")) } else { Ok(()) }).unwrap_err();
        assert!(error.to_string().contains("two"));
    }
}
