//! Batches of small pieces, and rows (field reports R33, R34, R48).

use std::collections::BTreeMap;

use transfer_tensor::cudarc::driver::{CudaContext, CudaSlice, sys};
use transfer_tensor::{BatchReport, Device, Error, Strategy};

use crate::machines::{built, drain, pattern};
use crate::support::{Gpu, H200, builder};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Device memory, all of it one byte.
fn filled(gpu: &Gpu, bytes: usize, value: u8) -> CudaSlice<u8> {
    let slice = gpu.stream.clone_htod(&vec![value; bytes]).unwrap();
    gpu.stream.synchronize().unwrap();
    slice
}

fn on_host(gpu: &Gpu, slice: &CudaSlice<u8>) -> Vec<u8> {
    gpu.stream.clone_dtoh(slice).unwrap()
}

/// Pieces of `len` bytes at every second place, the last ones first.
fn apart(bytes: &[u8], len: usize) -> Vec<(usize, &[u8])> {
    let mut parts: Vec<_> = bytes.chunks(len).enumerate().map(|(i, piece)| (2 * i * len, piece)).collect();
    parts.reverse();
    parts
}

/// What device memory of `total` bytes of `before` holds after these pieces.
fn expected(total: usize, before: u8, parts: &[(usize, &[u8])]) -> Vec<u8> {
    let mut all = vec![before; total];
    for (start, piece) in parts {
        all[*start..][..piece.len()].copy_from_slice(piece);
    }
    all
}

/// Brings pieces of `len` bytes to places apart from each other and back; both reports.
fn there_and_back(gpu: &Gpu, device: &Device, pieces: usize, len: usize) -> Result<[BatchReport; 2], Error> {
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
        assert_eq!(sim.count("cuMemcpyBatchAsync") as u64, up.calls + down.calls);
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

/// R34: a default stream, a driver that lacks the call, one that has it and refuses it.
#[test]
fn without_the_batch_call_single_copies_do() {
    const PIECES: u64 = 700;
    let single = |gpu: &Gpu| {
        let reports = there_and_back(gpu, &gpu.device, PIECES as usize, 4 * KIB).unwrap();
        for report in reports {
            assert!(report.calls == report.copies && report.calls >= PIECES, "{report:?}");
        }
        drain(&gpu.device);
    };
    let default = |gpu: &Gpu| {
        single(gpu);
        if let Some(sim) = &gpu.sim {
            assert_eq!(sim.count("cuMemcpyBatchAsync"), 0);
        }
    };
    let gpu = Gpu::on_stream(H200, |context| context.default_stream());
    default(&gpu);
    gpu.finish();
    let gpu = Gpu::on_stream(H200, CudaContext::per_thread_stream);
    default(&gpu);
    gpu.finish();
    let Some(gpu) = built(builder(H200).driver_version(12_060)) else { return };
    default(&gpu);
    gpu.finish();
    let Some(gpu) = Gpu::simulated(H200) else { return };
    gpu.sim.as_ref().unwrap().fail_always("cuMemcpyBatchAsync", 801);
    single(&gpu);
    gpu.finish();
    let Some(gpu) = Gpu::simulated(H200) else { return };
    gpu.sim.as_ref().unwrap().fail_always("cuGetProcAddress", 1);
    default(&gpu);
    gpu.finish();
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
    let flags = gpu.stream.clone_htod(&[1u8, 0, 2]).unwrap();
    // SAFETY: as many bytes; whether they are booleans is the question.
    let flags = unsafe { flags.transmute::<bool>(3) }.unwrap();
    let mut host = [true; 3];
    let mut batch = gpu.device.batch(&gpu.stream);
    batch.download(&flags, &mut host).unwrap();
    let error = batch.run().unwrap_err();
    assert!(error.is_invalid_input() && error.to_string().contains("no BOOL"), "{error}");
    assert_eq!(host, [true; 3]);
    drop((slice, second));
    drain(&gpu.device);
    gpu.finish();
}
