//! Batches of small pieces, and rows (field reports R33, R34, R48).

use std::sync::Arc;

use transfer_tensor::cudarc::driver::{CudaContext, CudaSlice, CudaStream, sys};
use transfer_tensor::{BatchReport, Device, Error, PoolOptions, Rows, Strategy};

use crate::machines::{built, drain, on_with, pattern, unseen, xor_on_host};
use crate::support::{Gpu, H200, builder};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Device memory, all of it one byte.
pub(crate) fn filled(gpu: &Gpu, bytes: usize, value: u8) -> CudaSlice<u8> {
    let slice = gpu.stream.clone_htod(&vec![value; bytes]).unwrap();
    gpu.stream.synchronize().unwrap();
    slice
}

pub(crate) fn filled_on(stream: &Arc<CudaStream>, bytes: usize) -> CudaSlice<u8> {
    let slice = stream.alloc_zeros(bytes).unwrap();
    stream.synchronize().unwrap();
    slice
}

pub(crate) fn on_host(gpu: &Gpu, slice: &CudaSlice<u8>) -> Vec<u8> {
    gpu.stream.clone_dtoh(slice).unwrap()
}

/// Pieces of `len` bytes at every second place, the last ones first.
pub(crate) fn apart(bytes: &[u8], len: usize) -> Vec<(usize, &[u8])> {
    let mut parts: Vec<_> = bytes.chunks(len).enumerate().map(|(i, piece)| (2 * i * len, piece)).collect();
    parts.reverse();
    parts
}

/// What device memory of `total` bytes of `before` holds after these pieces.
pub(crate) fn expected(total: usize, before: u8, parts: &[(usize, &[u8])]) -> Vec<u8> {
    let mut all = vec![before; total];
    for (start, piece) in parts {
        all[*start..][..piece.len()].copy_from_slice(piece);
    }
    all
}

/// Brings pieces of `len` bytes to places apart from each other and back; both reports.
pub(crate) fn there_and_back(gpu: &Gpu, device: &Device, pieces: usize, len: usize) -> Result<[BatchReport; 2], Error> {
    let bytes = pattern(pieces * len, 5);
    let parts = apart(&bytes, len);
    let mut target = filled(gpu, 2 * pieces * len, 7);
    let mut batch = device.batch(device.stream());
    batch.upload_parts(&mut target, parts.iter().copied())?;
    let up = batch.run()?;
    assert!(on_host(gpu, &target) == expected(2 * pieces * len, 7, &parts), "wrong bytes on the device");
    let mut back = vec![0; pieces * len];
    let mut batch = device.batch(device.stream());
    let places = back.chunks_mut(len).enumerate().map(|(i, piece)| (2 * i * len, piece));
    batch.download_parts(&target, places.rev())?;
    let down = batch.run()?;
    assert!(back == bytes, "wrong bytes on the host");
    Ok([up, down])
}

