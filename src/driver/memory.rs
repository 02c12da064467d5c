//! Host-visible memory the driver gives or pins, as RAII. Nothing here waits for the device: who drops one of these has
//! made sure that it is done (`tensor::region` does).

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, sys};

use super::call::{Bound, check};
use super::context::{Context, cudarc_error};
use super::event::Event;
use super::pending::Pending;
use super::stream::Stream;
use crate::element::Element;
use crate::error::{Error, Kind, Result};

/// Memory that migrates between host and device (`cuMemAllocManaged`, attached globally).
#[derive(Debug)]
pub(crate) struct Managed {
    address: NonNull<u8>,
    context: Arc<Context>,
}

// SAFETY: as for `Pinned`.
unsafe impl Send for Managed {}
// SAFETY: as for `Pinned`.
unsafe impl Sync for Managed {}

impl Managed {
    pub(crate) fn alloc(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _bound = context.enter()?;
        let mut address = 0;
        let flags = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
        // SAFETY: the context is current; the call writes one address.
        let code = unsafe { sys::cuMemAllocManaged(&mut address, bytes, flags) };
        check("cuMemAllocManaged", code).map_err(|error| out_of_memory(error, "managed memory", bytes))?;
        let address = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(address as usize))
            .ok_or_else(|| no_memory("managed memory", bytes))?;
        Ok(Self { address, context: context.clone() })
    }

    /// The one address, for host and device.
    pub(crate) fn address(&self) -> NonNull<u8> {
        self.address
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        let freed = self.context.enter().and_then(|_bound| {
            // SAFETY: from `cuMemAllocManaged`, freed once; the owner made sure that nothing uses it.
            check("cuMemFree", unsafe { sys::cuMemFree_v2(self.address.as_ptr() as u64) })
        });
        count_failure(&self.context, &freed);
    }
}

/// Host memory of somebody else's that we pinned. Dropping this does not unpin it: [`Registered`] does.
#[derive(Debug)]
#[must_use]
pub(crate) struct Registration {
    host: NonNull<u8>,
    device: u64,
    context: Arc<Context>,
}

// SAFETY: holds addresses only; the driver unregisters from any thread.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Pins `bytes` bytes at `host`. Read-only memory is tried with the READ_ONLY flag first and without it then
    /// (drivers differ in which they take).
    ///
    /// # Errors
    /// [`Error::is_already_registered`] where somebody did so before: the memory is pinned, but not ours to unpin.
    ///
    /// # Safety
    /// The range is mapped and stays so until it is unpinned.
    pub(crate) unsafe fn new(context: &Arc<Context>, host: NonNull<u8>, bytes: usize, read_only: bool) -> Result<Self> {
        let _bound = context.enter()?;
        let plain = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let register = |flags| {
            // SAFETY: the caller vouches for the range.
            let code = unsafe { sys::cuMemHostRegister_v2(host.as_ptr().cast(), bytes, flags) };
            check("cuMemHostRegister", code)
        };
        let registered = if read_only {
            register(plain | sys::CU_MEMHOSTREGISTER_READ_ONLY).or_else(|_| register(plain))
        } else {
            register(plain)
        };
        registered.map_err(|error| match error.driver_code() {
            Some(712) => Error::new(Kind::AlreadyRegistered { address: host.as_ptr() as usize, bytes }),
            _ => out_of_memory(error, "registered host memory", bytes),
        })?;
        match device_pointer(host) {
            Some(device) => Ok(Self { host, device, context: context.clone() }),
            None => {
                // SAFETY: registered just now.
                let _ = unsafe { sys::cuMemHostUnregister(host.as_ptr().cast()) };
                Err(Error::unsupported(
                    "a device view of registered memory",
                    "the driver gives no device pointer for it",
                ))
            }
        }
    }

    /// The address at which the device sees it.
    pub(crate) fn device(&self) -> u64 {
        self.device
    }
}

/// What holds memory that is pinned. Unpins it before it lets it go. Where that is refused the memory is never freed: the
/// driver would take whoever got it next for registered.
#[derive(Debug)]
pub(crate) struct Registered<O> {
    registration: Registration,
    owner: Option<O>,
}

impl<O> Registered<O> {
    pub(crate) fn new(registration: Registration, owner: O) -> Self {
        Self { registration, owner: Some(owner) }
    }

