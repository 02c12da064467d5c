//! Values known by numbers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// No number is used twice, and none is 0.
pub(crate) struct Table<T> {
    values: Mutex<HashMap<u64, T>>,
    next: AtomicU64,
}

impl<T> Table<T> {
    pub(crate) fn new() -> Self {
        Self { values: Mutex::default(), next: AtomicU64::new(1) }
    }

    pub(crate) fn put(&self, value: T) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.values.lock().insert(number, value);
        number
    }

    /// Takes the value out. It is dropped by the caller, not under the lock.
    pub(crate) fn take(&self, number: u64) -> Option<T> {
        self.values.lock().remove(&number)
    }

    pub(crate) fn get(&self, number: u64) -> Option<T>
    where
        T: Clone,
    {
        self.values.lock().get(&number).cloned()
    }
}
