//! Staged copies: how they are counted, and what they need of the pool.

use transfer_tensor::PoolOptions;

use crate::batch::filled;
use crate::machines::{drain, pattern};
use crate::pool::{handle, until};
use crate::support::{Gpu, H200};

const MIB: usize = 1 << 20;

/// The report tells what the driver was asked for, whichever way a long block is staged.
#[test]
fn long_blocks_are_counted_as_they_are_copied() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let built_in = gpu.device.tuning();
    let (mut alone, mut small) = (built_in, built_in);
    (alone.crossover_up, alone.crossover_down) = (usize::MAX, usize::MAX);
    (small.chunk, small.threads) = (100_000, 0);
    // In the last pools there is hardly room, or none, for a slot beside a batch's own buffer.
    let cases = [built_in, alone, small].map(|tuning| [1 << 30, 8 << 20, 2 << 20].map(|budget| (tuning, budget)));
    for (tuning, budget) in cases.into_iter().flatten() {
        let device = handle(&gpu, PoolOptions::new().budget(budget)).tuning(tuning).build().unwrap();
        for len in [8 * MIB, 8 * MIB + 1] {
            let bytes = pattern(len, 3);
            let (mut target, mut back) = (filled(&gpu, len, 0), vec![0; len]);
            for call in ["cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"] {
                let before = sim.count(call);
                let mut batch = device.batch(&gpu.stream);
                if call == "cuMemcpyHtoDAsync" {
                    batch.upload(&bytes, &mut target).unwrap();
                } else {
                    batch.download(&target, &mut back).unwrap();
                }
                let report = batch.run().unwrap();
                let copies = (sim.count(call) - before) as u64;
                assert_eq!((report.copies, report.calls), (copies, copies), "{tuning:?} {budget} {len} {call}");
            }
            assert!(back == bytes, "{tuning:?} {budget} {len}");
        }
        drain(&device);
    }
    drain(&gpu.device);
    gpu.finish();
}

/// Where the pool has no room for a full slot there are smaller ones: a short upload does not wait, however its stream is held.
#[test]
fn in_a_small_pool_uploads_do_not_wait_either() {
    for budget in [4 * MIB, MIB, 256 << 10] {
        let Some(gpu) = Gpu::simulated(H200) else { return };
        let device = handle(&gpu, PoolOptions::new().budget(budget as u64)).build().unwrap();
        let (first, second) = (pattern(30 * MIB, 1), pattern(100_000, 2));
        let slice = device.upload_new(&gpu.stream, &first).unwrap();
        let mut target = filled(&gpu, second.len(), 7);
        gpu.stream.synchronize().unwrap();
        std::thread::scope(|scope| {
            let _gate = gpu.gate(&gpu.stream);
            let upload = scope.spawn(|| device.upload(&gpu.stream, &second, &mut target).unwrap());
            until(|| upload.is_finished());
        });
        assert!(device.download_vec(&gpu.stream, &target).unwrap() == second);
        assert!(device.download_vec(&gpu.stream, &slice).unwrap() == first);
        let stats = device.pool().stats();
        assert!(stats.peak <= budget as u64 && stats.reserved > 0, "{stats:?}");
        drop((slice, target));
        drain(&device);
        drop(device);
        gpu.finish();
    }
}

/// Slots are for threads that there are, whatever the caller asks for.
#[test]
fn threads_that_there_are_not_have_no_slots() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let mut tuning = gpu.device.tuning();
    (tuning.threads, tuning.busy_threads) = (1000, usize::MAX);
    let device = handle(&gpu, PoolOptions::new().budget(1 << 30)).tuning(tuning).build().unwrap();
    // More blocks than 32 threads have under way.
    let bytes = pattern(128 * MIB, 1);
    let slice = device.upload_new(&gpu.stream, &bytes).unwrap();
    // Slots that still travel are not the next copy's.
    gpu.stream.synchronize().unwrap();
    assert!(device.download_vec(&gpu.stream, &slice).unwrap() == bytes);
    let cpus = std::thread::available_parallelism().map_or(1, usize::from).min(32);
    let most = cpus.div_ceil(4) + 5;
    let stats = device.pool().stats();
    assert!(stats.peak <= (most * 8 * MIB) as u64, "{stats:?}");
    drop(slice);
    drain(&device);
    drop(device);
    gpu.finish();
}

