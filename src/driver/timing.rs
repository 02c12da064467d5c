//! How long a stream takes between two points, on the device's own clock.

use std::sync::Arc;

use cudarc::driver::sys;

use super::call::check;
use super::context::Context;
use super::load::Driver;
use super::stream::Stream;
use crate::error::{Error, Result};

/// The signature under the plain name, which drivers keep; cudarc binds that of its level.
type ElapsedFn = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// Two points of a stream, to be recorded again and again.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    elapsed: ElapsedFn,
    points: [TimedEvent; 2],
}

#[derive(Debug)]
struct TimedEvent {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver's event functions may be called from any thread.
unsafe impl Send for TimedEvent {}
// SAFETY: as above.
unsafe impl Sync for TimedEvent {}

impl TimedEvent {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let _bound = context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: the context is current; the call writes one handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut raw, flags) })?;
        Ok(Self { raw, context: context.clone() })
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        if let Ok(_bound) = self.context.enter() {
            // SAFETY: ours, and nobody else has the handle.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

impl Stopwatch {
    /// # Errors
    /// The driver does not tell times, or refused an event.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self> {
        // SAFETY: the signature of the function's first version.
        let elapsed: ElapsedFn = unsafe { Driver::get()?.optional("cuEventElapsedTime") }
            .ok_or_else(|| Error::unsupported("timing", "the driver has no cuEventElapsedTime"))?;
        Ok(Self { elapsed, points: [TimedEvent::new(context)?, TimedEvent::new(context)?] })
    }

    /// The context is current.
    pub(crate) fn start(&self, stream: &Stream) -> Result<()> {
        self.points[0].record(stream)
    }

    /// The context is current.
    pub(crate) fn stop(&self, stream: &Stream) -> Result<()> {
        self.points[1].record(stream)
    }

    /// Seconds between the two, once the stream has passed them.
    ///
    /// # Errors
    /// It has not, or they were not recorded.
    pub(crate) fn seconds(&self) -> Result<f64> {
        let _bound = self.points[0].context.to_submit()?;
        let mut milliseconds = 0f32;
        // SAFETY: both events were recorded; the call writes one float.
        let code = unsafe { (self.elapsed)(&mut milliseconds, self.points[0].raw, self.points[1].raw) };
        check("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl TimedEvent {
    fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles are alive and of the current context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.handle()) })
    }
}
