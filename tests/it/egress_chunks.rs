//! Results that are larger than the room for them, chunk by chunk.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use transfer_tensor::cudarc::driver::CudaSlice;
use transfer_tensor::{Chunked, Chunks, EgressPool, Error, Output, PoolOptions, Tagged};

use crate::egress::{FAULT, builder};
use crate::forked::in_a_forked_child;
use crate::machines::pattern;
use crate::pool::{end, until, with_pool};
use crate::support::{GH200, Gpu, H200, HANG, SPARK, within};

const LIMIT: Duration = Duration::from_secs(5);
const CHUNK: usize = 4 << 10;

type Pool = EgressPool<Chunked<u8>, Result<Vec<u8>, Error>>;

/// All that comes, in one.
fn collect(mut chunks: Output<Chunks<u8>>) -> Result<Vec<u8>, Error> {
    let mut all = Vec::new();
    while let Some(chunk) = chunks.next_chunk()? {
        all.extend_from_slice(chunk);
    }
    assert!(chunks.next_chunk()?.is_none());
    Ok(all)
}

fn on_device(gpu: &Gpu, bytes: &[u8]) -> CudaSlice<u8> {
    gpu.stream.clone_htod(bytes).unwrap()
}

#[test]
fn a_result_larger_than_all_room_comes_whole_through_two_chunks() {
    for profile in [H200, GH200, SPARK] {
        let gpu = Gpu::any(profile).keeping();
        let device = with_pool(&gpu, PoolOptions::new().budget(8 << 20).strict(true));
        let pool: Pool = EgressPool::builder(&device).budget(2 << 20).workers(2).consumer(collect).unwrap();
        let bytes = pattern((16 << 20) + 123, 1);
        let shared = Arc::new(on_device(&gpu, &bytes));
        let tickets: Vec<_> = [1 << 20, 100_000]
            .into_iter()
            .map(|chunk| pool.submit(Chunked::new(shared.clone(), chunk)).unwrap())
            .collect();
        for ticket in tickets {
            assert!(ticket.wait_timeout(HANG).unwrap().unwrap() == bytes);
        }
        let stats = pool.stats();
        assert_eq!((stats.kept, stats.kept_bytes, stats.bytes), (0, 0, (2 << 20) + 200_000));
        // Given away, and freed when it was read.
        let ticket = pool.submit(Chunked::new(on_device(&gpu, &bytes), 1 << 20)).unwrap();
        assert!(ticket.wait_timeout(HANG).unwrap().unwrap() == bytes);
        drop((pool, shared));
        end(gpu, device);
    }
}

#[test]
fn what_two_chunks_do_not_fit_is_refused_at_once_and_comes_back() {
    let gpu = Gpu::any(H200).keeping();
    let pool: Pool = builder(&gpu).budget(2 * CHUNK as u64).consumer(collect).unwrap();
    let bytes = pattern(5 * CHUNK, 2);
    let refused = pool.submit(Chunked::new(on_device(&gpu, &bytes), CHUNK + 1)).unwrap_err();
    assert!(refused.error.is_invalid_input(), "{}", refused.error);
    let back = refused.value.unwrap().into_inner();
    assert_eq!(pool.submit(Chunked::new(back, CHUNK)).unwrap().wait_timeout(LIMIT).unwrap().unwrap(), bytes);
    // A strict pool without page-locked memory.
    let device = with_pool(&gpu, PoolOptions::new().budget(2 << 20).strict(true));
    let pool2: Pool = EgressPool::builder(&device).budget(u64::MAX).consumer(collect).unwrap();
    let slice = gpu.stream.alloc_zeros::<u8>(6 << 20).unwrap();
    let refused = pool2.submit(Chunked::new(slice, 3 << 20)).unwrap_err();
    assert!(refused.value.is_some());
    assert_eq!((pool2.stats().submitted, pool2.stats().kept), (0, 0));
    drop((pool, pool2, refused));
    end(gpu, device);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever the sizes: each chunk is as long as it should be, and all together are the slice.
    #[test]
    fn chunks_are_the_slice(len in 1..40_000usize, bytes in 1..30_000usize) {
        let gpu = Gpu::any(H200).keeping();
        let values: Vec<u32> = (0..len as u32).map(|at| at.wrapping_mul(2_654_435_761)).collect();
        let pool: EgressPool<Chunked<u32>> = builder(&gpu).tickets().unwrap();
        // None is empty: the driver allocates no 0 bytes, and cudarc's `null` is an error.
        let slice = gpu.stream.clone_htod(&values).unwrap();
        let mut chunks = pool.submit(Chunked::new(slice, bytes)).unwrap().wait_timeout(HANG).unwrap();
        let chunk = (bytes / 4).max(1);
        prop_assert_eq!((chunks.len(), chunks.chunk_len(), chunks.is_empty()), (len, chunk, false));
        let mut rest = &values[..];
        while let Some(part) = chunks.next_chunk().unwrap() {
            prop_assert_eq!(part.len(), chunk.min(rest.len()));
            prop_assert_eq!(part, &rest[..part.len()]);
            rest = &rest[part.len()..];
        }
        prop_assert!(rest.is_empty() && chunks.rest().is_empty());
        drop((pool, chunks));
        gpu.finish();
    }
}

