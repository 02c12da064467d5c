//! Field reports R37, R38, R73, R79, R80, R87 and R94, of results on their way out and batches on their way in: what can be counted of
//! waiting, of streams, of panics, of who frees what, of captures and of tasks.
#![allow(clippy::type_complexity)] // What a pool takes is spelled out.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Wake, Waker};
use std::time::{Duration, Instant};

use transfer_tensor::cudarc::driver::{CudaSlice, DevicePtrMut, sys};
use transfer_tensor::{
    EgressPool, HostTensor, IngressPrefetcher, Order, Output, PoolOptions, Strategy, TransferTensor, WhenFull,
};

use crate::capture::Capture;
use crate::egress::{LEN, builder, held, slice};
use crate::machines::code;
use crate::pool::{until, with_pool};
use crate::support::{CountingWaker, Gpu, H200, HANG, SPARK, poll_once, within};

type Bytes = HostTensor<u8>;

/// Calls that hold a thread up until the device is done.
const BLOCKING: [&str; 3] = ["cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"];

/// Calls by which the driver would run a function of the crate's.
const CALLBACKS: [&str; 2] = ["cuLaunchHostFunc", "cuStreamAddCallback"];

fn counts<const N: usize>(sim: &cuda_sim::Device, calls: [&str; N]) -> [usize; N] {
    calls.map(|call| sim.count(call))
}

/// The calling thread, as the simulator's log names it.
fn this_thread(gpu: &Gpu) -> u64 {
    gpu.context.synchronize().unwrap();
    let calls = gpu.sim.as_ref().unwrap().calls();
    calls.iter().rfind(|call| call.name == "cuCtxSynchronize").unwrap().thread
}

/// The threads that asked for an event while the log was written, and how often.
fn asked(sim: &cuda_sim::Device) -> (BTreeSet<u64>, usize) {
    let calls: Vec<_> = sim.calls().into_iter().filter(|call| call.name == "cuEventQuery").collect();
    (calls.iter().map(|call| call.thread).collect(), calls.len())
}

/// R37: of the threads that wait one asks, it sleeps between two questions, and none is held by the driver, which would spin. The
/// report's cure, events that block, costs an H200 more than it saves (`docs/benchmarks.md`). Nobody asks for nothing.
#[test]
fn of_those_who_wait_one_asks_and_it_sleeps() {
    const QUESTIONS: usize = 200;
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let pool: EgressPool<CudaSlice<u8>, u8> = builder(&gpu).workers(4).consumer(|out: Output<Bytes>| out[0]).unwrap();
    assert_eq!(pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap(), 0);
    let slices = [1, 2, 3, 4].map(|value| slice(&gpu, value));
    gpu.context.synchronize().unwrap();
    let blocked = counts(sim, BLOCKING);
    let gate = gpu.gate(&gpu.stream);
    let tickets = slices.map(|slice| pool.submit(slice).unwrap());
    // It asks without a pause for some µs after each item; then its pauses grow to a millisecond.
    until(|| asked(sim).1 > 3 * QUESTIONS);
    sim.clear_calls();
    let start = Instant::now();
    until(|| asked(sim).1 >= QUESTIONS);
    // The other way round it says nothing: a machine may be slow.
    assert!(start.elapsed() >= Duration::from_millis(QUESTIONS as u64 / 2), "{:?}", start.elapsed());
    assert_eq!((asked(sim).0.len(), counts(sim, BLOCKING)), (1, blocked.map(|_| 0)));
    gate.open();
    assert_eq!(tickets.map(|ticket| ticket.wait().unwrap()), [1, 2, 3, 4]);
    pool.drain(HANG).unwrap();
    gpu.device.drain(HANG).unwrap();
    sim.clear_calls();
    (0..10_000).for_each(|_| std::thread::yield_now());
    assert_eq!(sim.calls().len(), 0, "an idle pool asks");
    drop(pool);
    gpu.finish();
}