    fn unpin(&self) -> Result<()> {
        let Registration { host, context, .. } = &self.registration;
        let unpinned = context.enter().and_then(|_bound| {
            // SAFETY: registered by us; who drops or ends this has made sure that nothing uses it.
            check("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(host.as_ptr().cast()) })
        });
        count_failure(context, &unpinned);
        unpinned
    }
}

impl<T: Clone> Registered<Vec<T>> {
    /// The vector, unpinned; a copy where that is refused.
    pub(crate) fn into_vec(mut self) -> Vec<T> {
        match self.unpin() {
            Ok(()) => self.owner.take().unwrap_or_default(),
            Err(_) => self.owner.clone().unwrap_or_default(),
        }
    }
}

impl<O> Drop for Registered<O> {
    fn drop(&mut self) {
        let Some(owner) = self.owner.take() else { return };
        match self.unpin() {
            Ok(()) => drop(owner),
            Err(_) => {
                self.registration.context.count_leak();
                std::mem::forget(owner);
            }
        }
    }
}

/// Device memory of `elements` elements, allocated on `stream` (in its order, where the device has memory pools), as the
/// `CudaSlice<T>` that it can become again. Its bytes are not set.
pub(crate) fn alloc_device<T: Element>(context: &Context, stream: &Stream, elements: usize) -> Result<CudaSlice<T>> {
    let _bound = context.enter()?;
    // SAFETY: nobody reads the memory through this slice before it is written (`tensor::store` tracks that).
    let alloc = || unsafe { stream.cuda().alloc::<T>(elements) };
    context.unparked(stream.cuda().context(), "cuMemAlloc", alloc)?.map_err(|error| {
        out_of_memory(cudarc_error("cuMemAlloc", error), "device memory", elements.saturating_mul(size_of::<T>()))
    })
}

/// The address of a slice, for reading. Makes `stream` wait for what cudarc knows to be writing to it. The context is current.
pub(crate) fn slice_address<T: Element>(context: &Context, slice: &CudaSlice<T>, stream: &Stream) -> Result<u64> {
    ordered(context, stream, || slice.device_ptr(stream.cuda()).0)
}

/// Takes over a slice of the caller's: makes `stream` wait for what cudarc knows to be running on it. The context is current.
pub(crate) fn adopt_slice<T: Element>(context: &Context, slice: &mut CudaSlice<T>, stream: &Stream) -> Result<u64> {
    ordered(context, stream, || slice.device_ptr_mut(stream.cuda()).0)
}

/// Has `work` read at the address of the caller's slice or view, on `stream`: after what cudarc knows to be writing there,
/// and known to cudarc.
pub(crate) fn read_address<T, S: DevicePtr<T>, R>(
    context: &Context,
    slice: &S,
    stream: &Stream,
    work: impl FnOnce(u64) -> Result<R>,
) -> Result<R> {
    let (address, noting) = ordered(context, stream, || slice.device_ptr(stream.cuda()))?;
    let done = given(address).and_then(work);
    ordered(context, stream, || drop(noting)).or_else(|_| stream.synchronize()).and(done)
}

/// As [`read_address`], for writing.
pub(crate) fn write_address<T, S: DevicePtrMut<T>>(
    context: &Context,
    slice: &mut S,
    stream: &Stream,
    work: impl FnOnce(u64) -> Result<()>,
) -> Result<()> {
    let (address, noting) = ordered(context, stream, || slice.device_ptr_mut(stream.cuda()))?;
    let done = given(address).and_then(work);
    ordered(context, stream, || drop(noting)).or_else(|_| stream.synchronize()).and(done)
}

/// The address that cudarc's trait gave: none, from a guard whose own stream is being captured.
pub(super) fn given(address: u64) -> Result<u64> {
    if address == 0 { Err(Error::new(Kind::Capturing { operation: "device access" })) } else { Ok(address) }
}

/// Lets cudarc order `stream`, or says why it did not: then the slice may still be in use. Nothing blocks for that.
fn ordered<R>(context: &Context, stream: &Stream, order: impl FnOnce() -> R) -> Result<R> {
    context.unparked(stream.cuda().context(), "cuStreamWaitEvent", order)
}

/// A slice that others hold too.
///
/// Who has the last handle frees it: on his thread's stream, if it is the per-thread default stream. The reads that others
/// submitted to their threads' streams before they dropped their handles come first.
#[derive(Debug)]
pub struct SharedSlice<T> {
    slice: Option<Arc<CudaSlice<T>>>,
    context: Arc<Context>,
}

impl<T> SharedSlice<T> {
    pub(crate) fn new(context: &Arc<Context>, slice: Arc<CudaSlice<T>>) -> Self {
        Self { slice: Some(slice), context: context.clone() }
    }

    /// Another handle.
    pub(crate) fn handle(&self) -> Option<Arc<CudaSlice<T>>> {
        self.slice.clone()
    }

    /// The slice, if this was the last handle: to be freed by [`free_shared`].
    pub(crate) fn into_last(mut self) -> Option<CudaSlice<T>> {
        self.slice.take().and_then(Arc::into_inner)
    }

