//! The egress pool at its edges: what panics where it should not, pools inside pools, shutdowns from within, forks, limits.
#![allow(clippy::type_complexity)] // What a pool takes is spelled out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use transfer_tensor::cudarc::driver::CudaSlice;
use transfer_tensor::cudarc::driver::sys::CUresult;
use transfer_tensor::{EgressPool, HostTensor, OnError, Output, Stage, Strategy, Tagged, TransferTensor, WhenFull};

use crate::egress::{LEN, slice};
use crate::machines::pattern;
use crate::pool::until;
use crate::support::{Gpu, H200, HANG, SPARK, within};

const LIMIT: Duration = Duration::from_secs(5);

type Bytes = HostTensor<u8>;

/// Panics when it is dropped.
#[derive(Debug)]
struct Bomb(bool);

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.0 && !std::thread::panicking() {
            panic!("a caller's own drop");
        }
    }
}

#[test]
fn a_tag_that_panics_when_its_copy_fails_holds_nobody_up() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let pool: EgressPool<Tagged<TransferTensor<u8>, Bomb>> = EgressPool::builder(&gpu.device).tickets().unwrap();
    let kernels = gpu.kernels();
    let warm = pool.submit(Tagged::new(gpu.on_device(&[0; LEN]), Bomb(false))).unwrap().wait().unwrap();
    drop(warm);
    let mut tensor = gpu.on_device(&[0; LEN]);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    sim.fault_on_stream(gpu.stream.cu_stream() as u64, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as u32);
    kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 1);
    let ticket = pool.submit(Tagged::new(tensor, Bomb(true))).unwrap();
    gate.open();
    assert!(ticket.wait_timeout(LIMIT).is_err_and(|refused| refused.error.is_fault()));
    within(LIMIT, move || drop(pool));
}

#[test]
fn a_result_that_nobody_wants_may_panic_when_it_is_dropped() {
    for workers in [0, 1] {
        let gpu = Gpu::any(H200).keeping();
        let pool: EgressPool<CudaSlice<u8>, Bomb> =
            EgressPool::builder(&gpu.device).workers(workers).consumer(|out: Output<Bytes>| Bomb(out[0] == 1)).unwrap();
        drop(pool.submit(slice(&gpu, 0)).unwrap());
        pool.drain(LIMIT).unwrap();
        let gate = gpu.gate(&gpu.stream);
        let ticket = pool.submit(slice(&gpu, 1));
        drop(ticket);
        gate.open();
        assert!(pool.drain(LIMIT).is_ok(), "{workers} workers: {:?}", pool.stats());
        let ticket = pool.submit(slice(&gpu, 2)).unwrap();
        assert!(!ticket.wait_timeout(LIMIT).unwrap().0);
        within(LIMIT, move || drop(pool));
        gpu.finish();
    }
}

#[test]
fn what_a_consumer_panics_with_may_panic_when_it_is_dropped() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>, ()> = EgressPool::builder(&gpu.device)
        .on_start(|_| std::panic::panic_any(Bomb(true)))
        .consumer(|out: Output<Bytes>| {
            if out[0] == 1 {
                std::panic::panic_any(Bomb(true))
            }
        })
        .unwrap();
    let tickets = [1, 2].map(|value| pool.submit(slice(&gpu, value)).unwrap());
    let [first, second] = tickets.map(|ticket| ticket.wait_timeout(LIMIT).map_err(|refused| refused.error));
    assert!(first.is_err_and(|error| error.is_panic()));
    second.unwrap();
    within(LIMIT, move || drop(pool));
    gpu.finish();
}

/// As a consumer, an observer must not wait for room that waits for it.
#[test]
fn an_observer_that_submits_is_refused_rather_than_stuck() {
    let gpu = Gpu::any(H200).keeping();
    type Own = EgressPool<CudaSlice<u8>, u8>;
    let own: Arc<OnceLock<Weak<Own>>> = Arc::default();
    let spare = Mutex::new(Some(slice(&gpu, 2)));
    let (seen, refused) = (own.clone(), Arc::new(AtomicBool::new(false)));
    let tell = refused.clone();
    let pool = EgressPool::builder(&gpu.device)
        .capacity(1)
        .observer(move |_, stage| {
            if matches!(stage, Stage::Copied { .. })
                && let Some(spare) = spare.lock().unwrap().take()
            {
                let pool = seen.get().unwrap().upgrade().unwrap();
                let result = pool.submit(spare);
                tell.store(result.is_err_and(|refused| refused.error.is_full()), Ordering::SeqCst);
            }
        })
        .consumer(|out: Output<Bytes>| out[0])
        .unwrap();
    let pool: Arc<Own> = Arc::new(pool);
    own.set(Arc::downgrade(&pool)).unwrap();
    let ticket = pool.submit(slice(&gpu, 1)).unwrap();
    assert!(ticket.wait_timeout(LIMIT).is_ok(), "stuck");
    assert!(refused.load(Ordering::SeqCst));
    drop(pool);
    gpu.finish();
}

