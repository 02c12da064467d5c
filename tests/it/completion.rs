//! Tickets: waited for, polled, awaited, dropped, forgotten; and what a fault makes of them
//! (field reports R06, R69, R78, R93, R94).

use std::mem::forget;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use transfer_tensor::cudarc::driver::CudaContext;
use transfer_tensor::cudarc::driver::sys::CUresult;
use transfer_tensor::{Strategy, Transfer};

use crate::support::{CountingWaker, Gate, Gpu, H200, HANG, Kernels, SPARK, block_on, poll_once, within};

const LEN: usize = 1 << 16;
const FAULT: u32 = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as u32;

/// A copy to the host that comes after a gate, of bytes that are `value`.
fn gated(gpu: &Gpu, kernels: &Kernels, value: u8) -> (Gate, Transfer<u8>) {
    let mut tensor = gpu.on_device(&[0; LEN]);
    // Warm: the copy needs no allocation.
    drop(tensor.host_mut().unwrap());
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), value);
    (gate, tensor.to_host().unwrap())
}

#[test]
fn a_ticket_can_be_waited_for() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let (gate, ticket) = gated(&gpu, &kernels, 1);
    let opener = gate.open_later();
    let tensor = ticket.wait().unwrap();
    assert!(opener.opened());
    drop(opener);
    assert_eq!(*tensor.host().unwrap(), [1; LEN]);
    drop((tensor, kernels));
    gpu.finish();
}

#[test]
fn a_ticket_can_be_polled() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let (gate, mut ticket) = gated(&gpu, &kernels, 1);
    for _ in 0..3 {
        assert!(!ticket.is_complete().unwrap());
        let refused = ticket.try_wait().unwrap_err();
        assert!(refused.error.is_not_ready());
        ticket = refused.value;
    }
    let refused = ticket.wait_timeout(Duration::from_millis(2)).unwrap_err();
    assert!(refused.error.is_not_ready());
    let opener = gate.open_later();
    let tensor = refused.value.wait_timeout(Duration::MAX).unwrap();
    assert!(opener.opened());
    drop(opener);
    assert_eq!(*tensor.host().unwrap(), [1; LEN]);
    drop((tensor, kernels));
    gpu.device.drain(Duration::MAX).unwrap();
    gpu.finish();
}

#[test]
fn a_ticket_can_be_awaited() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let (gate, ticket) = gated(&gpu, &kernels, 1);
    let opener = gate.open_later();
    let tensor = block_on(ticket).unwrap();
    assert!(opener.opened());
    drop(opener);
    assert_eq!(*tensor.host().unwrap(), [1; LEN]);
    // Nothing to do: ready at the first poll.
    let mut done = tensor.to_host().unwrap();
    let Poll::Ready(tensor) = poll_once(&mut done) else { panic!("it has nothing to wait for") };
    // Polled again after it gave the tensor away: an error, no panic.
    assert!(matches!(poll_once(&mut done), Poll::Ready(Err(_))));
    drop((tensor, done, kernels));
    gpu.finish();
}

/// The last waker counts, and is woken once.
#[test]
fn a_ticket_wakes_who_polled_last_and_once() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let (gate, mut ticket) = gated(&gpu, &kernels, 1);
    let (first, last) = (CountingWaker::new(), CountingWaker::new());
    for counter in [&first, &last, &last] {
        let waker = Waker::from(counter.clone());
        let mut context = Context::from_waker(&waker);
        assert!(std::future::Future::poll(std::pin::Pin::new(&mut ticket), &mut context).is_pending());
    }
    gate.open();
    let start = Instant::now();
    while last.wakes() == 0 {
        assert!(start.elapsed() < HANG, "not woken");
        std::thread::yield_now();
    }
    let Poll::Ready(Ok(tensor)) = poll_once(&mut ticket) else { panic!("woken, and not ready") };
    gpu.device.drain(HANG).unwrap();
    assert_eq!((first.wakes(), last.wakes()), (0, 1));
    assert_eq!(*tensor.host().unwrap(), [1; LEN]);
    drop((tensor, ticket, kernels));
    gpu.finish();
}

/// Zero bytes: no driver call, done at once.
#[test]
fn a_ticket_for_nothing_is_done_at_once() {
    let gpu = Gpu::any(H200);
    if let Some(sim) = &gpu.sim {
        sim.clear_calls();
    }
    for way in [true, false] {
        let tensor = gpu.device.tensor().zeros::<u64>([2, 0]).unwrap();
        let mut ticket = if way { tensor.to_device().unwrap() } else { tensor.to_host().unwrap() };
        assert!(ticket.is_complete().unwrap());
        let tensor = block_on(ticket).unwrap();
        assert_eq!(tensor.shape().dims(), [2, 0]);
    }
    if let Some(sim) = &gpu.sim {
        assert_eq!(sim.calls(), []);
    }
    gpu.finish();
}

