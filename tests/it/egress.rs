//! Results of the device on their way out: delivered once each, in order or not, to functions, tickets and outputs; no room, panics,
//! faults, cancellation, shutdown (field reports R06, R72, R74, R76, R78, R81, R93).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use transfer_tensor::cudarc::driver::CudaSlice;
use transfer_tensor::cudarc::driver::sys::CUresult;
use transfer_tensor::{
    EgressPool, EgressPoolBuilder, EgressSource, HostTensor, OnError, Order, Output, Stage, Strategy, Tagged, Ticket,
    TransferTensor, WhenFull,
};

use crate::machines::pattern;
use crate::pool::until;
use crate::support::{CountingWaker, GH200, Gpu, H200, HANG, SPARK, block_on, poll_once, within};

pub(crate) const LEN: usize = 1 << 12;
pub(crate) const FAULT: u32 = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as u32;

type Bytes = HostTensor<u8>;

pub(crate) fn builder(gpu: &Gpu) -> EgressPoolBuilder<'_> {
    EgressPool::builder(&gpu.device)
}

pub(crate) fn slice(gpu: &Gpu, value: u8) -> CudaSlice<u8> {
    gpu.stream.clone_htod(&[value; LEN]).unwrap()
}

/// A source that comes after a gate on the stream of `gpu`; nothing is allocated behind that.
pub(crate) fn held<S: EgressSource<Output = Bytes>>(pool: &EgressPool<S>, warm: impl FnOnce() -> S) {
    drop(pool.submit(warm()).unwrap().wait().unwrap());
}

/// What comes out for one source.
fn out<S: EgressSource>(gpu: &Gpu, source: S) -> Output<S::Output> {
    let pool = builder(gpu).tickets().unwrap();
    pool.submit(source).map_err(|refused| refused.error).unwrap().wait().unwrap()
}

#[test]
fn every_kind_of_source_comes_out_as_it_was() {
    let gpu = Gpu::any(H200).keeping();
    let bytes = pattern(LEN, 1);
    let device = |len| gpu.stream.clone_htod(&bytes[..len]).unwrap();
    let check = |out: &Bytes, len: usize| assert!(**out == bytes[..len] && out.shape().dims() == [len]);

    check(&out(&gpu, gpu.on_device(&bytes)), LEN);
    let mut tensor = gpu.on_device(&bytes).reshape([2, LEN / 2]).unwrap();
    gpu.stream.memset_zeros(&mut tensor.device_mut(&gpu.stream).unwrap()).unwrap();
    let zeros = out(&gpu, tensor);
    assert!(zeros.iter().all(|&byte| byte == 0) && zeros.shape().dims() == [2, LEN / 2]);
    assert!(out(&gpu, gpu.device.tensor().zeros::<u8>([0, 7]).unwrap()).is_empty());
    check(&out(&gpu, device(100)), 100);
    let shared = Arc::new(device(1000));
    check(&out(&gpu, shared.clone()), 1000);
    assert_eq!(gpu.stream.clone_dtoh(&*shared).unwrap(), bytes[..1000]);
    let step = (vec![device(1), device(2), device(3)], gpu.on_device(&bytes), device(5));
    let Tagged { value: (three, one, five), tag } = out(&gpu, Tagged::new(step, "step 7")).into_inner();
    assert_eq!(tag, "step 7");
    three.iter().zip(1..).for_each(|(out, len)| check(out, len));
    check(&one, LEN);
    check(&five, 5);
    drop((three, one, five, shared, zeros));
    gpu.finish();
}

#[test]
fn what_comes_out_may_be_kept_sent_and_turned_into_others() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
    let [kept, sent, vec, tensor] = [1, 2, 3, 4].map(|value| pool.submit(slice(&gpu, value)).unwrap().wait().unwrap());
    assert_eq!(pool.stats().kept, 4);
    let length = kept.map(|bytes| bytes.len());
    assert_eq!((*length, pool.stats().kept), (LEN, 4));
    drop(length);
    drop(pool);
    std::thread::spawn(move || assert_eq!(**sent, [2; LEN])).join().unwrap();
    assert_eq!(vec.into_inner().into_vec().unwrap(), [3; LEN]);
    let mut tensor = tensor.into_inner().into_tensor().unwrap();
    tensor.host_mut().unwrap()[0] = 9;
    assert_eq!(gpu.stream.clone_dtoh(&tensor.device(&gpu.stream).unwrap()).unwrap()[..2], [9, 4]);
    drop(tensor);
    gpu.finish();
}

