//! Which memory of the host a batch reads and writes, and what it does without page-locked memory.

use transfer_tensor::{Rows, Strategy};

use crate::batch::{filled, on_host, there_and_back};
use crate::machines::{drain, pattern};
use crate::support::{GH200, Gpu, H200};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Page-locked memory is read and written where it is, and is the caller's again when the batch has run.
#[test]
fn long_pieces_in_pinned_memory_are_not_packed() {
    let gpu = Gpu::any(H200);
    let bytes = pattern(500 * KIB, 8);
    let pinned = || gpu.device.tensor().strategy(Strategy::Streamed);
    let (mut source, mut back) =
        (pinned().from_slice(&bytes, [500 * KIB]).unwrap(), pinned().from_slice(&bytes, [500 * KIB]).unwrap());
    let mut target = filled(&gpu, MIB, 0);
    {
        let mut host = source.host_mut().unwrap();
        let opener = gpu.gate(&gpu.stream).open_later();
        let mut batch = gpu.device.batch(&gpu.stream);
        // A short piece is packed.
        let parts =
            [(0, &host[..100 * KIB]), (600 * KIB, &host[100 * KIB..499 * KIB]), (MIB - 5, &host[499 * KIB..][..5])];
        batch.upload_parts(&mut target, parts).unwrap();
        let report = batch.run().unwrap();
        assert!(opener.opened(), "it is still being read");
        assert_eq!((report.pieces, report.copies), (3, 3));
        host.fill(0);
    }
    let mut host = back.host_mut().unwrap();
    host.fill(1);
    let copied = gpu.sim.as_ref().map(|sim| sim.count("cuMemHostAlloc"));
    let (head, tail) = host.split_at_mut(100 * KIB);
    let mut batch = gpu.device.batch(&gpu.stream);
    batch.download_parts(&target, [(0, head), (600 * KIB, &mut tail[..399 * KIB])]).unwrap();
    batch.run().unwrap();
    assert_eq!(copied, gpu.sim.as_ref().map(|sim| sim.count("cuMemHostAlloc")), "nothing to pack");
    assert!(host[..499 * KIB] == bytes[..499 * KIB] && host[499 * KIB..] == [1; KIB]);
    assert_eq!(on_host(&gpu, &target)[MIB - 5..], bytes[499 * KIB..][..5]);
    drop(host);
    drop((source, back, target));
    drain(&gpu.device);
    gpu.finish();
}

/// Across a coherent link the device reads ordinary memory at full speed: only what is small is packed.
#[test]
fn long_pieces_are_not_packed_for_a_coherent_link() {
    let Some(gpu) = Gpu::simulated(GH200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let bytes = pattern(12 * MIB, 8);
    let mut target = filled(&gpu, 12 * MIB, 0);
    let before = sim.evidence();
    let mut batch = gpu.device.batch(&gpu.stream);
    batch.upload_parts(&mut target, [(0, &bytes[..11 * MIB]), (11 * MIB, &bytes[11 * MIB..][..1000])]).unwrap();
    assert_eq!(batch.run().unwrap().copies, 2);
    gpu.stream.synchronize().unwrap();
    let after = sim.evidence();
    assert_eq!(after.copied_h2d_pageable - before.copied_h2d_pageable, 11 * MIB as u64);
    assert_eq!(after.copied_h2d_pinned - before.copied_h2d_pinned, 1000);
    assert!(on_host(&gpu, &target)[..11 * MIB + 1000] == bytes[..11 * MIB + 1000]);
    drop(target);
    drain(&gpu.device);
    gpu.finish();
}

/// A container, WSL or a budget that allows no pinned memory, or little.
#[test]
fn without_pinned_memory_batches_and_rows_are_right() {
    for refused in [None, Some(2)] {
        let Some(gpu) = Gpu::simulated(H200) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        match refused {
            None => sim.fail_always("cuMemHostAlloc", 2),
            // The second buffer is not to be had.
            Some(nth) => sim.fail_nth("cuMemHostAlloc", nth, 2),
        }
        let [up, down] = there_and_back(&gpu, &gpu.device, 1200, 4 * KIB + 1).unwrap();
        assert!(up.copies >= 1200 && down.copies >= 1200);
        assert_eq!(refused.is_none(), up.calls == up.copies, "a batch is not promised to take pageable memory");
        // Long enough to be staged.
        let bytes = pattern(9 * MIB, 2);
        let mut target = filled(&gpu, 9 * MIB, 0);
        let mut batch = gpu.device.batch(&gpu.stream);
        batch.upload(&bytes, &mut target).unwrap();
        batch.run().unwrap();
        let mut back = vec![0; 9 * MIB];
        let mut batch = gpu.device.batch(&gpu.stream);
        batch.download(&target, &mut back).unwrap();
        batch.run().unwrap();
        assert!(back == bytes);
        back.fill(0);
        gpu.device
            .download_rows(&gpu.stream, &target, &Rows::new(9 * KIB, KIB / 2).device_pitch(KIB), &mut back)
            .unwrap();
        assert!(back.chunks(KIB / 2).zip(bytes.chunks(KIB)).all(|(row, all)| row == &all[..KIB / 2]));
        drop(target);
        drain(&gpu.device);
        gpu.finish();
    }
}
