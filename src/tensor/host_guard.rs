//! Host access: references to a tensor's bytes, given only when nothing that conflicts is running on them.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{CudaStream, HostSlice, SyncOnDrop};

use super::region::Region;
use super::store::Store;
use crate::driver::Bound;
use crate::driver::stream::check_not_capturing;
use crate::element::{Element, validate};
use crate::error::Result;

/// A tensor's elements, to read on the host. Dereferences to `&[T]`.
pub struct HostRef<'a, T: Element> {
    start: NonNull<T>,
    len: usize,
    /// Keeps the memory where it is.
    _region: Option<Arc<Region>>,
    _borrow: PhantomData<&'a [T]>,
}

/// A tensor's elements, to read and write on the host. Dereferences to `&mut [T]`.
///
/// It implements cudarc's [`HostSlice`], so `stream.memcpy_htod(&guard, &mut target)` takes it. Such a copy is
/// asynchronous: the next look at the elements through this guard, or through the tensor, waits for it. If the device
/// faults meanwhile, this guard dereferences to an empty slice from then on, since the copy may still be running.
///
/// **Do not** hand `&*guard` (a plain slice) to cudarc's copies: cudarc's `HostSlice for [T]` does not wait
/// (`docs/safety.md`).
pub struct HostMut<'a, T: Element> {
    start: NonNull<T>,
    len: usize,
    region: Option<Arc<Region>>,
    /// A stream was given the elements since the last wait.
    lent: AtomicBool,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: as `&[T]`.
unsafe impl<T: Element> Send for HostRef<'_, T> {}
// SAFETY: as `&[T]`.
unsafe impl<T: Element> Sync for HostRef<'_, T> {}
// SAFETY: as `&mut [T]`.
unsafe impl<T: Element> Send for HostMut<'_, T> {}
// SAFETY: as `&mut [T]`; `lent` is atomic.
unsafe impl<T: Element> Sync for HostMut<'_, T> {}

/// Waits and gives the address of `range`'s first element, its length and what keeps it.
fn acquire<T: Element>(
    store: &Store,
    range: &Range<usize>,
    write: bool,
) -> Result<(NonNull<T>, usize, Option<Arc<Region>>)> {
    let len = range.len() / size_of::<T>();
    if range.is_empty() {
        return Ok((NonNull::dangling(), 0, None));
    }
    let region = store.on_host(range, write)?;
    region.wait(range, write)?;
    // SAFETY: the range lies inside the region.
    let start = unsafe { region.host()?.add(range.start) };
    // SAFETY: initialised, since current; nothing writes to it, since we waited and the tensor is borrowed.
    validate::<T>(unsafe { std::slice::from_raw_parts(start.as_ptr(), range.len()) })?;
    Ok((start.cast(), len, Some(region)))
}

impl<'a, T: Element> HostRef<'a, T> {
    pub(super) fn new(store: &'a Store, range: &Range<usize>) -> Result<Self> {
        let (start, len, region) = acquire(store, range, false)?;
        Ok(Self { start, len, _region: region, _borrow: PhantomData })
    }
}

impl<'a, T: Element> HostMut<'a, T> {
    /// The caller holds the tensor exclusively for `'a`.
    pub(super) fn new(store: &'a Store, range: &Range<usize>) -> Result<Self> {
        store.check_writable()?;
        let (start, len, region) = acquire(store, range, true)?;
        Ok(Self { start, len, region, lent: AtomicBool::new(false), _borrow: PhantomData })
    }

    /// Waits for streams that were given the elements through `HostSlice`; the number of elements that may be touched.
    fn settle(&self) -> usize {
        if !self.lent.load(Ordering::Acquire) {
            return self.len;
        }
        self.settle_lent()
    }

    #[cold]
    fn settle_lent(&self) -> usize {
        let Some(region) = &self.region else { return self.len };
        match region.wait(&(0..region.bytes()), true) {
            Ok(()) => {
                self.lent.store(false, Ordering::Release);
                self.len
            }
            Err(_) => 0,
        }
    }

    /// Gives the elements to `stream`; how many of them. None to a stream that is being captured: the copy would be
    /// recorded, and replayed when nobody waits for it.
    fn lend(&self, stream: &CudaStream, write: bool) -> usize {
        let len = self.settle();
        let Some(region) = &self.region else { return 0 };
        let free = Bound::enter(stream.context())
            .and_then(|_bound| check_not_capturing(stream.cu_stream(), "lending host memory to a stream"));
        if free.is_err() {
            return 0;
        }
        self.lent.store(true, Ordering::Release);
        region.mark_foreign(stream.context(), write);
        len
    }
}

impl<T: Element> Deref for HostRef<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised and valid elements; the borrow of the tensor keeps writers out.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> Deref for HostMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let len = self.settle();
        // SAFETY: as for `HostRef`, and no stream that was given the elements is still running.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), len) }
    }
}

impl<T: Element> DerefMut for HostMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let len = self.settle();
        // SAFETY: as above; the tensor is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), len) }
    }
}

impl<T: Element> HostSlice<T> for HostMut<'_, T> {
    fn len(&self) -> usize {
        self.len
    }

    unsafe fn stream_synced_slice<'s>(&'s self, stream: &'s CudaStream) -> (&'s [T], SyncOnDrop<'s>) {
        let len = self.lend(stream, false);
        // SAFETY: as in `deref`; from now on every look through this guard waits first.
        (unsafe { std::slice::from_raw_parts(self.start.as_ptr(), len) }, SyncOnDrop::Sync(None))
    }

    unsafe fn stream_synced_mut_slice<'s>(&'s mut self, stream: &'s CudaStream) -> (&'s mut [T], SyncOnDrop<'s>) {
        let len = self.lend(stream, true);
        // SAFETY: as above.
        (unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), len) }, SyncOnDrop::Sync(None))
    }
}

impl<T: Element> fmt::Debug for HostRef<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRef").field("dtype", &T::DTYPE).field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T: Element> fmt::Debug for HostMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMut").field("dtype", &T::DTYPE).field("len", &self.len).finish_non_exhaustive()
    }
}
