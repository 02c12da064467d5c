//! From `CUresult` to [`Error`], and the state a thread must be in to call the driver.

use cudarc::driver::{CudaContext, sys};

use super::load::Driver;
use crate::error::{Error, Kind, Result, is_sticky};

/// Turns a driver's answer into a result that names the call.
pub(crate) fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(refused(call, code)) }
}

#[cold]
fn refused(call: &'static str, code: sys::CUresult) -> Error {
    // `{:?}` prints the enum's name; cudarc's `Display` would ask the driver for a text.
    let (name, code) = (format!("{code:?}"), code as u32);
    if is_sticky(code) {
        Error::new(Kind::Fault { code, name, seen_in: call })
    } else {
        Error::new(Kind::Driver { call, code, name })
    }
}

/// A thread that has a context current, and perhaps the relaxed capture mode; both are put back as they were when this is
/// dropped.
///
/// The relaxed mode is what lets us allocate, or query an event, while another thread captures a graph: in the default
/// (global) mode such a call would break that capture. Submitting work and recording events does not.
#[derive(Debug)]
pub(crate) struct Bound {
    previous: Option<sys::CUcontext>,
    mode: Option<sys::CUstreamCaptureMode>,
    /// Current contexts and capture modes belong to the thread.
    _thread: std::marker::PhantomData<*const ()>,
}

impl Bound {
    /// Makes `context` current on this thread. Raw calls: cudarc's `bind_to_thread` would first return, and so swallow,
    /// an error that another call parked.
    pub(crate) fn enter(context: &CudaContext) -> Result<Bound> {
        let mut bound = Self::to_submit(context)?;
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges this thread's mode with the one in `mode`.
        check("cuThreadExchangeStreamCaptureMode", unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) })?;
        bound.mode = Some(mode);
        Ok(bound)
    }

    /// Has the context that is current now put back when this is dropped: for code that is not ours, in the middle of ours.
    #[cfg(feature = "safetensors")]
    pub(crate) fn keep() -> Result<Bound> {
        Driver::get()?;
        let mut current = std::ptr::null_mut();
        // SAFETY: the driver is loaded (above); the call writes one pointer.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        Ok(Bound { previous: Some(current), mode: None, _thread: std::marker::PhantomData })
    }

    /// As [`enter`](Bound::enter), in the thread's own capture mode: for submitting work, recording events, and asking
    /// whether a stream is captured.
    pub(crate) fn to_submit(context: &CudaContext) -> Result<Bound> {
        Driver::get()?;
        let wanted = context.cu_ctx();
        let mut current = std::ptr::null_mut();
        // SAFETY: the driver is loaded (above); the call writes one pointer.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        let previous = if current == wanted {
            None
        } else {
            // SAFETY: `context` keeps its CUcontext alive.
            check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(wanted) })?;
            Some(current)
        };
        Ok(Bound { previous, mode: None, _thread: std::marker::PhantomData })
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(mode) = &mut self.mode {
            // SAFETY: same thread (the type is not Send); a failure leaves the mode relaxed, which harms nothing of ours.
            let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(mode) };
        }
        if let Some(previous) = self.previous {
            // SAFETY: this context was current when we came; null means "none".
            let _ = unsafe { sys::cuCtxSetCurrent(previous) };
        }
    }
}