/// Nothing is copied where the host sees the device's memory; a plain slice, which it does not, is copied once.
#[test]
fn on_unified_memory_the_output_is_the_tensors_own_memory() {
    for (profile, copied) in [(SPARK, [0, LEN as u64]), (GH200, [LEN as u64; 2])] {
        let Some(gpu) = Gpu::simulated(profile).map(Gpu::keeping) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        let kernels = gpu.kernels();
        let tensors: EgressPool<TransferTensor<u8>> = builder(&gpu).tickets().unwrap();
        let slices: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
        let strategy = if profile == SPARK { Strategy::ZeroCopy } else { Strategy::Streamed };
        let mut tensor = gpu.device.tensor().strategy(strategy).zeros::<u8>([LEN]).unwrap();
        kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 5);
        let copies = || sim.count("cuMemcpyDtoHAsync");
        let before = copies();
        let out = tensors.submit(tensor).unwrap().wait().unwrap();
        assert!(out.iter().all(|&byte| byte == 5));
        assert_eq!((out.copied_bytes(), copies() - before), (copied[0], usize::from(copied[0] > 0)), "{profile}");
        let plain = slices.submit(slice(&gpu, 6)).unwrap().wait().unwrap();
        assert_eq!((plain.copied_bytes(), plain[LEN - 1]), (copied[1], 6), "{profile}");
        drop((out, plain, tensors, slices, kernels));
        gpu.finish();
    }
}

/// R81: the order of submission is kept, whatever the consumers do; a panic holds nobody up.
#[test]
fn outputs_come_in_the_order_that_was_asked_for() {
    let gpu = Gpu::any(H200).keeping();
    for (order, workers) in [(Order::Submission, 8), (Order::Completion, 8), (Order::Submission, 1)] {
        let pool =
            builder(&gpu).workers(workers).order(order).capacity(16).consumer(|out: Output<Tagged<Bytes, usize>>| {
                for _ in 0..(out.tag * 7919) % 50 {
                    std::thread::yield_now();
                }
                assert!(out.tag % 100 != 42, "the hundredth");
                out.tag
            });
        let pool: EgressPool<Tagged<CudaSlice<u8>, usize>, usize> = pool.unwrap();
        let (sender, outputs) = pool.channel(order);
        let all = std::thread::scope(|scope| {
            let gpu = &gpu;
            scope.spawn(move || {
                for tag in 0..300 {
                    assert_eq!(sender.submit(Tagged::new(slice(gpu, tag as u8), tag)).unwrap(), tag as u64);
                }
            });
            outputs.collect::<Vec<_>>()
        });
        let mut numbers: Vec<u64> = all.iter().map(|out| out.number).collect();
        if order == Order::Completion {
            numbers.sort_unstable();
        }
        assert_eq!(numbers, (0..300).collect::<Vec<u64>>());
        for out in all {
            match out.result {
                Ok(tag) => assert_eq!(tag as u64, out.number),
                Err(error) => assert!(error.is_panic() && out.number % 100 == 42, "{error}"),
            }
        }
        assert_eq!((pool.stats().delivered, pool.stats().failed), (297, 3));
    }
    gpu.finish();
}

#[test]
fn without_room_it_refuses_waits_or_blocks_and_gives_the_source_back() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).capacity(2).budget(2 * LEN as u64 + 10).tickets().unwrap();
    let large = gpu.stream.alloc_zeros::<u8>(2 * LEN + 11).unwrap();
    let refused = pool.submit(large).unwrap_err();
    assert!(refused.error.is_invalid_input() && refused.value.is_some_and(|slice| slice.len() == 2 * LEN + 11));

    let mut kept: Vec<_> = [1, 2].map(|value| pool.submit(slice(&gpu, value)).unwrap().wait().unwrap()).into();
    let refused = pool.submit_or(slice(&gpu, 3), WhenFull::Refuse).unwrap_err();
    assert!(refused.error.is_full(), "{}", refused.error);
    let refused = pool.submit_or(refused.value.unwrap(), WhenFull::Wait(Duration::from_millis(5))).unwrap_err();
    assert!(refused.error.is_full());
    let third = refused.value.unwrap();
    std::thread::scope(|scope| {
        let pool = &pool;
        let blocked = scope.spawn(move || pool.submit(third).unwrap().wait().unwrap());
        kept.pop();
        assert_eq!(**blocked.join().unwrap(), [3; LEN]);
    });
    // Bytes count as well as items.
    drop(pool);
    let pool: EgressPool<CudaSlice<u8>> =
        builder(&gpu).budget(2 * LEN as u64 - 1).when_full(WhenFull::Refuse).tickets().unwrap();
    let first = pool.submit(slice(&gpu, 1)).unwrap();
    let refused = pool.submit(slice(&gpu, 2)).unwrap_err();
    assert!(refused.error.is_full(), "{}", refused.error);
    drop(first.wait().unwrap().into_inner());
    drop(pool.submit(refused.value.unwrap()).unwrap().wait().unwrap());
    drop((kept, pool));
    gpu.finish();
}