/// R06, R93: what a copy touches stays until it has run, whatever becomes of the ticket.
#[test]
fn a_dropped_ticket_keeps_its_memory_until_the_copy_has_run() {
    for (poll, elsewhere) in [(false, false), (true, false), (false, true), (true, true)] {
        let gpu = Gpu::any(H200);
        let kernels = gpu.kernels();
        let (gate, mut ticket) = gated(&gpu, &kernels, 1);
        if poll {
            assert!(poll_once(&mut ticket).is_pending());
        }
        if elsewhere {
            std::thread::spawn(move || drop(ticket)).join().unwrap();
        } else {
            drop(ticket);
        }
        let churn = gpu.sim.is_some().then(|| {
            // Freed addresses are handed out first.
            let other = gpu.another_stream();
            (gpu.both_sides(&[2u8; LEN]), other.clone_htod(&[3u8; LEN]).unwrap(), other)
        });
        gate.open();
        gpu.device.drain(HANG).unwrap();
        if let Some((pinned, on_device, other)) = churn {
            assert_eq!(*pinned.host().unwrap(), [2; LEN]);
            assert_eq!(other.clone_dtoh(&on_device).unwrap(), [3; LEN]);
        }
        drop(kernels);
        gpu.finish();
    }
}

#[test]
fn a_forgotten_ticket_is_sound() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    for poll in [false, true] {
        let (gate, mut ticket) = gated(&gpu, &kernels, 1);
        if poll {
            assert!(poll_once(&mut ticket).is_pending());
        }
        forget(ticket);
        let churn = gpu.sim.is_some().then(|| gpu.both_sides(&[2u8; LEN]));
        gate.open();
        gpu.context.synchronize().unwrap();
        if let Some(pinned) = churn {
            assert_eq!(*pinned.host().unwrap(), [2; LEN]);
        }
    }
    drop(kernels);
    gpu.finish_forgotten();
}

/// R93, the other way: the source of a copy to the device.
#[test]
fn a_dropped_ticket_keeps_the_source_until_it_was_read() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let mut tensor = gpu.on_device(&[0; 2 * LEN]);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    kernels.fill(&gpu.stream, &mut tensor.byte_range_mut(LEN..).unwrap().device_mut(&gpu.stream).unwrap(), 1);
    tensor.byte_range_mut(..LEN).unwrap().host_mut().unwrap().fill(9);
    let mut ticket = tensor.to_device().unwrap();
    assert!(poll_once(&mut ticket).is_pending());
    std::thread::spawn(move || drop(ticket)).join().unwrap();
    if gpu.sim.is_some() {
        drop(gpu.both_sides(&[2u8; 2 * LEN]));
    }
    gate.open();
    drop(kernels);
    gpu.finish();
}

/// R93: what can not be waited for is kept for ever, and counted, rather than freed.
#[test]
fn memory_whose_copies_can_not_be_waited_for_is_leaked_and_counted() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let (sim, kernels) = (gpu.sim.as_ref().unwrap(), gpu.kernels());
    let (gate, ticket) = gated(&gpu, &kernels, 1);
    sim.clear_calls();
    sim.fail_always("cuEventQuery", CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
    sim.fail_always("cuEventSynchronize", CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
    drop(ticket);
    gpu.device.drain(HANG).unwrap();
    assert_eq!(gpu.device.stats().leaked, 1);
    assert_eq!(sim.count("cuMemFreeHost"), 0);
    sim.clear_failures();
    gate.open();
    drop(kernels);
    gpu.finish_forgotten();
}

/// R94: one thread, many transfers under way. Polling does not block, each task is woken once, done ones cost nothing.
#[test]
fn one_thread_awaits_many_transfers() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let mut tensors: Vec<_> = (0..64).map(|_| gpu.on_device(&[0; 256])).collect();
    tensors.iter_mut().for_each(|tensor| drop(tensor.host_mut().unwrap()));
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let mut tasks: Vec<_> = tensors
        .into_iter()
        .enumerate()
        .map(|(i, mut tensor)| {
            kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), i as u8);
            (tensor.to_host().unwrap(), CountingWaker::new(), None)
        })
        .collect();
    let start = Instant::now();
    let poll_all = |tasks: &mut Vec<(Transfer<u8>, Arc<CountingWaker>, Option<_>)>| {
        for (ticket, counter, done) in tasks.iter_mut().filter(|(_, _, done)| done.is_none()) {
            let waker = Waker::from(counter.clone());
            let poll = std::future::Future::poll(std::pin::Pin::new(ticket), &mut Context::from_waker(&waker));
            if let Poll::Ready(result) = poll {
                *done = Some(result.unwrap());
            }
        }
        tasks.iter().filter(|(_, _, done)| done.is_some()).count()
    };
    for _ in 0..10 {
        assert_eq!(poll_all(&mut tasks), 0);
    }
    assert!(start.elapsed() < Duration::from_secs(5), "polling blocks");
    gate.open();
    gpu.device.drain(HANG).unwrap();
    assert_eq!(poll_all(&mut tasks), 64);
    for (i, (_, counter, done)) in tasks.iter().enumerate() {
        assert_eq!(counter.wakes(), 1);
        assert_eq!(*done.as_ref().unwrap().host().unwrap(), [i as u8; 256]);
    }
    drop((tasks, kernels));
    gpu.finish();
}

