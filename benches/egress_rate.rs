//! Results of the device to a function on worker threads: how many a second, how soon one is there, what a submit costs the caller.
//!
//!     cargo bench --bench egress_rate -- [--quick] [--json FILE]
//!
//! *ours* of a rate is the time of one item when many are submitted one after another: from the first submit until the last was consumed. *raw* is
//! the same copies back to back on one stream, with one wait behind them. All of it is time of the CPU, by the wall; without a GPU the
//! simulated H200 runs: then copies are the simulator's, and only the time beside them means something.

mod common;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use common::{Args, Bench, Failure, Raw, Row, median, print, write};
use transfer_tensor::cudarc::driver::CudaSlice;
use transfer_tensor::{EgressPool, HostTensor, Output};

const SIZES: [usize; 6] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20];
const WORKERS: usize = 4;

fn main() -> Result<(), Failure> {
    let args = Args::read(&[], &[])?;
    let bench = Bench::open("x86_h200_sxm_gen5")?;
    bench.announce_wall();
    let mut rows = Vec::new();
    let mut add = |row: Row| {
        print(&row);
        rows.push(row);
    };
    let most = if bench.sim.is_some() { 1 << 20 } else { usize::MAX };
    for bytes in SIZES.into_iter().filter(|&bytes| bytes <= most) {
        rate(&bench, bytes, args.quick, &mut add)?;
    }
    for awake in [false, true] {
        latency(&bench, 4 << 10, awake, args.quick, &mut add)?;
    }
    write(&args, &rows)
}

/// A device's memory that every item is copied from: it is there, so that only the way out is measured.
fn source(bench: &Bench, bytes: usize) -> Result<Arc<CudaSlice<u8>>, Failure> {
    Ok(Arc::new(bench.stream.alloc_zeros(bytes)?))
}

fn rate(bench: &Bench, bytes: usize, quick: bool, add: &mut dyn FnMut(Row)) -> Result<(), Failure> {
    let (items, rounds) = match bytes {
        _ if quick || bench.sim.is_some() => (20, 3),
        0..0x10_0000 => (20_000, 7),
        0x10_0000..0x100_0000 => (2000, 7),
        _ => ((4usize << 30) / bytes, 5),
    };
    let capacity = ((1usize << 30) / bytes).clamp(4, 256);
    let pool: EgressPool<Arc<CudaSlice<u8>>, usize> = EgressPool::builder(&bench.device)
        .workers(WORKERS)
        .capacity(capacity)
        .budget(2 << 30)
        .consumer(|out: Output<HostTensor<u8>>| out.len())?;
    let (source, raw) = (source(bench, bytes)?, Raw::new(bytes));
    bench.sync();
    let (mut ours, mut raws, mut submits) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        let start = Instant::now();
        for _ in 0..items {
            drop(pool.submit(source.clone()).map_err(|refused| refused.error)?);
        }
        let submitted = start.elapsed().as_secs_f64() / items as f64;
        pool.drain(Duration::from_secs(600))?;
        let taken = start.elapsed().as_secs_f64() / items as f64;
        let start = Instant::now();
        for _ in 0..items {
            raw.down(bench);
        }
        bench.sync();
        if round > 0 {
            ours.push(taken);
            submits.push(submitted);
            raws.push(start.elapsed().as_secs_f64() / items as f64);
        }
    }
    let (ours, raw) = (median(ours), median(raws));
    add(Row::of_wall(bench, "delivered to a function", bytes, ours, Some(raw)));
    if bytes < 1 << 20 {
        println!("{:40} {:>9.0} items/s, raw {:.0}", "", 1.0 / ours, 1.0 / raw);
        add(Row::of_wall(bench, "submit, while many are under way", bytes, median(submits), None));
    }
    Ok(())
}

/// One item at a time, on a pool that has nothing else to do. *raw* is a copy with an event behind it, which the caller asks for until
/// it has passed.
fn latency(bench: &Bench, bytes: usize, awake: bool, quick: bool, add: &mut dyn FnMut(Row)) -> Result<(), Failure> {
    let (told, seen) = channel::<Instant>();
    let pool: EgressPool<Arc<CudaSlice<u8>>, ()> = EgressPool::builder(&bench.device)
        .workers(1)
        .low_latency(awake)
        .consumer(move |_: Output<HostTensor<u8>>| {
            let _ = told.send(Instant::now());
        })?;
    let (source, raw) = (source(bench, bytes)?, Raw::new(bytes));
    bench.sync();
    let (mut arrivals, mut submits, mut raws) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..if quick || bench.sim.is_some() { 10 } else { 501 } {
        // The pool falls asleep between two, if it may.
        std::thread::sleep(Duration::from_millis(2));
        let start = Instant::now();
        drop(pool.submit(source.clone()).map_err(|refused| refused.error)?);
        submits.push(start.elapsed().as_secs_f64());
        arrivals.push(seen.recv()?.duration_since(start).as_secs_f64());
        std::thread::sleep(Duration::from_millis(2));
        let start = Instant::now();
        raw.down(bench);
        bench.sync();
        raws.push(start.elapsed().as_secs_f64());
    }
    let case = |what: &str| if awake { format!("{what}, low latency") } else { format!("{what}, idle pool") };
    add(Row::of_wall(bench, &case("submit to function"), bytes, median(arrivals), Some(median(raws))));
    add(Row::of_wall(bench, &case("submit"), bytes, median(submits), None));
    Ok(())
}