#[test]
fn pieces_of_any_type_and_size_go_both_ways_in_one_batch() {
    let gpu = Gpu::any(H200);
    let stream = &gpu.stream;
    let mut ints = stream.alloc_zeros::<i64>(1000).unwrap();
    let mut bytes = stream.alloc_zeros::<u8>(3 * MIB).unwrap();
    let mut flags = stream.alloc_zeros::<bool>(5).unwrap();
    let numbers = stream.clone_htod(&[1.5f32, 2.5, 3.5]).unwrap();
    let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).zeros::<u16>([10, 10]).unwrap();
    let other = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&[9u16; 7], [7]).unwrap();
    let (many, odd): (Vec<i64>, Vec<u8>) = ((0..1000).map(|i| i * i - 7).collect(), pattern(3 * MIB - 2, 1));
    let (mut got, mut sevens) = ([0f32; 2], [0u16; 7]);
    {
        let mut guard = tensor.device_mut(stream).unwrap();
        let read = other.device(stream).unwrap();
        let view = numbers.slice(1..);
        // The ends of this one stay as they are.
        let mut middle = bytes.slice_mut(1..3 * MIB - 1);
        let mut batch = gpu.device.batch(stream);
        batch.upload(&many, &mut ints).unwrap().upload(&odd, &mut middle).unwrap();
        batch.upload(&[true, false, true, true, false], &mut flags).unwrap();
        batch.upload_parts(&mut guard, [(95, &[1u16, 2, 3, 4, 5][..]), (3, &[]), (0, &[6])]).unwrap();
        batch.download(&view, &mut got).unwrap().download(&read, &mut sevens).unwrap();
        let report = batch.run().unwrap();
        assert_eq!((report.pieces, report.bytes), (8, 8000 + 3 * MIB as u64 - 2 + 5 + 12 + 8 + 14));
    }
    assert_eq!(stream.clone_dtoh(&ints).unwrap(), many);
    let all = stream.clone_dtoh(&bytes).unwrap();
    assert!(all[1..3 * MIB - 1] == odd && (all[0], all[3 * MIB - 1]) == (0, 0));
    assert_eq!(stream.clone_dtoh(&flags).unwrap(), [true, false, true, true, false]);
    assert_eq!((got, sevens), ([2.5, 3.5], [9; 7]));
    let host = tensor.host().unwrap();
    assert_eq!((host[0], &host[94..]), (6, &[0, 1, 2, 3, 4, 5][..]));
    drop(host);
    drop((ints, bytes, flags, numbers, tensor, other));
    gpu.finish();
}

/// R34: nothing to do is no driver call, whatever it is made of.
#[test]
fn nothing_to_do_makes_no_driver_call() {
    let gpu = Gpu::any(H200);
    let mut slice = filled(&gpu, 10, 1);
    let mut none = slice.slice_mut(3..3);
    let calls = || gpu.sim.as_ref().map_or(0, |sim| sim.calls().len());
    let before = calls();
    assert_eq!(gpu.device.batch(&gpu.stream).run().unwrap(), BatchReport::default());
    let mut batch = gpu.device.batch(&gpu.stream);
    batch.upload::<u8, _>(&[], &mut none).unwrap();
    let report = batch.run().unwrap();
    assert_eq!((report.pieces, report.bytes, report.copies, report.calls), (1, 0, 0, 0));
    let mut batch = gpu.device.batch(&gpu.stream);
    batch.upload_parts::<u8, _>(&mut slice, [(10, &[][..]), (0, &[])]).unwrap();
    assert_eq!(batch.run().unwrap().pieces, 2);
    // Dropped, or refused before it began: nothing was done.
    let bytes = [5u8; 10];
    let mut batch = gpu.device.batch(&gpu.stream);
    batch.upload(&bytes, &mut slice).unwrap();
    assert!(format!("{batch:?}").contains("pieces: 1"));
    drop(batch);
    assert_eq!(calls(), before);
    assert_eq!(on_host(&gpu, &slice), [1; 10]);
    drop(slice);
    gpu.finish();
}

/// R34: 10,000 pieces of 4 KiB.
#[test]
fn ten_thousand_scattered_pieces_take_a_call_for_a_round_of_them() {
    let gpu = Gpu::any(H200);
    let [up, down] = there_and_back(&gpu, &gpu.device, 10_000, 4 * KIB).unwrap();
    for report in [up, down] {
        assert_eq!((report.pieces, report.bytes), (10_000, 40_960_000));
        // A piece on the border of a round is two copies.
        assert!((10_000..10_030).contains(&report.copies), "{report:?}");
    }
    if let Some(sim) = &gpu.sim {
        assert!(up.calls <= 20 && down.calls <= 20, "{up:?} {down:?}");
        assert_eq!(sim.count("cuLaunchKernel") as u64, up.calls);
        assert_eq!(sim.count("cuMemcpyBatchAsync") as u64, down.calls);
        assert_eq!(sim.evidence().copied_h2d_pageable, 2 * 40_960_000, "the test's own");
    }
    drain(&gpu.device);
    gpu.finish();
}

