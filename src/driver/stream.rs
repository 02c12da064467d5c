//! Streams as queues: which two are the same, and how to wait for one.

use std::sync::{Arc, Weak};
use std::thread::ThreadId;

use cudarc::driver::{CudaStream, sys};

use super::call::{Bound, check};
use super::context::{OwnedStream, synchronize};
use super::event::Event;
use crate::error::{Error, Kind, Result};

/// The handle that means "the calling thread's default stream" (`CU_STREAM_PER_THREAD`): another queue on every thread.
const PER_THREAD: usize = 2;

/// A stream, kept alive, with the thread whose queue it is if its handle alone does not say.
#[derive(Debug, Clone)]
pub(crate) struct Stream {
    cuda: Arc<CudaStream>,
    thread: Option<ThreadId>,
    owned: Option<Arc<OwnedStream>>,
}

impl Stream {
    /// The caller's stream, as the calling thread sees it.
    pub(crate) fn of_caller(cuda: &Arc<CudaStream>) -> Self {
        let thread = (cuda.cu_stream() as usize == PER_THREAD).then(|| std::thread::current().id());
        Self { cuda: cuda.clone(), thread, owned: None }
    }

    pub(super) fn owned(cuda: Arc<CudaStream>, owned: Arc<OwnedStream>) -> Self {
        Self { cuda, thread: None, owned: Some(owned) }
    }

    /// What keeps it, if it is one of this crate's own.
    pub(super) fn owner(&self) -> Option<&Arc<OwnedStream>> {
        self.owned.as_ref()
    }

    pub(crate) fn cuda(&self) -> &Arc<CudaStream> {
        &self.cuda
    }

    pub(super) fn handle(&self) -> sys::CUstream {
        self.cuda.cu_stream()
    }

    /// Whether work submitted to both runs in the order of its submission.
    pub(crate) fn same_queue(&self, other: &Stream) -> bool {
        self.handle() == other.handle()
            && self.thread == other.thread
            && self.cuda.context().cu_ctx() == other.cuda.context().cu_ctx()
    }

    /// Two queues of one context with the same name are the same, while both live.
    pub(super) fn name(&self) -> (usize, Option<ThreadId>) {
        (self.handle() as usize, self.thread)
    }

    /// What tells the queue again later, without keeping the stream.
    pub(super) fn queue(&self) -> Queue {
        Queue { cuda: Arc::downgrade(&self.cuda), thread: self.thread }
    }

    /// Whether this thread can name the queue: the per-thread stream of another thread can not be.
    pub(crate) fn reachable(&self) -> bool {
        self.thread.is_none_or(|thread| thread == std::thread::current().id())
    }

    /// Whether it is one of this crate's own.
    pub(crate) fn is_ours(&self) -> bool {
        self.owned.is_some()
    }

    /// Whether it is one of the default streams, which some calls refuse: the legacy one (handles 0 and 1) or a thread's.
    pub(crate) fn is_default(&self) -> bool {
        self.handle() as usize <= PER_THREAD
    }

    /// Whether the handle means another queue on every thread.
    pub(crate) fn is_per_thread(&self) -> bool {
        self.thread.is_some()
    }

    /// Refuses a stream that is being captured into a graph. The context must be current.
    pub(crate) fn check_not_capturing(&self, operation: &'static str) -> Result<()> {
        check_not_capturing(self.handle(), operation)
    }

    /// Makes what is submitted to this stream from now on wait for `event`. The context must be current.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are alive; an event of another context may be waited for.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.handle(), event.handle(), 0) })
    }

    /// Blocks until everything submitted to this queue has run; the whole context's work where the queue is another
    /// thread's.
    pub(crate) fn synchronize(&self) -> Result<()> {
        if !self.reachable() {
            return synchronize(self.cuda.context());
        }
        let _bound = Bound::enter(self.cuda.context())?;
        // SAFETY: the handle is alive and its context current.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle()) })
    }
}

/// A queue that was met before. Handles alone do not tell: that of a stream that is gone may be another's.
#[derive(Debug)]
pub(super) struct Queue {
    cuda: Weak<CudaStream>,
    thread: Option<ThreadId>,
}

impl Queue {
    /// Whether it is the queue of `stream`, for certain.
    pub(super) fn is_of(&self, stream: &Stream) -> bool {
        self.thread == stream.thread && self.cuda.upgrade().is_some_and(|cuda| Arc::ptr_eq(&cuda, &stream.cuda))
    }
}

/// As [`Stream::check_not_capturing`], for a stream that is only borrowed. The context must be current.
pub(crate) fn check_not_capturing(stream: sys::CUstream, operation: &'static str) -> Result<()> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the handle is alive and its context current; the call writes one enum.
    let code = unsafe { sys::cuStreamIsCapturing(stream, &mut status) };
    // The legacy stream answers so while a blocking stream of its context is captured.
    let implicit = code == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if implicit
        || (code == sys::CUresult::CUDA_SUCCESS && status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    {
        return Err(Error::new(Kind::Capturing { operation }));
    }
    check("cuStreamIsCapturing", code)
}

/// As [`Stream::wait_for`], for a stream that is only borrowed. Its context is current.
pub(crate) fn wait_on(stream: &CudaStream, event: &Event) -> Result<()> {
    // SAFETY: both handles are alive.
    check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.cu_stream(), event.handle(), 0) })
}