/// What is submitted later on the same stream, and held there, does not hold the later chunks up.
#[test]
fn later_work_of_the_producer_holds_no_chunk_up() {
    let gpu = Gpu::any(H200).keeping();
    let bytes = pattern(5 * CHUNK, 3);
    let pool: EgressPool<Tagged<Chunked<u8>, u8>> = builder(&gpu).tickets().unwrap();
    let (first, second) = (on_device(&gpu, &bytes), on_device(&gpu, &bytes));
    let warm = on_device(&gpu, &bytes[..CHUNK]);
    drop(pool.submit(Tagged::new(Chunked::new(warm, CHUNK), 0)).unwrap().wait_timeout(LIMIT).unwrap());
    let mut chunks = pool.submit(Tagged::new(Chunked::new(first, CHUNK), 1)).unwrap().wait_timeout(LIMIT).unwrap();
    let gate = gpu.gate(&gpu.stream);
    let held = pool.submit(Tagged::new(Chunked::new(second, CHUNK), 2)).unwrap();
    let all = within(LIMIT, move || {
        let mut all = Vec::new();
        while let Some(chunk) = chunks.value.next_chunk().unwrap() {
            all.extend_from_slice(chunk);
        }
        // The slice is freed behind the gate.
        std::mem::forget(chunks);
        all
    });
    assert!(all == bytes);
    gate.open();
    let mut chunks = held.wait_timeout(LIMIT).unwrap();
    assert_eq!(chunks.value.next_chunk().unwrap().unwrap(), &bytes[..CHUNK]);
    drop((pool, chunks));
    gpu.finish_forgotten();
}

/// When the last chunks have come the device's memory is the next step's, though they are still read; a forked child is told that it is one.
#[test]
fn the_slice_goes_when_all_has_come() {
    let gpu = Gpu::any(H200).keeping();
    let bytes = pattern(4 * CHUNK, 9);
    let pool: EgressPool<Chunked<u8>> = builder(&gpu).tickets().unwrap();
    for chunks_in_all in [1, 2, 4] {
        let shared = Arc::new(on_device(&gpu, &bytes[..chunks_in_all * CHUNK]));
        let source = Chunked::new(shared.clone(), CHUNK);
        let mut chunks = pool.submit(source).unwrap().wait_timeout(LIMIT).unwrap();
        let mut left = Vec::new();
        while chunks.next_chunk().unwrap().is_some() {
            left.push(Arc::strong_count(&shared) - 1);
        }
        let expected: &[usize] = if chunks_in_all == 4 { &[1, 1, 1, 0] } else { &[0; 2][..chunks_in_all] };
        assert_eq!(left, expected);
    }
    if gpu.sim.is_some() {
        let source = Chunked::new(on_device(&gpu, &bytes), CHUNK);
        let mut chunks = pool.submit(source).unwrap().wait_timeout(LIMIT).unwrap();
        let code = in_a_forked_child(&mut || chunks.next_chunk().is_err_and(|error| error.is_forked()));
        assert_eq!(code, 0);
        assert_eq!(chunks.next_chunk().unwrap().unwrap(), &bytes[..CHUNK]);
    }
    drop(pool);
    gpu.finish();
}

