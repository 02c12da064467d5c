//! One pool of the interface's: an `EgressPool` with a queue, the tags of what is in it, and the loans.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use transfer_tensor::cudarc::driver::CudaContext;
use transfer_tensor::{
    Detector, Device, EgressPool, EgressSender, HostTensor, Order, Output, Outputs, PoolOptions, Refused, Shutdown,
    TransferTensor, WhenFull,
};

use super::BEGUN;
use super::calls::timeout;
use super::code::{Code, Failure};
use super::loan::{Loans, Release};
use super::producer::{Before, Producer};
use super::types::{TT_ORDER_COMPLETION, TT_ORDER_SUBMISSION, TtOptions, TtStats};

pub(crate) type Landed = Output<HostTensor<u8>>;
type Source = TransferTensor<u8>;

/// What `next` gives.
pub(crate) enum Next {
    Output { tag: u64, value: Landed },
    Failed { tag: u64, failure: Failure },
}

pub(crate) struct Pool {
    /// `None` once it is shut down.
    sender: Mutex<Option<Arc<EgressSender<Source, Landed>>>>,
    /// Who has it waits for the next one; the others for him.
    outputs: Mutex<Outputs<Landed>>,
    pool: EgressPool<Source>,
    tags: Tags,
    loans: Arc<Loans>,
    producer: Producer,
    device: Device,
}

/// The tags of what was taken, by its number among the sender's.
#[derive(Default)]
struct Tags {
    of: Mutex<HashMap<u64, u64>>,
    put: Condvar,
}

impl Tags {
    fn put(&self, number: u64, tag: u64) {
        self.of.lock().insert(number, tag);
        self.put.notify_all();
    }

    /// The item may be there before its `submit` has said which number it has, which it does next.
    fn take(&self, number: u64) -> u64 {
        let mut of = self.of.lock();
        loop {
            if let Some(tag) = of.remove(&number) {
                return tag;
            }
            self.put.wait(&mut of);
        }
    }
}

impl Pool {
    pub(crate) fn open(options: &TtOptions) -> Result<Self, Failure> {
        let order = match options.order {
            TT_ORDER_COMPLETION => Order::Completion,
            TT_ORDER_SUBMISSION => Order::Submission,
            other => return Err(Failure::new(Code::Invalid, format!("order {other} is neither 0 nor 1"))),
        };
        let (ordinal, devices) = (options.device as usize, Detector::device_count()?);
        if ordinal >= devices {
            return Err(Failure::new(
                Code::NoDevice,
                format!("there is no device {ordinal}: the driver sees {devices}"),
            ));
        }
        let _before = Before::now();
        // The primary context, which the CUDA runtime uses too: addresses and streams are of the same one.
        let context = CudaContext::new(ordinal)
            .map_err(|error| Failure::new(Code::NoDevice, format!("device {ordinal}: {:?}", error.0)))?;
        let producer = Producer::new(&context)?;
        let device = Device::builder(producer.stream()).pool(pinned(options.budget)).build()?;
        let when_full = match options.room_timeout_ms {
            0 => WhenFull::Refuse,
            ms => WhenFull::Wait(timeout(ms)),
        };
        let mut builder = EgressPool::builder(&device).order(order).when_full(when_full).name("tt-egress");
        if options.capacity > 0 {
            builder = builder.capacity(options.capacity as usize);
        }
        if options.budget > 0 {
            builder = builder.budget(options.budget);
        }
        let pool = match options.workers {
            0 => builder.tickets()?,
            workers => builder.workers(workers as usize).consumer(std::convert::identity)?,
        };
        let (sender, outputs) = pool.channel(order);
        Ok(Self {
            sender: Mutex::new(Some(Arc::new(sender))),
            outputs: Mutex::new(outputs),
            pool,
            tags: Tags::default(),
            loans: Arc::default(),
            producer,
            device,
        })
    }

