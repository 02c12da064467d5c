//! Copies of memory that is handed over, done in the background.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::task::{Context as TaskContext, Poll};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaSlice, CudaStream, DeviceSlice};
use parking_lot::{Condvar, Mutex};

use crate::complete::{Job, Signal};
use crate::device::Device;
use crate::driver::memory::{adopt_slice, alloc_device, free_slice};
use crate::driver::{Context, Event, Stream, Way, check_not_forked};
use crate::element::{Element, bytes_of};
use crate::error::{Error, Kind, Refused, Result};
use crate::trace;

/// The host's elements, and the slice of the device that holds the same.
pub type BothEnds<T> = (Vec<T>, CudaSlice<T>);

/// A copy in the background. It owns both ends, which come back from [`wait`](Copying::wait), [`try_wait`](Copying::try_wait)
/// or `.await` on any runtime.
///
/// Dropping or forgetting it is fine: the copy goes on, and both ends stay until it has run.
#[must_use = "both ends come back from `wait`, `try_wait` or `.await`"]
pub struct Copying<T: Element> {
    shared: Arc<Shared<T>>,
}

struct Shared<T: Element> {
    ends: Mutex<Option<Result<Ends<T>>>>,
    done: Condvar,
    signal: Signal,
    bytes: trace::Bytes,
}

struct Ends<T: Element> {
    host: Vec<T>,
    device: Held<T>,
}

/// A slice that is dropped with its context current.
struct Held<T: Element> {
    slice: Option<CudaSlice<T>>,
    context: Arc<Context>,
}

impl<T: Element> Held<T> {
    /// Gives it up for ever: the device may still be at it.
    fn leak(mut self) {
        std::mem::forget(self.slice.take());
        self.context.count_leak();
    }
}

impl<T: Element> Drop for Held<T> {
    fn drop(&mut self) {
        if let Some(slice) = self.slice.take() {
            free_slice(&self.context, slice);
        }
    }
}

/// Tells the ticket, also if the job is never run.
struct Teller<T: Element>(Option<Arc<Shared<T>>>);

impl<T: Element> Teller<T> {
    fn tell(&mut self, ends: Result<Ends<T>>) {
        if let Some(shared) = self.0.take() {
            let told = ends.as_ref().map(drop).map_err(Error::clone);
            *shared.ends.lock() = Some(ends);
            shared.done.notify_all();
            shared.signal.set(told);
        }
    }
}

impl<T: Element> Drop for Teller<T> {
    fn drop(&mut self) {
        self.tell(Err(Error::new(Kind::Thread { what: "transfer-stage did not get to the copy".into() })));
    }
}

