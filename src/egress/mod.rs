//! Results of the device on their way to the host, to consumers, and out of the process.
//!
//! ```text
//! submit ─► gate (room?) ─► copies on a stream of ours ─► crew: one thread asks, any consumes, in order ─► ticket or outputs
//! ```
//!
//! An item is the source while it is copied (`source`), an [`Output`] that takes room until it is dropped, and a result, which is
//! given once: to its ticket or to the outputs of its sender. Every item that was taken goes that way to its end, also if its
//! copy fails, its consumer panics, its ticket is dropped or the pool is.
#![deny(unsafe_code)]

mod crew;
mod gate;
mod output;
mod outputs;
mod several;
mod shared;
mod source;
mod stats;
mod ticket;

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use output::Output;
pub use outputs::{Delivered, Outputs};
pub use several::Tagged;
pub use source::{Chunked, EgressSource};
pub use stats::{EgressHealth, EgressStats, Shutdown};
pub use ticket::Ticket;

use self::crew::Crew;
use self::gate::Gate;
use self::outputs::Channel;
use self::shared::{Consumer, Inside, Observer, Shared, delivering, must_not_wait};
use self::ticket::Spare;
use crate::complete::on_device_thread;
use crate::device::Device;
use crate::driver::check_not_forked;
use crate::driver::lane::{Lane, Lanes};
use crate::error::{Error, Kind, Refused, Result, quietly};
use crate::order::Order;
use crate::os::spawn;
use crate::pool::WhenFull;
use crate::trace;

/// What an error of one item means for the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OnError {
    /// Nothing: it is that item's.
    #[default]
    Continue,
    /// None of them is delivered any more, and none is taken: all end with [`Error::is_closed`].
    Stop,
}

/// Where an item is; for [`EgressPoolBuilder::observer`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Stage {
    /// It was taken.
    Submitted {
        /// Bytes of the item.
        bytes: u64,
    },
    /// It is on the host.
    Copied {
        /// Bytes of the item.
        bytes: u64,
    },
    /// It was consumed.
    Delivered,
    /// Its ticket was cancelled in time.
    Cancelled,
    /// It ended with an error.
    Failed {
        /// Which.
        error: Error,
    },
}

/// Brings results of the device to the host while it works on, and has them consumed: by a function on worker threads, by whoever
/// waits for a [`Ticket`], or one after another through [`Outputs`].
///
/// [`submit`](EgressPool::submit) never waits for the device. Results land in memory of the device's pinned pool, which they give back
/// when they are dropped; on machines where the device's memory is the host's, nothing is copied.
///
/// ```
/// # cuda_sim::install().unwrap();
/// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
/// # let stream = transfer_tensor::cudarc::driver::CudaContext::new(gpu.ordinal())?.new_stream()?;
/// use std::sync::Arc;
/// use transfer_tensor::{Device, EgressPool, HostTensor, Output, cudarc::driver::CudaSlice};
///
/// let device = Device::new(&stream)?;
/// let sums = EgressPool::builder(&device).workers(4).capacity(8).consumer(|step: Output<HostTensor<f32>>| {
///     step.iter().sum::<f32>() // on a worker; write it to a file, send it away
/// })?;
/// let mut tickets = Vec::new();
/// for step in 0..10 {
///     let result: CudaSlice<f32> = stream.clone_htod(&vec![step as f32; 1000])?; // a kernel's output
///     tickets.push(sums.submit(result)?);
/// }
/// let sums: Result<Vec<f32>, _> = tickets.into_iter().map(|ticket| ticket.wait()).collect();
/// assert_eq!(sums?[3], 3000.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// | | |
/// |---|---|
/// | no room | as [`when_full`](EgressPoolBuilder::when_full) says: wait (the default), wait no longer than, refuse. From inside a consumer: refuse, since it may be itself that has the room |
/// | an item larger than all room | an error at once; a [`Chunked`] slice comes through two chunks |
/// | order | of completion, or of submission. Slices from up to four streams do not hold each other up; what comes from one stream, and tensors, go one after another |
/// | the consumer panics | that item's error; the threads go on |
/// | the device faults | every item's error, promptly; later submits fail |
/// | a ticket is dropped | the item is consumed all the same |
/// | a ticket is cancelled | not consumed, if there was time; the copy runs to its end |
/// | [`shutdown`](EgressPool::shutdown) | nothing is taken any more; what is open is delivered, or told that it was not in time |
/// | the pool is dropped | as a shutdown without a deadline: it waits, and nothing is lost. Inside a consumer it does not wait; the threads finish what is open |
/// | in a forked child | what submits or waits says so ([`Error::is_forked`]), and so does [`health`](EgressPool::health); a shutdown does nothing, [`Outputs`] are at their end; nothing blocks. The items are the parent's |
pub struct EgressPool<S: EgressSource, R: Send + 'static = Output<<S as EgressSource>::Output>> {
    shared: Arc<Shared<S, R>>,
    threads: Vec<JoinHandle<()>>,
    workers: usize,
}