/// Of those who have consumed, and find something under way, none asks where somebody does.
#[test]
fn of_those_who_have_consumed_none_asks_beside_another() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let together = std::sync::Barrier::new(4);
    let consumer = move |out: Output<Bytes>| {
        if out[0] > 0 {
            together.wait();
        }
        out[0]
    };
    let pool: EgressPool<CudaSlice<u8>, u8> = builder(&gpu).workers(4).consumer(consumer).unwrap();
    let other = gpu.another_stream();
    for stream in [&gpu.stream, &other] {
        assert_eq!(pool.submit(stream.clone_htod(&[0; LEN]).unwrap()).unwrap().wait().unwrap(), 0);
    }
    let held = other.clone_htod(&[0; LEN]).unwrap();
    let slices = [1, 2, 3, 4].map(|value| slice(&gpu, value));
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&other);
    let held = pool.submit(held).unwrap();
    let tickets = slices.map(|slice| pool.submit(slice).unwrap());
    assert_eq!(tickets.map(|ticket| ticket.wait().unwrap()), [1, 2, 3, 4]);
    // Whoever consumed looks for something to do by now.
    until(|| asked(sim).1 > 100);
    sim.clear_calls();
    until(|| asked(sim).1 >= 50);
    assert_eq!(asked(sim).0.len(), 1);
    gate.open();
    assert_eq!(held.wait().unwrap(), 0);
    drop((pool, other));
    gpu.finish();
}

/// R37: no event of the crate's keeps time, which would make it slower.
#[test]
fn events_keep_no_time() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let pool: EgressPool<TransferTensor<u8>> = builder(&gpu).tickets().unwrap();
    sim.clear_calls();
    drop(pool.submit(gpu.on_device(&[1; LEN])).unwrap().wait().unwrap());
    let made: Vec<_> = sim.calls().into_iter().filter(|call| call.name == "cuEventCreate").collect();
    let disable_timing = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u64;
    assert!(!made.is_empty() && made.iter().all(|event| event.args[0] == disable_timing), "{made:?}");
    drop(pool);
    gpu.finish();
}

/// R38: copies out, copies in and the work on the device are on three streams, so that each goes on while another is held.
#[test]
fn copies_out_copies_in_and_work_hold_up_none_of_the_others() {
    within(HANG, || {
        let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        let (work, other) = (gpu.stream.clone(), gpu.another_stream());
        let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
        let fill = |number: u64, rows: &mut [u8]| {
            rows.fill(number as u8);
            Ok::<_, ()>(1)
        };
        let mut batches = IngressPrefetcher::builder(&gpu.device, [1, LEN]).depth(2).fill(fill).unwrap();
        // Three go round.
        drop([batches.next(), batches.next(), batches.next()]);
        drop(pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap());
        drop(pool.submit(other.clone_htod(&[0u8; LEN]).unwrap()).unwrap().wait().unwrap());
        let (of_work, of_other) = (slice(&gpu, 1), other.clone_htod(&[2u8; LEN]).unwrap());
        gpu.context.synchronize().unwrap();
        sim.clear_calls();
        let gate = gpu.gate(&work);
        let late = pool.submit(of_work).unwrap();
        assert_eq!(pool.submit(of_other).unwrap().wait().unwrap()[0], 2);
        for _ in 0..4 {
            // On the device, though the caller's stream is held.
            let transfer = batches.next().unwrap().unwrap().into_tensor().to_device().unwrap();
            drop(transfer.wait().unwrap());
        }
        let late = late.try_wait().unwrap_err();
        assert!(late.error.is_not_ready());
        gate.open();
        assert_eq!(late.value.wait().unwrap()[0], 1);
        let streams = |copies: &str| {
            let calls = sim.calls().into_iter().filter(|call| call.name.starts_with(copies));
            calls.map(|call| call.stream).collect::<BTreeSet<_>>()
        };
        let (up, down) = (streams("cuMemcpyHtoDAsync"), streams("cuMemcpyDtoHAsync"));
        let callers = [&work, &other].map(|stream| stream.cu_stream() as u64).into();
        assert!(!up.is_empty() && !down.is_empty());
        assert!(up.is_disjoint(&down) && up.is_disjoint(&callers) && down.is_disjoint(&callers), "{up:?} {down:?}");
        drop((pool, batches, work, other));
        gpu.finish();
    });
}

/// Panics when it wakes somebody.
struct BadWake;

impl Wake for BadWake {
    fn wake(self: Arc<Self>) {
        panic!("a waker of the caller's");
    }
}

/// A waker that panics when it is cloned, which happens under a lock.
fn bad_clone() -> Waker {
    static TABLE: RawWakerVTable = RawWakerVTable::new(|_| panic!("a clone of the caller's"), |_| (), |_| (), |_| ());
    // SAFETY: there is nothing behind it.
    unsafe { Waker::from_raw(RawWaker::new(std::ptr::null(), &TABLE)) }
}

