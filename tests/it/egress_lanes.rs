//! Slices on their way to the host: which hold up which, what a copy comes after, and what becomes of one that fails.

use std::sync::Arc;
use std::sync::mpsc::channel;

use transfer_tensor::cudarc::driver::{CudaSlice, CudaStream};
use transfer_tensor::{EgressPool, HostTensor, Output, Strategy, TransferTensor};

use crate::egress::{LEN, builder, slice};
use crate::support::{Gpu, H200, HANG, SPARK};

type Bytes = HostTensor<u8>;

#[test]
fn a_held_stream_holds_up_its_own_items_only() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
    // More streams than one, each with its own: the first ones get lanes of their own.
    let streams: Vec<_> = (0..3).map(|_| gpu.another_stream()).collect();
    let on = |stream: &Arc<CudaStream>, value: u8| {
        let slice: CudaSlice<u8> = stream.clone_htod(&[value; LEN]).unwrap();
        slice
    };
    let warm: Vec<_> = streams.iter().map(|stream| pool.submit(on(stream, 0)).unwrap()).collect();
    warm.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
    let sources: Vec<_> = streams.iter().zip(1..).map(|(stream, value)| on(stream, value)).collect();
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&streams[0]);
    let mut tickets: Vec<_> = sources.into_iter().map(|source| pool.submit(source).unwrap()).collect();
    for (ticket, value) in tickets.drain(1..).zip(2..) {
        assert_eq!(ticket.wait_timeout(HANG).unwrap()[0], value);
    }
    let held = tickets.pop().unwrap().try_wait().unwrap_err();
    assert!(held.error.is_not_ready());
    drop(gate);
    assert_eq!(held.value.wait_timeout(HANG).unwrap()[0], 1);
    drop((pool, streams));
    gpu.finish();
}

#[test]
fn the_copy_comes_after_what_the_stream_was_given() {
    let gpu = Gpu::any(H200).keeping();
    let kernels = gpu.kernels();
    for awake in [false, true] {
        let pool: EgressPool<Arc<CudaSlice<u8>>> = builder(&gpu).low_latency(awake).tickets().unwrap();
        drop(pool.submit(Arc::new(slice(&gpu, 0))).unwrap().wait().unwrap());
        let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&[1u8; LEN], [LEN]).unwrap();
        drop(tensor.device_mut(&gpu.stream).unwrap());
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 7);
        let ticket = pool.submit(Arc::new(tensor.into_cuda_slice().unwrap())).unwrap();
        drop(gate);
        assert_eq!(**ticket.wait_timeout(HANG).unwrap(), [7; LEN]);
    }
    drop(kernels);
    gpu.finish();
}

/// All that may consume do; the copies behind come in nevertheless, and their device memory goes.
#[test]
fn while_one_consumes_another_brings_in_the_next() {
    let gpu = Gpu::any(H200).keeping();
    let (open, opened) = channel::<()>();
    let opened = std::sync::Mutex::new(opened);
    let pool: EgressPool<CudaSlice<u8>, u8> = builder(&gpu)
        .consumer(move |out: Output<Bytes>| {
            let _ = opened.lock().unwrap().recv_timeout(HANG);
            out[0]
        })
        .unwrap();
    let tickets: Vec<_> = (0..5).map(|value| pool.submit(slice(&gpu, value)).unwrap()).collect();
    crate::pool::until(|| pool.stats().consuming == 1 && pool.stats().waiting == 4);
    assert_eq!(pool.stats().in_flight, 0);
    drop(open);
    for (ticket, value) in tickets.into_iter().zip(0..) {
        assert_eq!(ticket.wait_timeout(HANG).unwrap(), value);
    }
    drop(pool);
    gpu.finish();
}

/// What comes at once is consumed at once, by as many as may.
#[test]
fn consumers_meet_over_what_comes_together() {
    let gpu = Gpu::any(H200).keeping();
    let here = Arc::new((std::sync::Mutex::new(0), std::sync::Condvar::new()));
    let consumer = {
        let here = here.clone();
        move |_: Output<Bytes>| {
            let mut count = here.0.lock().unwrap();
            *count += 1;
            here.1.notify_all();
            *here.1.wait_timeout_while(count, HANG / 4, |count| *count < 3).unwrap().0
        }
    };
    let pool: EgressPool<CudaSlice<u8>, i32> = builder(&gpu).workers(3).consumer(consumer).unwrap();
    let sources = [1, 2, 3].map(|value| slice(&gpu, value));
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let tickets = sources.map(|source| pool.submit(source).unwrap());
    drop(gate);
    for ticket in tickets {
        assert_eq!(ticket.wait_timeout(HANG).unwrap(), 3, "one waited for another");
    }
    drop(pool);
    gpu.finish();
}

