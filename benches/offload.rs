//! How much of bringing layers from the host is hidden behind the work on them, and how well that is predicted.
//!
//!     cargo bench --bench offload -- [--quick] [--json FILE]
//!
//! A step uses layers of the given size one after another, each by a kernel that takes a given time and touches nothing: 4 times, once or a quarter
//! of the time of a layer's copy, which is measured first. A fraction of the layers is on the host, two of those on the device at
//! a time (`depth(2)`). *ours* is the time of a step of several, by the wall; *raw* is what no offloading can beat, the larger of the step's kernels alone and
//! its copies alone (by the raw driver, to one buffer, back to back). *peer* is what `Workload::weigh` predicts, with the figures of the
//! device, which is calibrated first. All in one run, interleaved. The ratio must reach 0.952 (a step of 1.05 times the larger) from 64 MiB on, and
//! the prediction must be within a tenth.
//!
//! *activations* go through an `ActivationStack`: made in a forward pass, used in a backward pass whose kernels take the same time. *raw* is the larger of the kernels and the copies of each pass, both
//! passes together.
//!
//! Without a GPU the simulated H200 runs: the copies are this CPU's, the kernel sleeps, and no ratio means anything.

mod common;

use std::time::Instant;

use common::overlap::{RATIOS, Spin, medians, one_copy};
use common::{Args, Bench, Failure, Raw, Row, human, print, write};
use transfer_tensor::{Access, ActivationStack, Fractions, OffloadBatch, OffloadLayer, Offloader, Workload};

/// Bytes of a layer, and how many there are.
const SIZES: [(usize, usize); 3] = [(16 << 20, 32), (64 << 20, 16), (256 << 20, 12)];
const JUDGED: usize = 64 << 20;
const FRACTIONS: [f64; 3] = [0.25, 0.5, 1.0];

fn main() -> Result<(), Failure> {
    let args = Args::read(&[], &[])?;
    let bench = Bench::open("x86_h200_sxm_gen5")?;
    bench.announce_wall();
    let simulated = bench.sim.is_some();
    if !simulated {
        println!("{}", bench.device.calibrate()?);
    }
    let spin = Spin::new(&bench)?;
    let mut rows = Vec::new();
    let mut add = |row: Row| {
        print(&row);
        rows.push(row);
    };
    let sizes: &[(usize, usize)] = if simulated { &[(1 << 20, 8)] } else { &SIZES };
    for &(bytes, count) in sizes {
        grid(&bench, &spin, bytes, count, args.quick || simulated, &mut add)?;
    }
    bench.keep_freed_memory()?;
    let (bytes, count) = if simulated { (1 << 20, 6) } else { (JUDGED, 24) };
    activations(&bench, &spin, bytes, count, args.quick || simulated, &mut add)?;
    write(&args, &rows)
}

/// Activations that a forward pass makes and a backward pass uses, whose kernels take the same time: all but the top two go out and come back.
fn activations(
    bench: &Bench,
    spin: &Spin,
    bytes: usize,
    count: usize,
    quick: bool,
    add: &mut dyn FnMut(Row),
) -> Result<(), Failure> {
    const TOP: usize = 2;
    let raw = Raw::new(bytes);
    let [up, down] = [one_copy(bench, || raw.up(bench)), one_copy(bench, || raw.down(bench))];
    for (name, times) in RATIOS {
        let ticks = spin.ticks(up.max(down) * times);
        let mut stack = ActivationStack::new(&bench.device, TOP)?;
        let mut ours = || -> Result<f64, Failure> {
            let start = Instant::now();
            for _ in 0..count {
                // SAFETY: nobody looks at the bytes.
                let made = unsafe { bench.stream.alloc::<u8>(bytes)? };
                spin.launch(ticks);
                stack.push_slice(made).map_err(|refused| refused.error)?;
            }
            for _ in 0..count {
                let used = stack.pop::<u8>()?.ok_or("an activation is missing")?;
                let used = used.device(&bench.stream)?;
                spin.launch(ticks);
                drop(used);
            }
            bench.sync();
            Ok(start.elapsed().as_secs_f64())
        };
        let timed = |run: &dyn Fn(), count: usize| -> Result<f64, Failure> {
            let start = Instant::now();
            (0..count).for_each(|_| run());
            bench.sync();
            Ok(start.elapsed().as_secs_f64())
        };
        let [computes, outs, backs, ours] = medians(
            if quick { 1 } else { 5 },
            [
                &mut || timed(&|| spin.launch(ticks), count),
                &mut || timed(&|| raw.down(bench), count - TOP),
                &mut || timed(&|| raw.up(bench), count - TOP),
                &mut ours,
            ],
        )?;
        // What goes out does so while the forward pass computes, and what comes back in the backward pass.
        let best = computes.max(outs) + computes.max(backs);
        add(Row {
            case: format!("{count} x {} of activations, {name}", human(bytes)),
            bytes,
            ours: ours * 1e6,
            raw: Some(best * 1e6),
            peer: None,
            ratio: Some(best / ours),
            unit: "us",
            clock: "wall",
        });
    }
    Ok(())
}

