//! One context as this crate uses it: events, copy streams, what was leaked.

use std::ffi::CStr;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaContext, sys};
use parking_lot::Mutex;

use super::batch::BatchCall;
use super::call::{Bound, check};
use super::load::Driver;
use super::stream::Stream;
use crate::error::{Error, Result};
use crate::trace;

/// Idle events that are kept for the next use; more than this many are destroyed.
const IDLE_EVENTS: usize = 1024;

/// A context, with the events and copy streams that belong to it. Events work only on the context that made them, so
/// there is one set for each.
#[derive(Debug)]
pub(crate) struct Context {
    cuda: Arc<CudaContext>,
    idle: Mutex<Vec<RawEvent>>,
    copy_streams: Mutex<[Option<Arc<OwnedStream>>; 2]>,
    /// Streams that were lent and came back, by their names.
    lent: Mutex<Vec<(&'static CStr, Arc<OwnedStream>)>>,
    counters: Counters,
    batches: OnceLock<BatchCall>,
}

/// What went wrong where no call could return it.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Allocations and owners kept for ever, because it could not be established that the device is done with them.
    pub(crate) leaked: AtomicU64,
    /// Errors that somebody else's calls had left in the `CudaContext` and that we found there.
    pub(crate) stale_errors: AtomicU64,
    /// Errors of our own frees.
    pub(crate) free_errors: AtomicU64,
}

#[derive(Debug)]
pub(super) struct RawEvent(pub(super) sys::CUevent);

// SAFETY: the driver's event functions may be called from any thread.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

/// Which way a copy stream carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Up,
    Down,
}

impl Way {
    /// What copies are called.
    pub(crate) fn copies(self) -> &'static CStr {
        match self {
            Way::Up => c"upload",
            Way::Down => c"download",
        }
    }

    /// Of its copy stream.
    fn name(self) -> &'static CStr {
        match self {
            Way::Up => c"transfer-up",
            Way::Down => c"transfer-down",
        }
    }
}

impl Context {
    pub(crate) fn new(cuda: Arc<CudaContext>) -> Arc<Self> {
        Arc::new(Self {
            cuda,
            idle: Mutex::new(Vec::new()),
            copy_streams: Mutex::default(),
            lent: Mutex::default(),
            counters: Counters::default(),
            batches: OnceLock::new(),
        })
    }

    pub(crate) fn cuda(&self) -> &Arc<CudaContext> {
        &self.cuda
    }

    pub(crate) fn enter(&self) -> Result<Bound> {
        Bound::enter(&self.cuda)
    }