/// A chunk that is read is not written to: the copy that comes next to its memory is submitted when it was given back.
#[test]
fn a_chunk_stays_while_it_is_read() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let bytes = pattern(5 * CHUNK, 4);
    let pool: EgressPool<Chunked<u8>> = builder(&gpu).tickets().unwrap();
    let mut chunks = pool.submit(Chunked::new(on_device(&gpu, &bytes), CHUNK)).unwrap().wait_timeout(LIMIT).unwrap();
    let copies = || sim.calls().iter().filter(|call| call.name.starts_with("cuMemcpyDtoHAsync")).count();
    let before = copies();
    for (at, expected) in bytes.chunks(CHUNK).enumerate() {
        let chunk = chunks.next_chunk().unwrap().unwrap();
        gpu.context.synchronize().unwrap();
        assert!(chunk == expected);
        // One behind what is read, and one into what was read before it.
        assert_eq!(copies() - before, at.min(3));
    }
    drop((pool, chunks));
    gpu.finish();
}

#[test]
fn dropped_at_any_point_it_leaves_nothing() {
    let gpu = Gpu::any(H200).keeping();
    let bytes = pattern(6 * CHUNK, 5);
    let pool: EgressPool<Chunked<u8>> = builder(&gpu).tickets().unwrap();
    for taken in 0..=6 {
        let source = Chunked::new(on_device(&gpu, &bytes), CHUNK);
        let mut chunks = pool.submit(source).unwrap().wait_timeout(LIMIT).unwrap();
        for _ in 0..taken {
            assert!(chunks.next_chunk().unwrap().is_some());
        }
        assert_eq!(chunks.rest(), taken * CHUNK..6 * CHUNK);
        drop(chunks);
        // Nobody waits for it.
        drop(pool.submit(Chunked::new(on_device(&gpu, &bytes), CHUNK)).unwrap());
        // It ran, and is cancelled.
        let ticket = pool.submit(Chunked::new(on_device(&gpu, &bytes), CHUNK)).unwrap();
        ticket.cancel();
        drop(ticket.wait_timeout(LIMIT));
    }
    pool.drain(LIMIT).unwrap();
    assert_eq!((pool.stats().kept, pool.stats().kept_bytes), (0, 0));
    drop(pool);
    gpu.finish();
}

/// Dropped with a copy under way: its memory is not given to anybody before that has run.
#[test]
fn dropped_with_a_copy_under_way_it_keeps_both_ends() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    sim.complete_late(true);
    let pool: EgressPool<Chunked<u8>> = builder(&gpu).tickets().unwrap();
    for round in 0..20 {
        let source = Chunked::new(on_device(&gpu, &pattern(6 * CHUNK, round)), CHUNK);
        let mut chunks = pool.submit(source).unwrap().wait_timeout(HANG).unwrap();
        chunks.next_chunk().unwrap();
        // The third is on its way after this.
        chunks.next_chunk().unwrap();
        drop(chunks);
        let mut others = [(); 2].map(|()| gpu.device.pool().acquire(CHUNK).unwrap());
        others.iter_mut().for_each(|other| other.fill(9));
        gpu.context.synchronize().unwrap();
        assert!(others.iter().flat_map(|other| &**other).all(|&byte| byte == 9), "{round}");
    }
    drop(pool);
    gpu.finish();
}

