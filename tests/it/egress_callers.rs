//! What callers do where a pool runs their code, or with what it gave them: wakers that keep much or panic, waits on a device's own thread, observers
//! that shut down, memory that is kept until there is no more.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use transfer_tensor::cudarc::driver::{CudaSlice, DevicePtrMut, sys};
use transfer_tensor::{Device, EgressPool, HostTensor, Order, Output, PoolOptions, Refused, Stage, TransferTensor};

use crate::egress::{LEN, builder, slice};
use crate::egress_attack::LIMIT;
use crate::machines::{built, drain};
use crate::pool::with_pool;
use crate::support::{Gpu, H200, HANG, within};

/// A task that keeps something.
pub(crate) struct Holds<V: Send>(pub(crate) Mutex<Option<V>>);

impl<V: Send> Wake for Holds<V> {
    fn wake(self: Arc<Self>) {}
}

/// A task that does something when it is woken, once.
struct Does(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Wake for Does {
    fn wake(self: Arc<Self>) {
        if let Some(act) = self.0.lock().unwrap().take() {
            act();
        }
    }
}

/// A tensor that has memory on both sides, and what is newest on the device.
fn on_both(gpu: &Gpu, value: u8) -> TransferTensor<u8> {
    let mut tensor = gpu.on_device(&[value; LEN]);
    drop(tensor.host_mut().unwrap());
    drop(tensor.device_mut(&gpu.stream).unwrap());
    tensor
}

/// Has the stream set all bytes, when it comes to that.
fn stream_sets(gpu: &Gpu, slice: &mut CudaSlice<u8>, value: u8) {
    let len = slice.len();
    let (address, _noted) = slice.device_ptr_mut(&gpu.stream);
    // SAFETY: the slice has as many bytes, and is borrowed for writing.
    let set = unsafe { sys::cuMemsetD8Async(address, value, len, gpu.stream.cu_stream()) };
    assert_eq!(set, sys::CUresult::CUDA_SUCCESS);
}

/// Page-locked memory that is kept is no room of the pool's: what is submitted then goes to ordinary memory, without waiting for the device.
#[test]
fn without_page_locked_memory_a_submit_waits_for_nothing() {
    let gpu = Gpu::any(H200).keeping();
    let device = with_pool(&gpu, PoolOptions::new().budget(2 << 20));
    let pool: EgressPool<CudaSlice<u8>> = EgressPool::builder(&device).tickets().unwrap();
    let shared: EgressPool<Arc<CudaSlice<u8>>> = EgressPool::builder(&device).tickets().unwrap();
    let big = |value| gpu.stream.clone_htod(&vec![value; 2 << 20]).unwrap();
    let (first, mut second, third) = (big(1u8), big(5), Arc::new(big(3)));
    let kept = pool.submit(first).unwrap().wait().unwrap().into_inner();
    // The device's thread and its buffers are there.
    drop(pool.submit(big(0)).unwrap().wait().unwrap());
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    stream_sets(&gpu, &mut second, 2);
    let (pool, second) = within(LIMIT, move || {
        let ticket = pool.submit(second).unwrap();
        (pool, ticket)
    });
    let third = (shared.submit(third.clone()).unwrap(), third);
    let second = second.try_wait().unwrap_err();
    assert!(second.error.is_not_ready());
    gate.open();
    let second = second.value.wait_timeout(HANG).unwrap().into_inner();
    assert!(second.iter().all(|&byte| byte == 2) && kept.iter().all(|&byte| byte == 1));
    assert_eq!((second.is_pinned(), second.copied_bytes(), second.len()), (false, 2 << 20, 2 << 20));
    // It can be what any output can be.
    let tensor = second.into_tensor().unwrap();
    assert_eq!(gpu.stream.clone_dtoh(&tensor.device(&gpu.stream).unwrap()).unwrap(), vec![2; 2 << 20]);
    let (third, source) = (third.0.wait_timeout(HANG).unwrap().into_inner(), third.1);
    assert_eq!(third.into_vec().unwrap(), vec![3; 2 << 20]);
    assert_eq!(Arc::strong_count(&source), 1);
    drop((kept, tensor, source, pool, shared));
    drain(&device);
    drop(device);
    gpu.finish();
}

/// A refused copy to ordinary memory is the item's error, and nothing is lost.
#[test]
fn a_copy_to_ordinary_memory_may_be_refused() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let device = with_pool(&gpu, PoolOptions::new().budget(2 << 20));
    let pool: EgressPool<CudaSlice<u8>> = EgressPool::builder(&device).tickets().unwrap();
    let big = |value| gpu.stream.clone_htod(&vec![value; 2 << 20]).unwrap();
    let kept = pool.submit(big(1u8)).unwrap().wait().unwrap().into_inner();
    drop(pool.submit(big(0)).unwrap().wait().unwrap());
    // (A query that fails is asked again by another call.)
    for (call, fails) in
        [("cuMemcpyDtoHAsync", true), ("cuStreamWaitEvent", true), ("cuEventRecord", true), ("cuEventQuery", false)]
    {
        let mut failed = 0;
        for nth in 1..4 {
            let source = big(2u8);
            gpu.context.synchronize().unwrap();
            sim.fail_nth(call, nth, 999);
            match pool.submit(source).map(|ticket| ticket.wait_timeout(HANG)) {
                Ok(Ok(out)) => assert!(out.iter().all(|&byte| byte == 2), "{call} {nth}"),
                Ok(Err(Refused { error, .. })) | Err(Refused { error, .. }) => {
                    assert_eq!(error.driver_code(), Some(999), "{call} {nth}: {error}");
                    failed += 1;
                }
            }
            sim.clear_failures();
        }
        assert!(failed > 0 || !fails, "{call}");
    }
    assert_eq!(pool.submit(big(7u8)).unwrap().wait_timeout(HANG).unwrap()[0], 7);
    drop((kept, pool));
    drain(&device);
    assert_eq!(sim.violations(), Vec::<String>::new());
}

