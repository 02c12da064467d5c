//! How an egress pool ends: delivered to the last, shut down, dropped, faulted; from outside, from within, in a forked child
//! (field reports R76, R78).
#![allow(clippy::type_complexity)] // What a pool takes is spelled out.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use transfer_tensor::cudarc::driver::CudaSlice;
use transfer_tensor::cudarc::driver::sys::CUresult;
use transfer_tensor::{EgressPool, HostTensor, Order, Output, Stage, Strategy, Tagged, TransferTensor};

use crate::egress::{FAULT, LEN, builder, held, slice};
use crate::pool::until;
use crate::support::{Gpu, H200, HANG};

const LIMIT: Duration = Duration::from_secs(5);

type Bytes = HostTensor<u8>;

/// Not with their sender.
#[test]
fn outputs_end_when_all_that_was_sent_is_delivered() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
    held(&pool, || slice(&gpu, 0));
    let (sender, mut outputs) = pool.channel(Order::Completion);
    let source = slice(&gpu, 1);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    sender.submit(source).unwrap();
    drop(sender);
    assert!(outputs.next_timeout(Duration::from_millis(1)).unwrap_err().is_not_ready());
    gate.open();
    assert_eq!(outputs.next().unwrap().result.unwrap()[0], 1);
    assert!(outputs.next().is_none());
    drop((outputs, pool));
    gpu.finish();
}

/// R76: with an item that is held, with none, twice, from a consumer.
#[test]
fn a_shutdown_ends_in_time_and_says_what_became_of_the_items() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>, u8> = builder(&gpu).consumer(|out: Output<Bytes>| out[0]).unwrap();
    let tickets: Vec<_> = (0..5).map(|value| pool.submit(slice(&gpu, value)).unwrap()).collect();
    let report = pool.shutdown(HANG);
    assert_eq!((report.failed, report.abandoned), (0, 0));
    assert!(report.delivered <= 5 && pool.stats().delivered == 5);
    assert_eq!(pool.shutdown(Duration::ZERO), Default::default());
    assert!(pool.submit(slice(&gpu, 5)).unwrap_err().error.is_closed());
    drop(pool);
    assert_eq!(tickets.into_iter().map(|ticket| ticket.wait().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);

    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
    held(&pool, || slice(&gpu, 0));
    let (sender, mut outputs) = pool.channel(Order::Submission);
    let (first, second) = (slice(&gpu, 1), slice(&gpu, 2));
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let ticket = pool.submit(first).unwrap();
    sender.submit(second).unwrap();
    let report = pool.shutdown(Duration::from_millis(5));
    assert_eq!((report.delivered, report.failed, report.abandoned), (0, 0, 2));
    assert!(ticket.wait().unwrap_err().is_closed());
    assert!(outputs.next().unwrap().result.unwrap_err().is_closed());
    drop(sender);
    assert!(outputs.next().is_none());
    let opener = gate.open_later();
    // Nothing is lost: it waits for the copies, and their memory comes back.
    drop(pool);
    assert!(opener.opened());
    drop((opener, outputs));
    gpu.finish();
}