/// Makes an [`EgressPool`].
pub struct EgressPoolBuilder<'d> {
    device: &'d Device,
    workers: usize,
    awake: bool,
    items: usize,
    bytes: Option<u64>,
    order: Order,
    when_full: WhenFull,
    on_error: OnError,
    name: String,
    cpus: Option<Vec<usize>>,
    on_start: Option<Arc<dyn Fn(usize) + Send + Sync>>,
    observer: Option<Observer>,
}

impl EgressPool<crate::tensor::TransferTensor<u8>> {
    /// Says how the pool is to be.
    pub fn builder(device: &Device) -> EgressPoolBuilder<'_> {
        EgressPoolBuilder {
            device,
            workers: 1,
            awake: false,
            items: 64,
            bytes: None,
            order: Order::default(),
            when_full: WhenFull::Block,
            on_error: OnError::default(),
            name: "transfer-out".into(),
            cpus: None,
            on_start: None,
            observer: None,
        }
    }
}

impl EgressPoolBuilder<'_> {
    /// How many consumers run at a time; 1, if not said. The pool has one thread more, so that copies are brought in while all
    /// of them are busy; with 0 it has that one only, which consumes too.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Keeps a thread awake, which asks for copies and consumes them without ever having to wake up. It takes a core for as long as
    /// the pool lives.
    pub fn low_latency(mut self, awake: bool) -> Self {
        self.awake = awake;
        self
    }

    /// How many items there may be at a time, under way or kept by whoever got them; 64, if not said, and at least 1.
    pub fn capacity(mut self, items: usize) -> Self {
        self.items = items.max(1);
        self
    }

    /// How many bytes these may have together; the budget of the device's pinned pool, if not said.
    pub fn budget(mut self, bytes: u64) -> Self {
        self.bytes = Some(bytes);
        self
    }

    /// In which order items come to the consumer. With several workers they begin in that order.
    pub fn order(mut self, order: Order) -> Self {
        self.order = order;
        self
    }

    /// What [`submit`](EgressPool::submit) does where there is no room; [`WhenFull::Block`], if not said.
    pub fn when_full(mut self, when_full: WhenFull) -> Self {
        self.when_full = when_full;
        self
    }

    /// What an error of one item means for the others.
    pub fn on_error(mut self, on_error: OnError) -> Self {
        self.on_error = on_error;
        self
    }

    /// The name of the worker threads, which a number follows; `transfer-out`, if not said.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// The CPUs that the pool's threads run on, by the system's numbers: those of the GPU's NUMA node, say. On Linux only.
    pub fn cpus(mut self, cpus: impl IntoIterator<Item = usize>) -> Self {
        self.cpus = Some(cpus.into_iter().collect());
        self
    }

    /// Runs at the beginning of each worker thread, with its number: to set its priority, say.
    pub fn on_start(mut self, start: impl Fn(usize) + Send + Sync + 'static) -> Self {
        self.on_start = Some(Arc::new(start));
        self
    }

    /// Is told where each item is, by number: for metrics. On threads of the pool and of who submits; it should be quick.
    pub fn observer(mut self, observer: impl Fn(u64, Stage) + Send + Sync + 'static) -> Self {
        self.observer = Some(Box::new(observer));
        self
    }

    /// A pool whose consumer is `consumer`, on the workers; tickets give what it returns.
    ///
    /// # Errors
    /// A thread can not be started, or bound to its CPUs.
    pub fn consumer<S: EgressSource, R: Send + 'static>(
        self,
        consumer: impl Fn(Output<S::Output>) -> R + Send + Sync + 'static,
    ) -> Result<EgressPool<S, R>> {
        self.build(Box::new(move |output: Output<S::Output>| {
            let _range = trace::range(c"egress deliver", output.bytes());
            consumer(output)
        }))
    }

    /// A pool without a consumer of its own, and with one thread: tickets and [`Outputs`] give the outputs themselves.
    ///
    /// # Errors
    /// The thread can not be started, or bound to its CPUs.
    pub fn tickets<S: EgressSource>(mut self) -> Result<EgressPool<S>> {
        self.workers = 0;
        self.build(Box::new(|output: Output<S::Output>| {
            let _range = trace::range(c"egress deliver", output.bytes());
            output
        }))
    }

    fn build<S: EgressSource, R: Send + 'static>(self, consumer: Consumer<S::Output, R>) -> Result<EgressPool<S, R>> {
        let bytes = self.bytes.unwrap_or_else(|| self.device.pool().budget());
        let shared = Shared {
            device: self.device.clone(),
            gate: Arc::new(Gate::new(self.items, bytes)),
            lanes: Lanes::new(self.device.context()),
            flights: std::array::from_fn(|_| Lane::new()),
            crew: Crew::new(self.order, self.workers, self.awake),
            consumer,
            observer: self.observer,
            when_full: self.when_full,
            on_error: self.on_error,
            state: parking_lot::Mutex::default(),
            // Tickets may be kept longer than their items take room.
            spare: Spare::new(self.items.saturating_mul(2).saturating_add(64)),
        };
        let mut pool = EgressPool { shared: Arc::new(shared), threads: Vec::new(), workers: self.workers };
        for number in 0..=self.workers {
            let (shared, on_start) = (pool.shared.clone(), self.on_start.clone());
            let work = move || {
                trace::name_thread();
                if let Some(start) = on_start {
                    let _inside = Inside::start();
                    let _ = quietly(|| start(number));
                    let _ = quietly(|| drop(start));
                }
                shared.work();
            };
            // Those that run end with the pool, which is dropped here.
            pool.threads.push(spawn(format!("{}-{number}", self.name), self.cpus.as_deref(), work)?);
        }
        Ok(pool)
    }
}

