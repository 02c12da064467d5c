//! The egress pool attacked: one thread for all, refused copies of what a thread's default stream makes, captures that begin while a copy
//! is under way, forks, wakers that run a caller's code.
#![allow(clippy::type_complexity)] // What a pool takes is spelled out.

use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use transfer_tensor::cudarc::driver::{CudaSlice, sys};
use transfer_tensor::{EgressPool, HostTensor, Output, Strategy, Ticket, TransferTensor};

use crate::egress::{LEN, builder, slice};
use crate::forked::in_a_forked_child;
use crate::pool::until;
use crate::support::{Gpu, H200, HANG, within};

pub(crate) const LIMIT: Duration = Duration::from_secs(5);

type Bytes = HostTensor<u8>;

/// What a ticket gives in time. If it does not, the pool is forgotten: it would hang, too.
#[track_caller]
pub(crate) fn in_time<S, R>(pool: EgressPool<S, R>, ticket: Ticket<R>) -> (EgressPool<S, R>, R)
where
    S: transfer_tensor::EgressSource,
    R: Send + 'static,
{
    match ticket.wait_timeout(LIMIT) {
        Ok(out) => (pool, out),
        Err(refused) => {
            let stats = pool.stats();
            std::mem::forget((pool, refused.value));
            panic!("{}: {stats:?}", refused.error);
        }
    }
}

/// A tensor comes by the device's waiter; the pool's only thread does nothing but ask for slices.
#[test]
fn an_awake_pool_of_one_thread_consumes_what_it_did_not_ask_for() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<TransferTensor<u8>> = builder(&gpu).low_latency(true).tickets().unwrap();
    let ticket = pool.submit(gpu.on_device(&[3; LEN])).unwrap();
    let (pool, out) = in_time(pool, ticket);
    assert_eq!(out[0], 3);
    drop((pool, out));
    gpu.finish();
}

/// The only thread asks for a slice of a stream that is held; an item that waits for nothing goes past it.
#[test]
fn what_was_not_asked_for_is_not_held_up_by_what_is() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<Vec<CudaSlice<u8>>> = builder(&gpu).tickets().unwrap();
    drop(pool.submit(vec![slice(&gpu, 0)]).unwrap().wait().unwrap());
    drop(pool.submit(vec![]).unwrap().wait().unwrap());
    let source = slice(&gpu, 1);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let held = pool.submit(vec![source]).unwrap();
    let ticket = pool.submit(vec![]).unwrap();
    let (pool, out) = in_time(pool, ticket);
    assert!(out.is_empty());
    gate.open();
    assert_eq!(held.wait_timeout(HANG).unwrap()[0][0], 1);
    drop((pool, out));
    gpu.finish();
}

/// A child of a fork is refused, also where there is no room that anybody could make.
#[test]
fn a_forked_child_is_refused_rather_than_kept_waiting() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).capacity(1).tickets().unwrap();
    let kept = pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap();
    let source = slice(&gpu, 1);
    gpu.context.synchronize().unwrap();
    let mut source = Some(source);
    let status = in_a_forked_child(&mut || {
        let refused = pool.submit(source.take().unwrap()).unwrap_err();
        let forked = refused.error.is_forked();
        std::mem::forget(refused.value);
        forked
    });
    assert_eq!(status, 0, "ended by a signal: it hangs");
    drop((kept, pool, source));
    gpu.finish();
}

/// A task that keeps a pool.
struct Task(Mutex<Option<EgressPool<CudaSlice<u8>, u8>>>);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        drop(self.0.lock());
    }
}

/// A task's waker may be all that keeps the task, and the task all that keeps the pool.
#[test]
fn a_waker_that_is_replaced_may_drop_the_pool() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>, u8> = builder(&gpu).consumer(|out: Output<Bytes>| out[0]).unwrap();
    pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap();
    let source = slice(&gpu, 1);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let mut ticket = pool.submit(source).unwrap();
    let task = Waker::from(Arc::new(Task(Mutex::new(Some(pool)))));
    assert!(std::pin::Pin::new(&mut ticket).poll(&mut Context::from_waker(&task)).is_pending());
    drop(task);
    let opener = gate.open_later();
    let ticket = within(LIMIT, move || {
        let _ = std::pin::Pin::new(&mut ticket).poll(&mut Context::from_waker(Waker::noop()));
        ticket
    });
    assert_eq!(ticket.wait_timeout(LIMIT).unwrap(), 1);
    drop(opener);
    gpu.finish();
}

