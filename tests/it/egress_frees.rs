//! When the device memory of a slice that went to the host is freed: not while its stream is captured, not before its kernels, and
//! nobody waits for it.

use std::sync::Arc;

use transfer_tensor::EgressPool;
use transfer_tensor::cudarc::driver::{CudaContext, CudaSlice, sys};

use crate::egress::{LEN, builder, slice};
use crate::egress_attack::{LIMIT, in_time};
use crate::support::{Gpu, H200, HANG};

/// What is dropped because its copy was refused is freed after what its thread's default stream was given.
#[test]
fn a_refused_slice_of_a_threads_default_stream_is_freed_after_its_kernels() {
    let Some(_) = Gpu::simulated(H200) else { return };
    let gpu = Gpu::on_stream(H200, CudaContext::per_thread_stream).keeping();
    let sim = gpu.sim.as_ref().unwrap();
    let pool: EgressPool<Vec<CudaSlice<u8>>> = builder(&gpu).low_latency(true).tickets().unwrap();
    drop(pool.submit(vec![slice(&gpu, 0), slice(&gpu, 0)]).unwrap().wait().unwrap());
    let (held, first, mut second) = (slice(&gpu, 0), slice(&gpu, 1), slice(&gpu, 2));
    let other = gpu.another_context().new_stream().unwrap();
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    // So that the next one is not alone, and is left to the pool's thread.
    let held = pool.submit(vec![held]).unwrap();
    gpu.stream.memset_zeros(&mut second).unwrap();
    sim.fail_nth("cuMemcpyDtoHAsync", 1, 999);
    let ticket = pool.submit(vec![first, second]).unwrap();
    assert_eq!(ticket.wait_timeout(HANG).unwrap_err().error.driver_code(), Some(999));
    // What is freed is handed out first.
    let taken: Vec<_> = (0..4).map(|_| other.clone_htod(&[8u8; LEN]).unwrap()).collect();
    other.synchronize().unwrap();
    gate.open();
    gpu.context.synchronize().unwrap();
    for taken in &taken {
        assert_eq!(other.clone_dtoh(taken).unwrap(), [8; LEN], "freed under a kernel");
    }
    drop(held.wait_timeout(HANG).unwrap());
    drop((pool, taken, other));
    gpu.finish();
}

/// Ends the capture of the test's stream: what the driver said, and how many nodes there are.
fn end_capture(gpu: &Gpu) -> (u32, usize) {
    let (mut graph, mut nodes) = (std::ptr::null_mut(), 0);
    // SAFETY: a live stream, and places for the graph and the number of its nodes.
    unsafe {
        let ended = sys::cuStreamEndCapture(gpu.stream.cu_stream(), &raw mut graph) as u32;
        if ended == 0 && !graph.is_null() {
            assert_eq!(sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut nodes) as u32, 0);
            assert_eq!(sys::cuGraphDestroy(graph) as u32, 0);
        }
        (ended, nodes)
    }
}

/// A capture that begins while a copy is under way gets nothing of ours, and the slice is freed after it.
#[test]
fn a_slice_that_lands_while_its_stream_is_captured_does_not_break_that() {
    let gpu = Gpu::any(H200).keeping();
    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
    drop(pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap());
    let source = slice(&gpu, 1);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let ticket = pool.submit(source).unwrap();
    gpu.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    gate.open();
    let out = ticket.wait_timeout(LIMIT).unwrap();
    assert_eq!(out[0], 1);
    assert_eq!(end_capture(&gpu), (0, 0), "something of ours got into the capture");
    assert_eq!(gpu.device.stats().free_errors, 0);
    drop((pool, out));
    gpu.finish();
}

/// The same for a slice that others had, too.
#[test]
fn a_shared_slice_that_lands_while_its_stream_is_captured_does_not_break_that() {
    for per_thread in [false, true] {
        let gpu =
            if per_thread { Gpu::on_stream(H200, CudaContext::per_thread_stream) } else { Gpu::any(H200) }.keeping();
        let pool: EgressPool<Arc<CudaSlice<u8>>> = builder(&gpu).tickets().unwrap();
        drop(pool.submit(Arc::new(slice(&gpu, 0))).unwrap().wait().unwrap());
        let source = Arc::new(slice(&gpu, 1));
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let ticket = pool.submit(source).unwrap();
        gpu.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
        gate.open();
        let out = ticket.wait_timeout(LIMIT).unwrap();
        assert_eq!(out[0], 1);
        assert_eq!(end_capture(&gpu), (0, 0), "something of ours got into the capture; per thread: {per_thread}");
        assert_eq!(gpu.device.stats().free_errors, 0, "per thread: {per_thread}");
        drop((pool, out));
        // Who else may have used it, on a default stream of his own, can not be asked for during a capture: then it is kept.
        if per_thread { gpu.finish_forgotten() } else { gpu.finish() }
    }
}

/// Without memory pools cudarc frees only once the slice's stream is idle: nobody else's item waits for that.
#[test]
fn without_memory_pools_a_free_holds_up_no_other_item() {
    let built = crate::machines::built(cuda_sim::DeviceBuilder::new(H200).attribute(115, 0));
    let Some(gpu) = built.map(Gpu::keeping) else { return };
    let pool: EgressPool<CudaSlice<u8>> = builder(&gpu).tickets().unwrap();
    let (stream, other) = (gpu.another_stream(), gpu.another_stream());
    drop(pool.submit(slice(&gpu, 0)).unwrap().wait().unwrap());
    let (source, next) = (stream.clone_htod(&[1u8; LEN]).unwrap(), other.clone_htod(&[2u8; LEN]).unwrap());
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&stream);
    let first = pool.submit(source).unwrap();
    let later = gpu.gate(&stream);
    gate.open();
    let second = pool.submit(next).unwrap();
    let (pool, out) = in_time(pool, first);
    assert_eq!(out[0], 1);
    let (pool, next) = in_time(pool, second);
    assert_eq!(next[0], 2);
    later.open();
    drop((pool, out, next, stream, other));
    gpu.finish();
}