/// R74: a consumer that submits does not wait for the room that it holds itself.
#[test]
fn a_consumer_that_submits_is_refused_rather_than_stuck() {
    let gpu = Gpu::any(H200).keeping();
    type Again = EgressPool<CudaSlice<u8>, bool>;
    let own: Arc<std::sync::OnceLock<std::sync::Weak<Again>>> = Arc::default();
    let (seen, spare) = (own.clone(), std::sync::Mutex::new(Some(slice(&gpu, 2))));
    let pool = builder(&gpu).capacity(1).consumer(move |out: Output<Bytes>| {
        let pool = seen.get().unwrap().upgrade().unwrap();
        let spare = spare.lock().unwrap().take().unwrap();
        let refused = pool.submit(spare).unwrap_err();
        // Its own item does not count.
        pool.drain(HANG).unwrap();
        refused.error.is_full() && refused.value.is_some() && out[0] == 1
    });
    let pool: Arc<Again> = Arc::new(pool.unwrap());
    own.set(Arc::downgrade(&pool)).unwrap();
    let ticket = pool.submit(slice(&gpu, 1)).unwrap();
    assert!(within(HANG, move || ticket.wait().unwrap()));
    drop(pool);
    gpu.finish();
}

/// R72: the third of ten fails alone, and the pool says so and goes on.
#[test]
fn a_consumer_that_panics_costs_its_item_and_nothing_else() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>, u8> = builder(&gpu)
        .workers(2)
        .consumer(|out: Output<Bytes>| if out[0] == 3 { panic!("no {}", out[0]) } else { out[0] })
        .unwrap();
    let tickets: Vec<_> = (1..=10).map(|value| pool.submit(slice(&gpu, value)).unwrap()).collect();
    for (value, ticket) in (1..=10).zip(tickets) {
        match ticket.wait() {
            Ok(out) => assert_eq!(out, value),
            Err(error) => assert!(value == 3 && error.is_panic() && error.to_string().contains("no 3"), "{error}"),
        }
    }
    pool.drain(HANG).unwrap();
    let (stats, health) = (pool.stats(), pool.health());
    assert_eq!((stats.submitted, stats.delivered, stats.failed, stats.kept), (10, 9, 1, 0));
    assert_eq!((health.panics, health.closed, health.faulted, health.workers), (1, false, false, 2));
    assert!(health.last_error.unwrap().is_panic());
    assert_eq!(pool.submit(slice(&gpu, 11)).unwrap().wait().unwrap(), 11);
    drop(pool);
    gpu.finish();
}

#[test]
fn a_pool_that_stops_at_an_error_delivers_nothing_more() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>, u8> = builder(&gpu)
        .order(Order::Submission)
        .on_error(OnError::Stop)
        .consumer(|out: Output<Bytes>| if out[0] == 2 { panic!("two") } else { out[0] })
        .unwrap();
    let tickets: Vec<Ticket<u8>> = (1..=4).filter_map(|value| pool.submit(slice(&gpu, value)).ok()).collect();
    let mut results = tickets.into_iter().map(Ticket::wait);
    assert_eq!(results.next().unwrap().unwrap(), 1);
    assert!(results.next().unwrap().unwrap_err().is_panic());
    assert!(results.all(|result| result.is_err_and(|error| error.is_closed() && error.to_string().contains("item 1"))));
    assert!(pool.submit(slice(&gpu, 5)).unwrap_err().error.is_closed() && pool.health().closed);
    drop(pool);
    gpu.finish();
}

