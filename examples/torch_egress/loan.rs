//! Memory that the caller has lent, and his callback that ends that: called once for each submit that was taken,
//! however it ends.
//!
//! A loan ends when its [`Loan`] is dropped, which the library does when the device is done with the memory. After a
//! fault the library keeps for ever what the device may have had; [`end_all`](Loans::end_all) is for those.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::types::TtRelease;

/// The caller's callback.
pub(crate) struct Release {
    call: Option<TtRelease>,
    user: *mut c_void,
}

// SAFETY: the caller of `tt_egress_submit` lets it be called on any thread; the pointer is only handed on.
unsafe impl Send for Release {}

impl Release {
    pub(crate) fn new(call: Option<TtRelease>, user: *mut c_void) -> Self {
        Self { call, user }
    }

    fn call(self) {
        if let Some(call) = self.call {
            // SAFETY: the caller of `tt_egress_submit` gave both for this.
            unsafe { call(self.user) };
        }
    }
}

/// All loans of a pool.
#[derive(Default)]
pub(crate) struct Loans {
    state: Mutex<State>,
    /// Told when a loan is over that was not taken.
    over: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    /// By number; who takes one out of here calls the callback.
    open: HashMap<u64, Open>,
    released: u64,
}

struct Open {
    release: Release,
    /// The submit has said that it was taken.
    taken: bool,
    /// The device is done with it.
    over: bool,
}

/// The device's part in a loan. Dropped when it is done with the memory.
pub(crate) struct Loan {
    loans: Arc<Loans>,
    number: u64,
}

impl Loan {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.loans.change(self.number, |open| open.over = true);
    }
}

impl Loans {
    pub(crate) fn lend(self: &Arc<Self>, release: Release) -> Loan {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.open.insert(number, Open { release, taken: false, over: false });
        Loan { loans: self.clone(), number }
    }

    /// The submit was taken: the callback will be called.
    pub(crate) fn taken(&self, number: u64) {
        self.change(number, |open| open.taken = true);
    }

    /// The submit was refused: the callback is not called. If its copy may have begun, waits until the device is done
    /// with the memory; whether it is.
    pub(crate) fn refused(&self, number: u64, begun: Option<Duration>) -> bool {
        let deadline = begun.and_then(|most| Instant::now().checked_add(most));
        let mut state = self.state.lock();
        while deadline.is_some() && state.open.get(&number).is_some_and(|open| !open.over) {
            if deadline.is_some_and(|deadline| self.over.wait_until(&mut state, deadline).timed_out()) {
                break;
            }
        }
        state.open.remove(&number).is_none_or(|open| open.over) || deadline.is_none()
    }

    /// Ends what is left, when nothing is under way any more.
    pub(crate) fn end_all(&self) {
        let left = {
            let mut state = self.state.lock();
            let numbers: Vec<u64> =
                state.open.iter().filter(|(_, open)| open.taken).map(|(&number, _)| number).collect();
            state.released += numbers.len() as u64;
            numbers.into_iter().filter_map(|number| state.open.remove(&number)).collect::<Vec<_>>()
        };
        left.into_iter().for_each(|open| open.release.call());
    }

    /// Loans that are open, and callbacks that were called.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.open.values().filter(|open| open.taken).count() as u64, state.released)
    }

    fn change(&self, number: u64, change: impl FnOnce(&mut Open)) {
        let mut state = self.state.lock();
        let Some(open) = state.open.get_mut(&number) else { return };
        change(open);
        let (taken, over) = (open.taken, open.over);
        let ended = if taken && over { state.open.remove(&number) } else { None };
        state.released += u64::from(ended.is_some());
        drop(state);
        if over && !taken {
            self.over.notify_all();
        }
        // Not under the lock: it is the caller's.
        if let Some(open) = ended {
            open.release.call();
        }
    }
}