impl<S: EgressSource, R: Send + 'static> EgressPool<S, R> {
    /// Takes a source, whose copies run on streams of the crate's own, so that the source's stream goes on meanwhile. For room it waits as
    /// [`when_full`](EgressPoolBuilder::when_full) says. Does not wait for the device, except for two kinds of tensors: one whose host side is ordinary
    /// memory (made from a `Vec`, say), which is copied there and then, and one whose address was given to a stream that the crate does not know. A
    /// slice is copied by the pool's threads where one is awake (in a [`low_latency`](EgressPoolBuilder::low_latency) pool: where other items are under
    /// way), and by the device's own thread, to ordinary memory, where no page-locked memory is to be had; what the driver refuses then is the item's error.
    ///
    /// # Ordering
    /// See [`EgressSource`].
    ///
    /// # Errors
    /// There is no room ([`Error::is_full`]) or never will be; the pool is closed; a stream is being captured; the device faulted, or
    /// refused; there is no page-locked memory, and the device's pool is strict. The source comes back, except where a fault keeps its memory.
    pub fn submit(&self, source: S) -> Result<Ticket<R>, Refused<Option<S>>> {
        self.shared.submit(source, None, || None)
    }

    /// As [`submit`](Self::submit), with another answer to a lack of room.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn submit_or(&self, source: S, when_full: WhenFull) -> Result<Ticket<R>, Refused<Option<S>>> {
        self.shared.submit(source, Some(when_full), || None)
    }

    /// A way in whose results come out one after another, instead of through tickets. Each sender has outputs of its own.
    pub fn channel(&self, order: Order) -> (EgressSender<S, R>, Outputs<R>) {
        let channel = Channel::new(order);
        (EgressSender { shared: self.shared.clone(), channel: channel.clone() }, Outputs::new(channel))
    }

    /// Blocks until all that was submitted before is delivered, or until `timeout` is over; what others submit meanwhile does not
    /// count. From inside a consumer its own item does not count either. In a task's waker, which may run on a thread of the device's, it does not
    /// block.
    ///
    /// # Errors
    /// [`Error::is_not_ready`]: the time is over. The process is a forked child, to which nothing is delivered.
    pub fn flush(&self, timeout: Duration) -> Result<()> {
        self.wait(timeout, Gate::flush)
    }

    /// Blocks until nothing is open, or until `timeout` is over. As [`flush`](Self::flush), but what others submit meanwhile counts:
    /// while they go on, it may never be so.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn drain(&self, timeout: Duration) -> Result<()> {
        self.wait(timeout, Gate::wait_delivered)
    }

    fn wait(&self, timeout: Duration, until: impl FnOnce(&Gate, usize, Option<Instant>) -> bool) -> Result<()> {
        check_not_forked()?;
        let deadline = deadline(timeout);
        match until(&self.shared.gate, delivering(&self.shared.gate).len(), deadline) {
            true => Ok(()),
            false => Err(Error::new(Kind::NotReady)),
        }
    }

    /// Takes nothing any more, and delivers what is open, for no longer than `deadline`. What is not delivered by then is told so; its
    /// copies run to their end, and a consumer that is at work goes on, without anybody waiting. Again: the same for what is left. In a task's
    /// waker, which may run on a thread of the device's, the deadline is now; in a forked child nothing is done.
    pub fn shutdown(&self, deadline: Duration) -> Shutdown {
        if check_not_forked().is_err() {
            return Shutdown { delivered: 0, failed: 0, abandoned: 0 };
        }
        let before = self.shared.stats();
        self.shared.gate.close(Error::new(Kind::Closed { why: "the pool was shut down".into() }));
        let deadline = self::deadline(deadline);
        let in_time = self.shared.gate.wait_delivered(delivering(&self.shared.gate).len(), deadline);
        let abandoned = if in_time { 0 } else { self.shared.abandon() };
        let after = self.shared.stats();
        Shutdown {
            delivered: after.delivered - before.delivered,
            failed: after.failed + after.cancelled - before.failed - before.cancelled,
            abandoned,
        }
    }

    /// How it is.
    pub fn health(&self) -> EgressHealth {
        self.shared.health(self.workers)
    }

    /// What it has done so far.
    pub fn stats(&self) -> EgressStats {
        self.shared.stats()
    }
}