/// Polls what is not ready with wakers that panic: first at once, then when they wake.
fn poll_badly<R>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<R>) {
    assert!(catch_unwind(AssertUnwindSafe(|| poll(&mut Context::from_waker(&bad_clone())).is_ready())).is_err());
    assert!(poll(&mut Context::from_waker(&Waker::from(Arc::new(BadWake)))).is_pending());
}

/// R73: callers' wakers panic while a lock is held, and on the crate's threads: whoever else waits is told, and so is their own task.
#[test]
fn wakers_that_panic_hold_nobody_up() {
    within(HANG, || {
        let gpu = Gpu::any(H200).keeping();
        let kernels = gpu.kernels();
        let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
        held(&pool, || slice(&gpu, 0));
        let (sender, mut outputs) = pool.channel(Order::Completion);
        let [first, second, third] = [1, 2, 3].map(|value| slice(&gpu, value));
        let mut tensors = [0, 1].map(|_| gpu.on_device(&[0; LEN]));
        tensors.iter_mut().for_each(|tensor| drop(tensor.host_mut().unwrap()));
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let (mut first, second) = (pool.submit(first).unwrap(), pool.submit(second).unwrap());
        sender.submit(third).unwrap();
        let [mut fourth, fifth] = tensors.map(|mut tensor| {
            kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 4);
            tensor.to_host().unwrap()
        });
        poll_badly(|context| Pin::new(&mut first).poll(context));
        poll_badly(|context| outputs.poll_next(context));
        poll_badly(|context| Pin::new(&mut fourth).poll(context));
        let others = (std::thread::spawn(|| second.wait()), std::thread::spawn(|| crate::support::block_on(fifth)));
        gate.open();
        assert_eq!(others.0.join().unwrap().unwrap()[0], 2);
        assert_eq!(others.1.join().unwrap().unwrap().host().unwrap()[0], 4);
        assert_eq!(first.wait().unwrap()[0], 1);
        assert_eq!(outputs.next().unwrap().result.unwrap()[0], 3);
        assert_eq!(fourth.wait().unwrap().host().unwrap()[0], 4);
        pool.drain(HANG).unwrap();
        gpu.device.drain(HANG).unwrap();

        let (go, wait) = channel::<()>();
        let wait = Mutex::new(wait);
        let fill = move |number: u64, rows: &mut [u8]| {
            wait.lock().unwrap().recv().unwrap();
            rows.fill(number as u8);
            Ok::<_, ()>(1)
        };
        let mut batches = IngressPrefetcher::builder(&gpu.device, [1, LEN]).depth(1).fill(fill).unwrap();
        poll_badly(|context| batches.poll_next(context));
        go.send(()).unwrap();
        assert_eq!(batches.next().unwrap().unwrap().number(), 0);
        // One more is begun, and ends with that.
        drop(go);
        drop((sender, outputs, pool, batches, kernels));
        gpu.finish();
    });
}

/// R79: the driver runs no function of the crate's, in which neither it nor a consumer could call the driver; and what one round takes
/// serves all.
#[test]
fn no_function_is_given_to_the_driver_and_memory_goes_round() {
    const MIB: usize = 1 << 20;
    for profile in [H200, SPARK] {
        let Some(gpu) = Gpu::simulated(profile).map(Gpu::keeping) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        // A consumer may use the driver, as it could not in a callback.
        let (device, stream) = (gpu.device.clone(), gpu.another_stream());
        let consumer = move |out: Output<(Bytes, Bytes)>| {
            let copy = device.upload_new(&stream, &out.0).unwrap();
            stream.clone_dtoh(&copy.slice(MIB - 1..)).unwrap()[0]
        };
        let pool: EgressPool<(CudaSlice<u8>, TransferTensor<u8>), u8> = builder(&gpu).consumer(consumer).unwrap();
        let fill = |number: u64, rows: &mut [u8]| {
            rows.fill(number as u8);
            Ok::<_, ()>(1)
        };
        let mut batches = IngressPrefetcher::builder(&gpu.device, [1, MIB]).depth(1).fill(fill).unwrap();
        let mut round = |value: u8| {
            let batch = batches.next().unwrap().unwrap();
            let mut slice = gpu.stream.alloc_zeros::<u8>(MIB).unwrap();
            gpu.stream.memcpy_dtod(&batch.device(&gpu.stream).unwrap(), &mut slice).unwrap();
            let mut tensor = gpu.device.tensor().zeros::<u8>([MIB]).unwrap();
            gpu.stream.memset_zeros(&mut tensor.device_mut(&gpu.stream).unwrap()).unwrap();
            drop(batch);
            assert_eq!(pool.submit((slice, tensor)).unwrap().wait().unwrap(), value);
            gpu.device.drain(HANG).unwrap();
        };
        (0..3).for_each(&mut round);
        let before = sim.evidence();
        (3..11).for_each(&mut round);
        let after = sim.evidence();
        // How many batches there are at a time, up to three, is the threads' luck; what every round kept would be eight times as much.
        let peak = |of: &cuda_sim::Evidence| of.device_bytes_peak + of.pinned_bytes_peak + of.registered_bytes_peak;
        assert!(peak(&after) - peak(&before) <= 4 * MIB as u64, "{profile}: {before:?}, then {after:?}");
        assert_eq!(counts(sim, CALLBACKS), [0, 0], "{profile}");
        drop((pool, batches));
        gpu.finish();
    }
}