#[test]
fn a_fault_is_the_next_chunks_error_and_stays() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let pool: EgressPool<Chunked<u8>> = builder(&gpu).tickets().unwrap();
    let slice = on_device(&gpu, &pattern(6 * CHUNK, 7));
    let mut chunks = pool.submit(Chunked::new(slice, CHUNK)).unwrap().wait_timeout(LIMIT).unwrap();
    assert!(chunks.next_chunk().unwrap().is_some());
    sim.sticky(FAULT);
    for _ in 0..2 {
        let error = chunks.next_chunk().map(drop).unwrap_err();
        assert!(error.is_fault() && error.driver_code() == Some(FAULT), "{error}");
    }
    within(LIMIT, move || drop((chunks, pool)));
    let Gpu { sim, context, stream, device } = gpu;
    drop((device, stream, context));
    assert_eq!(sim.unwrap().violations(), Vec::<String>::new());
}

#[test]
fn a_byte_that_is_no_bool_is_the_chunks_error() {
    let gpu = Gpu::any(H200).keeping();
    let mut bytes = vec![1u8; 3 * CHUNK];
    bytes[CHUNK + 7] = 2;
    let raw = on_device(&gpu, &bytes);
    let (address, len) = {
        use transfer_tensor::cudarc::driver::DevicePtr as _;
        (raw.device_ptr(&gpu.stream).0, raw.len())
    };
    gpu.stream.synchronize().unwrap();
    let _kept = raw.leak();
    // SAFETY: so many bytes lie there, of which nobody else knows.
    let slice = unsafe { gpu.stream.upgrade_device_ptr::<bool>(address, len) };
    let pool: EgressPool<Chunked<bool>> = builder(&gpu).tickets().unwrap();
    let mut chunks = pool.submit(Chunked::new(slice, CHUNK)).unwrap().wait_timeout(LIMIT).unwrap();
    assert_eq!(chunks.next_chunk().unwrap().unwrap(), &[true; CHUNK]);
    let first = chunks.next_chunk().map(drop).unwrap_err();
    let again = chunks.next_chunk().map(drop).unwrap_err();
    assert!(first.is_invalid_input() && again.is_invalid_input(), "{first}, {again}");
    drop((pool, chunks));
    gpu.finish();
}

/// Whatever the driver refuses, once: an error or the right bytes, nothing that runs on memory which is gone, and what comes next is right.
#[test]
fn any_call_may_be_refused_once() {
    let calls = [
        ("cuMemcpyDtoHAsync", 5),
        ("cuEventRecord", 6),
        ("cuEventCreate", 6),
        ("cuEventQuery", 8),
        ("cuStreamWaitEvent", 1),
        ("cuStreamCreate", 2),
        ("cuMemHostAlloc", 2),
        ("cuStreamIsCapturing", 2),
        ("cuThreadExchangeStreamCaptureMode", 12),
        ("cuCtxGetCurrent", 12),
        ("cuStreamDestroy", 2),
    ];
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let bytes = pattern(5 * CHUNK - 1, 8);
    let shared = Arc::new(on_device(&gpu, &bytes));
    let source = || Chunked::new(shared.clone(), CHUNK);
    let mut failures = 0;
    for (call, times) in calls {
        for nth in 1..=times {
            let pool: Pool = builder(&gpu).consumer(collect).unwrap();
            gpu.context.synchronize().unwrap();
            sim.fail_nth(call, nth, 999);
            let result = match pool.submit(source()) {
                Ok(ticket) => ticket.wait_timeout(HANG).map_err(|refused| refused.error).and_then(|all| all),
                Err(refused) => {
                    assert!(refused.value.is_some());
                    Err(refused.error)
                }
            };
            match result {
                Ok(all) => assert!(all == bytes, "{call} {nth}"),
                Err(error) => {
                    assert_eq!(error.driver_code(), Some(999), "{call} {nth}: {error}");
                    failures += 1;
                }
            }
            sim.clear_failures();
            assert!(pool.submit(source()).unwrap().wait_timeout(HANG).unwrap().unwrap() == bytes, "{call} {nth}");
            pool.drain(LIMIT).unwrap();
            until(|| pool.stats().kept == 0);
            within(LIMIT, move || drop(pool));
            let _ = gpu.context.check_err();
        }
    }
    assert!(failures > 10, "{failures}");
    gpu.device.drain(HANG).unwrap();
    assert_eq!(sim.violations(), Vec::<String>::new());
}
