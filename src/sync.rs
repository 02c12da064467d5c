//! Locks and counters, as parking_lot and std give them, or as loom does while `cfg(transfer_tensor_loom)` explores their
//! interleavings. (`cfg(loom)` itself would switch other crates of the tree too.)
//!
//! ```text
//! RUSTFLAGS="--cfg transfer_tensor_loom" cargo test --release --lib loom_tests
//! ```

#[cfg(not(all(test, transfer_tensor_loom)))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(test, transfer_tensor_loom)))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(all(test, transfer_tensor_loom))]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(all(test, transfer_tensor_loom))]
pub(crate) use with_loom::{Condvar, Mutex, MutexGuard};

#[cfg(all(test, transfer_tensor_loom))]
mod with_loom {
    use std::ops::{Deref, DerefMut};
    use std::sync::PoisonError;
    use std::time::{Duration, Instant};

    /// loom's mutex with parking_lot's interface.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    /// `None` only while a condition variable has it.
    pub(crate) struct MutexGuard<'a, T> {
        guard: Option<loom::sync::MutexGuard<'a, T>>,
        mutex: &'a Mutex<T>,
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard { guard: Some(self.inner()), mutex: self }
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
        }

        fn inner(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.guard.as_ref().expect("locked")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.guard.as_mut().expect("locked")
        }
    }

    /// loom's condition variable with parking_lot's interface. Time does not pass: a short wait lets others run, a wait with
    /// a deadline is one without.
    #[derive(Debug)]
    pub(crate) struct Condvar(loom::sync::Condvar);

    pub(crate) struct WaitTimeoutResult(bool);

    impl WaitTimeoutResult {
        pub(crate) fn timed_out(&self) -> bool {
            self.0
        }
    }

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self(loom::sync::Condvar::new())
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }

        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            if let Some(locked) = guard.guard.take() {
                guard.guard = Some(self.0.wait(locked).unwrap_or_else(PoisonError::into_inner));
            }
        }

        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _pause: Duration) -> WaitTimeoutResult {
            guard.guard = None;
            loom::thread::yield_now();
            guard.guard = Some(guard.mutex.inner());
            WaitTimeoutResult(true)
        }

        pub(crate) fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _deadline: Instant) -> WaitTimeoutResult {
            self.wait(guard);
            WaitTimeoutResult(false)
        }
    }
}