/// R48: 5,000 pieces of 16 KiB that are neighbours on the device.
#[test]
fn neighbours_on_the_device_become_few_copies() {
    let gpu = Gpu::any(H200);
    let bytes = pattern(5000 * 16 * KIB, 3);
    let mut target = filled(&gpu, bytes.len(), 0);
    for up in [true, false] {
        let before = gpu.sim.as_ref().map(|sim| sim.count("cuMemcpyHtoDAsync") + sim.count("cuMemcpyDtoHAsync"));
        let mut back = if up { vec![] } else { vec![0; bytes.len()] };
        let mut batch = gpu.device.batch(&gpu.stream);
        if up {
            // In any order.
            let parts = bytes.chunks(16 * KIB).enumerate().map(|(i, piece)| (i * 16 * KIB, piece));
            batch.upload_parts(&mut target, parts.rev()).unwrap();
        } else {
            let parts = back.chunks_mut(16 * KIB).enumerate().map(|(i, piece)| (i * 16 * KIB, piece));
            batch.download_parts(&target, parts).unwrap();
        }
        let report = batch.run().unwrap();
        assert!(report.pieces == 5000 && report.copies <= 64 && report.calls <= 64, "{report:?}");
        if let (Some(sim), Some(before)) = (&gpu.sim, before) {
            let copies = sim.count("cuMemcpyHtoDAsync") + sim.count("cuMemcpyDtoHAsync") - before;
            assert!(copies <= 64 && sim.count("cuMemcpyBatchAsync") == 0, "{copies}");
        }
        assert!(if up { on_host(&gpu, &target) == bytes } else { back == bytes });
    }
    drop(target);
    drain(&gpu.device);
    gpu.finish();
}

/// Slices that happen to be neighbours are still different allocations, over whose end no copy may reach.
#[test]
fn only_neighbours_of_one_allocation_are_copied_together() {
    let gpu = Gpu::any(H200);
    let bytes = pattern(400 * KIB, 3);
    let mut slices: Vec<_> = (0..100).map(|_| filled(&gpu, 4 * KIB, 0)).collect();
    let mut batch = gpu.device.batch(&gpu.stream);
    for (slice, piece) in slices.iter_mut().zip(bytes.chunks(4 * KIB)) {
        batch.upload(piece, slice).unwrap();
    }
    let copies = batch.run().unwrap().copies;
    // A real driver may say that neighbours of one pool are one allocation.
    assert!(copies == 100 || gpu.sim.is_none(), "{copies}");
    assert!(slices.iter().zip(bytes.chunks(4 * KIB)).all(|(slice, piece)| on_host(&gpu, slice) == piece));
    // Views of one are.
    let mut one = filled(&gpu, 12 * KIB, 0);
    let (mut left, mut right) = one.split_at_mut(5 * KIB);
    let mut batch = gpu.device.batch(&gpu.stream);
    batch.upload(&bytes[..5 * KIB], &mut left).unwrap().upload(&bytes[5 * KIB..12 * KIB], &mut right).unwrap();
    assert_eq!(batch.run().unwrap().copies, 1);
    assert!(on_host(&gpu, &one) == bytes[..12 * KIB]);
    drop((slices, one));
    drain(&gpu.device);
    gpu.finish();
}

