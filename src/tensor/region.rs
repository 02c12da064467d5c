//! One allocation and what runs on it. Everything that reaches its bytes goes through here, and it is freed only when the
//! device is done with it.

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::CudaSlice;
use parking_lot::Mutex;

use super::track::{Conflict, Track, UseId};
use crate::complete::free_later;
use crate::device::Device;
use crate::driver::memory::{drop_bound, free_slice_on, wait_behind};
use crate::driver::{Event, Pending, Stream};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::plan::Backing;

/// An allocation, as the host sees it, as the device sees it, or both.
#[derive(Debug)]
pub(crate) struct Region {
    host: Option<NonNull<u8>>,
    device: Option<u64>,
    bytes: usize,
    backing: Backing,
    on: Option<Device>,
    track: Mutex<Track>,
    owner: Option<Owner>,
}

// SAFETY: the addresses are shared; the bytes behind them are reached under the rules that `TransferTensor` and its guards
// keep (exclusive access through `&mut`, waits through `track`). The owners are Send, and only moved here.
unsafe impl Send for Region {}
// SAFETY: as above; `owner` is only reached through `&mut` (drop, reclaim).
unsafe impl Sync for Region {}

/// Uses that were submitted to one stream and wait for the event that closes them all: one event costs the GPU about a
/// microsecond. Dropped unclosed, they stay open, which is sound: who comes next waits for the whole stream.
#[derive(Debug, Default)]
pub(crate) struct Submitted {
    uses: Vec<(Arc<Region>, UseId)>,
    in_flight: usize,
}

impl Submitted {
    pub(crate) fn push(&mut self, region: &Arc<Region>, id: UseId) {
        self.uses.push((region.clone(), id));
    }

    /// Notes bytes that the device copies by itself now.
    pub(crate) fn copies(&mut self, bytes: usize) {
        self.in_flight = self.in_flight.saturating_add(bytes);
    }

    /// How many bytes the device copies by itself.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// `event` lies behind all of them on their stream.
    pub(crate) fn close(&mut self, event: &Arc<Event>) {
        for (region, id) in self.uses.drain(..) {
            region.close(id, event.clone());
        }
    }
}

/// Who frees the memory.
pub(crate) enum Owner {
    /// Host memory: any value whose drop frees it.
    Host(Box<dyn Any + Send>),
    /// Host memory whose drop is a slow driver call (unpinning): never on the caller's thread.
    Slow(Box<dyn Any + Send>),
    /// Device memory that is freed in the order of a stream: a `CudaSlice`, or a `SharedSlice`.
    Device { slice: Box<dyn Any + Send>, stream: Stream, shared: bool },
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Owner::Host(_) => "Host",
            Owner::Slow(_) => "Slow",
            Owner::Device { .. } => "Device",
        })
    }
}

impl Region {
    /// # Safety
    /// `owner` keeps `bytes` bytes valid at `host` and at `device` (where given) until it is dropped, and nobody else
    /// writes to them.
    pub(crate) unsafe fn new(
        host: Option<NonNull<u8>>,
        device: Option<u64>,
        bytes: usize,
        backing: Backing,
        on: Option<Device>,
        owner: Owner,
    ) -> Self {
        Self { host, device, bytes, backing, on, track: Mutex::new(Track::default()), owner: Some(owner) }
    }

    pub(crate) fn host(&self) -> Result<NonNull<u8>> {
        self.host.ok_or_else(|| Error::unsupported("a host view", "the memory is the device's alone"))
    }

    pub(crate) fn device(&self) -> Result<u64> {
        self.device.ok_or_else(|| Error::unsupported("a device view", "the device does not see this host memory"))
    }