    /// Looks at it.
    pub(crate) fn with<R>(&self, look: impl FnOnce(&CudaSlice<T>) -> Result<R>) -> Result<R> {
        self.slice.as_deref().map_or_else(|| Err(Error::unsupported("a shared slice", "it is gone")), look)
    }
}

impl<T> Drop for SharedSlice<T> {
    fn drop(&mut self) {
        // Only once nobody else has a handle is it known that nobody submits more.
        if let Some(slice) = self.slice.take().and_then(Arc::into_inner) {
            free_shared(&self.context, slice);
        }
    }
}

/// Frees a slice that others had too: after what every thread gave its own stream, if the slice's is such a one.
pub(crate) fn free_shared<T>(context: &Arc<Context>, slice: CudaSlice<T>) {
    let stream = Stream::of_caller(slice.stream());
    if stream.is_per_thread() && after_every_thread(context, &stream).is_err() {
        context.count_leak();
        std::mem::forget(slice);
        return;
    }
    free_slice(context, slice);
}

/// Frees a slice, as [`drop_bound`] does.
pub(crate) fn free_slice<T>(context: &Arc<Context>, slice: CudaSlice<T>) {
    let cuda = slice.context().clone();
    drop_bound(context, &cuda, slice);
}

/// Frees a slice on `lane`, behind `pending`, rather than on its own stream. It comes back where the lane can not wait for those, or its own
/// stream is being captured.
pub(crate) fn free_slice_on<T>(
    context: &Arc<Context>,
    slice: CudaSlice<T>,
    own: &Stream,
    pending: &[Pending],
    lane: &Stream,
) -> Result<(), CudaSlice<T>> {
    let in_order = || {
        if !context.cuda().has_async_alloc() {
            return Err(Error::unsupported("freeing in the order of a stream", "the device has no memory pools"));
        }
        let bound = context.to_submit()?;
        // cudarc lets the slice's own stream wait for the uses that it knows of when it gives up the slice.
        Stream::of_caller(own.cuda()).check_not_capturing("freeing device memory")?;
        wait_behind(context, lane, pending).map(|()| bound)
    };
    let Ok(_bound) = in_order() else { return Err(slice) };
    let cuda = slice.context().clone();
    let mut address = 0;
    let given = context.unparked(&cuda, "cuStreamWaitEvent", || address = slice.leak());
    count_failure(context, &given);
    // SAFETY: the slice's memory, from a pool, which nobody has any more; its uses come before this.
    let freed = check("cuMemFreeAsync", unsafe { sys::cuMemFreeAsync(address, lane.handle()) });
    if freed.is_err() {
        context.count_leak();
    }
    count_failure(context, &freed);
    Ok(())
}

/// Makes `stream` wait for uses. The context is current.
///
/// # Errors
/// They can not be named from here, or the driver refused.
pub(crate) fn wait_behind(context: &Arc<Context>, stream: &Stream, pending: &[Pending]) -> Result<()> {
    for pending in pending {
        match pending {
            Pending::Event(event) => stream.wait_for(event)?,
            Pending::Stream(open) if open.reachable() => {
                open.check_not_capturing("freeing device memory")?;
                stream.wait_for(&Event::record(context, open)?)?;
            }
            _ => return Err(Error::unsupported("freeing in the order of a stream", "its uses can not be named")),
        }
    }
    Ok(())
}

/// Lets a stream wait for the default streams of all threads: the legacy stream waits for those.
fn after_every_thread(context: &Arc<Context>, stream: &Stream) -> Result<()> {
    let _bound = context.enter()?;
    let legacy = Stream::of_caller(&context.cuda().default_stream());
    legacy.check_not_capturing("freeing device memory")?;
    stream.wait_for(&Event::record(context, &legacy)?)
}

/// Makes a slice belong to `stream`, on which its uses are ordered already: cudarc frees it there, and in single-stream
/// mode takes it for granted that it is used nowhere else. If it belongs to another stream (one of ours), that takes a copy
/// on the device, a hundredth of the time it took over the link.
///
/// # Errors
/// The driver refused; the slice comes back.
pub(crate) fn rehome_slice<T: Element>(
    context: &Arc<Context>,
    slice: CudaSlice<T>,
    stream: &Stream,
) -> Result<CudaSlice<T>, (Error, CudaSlice<T>)> {
    if slice.stream().cu_stream() == stream.handle() && Arc::ptr_eq(slice.stream().context(), stream.cuda().context()) {
        return Ok(slice);
    }
    let owner = Stream::of_caller(slice.stream());
    let copied = alloc_device::<T>(context, stream, slice.len()).and_then(|target| {
        let _bound = context.to_submit()?;
        let to = slice_address(context, &target, stream)?;
        let from = slice_address(context, &slice, &owner)?;
        // SAFETY: both slices are as long, and `stream` comes after the uses of the source.
        unsafe { super::copy::device_to_device(to, from, target.num_bytes(), stream)? };
        // The source is freed on its own stream, after the copy.
        owner.wait_for(&Event::record(context, stream)?)?;
        Ok(target)
    });
    match copied {
        Ok(target) => {
            free_slice(context, slice);
            Ok(target)
        }
        Err(error) => Err((error, slice)),
    }
}

/// Tells cudarc's tracking of a slice that goes to the caller that all of ours lies before this point of `stream`. Where
/// cudarc can not note it, waits instead.
pub(crate) fn note_write<T: Element>(context: &Context, slice: &mut CudaSlice<T>, stream: &Stream) -> Result<()> {
    let _bound = context.enter()?;
    ordered(context, stream, || drop(slice.device_ptr_mut(stream.cuda()))).or_else(|_| stream.synchronize())
}

/// Drops an owner whose drop may call cudarc (a `CudaSlice` with the handle `cuda`): with its context current, and with
/// what cudarc parks in the handle counted as ours rather than left for the next caller.
pub(crate) fn drop_bound<O>(context: &Context, cuda: &CudaContext, owner: O) {
    match context.enter() {
        Ok(_bound) => {
            if context.unparked(cuda, "cuMemFree", || drop(owner)).is_err() {
                context.counters().free_errors.fetch_add(1, Ordering::Relaxed);
            }
        }
        Err(_) => {
            // A forked child, or a driver that is gone: nothing can be freed, and trying would be undefined.
            context.count_leak();
            std::mem::forget(owner);
        }
    }
}

/// A slice that names memory it does not own, for cudarc's interfaces. To be given to [`forget_alias`], never dropped.
///
/// It belongs to a context object of its own whose event tracking is off: then cudarc makes no events for it (and
/// `upgrade_device_ptr` has nothing to panic about).
pub(crate) fn alias_slice<T: Element>(stream: &Arc<CudaStream>, address: u64, elements: usize) -> Result<CudaSlice<T>> {
    let _bound = Bound::enter(stream.context())?;
    let own = CudaContext::new(stream.context().ordinal())
        .map_err(|error| cudarc_error("cuDevicePrimaryCtxRetain", error))?;
    if own.cu_ctx() != stream.context().cu_ctx() {
        return Err(Error::unsupported("a cudarc view", "the stream's context is not the device's primary one"));
    }
    // SAFETY: our own context object, made just now; nothing is tracked through it.
    unsafe { own.disable_event_tracking() };
    // SAFETY: the handle belongs to this context; the slice lives no longer than the guard that holds the stream.
    let stream = unsafe { own.wrap_borrowed_stream(stream.cu_stream()) };
    #[allow(clippy::disallowed_methods)] // Without event tracking there is nothing in it that could panic.
    // SAFETY: the address is valid for the elements while the guard lives, and `forget_alias` gives up the ownership.
    let alias = unsafe { stream.upgrade_device_ptr::<T>(address, elements) };
    Ok(alias)
}

/// Ends an alias without freeing what it names.
pub(crate) fn forget_alias<T>(alias: CudaSlice<T>) {
    let context = alias.context().clone();
    match Bound::enter(&context) {
        // Dropping the last handle of a context makes it current; `_bound` puts the thread's own back.
        Ok(_bound) => drop((alias.leak(), context)),
        Err(_) => std::mem::forget((alias, context)),
    }
}

pub(super) fn device_pointer(host: NonNull<u8>) -> Option<u64> {
    let mut device = 0;
    // SAFETY: the address is inside an allocation or registration; the call writes one address.
    let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, host.as_ptr().cast(), 0) };
    (code == sys::CUresult::CUDA_SUCCESS && device != 0).then_some(device)
}

pub(super) fn out_of_memory(error: Error, what: &'static str, bytes: usize) -> Error {
    if error.is_out_of_memory() {
        Error::new(Kind::OutOfMemory { what, bytes: bytes as u64, why: error.to_string() })
    } else {
        error
    }
}

pub(super) fn no_memory(what: &'static str, bytes: usize) -> Error {
    Error::new(Kind::OutOfMemory { what, bytes: bytes as u64, why: "the driver gave a null address".into() })
}

pub(super) fn count_failure(context: &Context, freed: &Result<()>) {
    if freed.is_err() {
        context.counters().free_errors.fetch_add(1, Ordering::Relaxed);
    }
}
