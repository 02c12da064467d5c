//! Staged copies: how they are counted, and what they need of the pool.

use transfer_tensor::PoolOptions;

use crate::batch::filled;
use crate::machines::{drain, pattern};
use crate::pool::handle;
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
