//! A child of a fork has none of the threads: who waits for one there is told, and what is dropped there waits for none. (What else is
//! refused there stands with what refuses it.)

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};
use std::time::Duration;

use transfer_tensor::cudarc::driver::CudaSlice;
use transfer_tensor::{EgressPool, HostTensor, IngressError, IngressPrefetcher, Order, Output, TransferTensor};

use crate::egress::{LEN, builder, slice};
use crate::forked::in_a_forked_child;
use crate::pool::until;
use crate::support::{Gpu, H200, HANG, poll_once};

/// What `run` says in a child, to which `item` belongs there; the parent has it afterwards as if nothing had been.
#[track_caller]
fn in_a_child<V>(what: &str, item: V, run: impl Fn(V) -> bool) -> V {
    let mut item = Some(item);
    let status = in_a_forked_child(&mut || run(item.take().unwrap()));
    assert_eq!(status, 0, "{what}: wrong, or (14) it hangs");
    item.unwrap()
}

#[track_caller]
fn dropped_in_a_child<V>(what: &str, item: V) -> V {
    in_a_child(what, item, |item| {
        drop(item);
        true
    })
}

#[test]
fn who_waits_for_an_item_is_told() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
    let kept = pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap();
    let (sender, outputs) = pool.channel(Order::Submission);
    let sources = [1, 2, 3].map(|value| slice(&gpu, value));
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let [first, second, third] = sources;
    let ticket = pool.submit(first).unwrap();
    let mut awaited = pool.submit(second).unwrap();
    assert!(poll_once(&mut awaited).is_pending());
    sender.submit(third).unwrap();
    let ticket = in_a_child("wait", ticket, |ticket| ticket.wait().is_err_and(|error| error.is_forked()));
    let ticket = in_a_child("wait_timeout", ticket, |ticket| {
        let refused = ticket.wait_timeout(Duration::MAX).unwrap_err();
        refused.error.is_forked() && !refused.value.cancel()
    });
    let awaited = in_a_child(
        "poll",
        awaited,
        |mut ticket| matches!(poll_once(&mut ticket), Poll::Ready(Err(error)) if error.is_forked()),
    );
    let outputs = in_a_child("next_timeout", outputs, |mut outputs| {
        outputs.next_timeout(Duration::MAX).is_err_and(|error| error.is_forked())
    });
    let outputs = in_a_child("next", outputs, |mut outputs| outputs.next().is_none());
    let mut outputs = in_a_child("poll_next", outputs, |mut outputs| {
        matches!(outputs.poll_next(&mut Context::from_waker(Waker::noop())), Poll::Ready(None))
    });
    gate.open();
    // The parent's are what they were.
    assert_eq!([ticket, awaited].map(|ticket| ticket.wait_timeout(HANG).unwrap()[0]), [1, 2]);
    assert_eq!(outputs.next_timeout(HANG).unwrap().unwrap().result.unwrap()[0], 3);
    drop((kept, sender, outputs, pool));
    gpu.finish();
}

/// What waits for all that is open, and what locks to say how things are.
#[test]
fn who_waits_for_all_is_told() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let pool: EgressPool<TransferTensor<u8>> = builder(&gpu).tickets().unwrap();
    drop(pool.submit(gpu.on_device(&[0; LEN])).unwrap().wait().unwrap());
    let mut source = gpu.on_device(&[1; LEN]);
    drop(source.device_mut(&gpu.stream).unwrap());
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    drop(source.device_mut(&gpu.stream).unwrap());
    let ticket = pool.submit(source).unwrap();
    let pool = in_a_child("flush", pool, |pool| pool.flush(Duration::MAX).is_err_and(|error| error.is_forked()));
    let pool = in_a_child("drain", pool, |pool| pool.drain(Duration::MAX).is_err_and(|error| error.is_forked()));
    let pool = in_a_child("shutdown", pool, |pool| pool.shutdown(Duration::MAX).abandoned == 0);
    let pool = in_a_child("health", pool, |pool| {
        let health = pool.health();
        let said = format!("{pool:?}").contains("EgressPool") && pool.stats().submitted == 0;
        said && health.closed && health.last_error.is_some_and(|error| error.is_forked())
    });
    in_a_child("drain of the device", gpu.device.clone(), |device| {
        device.drain(Duration::MAX).is_err_and(|error| error.is_forked())
    });
    gate.open();
    assert_eq!(ticket.wait_timeout(HANG).unwrap()[0], 1);
    assert_eq!((pool.stats().delivered, pool.health().closed), (2, false));
    drop(pool);
    gpu.finish();
}

#[test]
fn who_waits_for_a_copy_is_told() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let (_, slice) = gpu.device.upload_owned(&gpu.stream, vec![0u8; LEN]).unwrap().wait().unwrap();
    let mut tensor = gpu.on_device(&[5; LEN]);
    let gate = gpu.gate(&gpu.stream);
    let copying = gpu.device.download_owned(&gpu.stream, slice).unwrap();
    drop(tensor.device_mut(&gpu.stream).unwrap());
    let mut transfer = tensor.to_host().unwrap();
    assert!(poll_once(&mut transfer).is_pending());
    let copying = in_a_child("wait", copying, |copying| copying.wait().is_err_and(|error| error.is_forked()));
    let copying = in_a_child("wait_timeout", copying, |copying| {
        copying.wait_timeout(Duration::MAX).is_err_and(|refused| refused.error.is_forked())
    });
    let copying = in_a_child(
        "poll",
        copying,
        |mut copying| matches!(poll_once(&mut copying), Poll::Ready(Err(error)) if error.is_forked()),
    );
    let transfer = in_a_child(
        "poll of a transfer",
        transfer,
        |mut transfer| matches!(poll_once(&mut transfer), Poll::Ready(Err(refused)) if refused.error.is_forked()),
    );
    gate.open();
    assert_eq!(copying.wait().unwrap().0, [0; LEN]);
    assert_eq!(transfer.wait().unwrap().host().unwrap()[0], 5);
    gpu.finish();
}

