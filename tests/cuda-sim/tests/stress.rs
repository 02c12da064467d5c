//! Correct programs of many streams: the right bytes, and nobody is blamed.

mod common;

use common::*;
use cuda_sim::DeviceBuilder;
use cudarc::driver::sys;

/// A small generator, so that a failing seed can be run again.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

/// Blocks of device memory, each with an event for its last use; every use waits for it and records it anew.
fn program(seed: u64, late: bool) {
    const STREAMS: usize = 5;
    const BLOCKS: usize = 8;
    const LEN: usize = 3000;
    let sim = DeviceBuilder::new("x86_h200_sxm_gen5").seed(seed).reorder(true).complete_late(late).build().unwrap();
    context(sim.ordinal());
    let mut dice = Dice(seed);
    let streams: Vec<_> = (0..STREAMS).map(|_| stream()).collect();
    let mut blocks: Vec<(u64, sys::CUevent, u8)> = (0..BLOCKS).map(|_| (alloc(LEN), event(), 0xDD)).collect();
    let upload = pinned(LEN * 256);
    for (value, chunk) in upload.chunks_mut(LEN).enumerate() {
        chunk.fill(value as u8);
    }
    let mut reads = Vec::new();
    for _ in 0..120 {
        let (s, a, b) = (streams[dice.roll(STREAMS)], dice.roll(BLOCKS), dice.roll(BLOCKS));
        // SAFETY: live handles and memory of these sizes throughout.
        unsafe {
            for block in [a, b] {
                ok(sys::cuStreamWaitEvent(s, blocks[block].1, 0));
            }
            match dice.roll(5) {
                0 => {
                    let value = dice.roll(256);
                    ok(h2d(blocks[a].0, &upload[value * LEN..][..LEN], s));
                    blocks[a].2 = value as u8;
                }
                1 => {
                    let value = dice.roll(256) as u8;
                    ok(sys::cuMemsetD8Async(blocks[a].0, value, LEN, s));
                    blocks[a].2 = value;
                }
                2 if a != b => {
                    ok(sys::cuMemcpyDtoDAsync_v2(blocks[a].0, blocks[b].0, LEN, s));
                    blocks[a].2 = blocks[b].2;
                }
                3 => {
                    // A new block takes the old one's place, in stream order.
                    let mut fresh = 0;
                    ok(sys::cuMemAllocAsync(&raw mut fresh, LEN, s));
                    let old = std::mem::replace(&mut blocks[a].0, fresh);
                    ok(sys::cuMemcpyDtoDAsync_v2(fresh, old, LEN, s));
                    ok(sys::cuMemFreeAsync(old, s));
                }
                _ => {
                    let target = pinned(LEN);
                    ok(d2h(target, blocks[a].0, s));
                    reads.push((target, blocks[a].2));
                }
            }
            for block in [a, b] {
                ok(sys::cuEventRecord(blocks[block].1, s));
            }
        }
        if dice.roll(10) == 0 {
            ok(sync(s));
        }
    }
    // SAFETY: no pointers.
    ok(unsafe { sys::cuCtxSynchronize() });
    for (target, value) in reads {
        assert!(target.iter().all(|byte| *byte == value), "seed {seed}: {} for {value}", target[0]);
    }
    for (address, _, value) in &blocks {
        assert_eq!(sim.peek(*address, LEN).unwrap(), vec![*value; LEN], "seed {seed}");
    }
    assert_eq!(sim.violations(), Vec::<String>::new(), "seed {seed}");
}

#[test]
fn ordered_programs_are_not_blamed() {
    for seed in 0..8 {
        program(seed, false);
    }
    program(99, true);
}

#[test]
fn threads_with_devices_of_their_own() {
    let threads: Vec<_> = (100..106).map(|seed| std::thread::spawn(move || program(seed, false))).collect();
    for thread in threads {
        thread.join().unwrap();
    }
}
