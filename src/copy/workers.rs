//! Threads that help with copies of ordinary memory: one set for the process, started as they are first needed, named, asleep
//! when there is nothing to do.
//!
//! One thread does not copy as fast as a PCIe link carries. Who copies wakes those that sleep, and
//! works himself. A helper sits down only while callers and helpers are fewer than the CPUs this process may use.
#![deny(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use crate::error::quietly;
use crate::sync::{Condvar, Mutex};

/// No more threads than this, however many CPUs there are: one copy takes a few of them (`plan::Tuning`).
const MOST: usize = 32;

/// Work that several threads do together: each calls it, and it returns when there is nothing left to begin.
type Share = Box<dyn Fn() + Send + Sync>;

#[derive(Debug)]
pub(crate) struct Workers {
    state: Mutex<State>,
    /// No helper begins when callers and busy helpers are this many.
    limit: usize,
    /// Only a model of the threads ends.
    #[cfg(all(test, transfer_tensor_loom))]
    closed: crate::sync::AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// Threads that sleep, the last one that fell asleep last.
    idle: Vec<Arc<Seat>>,
    /// Jobs that would have more helpers.
    short: VecDeque<(Arc<Job>, usize)>,
    threads: usize,
    /// Callers and busy helpers.
    active: usize,
}

/// Where a thread finds its next job. Each has its own, so that several can be woken at once.
#[derive(Debug)]
struct Seat {
    job: Mutex<Option<Arc<Job>>>,
    filled: Condvar,
}

struct Job {
    share: Share,
    /// Helpers that have it, or will.
    busy: Mutex<usize>,
    left: Condvar,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").finish_non_exhaustive()
    }
}

impl Job {
    fn leave(&self) {
        let mut busy = self.busy.lock();
        *busy -= 1;
        if *busy == 0 {
            self.left.notify_all();
        }
    }
}

impl Workers {
    fn new(limit: usize) -> Self {
        Self {
            state: Mutex::new(State::default()),
            limit,
            #[cfg(all(test, transfer_tensor_loom))]
            closed: crate::sync::AtomicU64::new(0),
        }
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
    /// will begin.
    pub(crate) fn run(self: &Arc<Self>, helpers: usize, share: Share) {
        let job = Arc::new(Job { share, busy: Mutex::new(0), left: Condvar::new() });
        let seats = self.offer(&job, helpers);
        // The helpers may use what belongs to this thread: it does not leave before they do.
        let _ = quietly(|| (job.share)());
        self.withdraw(&job, seats);
        let mut busy = job.busy.lock();
        while *busy > 0 {
            job.left.wait(&mut busy);
        }
    }

    /// Gives the job to threads that sleep; which.
    fn offer(self: &Arc<Self>, job: &Arc<Job>, helpers: usize) -> Vec<Arc<Seat>> {
        let mut state = self.state.lock();
        state.active += 1;
        let room = self.limit.saturating_sub(state.active);
        let now = helpers.min(room);
        // A thread that can not be started is not missed.
        while state.idle.len() < now && state.threads + 1 < self.limit {
            let seat = Arc::new(Seat { job: Mutex::new(None), filled: Condvar::new() });
            if !self.start(&seat) {
                break;
            }
            state.threads += 1;
            state.idle.push(seat);
        }
        let keep = state.idle.len().saturating_sub(now);
        let seats = state.idle.split_off(keep);
        state.active += seats.len();
        if seats.len() < helpers {
            state.short.push_back((job.clone(), helpers - seats.len()));
        }
        *job.busy.lock() += seats.len();
        drop(state);
        for seat in &seats {
            *seat.job.lock() = Some(job.clone());
            seat.filled.notify_all();
        }
        seats
    }

    /// Takes the job back from those who have not woken up yet.
    fn withdraw(&self, job: &Arc<Job>, seats: Vec<Arc<Seat>>) {
        let mut state = self.state.lock();
        state.short.retain(|(short, _)| !Arc::ptr_eq(short, job));
        state.active -= 1;
        for seat in seats {
            let taken = seat.job.lock().take_if(|given| Arc::ptr_eq(given, job)).is_some();
            if taken {
                job.leave();
                state.active -= 1;
                state.idle.push(seat);
            }
        }
    }

    #[cfg(not(all(test, transfer_tensor_loom)))]
    fn start(self: &Arc<Self>, seat: &Arc<Seat>) -> bool {
        let (own, seat) = (self.clone(), seat.clone());
        let work = move || {
            crate::os::sleep_precisely();
            crate::trace::name_thread();
            own.work(&seat);
        };
        std::thread::Builder::new().name("transfer-copy".into()).spawn(work).is_ok()
    }

    #[cfg(all(test, transfer_tensor_loom))]
    fn start(self: &Arc<Self>, seat: &Arc<Seat>) -> bool {
        let (own, seat) = (self.clone(), seat.clone());
        loom::thread::spawn(move || own.work(&seat));
        true
    }

    fn work(&self, seat: &Arc<Seat>) {
        loop {
            let mut given = seat.job.lock();
            let mut job = loop {
                if let Some(job) = given.take() {
                    break job;
                }
                #[cfg(all(test, transfer_tensor_loom))]
                if self.closed.load(crate::sync::Ordering::SeqCst) > 0 {
                    return;
                }
                seat.filled.wait(&mut given);
            };
            drop(given);
            loop {
                let _ = quietly(|| (job.share)());
                job.leave();
                let mut state = self.state.lock();
                match self.short_job(&mut state) {
                    Some(next) => job = next,
                    None => {
                        state.active -= 1;
                        state.idle.push(seat.clone());
                        break;
                    }
                }
            }
        }
    }

    /// The job that has waited longest for more helpers, for a helper that has just ended one.
    fn short_job(&self, state: &mut State) -> Option<Arc<Job>> {
        if state.active > self.limit {
            return None;
        }
        let (job, wanted) = state.short.pop_front()?;
        // Under the state's lock: who withdraws the job afterwards sees it.
        *job.busy.lock() += 1;
        if wanted > 1 {
            state.short.push_back((job.clone(), wanted - 1));
        }
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
        let late = Arc::new(AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let (workers, inside, most, late) = (&workers, inside.clone(), most.clone(), late.clone());
                scope.spawn(move || {
                    for _ in 0..50 {
                        let (next, at, peak) = (AtomicUsize::new(0), inside.clone(), most.clone());
                        let (returned, late) = (Arc::new(AtomicUsize::new(0)), late.clone());
                        let over = returned.clone();
                        let share = move || {
                            late.fetch_add(over.load(Ordering::SeqCst), Ordering::SeqCst);
                            while next.fetch_add(1, Ordering::SeqCst) < 20 {
                                peak.fetch_max(at.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                                std::thread::yield_now();
                                at.fetch_sub(1, Ordering::SeqCst);
                            }
                        };
                        workers.run(8, Box::new(share));
                        returned.store(1, Ordering::SeqCst);
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
        assert_eq!(workers.state.lock().short.len(), 0);
        assert_eq!(late.load(Ordering::SeqCst), 0, "begun when it was over");
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
            workers.closed.store(1, Ordering::SeqCst);
            let seats = workers.state.lock().idle.clone();
            for seat in seats {
                // Not between a thread's look and its sleep.
                drop(seat.job.lock());
                seat.filled.notify_all();
            }
        });
    }
}