/// R94: futures that are done are dropped without a driver call that blocks.
#[test]
fn done_tickets_are_dropped_at_once() {
    let gpu = Gpu::any(SPARK);
    let tickets: Vec<_> = (0..1000)
        .map(|_| {
            let tensor = gpu.device.tensor().strategy(Strategy::Streamed).zeros::<u8>([0]).unwrap();
            tensor.to_host().unwrap()
        })
        .collect();
    let start = Instant::now();
    drop(tickets);
    assert!(start.elapsed() < Duration::from_millis(500));
    gpu.finish();
}

/// What only a blocking wait can tell ends a poll, too: the per-thread default stream of another thread.
#[test]
fn polling_ends_where_only_a_blocking_wait_can_tell() {
    within(HANG, || {
        let gpu = Gpu::on_stream(H200, CudaContext::per_thread_stream);
        let kernels = gpu.kernels();
        let mut tensor = gpu.both_sides(&[0u8; LEN]);
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let mut guard = tensor.device_mut(&gpu.stream).unwrap();
        kernels.fill(&gpu.stream, &mut guard, 1);
        forget(guard);
        std::thread::spawn(move || {
            let mut ticket = tensor.to_host().unwrap();
            assert!(!ticket.is_complete().unwrap());
            gate.open();
            while !ticket.is_complete().unwrap() {
                std::thread::yield_now();
            }
            assert_eq!(*ticket.try_wait().unwrap().host().unwrap(), [1; LEN]);
        })
        .join()
        .unwrap();
        drop(kernels);
        gpu.finish_forgotten();
    });
}

/// R69, R78: a fault ends every wait with the device's error, promptly; nobody gets data.
#[test]
fn a_fault_ends_every_wait_with_its_error() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let (sim, kernels) = (gpu.sim.as_ref().unwrap(), gpu.kernels());
    let mut tickets = Vec::new();
    let mut gates = Vec::new();
    for _ in 0..4 {
        let mut tensor = gpu.on_device(&[0; LEN]);
        drop(tensor.host_mut().unwrap());
        tickets.push(tensor);
    }
    gpu.context.synchronize().unwrap();
    gates.push(gpu.gate(&gpu.stream));
    let handle = gpu.stream.cu_stream() as u64;
    sim.fault_on_stream(handle, FAULT);
    let mut tickets: Vec<_> = tickets
        .into_iter()
        .map(|mut tensor| {
            kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 1);
            tensor.to_host().unwrap()
        })
        .collect();
    let (waited, awaited, mut polled, dropped) =
        (tickets.remove(0), tickets.remove(0), tickets.remove(0), tickets.remove(0));
    let counter = CountingWaker::new();
    let waker = Waker::from(counter.clone());
    let mut context = Context::from_waker(&waker);
    assert!(std::future::Future::poll(std::pin::Pin::new(&mut polled), &mut context).is_pending());

    let waiter = std::thread::spawn(move || waited.wait());
    let async_waiter = std::thread::spawn(move || block_on(awaited));
    let start = Instant::now();
    gates.clear();
    let refused = waiter.join().unwrap().unwrap_err();
    assert!(refused.error.is_fault() && refused.error.driver_code() == Some(FAULT), "{}", refused.error);
    // Nor does the tensor that comes back show anything.
    assert!(refused.value.host().unwrap_err().is_fault());
    assert!(async_waiter.join().unwrap().unwrap_err().error.is_fault());
    while counter.wakes() == 0 {
        assert!(start.elapsed() < HANG, "not woken");
        std::thread::yield_now();
    }
    let Poll::Ready(Err(polled)) = poll_once(&mut polled) else { panic!("success after a fault") };
    assert!(polled.error.is_fault());
    // Dropping does not hang, and does not free what may be in use.
    drop((dropped, refused, polled));
    // Later calls fail at once.
    let start = Instant::now();
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&[1u8; LEN], [LEN]).unwrap();
    assert!(tensor.to_device().unwrap_err().error.is_fault());
    assert!(gpu.device.drain(HANG).is_ok());
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(gpu.device.stats().leaked > 0);
    drop(kernels);
    let Gpu { sim, context, stream, device } = gpu;
    drop((device, stream, context));
    assert_eq!(sim.unwrap().violations(), Vec::<String>::new());
}

/// R69: a device that is faulted before the call.
#[test]
fn a_faulted_device_is_an_error_at_once() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let mut tensor = gpu.on_device(&[1; LEN]);
    drop(tensor.device_mut(&gpu.stream).unwrap());
    gpu.context.synchronize().unwrap();
    sim.sticky(FAULT);
    assert!(tensor.host().unwrap_err().is_fault());
    assert!(tensor.host_mut().unwrap_err().is_fault());
    assert!(tensor.device(&gpu.stream).unwrap_err().is_fault());
    let refused = tensor.to_host().unwrap_err();
    assert!(refused.error.is_fault());
    let refused = refused.value.to_device().unwrap_err();
    assert!(refused.error.is_fault());
    let refused = refused.value.into_vec().unwrap_err();
    assert!(refused.error.is_fault());
    drop(refused);
    let _ = gpu.device.drain(HANG);
    sim.sticky(0);
}
