//! Something the device has yet to pass, in the forms in which it can be asked for.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, sys};

use super::call::{Bound, check};
use super::context::synchronize;
use super::event::Event;
use super::stream::{Stream, check_not_capturing};
use crate::complete::Signal;
use crate::error::Result;

/// What a wait waits for.
#[derive(Debug, Clone)]
pub(crate) enum Pending {
    /// A recorded point.
    Event(Arc<Event>),
    /// All that was submitted to a stream: no point was recorded (a forgotten guard, a record that failed).
    Stream(Stream),
    /// All that runs on a context: a pointer went to a stream that we do not know.
    Context(Arc<CudaContext>),
    /// The end of a capture: memory of a stream can not be freed while it is captured.
    Capture(Stream),
    /// What another thread does, which tells.
    Told(Arc<Signal>),
}

impl Pending {
    /// Whether it can be asked for without blocking, from any thread.
    pub(crate) fn pollable(&self) -> bool {
        match self {
            Pending::Event(_) | Pending::Told(_) => true,
            Pending::Stream(stream) | Pending::Capture(stream) => stream.reachable(),
            Pending::Context(_) => false,
        }
    }

    /// Whether it has passed; blocks where it is not [`pollable`](Pending::pollable).
    pub(crate) fn poll(&self) -> Result<bool> {
        match self {
            Pending::Event(event) => event.query(),
            Pending::Told(signal) => signal.result().map_or(Ok(false), |told| told.map(|()| true)),
            Pending::Stream(stream) if stream.reachable() => {
                let _bound = Bound::enter(stream.cuda().context())?;
                stream.check_not_capturing("waiting for a stream")?;
                // SAFETY: the handle is alive and its context current.
                match unsafe { sys::cuStreamQuery(stream.handle()) } {
                    sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
                    code => check("cuStreamQuery", code).map(|()| true),
                }
            }
            Pending::Capture(stream) => {
                let _bound = Bound::enter(stream.cuda().context())?;
                match check_not_capturing(stream.handle(), "freeing") {
                    Err(error) if error.is_capturing() => Ok(false),
                    result => result.map(|()| true),
                }
            }
            Pending::Stream(_) | Pending::Context(_) => self.wait().map(|()| true),
        }
    }

    /// Blocks until it has passed.
    pub(crate) fn wait(&self) -> Result<()> {
        match self {
            Pending::Event(event) => event.wait(),
            Pending::Stream(stream) => {
                {
                    let _bound = Bound::enter(stream.cuda().context())?;
                    stream.check_not_capturing("waiting for a stream")?;
                }
                stream.synchronize()
            }
            Pending::Context(context) => synchronize(context),
            Pending::Capture(_) => Ok(()),
            Pending::Told(signal) => loop {
                match signal.result() {
                    Some(told) => return told,
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            },
        }
    }
}