/// R34: a driver that lacks the call, or has it and refuses it.
#[test]
fn without_the_batch_call_single_copies_do() {
    // More than a kernel is loaded for.
    const PIECES: u64 = 700;
    let single = |gpu: Gpu| {
        let reports = there_and_back(&gpu, &gpu.device, PIECES as usize, 4 * KIB).unwrap();
        for report in reports {
            assert!(report.calls == report.copies && report.calls >= PIECES, "{report:?}");
        }
        drain(&gpu.device);
        gpu.finish();
    };
    for default in [false, true] {
        let stream = |context: &Arc<CudaContext>| {
            if default { context.default_stream() } else { context.new_stream().unwrap() }
        };
        let Some(sim) = unseen(H200) else { return };
        drop(sim);
        let old = builder(H200).driver_version(12_060).build().unwrap();
        old.fail_always("cuModuleLoadData", 222);
        single(on_with(old, stream));
        let refuses = builder(H200).build().unwrap();
        refuses.fail_always("cuMemcpyBatchAsync", 801);
        refuses.fail_always("cuModuleLoadData", 222);
        single(on_with(refuses, stream));
        let silent = builder(H200).build().unwrap();
        silent.fail_always("cuGetProcAddress", 1);
        single(on_with(silent, stream));
    }
}

/// R34: the batch call refuses default streams. Work before and after on them keeps its order.
#[test]
fn on_a_default_stream_batches_are_in_its_order() {
    // Few, and as many as go by a kernel.
    for (pieces, per_thread) in [(100, false), (100, true), (400, false), (400, true)] {
        let gpu = Gpu::on_stream(
            H200,
            |context| {
                if per_thread { context.per_thread_stream() } else { context.default_stream() }
            },
        );
        let [up, down] = there_and_back(&gpu, &gpu.device, pieces, 4 * KIB).unwrap();
        if gpu.sim.is_some() {
            assert_eq!((up.calls, down.calls), (1, 1));
        }
        drain(&gpu.device);
        // A fill before, which is held, and one behind.
        let (bytes, kernels) = (pattern(pieces * KIB, 3), gpu.kernels());
        let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).zeros::<u8>([2 * pieces * KIB]).unwrap();
        drop(tensor.device_mut(&gpu.stream).unwrap());
        gpu.stream.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let mut guard = tensor.device_mut(&gpu.stream).unwrap();
        kernels.fill(&gpu.stream, &mut guard, 9);
        let mut batch = gpu.device.batch(&gpu.stream);
        batch.upload_parts(&mut guard, apart(&bytes, KIB)).unwrap();
        batch.run().unwrap();
        kernels.xor(&gpu.stream, &mut guard);
        gate.open();
        drop(guard);
        let mut expected = expected(2 * pieces * KIB, 9, &apart(&bytes, KIB));
        xor_on_host(&mut expected);
        assert!(*tensor.host().unwrap() == expected);
        drop((tensor, kernels));
        drain(&gpu.device);
        gpu.finish();
    }
}

#[test]
fn either_signature_of_the_batch_call_will_do() {
    for version in [12_080, 13_000, 13_010] {
        let Some(gpu) = built(builder(H200).driver_version(version)) else { return };
        let [up, down] = there_and_back(&gpu, &gpu.device, 100, 1000).unwrap();
        assert_eq!((up.calls, down.calls), (1, 1), "{version}");
        drain(&gpu.device);
        gpu.finish();
    }
}