    pub(crate) fn to_submit(&self) -> Result<Bound> {
        Bound::to_submit(&self.cuda)
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What `call`, which goes through cudarc, returns, or the error that cudarc parked in `cuda` meanwhile. `cuda` is the
    /// handle that cudarc uses: that of the stream or slice at hand, which need not be ours, though it is the same context.
    ///
    /// An error that was parked there before is taken out of the way and counted: it belongs to a call that is over.
    #[allow(clippy::disallowed_methods)] // The one place: before and after cudarc's own calls.
    pub(super) fn unparked<R>(&self, cuda: &CudaContext, name: &'static str, call: impl FnOnce() -> R) -> Result<R> {
        if cuda.check_err().is_err() {
            self.counters.stale_errors.fetch_add(1, Ordering::Relaxed);
        }
        let returned = call();
        cuda.check_err().map(|()| returned).map_err(|error| cudarc_error(name, error))
    }

    /// Whether the driver takes many copies at once. The context is current.
    pub(super) fn has_batches(&self) -> bool {
        !matches!(self.batches(), BatchCall::Absent)
    }

    /// How the driver takes many copies at once. The context is current.
    pub(super) fn batches(&self) -> BatchCall {
        *self.batches.get_or_init(BatchCall::find)
    }

    pub(crate) fn count_leak(&self) {
        self.counters.leaked.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn take_event(&self) -> Result<RawEvent> {
        if let Some(event) = self.idle.lock().pop() {
            return Ok(event);
        }
        let mut raw = std::ptr::null_mut();
        // Not for blocking waits: those make the GPU raise an interrupt, and waiting for such an event just after recording
        // it costs an H200 32 µs more (docs/benchmarks.md). `Event::wait` sleeps by itself.
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the callers hold a `Bound` of this context; the call writes one handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(RawEvent(raw))
    }

    pub(super) fn give_event(&self, event: RawEvent) {
        if Driver::get().is_err() {
            // A forked child, or a driver that is gone: the handle is worth nothing, and the lock may never be free.
            return;
        }
        let mut idle = self.idle.lock();
        if idle.len() < IDLE_EVENTS {
            idle.push(event);
        } else {
            drop(idle);
            self.destroy_events(vec![event]);
        }
    }

    fn destroy_events(&self, events: Vec<RawEvent>) {
        if events.is_empty() {
            return;
        }
        // Without a context (a forked child, a driver that is gone) the handles are worth nothing.
        let Ok(_bound) = self.enter() else { return };
        for RawEvent(raw) in events {
            // SAFETY: the handle is ours and nobody else has it.
            let _ = unsafe { sys::cuEventDestroy_v2(raw) };
        }
    }

    /// The stream that carries copies one way. Made with a raw call: cudarc's `new_stream` would switch the caller's
    /// context to multi-stream mode, which costs him two driver calls for each use of a slice.
    pub(crate) fn copy_stream(self: &Arc<Self>, way: Way) -> Result<Stream> {
        let mut streams = self.copy_streams.lock();
        let slot = &mut streams[way as usize];
        let owned = match slot {
            Some(owned) => owned.clone(),
            None => slot.insert(Arc::new(OwnedStream::new(&self.cuda, way.name())?)).clone(),
        };
        drop(streams);
        Ok(self.stream(owned))
    }

    /// A stream of its own, which ends with its last handle; with a name for profilers.
    pub(crate) fn fresh_stream(self: &Arc<Self>, name: &'static CStr) -> Result<Stream> {
        Ok(self.stream(Arc::new(OwnedStream::new(&self.cuda, name)?)))
    }

    /// A stream for one user, which comes back when he drops it and is lent again once nothing runs on it. It lives as long as the context:
    /// device memory that belongs to it may outlive its user.
    pub(crate) fn lend_stream(self: &Arc<Self>, name: &'static CStr) -> Result<LentStream> {
        let idle = |known: &(&'static CStr, Arc<OwnedStream>)| {
            // SAFETY: the handle is alive; the context is current, as `bound` says.
            known.0 == name && unsafe { sys::cuStreamQuery(known.1.raw) } == sys::CUresult::CUDA_SUCCESS
        };
        let bound = self.to_submit()?;
        let found = {
            let mut lent = self.lent.lock();
            lent.iter().position(idle).map(|at| lent.swap_remove(at).1)
        };
        drop(bound);
        let owned = found.map_or_else(|| OwnedStream::new(&self.cuda, name).map(Arc::new), Ok)?;
        Ok(LentStream { stream: self.stream(owned), name, context: self.clone() })
    }

    fn stream(&self, owned: Arc<OwnedStream>) -> Stream {
        // SAFETY: the handle belongs to this context, and the `Stream` keeps both alive.
        let cuda = unsafe { self.cuda.wrap_borrowed_stream(owned.raw) };
        Stream::owned(cuda, owned)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let events = std::mem::take(self.idle.get_mut());
        self.destroy_events(events);
    }
}

/// A stream that goes back to its context.
#[derive(Debug)]
pub(crate) struct LentStream {
    stream: Stream,
    name: &'static CStr,
    context: Arc<Context>,
}

impl Deref for LentStream {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for LentStream {
    fn drop(&mut self) {
        // In a forked child the lock may never be free, and the stream is worth nothing.
        if let (Ok(_), Some(owned)) = (Driver::get(), self.stream.owner()) {
            self.context.lent.lock().push((self.name, owned.clone()));
        }
    }
}

/// A non-blocking stream of ours.
#[derive(Debug)]
pub(crate) struct OwnedStream {
    raw: sys::CUstream,
    cuda: Arc<CudaContext>,
}

// SAFETY: the driver's stream functions may be called from any thread.
unsafe impl Send for OwnedStream {}
// SAFETY: as above.
unsafe impl Sync for OwnedStream {}

impl OwnedStream {
    fn new(cuda: &Arc<CudaContext>, name: &'static CStr) -> Result<Self> {
        let _bound = Bound::enter(cuda)?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current; the call writes one handle.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        trace::name_stream(raw, name);
        Ok(Self { raw, cuda: cuda.clone() })
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        if let Ok(_bound) = Bound::enter(&self.cuda) {
            // SAFETY: ours; destroying a stream with work on it lets the work finish (CUDA driver API).
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// Waits until nothing runs on the context.
pub(crate) fn synchronize(cuda: &CudaContext) -> Result<()> {
    let _bound = Bound::enter(cuda)?;
    // SAFETY: the context is current.
    check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
}

/// What a cudarc call refused. Never formats cudarc's error: that calls the driver.
pub(crate) fn cudarc_error(call: &'static str, error: cudarc::driver::DriverError) -> Error {
    match check(call, error.0) {
        Err(error) => error,
        Ok(()) => Error::unsupported(call, "the driver gave success as an error"),
    }
}
