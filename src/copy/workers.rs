//! Threads that help with copies of ordinary memory: one set for the process, started as they are first needed, named, asleep
//! when there is nothing to do.
//!
//! One thread copies 8 to 10 GB/s, a PCIe link carries 55. Who copies offers seats; threads that are free take them, and he
//! works himself. A helper sits down only while callers and helpers are fewer than the CPUs this process may use.
#![deny(unsafe_code)]

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use crate::sync::{Condvar, Mutex};

/// More threads than this bring nothing on any link there is (docs/benchmarks.md).
const MOST: usize = 32;

/// Work that several threads do together: each calls it, and it returns when there is nothing left to begin.
type Share = Box<dyn Fn() + Send + Sync>;

#[derive(Debug)]
pub(crate) struct Workers {
    state: Mutex<State>,
    /// Told of new offers, and of callers that are done.
    offered: Condvar,
    /// No helper begins when callers and busy helpers are this many.
    limit: usize,
}

#[derive(Debug, Default)]
struct State {
    offers: VecDeque<Offer>,
    threads: usize,
    idle: usize,
    /// Callers and busy helpers.
    active: usize,
    #[cfg(all(test, transfer_tensor_loom))]
    closed: bool,
}

#[derive(Debug)]
struct Offer {
    job: Arc<Job>,
    seats: usize,
}

struct Job {
    share: Share,
    /// How many helpers are at it.
    busy: Mutex<usize>,
    left: Condvar,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").finish_non_exhaustive()
    }
}

impl Workers {
    fn new(limit: usize) -> Self {
        Self { state: Mutex::new(State::default()), offered: Condvar::new(), limit }
    }

    /// The process's own.
    pub(crate) fn get() -> &'static Arc<Self> {
        static WORKERS: OnceLock<Arc<Workers>> = OnceLock::new();
        WORKERS.get_or_init(|| {
            let cpus = std::thread::available_parallelism().map_or(1, usize::from);
            Arc::new(Workers::new(cpus.min(MOST)))
        })
    }

    /// How many threads can be at work together, the caller's among them.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Calls `share` on this thread, and meanwhile on up to `helpers` others. When this returns, no thread is in it, and none
    /// will begin. `share` does not panic.
    pub(crate) fn run(self: &Arc<Self>, helpers: usize, share: Share) {
        let job = Arc::new(Job { share, busy: Mutex::new(0), left: Condvar::new() });
        self.offer(&job, helpers.min(self.limit.saturating_sub(1)));
        // The helpers may use what belongs to this thread: it does not leave before they do.
        let _ = catch_unwind(AssertUnwindSafe(|| (job.share)()));
        self.withdraw(&job);
        let mut busy = job.busy.lock();
        while *busy > 0 {
            job.left.wait(&mut busy);
        }
    }

    fn offer(self: &Arc<Self>, job: &Arc<Job>, seats: usize) {
        let mut state = self.state.lock();
        state.active += 1;
        if seats == 0 {
            return;
        }
        state.offers.push_back(Offer { job: job.clone(), seats });
        // As many threads as could be busy at once; one that can not be started is not missed.
        while state.threads + 1 < self.limit && state.idle < seats && state.threads < seats {
            if !self.start() {
                break;
            }
            state.threads += 1;
            state.idle += 1;
        }
        drop(state);
        self.offered.notify_all();
    }

    fn withdraw(&self, job: &Arc<Job>) {
        let mut state = self.state.lock();
        state.offers.retain(|offer| !Arc::ptr_eq(&offer.job, job));
        state.active -= 1;
        let more = !state.offers.is_empty();
        drop(state);
        if more {
            self.offered.notify_all();
        }
    }

    #[cfg(not(all(test, transfer_tensor_loom)))]
    fn start(self: &Arc<Self>) -> bool {
        let own = self.clone();
        std::thread::Builder::new().name("transfer-copy".into()).spawn(move || own.work()).is_ok()
    }

    #[cfg(all(test, transfer_tensor_loom))]
    fn start(self: &Arc<Self>) -> bool {
        let own = self.clone();
        loom::thread::spawn(move || own.work());
        true
    }

    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            let Some(job) = self.seat(&mut state) else {
                #[cfg(all(test, transfer_tensor_loom))]
                if state.closed {
                    return;
                }
                self.offered.wait(&mut state);
                continue;
            };
            drop(state);
            let _ = catch_unwind(AssertUnwindSafe(|| (job.share)()));
            {
                let mut busy = job.busy.lock();
                *busy -= 1;
                if *busy == 0 {
                    job.left.notify_all();
                }
            }
            drop(job);
            state = self.state.lock();
            state.active -= 1;
            state.idle += 1;
        }
    }

    /// Takes a seat at the offer that waited longest.
    fn seat(&self, state: &mut State) -> Option<Arc<Job>> {
        if state.active >= self.limit {
            return None;
        }
        let mut offer = state.offers.pop_front()?;
        offer.seats -= 1;
        let job = offer.job.clone();
        if offer.seats > 0 {
            state.offers.push_back(offer);
        }
        // Under the state's lock: who withdraws the offer afterwards sees it.
        *job.busy.lock() += 1;
        state.active += 1;
        state.idle -= 1;
        Some(job)
    }
}