/// That it was cancelled in time is not changed by an end.
#[test]
fn what_was_cancelled_is_cancelled_also_in_a_pool_that_stopped() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let (go, wait) = std::sync::mpsc::channel();
    let wait = Mutex::new(wait);
    let pool: EgressPool<CudaSlice<u8>, u8> = EgressPool::builder(&gpu.device)
        .on_error(OnError::Stop)
        .consumer(move |out: Output<Bytes>| {
            wait.lock().unwrap().recv().unwrap();
            if out[0] == 1 { panic!("one") } else { out[0] }
        })
        .unwrap();
    let stream = gpu.another_stream();
    let (first, second) = (slice(&gpu, 1), stream.clone_htod(&[2u8; LEN]).unwrap());
    gpu.context.synchronize().unwrap();
    let first = pool.submit(first).unwrap();
    let gate = gpu.gate(&stream);
    let second = pool.submit(second).unwrap();
    assert!(second.cancel());
    // What is freed then may wait for the device.
    gate.open();
    go.send(()).unwrap();
    assert!(first.wait().unwrap_err().is_panic());
    drop(go);
    let error = second.wait().unwrap_err();
    pool.drain(LIMIT).unwrap();
    assert!(error.is_cancelled() && pool.stats().cancelled == 1, "{error} {:?}", pool.stats());
    drop((pool, stream));
    gpu.finish();
}

/// Items of a stream that is held, and then of another, in the order in which the consumer saw them.
fn order_of_a_held_and_a_free_item(workers: usize, order: transfer_tensor::Order) -> Vec<u8> {
    let Some(gpu) = Gpu::simulated(SPARK).map(Gpu::keeping) else { return vec![1, 2] };
    let kernels = gpu.kernels();
    let (first, second) = (gpu.another_stream(), gpu.another_stream());
    let make = || gpu.device.tensor().strategy(Strategy::ZeroCopy).zeros::<u8>([LEN]).unwrap();
    let (mut held, mut free) = (make(), make());
    let seen: Arc<Mutex<Vec<u8>>> = Arc::default();
    let sink = seen.clone();
    let pool: EgressPool<TransferTensor<u8>, ()> = EgressPool::builder(&gpu.device)
        .workers(workers)
        .order(order)
        .consumer(move |out: Output<Bytes>| sink.lock().unwrap().push(out[0]))
        .unwrap();
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&first);
    kernels.fill(&first, &mut held.device_mut(&first).unwrap(), 1);
    kernels.fill(&second, &mut free.device_mut(&second).unwrap(), 2);
    let tickets = [held, free].map(|tensor| pool.submit(tensor).unwrap());
    until(|| pool.stats().in_flight == 1);
    gate.open();
    tickets.into_iter().for_each(|ticket| ticket.wait().unwrap());
    drop((pool, kernels, first, second));
    gpu.finish();
    Arc::try_unwrap(seen).unwrap().into_inner().unwrap()
}

/// Without workers, too, items come to the consumer in the order that was asked for.
#[test]
fn without_workers_the_order_is_kept() {
    assert_eq!(order_of_a_held_and_a_free_item(0, transfer_tensor::Order::Submission), [1, 2]);
}

// What follows passes, and nobody tested it.

