//! How much of the copying of results is hidden behind the computing of the next ones.
//!
//!     cargo bench --bench egress_overlap -- [--quick] [--cpu] [--json FILE]
//!
//! A step launches a kernel that takes a given time and touches nothing, and submits a result to an `EgressPool`:
//! *ring*, a buffer that was there before and is never written, or *fresh*, one that the step allocates in stream
//! order. The kernel takes 4 times, once or a quarter of the time of a copy, which is measured first. *ours* is the
//! time from the first launch until the last result was consumed, by the step; *raw* is what no loop can beat, the
//! larger of all kernels alone and all copies alone (by the raw driver, to one page-locked buffer, back to back).
//! *peer* is the loop by raw calls, with a second stream, events and one buffer that nobody consumes. All in one run,
//! interleaved, by the wall.
//!
//! Of N equal steps N + 1 follow each other, since the first kernel and the last copy have nothing beside them: the
//! ratio can not be above N / (N + 1), for which there are at least 100 steps; each case says how far it can come. It
//! must reach 0.98 at 16 MiB and 256 MiB; 1 MiB is there to be seen.
//!
//! *all three* has batches of 16 MiB from an `IngressPrefetcher`, a kernel for each, and a result of 16 MiB. *raw* is
//! the largest of the three alone, and ours must reach 0.95 of it where the kernel takes as long as a *pair* of copies
//! that go both ways at once. Such a pair takes longer than *one copy*: where the kernel takes as long as that, the
//! link is the bound and not *raw*, so that ratio is there to be seen beside *link*, the same copies both ways at once
//! without kernels (in the column of *ours*).
//!
//! `--cpu` tells instead what a pool of 4 workers computes, all threads together, while it has nothing to do, and while its one item waits
//! for a kernel of two seconds.
//!
//! Without a GPU the simulated H200 runs: the copies are this CPU's, the kernel sleeps, and no ratio means anything.

mod common;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::overlap::{ByHand, Case, PATIENCE, RATIOS, Spin, medians, one_copy};
use common::{Args, Bench, Failure, Raw, Row, cpu_time, print, write};
use transfer_tensor::cudarc::driver::CudaSlice;
use transfer_tensor::{Device, EgressPool, EgressSource, HostTensor, IngressPrefetcher, Output};

const SIZES: [usize; 3] = [1 << 20, 16 << 20, 256 << 20];
/// The sizes at which ratios are judged.
const JUDGED: usize = 16 << 20;

fn main() -> Result<(), Failure> {
    let args = Args::read(&["--cpu"], &[])?;
    let bench = Bench::open("x86_h200_sxm_gen5")?;
    bench.announce_wall();
    bench.keep_freed_memory()?;
    let spin = Spin::new(&bench)?;
    let mut rows = Vec::new();
    let mut add = |row: Row| {
        print(&row);
        rows.push(row);
    };
    if args.has("--cpu") {
        cpu(&bench, &spin, &mut add)?;
        return write(&args, &rows);
    }
    let most = if bench.sim.is_some() { 16 << 20 } else { usize::MAX };
    for bytes in SIZES.into_iter().filter(|&bytes| bytes <= most) {
        out(&bench, &spin, bytes, args.quick, &mut add)?;
    }
    all_three(&bench, &spin, args.quick, &mut add)?;
    write(&args, &rows)
}

/// What a pool costs that waits.
fn cpu(bench: &Bench, spin: &Spin, add: &mut dyn FnMut(Row)) -> Result<(), Failure> {
    const LONG: Duration = Duration::from_secs(2);
    let pool: EgressPool<Arc<CudaSlice<u8>>, usize> =
        EgressPool::builder(&bench.device).workers(4).consumer(|out: Output<HostTensor<u8>>| out.len())?;
    let source: Arc<CudaSlice<u8>> = Arc::new(bench.stream.alloc_zeros(4 << 10)?);
    pool.submit(source.clone()).map_err(|refused| refused.error)?.wait()?;
    let mut row = |case: &str, busy: Duration| {
        let share = busy.as_secs_f64() / LONG.as_secs_f64() * 100.0;
        add(Row {
            case: case.into(),
            bytes: 4 << 10,
            ours: share,
            raw: None,
            peer: None,
            ratio: None,
            unit: "% of a core",
            clock: "wall",
        });
    };
    let before = cpu_time();
    std::thread::sleep(LONG);
    row("CPU, an idle pool", cpu_time() - before);
    spin.launch(spin.ticks(LONG.as_secs_f64()));
    let before = cpu_time();
    let ticket = pool.submit(source).map_err(|refused| refused.error)?;
    // The item's own delivery is part of it.
    ticket.wait()?;
    row("CPU, a pool that waits for the device", cpu_time() - before);
    Ok(())
}

fn pool<S: EgressSource<Output = HostTensor<u8>>>(
    device: &Device,
    bytes: usize,
) -> Result<EgressPool<S, usize>, Failure> {
    // Fewer than there are steps, so that the round that does not count makes all the memory.
    let pool = EgressPool::builder(device)
        .workers(2)
        .capacity(((1usize << 30) / bytes).clamp(4, 16))
        .budget(2 << 30)
        .consumer(|out: Output<HostTensor<u8>>| out.len())?;
    Ok(pool)
}

