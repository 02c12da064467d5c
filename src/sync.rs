//! Locks, as parking_lot gives them, or as loom does while `cfg(transfer_tensor_loom)` explores their interleavings.
//! (`cfg(loom)` itself would switch other crates of the tree too.)

#[cfg(not(transfer_tensor_loom))]
pub(crate) use parking_lot::Mutex;

#[cfg(transfer_tensor_loom)]
pub(crate) use with_loom::Mutex;

#[cfg(transfer_tensor_loom)]
mod with_loom {
    /// loom's mutex with parking_lot's interface.
    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
        }
    }
}
