//! How much of the copying of batches to the device is hidden behind the computing of the ones before.
//!
//!     cargo bench --bench ingress_overlap -- [--quick] [--json FILE]
//!
//! A step takes a batch from an `IngressPrefetcher` and launches a kernel, behind the batch's copy, that takes a given
//! time and touches nothing: 4 times, once or a quarter of the time of a copy, which is measured first. *left* is a
//! source that leaves the memory as it is, so that no host's speed counts; *filled* one that writes all of it, with 8
//! threads. *ours* is the time from the first request to the source until the last kernel is over, by the step; *raw*
//! is what no loop can beat, the larger of all kernels alone and all copies alone (by the raw driver, from one
//! page-locked buffer, back to back). *peer* of *left* is the loop by raw calls, with a second stream, events, and four
//! buffers on each side that nobody fills; that of *filled* is all the filling alone, which may well be what bounds it.
//! All in one run, interleaved, by the wall.
//!
//! Of N equal steps N + 1 follow each other, since the first copy and the last kernel have nothing beside them: the
//! ratio can not be above N / (N + 1), for which there are at least 100 steps; each case says how far it can come.
//! *left* must reach 0.98.
//!
//! Without a GPU the simulated H200 runs: the copies are this CPU's, the kernel sleeps, and no ratio means anything.

mod common;

use std::convert::Infallible;
use std::time::Instant;

use common::overlap::{ByHand, Case, RATIOS, Spin, medians, one_copy, wall};
use common::{Args, Bench, Failure, Raw, Row, print, write};
use transfer_tensor::IngressPrefetcher;

const SIZES: [usize; 2] = [16 << 20, 256 << 20];
/// So many batches are loaded ahead, ...
const DEPTH: usize = 4;
/// ... or more where so many threads fill them.
const FILLERS: usize = 8;

fn main() -> Result<(), Failure> {
    let args = Args::read(&[], &[])?;
    let bench = Bench::open("x86_h200_sxm_gen5")?;
    bench.announce_wall();
    let spin = Spin::new(&bench)?;
    let mut rows = Vec::new();
    let mut add = |row: Row| {
        print(&row);
        rows.push(row);
    };
    let most = if bench.sim.is_some() { 16 << 20 } else { usize::MAX };
    for bytes in SIZES.into_iter().filter(|&bytes| bytes <= most) {
        left(&bench, &spin, bytes, args.quick, &mut add)?;
    }
    filled(&bench, &spin, SIZES[0], args.quick, &mut add)?;
    write(&args, &rows)
}

/// All steps, with batches from a source that begins again.
fn steps(
    bench: &Bench,
    spin: &Spin,
    case: &Case,
    batches: &mut IngressPrefetcher<u8, Infallible>,
) -> Result<f64, Failure> {
    let start = Instant::now();
    batches.reset();
    for _ in 0..case.steps {
        let batch = batches.next().ok_or("a batch is missing")??;
        let input = batch.device(&bench.stream)?;
        spin.launch(case.ticks);
        drop(input);
    }
    bench.sync();
    Ok(start.elapsed().as_secs_f64())
}

fn left(bench: &Bench, spin: &Spin, bytes: usize, quick: bool, add: &mut dyn FnMut(Row)) -> Result<(), Failure> {
    let (raw, hand) = (Raw::new(bytes), ByHand::new(bench, spin, bytes, DEPTH, false)?);
    let copy = one_copy(bench, || raw.up(bench));
    for (name, compute) in RATIOS {
        let case = Case::new(bench, spin, quick, bytes, copy * compute, &[copy]);
        let mut batches = IngressPrefetcher::builder(&bench.device, [bytes])
            .depth(DEPTH)
            .fill(move |number, batch: &mut [u8]| Ok(if number < case.steps as u64 { batch.len() } else { 0 }))?;
        let [computes, copies, by_hand, ours] = medians(
            case.rounds,
            [
                &mut || Ok(case.compute_alone(bench, spin)),
                &mut || Ok(case.copies_alone(bench, || raw.up(bench))),
                &mut || Ok(hand.run(&case)),
                &mut || steps(bench, spin, &case, &mut batches),
            ],
        )?;
        let best = computes.max(copies);
        add(case.row(format!("in {name}, compute alone"), computes, None, None));
        add(case.row(format!("in {name}, copies alone"), copies, None, None));
        add(case.row(format!("in {name}, by hand"), by_hand, Some(best), None));
        add(case.judged(format!("in {name}, left"), ours, best, Some(by_hand), 0.98));
    }
    Ok(())
}

/// Compute as long as the copy, and a host that has to write what is copied.
fn filled(bench: &Bench, spin: &Spin, bytes: usize, quick: bool, add: &mut dyn FnMut(Row)) -> Result<(), Failure> {
    let raw = Raw::new(bytes);
    let copy = one_copy(bench, || raw.up(bench));
    let case = Case::new(bench, spin, quick, bytes, copy, &[copy]);
    let mut batches = IngressPrefetcher::builder(&bench.device, [bytes]).depth(2 * FILLERS).threads(FILLERS).fill(
        move |number, batch: &mut [u8]| {
            if number >= case.steps as u64 {
                return Ok(0);
            }
            batch.fill(number as u8);
            Ok(batch.len())
        },
    )?;
    let mut memory: Vec<Vec<u8>> = (0..FILLERS).map(|_| vec![1; bytes]).collect();
    let mut fills = || {
        wall(|| {
            std::thread::scope(|scope| {
                for (thread, memory) in memory.iter_mut().enumerate() {
                    scope.spawn(move || {
                        for number in (thread..case.steps).step_by(FILLERS) {
                            std::hint::black_box(&mut *memory).fill(number as u8);
                        }
                    });
                }
            });
        })
    };
    let [computes, copies, fills, ours] = medians(
        case.rounds,
        [
            &mut || Ok(case.compute_alone(bench, spin)),
            &mut || Ok(case.copies_alone(bench, || raw.up(bench))),
            &mut || Ok(fills()),
            &mut || steps(bench, spin, &case, &mut batches),
        ],
    )?;
    let best = computes.max(copies);
    add(case.row("in 1:1, fills alone", fills, Some(best), None));
    add(case.row("in 1:1, filled", ours, Some(best), Some(fills)));
    Ok(())
}