    pub(crate) fn backing(&self) -> Backing {
        self.backing
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the copy engines can reach the host side themselves.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self.backing, Backing::Pinned | Backing::Registered | Backing::Managed)
    }

    /// Makes `stream` wait for whatever an access to `range` must come after. The context is current.
    pub(crate) fn order(&self, stream: &Stream, range: &Range<usize>, write: bool) -> Result<()> {
        let conflicts = self.track.lock().conflicts(range, write);
        let mut passed = Vec::new();
        for Conflict { id, stream: user, pending } in conflicts {
            if user.as_ref().is_some_and(|user| user.same_queue(stream)) {
                continue;
            }
            match (&pending, &user) {
                (Pending::Event(event), _) => stream.wait_for(event)?,
                // A forgotten guard: what it submitted lies before this point of its stream.
                (Pending::Stream(open), Some(_)) if open.reachable() => {
                    open.check_not_capturing("ordering after a forgotten guard")?;
                    let event = Arc::new(Event::record(self.context()?, open)?);
                    stream.wait_for(&event)?;
                    self.track.lock().close(id, event);
                }
                _ => {
                    let _range = crate::trace::range(c"wait", range.len());
                    pending.wait()?;
                    passed.push(id);
                }
            }
        }
        if !passed.is_empty() {
            self.track.lock().passed(&passed);
        }
        Ok(())
    }

    /// Blocks until the device is done with whatever a host access to `range` conflicts with.
    pub(crate) fn wait(&self, range: &Range<usize>, write: bool) -> Result<()> {
        let conflicts = self.track.lock().conflicts(range, write);
        if conflicts.is_empty() {
            return Ok(());
        }
        let _range = crate::trace::range(c"wait", range.len());
        let mut passed = Vec::with_capacity(conflicts.len());
        for conflict in conflicts {
            conflict.pending.wait()?;
            passed.push(conflict.id);
        }
        self.track.lock().passed(&passed);
        Ok(())
    }

    /// What a host access to `range` would have to wait for.
    pub(crate) fn pending(&self, range: &Range<usize>, write: bool) -> Vec<Pending> {
        self.track.lock().conflicts(range, write).into_iter().map(|conflict| conflict.pending).collect()
    }

    /// Notes a device access that starts now.
    pub(crate) fn open(&self, stream: &Stream, range: &Range<usize>, write: bool) -> UseId {
        self.track.lock().open(stream.clone(), range.clone(), write)
    }

    /// Notes that a device access is fully submitted.
    pub(crate) fn close(&self, id: UseId, event: Arc<Event>) {
        self.track.lock().close(id, event);
    }

    /// Notes that a device access has run.
    pub(crate) fn passed(&self, id: UseId) {
        self.track.lock().passed(&[id]);
    }

    /// A name for a guard, for what follows.
    pub(crate) fn guard(&self) -> UseId {
        self.track.lock().guard()
    }

    /// Notes that a guard gives the address to a stream that we do not know.
    pub(crate) fn mark_foreign(&self, guard: UseId, context: &Arc<cudarc::driver::CudaContext>, write: bool) {
        self.track.lock().foreign(guard, context, write);
    }

    /// Blocks until all has run that a guard let streams do that we do not know.
    pub(crate) fn wait_foreign(&self, guard: UseId) -> Result<()> {
        let pending = self.track.lock().foreign_of(guard);
        if pending.is_empty() {
            return Ok(());
        }
        let _range = crate::trace::range(c"wait", self.bytes());
        pending.iter().try_for_each(Pending::wait)
    }

    /// Notes that a guard is gone; whether it has waited for what it let others do.
    pub(crate) fn close_foreign(&self, guard: UseId, settled: bool) {
        self.track.lock().close_foreign(guard, settled);
    }

    /// The stream that its free is ordered on, for device memory.
    pub(crate) fn stream(&self) -> Option<Stream> {
        match &self.owner {
            Some(Owner::Device { stream, .. }) => Some(stream.clone()),
            _ => None,
        }
    }

    pub(crate) fn on(&self) -> Option<&Device> {
        self.on.as_ref()
    }

    fn context(&self) -> Result<&Arc<crate::driver::Context>> {
        match &self.on {
            Some(device) => Ok(device.context()),
            None => Err(Error::new(crate::error::Kind::HostOnly { operation: "device access" })),
        }
    }

    /// Frees device memory of `T`s behind its uses on `lane`, rather than on its own stream, which would wait for them; by the waiter where the lane
    /// can not name them, or the memory is not this region's alone.
    pub(crate) fn free_on<T: Element>(mut self, lane: &Stream) {
        let pending = self.track.get_mut().all();
        let (slice, stream, device) = match (self.owner.take(), self.on.clone()) {
            (Some(Owner::Device { slice, stream, .. }), Some(device)) => (slice, stream, device),
            (owner, _) => return self.owner = owner,
        };
        let kept = match slice.downcast::<CudaSlice<T>>() {
            Ok(slice) => {
                free_slice_on(device.context(), *slice, &stream, &pending, lane).map_err(|slice| Box::new(slice) as _)
            }
            Err(slice) => Err(slice),
        };
        if let Err(slice) = kept {
            retire_later(&device, slice, stream, pending);
        }
    }

    /// Takes the owner out, if it is a `T`. The caller has waited for everything.
    pub(crate) fn reclaim<T: 'static>(mut self) -> Result<T, Arc<Self>> {
        type Wrap = fn(Box<dyn Any + Send>) -> Owner;
        let (any, back): (_, Wrap) = match self.owner.take() {
            Some(Owner::Host(any)) => (any, Owner::Host),
            Some(Owner::Slow(any)) => (any, Owner::Slow),
            Some(Owner::Device { slice, stream, shared }) => match slice.downcast::<T>() {
                Ok(value) => return Ok(*value),
                Err(slice) => {
                    self.owner = Some(Owner::Device { slice, stream, shared });
                    return Err(Arc::new(self));
                }
            },
            None => return Err(Arc::new(self)),
        };
        match any.downcast::<T>() {
            Ok(value) => Ok(*value),
            Err(any) => {
                self.owner = Some(back(any));
                Err(Arc::new(self))
            }
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let Some(owner) = self.owner.take() else { return };
        let bytes = self.bytes;
        let pending = self.track.get_mut().all();
        match self.on.take() {
            Some(device) => retire(&device, owner, pending),
            None if pending.is_empty() => drop(owner),
            // Host-only memory that a stream was given through a host guard. There is no device to wait for us.
            None => {
                let owner = std::mem::ManuallyDrop::new(owner);
                let wait = move || {
                    crate::trace::name_thread();
                    let _range = crate::trace::range(c"wait", bytes);
                    if pending.iter().try_for_each(Pending::wait).is_ok() {
                        drop(std::mem::ManuallyDrop::into_inner(owner));
                    }
                };
                // Where no thread can be had, it stays for ever.
                let _ = std::thread::Builder::new().name("transfer-free".into()).spawn(wait);
            }
        }
    }
}