#[test]
fn what_is_wrong_with_a_batch_is_said_and_nothing_is_done() {
    let gpu = Gpu::any(H200);
    let mut slice = filled(&gpu, 100, 1);
    let (five, ten) = ([5u8; 5], [6u8; 10]);
    let mut small = [0u8; 3];
    let mut batch = gpu.device.batch(&gpu.stream);
    batch.upload_parts(&mut slice, [(10, &five[..]), (90, &ten), (14, &five)]).unwrap();
    let error = batch.run().unwrap_err();
    assert!(error.is_invalid_input(), "{error}");
    assert!(error.to_string().contains("pieces 0 and 2") && error.to_string().contains("overlap"), "{error}");
    assert_eq!(on_host(&gpu, &slice), [1; 100]);
    // A refused piece leaves the batch as it was.
    let mut second = filled(&gpu, 3, 2);
    let mut batch = gpu.device.batch(&gpu.stream);
    batch.upload(&[3u8; 3], &mut second).unwrap();
    let error = batch.upload_parts(&mut slice, [(0, &five[..]), (96, &five)]).unwrap_err();
    assert!(error.is_invalid_input() && error.to_string().contains("96..101"), "{error}");
    let report = batch.run().unwrap();
    assert_eq!((report.pieces, report.bytes), (1, 3));
    assert_eq!((on_host(&gpu, &slice), on_host(&gpu, &second)), (vec![1; 100], vec![3; 3]));
    let mut batch = gpu.device.batch(&gpu.stream);
    assert!(batch.download(&slice, &mut small).unwrap_err().is_invalid_input());
    let huge = [(usize::MAX, &five[..])];
    assert!(gpu.device.batch(&gpu.stream).upload_parts(&mut slice, huge).unwrap_err().is_invalid_input());
    // The device's bytes are no booleans.
    let raw = gpu.stream.clone_htod(&[1u8, 0, 2]).unwrap();
    // SAFETY: as many bytes; whether they are booleans is the question.
    let flags = unsafe { raw.transmute::<bool>(3) }.unwrap();
    let mut host = [true; 3];
    let mut batch = gpu.device.batch(&gpu.stream);
    batch.download(&flags, &mut host).unwrap();
    let error = batch.run().unwrap_err();
    assert!(error.is_invalid_input() && error.to_string().contains("no BOOL"), "{error}");
    assert_eq!(host, [true; 3]);
    drop((slice, second, raw));
    drain(&gpu.device);
    gpu.finish();
}

#[test]
fn a_stream_that_is_captured_or_of_another_context_is_refused() {
    let gpu = Gpu::any(H200);
    let mut slice = filled(&gpu, 10, 1);
    let (bytes, rows) = ([5u8; 10], Rows::new(2, 5));
    gpu.context.bind_to_thread().unwrap();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: a live stream, and a valid place for the answer.
    let nodes = unsafe {
        let (mut graph, mut nodes) = (std::ptr::null_mut(), 0);
        sys::cuStreamBeginCapture_v2(gpu.stream.cu_stream(), mode).result().unwrap();
        let mut batch = gpu.device.batch(&gpu.stream);
        batch.upload(&bytes, &mut slice).unwrap();
        assert!(batch.run().unwrap_err().is_capturing());
        assert!(gpu.device.upload_rows(&gpu.stream, &bytes, &rows, &mut slice).unwrap_err().is_capturing());
        sys::cuStreamEndCapture(gpu.stream.cu_stream(), &raw mut graph).result().unwrap();
        sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut nodes).result().unwrap();
        sys::cuGraphDestroy(graph).result().unwrap();
        nodes
    };
    assert_eq!((nodes, on_host(&gpu, &slice)), (0, vec![1; 10]));
    if let Some(other) = Gpu::simulated(H200) {
        let wrong = |result: Result<(), Error>| assert!(result.unwrap_err().is_invalid_input());
        wrong(other.device.batch(&gpu.stream).run().map(drop));
        wrong(other.device.batch(&other.stream).upload(&bytes, &mut slice).map(drop));
        wrong(other.device.upload_rows(&other.stream, &bytes, &rows, &mut slice));
        wrong(other.device.download_rows(&gpu.stream, &slice, &rows, &mut [0u8; 10]));
        other.finish();
    }
    drop(slice);
    gpu.finish();
}

/// Small uploads do not wait for the stream, and the sources are the caller's again.
#[test]
fn sources_have_been_read_when_it_returns() {
    let gpu = Gpu::any(H200);
    let mut bytes = pattern(MIB, 1);
    let expected = bytes.clone();
    let mut target = filled(&gpu, MIB, 0);
    let upload = |bytes: &[u8], target: &mut CudaSlice<u8>| {
        let mut batch = gpu.device.batch(&gpu.stream);
        batch.upload_parts(target, bytes.chunks(10 * KIB).enumerate().map(|(i, piece)| (i * 10 * KIB, piece)))?;
        batch.run()
    };
    // Warm: what is allocated is there.
    upload(&bytes, &mut target).unwrap();
    gpu.stream.synchronize().unwrap();
    drain(&gpu.device);
    gpu.stream.memset_zeros(&mut target).unwrap();
    let gate = gpu.gate(&gpu.stream);
    upload(&bytes, &mut target).unwrap();
    bytes.fill(0xEE);
    gate.open();
    assert!(on_host(&gpu, &target) == expected);
    drop(target);
    drain(&gpu.device);
    gpu.finish();
}