/// When a wait of so long is over; at once on a thread of the device's, for which items may wait.
fn deadline(timeout: Duration) -> Option<Instant> {
    Instant::now().checked_add(if on_device_thread() { Duration::ZERO } else { timeout })
}

impl<S: EgressSource, R: Send + 'static> Drop for EgressPool<S, R> {
    fn drop(&mut self) {
        // A forked child has neither the threads nor, perhaps, a free lock.
        if check_not_forked().is_err() {
            return;
        }
        self.shared.gate.close(Error::new(Kind::Closed { why: "the pool was dropped".into() }));
        if must_not_wait() {
            if self.shared.gate.wait_delivered(0, Some(Instant::now())) {
                self.shared.crew.close();
                self.shared.spare.close();
                return;
            }
            // This may be a worker, and even the item that the others wait for. They end when all is delivered.
            let shared = self.shared.clone();
            let end = move || {
                trace::name_thread();
                shared.gate.wait_delivered(0, None);
                shared.crew.close();
                shared.spare.close();
            };
            // Without a thread the workers stay asleep: nothing is lost but they.
            let _ = std::thread::Builder::new().name("transfer-out-end".into()).spawn(end);
            return;
        }
        self.shared.gate.wait_delivered(0, None);
        self.shared.crew.close();
        self.shared.spare.close();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl<S: EgressSource, R: Send + 'static> fmt::Debug for EgressPool<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EgressPool")
            .field("stats", &self.stats())
            .field("health", &self.health())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for EgressPoolBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EgressPoolBuilder")
            .field("workers", &self.workers)
            .field("capacity", &self.items)
            .field("budget", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// Submits to an [`EgressPool`], with the results going to the [`Outputs`] that were made with it. They end when this is dropped and all
/// is delivered. It may outlive the pool, which then takes nothing.
pub struct EgressSender<S: EgressSource, R: Send + 'static> {
    shared: Arc<Shared<S, R>>,
    channel: Arc<Channel<R>>,
}

impl<S: EgressSource, R: Send + 'static> EgressSender<S, R> {
    /// As [`EgressPool::submit`]; the item's number among those of this sender.
    ///
    /// # Errors
    /// As [`EgressPool::submit`]; such an item does not come out.
    pub fn submit(&self, source: S) -> Result<u64, Refused<Option<S>>> {
        let mut sent = 0;
        let ticket = self.shared.submit(source, None, || {
            sent = self.channel.send();
            Some((self.channel.clone(), sent))
        })?;
        drop(ticket);
        Ok(sent)
    }
}

impl<S: EgressSource, R: Send + 'static> Drop for EgressSender<S, R> {
    fn drop(&mut self) {
        self.channel.end();
    }
}

impl<S: EgressSource, R: Send + 'static> fmt::Debug for EgressSender<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EgressSender").finish_non_exhaustive()
    }
}
