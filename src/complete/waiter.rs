//! One thread a device that waits in place of others: it frees memory once the device is done with it, and wakes tasks.
//!
//! It asks for every job in turn: awake for a while after a new one and after one that is done, if somebody waits for one, since a short copy
//! is over before a thread has fallen asleep and woken up; then more and more rarely while nothing happens (20 µs to 1 ms). It sleeps when there is no job. A job whose completion can not be established, because the device faulted, ends with that error.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use parking_lot::Mutex;

use super::queue::{Next, Queue};
use crate::driver::memory::drop_bound;
use crate::driver::{Context, Driver, Pending};
use crate::error::{Error, Kind, Result, quietly};

/// How long it stays awake.
const AWAKE: Duration = Duration::from_micros(60);

const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// What happens once all of a job has passed, or can not be waited for.
pub(crate) type Then = Box<dyn FnOnce(Result<()>) + Send>;

thread_local! {
    static ON_WAITER: Cell<bool> = const { Cell::new(false) };
}

/// Whether this is a waiter's thread, which must not wait for a job.
pub(super) fn on_waiter() -> bool {
    ON_WAITER.get()
}

struct Job {
    pending: VecDeque<Front>,
    then: Then,
    /// Somebody waits for it.
    awaited: bool,
}

/// What a job waits for next.
enum Front {
    Poll(Pending),
    /// A thread blocks for it and leaves the answer here.
    Blocked(Arc<Mutex<Option<Result<()>>>>),
}

/// The handle; dropping it lets the thread finish its jobs and end.
pub(crate) struct Waiter {
    queue: Arc<Queue<Job>>,
}

impl Waiter {
    pub(crate) fn new() -> Self {
        Self { queue: Arc::new(Queue::new()) }
    }

    /// Runs `then`, for which somebody waits, on the waiter's thread once all of `pending` has passed.
    ///
    /// # Errors
    /// The thread could not be started: `then` comes back, and has not run.
    pub(crate) fn submit(&self, pending: Vec<Pending>, then: Then) -> Result<(), (Error, Then)> {
        self.add(pending, then, true)
    }

    fn add(&self, pending: Vec<Pending>, then: Then, awaited: bool) -> Result<(), (Error, Then)> {
        let start = || {
            let queue = self.queue.clone();
            let thread = std::thread::Builder::new().name("transfer-wait".into()).spawn(move || run(&queue));
            thread.map(drop).map_err(|error| Error::new(Kind::Thread { what: format!("transfer-wait: {error}") }))
        };
        let job = Job { pending: pending.into_iter().map(Front::Poll).collect(), then, awaited };
        self.queue.submit(job, start).map_err(|(error, job)| (error, job.then))
    }

    /// Blocks until every job submitted so far is done, or `timeout` is over; whether it was. Not on the waiter's own thread, which is at one.
    pub(crate) fn drain(&self, timeout: Duration) -> bool {
        self.queue.drain(if on_waiter() { Duration::ZERO } else { timeout })
    }
}

/// Frees `owner` on the waiter's thread when all of `pending` has passed; keeps it for ever, and counts that, if it can not
/// be known that it has.
/// `cuda` is the handle whose errors cudarc's drop of the owner would park.
pub(crate) fn free_later(
    context: &Arc<Context>,
    cuda: Arc<CudaContext>,
    waiter: &Waiter,
    owner: Box<dyn Any + Send>,
    pending: Vec<Pending>,
) {
    // In a `ManuallyDrop`, so that a job which never runs leaks rather than frees.
    let owner = ManuallyDrop::new(owner);
    // A forked child, where the waiter's lock may never be free.
    if Driver::get().is_err() {
        return context.count_leak();
    }
    let (free, leak) = (context.clone(), context);
    let then = Box::new(move |passed: Result<()>| match passed {
        Ok(()) => drop_bound(&free, &cuda, ManuallyDrop::into_inner(owner)),
        Err(_) => free.count_leak(),
    });
    if waiter.add(pending, then, false).is_err() {
        leak.count_leak();
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        // A forked child has neither the thread nor, perhaps, a free lock.
        if Driver::get().is_err() {
            return;
        }
        self.queue.close();
    }
}

impl std::fmt::Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiter").field("open", &self.queue.open()).finish()
    }
}

fn run(queue: &Queue<Job>) {
    ON_WAITER.set(true);
    crate::trace::name_thread();
    let mut jobs: Vec<Job> = Vec::new();
    let mut pause = SHORTEST;
    let mut since = Instant::now();
    loop {
        let awake = since.elapsed() < AWAKE && jobs.iter().any(|job| job.awaited);
        let next = queue.next(&mut jobs, if awake { Duration::ZERO } else { pause });
        if next == Next::End {
            return;
        }
        let before = jobs.len();
        jobs = jobs.into_iter().filter_map(|job| step(job, queue)).collect();
        if next == Next::New || jobs.len() < before {
            since = Instant::now();
            pause = SHORTEST;
        } else if awake {
            std::hint::spin_loop();
        } else {
            pause = (pause * 2).min(LONGEST);
        }
    }
}

/// Asks once for a job: hands it back while it is not over.
fn step(mut job: Job, queue: &Queue<Job>) -> Option<Job> {
    while let Some(front) = job.pending.front_mut() {
        let answer = match front {
            Front::Poll(pending) if pending.pollable() => pending.poll(),
            Front::Poll(pending) => match block_elsewhere(pending) {
                Ok(answer) => {
                    *front = Front::Blocked(answer);
                    return Some(job);
                }
                Err(error) => Err(error),
            },
            Front::Blocked(answer) => answer.lock().take().map_or(Ok(false), |result| result.map(|()| true)),
        };
        match answer {
            Ok(true) => drop(job.pending.pop_front()),
            Ok(false) => return Some(job),
            // A capture ends, and then the stream can be asked again.
            Err(error) if error.is_capturing() && matches!(front, Front::Poll(_)) => return Some(job),
            Err(error) => {
                finish(job, Err(error), queue);
                return None;
            }
        }
    }
    finish(job, Ok(()), queue);
    None
}

/// A wait that blocks gets a thread of its own, so that the other jobs go on. Rare: a guard that was forgotten on another
/// thread's default stream, or a pointer given to a foreign stream.
fn block_elsewhere(pending: &Pending) -> Result<Arc<Mutex<Option<Result<()>>>>> {
    let answer = Arc::new(Mutex::new(None));
    let (pending, result) = (pending.clone(), answer.clone());
    let wait = move || {
        crate::trace::name_thread();
        let _range = crate::trace::wait(c"wait");
        *result.lock() = Some(pending.wait());
    };
    match std::thread::Builder::new().name("transfer-sync".into()).spawn(wait) {
        Ok(_detached) => Ok(answer),
        Err(error) => Err(Error::new(Kind::Thread { what: format!("transfer-sync: {error}") })),
    }
}

fn finish(job: Job, result: Result<()>, queue: &Queue<Job>) {
    let Job { pending, then, .. } = job;
    // What it waited for may hold streams and contexts: gone before anybody is told that the job is done.
    drop(pending);
    // A panic in a caller's owner or waker is his; the other jobs go on.
    let _ = quietly(move || then(result));
    queue.done();
}
