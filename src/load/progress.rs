//! How far a load is, told to the caller, who may stop it. Pure.
#![deny(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::{Error, Kind, Result};

/// How far a load is.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Progress<'a> {
    /// Bytes that are read, or in place.
    pub done: u64,
    /// Bytes of all tensors that are asked.
    pub total: u64,
    /// The tensor whose bytes were read last.
    pub tensor: &'a str,
}

pub(super) type Callback<'a> = Box<dyn FnMut(Progress<'_>) -> ControlFlow<()> + Send + 'a>;

/// Counts the bytes of a load and calls the caller's function.
pub(super) struct Meter<'a> {
    total: u64,
    done: AtomicU64,
    stopped: AtomicBool,
    caller: Mutex<Caller<'a>>,
}

struct Caller<'a> {
    callback: Option<Callback<'a>>,
    /// What it was told last.
    told: u64,
    panic: Option<Box<dyn Any + Send>>,
}

impl<'a> Meter<'a> {
    pub(super) fn new(total: u64, callback: Option<Callback<'a>>) -> Self {
        let caller = Mutex::new(Caller { callback, told: 0, panic: None });
        Self { total, done: AtomicU64::new(0), stopped: AtomicBool::new(false), caller }
    }

    /// Notes that `bytes` more are done, the last of them of `tensor`. The caller's function is called by one thread at a
    /// time: while another is in it, this one goes on, and the next call tells of both.
    ///
    /// # Errors
    /// The caller wants no more.
    pub(super) fn add(&self, bytes: u64, tensor: &str) -> Result<()> {
        self.done.fetch_add(bytes, Ordering::Relaxed);
        if let Some(mut caller) = self.caller.try_lock() {
            self.tell(&mut caller, tensor);
        }
        self.check()
    }

    /// Tells the end, if it was not told.
    pub(super) fn finish(&self, tensor: &str) -> Result<()> {
        let mut caller = self.caller.lock();
        if caller.told < self.done.load(Ordering::Relaxed) {
            self.tell(&mut caller, tensor);
        }
        drop(caller);
        self.check()
    }

    fn tell(&self, caller: &mut Caller<'a>, tensor: &str) {
        // Once it said stop it is not asked again.
        if self.stopped.load(Ordering::Relaxed) {
            return;
        }
        let Some(callback) = &mut caller.callback else { return };
        // Read under the lock: what the caller is told never goes back.
        let done = self.done.load(Ordering::Relaxed);
        caller.told = done;
        let progress = Progress { done, total: self.total, tensor };
        match catch_unwind(AssertUnwindSafe(|| callback(progress))) {
            Ok(ControlFlow::Continue(())) => {}
            Ok(ControlFlow::Break(())) => self.stopped.store(true, Ordering::Relaxed),
            Err(panic) => {
                caller.panic = Some(panic);
                self.stopped.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Fails once the caller wants no more.
    pub(super) fn check(&self) -> Result<()> {
        if self.stopped.load(Ordering::Relaxed) {
            let done = self.done.load(Ordering::Relaxed);
            return Err(Error::new(Kind::Cancelled { done, total: self.total }));
        }
        Ok(())
    }

    /// The panic of the caller's function, to go on where the caller is.
    pub(super) fn into_panic(self) -> Option<Box<dyn Any + Send>> {
        self.caller.into_inner().panic
    }
}

impl fmt::Debug for Meter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("done", &self.done).field("total", &self.total).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_told_once_and_what_is_told_grows() {
        let mut told = Vec::new();
        let meter = Meter::new(
            3,
            Some(Box::new(|progress| {
                told.push((progress.done, progress.tensor.to_owned()));
                ControlFlow::Continue(())
            })),
        );
        meter.add(1, "a").unwrap();
        meter.add(2, "b").unwrap();
        meter.finish("b").unwrap();
        drop(meter);
        assert_eq!(told, [(1, "a".to_owned()), (3, "b".to_owned())]);
    }

    #[test]
    fn who_said_stop_is_not_asked_again() {
        let mut calls = 0;
        let meter = Meter::new(
            9,
            Some(Box::new(|_| {
                calls += 1;
                ControlFlow::Break(())
            })),
        );
        assert_eq!(meter.add(4, "a").unwrap_err().to_string(), "cancelled by the caller after 4 of 9 bytes");
        assert!(meter.add(4, "a").unwrap_err().is_cancelled() && meter.finish("a").is_err());
        drop(meter);
        assert_eq!(calls, 1);
    }

    #[test]
    fn a_panic_stops_and_is_kept() {
        let meter = Meter::new(9, Some(Box::new(|_| panic!("the caller's"))));
        meter.add(4, "a").unwrap_err();
        assert_eq!(meter.into_panic().unwrap().downcast_ref::<&str>(), Some(&"the caller's"));
    }
}