    /// # Safety
    /// As `tt_egress_submit`.
    pub(crate) unsafe fn submit(
        &self,
        data: u64,
        bytes: u64,
        stream: u64,
        tag: u64,
        release: Release,
    ) -> Result<(), Failure> {
        if data == 0 || bytes == 0 {
            return Err(Failure::new(Code::Invalid, format!("{bytes} bytes at {data:#x}: nothing to copy")));
        }
        if isize::try_from(bytes).is_err() {
            return Err(Failure::new(Code::TooLarge, format!("{bytes} bytes: no memory is as large")));
        }
        let closed = || Failure::new(Code::Closed, "nothing is taken any more: the pool was shut down");
        let sender = self.sender.lock().clone().ok_or_else(closed)?;
        // SAFETY: the caller's.
        unsafe { self.producer.follow(stream)? };
        let loan = self.loans.lend(release);
        let number = loan.number();
        // SAFETY: the caller's: the memory stays until the loan is dropped. What was given to his stream is ordered
        // before the device's own, since that waits for it.
        let tensor = unsafe { self.device.tensor().from_raw_device::<u8>(data, [bytes as usize], loan) };
        let tensor = tensor.inspect_err(|_| {
            self.loans.refused(number, None);
        })?;
        match sender.submit(tensor) {
            Ok(sent) => {
                self.tags.put(sent, tag);
                self.loans.taken(number);
                Ok(())
            }
            Err(Refused { error, value }) => {
                drop(value);
                // The tensor is the pool's device's, and sound: what is invalid is its size.
                let too_large = error.is_invalid_input();
                // Only the room was asked for; or the device is lost, and with it whatever it was at.
                let begun = !(too_large || error.is_full() || error.is_closed() || error.is_fault());
                if !self.loans.refused(number, begun.then_some(BEGUN)) {
                    let text = format!("{error}; and the device is still at its memory");
                    return Err(Failure::new(Code::InUse, text));
                }
                let failure = Failure::from(error);
                Err(if too_large { Failure { code: Code::TooLarge, ..failure } } else { failure })
            }
        }
    }

    pub(crate) fn next(&self, timeout: Duration) -> Result<Next, Failure> {
        let start = Instant::now();
        let nothing = || Failure::new(Code::Timeout, "nothing has come in time");
        let mut outputs = self.outputs.try_lock_for(timeout).ok_or_else(nothing)?;
        let left = timeout.saturating_sub(start.elapsed());
        let delivered = outputs.next_timeout(left);
        let delivered = delivered.map_err(|error| if error.is_not_ready() { nothing() } else { error.into() })?;
        drop(outputs);
        let Some(delivered) = delivered else {
            return Err(Failure::new(Code::End, "the pool was shut down, and all was given"));
        };
        let tag = self.tags.take(delivered.number);
        match delivered.result {
            Ok(value) => Ok(Next::Output { tag, value }),
            Err(error) => {
                self.after(error.is_fault());
                Ok(Next::Failed { tag, failure: error.into() })
            }
        }
    }

    pub(crate) fn drain(&self, timeout: Duration) -> Result<(), Failure> {
        let late = || Failure::new(Code::Timeout, "not all was delivered in time");
        self.pool.drain(timeout).map_err(|error| if error.is_not_ready() { late() } else { error.into() })
    }

    pub(crate) fn shutdown(&self, deadline: Duration) -> Shutdown {
        // With the last that submits, it ends the outputs.
        drop(self.sender.lock().take());
        let done = self.pool.shutdown(deadline);
        self.after(self.pool.health().faulted);
        done
    }

    /// Shuts down, and waits until the device is done with everything.
    pub(crate) fn end(&self, timeout: Duration) -> Result<(), Failure> {
        let start = Instant::now();
        self.shutdown(timeout);
        self.drain(timeout.saturating_sub(start.elapsed()))?;
        let busy = || Failure::new(Code::Timeout, "the device is still at memory that it was lent");
        let drained = self.device.drain(timeout.saturating_sub(start.elapsed()));
        drained.map_err(|error| if error.is_not_ready() { busy() } else { error.into() })?;
        self.loans.end_all();
        Ok(())
    }

    pub(crate) fn stats(&self) -> TtStats {
        let (stats, health, (lent, released)) = (self.pool.stats(), self.pool.health(), self.loans.counts());
        TtStats {
            submitted: stats.submitted,
            in_flight: stats.in_flight,
            delivered: stats.delivered,
            failed: stats.failed,
            bytes: stats.bytes,
            kept: stats.kept,
            kept_bytes: stats.kept_bytes,
            copying_ns: u64::try_from(stats.copying_time.as_nanos()).unwrap_or(u64::MAX),
            lent,
            released,
            faulted: health.faulted.into(),
            closed: health.closed.into(),
        }
    }

    /// After a fault the library keeps what the device may have had, for ever; the caller gets it back.
    fn after(&self, fault: bool) {
        if fault {
            self.loans.end_all();
        }
    }
}

/// Page-locked memory for all that the budget lets in (blocks may be an eighth larger), which stays when it is idle.
fn pinned(budget: u64) -> PoolOptions {
    match budget {
        0 => PoolOptions::new(),
        bytes => {
            let blocks = bytes.saturating_add(bytes / 8).saturating_add(64 << 20);
            PoolOptions::new().budget(blocks).keep_idle(blocks)
        }
    }
}