/// On the thread that tells of tensors, and frees: what waits for items, or for freeing, does not wait for itself there.
#[test]
fn on_a_devices_own_thread_nothing_waits_for_it() {
    type Act = fn(&EgressPool<TransferTensor<u8>>, &Device) -> bool;
    let all: [(&str, Act); 5] = [
        ("flush", |pool, _| pool.flush(HANG).is_err_and(|error| error.is_not_ready())),
        ("drain", |pool, _| pool.drain(HANG).is_err_and(|error| error.is_not_ready())),
        ("shutdown", |pool, _| pool.shutdown(HANG).abandoned == 1),
        ("drain of the device", |_, device| device.drain(HANG).is_err_and(|error| error.is_not_ready())),
        ("drop", |_, _| true),
    ];
    for (what, act) in all {
        let gpu = Gpu::any(H200).keeping();
        let pool: EgressPool<TransferTensor<u8>> = builder(&gpu).tickets().unwrap();
        drop(pool.submit(gpu.on_device(&[0; LEN])).unwrap().wait().unwrap());
        let [mut first, mut second] = [1, 2].map(|value| on_both(&gpu, value));
        let stream = gpu.another_stream();
        gpu.context.synchronize().unwrap();
        let (gate, later) = (gpu.gate(&gpu.stream), gpu.gate(&stream));
        drop(first.device_mut(&gpu.stream).unwrap());
        let mut transfer = first.to_host().unwrap();
        let does = Arc::new(Does(Mutex::default()));
        assert!(Pin::new(&mut transfer).poll(&mut Context::from_waker(&Waker::from(does.clone()))).is_pending());
        drop(second.device_mut(&stream).unwrap());
        let ticket = pool.submit(second).unwrap();
        let ((tell, told), device) = (channel(), gpu.device.clone());
        *does.0.lock().unwrap() = Some(Box::new(move || {
            let right = act(&pool, &device);
            drop((pool, device));
            tell.send(right).unwrap();
        }));
        gate.open();
        assert_eq!(told.recv_timeout(LIMIT), Ok(true), "{what}");
        later.open();
        let result = ticket.wait_timeout(HANG);
        assert_eq!(result.is_ok(), what != "shutdown", "{what}");
        drop((result, transfer.wait().unwrap(), does, stream));
        gpu.finish();
    }
}

/// A task's waker may be all that keeps a pool, which a transfer replaces.
#[test]
fn a_waker_that_a_transfer_replaces_may_keep_a_pool() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<TransferTensor<u8>> = builder(&gpu).tickets().unwrap();
    drop(pool.submit(gpu.on_device(&[0; LEN])).unwrap().wait().unwrap());
    let [mut first, mut second] = [1, 2].map(|value| on_both(&gpu, value));
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    drop(first.device_mut(&gpu.stream).unwrap());
    let mut transfer = first.to_host().unwrap();
    // The transfer is told first.
    let holds = Arc::new(Holds(Mutex::new(None)));
    assert!(Pin::new(&mut transfer).poll(&mut Context::from_waker(&Waker::from(holds.clone()))).is_pending());
    drop(second.device_mut(&gpu.stream).unwrap());
    let ticket = pool.submit(second).unwrap();
    *holds.0.lock().unwrap() = Some(pool);
    drop(holds);
    let opener = gate.open_later();
    let transfer = within(LIMIT, move || {
        let _ = Pin::new(&mut transfer).poll(&mut Context::from_waker(Waker::noop()));
        transfer
    });
    drop(opener);
    drop((ticket.wait().unwrap(), transfer.wait().unwrap()));
    gpu.finish();
}