/// R80: while a consumer and a source of batches take their time, others get memory, free it, give the pool's back and have tensors moved.
#[test]
fn slow_callers_code_holds_up_no_memory() {
    within(HANG, || {
        let gpu = Gpu::any(H200);
        let (entered, inside) = channel();
        let (go, wait) = channel::<()>();
        let (entered, wait) = (Mutex::new(entered), Mutex::new(wait));
        let slow = move |what: &'static str| {
            entered.lock().unwrap().send(what).unwrap();
            // Until the other end is gone.
            let _ = wait.lock().unwrap().recv();
        };
        let slow = Arc::new(slow);
        let (consume, load) = (slow.clone(), slow);
        let pool: EgressPool<(CudaSlice<u8>, TransferTensor<u8>), u8> = builder(&gpu)
            .consumer(move |out: Output<(Bytes, Bytes)>| {
                consume("consumer");
                out.0[0]
            })
            .unwrap();
        let mut tensor = gpu.on_device(&[2; LEN]);
        gpu.stream.memset_zeros(&mut tensor.device_mut(&gpu.stream).unwrap()).unwrap();
        let ticket = pool.submit((slice(&gpu, 1), tensor)).unwrap();
        let fill = move |_: u64, rows: &mut [u8]| {
            load("source");
            rows.fill(1);
            Ok::<_, ()>(1)
        };
        let batches = IngressPrefetcher::builder(&gpu.device, [1, LEN]).depth(1).fill(fill).unwrap();
        assert_eq!(BTreeSet::from([inside.recv().unwrap(), inside.recv().unwrap()]), ["consumer", "source"].into());

        let device = with_pool(&gpu, PoolOptions::new().budget(8 << 20).when_full(WhenFull::Block));
        device.pool().reserve(1 << 20, 4).unwrap();
        let large = device.pool().acquire(8 << 20).unwrap();
        let other = device.pool().clone();
        let waits = std::thread::spawn(move || drop(other.acquire(4 << 20).unwrap()));
        drop(large);
        waits.join().unwrap();
        device.pool().trim(0);
        for value in 0..20 {
            let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).zeros::<u8>([LEN]).unwrap();
            tensor.host_mut().unwrap().fill(value);
            let tensor = tensor.to_device().unwrap().wait().unwrap();
            drop(slice(&gpu, value));
            drop(tensor);
            gpu.device.pool().trim(0);
        }
        crate::machines::drain(&device);
        gpu.device.drain(HANG).unwrap();
        assert!(ticket.try_wait().is_err_and(|refused| {
            let not_ready = refused.error.is_not_ready();
            drop(refused.value);
            not_ready
        }));
        drop(go);
        pool.drain(HANG).unwrap();
        assert_eq!(pool.stats().delivered, 1);
        drop((pool, batches));
        crate::pool::end(gpu, device);
    });
}