impl Device {
    /// Copies `source` to fresh device memory in the background, by the device's own thread and those that help with copies.
    ///
    /// ```
    /// # cuda_sim::install().unwrap();
    /// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
    /// # let stream = cudarc::driver::CudaContext::new(gpu.ordinal())?.new_stream()?;
    /// let device = transfer_tensor::Device::new(&stream)?;
    /// let copying = device.upload_owned(&stream, vec![7u8; 1 << 20])?;
    /// // … other work of the CPU …
    /// let (_, slice) = copying.wait()?; // or `.await`
    /// let (values, _slice) = device.download_owned(&stream, slice)?.wait()?;
    /// assert_eq!(values, vec![7; 1 << 20]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Ordering
    /// Does not block. The copy comes after what is on `stream` now; when both ends come back it has run.
    ///
    /// # Errors
    /// As [`upload_new`](Device::upload_new); the source comes back. What fails later comes out of the wait.
    pub fn upload_owned<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        source: Vec<T>,
    ) -> Result<Copying<T>, Refused<Vec<T>>> {
        let prepare = || {
            let queue = self.queue(stream, stream, "upload_owned")?;
            if source.is_empty() {
                return Err(Error::unsupported("an empty CudaSlice", "the driver allocates no 0 bytes"));
            }
            let mut slice = alloc_device::<T>(self.context(), &queue, source.len())?;
            Ok((self.after(&queue, &mut slice)?, slice, self.background().queue()?))
        };
        match prepare() {
            Ok((start, slice, jobs)) => Ok(self.copy_owned(&jobs, Way::Up, start, source, slice)),
            Err(error) => Err(Refused { error, value: source }),
        }
    }

    /// Copies `source` to a new `Vec` in the background.
    ///
    /// # Ordering
    /// As [`upload_owned`](Device::upload_owned); also after what cudarc knows to be running on the slice.
    ///
    /// # Errors
    /// As [`download_vec`](Device::download_vec); the slice comes back. What fails later comes out of the wait.
    pub fn download_owned<T: Element>(
        &self,
        stream: &Arc<CudaStream>,
        mut source: CudaSlice<T>,
    ) -> Result<Copying<T>, Refused<CudaSlice<T>>> {
        let mut prepare = || {
            let queue = self.queue(stream, source.stream(), "download_owned")?;
            Ok((self.after(&queue, &mut source)?, self.background().queue()?))
        };
        match prepare() {
            Ok((start, jobs)) => Ok(self.copy_owned(&jobs, Way::Down, start, Vec::new(), source)),
            Err(error) => Err(Refused { error, value: source }),
        }
    }

    /// The point of the caller's stream, as this thread sees it, after the uses of the slice.
    fn after<T: Element>(&self, queue: &Stream, slice: &mut CudaSlice<T>) -> Result<(Event, u64)> {
        let _bound = self.context().enter()?;
        let address = if slice.num_bytes() > 0 { adopt_slice(self.context(), slice, queue)? } else { 0 };
        Ok((Event::record(self.context(), queue)?, address))
    }

    fn copy_owned<T: Element>(
        &self,
        jobs: &Sender<Job>,
        way: Way,
        (start, address): (Event, u64),
        host: Vec<T>,
        slice: CudaSlice<T>,
    ) -> Copying<T> {
        let bytes = trace::Bytes::from(slice.num_bytes());
        let shared = Arc::new(Shared { ends: Mutex::new(None), done: Condvar::new(), signal: Signal::new(), bytes });
        let (mut teller, device) = (Teller(Some(shared.clone())), self.clone());
        let held = Held { slice: Some(slice), context: self.context().clone() };
        // A job that can not be sent is dropped, and its teller tells.
        let _ = jobs.send(Box::new(move || teller.tell(device.run_owned(way, &start, address, host, held))));
        Copying { shared }
    }

    /// On the device's own thread.
    fn run_owned<T: Element>(
        &self,
        way: Way,
        start: &Event,
        address: u64,
        host: Vec<T>,
        device: Held<T>,
    ) -> Result<Ends<T>> {
        let len = device.slice.as_ref().map_or(0, DeviceSlice::len);
        if len == 0 {
            return Ok(Ends { host, device });
        }
        let copied = self.on_copy_stream(way, len * size_of::<T>(), [start], |lane| match way {
            Way::Up => {
                let bytes = bytes_of(&host);
                // SAFETY: both ends are as long and owned here, and the lane comes after the slice's uses.
                unsafe { self.copy_up(address, bytes.as_ptr(), bytes.len(), lane) }.map(|()| host)
            }
            // SAFETY: as above.
            Way::Down => unsafe { self.download_from(address, len, lane) },
        });
        match copied {
            Ok((copied, Ok(()))) => copied.map(|host| Ends { host, device }),
            Ok((copied, Err(error))) => {
                device.leak();
                copied.and(Err(error))
            }
            // Nothing was submitted.
            Err(error) => Err(error),
        }
    }

    /// Does a copy of so many bytes on a stream of ours, after these points: what became of it, and whether it is known that it has run.
    /// Blocks until that.
    ///
    /// # Errors
    /// Nothing was submitted.
    pub(super) fn on_copy_stream<'e, R>(
        &self,
        way: Way,
        bytes: usize,
        after: impl IntoIterator<Item = &'e Event>,
        copy: impl FnOnce(&Stream) -> Result<R>,
    ) -> Result<(Result<R>, Result<()>)> {
        let context = self.context();
        let lane = context.copy_stream(way)?;
        let _range = trace::range(way.copies(), bytes);
        let _bound = context.to_submit()?;
        for event in after {
            lane.wait_for(event)?;
        }
        let copied = copy(&lane);
        // Nothing runs on the source or the target then, whatever became of the copy.
        let _range = trace::range(c"wait", bytes);
        let idle = Event::record(context, &lane).and_then(|event| event.wait());
        Ok((copied, idle.or_else(|_| lane.synchronize())))
    }
}