/// As above, for outputs.
#[test]
fn a_waker_that_is_replaced_may_drop_the_pool_of_outputs() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>, u8> = builder(&gpu).consumer(|out: Output<Bytes>| out[0]).unwrap();
    pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap();
    let (sender, mut outputs) = pool.channel(transfer_tensor::Order::Completion);
    let source = slice(&gpu, 1);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    sender.submit(source).unwrap();
    let task = Waker::from(Arc::new(Task(Mutex::new(Some(pool)))));
    assert!(outputs.poll_next(&mut Context::from_waker(&task)).is_pending());
    drop(task);
    let opener = gate.open_later();
    let mut outputs = within(LIMIT, move || {
        let _ = outputs.poll_next(&mut Context::from_waker(Waker::noop()));
        outputs
    });
    drop(sender);
    assert_eq!(outputs.next_timeout(LIMIT).unwrap().unwrap().result.unwrap(), 1);
    drop((opener, outputs));
    gpu.finish();
}

/// Both of what goes by a lane and what goes by the waiter, with an end of the pool in between, from many threads.
#[test]
fn mixed_ways_end() {
    let gpu = Gpu::any(H200).keeping();
    for (workers, awake) in [(0, false), (0, true), (1, false), (2, true)] {
        let pool: EgressPool<Vec<CudaSlice<u8>>, usize> = builder(&gpu)
            .workers(workers)
            .low_latency(awake)
            .capacity(8)
            .consumer(|out: Output<Vec<Bytes>>| out.len())
            .unwrap();
        let (sender, outputs) = pool.channel(transfer_tensor::Order::Submission);
        let pool = within(Duration::from_secs(20), {
            let (gpu_stream, sender) = (gpu.stream.clone(), sender);
            move || {
                std::thread::scope(|scope| {
                    for _ in 0..2 {
                        let (stream, sender) = (&gpu_stream, &sender);
                        scope.spawn(move || {
                            for at in 0..100usize {
                                let one = || stream.clone_htod(&[at as u8; 32]).unwrap();
                                sender.submit((0..at % 3).map(|_| one()).collect()).unwrap();
                            }
                        });
                    }
                });
                pool.drain(LIMIT).unwrap();
                pool
            }
        });
        assert_eq!(outputs.filter(|out| out.result.is_ok()).count(), 200);
        let stats = pool.stats();
        assert_eq!((stats.delivered, stats.in_flight, stats.waiting, stats.kept), (200, 0, 0, 0));
        drop(pool);
    }
    gpu.finish();
}

/// Whatever the driver refuses, once: every ticket ends, the counts are right, and what comes next is right.
#[test]
fn any_call_may_be_refused_once() {
    let calls = [
        "cuEventRecord",
        "cuEventCreate",
        "cuEventQuery",
        "cuStreamQuery",
        "cuStreamWaitEvent",
        "cuMemcpyDtoHAsync",
        "cuStreamCreate",
        "cuMemHostAlloc",
        "cuStreamIsCapturing",
        "cuThreadExchangeStreamCaptureMode",
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
        "cuMemFreeAsync",
    ];
    for (awake, workers) in [(false, 0), (true, 0), (false, 2)] {
        let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        for call in calls {
            for nth in 1..7 {
                let pool: EgressPool<(Vec<CudaSlice<u8>>, Arc<CudaSlice<u8>>), u8> = builder(&gpu)
                    .low_latency(awake)
                    .workers(workers)
                    .consumer(|out: Output<(Vec<Bytes>, Bytes)>| out.0.iter().map(|out| out[0]).sum::<u8>() + out.1[0])
                    .unwrap();
                let step = || ((0..3).map(|at| slice(&gpu, at)).collect::<Vec<_>>(), Arc::new(slice(&gpu, 4)));
                let steps: Vec<_> = (0..4).map(|_| step()).collect();
                gpu.context.synchronize().unwrap();
                sim.fail_nth(call, nth, 999);
                let mut tickets = Vec::new();
                let mut back = Vec::new();
                for step in steps {
                    match pool.submit(step) {
                        Ok(ticket) => tickets.push(ticket),
                        Err(refused) => back.extend(refused.value),
                    }
                }
                for ticket in tickets {
                    match ticket.wait_timeout(LIMIT) {
                        Ok(sum) => assert_eq!(sum, 7, "{call} {nth}"),
                        Err(refused) => assert!(!refused.error.is_not_ready(), "{call} {nth} {awake} {workers}: stuck"),
                    }
                }
                sim.clear_failures();
                for (many, one) in &back {
                    assert_eq!(gpu.stream.clone_dtoh(&many[2]).unwrap(), [2; LEN], "{call} {nth}");
                    assert_eq!(gpu.stream.clone_dtoh(&**one).unwrap(), [4; LEN], "{call} {nth}");
                }
                assert_eq!(pool.submit(step()).unwrap().wait_timeout(LIMIT).unwrap(), 7, "{call} {nth}");
                pool.drain(LIMIT).unwrap();
                until(|| pool.stats().kept == 0);
                let stats = pool.stats();
                assert_eq!((stats.in_flight, stats.waiting, stats.consuming), (0, 0, 0), "{call} {nth}");
                assert_eq!(stats.submitted, stats.delivered + stats.failed, "{call} {nth}");
                within(LIMIT, move || drop(pool));
                let _ = gpu.context.check_err();
            }
        }
        gpu.device.drain(HANG).unwrap();
        assert_eq!(sim.violations(), Vec::<String>::new());
    }
}