#[cfg(all(test, not(transfer_tensor_loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn everything_is_done_once_and_over_when_it_returns() {
        let workers = Arc::new(Workers::new(4));
        for helpers in [0, 1, 3, 100] {
            let (next, done, inside) =
                (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            let most = Arc::new(AtomicUsize::new(0));
            let (sum, at, peak) = (done.clone(), inside.clone(), most.clone());
            workers.run(
                helpers,
                Box::new(move || {
                    peak.fetch_max(at.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    while next.fetch_add(1, Ordering::SeqCst) < 1000 {
                        sum.fetch_add(1, Ordering::SeqCst);
                    }
                    at.fetch_sub(1, Ordering::SeqCst);
                }),
            );
            assert_eq!((done.load(Ordering::SeqCst), inside.load(Ordering::SeqCst)), (1000, 0));
            assert!(most.load(Ordering::SeqCst) <= 4, "more than the limit");
        }
        assert!(workers.state.lock().threads <= 3);
    }

    #[test]
    fn no_helper_begins_beyond_the_limit() {
        let workers = Arc::new(Workers::new(3));
        let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let (workers, inside, most) = (&workers, inside.clone(), most.clone());
                scope.spawn(move || {
                    for _ in 0..50 {
                        let (next, at, peak) = (AtomicUsize::new(0), inside.clone(), most.clone());
                        let share = move || {
                            while next.fetch_add(1, Ordering::SeqCst) < 20 {
                                peak.fetch_max(at.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                                std::thread::yield_now();
                                at.fetch_sub(1, Ordering::SeqCst);
                            }
                        };
                        workers.run(8, Box::new(share));
                    }
                });
            }
        });
        // The second caller may come when the first has two helpers.
        assert!(most.load(Ordering::SeqCst) <= 4, "more than the limit");
        // Helpers stand up after the caller is told.
        while workers.state.lock().active > 0 {
            std::thread::yield_now();
        }
        assert_eq!(workers.state.lock().offers.len(), 0);
    }
}

#[cfg(all(test, transfer_tensor_loom))]
mod loom_tests {
    use loom::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn nobody_is_inside_when_it_returns() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let workers = Arc::new(Workers::new(2));
            let (inside, done) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            let (at, sum, next) = (inside.clone(), done.clone(), AtomicUsize::new(0));
            workers.run(
                1,
                Box::new(move || {
                    at.fetch_add(1, Ordering::SeqCst);
                    while next.fetch_add(1, Ordering::SeqCst) < 2 {
                        sum.fetch_add(1, Ordering::SeqCst);
                    }
                    at.fetch_sub(1, Ordering::SeqCst);
                }),
            );
            assert_eq!((inside.load(Ordering::SeqCst), done.load(Ordering::SeqCst)), (0, 2));
            workers.state.lock().closed = true;
            workers.offered.notify_all();
        });
    }
}