/// Each stage of a ticket's life, held there.
#[test]
fn a_ticket_is_waited_for_polled_awaited_cancelled_and_dropped() {
    let gpu = Gpu::any(H200).keeping();
    let counted = Arc::new(AtomicUsize::new(0));
    let count = counted.clone();
    let pool: EgressPool<TransferTensor<u8>, u8> = builder(&gpu)
        .consumer(move |out: Output<Bytes>| {
            count.fetch_add(1, Ordering::SeqCst);
            out[0]
        })
        .unwrap();
    let kernels = gpu.kernels();
    // What is copied behind the gate is there before it.
    let tensors: Vec<_> = (0..6)
        .map(|_| {
            let mut tensor = gpu.on_device(&[0; LEN]);
            drop(tensor.host_mut().unwrap());
            drop(tensor.device(&gpu.stream).unwrap());
            tensor
        })
        .collect();
    assert_eq!(pool.submit(gpu.on_device(&[9; LEN])).unwrap().wait().unwrap(), 9);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let mut tickets = tensors.into_iter().zip(1..).map(|(mut tensor, value)| {
        kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), value);
        pool.submit(tensor).unwrap()
    });
    let mut next = || tickets.next().unwrap();
    let (waited, polled, mut awaited, mut abandoned, cancelled, dropped) =
        (next(), next(), next(), next(), next(), next());
    let refused = polled.try_wait().unwrap_err();
    assert!(refused.error.is_not_ready());
    let refused = refused.value.wait_timeout(Duration::from_millis(3)).unwrap_err();
    assert!(refused.error.is_not_ready());
    let polled = refused.value;
    let waker = CountingWaker::new();
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(std::pin::Pin::new(&mut abandoned).poll(&mut context).is_pending());
    let counting = std::task::Waker::from(waker.clone());
    assert!(std::pin::Pin::new(&mut awaited).poll(&mut std::task::Context::from_waker(&counting)).is_pending());
    // R93, R06: the futures and tickets go while their copies are on the way.
    std::thread::scope(|scope| scope.spawn(|| drop(abandoned)).join().unwrap());
    drop(dropped);
    assert!(cancelled.cancel());
    assert_eq!((pool.stats().in_flight, waker.wakes()), (6, 0));
    gate.open();
    assert_eq!(waited.wait().unwrap(), 1);
    assert_eq!(polled.wait_timeout(HANG).unwrap(), 2);
    until(|| waker.wakes() > 0);
    let std::task::Poll::Ready(result) = poll_once(&mut awaited) else { panic!("woken for nothing") };
    assert_eq!((result.unwrap(), waker.wakes()), (3, 1));
    let std::task::Poll::Ready(Err(again)) = poll_once(&mut awaited) else { panic!("given twice") };
    assert!(again.is_unsupported());
    assert!(cancelled.wait().unwrap_err().is_cancelled());
    pool.drain(HANG).unwrap();
    let stats = pool.stats();
    assert_eq!((stats.delivered, stats.cancelled, stats.failed, stats.in_flight, stats.kept), (6, 1, 0, 0, 0));
    assert_eq!(counted.load(Ordering::SeqCst), 6);
    let late = pool.submit(gpu.on_device(&[8; LEN])).unwrap();
    pool.drain(HANG).unwrap();
    assert!(!late.cancel());
    assert_eq!(block_on(late).unwrap(), 8);
    drop((pool, kernels));
    gpu.finish();
}

/// The observer sees each stage of each item, whatever it does itself.
#[test]
fn the_observer_is_told_of_every_stage() {
    let gpu = Gpu::any(H200).keeping();
    let seen: Arc<std::sync::Mutex<Vec<(u64, &'static str)>>> = Arc::default();
    let sink = seen.clone();
    let pool: EgressPool<CudaSlice<u8>, ()> = builder(&gpu)
        .observer(move |number, stage| {
            let name = match stage {
                Stage::Submitted { bytes } if bytes == LEN as u64 => "submitted",
                Stage::Copied { bytes } if bytes == LEN as u64 => "copied",
                Stage::Delivered => "delivered",
                Stage::Failed { error } if error.is_panic() => "failed",
                _ => "?",
            };
            sink.lock().unwrap().push((number, name));
            panic!("the observer's own");
        })
        .consumer(|out: Output<Bytes>| assert_eq!(out[0], 0))
        .unwrap();
    for value in [0, 1] {
        let _ = pool.submit(slice(&gpu, value)).unwrap().wait();
    }
    pool.drain(HANG).unwrap();
    let stats = pool.stats();
    assert_eq!(stats.bytes, 2 * LEN as u64);
    assert!(
        [stats.copying_time, stats.waiting_time, stats.consuming_time].iter().all(|time| !time.is_zero()),
        "{stats:?}"
    );
    let seen = seen.lock().unwrap();
    for (number, last) in [(0, "delivered"), (1, "failed")] {
        let names: Vec<_> = seen.iter().filter(|(of, _)| *of == number).map(|(_, name)| *name).collect();
        assert_eq!(names, ["submitted", "copied", last]);
    }
    drop(pool);
    gpu.finish();
}

/// Threads have their names, and run what is theirs first, whatever that does.
#[test]
fn workers_are_named_and_told_their_numbers() {
    let gpu = Gpu::any(H200).keeping();
    let seen: Arc<std::sync::Mutex<Vec<String>>> = Arc::default();
    let sink = seen.clone();
    let start = move |number: usize| {
        let thread = std::thread::current();
        sink.lock().unwrap().push(format!("{number} {}", thread.name().unwrap()));
        panic!("its own");
    };
    let pool: EgressPool<CudaSlice<u8>, u8> =
        builder(&gpu).workers(2).name("out").on_start(start).consumer(|out: Output<Bytes>| out[0]).unwrap();
    assert_eq!(pool.submit(slice(&gpu, 3)).unwrap().wait().unwrap(), 3);
    // One more than consumers, so that somebody always brings copies in.
    until(|| seen.lock().unwrap().len() == 3);
    drop(pool);
    let mut seen = std::mem::take(&mut *seen.lock().unwrap());
    seen.sort();
    assert_eq!(seen, ["0 out-0", "1 out-1", "2 out-2"]);
    gpu.finish();
}
