//! Tickets: a transfer that runs, and the tensor that comes back from it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::TransferTensor;
use super::store::Store;
use crate::complete::Signal;
use crate::driver::{Pending, Way, check_not_forked};
use crate::element::Element;
use crate::error::{Error, Kind, Refused, Result};
use crate::trace;

/// A transfer under way. It owns the tensor, which comes back from [`wait`](Transfer::wait),
/// [`try_wait`](Transfer::try_wait) or `.await`.
///
/// Dropping or forgetting the ticket is fine: the copy goes on, and the memory it touches stays until it has run.
/// The future needs no particular runtime, does not block the executor, and may be polled and dropped anywhere.
#[must_use = "the tensor comes back from `wait`, `try_wait` or `.await`"]
pub struct Transfer<T: Element> {
    tensor: Option<TransferTensor<T>>,
    pending: Vec<Pending>,
    signal: Option<Arc<Signal>>,
}

/// Submits what brings the whole store to the device; what to wait for.
pub(super) fn start_to_device(store: &Store) -> Result<Vec<Pending>> {
    let device = store.need_device("to_device")?;
    let all = 0..store.bytes();
    if all.is_empty() {
        return Ok(Vec::new());
    }
    let region = store.bring(&all, &device.context().copy_stream(Way::Up)?)?;
    Ok(region.pending(&all, false))
}

/// Submits what brings the whole store to the host; what to wait for.
pub(super) fn start_to_host(store: &Store) -> Result<Vec<Pending>> {
    let all = 0..store.bytes();
    if all.is_empty() {
        return Ok(Vec::new());
    }
    let region = store.on_host(&all, false)?;
    Ok(region.pending(&all, false))
}

impl<T: Element> Transfer<T> {
    pub(super) fn new(tensor: TransferTensor<T>, pending: Vec<Pending>) -> Self {
        Self { tensor: Some(tensor), pending, signal: None }
    }

    /// The tensor, and what to wait for before its elements are looked at.
    pub(crate) fn into_parts(self) -> (TransferTensor<T>, Vec<Pending>) {
        (self.tensor.unwrap_or_else(TransferTensor::hollow), self.pending)
    }

    /// Whether the transfer has run, without blocking.
    ///
    /// # Errors
    /// The device faulted.
    pub fn is_complete(&mut self) -> Result<bool> {
        while let Some(last) = self.pending.last() {
            if !last.pollable() {
                // A forgotten guard of another thread's default stream, an address given to another stream: only blocking
                // tells, so the waiter does that.
                return match self.signal().result() {
                    Some(result) => result.map(|()| true),
                    None => Ok(false),
                };
            }
            if !last.poll()? {
                return Ok(false);
            }
            self.pending.pop();
        }
        Ok(true)
    }

    /// Blocks until the transfer has run.
    ///
    /// # Errors
    /// The device faulted; the tensor comes back, and what the host has of it can still be read where it was current.
    pub fn wait(mut self) -> Result<TransferTensor<T>, Refused<TransferTensor<T>>> {
        let _range = (!self.pending.is_empty()).then(|| trace::range(c"wait", self.bytes()));
        let waited = self.pending.iter().try_for_each(Pending::wait);
        self.finish(waited)
    }

    /// The tensor if the transfer has run, else the ticket again.
    ///
    /// # Errors
    /// [`Error::is_not_ready`] while it runs; the device faulted. The ticket comes back.
    pub fn try_wait(mut self) -> Result<TransferTensor<T>, Refused<Self>> {
        match self.is_complete() {
            Ok(true) => self.finish_or_back(),
            Ok(false) => Err(Refused { error: Error::new(Kind::NotReady), value: self }),
            Err(error) => Err(Refused { error, value: self }),
        }
    }

    /// Blocks until the transfer has run or `timeout` is over.
    ///
    /// # Errors
    /// As [`try_wait`](Transfer::try_wait).
    pub fn wait_timeout(mut self, timeout: Duration) -> Result<TransferTensor<T>, Refused<Self>> {
        let deadline = Instant::now().checked_add(timeout);
        let (mut pause, mut waits) = (Duration::from_micros(20), None);
        loop {
            match self.is_complete() {
                Ok(false) if deadline.is_none_or(|deadline| Instant::now() < deadline) => {
                    waits.get_or_insert_with(|| trace::range(c"wait", self.bytes()));
                    let left = deadline.map_or(pause, |deadline| deadline.saturating_duration_since(Instant::now()));
                    std::thread::sleep(pause.min(left));
                    pause = (pause * 2).min(Duration::from_millis(1));
                }
                _ => {
                    drop(waits);
                    return self.try_wait();
                }
            }
        }
    }

    fn finish(&mut self, waited: Result<()>) -> Result<TransferTensor<T>, Refused<TransferTensor<T>>> {
        match (self.tensor.take(), waited) {
            (Some(tensor), Ok(())) => Ok(tensor),
            (Some(tensor), Err(error)) => Err(Refused { error, value: tensor }),
            // Only after `poll` gave the tensor away and was called again.
            (None, _) => Err(Refused { error: polled_again(), value: TransferTensor::hollow() }),
        }
    }

    fn finish_or_back(mut self) -> Result<TransferTensor<T>, Refused<Self>> {
        match self.tensor.take() {
            Some(tensor) => Ok(tensor),
            None => Err(Refused { error: polled_again(), value: self }),
        }
    }

    fn bytes(&self) -> usize {
        self.tensor.as_ref().map_or(0, TransferTensor::bytes)
    }

    /// Asks the waiter to tell when all has passed.
    fn signal(&mut self) -> Arc<Signal> {
        if let Some(signal) = &self.signal {
            return signal.clone();
        }
        let (signal, bytes) = (Arc::new(Signal::new()), self.bytes());
        let told = signal.clone();
        let device = self.tensor.as_ref().and_then(|tensor| tensor.device_handle().cloned());
        let submitted = match device {
            Some(device) => {
                let then = move |result| {
                    let _range = trace::range(c"deliver", bytes);
                    told.set(result);
                };
                device.waiter().submit(self.pending.clone(), Box::new(then))
            }
            None => {
                told.set(Ok(()));
                Ok(())
            }
        };
        if let Err((error, _)) = submitted {
            signal.set(Err(error));
        }
        self.signal = Some(signal.clone());
        signal
    }
}

// Nothing in it is pinned.
impl<T: Element> Unpin for Transfer<T> {}

impl<T: Element> Future for Transfer<T> {
    type Output = Result<TransferTensor<T>, Refused<TransferTensor<T>>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if this.signal.is_some() {
            // In a forked child there is no thread that tells.
            if let Err(error) = check_not_forked() {
                return Poll::Ready(this.finish(Err(error)));
            }
        } else {
            match this.is_complete() {
                Ok(false) => {}
                done => return Poll::Ready(this.finish(done.map(|_| ()))),
            }
        }
        match this.signal().poll(context) {
            Poll::Ready(result) => Poll::Ready(this.finish(result)),
            Poll::Pending => Poll::Pending,
        }
    }
}

#[cold]
fn polled_again() -> Error {
    Error::unsupported("polling a transfer again", "it has already given its tensor back")
}

impl<T: Element> fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("tensor", &self.tensor).field("pending", &self.pending.len()).finish()
    }
}