/// Dropping the pool waits for the device, and delivers; inside a consumer it can not wait for that one.
#[test]
fn dropping_a_pool_loses_nothing() {
    let gpu = Gpu::any(H200).keeping();
    let counted = Arc::new(AtomicUsize::new(0));
    let count = counted.clone();
    let consumer = move |_: Output<Bytes>| count.fetch_add(1, Ordering::SeqCst);
    let pool: EgressPool<CudaSlice<u8>, usize> = builder(&gpu).workers(2).consumer(consumer).unwrap();
    pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap();
    let slices = [1, 2, 3].map(|value| slice(&gpu, value));
    gpu.context.synchronize().unwrap();
    let opener = gpu.gate(&gpu.stream).open_later();
    for slice in slices {
        drop(pool.submit(slice).unwrap());
    }
    drop(pool);
    assert!(opener.opened() && counted.load(Ordering::SeqCst) == 4);
    drop(opener);

    // Tensors, for which the device's waiter waits rather than the pool's threads.
    let kernels = gpu.kernels();
    let (count, tensors) = (counted.clone(), [1, 2].map(|_| gpu.on_device(&[0; LEN])));
    let consumer = move |_: Output<Bytes>| count.fetch_add(1, Ordering::SeqCst);
    let pool: EgressPool<TransferTensor<u8>, usize> = builder(&gpu).consumer(consumer).unwrap();
    pool.submit(gpu.on_device(&[0; LEN])).unwrap().wait().unwrap();
    gpu.context.synchronize().unwrap();
    let opener = gpu.gate(&gpu.stream).open_later();
    for mut tensor in tensors {
        kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 1);
        drop(pool.submit(tensor).unwrap());
    }
    drop(pool);
    assert!(opener.opened() && counted.load(Ordering::SeqCst) == 7);
    drop((opener, kernels));

    type Own = std::sync::Mutex<Option<EgressPool<CudaSlice<u8>, ()>>>;
    let own: Arc<Own> = Arc::default();
    let (inside, count) = (own.clone(), counted.clone());
    let consumer = move |_: Output<Bytes>| {
        drop(inside.lock().unwrap().take());
        count.fetch_add(1, Ordering::SeqCst);
    };
    let pool = builder(&gpu).workers(2).consumer(consumer).unwrap();
    let mut place = own.lock().unwrap();
    let tickets = [1, 2, 3].map(|value| pool.submit(slice(&gpu, value)).unwrap());
    *place = Some(pool);
    drop(place);
    tickets.into_iter().for_each(|ticket| ticket.wait().unwrap());
    assert_eq!(counted.load(Ordering::SeqCst), 10);
    until(|| Arc::strong_count(&own) == 1);
    gpu.finish();
}

/// R78: a fault ends every wait, promptly, and later submits at once; no bytes come out.
#[test]
fn a_fault_is_every_items_error() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let pool: EgressPool<TransferTensor<u8>> = builder(&gpu).tickets().unwrap();
    held(&pool, || gpu.on_device(&[0; LEN]));
    let kernels = gpu.kernels();
    let tensors: Vec<_> = (0..4).map(|_| gpu.on_device(&[0; LEN])).collect();
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    sim.fault_on_stream(gpu.stream.cu_stream() as u64, FAULT);
    let (sender, outputs) = pool.channel(Order::Submission);
    let mut tickets = Vec::new();
    for (at, mut tensor) in tensors.into_iter().enumerate() {
        kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 1);
        if at % 2 == 0 {
            tickets.push(pool.submit(tensor).unwrap());
        } else {
            sender.submit(tensor).unwrap();
        }
    }
    drop(sender);
    let start = Instant::now();
    gate.open();
    for ticket in tickets {
        let error = ticket.wait_timeout(HANG).unwrap_err().error;
        assert!(error.is_fault() && error.driver_code() == Some(FAULT), "{error}");
    }
    let faults = outputs.filter(|out| out.result.as_ref().is_err_and(|error| error.is_fault())).count();
    assert_eq!(faults, 2);
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(pool.health().faulted && pool.stats().failed == 4);
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&[1u8; LEN], [LEN]).unwrap();
    assert!(pool.submit(tensor).is_err_and(|refused| refused.error.is_fault()) || pool.drain(HANG).is_ok());
    drop((pool, kernels));
    let Gpu { sim, context, stream, device } = gpu;
    drop((device, stream, context));
    assert_eq!(sim.unwrap().violations(), Vec::<String>::new());
}

/// In the steady state the driver is asked for no memory, and no thread begins.
#[test]
fn in_the_steady_state_nothing_is_allocated_from_the_driver() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let device = crate::pool::with_pool(&gpu, transfer_tensor::PoolOptions::new().budget(64 << 20));
    let pool: EgressPool<Arc<CudaSlice<u8>>, usize> =
        EgressPool::builder(&device).workers(3).capacity(4).consumer(|out: Output<Bytes>| out.len()).unwrap();
    let source = Arc::new(slice(&gpu, 1));
    let run = |count: usize| {
        let tickets: Vec<_> = (0..count).map(|_| pool.submit(source.clone()).unwrap()).collect();
        tickets.into_iter().for_each(|ticket| assert_eq!(ticket.wait().unwrap(), LEN));
    };
    run(200);
    let calls = [
        "cuMemHostAlloc",
        "cuMemHostRegister",
        "cuMemAlloc",
        "cuMemAllocAsync",
        "cuMemFree",
        "cuMemFreeAsync",
        "cuMemFreeHost",
    ];
    let asked = || calls.map(|call| sim.count(call));
    let before = asked();
    run(1000);
    assert_eq!(asked(), before);
    assert_eq!(pool.stats().delivered, 1200);
    drop((pool, source));
    crate::machines::drain(&device);
    drop(device);
    gpu.finish();
}

