//! Ordinary memory as one end of a staged copy, and references that its threads use.

use std::ptr::NonNull;

use super::pinned::Address;
use crate::copy::{Sink, Source};
use crate::error::Result;
use crate::os::{HUGE_PAGE, copy_past_caches};

/// Above this a result is written past the caches: it would not stay in them.
const PAST_CACHES: usize = 1 << 20;

/// Ordinary host memory that is read.
pub(crate) struct HostSource(Address);

impl HostSource {
    /// # Safety
    /// `start` is readable for the whole copy, from any thread.
    pub(crate) unsafe fn new(start: *const u8) -> Option<Self> {
        NonNull::new(start.cast_mut()).map(|start| Self(Address(start)))
    }
}

impl Source for HostSource {
    fn fill(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        // SAFETY: by the word given to `new`; the engine asks for nothing beyond the copy's length.
        unsafe { std::ptr::copy_nonoverlapping(self.0.get().as_ptr().add(offset), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    fn fill_past_caches(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        // SAFETY: as above.
        unsafe { copy_past_caches(self.0.get().as_ptr().add(offset), into.as_mut_ptr(), into.len()) };
        Ok(())
    }
}

/// Ordinary host memory that is written.
pub(crate) struct HostSink {
    start: Address,
    past_caches: bool,
}

impl HostSink {
    /// # Safety
    /// `start` is writable for `bytes` bytes, and nobody looks there, until the copy returns.
    pub(crate) unsafe fn new(start: *mut u8, bytes: usize) -> Option<Self> {
        let start = Address(NonNull::new(start)?);
        Some(Self { start, past_caches: bytes >= PAST_CACHES })
    }

    /// The bytes before the first huge page's boundary: two threads should not make one page.
    pub(crate) fn phase(&self) -> usize {
        self.start.get().as_ptr().align_offset(HUGE_PAGE)
    }
}

impl Sink for HostSink {
    fn take(&self, offset: usize, from: &[u8]) -> Result<()> {
        // SAFETY: by the word given to `new`; the engine gives nothing beyond the copy's length.
        unsafe {
            let target = self.start.get().as_ptr().add(offset);
            if self.past_caches {
                copy_past_caches(from.as_ptr(), target, from.len());
            } else {
                std::ptr::copy_nonoverlapping(from.as_ptr(), target, from.len());
            }
        }
        Ok(())
    }
}

/// A reference that threads of a job use, which ends before the reference does.
pub(super) struct Lent<T: ?Sized>(*const T);

// SAFETY: used as a shared reference to a `Sync` value.
unsafe impl<T: ?Sized + Sync> Send for Lent<T> {}
// SAFETY: as above.
unsafe impl<T: ?Sized + Sync> Sync for Lent<T> {}

impl<T: ?Sized> Clone for Lent<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: ?Sized> Copy for Lent<T> {}

impl<T: ?Sized> Lent<T> {
    /// # Safety
    /// Nobody calls `get` once the reference is over.
    pub(super) unsafe fn new(value: &T) -> Self {
        Self(value)
    }

    pub(super) fn get(&self) -> &T {
        // SAFETY: the word given when it was made.
        unsafe { &*self.0 }
    }
}

impl Lent<dyn Source> {
    /// # Safety
    /// As [`new`](Lent::new).
    pub(super) unsafe fn source(value: &dyn Source) -> Self {
        // SAFETY: only the lifetime in the type changes; the caller's word keeps to it.
        Self(unsafe { std::mem::transmute::<*const (dyn Source + '_), *const dyn Source>(value) })
    }
}

impl Lent<dyn Sink> {
    /// # Safety
    /// As [`new`](Lent::new).
    pub(super) unsafe fn sink(value: &dyn Sink) -> Self {
        // SAFETY: as for a source.
        Self(unsafe { std::mem::transmute::<*const (dyn Sink + '_), *const dyn Sink>(value) })
    }
}