/// Slices, on several lanes, with those that the pool submits: every item ends with the fault, and so does the pool.
#[test]
fn a_fault_ends_every_slice() {
    for awake in [false, true] {
        let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).low_latency(awake).tickets().unwrap();
        let streams: Vec<_> = (0..3).map(|_| gpu.another_stream()).collect();
        for stream in &streams {
            drop(pool.submit(stream.clone_htod(&[0u8; LEN]).unwrap()).unwrap().wait().unwrap());
        }
        let mut slices: Vec<_> =
            (0..9).map(|at| streams[at % 3].clone_htod(&vec![1u8; LEN << (at / 3 * 4)]).unwrap()).collect();
        gpu.context.synchronize().unwrap();
        let gates: Vec<_> = streams.iter().map(|stream| gpu.gate(stream)).collect();
        sim.fault_on_stream(streams[0].cu_stream() as u64, crate::egress::FAULT);
        streams[0].memset_zeros(&mut slices[0]).unwrap();
        let tickets: Vec<_> = slices.into_iter().map(|slice| pool.submit(slice).unwrap()).collect();
        drop(gates);
        let start = Instant::now();
        let ends: Vec<_> = tickets.into_iter().map(|ticket| ticket.wait_timeout(LIMIT)).collect();
        assert!(ends.iter().flatten().count() < 9);
        for refused in ends.into_iter().filter_map(Result::err) {
            assert!(refused.error.is_fault(), "{}", refused.error);
        }
        assert!(start.elapsed() < LIMIT);
        pool.drain(LIMIT).unwrap();
        let stats = pool.stats();
        assert_eq!((stats.in_flight, stats.waiting, stats.consuming, stats.kept), (0, 0, 0, 0));
        within(LIMIT, move || drop(pool));
        assert_eq!(sim.violations(), Vec::<String>::new());
        std::mem::forget((streams, gpu));
    }
}

/// A capture of another stream, in the mode that forbids most to every thread, notices nothing of a pool that begins.
#[test]
fn a_capture_of_another_stream_is_not_disturbed() {
    for awake in [false, true] {
        let gpu = Gpu::any(H200).keeping();
        let captured = gpu.another_stream();
        let sources: Vec<_> = (0..8).map(|value| slice(&gpu, value)).collect();
        gpu.context.synchronize().unwrap();
        captured.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).low_latency(awake).tickets().unwrap();
        let tickets: Vec<_> = sources.into_iter().map(|source| pool.submit(source).unwrap()).collect();
        for (ticket, value) in tickets.into_iter().zip(0..) {
            assert_eq!(ticket.wait_timeout(LIMIT).unwrap()[0], value);
        }
        let mut graph = std::ptr::null_mut();
        // SAFETY: a live stream, and a place for the graph.
        let ended = unsafe { sys::cuStreamEndCapture(captured.cu_stream(), &raw mut graph) } as u32;
        assert_eq!(ended, 0);
        // SAFETY: the graph is alive.
        unsafe { sys::cuGraphDestroy(graph) };
        drop((pool, captured));
        gpu.finish();
    }
}