/// A pool that never sleeps delivers, and ends.
#[test]
fn an_awake_pool_delivers_and_ends() {
    let gpu = Gpu::any(H200).keeping();
    for workers in [0, 2] {
        let pool: EgressPool<CudaSlice<u8>, u8> =
            builder(&gpu).workers(workers).low_latency(true).consumer(|out: Output<Bytes>| out[LEN - 1]).unwrap();
        let tickets: Vec<_> = (0..40).map(|value| pool.submit(slice(&gpu, value)).unwrap()).collect();
        for (ticket, value) in tickets.into_iter().zip(0..) {
            assert_eq!(ticket.wait_timeout(HANG).unwrap(), value);
        }
        pool.drain(HANG).unwrap();
    }
    gpu.finish();
}

/// Who submits is told of it where he submits the copy himself; else the item has the error. The next one is right.
#[test]
fn a_copy_that_is_refused_comes_back_or_is_its_items_error() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    for awake in [false, true] {
        let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).low_latency(awake).tickets().unwrap();
        drop(pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap());
        for call in ["cuMemcpyDtoHAsync", "cuStreamWaitEvent"] {
            let source = slice(&gpu, 1);
            gpu.context.synchronize().unwrap();
            sim.fail_nth(call, 1, 999);
            match pool.submit(source) {
                Ok(ticket) => assert_eq!(ticket.wait_timeout(HANG).unwrap_err().error.driver_code(), Some(999)),
                Err(refused) => {
                    assert_eq!(refused.error.driver_code(), Some(999), "{}", refused.error);
                    let back = refused.value.unwrap();
                    assert_eq!(back.stream().clone_dtoh(&back).unwrap(), [1; LEN]);
                }
            }
            assert_eq!(pool.submit(slice(&gpu, 2)).unwrap().wait_timeout(HANG).unwrap()[0], 2, "{call}");
            assert_eq!(pool.stats().kept, 0);
        }
        pool.drain(HANG).unwrap();
    }
    gpu.finish();
}

/// Asking fails while the copy is held: the item has the error at once, and its memory stays until the copy has run.
#[test]
fn a_copy_that_is_given_up_keeps_its_ends() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
    drop(pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap());
    let source = slice(&gpu, 1);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let ticket = pool.submit(source).unwrap();
    sim.fail_nth("cuEventQuery", 1, 999);
    assert_eq!(ticket.wait_timeout(HANG).unwrap_err().error.driver_code(), Some(999));
    // Its buffer is not the next one's, which nothing holds up.
    let mut other = gpu.device.pool().acquire(LEN).unwrap();
    other.fill(9);
    drop(gate);
    gpu.context.synchronize().unwrap();
    assert!(other.iter().all(|&byte| byte == 9));
    drop((other, pool));
    gpu.finish();
}

/// Of a step whose second slice is refused the first comes back while it is copied: what is done with it comes after that. (With a tensor
/// in it, a step's copies are submitted by who submits the step.)
#[test]
fn what_comes_back_while_it_is_copied_is_ordered() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let kernels = gpu.kernels();
    type Step = (CudaSlice<u8>, CudaSlice<u8>, TransferTensor<u8>);
    let pool: EgressPool<Step> = builder(&gpu).tickets().unwrap();
    let step = || {
        let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&[3u8; LEN], [LEN]).unwrap();
        kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 3);
        (slice(&gpu, 1), slice(&gpu, 2), tensor)
    };
    drop(pool.submit(step()).unwrap().wait().unwrap());
    let step = step();
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    sim.fail_nth("cuMemcpyDtoHAsync", 3, 999);
    let refused = pool.submit(step).unwrap_err();
    assert_eq!(refused.error.driver_code(), Some(999), "{}", refused.error);
    let (mut first, second, tensor) = refused.value.unwrap();
    gpu.stream.memset_zeros(&mut first).unwrap();
    drop(gate);
    assert_eq!(gpu.stream.clone_dtoh(&first).unwrap(), [0; LEN]);
    assert_eq!(gpu.stream.clone_dtoh(&second).unwrap(), [2; LEN]);
    assert_eq!(*tensor.host().unwrap(), [3; LEN]);
    drop((pool, first, second, tensor, kernels));
    gpu.finish();
}

/// What came as a slice may go back to the device, on machines of every kind.
#[test]
fn a_slices_output_becomes_a_tensor() {
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile).keeping();
        let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
        let out = pool.submit(slice(&gpu, 5)).unwrap().wait().unwrap().into_inner();
        assert!(out.is_pinned() && out.copied_bytes() == LEN as u64);
        let mut tensor: TransferTensor<u8> = out.into_tensor().unwrap();
        tensor.host_mut().unwrap()[3] = 4;
        let bytes = gpu.stream.clone_dtoh(&tensor.device(&gpu.stream).unwrap()).unwrap();
        assert_eq!((&bytes[..3], bytes[3], bytes.len()), (&[5u8; 3][..], 4, LEN));
        drop((tensor, pool));
        gpu.finish();
    }
}
