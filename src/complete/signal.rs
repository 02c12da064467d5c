//! A result that is delivered once and awaited by at most one task. No CUDA here: loom explores it.
//!
//! Invariant: a task that saw "not done" is woken. It stores its waker under the lock under which the result is set, so
//! either the setter finds the waker, or the task finds the result.
#![deny(unsafe_code)]

use std::task::{Context, Poll, Waker};

use crate::error::Result;
use crate::sync::Mutex;

#[derive(Debug)]
pub(crate) struct Signal {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    result: Option<Result<()>>,
    waker: Option<Waker>,
}

impl Signal {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(State { result: None, waker: None }) }
    }

    /// Delivers the result. A second one is ignored.
    pub(crate) fn set(&self, result: Result<()>) {
        let mut state = self.state.lock();
        state.result.get_or_insert(result);
        let waker = state.waker.take();
        drop(state);
        // Outside of the lock: a waker may run the task at once.
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The result, if it is there.
    pub(crate) fn result(&self) -> Option<Result<()>> {
        self.state.lock().result.clone()
    }

    /// The result, or a promise to wake the task that asked last.
    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<Result<()>> {
        let mut state = self.state.lock();
        match &state.result {
            Some(result) => Poll::Ready(result.clone()),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