/// Every item is delivered once, failed once with its reason, or reported as cancelled: four producers with streams of their own,
/// sizes, delays, panics, cancellations, dropped tickets and a flush in the middle. `TRANSFER_TENSOR_ITEMS` says how many.
#[test]
fn nothing_is_lost() {
    let gpu = Gpu::any(H200).keeping();
    let items = std::env::var("TRANSFER_TENSOR_ITEMS").ok().and_then(|items| items.parse().ok());
    assert_eq!(lose_nothing(&gpu, &gpu.device, items.unwrap_or(4000)), 0);
    gpu.finish();
}

/// As above, where no result finds page-locked memory.
#[test]
fn nothing_is_lost_without_page_locked_memory() {
    let gpu = Gpu::any(H200).keeping();
    let device = crate::pool::with_pool(&gpu, transfer_tensor::PoolOptions::new().budget(16 << 10));
    let all = device.pool().acquire(16 << 10).unwrap();
    assert!(device.pool().try_acquire(1).is_err());
    // Less those that are cancelled, a tenth at most.
    assert!(lose_nothing(&gpu, &device, 300) >= 270);
    drop(all);
    crate::machines::drain(&device);
    drop(device);
    gpu.finish();
}

/// How many outputs lay in ordinary memory.
fn lose_nothing(gpu: &Gpu, device: &transfer_tensor::Device, items: usize) -> usize {
    let ordinary = Arc::new(AtomicUsize::new(0));
    let unpinned = ordinary.clone();
    let consumed: Arc<Vec<AtomicUsize>> = Arc::new((0..items).map(|_| AtomicUsize::new(0)).collect());
    let seen = consumed.clone();
    let pool: EgressPool<Tagged<CudaSlice<u8>, usize>, usize> = EgressPool::builder(device)
        .workers(4)
        .capacity(32)
        .budget(1 << 20)
        .consumer(move |out: Output<Tagged<Bytes, usize>>| {
            seen[out.tag].fetch_add(1, Ordering::SeqCst);
            unpinned.fetch_add(usize::from(!out.value.is_pinned()), Ordering::SeqCst);
            assert!(out.value.iter().all(|&byte| byte == out.tag as u8), "other bytes");
            for _ in 0..out.tag % 3 {
                std::thread::yield_now();
            }
            assert!(out.tag % 100 != 99, "one in a hundred");
            out.tag
        })
        .unwrap();
    let (delivered, failed, cancelled, dropped) =
        (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for producer in 0..4 {
            let pool = &pool;
            let (delivered, failed, cancelled, dropped) = (&delivered, &failed, &cancelled, &dropped);
            scope.spawn(move || {
                let stream = gpu.another_stream();
                let mut tickets = Vec::new();
                for tag in (producer..items).step_by(4) {
                    let source = stream.clone_htod(&vec![tag as u8; 1 + tag * 37 % 5000]).unwrap();
                    let ticket = pool.submit(Tagged::new(source, tag)).unwrap();
                    match tag % 10 {
                        3 => dropped.fetch_add(1, Ordering::SeqCst),
                        4 if ticket.cancel() => {
                            assert!(ticket.wait().unwrap_err().is_cancelled());
                            cancelled.fetch_add(1, Ordering::SeqCst)
                        }
                        _ => {
                            tickets.push((tag, ticket));
                            0
                        }
                    };
                    if tag == items / 2 {
                        // The others go on meanwhile.
                        pool.flush(HANG).unwrap();
                    }
                }
                for (tag, ticket) in tickets {
                    match ticket.wait() {
                        Ok(out) if out == tag => delivered.fetch_add(1, Ordering::SeqCst),
                        Err(error) if error.is_panic() && tag % 100 == 99 => failed.fetch_add(1, Ordering::SeqCst),
                        other => panic!("{tag}: {other:?}"),
                    };
                }
            });
        }
    });
    let report = pool.shutdown(HANG);
    let (stats, load) = (pool.stats(), |number: &AtomicUsize| number.load(Ordering::SeqCst));
    assert_eq!((report.abandoned, stats.submitted, stats.kept), (0, items as u64, 0));
    assert_eq!(load(&delivered) + load(&failed) + load(&cancelled) + load(&dropped), items);
    assert_eq!((stats.failed, stats.cancelled), (load(&failed) as u64, load(&cancelled) as u64));
    assert_eq!(stats.delivered as usize, load(&delivered) + load(&dropped));
    assert_eq!(consumed.iter().map(load).sum::<usize>(), items - load(&cancelled));
    assert!(consumed.iter().all(|count| load(count) <= 1));
    load(&ordinary)
}