fn grid(
    bench: &Bench,
    spin: &Spin,
    bytes: usize,
    count: usize,
    quick: bool,
    add: &mut dyn FnMut(Row),
) -> Result<(), Failure> {
    let raw = Raw::new(bytes);
    let copy = one_copy(bench, || raw.up(bench));
    let layer = |number: usize| -> Result<OffloadLayer, Failure> {
        let mut tensor = bench.device.tensor().access(Access::reuse(1000)?).zeros::<u8>([bytes])?;
        tensor.host_mut()?.fill(number as u8);
        Ok(OffloadLayer::new().tensor(tensor))
    };
    let mut layers = (0..count).map(layer).collect::<Result<Vec<_>, _>>()?;
    for fraction in FRACTIONS {
        let builder = Offloader::builder(&bench.device).fraction(fraction).depth(2);
        let mut model = builder.build(layers).map_err(|refused| refused.error)?;
        let moved = model.report().layers.len();
        for (name, times) in RATIOS {
            let compute = copy * times;
            let step = (compute * count as f64).max(copy * moved as f64);
            let steps = if quick { 2 } else { ((0.4 / step) as usize).clamp(4, 100) };
            let ticks = spin.ticks(compute);
            let timed = |run: &mut dyn FnMut() -> Result<(), Failure>| -> Result<f64, Failure> {
                let start = Instant::now();
                (0..steps).try_for_each(|_| run())?;
                bench.sync();
                Ok(start.elapsed().as_secs_f64() / steps as f64)
            };
            let mut ours = || -> Result<(), Failure> {
                for number in 0..count {
                    let layer = model.layer(number, &bench.stream)?;
                    let weights = layer.device::<u8>(0)?;
                    spin.launch(ticks);
                    drop(weights);
                }
                Ok(())
            };
            let [computes, copies, ours] = medians(
                if quick { 1 } else { 3 },
                [
                    &mut || {
                        timed(&mut || {
                            (0..count).for_each(|_| spin.launch(ticks));
                            Ok(())
                        })
                    },
                    &mut || {
                        timed(&mut || {
                            (0..moved).for_each(|_| raw.up(bench));
                            Ok(())
                        })
                    },
                    &mut || timed(&mut ours),
                ],
            )?;
            let best = computes.max(copies);
            let mut workload = Workload::new((count * bytes) as u64, 0, computes);
            workload.weight_passes = Some(1);
            let batch = OffloadBatch { times: 1.0, seconds: computes };
            let moved_fraction = Fractions::of_weights(moved as f64 / count as f64);
            let predicted = workload.weigh(bench.device.platform(), batch, moved_fraction, false)?.step.overlapped();
            add(Row {
                case: format!("{count} x {}, {fraction}, {name}", human(bytes)),
                bytes,
                ours: ours * 1e6,
                raw: Some(best * 1e6),
                peer: Some(predicted * 1e6),
                ratio: Some(best / ours),
                unit: "us",
                clock: "wall",
            });
            let off = ours / predicted;
            let judged = !quick && bytes >= JUDGED;
            if judged && best / ours < 0.952 {
                println!("  below 0.952: {:.4}", best / ours);
            }
            println!(
                "  measured / predicted {off:.3}{}",
                if judged && (off - 1.0).abs() > 0.1 { ": more than a tenth" } else { "" }
            );
        }
        layers = model.into_layers().map_err(|refused| refused.error)?;
    }
    Ok(())
}