/// Frees `owner` when all of `pending` has passed, without blocking here; keeps it for ever if that can not be known.
fn retire(device: &Device, owner: Owner, pending: Vec<Pending>) {
    let context = device.context();
    if crate::driver::Driver::get().is_err() {
        // A forked child, or a driver that is gone. The thread and the locks of the parent are not here either.
        context.count_leak();
        std::mem::forget(owner);
        return;
    }
    match owner {
        Owner::Host(any) if pending.is_empty() => drop(any),
        Owner::Host(any) | Owner::Slow(any) => {
            let cuda = context.cuda().clone();
            free_later(context, cuda, device.waiter(), any, pending);
        }
        Owner::Device { slice, stream, shared } => {
            let in_order = free_in_order(device, &stream, shared, &pending);
            match in_order {
                Ok(()) => drop_bound(context, stream.cuda().context(), slice),
                Err(_) => retire_later(device, slice, stream, pending),
            }
        }
    }
}

/// Frees device memory when all of `pending` has passed and its stream is not captured.
fn retire_later(device: &Device, slice: Box<dyn Any + Send>, stream: Stream, mut pending: Vec<Pending>) {
    let cuda = stream.cuda().context().clone();
    if !stream.is_per_thread() {
        pending.push(Pending::Capture(stream.clone()));
        if !device.context().cuda().has_async_alloc() {
            pending.push(Pending::Stream(stream.clone()));
        }
    }
    // The stream stays as long: it may be ours, and the slice is freed on it.
    free_later(device.context(), cuda, device.waiter(), Box::new((slice, stream)), pending);
}

/// Lets the stream on which a slice is freed wait for its uses, so that the free can be submitted at once.
fn free_in_order(device: &Device, stream: &Stream, shared: bool, pending: &[Pending]) -> Result<()> {
    let context = device.context();
    if !context.cuda().has_async_alloc() && !pending.is_empty() {
        // cudarc would block in its drop.
        return Err(Error::unsupported("freeing in the order of a stream", "the device has no memory pools"));
    }
    if shared && stream.is_per_thread() && !passed(pending) {
        // Another holder may be the last, and free it on another thread's stream, which knows nothing of our uses.
        return Err(Error::unsupported("freeing in the order of a stream", "it is another stream on every thread"));
    }
    let _bound = context.enter()?;
    // The handle as *this* thread sees it: that is where cudarc will free.
    let stream = Stream::of_caller(stream.cuda());
    stream.check_not_capturing("freeing device memory")?;
    wait_behind(context, &stream, pending)
}

/// Whether all has run, as far as can be asked without blocking.
fn passed(pending: &[Pending]) -> bool {
    pending.iter().all(|pending| pending.pollable() && pending.poll().is_ok_and(|passed| passed))
}