/// The own item, which does not count, is not one of another pool.
#[test]
fn a_consumer_that_drains_another_pool_waits_for_all_of_it() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let other: Arc<EgressPool<CudaSlice<u8>>> = Arc::new(EgressPool::builder(&gpu.device).tickets().unwrap());
    drop(other.submit(slice(&gpu, 0)).unwrap().wait().unwrap());
    let drained = other.clone();
    let (go, wait) = std::sync::mpsc::channel();
    let wait = Mutex::new(wait);
    // The output goes along: nothing is freed behind the gate.
    let pool: EgressPool<CudaSlice<u8>, (bool, u64, Output<Bytes>)> = EgressPool::builder(&gpu.device)
        .consumer(move |out: Output<Bytes>| {
            wait.lock().unwrap().recv().unwrap();
            let drained_all = drained.drain(Duration::from_millis(20)).is_ok();
            (drained_all, drained.shutdown(Duration::from_millis(20)).abandoned, out)
        })
        .unwrap();
    let stream = gpu.another_stream();
    let held = stream.clone_htod(&[1u8; LEN]).unwrap();
    let free = slice(&gpu, 2);
    gpu.context.synchronize().unwrap();
    // The copies of both go on the crate's one stream: the free one first.
    let ticket_free = pool.submit(free).unwrap();
    let gate = gpu.gate(&stream);
    let ticket = other.submit(held).unwrap();
    go.send(()).unwrap();
    let (drained_all, abandoned, out) = ticket_free.wait().unwrap();
    gate.open();
    assert!(!drained_all, "drained, with an item open");
    assert_eq!(abandoned, 1);
    let _ = ticket.wait();
    drop(out);
    drop((pool, other, stream));
    gpu.finish();
}

/// R72: the last handle of a pool goes where the device's waiter is.
#[test]
fn a_pool_may_be_dropped_by_its_own_observer() {
    let gpu = Gpu::any(H200).keeping();
    type Own = Mutex<Option<EgressPool<CudaSlice<u8>, ()>>>;
    let own: Arc<Own> = Arc::default();
    let inside = own.clone();
    let pool = EgressPool::builder(&gpu.device)
        .observer(move |_, stage| {
            if matches!(stage, Stage::Copied { .. }) {
                drop(inside.lock().unwrap().take());
            }
        })
        .consumer(|_: Output<Bytes>| ())
        .unwrap();
    let mut place = own.lock().unwrap();
    let ticket = pool.submit(slice(&gpu, 1)).unwrap();
    *place = Some(pool);
    drop(place);
    assert!(ticket.wait_timeout(LIMIT).is_ok(), "stuck");
    until(|| Arc::strong_count(&own) == 1);
    gpu.finish();
}

/// A tag owns the pool, and its item fails: the pool is dropped by the device's waiter, for which it would wait.
#[test]
fn a_pool_may_be_dropped_with_a_tag_whose_copy_failed() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    #[allow(dead_code)]
    struct Own(Mutex<Option<Arc<EgressPool<Tagged<TransferTensor<u8>, Arc<Own>>>>>>);
    let pool: Arc<EgressPool<Tagged<TransferTensor<u8>, Arc<Own>>>> =
        Arc::new(EgressPool::builder(&gpu.device).tickets().unwrap());
    let kernels = gpu.kernels();
    drop(pool.submit(Tagged::new(gpu.on_device(&[0; LEN]), Arc::new(Own(Mutex::new(None))))).unwrap().wait().unwrap());
    let mut tensor = gpu.on_device(&[0; LEN]);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    sim.fault_on_stream(gpu.stream.cu_stream() as u64, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as u32);
    kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 1);
    let tag = Arc::new(Own(Mutex::new(Some(pool.clone()))));
    let ticket = pool.submit(Tagged::new(tensor, tag)).unwrap();
    drop(pool);
    gate.open();
    assert!(ticket.wait_timeout(LIMIT).is_err_and(|refused| refused.error.is_fault()), "stuck");
}