/// Small copies one after another share a slot: the driver is not asked for each whether that is free, and none waits.
#[test]
fn small_uploads_in_a_row_ask_nothing_and_wait_for_nothing() {
    let gpu = Gpu::any(H200);
    let device = handle(&gpu, PoolOptions::new().budget(64 << 20)).build().unwrap();
    let sources: Vec<Vec<u8>> = (0..100).map(|i| pattern(1 + 97 * i, i as u64)).collect();
    let mut targets: Vec<_> = sources.iter().map(|source| filled(&gpu, source.len(), 0)).collect();
    device.upload(&gpu.stream, &sources[0], &mut targets[0]).unwrap();
    gpu.stream.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let queries = || gpu.sim.as_ref().map_or(0, |sim| sim.count("cuEventQuery"));
    let before = queries();
    for (source, target) in sources.iter().zip(&mut targets) {
        device.upload(&gpu.stream, source, target).unwrap();
    }
    // The first asks for the one before, and the first of each half MiB for those.
    assert!(queries() <= before + 3, "{}", queries() - before);
    gate.open();
    for (source, target) in sources.iter().zip(&targets) {
        assert_eq!(gpu.stream.clone_dtoh(target).unwrap(), *source);
    }
    drop(targets);
    drain(&device);
    drop(device);
    gpu.finish();
}

/// Copies on two streams do not: that one has passed says nothing of the other.
#[test]
fn small_uploads_on_two_streams_do_not_share_a_slot() {
    let gpu = Gpu::any(H200);
    let device = handle(&gpu, PoolOptions::new().budget(64 << 20)).build().unwrap();
    let other = gpu.another_stream();
    // The last is too long to share a slot, and begins at the front of one that nothing uses.
    let values = [pattern(5000, 1), pattern(5000, 2), pattern(70_000, 3)];
    let mut targets = values.each_ref().map(|values| filled(&gpu, values.len(), 0));
    let [first, second, third] = &mut targets;
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    device.upload(&gpu.stream, &values[0], first).unwrap();
    for (values, target) in values[1..].iter().zip([second, third]) {
        device.upload(&other, values, target).unwrap();
        other.synchronize().unwrap();
    }
    gate.open();
    for (values, target) in values.iter().zip(&targets) {
        assert_eq!(gpu.stream.clone_dtoh(target).unwrap(), *values);
    }
    drop((targets, other));
    drain(&device);
    drop(device);
    gpu.finish();
}

/// A slot that a small copy has used, and then a large one on another stream, has no room for the next small one.
#[test]
fn a_slot_of_a_large_upload_is_not_shared_by_small_ones() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let (a, b, large) = (gpu.another_stream(), gpu.another_stream(), gpu.another_stream());
    let small = vec![1u8; 1000];
    let source = pattern(3 * MIB / 2, 5);
    let mut targets: Vec<_> = (0..40).map(|_| a.alloc_zeros::<u8>(small.len()).unwrap()).collect();
    let mut target = large.alloc_zeros::<u8>(source.len()).unwrap();
    gpu.context.synchronize().unwrap();
    let (gate_a, gate_b, gate) = (gpu.gate(&a), gpu.gate(&b), gpu.gate(&large));
    let (last, others) = targets.split_last_mut().unwrap();
    // In turn on two streams: each takes a slot of its own, until there are as many as are made.
    for (at, small_target) in others.iter_mut().take(16).enumerate() {
        gpu.device.upload(if at % 2 == 0 { &a } else { &b }, &small, small_target).unwrap();
    }
    std::thread::scope(|scope| {
        let (device, large, source, target) = (&gpu.device, &large, &source, &mut target);
        let upload = scope.spawn(move || device.upload(large, source, target).unwrap());
        // It waits for one of their slots.
        let before = sim.count("cuEventQuery");
        until(|| sim.count("cuEventQuery") > before + 50);
        gate_a.open();
        gate_b.open();
        upload.join().unwrap();
    });
    // The large one still waits for its stream.
    gpu.device.upload(&a, &small, last).unwrap();
    gate.open();
    large.synchronize().unwrap();
    let got = large.clone_dtoh(&target).unwrap();
    let wrong = got.iter().zip(&source).filter(|(a, b)| a != b).count();
    assert_eq!(wrong, 0, "bytes of a small copy in a large one");
}