/// R87: nothing of the crate's gets into a graph, which would copy again from or to memory that is long somebody else's. What is on
/// the stream that is captured is refused, and comes back; all else goes on.
#[test]
fn a_graph_gets_no_copy_of_items_or_batches() {
    use sys::CUstreamCaptureMode::{CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL};
    for mode in [CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL] {
        let gpu = Gpu::any(H200).keeping();
        let other = gpu.another_stream();
        let slices: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
        let shared: EgressPool<Arc<CudaSlice<u8>>> = builder(&gpu).tickets().unwrap();
        let fill = |number: u64, rows: &mut [u8]| {
            rows.fill(number as u8);
            Ok::<_, ()>(1)
        };
        let mut batches = IngressPrefetcher::builder(&gpu.device, [1, LEN]).depth(2).fill(fill).unwrap();
        held(&slices, || slice(&gpu, 0));
        let (source, shared_source) = (slice(&gpu, 0x11), Arc::new(slice(&gpu, 0x12)));
        let others: Vec<_> = (0..8).map(|_| other.clone_htod(&[0x22u8; LEN]).unwrap()).collect();
        let batch = batches.next().unwrap().unwrap();
        let mut scratch = slice(&gpu, 0);
        let address = scratch.device_ptr_mut(&gpu.stream).0;
        gpu.context.synchronize().unwrap();

        let capture = Capture::begin(&gpu.stream, mode);
        // One node of the caller's own.
        // SAFETY: the scratch memory is as long.
        assert_eq!(code(unsafe { sys::cuMemsetD8Async(address, 3, LEN, gpu.stream.cu_stream()) }), 0);
        let refused = slices.submit(source).unwrap_err();
        assert!(refused.error.is_capturing(), "{}", refused.error);
        let source = refused.value.unwrap();
        let refused = shared.submit(shared_source).unwrap_err();
        assert!(refused.error.is_capturing(), "{}", refused.error);
        let shared_source = refused.value.unwrap();
        assert!(batch.device(&gpu.stream).unwrap_err().is_capturing());
        for slice in others {
            assert_eq!(slices.submit(slice).unwrap().wait().unwrap()[0], 0x22);
        }
        for number in 1..9 {
            let batch = batches.next().unwrap().unwrap();
            drop(batch.device(&other).unwrap());
            assert_eq!(batch.number(), number);
        }
        assert_eq!(capture.end(), 1);

        assert_eq!(slices.submit(source).unwrap().wait().unwrap()[0], 0x11);
        assert_eq!(shared.submit(shared_source).unwrap().wait().unwrap()[0], 0x12);
        assert_eq!(gpu.stream.clone_dtoh(&batch.device(&gpu.stream).unwrap()).unwrap(), [0; LEN]);
        assert_eq!((slices.stats().submitted, shared.stats().submitted), (10, 1));
        drop((slices, shared, batches, batch, scratch, other));
        gpu.finish();
    }
}

/// R94: a task that awaits items does not touch the driver, so it blocks nobody; each is woken once, and may go on where no context is
/// current; what is done is dropped without a call.
#[test]
fn one_thread_awaits_many_items() {
    const ITEMS: usize = 64;
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let (sim, thread) = (gpu.sim.as_ref().unwrap(), this_thread(&gpu));
    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).capacity(2 * ITEMS).tickets().unwrap();
    held(&pool, || slice(&gpu, 0));
    let (sender, mut outputs) = pool.channel(Order::Submission);
    let sources: Vec<_> = (0..2 * ITEMS).map(|value| slice(&gpu, value as u8)).collect();
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let mut sources = sources.into_iter();
    let mut tasks: Vec<_> =
        sources.by_ref().take(ITEMS).map(|source| (pool.submit(source).unwrap(), CountingWaker::new())).collect();
    for source in sources {
        sender.submit(source).unwrap();
    }
    let own = || sim.calls().iter().filter(|call| call.thread == thread).count();
    sim.clear_calls();
    for _ in 0..10 {
        for (ticket, counter) in &mut tasks {
            let waker = Waker::from(counter.clone());
            assert!(Pin::new(ticket).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        assert!(poll_once(&mut Box::pin(outputs.next_async())).is_pending());
    }
    assert_eq!(own(), 0, "a poll calls the driver");
    gate.open();
    pool.drain(HANG).unwrap();
    sim.clear_calls();
    assert!(tasks.iter().all(|(_, counter)| counter.wakes() == 1));
    let done = std::thread::spawn(move || {
        let half = tasks.split_off(ITEMS / 2);
        for (at, (mut ticket, _)) in tasks.into_iter().enumerate() {
            let Poll::Ready(out) = poll_once(&mut ticket) else { panic!("not ready") };
            assert_eq!(out.unwrap()[LEN - 1], at as u8);
        }
        half
    });
    drop(done.join().unwrap());
    for at in ITEMS..2 * ITEMS {
        let Poll::Ready(Some(out)) = poll_once(&mut Box::pin(outputs.next_async())) else { panic!("not ready") };
        assert_eq!(out.result.unwrap()[0], at as u8);
    }
    assert_eq!(sim.calls().len(), 0, "what is done calls the driver");
    drop((sender, outputs, pool));
    gpu.finish();
}