/// A source of batches that waits after the first one, until what comes with it is dropped.
#[allow(clippy::type_complexity)]
fn held_after_the_first() -> (Sender<()>, impl Fn(u64, &mut [u8]) -> Result<usize, String> + Send + Sync) {
    let (open, gate) = channel();
    let gate = Mutex::new(gate);
    let fill = move |number: u64, rows: &mut [u8]| {
        if number > 0 {
            let _ = gate.lock().unwrap().recv();
        }
        rows.fill(number as u8);
        Ok(1)
    };
    (open, fill)
}

#[test]
fn who_waits_for_a_batch_is_told_once() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let (open, fill) = held_after_the_first();
    let mut batches = IngressPrefetcher::builder(&gpu.device, [1, LEN]).fill(fill).unwrap();
    let first = batches.next().unwrap().unwrap();
    let told = |batch: Option<Result<_, IngressError<String>>>| matches!(batch, Some(Err(IngressError::Transfer(error))) if error.is_forked());
    let batches = in_a_child("next", batches, |mut batches| {
        batches.reset();
        told(batches.next()) && batches.next().is_none()
    });
    let mut batches = in_a_child("poll_next", batches, |mut batches| {
        let mut context = Context::from_waker(Waker::noop());
        match batches.poll_next(&mut context) {
            Poll::Ready(batch) => told(batch) && batches.next().is_none(),
            Poll::Pending => false,
        }
    });
    drop(open);
    assert_eq!(batches.next().unwrap().unwrap().number(), 1);
    drop((first, batches));
    gpu.finish();
}

/// Makes wakers whose clone waits: who keeps one is inside a lock meanwhile.
#[derive(Default)]
struct Sluggish {
    inside: AtomicBool,
    open: AtomicBool,
}

impl Sluggish {
    fn waker(&'static self) -> Waker {
        fn clone(this: *const ()) -> RawWaker {
            // SAFETY: made from one that stays, below.
            let Sluggish { inside, open } = unsafe { &*this.cast::<Sluggish>() };
            inside.store(true, SeqCst);
            until(|| open.load(SeqCst));
            RawWaker::new(this, &TABLE)
        }
        fn nothing(_: *const ()) {}
        static TABLE: RawWakerVTable = RawWakerVTable::new(clone, nothing, nothing, nothing);
        // SAFETY: what it points to stays, and may be used by any thread.
        unsafe { Waker::new(std::ptr::from_ref(self).cast(), &TABLE) }
    }

    /// Has `poll` be inside a lock while `then` runs.
    fn while_inside<V: Send + 'static>(
        &'static self,
        poll: impl FnOnce(&mut Context<'_>) -> V + Send + 'static,
        then: impl FnOnce(),
    ) -> V {
        let poller = std::thread::spawn(move || poll(&mut Context::from_waker(&self.waker())));
        until(|| self.inside.load(SeqCst));
        then();
        self.open.store(true, SeqCst);
        poller.join().unwrap()
    }
}

/// The child inherits locks that other threads of the parent's are in.
#[test]
fn what_is_dropped_waits_for_nobody() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let pool: EgressPool<CudaSlice<u8>, u8> = builder(&gpu).consumer(|out: Output<HostTensor<u8>>| out[0]).unwrap();
    let (sender, mut outputs) = pool.channel(Order::Completion);
    let (open, fill) = held_after_the_first();
    let mut batches = IngressPrefetcher::builder(&gpu.device, [1, LEN]).fill(fill).unwrap();
    let batch = batches.next().unwrap().unwrap();

    let [of_outputs, of_batches] = [0; 2].map(|_| &*Box::leak(Box::<Sluggish>::default()));
    let mut sender = Some(sender);
    let poll = move |context: &mut Context<'_>| {
        assert!(outputs.poll_next(context).is_pending());
        outputs
    };
    let outputs = of_outputs.while_inside(poll, || {
        sender = sender.take().map(|sender| dropped_in_a_child("sender", sender));
    });
    let mut batch = Some(batch);
    let poll = move |context: &mut Context<'_>| {
        assert!(batches.poll_next(context).is_pending());
        batches
    };
    let batches = of_batches.while_inside(poll, || {
        batch = batch.take().map(|batch| dropped_in_a_child("batch", batch));
    });
    let batches = dropped_in_a_child("prefetcher", batches);

    drop(open);
    let sender = sender.unwrap();
    sender.submit(slice(&gpu, 1)).unwrap();
    drop(sender);
    assert_eq!(outputs.map(|output| output.result.unwrap()).collect::<Vec<_>>(), [1]);
    drop((batch, batches, pool));
    gpu.finish();
}

/// A child of a fork has no threads: it drops what it inherited without waiting for them.
#[test]
fn a_forked_child_drops_a_pool_at_once() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    for open in [false, true] {
        let pool: EgressPool<CudaSlice<u8>, u8> = builder(&gpu).consumer(|out: Output<HostTensor<u8>>| out[0]).unwrap();
        pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap();
        let source = slice(&gpu, 1);
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let ticket = open.then(|| pool.submit(source).unwrap());
        let pool = dropped_in_a_child(if open { "a pool with an item" } else { "a pool" }, pool);
        gate.open();
        if let Some(ticket) = ticket {
            ticket.wait().unwrap();
        }
        drop(pool);
    }
    gpu.finish();
}