/// Of another context object, with an error that somebody left there: it is nobody's here, and the bytes are right.
#[test]
fn a_slice_of_another_context_object_comes_out() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    for streams in [1, 2] {
        let other = gpu.another_context();
        let stream = other.default_stream();
        let more: Vec<_> = (1..streams).map(|_| other.new_stream().unwrap()).collect();
        let pool: EgressPool<(CudaSlice<u8>, Arc<CudaSlice<u8>>)> = builder(&gpu).tickets().unwrap();
        for value in 0..20u8 {
            let source = more.first().unwrap_or(&stream).clone_htod(&[value; LEN]).unwrap();
            let shared = Arc::new(stream.clone_htod(&[value; 100]).unwrap());
            other
                .record_err::<()>(Err(transfer_tensor::cudarc::driver::DriverError(sys::CUresult::CUDA_ERROR_UNKNOWN)));
            let out = pool.submit((source, shared)).unwrap().wait_timeout(LIMIT).unwrap();
            assert_eq!((&out.0[..], &out.1[..]), (&[value; LEN][..], &[value; 100][..]));
        }
        drop((pool, more, stream, other));
    }
    gpu.finish();
}

/// Bytes that are no value are the item's error; nothing is lost with it.
#[test]
fn bytes_that_are_no_bool_are_one_items_error() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<Vec<CudaSlice<bool>>> = builder(&gpu).tickets().unwrap();
    let bools = |value: u8| {
        let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).zeros::<bool>([LEN]).unwrap();
        drop(tensor.device_mut(&gpu.stream).unwrap());
        let mut slice = tensor.into_cuda_slice().unwrap();
        let len = slice.len();
        let address = {
            use transfer_tensor::cudarc::driver::DevicePtrMut;
            slice.device_ptr_mut(&gpu.stream).0
        };
        // SAFETY: as long.
        assert_eq!(unsafe { sys::cuMemsetD8Async(address, value, len, gpu.stream.cu_stream()) } as u32, 0);
        slice
    };
    for _ in 0..3 {
        let good = pool.submit(vec![bools(1), bools(0)]).unwrap();
        let bad = pool.submit(vec![bools(1), bools(2), bools(0)]).unwrap();
        assert!(good.wait_timeout(LIMIT).unwrap()[0][LEN - 1]);
        assert!(!bad.wait_timeout(LIMIT).unwrap_err().error.is_not_ready());
    }
    pool.drain(LIMIT).unwrap();
    let stats = pool.stats();
    assert_eq!((stats.failed, stats.delivered, stats.kept, stats.in_flight), (3, 3, 0, 0));
    drop(pool);
    gpu.finish();
}

/// Pools that begin and end under load, from several threads, whose items come by lanes and by the waiter, with tickets that are waited
/// for, polled, dropped and cancelled.
#[test]
fn pools_come_and_go_under_load() {
    let gpu = Gpu::any(H200).keeping();
    let begun = Instant::now();
    let mut round = 0usize;
    while begun.elapsed() < Duration::from_secs(4) {
        round += 1;
        let pool: EgressPool<Vec<CudaSlice<u8>>, usize> = builder(&gpu)
            .workers(round % 3)
            .low_latency(round.is_multiple_of(4))
            .capacity(1 + round % 7)
            .order(if round % 5 < 3 { Default::default() } else { transfer_tensor::Order::Submission })
            .consumer(|out: Output<Vec<Bytes>>| {
                assert!(out.iter().all(|bytes| bytes.iter().all(|&byte| byte == bytes.len() as u8)));
                out.len()
            })
            .unwrap();
        let stream = gpu.stream.clone();
        within(Duration::from_secs(20), move || {
            std::thread::scope(|scope| {
                for thread in 0..3 {
                    let (pool, stream) = (&pool, &stream);
                    scope.spawn(move || {
                        for at in 0..30usize {
                            let many = (at * 7 + thread + round) % 4;
                            let one = |of: usize| stream.clone_htod(&vec![(1 + of * 50) as u8; 1 + of * 50]).unwrap();
                            let mut ticket = pool.submit((0..many).map(one).collect()).unwrap();
                            match (at + round) % 5 {
                                0 => drop(ticket),
                                1 => drop(ticket.cancel()),
                                2 => assert_eq!(crate::support::block_on(ticket).unwrap(), many),
                                3 => {
                                    let _ = crate::support::poll_once(&mut ticket);
                                }
                                _ => assert_eq!(ticket.wait_timeout(LIMIT).unwrap(), many),
                            }
                        }
                    });
                }
            });
            let drained = round.is_multiple_of(2);
            if drained {
                pool.drain(LIMIT).unwrap();
                let stats = pool.stats();
                assert_eq!(stats.delivered + stats.cancelled, 90, "{stats:?}");
                assert_eq!((stats.failed, stats.in_flight, stats.waiting, stats.kept), (0, 0, 0, 0));
            }
        });
    }
    gpu.finish();
}
