//! Ordering after a stream that only its handle is known of.

use std::ptr::{null_mut, without_provenance_mut};
use std::sync::Arc;

use parking_lot::Mutex;
use transfer_tensor::cudarc::driver::sys::{self, CUresult, CUstream};
use transfer_tensor::cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use super::code::{Code, Failure};

/// A stream of ours that waits for others, so that what comes after it comes after what they were given.
pub(crate) struct Producer {
    stream: Arc<CudaStream>,
    /// Recorded on their stream; ours waits for what it said then, so one will do, if one at a time uses it.
    event: Mutex<CudaEvent>,
}

impl Producer {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Self, Failure> {
        let failed = |what| move |error: transfer_tensor::cudarc::driver::DriverError| refused(what, error.0);
        let stream = context.new_stream().map_err(failed("cuStreamCreate"))?;
        let event = context.new_event(None).map_err(failed("cuEventCreate"))?;
        Ok(Self { stream, event: Mutex::new(event) })
    }

    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Our stream waits for all that `handle` was given so far; 0 and 1 are the legacy default stream, 2 is the calling
    /// thread's.
    ///
    /// # Safety
    /// `handle` is one of these, or a stream that is alive.
    pub(crate) unsafe fn follow(&self, handle: u64) -> Result<(), Failure> {
        let theirs: CUstream = without_provenance_mut(handle as usize);
        let context = self.stream.context().cu_ctx();
        let _current = Current::push(context)?;
        let mut capturing = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let mut of = null_mut();
        // SAFETY: the caller's; the context is current. Neither call ends a capture.
        unsafe {
            match sys::cuStreamIsCapturing(theirs, &raw mut capturing) {
                CUresult::CUDA_SUCCESS => {}
                CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => return Err(captured()),
                error => return Err(refused("cuStreamIsCapturing", error)),
            }
            if capturing != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
                return Err(captured());
            }
            done("cuStreamGetCtx", sys::cuStreamGetCtx(theirs, &raw mut of))?;
        }
        if of != context {
            return Err(Failure::new(Code::Invalid, "the stream belongs to another context than the pool's"));
        }
        let event = self.event.lock();
        // SAFETY: as above; stream and event are ours, and alive.
        unsafe {
            done("cuEventRecord", sys::cuEventRecord(event.cu_event(), theirs))?;
            done("cuStreamWaitEvent", sys::cuStreamWaitEvent(self.stream.cu_stream(), event.cu_event(), 0))
        }
    }
}

/// What was the thread's current context, which cudarc changes where it makes and drops things; is again when this is
/// dropped.
pub(crate) struct Before(sys::CUcontext);

impl Before {
    /// The driver is loaded.
    pub(crate) fn now() -> Self {
        let mut current = null_mut();
        // SAFETY: the address is valid. Where it fails there is none.
        let _ = unsafe { sys::cuCtxGetCurrent(&raw mut current) };
        Self(current)
    }
}

impl Drop for Before {
    fn drop(&mut self) {
        // SAFETY: whoever made it current keeps it alive.
        let _ = unsafe { sys::cuCtxSetCurrent(self.0) };
    }
}

/// While this lives, a context is the thread's current one; then what was before.
struct Current(());

impl Current {
    fn push(context: sys::CUcontext) -> Result<Self, Failure> {
        // SAFETY: the context is alive: a `CudaStream` holds it.
        done("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(context) })?;
        Ok(Self(()))
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut popped = null_mut();
        // SAFETY: `push` pushed it on this thread, which this type does not leave.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
    }
}

fn done(call: &str, result: CUresult) -> Result<(), Failure> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(refused(call, result)) }
}

fn captured() -> Failure {
    Failure::new(Code::Capturing, "the stream is being captured into a graph, which a transfer can not be part of")
}

fn refused(call: &str, error: CUresult) -> Failure {
    let code = match error as u32 {
        // Those that CUDA says leave the process in an inconsistent state.
        214 | 220 | 700 | 702 | 709 | 710 | 714..=719 | 721 => Code::Fault,
        400 | 1 => Code::Invalid,
        2 => Code::OutOfMemory,
        _ => Code::Other,
    };
    Failure::new(code, format!("{call}: {error:?}"))
}
