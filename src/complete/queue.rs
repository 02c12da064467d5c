//! The queue between those who submit jobs and the one thread that works on them. No CUDA here: loom explores it.
//!
//! Invariants: every job that was taken in reaches the thread exactly once, also if the queue is closed meanwhile; a thread
//! that sleeps is woken by the next job and by the end; who drains is woken when the last open job is done.
#![deny(unsafe_code)]

use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};

#[derive(Debug)]
pub(crate) struct Queue<J> {
    state: Mutex<State<J>>,
    /// Told of every new job and of the end, and, for `drain`, of every job that is done.
    changed: Condvar,
}

#[derive(Debug)]
struct State<J> {
    new: Vec<J>,
    /// Jobs not done, wherever they are.
    open: usize,
    started: bool,
    closed: bool,
}

/// What the thread is to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// There are new jobs.
    New,
    /// Ask the old ones again.
    Old,
    /// There is nothing more, for ever.
    End,
}

impl<J> Queue<J> {
    pub(crate) fn new() -> Self {
        let state = State { new: Vec::new(), open: 0, started: false, closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Takes a job in. The first one has `start` start the thread.
    ///
    /// # Errors
    /// That of `start`; the job comes back.
    pub(crate) fn submit<E>(&self, job: J, start: impl FnOnce() -> Result<(), E>) -> Result<(), (E, J)> {
        let mut state = self.state.lock();
        if !state.started {
            if let Err(error) = start() {
                return Err((error, job));
            }
            state.started = true;
        }
        state.new.push(job);
        state.open += 1;
        self.changed.notify_all();
        Ok(())
    }

    /// For the thread: moves what is new to `jobs`. Sleeps while there are no jobs at all; for `pause` at most (not at all for 0), and not
    /// beyond the next new one, while there are only old ones.
    pub(crate) fn next(&self, jobs: &mut Vec<J>, pause: Duration) -> Next {
        let mut state = self.state.lock();
        while jobs.is_empty() && state.new.is_empty() {
            if state.closed {
                return Next::End;
            }
            self.changed.wait(&mut state);
        }
        if state.new.is_empty() && !pause.is_zero() {
            self.changed.wait_for(&mut state, pause);
        }
        if state.new.is_empty() {
            return Next::Old;
        }
        jobs.append(&mut state.new);
        Next::New
    }

    /// For the thread: a job is done.
    pub(crate) fn done(&self) {
        self.state.lock().open -= 1;
        self.changed.notify_all();
    }

    /// Blocks until every job submitted so far is done, or `timeout` is over; whether it was.
    pub(crate) fn drain(&self, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.state.lock();
        while state.open > 0 {
            match deadline {
                Some(deadline) if self.changed.wait_until(&mut state, deadline).timed_out() => return state.open == 0,
                Some(_) => {}
                None => self.changed.wait(&mut state),
            }
        }
        true
    }

    /// The thread ends once it has no jobs.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// How many jobs are not done.
    pub(crate) fn open(&self) -> usize {
        self.state.lock().open
    }
}

#[cfg(all(test, transfer_tensor_loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use loom::thread;

    use super::*;

    const PAUSE: Duration = Duration::from_millis(1);

    /// Two preemptions: all three of a queue's users at once take too many interleavings without a bound.
    fn model(check: impl Fn() + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(check);
    }

    struct Job {
        /// Passed once this is set; `None`: at once.
        ready: Option<Arc<AtomicBool>>,
        runs: Arc<AtomicUsize>,
    }

    /// As the waiter's thread does it.
    fn work(queue: &Queue<Job>) {
        let mut jobs = Vec::new();
        while queue.next(&mut jobs, PAUSE) != Next::End {
            jobs.retain(|job: &Job| {
                if job.ready.as_ref().is_some_and(|ready| !ready.load(Ordering::Acquire)) {
                    return true;
                }
                job.runs.fetch_add(1, Ordering::Relaxed);
                queue.done();
                false
            });
        }
    }

    /// A queue whose first job starts its thread, and where the handle of that is left.
    struct Running {
        queue: Arc<Queue<Job>>,
        thread: Arc<Mutex<Option<thread::JoinHandle<()>>>>,
    }

    impl Running {
        fn new() -> Self {
            Self { queue: Arc::new(Queue::new()), thread: Arc::new(Mutex::new(None)) }
        }

        fn submit(&self, ready: Option<&Arc<AtomicBool>>, runs: &Arc<AtomicUsize>) {
            let job = Job { ready: ready.cloned(), runs: runs.clone() };
            let start = || {
                let queue = self.queue.clone();
                *self.thread.lock() = Some(thread::spawn(move || work(&queue)));
                Ok::<(), ()>(())
            };
            assert!(self.queue.submit(job, start).is_ok());
        }

        fn join(&self) {
            self.queue.close();
            let thread = self.thread.lock().take();
            thread.expect("started").join().unwrap();
            assert_eq!(self.queue.open(), 0);
        }

        fn share(&self) -> Self {
            Self { queue: self.queue.clone(), thread: self.thread.clone() }
        }
    }

    #[test]
    fn every_job_of_two_submitters_is_run_once() {
        model(|| {
            let (running, runs) = (Running::new(), Arc::new(AtomicUsize::new(0)));
            let (other, others) = (running.share(), runs.clone());
            let submitter = thread::spawn(move || other.submit(None, &others));
            running.submit(None, &runs);
            submitter.join().unwrap();
            running.join();
            assert_eq!(runs.load(Ordering::Relaxed), 2);
        });
    }

    #[test]
    fn closing_loses_no_job() {
        model(|| {
            let (running, runs) = (Running::new(), Arc::new(AtomicUsize::new(0)));
            running.submit(None, &runs);
            running.submit(None, &runs);
            running.join();
            assert_eq!(runs.load(Ordering::Relaxed), 2);
        });
    }

    #[test]
    fn draining_ends_and_all_is_done_then() {
        model(|| {
            let (running, runs) = (Running::new(), Arc::new(AtomicUsize::new(0)));
            running.submit(None, &runs);
            let (other, others) = (running.share(), runs.clone());
            let submitter = thread::spawn(move || other.submit(None, &others));
            // loom knows no time: it would report a drain that is not woken as a deadlock.
            assert!(running.queue.drain(PAUSE));
            assert!(runs.load(Ordering::Relaxed) >= 1);
            submitter.join().unwrap();
            running.join();
        });
    }

    #[test]
    fn a_job_that_is_not_ready_holds_up_no_other_and_is_asked_again() {
        model(|| {
            let (running, runs) = (Running::new(), Arc::new(AtomicUsize::new(0)));
            let ready = Arc::new(AtomicBool::new(false));
            running.submit(Some(&ready), &runs);
            running.submit(None, &runs);
            ready.store(true, Ordering::Release);
            running.join();
            assert_eq!(runs.load(Ordering::Relaxed), 2);
        });
    }
}
