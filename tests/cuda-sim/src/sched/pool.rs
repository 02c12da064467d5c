//! Threads that carry steps out: as many as are needed, gone when idle for a while.

#![deny(unsafe_code)]

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::thread;
use std::time::Duration;

#[derive(Debug)]
struct Queue {
    jobs: VecDeque<u64>,
    idle: usize,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue { jobs: VecDeque::new(), idle: 0 });
static ARRIVED: Condvar = Condvar::new();

/// How long a thread without work stays.
const LINGER: Duration = Duration::from_secs(3);

/// Has a thread run a step that is ready.
pub(crate) fn push(step: u64) {
    let mut queue = QUEUE.lock();
    queue.jobs.push_back(step);
    if queue.jobs.len() <= queue.idle {
        ARRIVED.notify_one();
        return;
    }
    drop(queue);
    // A step that blocks (a host function, a spinning kernel) must never keep another waiting.
    let _ = thread::Builder::new().name("cuda-sim".to_owned()).spawn(serve);
}

fn serve() {
    let mut queue = QUEUE.lock();
    loop {
        if let Some(step) = queue.jobs.pop_front() {
            drop(queue);
            super::run::run(step);
            queue = QUEUE.lock();
            continue;
        }
        queue.idle += 1;
        let late = ARRIVED.wait_for(&mut queue, LINGER).timed_out();
        queue.idle -= 1;
        if late && queue.jobs.is_empty() {
            return;
        }
    }
}
