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
                let before = state.waker.replace(context.waker().clone());
                // Not under the lock: a caller's task may go with it.
                drop(state);
                drop(before);
                Poll::Pending
            }
        }
    }
}

#[cfg(all(test, transfer_tensor_loom))]
mod loom_tests {
    use std::sync::Arc;
    use std::task::{Wake, Waker};

    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    use super::*;

    struct Counter(AtomicUsize);

    impl Wake for Counter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn counter() -> (Arc<Counter>, Waker) {
        let counter = Arc::new(Counter(AtomicUsize::new(0)));
        (counter.clone(), Waker::from(counter))
    }

    #[test]
    fn who_saw_not_done_is_woken_once() {
        loom::model(|| {
            let signal = Arc::new(Signal::new());
            let setter = signal.clone();
            let setter = thread::spawn(move || setter.set(Ok(())));
            let (counter, waker) = counter();
            let pending = signal.poll(&Context::from_waker(&waker)).is_pending();
            setter.join().unwrap();
            assert_eq!(counter.0.load(Ordering::SeqCst), usize::from(pending));
            assert!(signal.poll(&Context::from_waker(&waker)).is_ready());
            assert!(signal.result().is_some());
        });
    }

    #[test]
    fn of_two_wakers_the_last_is_woken() {
        loom::model(|| {
            let signal = Arc::new(Signal::new());
            let setter = signal.clone();
            let setter = thread::spawn(move || setter.set(Ok(())));
            let ((first, first_waker), (last, last_waker)) = (counter(), counter());
            let before = signal.poll(&Context::from_waker(&first_waker)).is_pending();
            let after = signal.poll(&Context::from_waker(&last_waker)).is_pending();
            setter.join().unwrap();
            let (first, last) = (first.0.load(Ordering::SeqCst), last.0.load(Ordering::SeqCst));
            assert_eq!(last, usize::from(after));
            // The first may have been woken, if that was before the last asked, who then saw the result.
            assert_eq!(first, usize::from(before && !after));
        });
    }

    #[test]
    fn the_first_of_two_results_stays() {
        loom::model(|| {
            let signal = Arc::new(Signal::new());
            let other = signal.clone();
            let other = thread::spawn(move || other.set(Err(crate::error::Error::new(crate::error::Kind::NotReady))));
            signal.set(Ok(()));
            let seen = signal.result().map(|result| result.is_ok());
            other.join().unwrap();
            assert_eq!(signal.result().map(|result| result.is_ok()), seen);
        });
    }
}