/// A guard that was forgotten is waited for: nothing is looked at that the device may yet write.
#[test]
fn an_item_whose_guard_was_forgotten_is_waited_for() {
    for (profile, strategy) in [(SPARK, Strategy::ZeroCopy), (H200, Strategy::Streamed)] {
        let Some(gpu) = Gpu::simulated(profile).map(Gpu::keeping) else { return };
        let kernels = gpu.kernels();
        let pool: EgressPool<TransferTensor<u8>> = EgressPool::builder(&gpu.device).tickets().unwrap();
        let mut tensor = gpu.device.tensor().strategy(strategy).zeros::<u8>([LEN]).unwrap();
        drop(tensor.host_mut().unwrap());
        drop(tensor.device(&gpu.stream).unwrap());
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let mut guard = tensor.device_mut(&gpu.stream).unwrap();
        kernels.fill(&gpu.stream, &mut guard, 7);
        std::mem::forget(guard);
        let ticket = pool.submit(tensor).unwrap();
        let refused = ticket.wait_timeout(Duration::from_millis(20)).unwrap_err();
        assert!(refused.error.is_not_ready());
        gate.open();
        let out = refused.value.wait().unwrap();
        assert!(out.iter().all(|&byte| byte == 7), "{profile}");
        // A reader that still runs is waited for before anybody writes.
        let mut tensor = out.into_inner().into_tensor().unwrap();
        tensor.host_mut().unwrap()[0] = 1;
        assert_eq!(tensor.host().unwrap()[..2], [1, 7]);
        drop((tensor, pool, kernels));
        gpu.finish_forgotten();
    }
}

/// Sources of which some were begun come back with their bytes when another is refused.
#[test]
fn what_was_begun_comes_back_whole() {
    let (Some(gpu), Some(other)) = (Gpu::simulated(H200), Gpu::simulated(H200)) else { return };
    let kernels = gpu.kernels();
    let pool: EgressPool<Vec<CudaSlice<u8>>> = EgressPool::builder(&gpu.device).tickets().unwrap();
    let pairs: EgressPool<(TransferTensor<u8>, (Vec<CudaSlice<u8>>, CudaSlice<u8>))> =
        EgressPool::builder(&gpu.device).tickets().unwrap();
    let (one, two, three, bad) = (slice(&gpu, 1), slice(&gpu, 2), slice(&gpu, 3), slice(&other, 9));
    let mut tensor = gpu.on_device(&[0; LEN]);
    gpu.context.synchronize().unwrap();
    let refused = pool.submit(vec![one, two, bad, three]).unwrap_err();
    assert!(refused.error.is_invalid_input(), "{}", refused.error);
    let mut back = refused.value.unwrap();
    assert_eq!(back.len(), 4);
    let three = back.pop().unwrap();
    let bad = back.pop().unwrap();
    for (at, slice) in back.iter().enumerate() {
        assert_eq!(slice.stream().clone_dtoh(slice).unwrap(), [at as u8 + 1; LEN]);
    }
    let stats = pool.stats();
    assert_eq!((stats.submitted, stats.in_flight, stats.kept, stats.kept_bytes), (0, 0, 0, 0));
    pool.drain(Duration::ZERO).unwrap();

    kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 7);
    let refused = pairs.submit((tensor, (back, bad))).unwrap_err();
    let (mut tensor, (back, bad)) = refused.value.unwrap();
    kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 8);
    assert!(tensor.host().unwrap().iter().all(|&byte| byte == 8));
    assert_eq!(back[1].stream().clone_dtoh(&back[1]).unwrap(), [2; LEN]);
    pairs.drain(Duration::ZERO).unwrap();
    drop((pool, pairs, tensor, back, bad, three, kernels));
    other.finish();
    gpu.finish();
}

/// Who can not have page-locked memory gets the source back, if the pool is strict.
#[test]
fn without_host_memory_the_source_comes_back() {
    let gpu = Gpu::any(H200).keeping();
    let device = crate::pool::with_pool(&gpu, transfer_tensor::PoolOptions::new().budget(2 << 20).strict(true));
    let pool: EgressPool<CudaSlice<u8>> = EgressPool::builder(&device).budget(u64::MAX).tickets().unwrap();
    let large = gpu.stream.clone_htod(&vec![3u8; 3 << 20]).unwrap();
    let refused = pool.submit(large).unwrap_err();
    let back = refused.value.unwrap();
    assert_eq!(back.stream().clone_dtoh(&back).unwrap(), vec![3; 3 << 20]);
    assert_eq!((pool.stats().submitted, pool.stats().kept), (0, 0));
    drop(pool.submit(slice(&gpu, 1)).unwrap().wait().unwrap());
    drop((pool, back));
    crate::machines::drain(&device);
    drop(device);
    gpu.finish();
}