/// A waker that panics is no panic of the sender's drop; one of dropped outputs is dropped with them.
#[test]
fn wakers_of_outputs_harm_nobody() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
    let (sender, mut outputs) = pool.channel(Order::Completion);
    let bad = Waker::from(Arc::new(Does(Mutex::new(Some(Box::new(|| panic!("a waker of the caller's")))))));
    assert!(outputs.poll_next(&mut Context::from_waker(&bad)).is_pending());
    assert!(catch_unwind(AssertUnwindSafe(|| drop(sender))).is_ok());
    assert!(outputs.next().is_none());

    let (sender, mut outputs) = pool.channel(Order::Completion);
    let alive = Arc::new(());
    let waker = Waker::from(Arc::new(Holds(Mutex::new(Some(alive.clone())))));
    assert!(outputs.poll_next(&mut Context::from_waker(&waker)).is_pending());
    drop((waker, outputs));
    assert_eq!(Arc::strong_count(&alive), 1);
    drop((sender, pool));
    gpu.finish();
}

/// Who was told that his item is cancelled meets no other end of it.
#[test]
fn what_was_cancelled_stays_so_after_a_shutdown() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
    drop(pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap());
    let sources = [1, 2].map(|value| slice(&gpu, value));
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let [cancelled, open] = sources.map(|source| pool.submit(source).unwrap());
    assert!(cancelled.cancel());
    let report = pool.shutdown(Duration::ZERO);
    gate.open();
    pool.drain(HANG).unwrap();
    let stats = pool.stats();
    assert_eq!((report.abandoned, stats.cancelled, stats.failed), (1, 1, 1), "{stats:?}");
    assert!(cancelled.wait().unwrap_err().is_cancelled() && open.wait().unwrap_err().is_closed());
    drop(pool);
    gpu.finish();
}

/// An observer that shuts the pool down when it is told of an item: the item is in the report.
#[test]
fn a_shutdown_by_the_observer_counts_the_item() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    type Pool = EgressPool<CudaSlice<u8>>;
    let (tell, told) = channel();
    let pool = Arc::new_cyclic(|own: &Weak<Pool>| {
        let (own, tell): (_, Mutex<Sender<_>>) = (own.clone(), Mutex::new(tell));
        let observer = move |number, stage| {
            if number == 1 && matches!(stage, Stage::Submitted { .. }) {
                let report = own.upgrade().unwrap().shutdown(Duration::ZERO);
                tell.lock().unwrap().send(report).unwrap();
            }
        };
        builder(&gpu).observer(observer).tickets().unwrap()
    });
    let stream = gpu.another_stream();
    let (held, source) = (stream.clone_htod(&[1u8; LEN]).unwrap(), slice(&gpu, 2));
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&stream);
    let tickets = [pool.submit(held).unwrap(), pool.submit(source).unwrap()];
    gate.open();
    pool.drain(HANG).unwrap();
    assert_eq!(told.recv().unwrap().abandoned, 2);
    for ticket in tickets {
        assert!(ticket.wait().unwrap_err().is_closed());
    }
    drop((pool, stream));
    gpu.finish();
}

/// Where freeing waits for the stream (a device without memory pools), the end of one tensor holds up no other.
#[test]
fn a_tensor_that_ends_on_a_held_stream_holds_up_no_other() {
    let Some(gpu) = built(cuda_sim::DeviceBuilder::new(H200).attribute(115, 0)).map(Gpu::keeping) else { return };
    let pool: EgressPool<TransferTensor<u8>> = builder(&gpu).tickets().unwrap();
    let (stream, other) = (gpu.another_stream(), gpu.another_stream());
    drop(pool.submit(gpu.on_device(&[0; LEN])).unwrap().wait().unwrap());
    let of = |slice| gpu.device.tensor().from_cuda_slice(slice, [LEN]).map_err(|refused| refused.error).unwrap();
    let first = of(stream.clone_htod(&[1u8; LEN]).unwrap());
    let second = of(other.clone_htod(&[2u8; LEN]).unwrap());
    // Freeing waits for all of such a device.
    drain(&gpu.device);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&stream);
    let first = pool.submit(first).unwrap();
    let later = gpu.gate(&stream);
    gate.open();
    let second = pool.submit(second).unwrap();
    let outs = [first, second].map(|ticket| ticket.wait_timeout(LIMIT).map(|out: Output<HostTensor<u8>>| out[0]));
    later.open();
    assert_eq!(outs.map(|out| out.map_err(|refused| refused.error).unwrap()), [1, 2]);
    drop((pool, stream, other));
    gpu.finish();
}