impl<T: Element> Copying<T> {
    /// Whether it is over, without blocking.
    pub fn is_complete(&self) -> bool {
        check_not_forked().is_ok() && self.shared.ends.lock().is_some()
    }

    /// Blocks until the copy has run.
    ///
    /// # Errors
    /// The device faulted, there was no host memory, the driver refused a call, or (`bool`) a byte is no value of the type. The process is a
    /// forked child, in which nothing is copied.
    pub fn wait(self) -> Result<BothEnds<T>> {
        check_not_forked()?;
        let mut ends = self.shared.ends.lock();
        let mut waits = None;
        while ends.is_none() {
            waits.get_or_insert_with(|| trace::range(c"wait", self.shared.bytes));
            self.shared.done.wait(&mut ends);
        }
        given(ends.take())
    }

    /// Both ends, if the copy has run, else the ticket again.
    ///
    /// # Errors
    /// [`Error::is_not_ready`] while it runs, and the ticket comes back; as [`wait`](Copying::wait).
    pub fn try_wait(self) -> Result<BothEnds<T>, Refused<Option<Self>>> {
        self.wait_timeout(Duration::ZERO)
    }

    /// Blocks until the copy has run or `timeout` is over.
    ///
    /// # Errors
    /// As [`try_wait`](Copying::try_wait).
    pub fn wait_timeout(self, timeout: Duration) -> Result<BothEnds<T>, Refused<Option<Self>>> {
        if let Err(error) = check_not_forked() {
            return Err(Refused { error, value: Some(self) });
        }
        let deadline = Instant::now().checked_add(timeout);
        let mut ends = self.shared.ends.lock();
        let mut waits = None;
        while ends.is_none() {
            waits.get_or_insert_with(|| trace::range(c"wait", self.shared.bytes));
            let over = match deadline {
                Some(deadline) => self.shared.done.wait_until(&mut ends, deadline).timed_out(),
                None => {
                    self.shared.done.wait(&mut ends);
                    false
                }
            };
            if over && ends.is_none() {
                drop(ends);
                return Err(Refused { error: Error::new(Kind::NotReady), value: Some(self) });
            }
        }
        given(ends.take()).map_err(|error| Refused { error, value: None })
    }
}

fn given<T: Element>(ends: Option<Result<Ends<T>>>) -> Result<BothEnds<T>> {
    match ends {
        Some(Ok(Ends { host, mut device })) => match device.slice.take() {
            Some(slice) => Ok((host, slice)),
            None => Err(polled_again()),
        },
        Some(Err(error)) => Err(error),
        None => Err(polled_again()),
    }
}

impl<T: Element> Unpin for Copying<T> {}

impl<T: Element> Future for Copying<T> {
    type Output = Result<BothEnds<T>>;

    fn poll(self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<Self::Output> {
        check_not_forked()?;
        self.shared.signal.poll(context).map(|_told| given(self.shared.ends.lock().take()))
    }
}

#[cold]
fn polled_again() -> Error {
    Error::unsupported("polling a copy again", "it has already given its ends back")
}

impl<T: Element> fmt::Debug for Copying<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copying").field("complete", &self.is_complete()).finish()
    }
}