/// Each item is in one number of the report.
#[test]
fn a_shutdown_counts_no_item_twice() {
    let gpu = Gpu::any(H200).keeping();
    let (began, go) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (tell, wait) = (began.clone(), go.clone());
    let pool: EgressPool<CudaSlice<u8>, u8> = EgressPool::builder(&gpu.device)
        .observer(move |_, stage| {
            if matches!(stage, Stage::Delivered) {
                tell.store(true, Ordering::SeqCst);
                until(|| wait.load(Ordering::SeqCst));
            }
        })
        .consumer(|out: Output<Bytes>| out[0])
        .unwrap();
    let ticket = pool.submit(slice(&gpu, 7)).unwrap();
    until(|| began.load(Ordering::SeqCst));
    let report = pool.shutdown(Duration::from_millis(5));
    go.store(true, Ordering::SeqCst);
    pool.drain(LIMIT).unwrap();
    let (stats, result) = (pool.stats(), ticket.wait());
    assert_eq!(stats.delivered, u64::from(result.is_ok()), "{report:?} {result:?}");
    drop(pool);
    gpu.finish();
}

/// A pool whose consumer shuts it down, once so many items were submitted, and tells how many it abandoned.
fn shuts_itself_down(gpu: &Gpu, items: u64, deadline: Duration) -> Arc<EgressPool<CudaSlice<u8>, u64>> {
    Arc::new_cyclic(|own: &Weak<EgressPool<CudaSlice<u8>, u64>>| {
        let own = own.clone();
        let consumer = move |_: Output<Bytes>| {
            let pool = own.upgrade().unwrap();
            until(|| pool.stats().submitted == items);
            pool.shutdown(deadline).abandoned
        };
        EgressPool::builder(&gpu.device).consumer(consumer).unwrap()
    })
}

/// A shutdown from inside a consumer does not wait for that one, and its own item is delivered.
#[test]
fn a_shutdown_from_a_consumer_ends_and_delivers_its_own_item() {
    let gpu = Gpu::any(H200).keeping();
    let pool = shuts_itself_down(&gpu, 1, HANG);
    let ticket = pool.submit(slice(&gpu, 1)).unwrap();
    assert_eq!(ticket.wait_timeout(LIMIT).unwrap(), 0);
    assert!(pool.submit(slice(&gpu, 2)).unwrap_err().error.is_closed());
    drop(pool);
    gpu.finish();
}

/// In time or not, with others held: the consumer's own item is not abandoned.
#[test]
fn a_shutdown_from_a_consumer_does_not_abandon_its_own_item() {
    let gpu = Gpu::any(H200).keeping();
    let pool = shuts_itself_down(&gpu, 2, Duration::from_millis(5));
    let stream = gpu.another_stream();
    let (first, second) = (slice(&gpu, 1), stream.clone_htod(&[2u8; LEN]).unwrap());
    gpu.context.synchronize().unwrap();
    let ticket = pool.submit(first).unwrap();
    let gate = gpu.gate(&stream);
    let held = pool.submit(second).unwrap();
    let result = ticket.wait_timeout(LIMIT);
    gate.open();
    assert!(held.wait().unwrap_err().is_closed());
    assert_eq!(result.map_err(|refused| refused.error).unwrap(), 1);
    drop((pool, stream));
    gpu.finish();
}

/// Senders outlive the pool, outputs and their sender go in either order, and who waits for room is told of the end.
#[test]
fn senders_and_outputs_may_outlive_the_pool() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>> = EgressPool::builder(&gpu.device).capacity(1).tickets().unwrap();
    let (sender, mut outputs) = pool.channel(transfer_tensor::Order::Submission);
    let (lost, dropped) = pool.channel(transfer_tensor::Order::Completion);
    drop(dropped);
    lost.submit(slice(&gpu, 1)).unwrap();
    until(|| pool.stats().kept == 0);
    sender.submit(slice(&gpu, 2)).unwrap();
    let spare = slice(&gpu, 3);
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| sender.submit(spare).unwrap_err());
        // Time enough to fall asleep.
        (0..10_000).for_each(|_| std::thread::yield_now());
        drop(pool);
        let refused = blocked.join().unwrap();
        assert!(refused.error.is_closed() && refused.value.is_some());
    });
    assert_eq!(outputs.next().unwrap().result.unwrap()[0], 2);
    drop((sender, lost));
    assert!(outputs.next().is_none());
    drop(outputs);
    gpu.finish();
}
