//! Host access: references to a tensor's bytes, given only when nothing that conflicts is running on them.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaStream, HostSlice, SyncOnDrop};

use super::region::Region;
use super::store::Store;
use super::track::UseId;
use crate::driver::Bound;
use crate::driver::stream::check_not_capturing;
use crate::element::{Element, validate};
use crate::error::Result;

/// A tensor's elements, to read on the host. Dereferences to `&[T]`.
pub struct HostRef<'a, T: Element> {
    start: NonNull<T>,
    len: usize,
    /// Keeps the memory where it is.
    region: Option<Arc<Region>>,
    _borrow: PhantomData<&'a [T]>,
}

/// A tensor's elements, to read and write on the host. Dereferences to `&mut [T]`.
///
/// It implements cudarc's [`HostSlice`], so `stream.memcpy_htod(&guard, &mut target)` takes it. Such a copy is
/// asynchronous: the next access to the elements that conflicts, through this guard or through the tensor, waits for it. If
/// the device faults meanwhile, this guard dereferences to an empty slice from then on, since the copy may still be running;
/// and so it does if a copy wrote a byte that is no value of the type (`bool`).
///
/// **Do not** hand `&*guard` (a plain slice) to cudarc's copies: cudarc's `HostSlice for [T]` does not wait
/// (`docs/safety.md`).
pub struct HostMut<'a, T: Element> {
    start: NonNull<T>,
    len: usize,
    lent: Lent,
    _borrow: PhantomData<&'a mut [T]>,
}

/// What an exclusive host guard let streams do (`HostSlice`).
///
/// Waits for reads are left to who has the guard exclusively. Who only shares it may look while streams read, and must not
/// take the notice away: another holder may have noted a read that it is about to submit.
struct Lent {
    /// Keeps the memory where it is.
    region: Option<Arc<Region>>,
    /// The guard's name with the region, once a stream was given the elements.
    guard: OnceLock<UseId>,
    /// A stream was given the elements to read, or to write, since the last wait.
    read: AtomicBool,
    write: AtomicBool,
}

impl Lent {
    fn wait(&self) -> Result<()> {
        match (&self.region, self.guard.get()) {
            (Some(region), Some(guard)) => region.wait_foreign(*guard),
            _ => Ok(()),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let (Some(region), Some(guard)) = (&self.region, self.guard.get()) {
            let settled = !*self.read.get_mut() && !*self.write.get_mut();
            region.close_foreign(*guard, settled);
        }
    }
}

// SAFETY: as `&[T]`.
unsafe impl<T: Element> Send for HostRef<'_, T> {}
// SAFETY: as `&[T]`.
unsafe impl<T: Element> Sync for HostRef<'_, T> {}
// SAFETY: as `&mut [T]`.
unsafe impl<T: Element> Send for HostMut<'_, T> {}
// SAFETY: as `&mut [T]`; `lent` is Sync.
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
        Ok(Self { start, len, region, _borrow: PhantomData })
    }

    /// The first element, how many there are, and what keeps them.
    pub(super) fn into_parts(self) -> (NonNull<T>, usize, Option<Arc<Region>>) {
        (self.start, self.len, self.region)
    }
}

impl<'a, T: Element> HostMut<'a, T> {
    /// The caller holds the tensor exclusively for `'a`.
    pub(super) fn new(store: &'a Store, range: &Range<usize>) -> Result<Self> {
        store.check_writable()?;
        let (start, len, region) = acquire(store, range, true)?;
        let (read, write) = (AtomicBool::new(false), AtomicBool::new(false));
        let lent = Lent { region, guard: OnceLock::new(), read, write };
        Ok(Self { start, len, lent, _borrow: PhantomData })
    }

    /// Waits for streams that were given the elements to write; the number of elements that may be read.
    fn readable(&self) -> usize {
        if self.lent.write.load(Ordering::Acquire) { self.settle_writes() } else { self.len }
    }

    #[cold]
    fn settle_writes(&self) -> usize {
        if self.lent.wait().is_err() {
            return 0;
        }
        // SAFETY: initialised, and no stream writes to it any more (nor can be made to: that takes the guard exclusively).
        let bytes = unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.len * size_of::<T>()) };
        if validate::<T>(bytes).is_err() {
            return 0;
        }
        self.lent.write.store(false, Ordering::Release);
        self.len
    }

    /// Waits for all streams that were given the elements; the number of elements that may be written.
    fn writable(&mut self) -> usize {
        let len = self.readable();
        if *self.lent.read.get_mut() {
            if self.lent.wait().is_err() {
                return 0;
            }
            *self.lent.read.get_mut() = false;
        }
        len
    }

    /// Whether `stream` may be given the elements. Not one that is being captured: the copy would be recorded, and replayed
    /// when nobody waits for it.
    fn lend(&self, stream: &CudaStream, write: bool) -> bool {
        let Some(region) = &self.lent.region else { return false };
        let free = Bound::enter(stream.context())
            .and_then(|_bound| check_not_capturing(stream.cu_stream(), "lending host memory to a stream"));
        if free.is_err() {
            return false;
        }
        let guard = *self.lent.guard.get_or_init(|| region.guard());
        region.mark_foreign(guard, stream.context(), write);
        let flag = if write { &self.lent.write } else { &self.lent.read };
        flag.store(true, Ordering::Release);
        true
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
        let len = self.readable();
        // SAFETY: as for `HostRef`, and no stream that was given the elements to write is still running.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), len) }
    }
}

impl<T: Element> DerefMut for HostMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let len = self.writable();
        // SAFETY: no stream that was given the elements is still running; the tensor is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), len) }
    }
}

impl<T: Element> HostSlice<T> for HostMut<'_, T> {
    fn len(&self) -> usize {
        self.len
    }

    unsafe fn stream_synced_slice<'s>(&'s self, stream: &'s CudaStream) -> (&'s [T], SyncOnDrop<'s>) {
        let readable = self.readable();
        let len = if self.lend(stream, false) { readable } else { 0 };
        // SAFETY: as in `deref`; from now on every write through this guard waits first.
        (unsafe { std::slice::from_raw_parts(self.start.as_ptr(), len) }, SyncOnDrop::Sync(None))
    }

    unsafe fn stream_synced_mut_slice<'s>(&'s mut self, stream: &'s CudaStream) -> (&'s mut [T], SyncOnDrop<'s>) {
        let writable = self.writable();
        let len = if self.lend(stream, true) { writable } else { 0 };
        // SAFETY: as in `deref_mut`; from now on every look through this guard waits first.
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