/// Buffers that are there before, and that nothing writes.
fn ring(bench: &Bench, bytes: usize) -> Result<Vec<Arc<CudaSlice<u8>>>, Failure> {
    let ring = (0..4).map(|_| bench.stream.alloc_zeros(bytes).map(Arc::new)).collect::<Result<_, _>>()?;
    bench.sync();
    Ok(ring)
}

/// All steps, with results that `make` gives.
fn steps<S: EgressSource>(
    case: &Case,
    spin: &Spin,
    pool: &EgressPool<S, usize>,
    mut make: impl FnMut(usize) -> Result<S, Failure>,
) -> Result<f64, Failure> {
    let start = Instant::now();
    for step in 0..case.steps {
        let result = make(step)?;
        spin.launch(case.ticks);
        drop(pool.submit(result).map_err(|refused| refused.error)?);
    }
    pool.drain(PATIENCE)?;
    Ok(start.elapsed().as_secs_f64())
}

fn out(bench: &Bench, spin: &Spin, bytes: usize, quick: bool, add: &mut dyn FnMut(Row)) -> Result<(), Failure> {
    let (raw, hand) = (Raw::new(bytes), ByHand::new(bench, spin, bytes, 0, true)?);
    let ring = ring(bench, bytes)?;
    let (shared, owned) = (pool(&bench.device, bytes)?, pool(&bench.device, bytes)?);
    let copy = one_copy(bench, || raw.down(bench));
    for (name, compute) in RATIOS {
        let case = Case::new(bench, spin, quick, bytes, copy * compute, &[copy]);
        let [computes, copies, by_hand, from_ring, from_fresh] = medians(
            case.rounds,
            [
                &mut || Ok(case.compute_alone(bench, spin)),
                &mut || Ok(case.copies_alone(bench, || raw.down(bench))),
                &mut || Ok(hand.run(&case)),
                &mut || steps(&case, spin, &shared, |step| Ok(ring[step % ring.len()].clone())),
                // SAFETY: nobody looks at the bytes.
                &mut || steps(&case, spin, &owned, |_| Ok(unsafe { bench.stream.alloc::<u8>(bytes) }?)),
            ],
        )?;
        let (best, least) = (computes.max(copies), if bytes >= JUDGED { 0.98 } else { 0.0 });
        add(case.row(format!("out {name}, compute alone"), computes, None, None));
        add(case.row(format!("out {name}, copies alone"), copies, None, None));
        add(case.row(format!("out {name}, by hand"), by_hand, Some(best), None));
        add(case.judged(format!("out {name}, ring"), from_ring, best, Some(by_hand), least));
        add(case.judged(format!("out {name}, fresh"), from_fresh, best, Some(by_hand), least));
    }
    Ok(())
}

/// In, compute and out at the same time.
fn all_three(bench: &Bench, spin: &Spin, quick: bool, add: &mut dyn FnMut(Row)) -> Result<(), Failure> {
    let bytes = JUDGED;
    let (raw, hand) = (Raw::new(bytes), ByHand::new(bench, spin, bytes, 4, true)?);
    let (ring, pool) = (ring(bench, bytes)?, pool::<Arc<CudaSlice<u8>>>(&bench.device, bytes)?);
    let ways = [one_copy(bench, || raw.up(bench)), one_copy(bench, || raw.down(bench))];
    let pair = (0..3).map(|_| hand.copies(100) / 100.0).fold(f64::INFINITY, f64::min);
    let by_pair = ("pair", pair, 0.95);
    let by_one = ("one copy", ways[0].max(ways[1]), 0.0);
    for (name, compute, least) in [by_pair, by_one] {
        let case = Case::new(bench, spin, quick, bytes, compute, &ways);
        // It holds nothing back: what a loader does to the memory is not the question here.
        let fill = move |number: u64, batch: &mut [u8]| {
            Ok::<_, Infallible>(if number < case.steps as u64 { batch.len() } else { 0 })
        };
        let mut batches = IngressPrefetcher::builder(&bench.device, [bytes]).depth(4).fill(fill)?;
        let mut ours = || {
            let start = Instant::now();
            batches.reset();
            for step in 0..case.steps {
                let batch = batches.next().ok_or("a batch is missing")??;
                let input = batch.device(&bench.stream)?;
                spin.launch(case.ticks);
                drop(input);
                drop(batch);
                drop(pool.submit(ring[step % ring.len()].clone()).map_err(|refused| refused.error)?);
            }
            pool.drain(PATIENCE)?;
            Ok(start.elapsed().as_secs_f64())
        };
        let [computes, ups, downs, link, by_hand, ours] = medians(
            case.rounds,
            [
                &mut || Ok(case.compute_alone(bench, spin)),
                &mut || Ok(case.copies_alone(bench, || raw.up(bench))),
                &mut || Ok(case.copies_alone(bench, || raw.down(bench))),
                &mut || Ok(hand.copies(case.steps)),
                &mut || Ok(hand.run(&case)),
                &mut ours,
            ],
        )?;
        let best = computes.max(ups).max(downs);
        add(case.row(format!("all three ({name}), compute alone"), computes, None, None));
        add(case.row(format!("all three ({name}), in alone"), ups, None, None));
        add(case.row(format!("all three ({name}), out alone"), downs, None, None));
        add(case.row(format!("all three ({name}), link"), link, Some(best), None));
        add(case.row(format!("all three ({name}), by hand"), by_hand, Some(best), None));
        add(case.judged(format!("all three ({name})"), ours, best, Some(by_hand), least));
    }
    Ok(())
}