/// Limits at their ends.
#[test]
fn the_largest_and_smallest_limits_are_fine() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>> = EgressPool::builder(&gpu.device)
        .capacity(0)
        .budget(0)
        .when_full(WhenFull::Wait(Duration::MAX))
        .tickets()
        .unwrap();
    assert!(pool.submit(slice(&gpu, 1)).unwrap_err().error.is_invalid_input());
    drop(pool);
    let pool: EgressPool<CudaSlice<u8>> = EgressPool::builder(&gpu.device)
        .capacity(usize::MAX)
        .budget(u64::MAX)
        .when_full(WhenFull::Wait(Duration::MAX))
        .tickets()
        .unwrap();
    let ticket = pool.submit(slice(&gpu, 1)).unwrap();
    let out = ticket.wait_timeout(Duration::MAX).unwrap();
    pool.drain(Duration::MAX).unwrap();
    assert_eq!(pool.shutdown(Duration::MAX), Default::default());
    drop((pool, out));
    gpu.finish();
}

/// With workers the order of submission is kept, though what is later has come before; that of completion is another.
#[test]
fn with_a_worker_the_order_is_kept() {
    assert_eq!(order_of_a_held_and_a_free_item(1, transfer_tensor::Order::Submission), [1, 2]);
    if Gpu::simulated(SPARK).is_some() {
        assert_eq!(order_of_a_held_and_a_free_item(1, transfer_tensor::Order::Completion), [2, 1]);
    }
}

/// The device's memory is free for the next step while the output is kept.
#[test]
fn a_kept_output_keeps_no_device_memory() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let pool: EgressPool<CudaSlice<u8>> = EgressPool::builder(&gpu.device).tickets().unwrap();
    let frees = || sim.count("cuMemFreeAsync") + sim.count("cuMemFree");
    let source = slice(&gpu, 1);
    let before = frees();
    let out = pool.submit(source).unwrap().wait().unwrap();
    assert_eq!((frees() - before, out[0]), (1, 1));
    let tensors: EgressPool<TransferTensor<u8>> = EgressPool::builder(&gpu.device).tickets().unwrap();
    let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).zeros::<u8>([LEN]).unwrap();
    drop(tensor.device_mut(&gpu.stream).unwrap());
    let before = frees();
    let tensor = tensors.submit(tensor).unwrap().wait().unwrap();
    assert_eq!((frees() - before, tensor[0]), (1, 0));
    drop((pool, out, tensors, tensor));
    gpu.finish();
}

/// The very `Vec` that a tensor was made of comes back, if the host has the newest bytes.
#[test]
fn a_vec_comes_back_through_the_pool() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<TransferTensor<u8>> = EgressPool::builder(&gpu.device).tickets().unwrap();
    let values = pattern(LEN, 3);
    let (address, copy) = (values.as_ptr(), values.clone());
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_vec(values, [LEN]).unwrap();
    drop(tensor.device(&gpu.stream).unwrap());
    let out = pool.submit(tensor).unwrap().wait().unwrap().into_inner();
    assert_eq!((out.copied_bytes(), out.as_ptr()), (0, address));
    let values = out.into_vec().unwrap();
    assert_eq!((values.as_ptr(), values == copy), (address, true));
    drop(pool);
    gpu.finish();
}

/// Who sleeps for room is woken by whoever makes it, though nothing else happens.
#[test]
fn who_sleeps_for_room_is_woken() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>> = EgressPool::builder(&gpu.device).capacity(1).tickets().unwrap();
    // Several times: whether the other thread had fallen asleep is not known.
    for _ in 0..5 {
        let kept = pool.submit(slice(&gpu, 1)).unwrap().wait().unwrap();
        let spare = slice(&gpu, 2);
        pool.drain(LIMIT).unwrap();
        std::thread::scope(|scope| {
            let submit = || pool.submit_or(spare, WhenFull::Wait(HANG)).map(|ticket| ticket.wait().unwrap());
            let blocked = scope.spawn(submit);
            (0..10_000).for_each(|_| std::thread::yield_now());
            let start = std::time::Instant::now();
            drop(kept);
            drop(blocked.join().unwrap().unwrap());
            assert!(start.elapsed() < HANG / 2);
        });
    }
    drop(pool);
    gpu.finish();
}