/// A buffer that the device has yet to read is nobody else's, in this batch and the next.
#[test]
fn buffers_go_back_when_the_device_is_done_with_them() {
    let gpu = Gpu::any(H200);
    // A pool that keeps what comes back, and hands it out next.
    let device = Device::builder(&gpu.stream).pool(PoolOptions::new()).build().unwrap();
    let (first, second) = (pattern(MIB, 1), pattern(3 * MIB, 2));
    let mut targets = [MIB, 3 * MIB, MIB].map(|bytes| filled(&gpu, bytes, 0));
    let [a, b, c] = &mut targets;
    let other = gpu.another_stream();
    let upload = |stream, bytes: &[u8], target: &mut CudaSlice<u8>| {
        let mut batch = device.batch(stream);
        batch.upload(bytes, target).unwrap();
        batch.run().unwrap();
    };
    let long = pattern(7 * MIB, 3);
    let mut last = filled_on(&other, 7 * MIB);
    // Warm: a buffer for each that will be in use.
    let warm = [(); 4].map(|()| device.pool().acquire(2 * MIB).unwrap());
    drop(warm);
    upload(&gpu.stream, &first, a);
    gpu.stream.memset_zeros(a).unwrap();
    gpu.stream.synchronize().unwrap();
    drain(&device);
    let gate = gpu.gate(&gpu.stream);
    upload(&gpu.stream, &first, a);
    upload(&other, &second[..MIB], c);
    // Four rounds through two buffers: the first two have to have passed.
    let opener = gate.open_later();
    let mut batch = device.batch(&gpu.stream);
    batch.upload(&second, b).unwrap();
    batch.upload(&long, &mut last).unwrap();
    batch.run().unwrap();
    assert!(opener.opened(), "a buffer was packed again before it was read");
    assert!(on_host(&gpu, a) == first && on_host(&gpu, b) == second && on_host(&gpu, c) == second[..MIB]);
    assert!(on_host(&gpu, &last) == long);
    drop((targets, last, other));
    drain(&device);
    drop(device);
    drain(&gpu.device);
    gpu.finish();
}

/// What cudarc orders by its own events, on other streams, comes after the batch, and the batch after that.
#[test]
fn what_cudarc_tracks_comes_after_the_batch() {
    let gpu = Gpu::any(H200);
    let other = gpu.another_stream();
    let bytes = pattern(100 * KIB, 1);
    let mut slice = filled(&gpu, 200 * KIB, 0);
    let upload = |slice: &mut CudaSlice<u8>| {
        let mut batch = gpu.device.batch(&gpu.stream);
        batch.upload_parts(slice, apart(&bytes, KIB)).unwrap();
        batch.run().unwrap();
    };
    upload(&mut slice);
    gpu.stream.synchronize().unwrap();
    drain(&gpu.device);
    // A write before, on the other stream; a read behind it.
    let mut copy = filled(&gpu, 200 * KIB, 1);
    let gate = gpu.gate(&other);
    other.memset_zeros(&mut slice).unwrap();
    upload(&mut slice);
    gate.open();
    gpu.stream.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    upload(&mut slice);
    other.memcpy_dtod(&slice, &mut copy).unwrap();
    gate.open();
    assert!(on_host(&gpu, &copy) == expected(200 * KIB, 0, &apart(&bytes, KIB)));
    drop((slice, copy, other));
    drain(&gpu.device);
    gpu.finish();
}
