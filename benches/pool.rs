//! The pool of page-locked memory: what a lease costs, how soon the first is to be had, and making blocks.
//!
//!     cargo bench --bench pool -- [--quick] [--json FILE]
//!
//! All of it is time of the CPU, by the wall. *peer* of a lease is a `Mutex<Vec<…>>` with the same blocks in it, and the ratio is
//! to that; *raw* of a block is `cuMemHostAlloc` and `cuMemFreeHost` of the same size. Without a GPU the simulated H200 runs:
//! then leases are what they are anywhere, but what the driver does is the simulator's, on blocks a sixteenth as large, and
//! means nothing.

mod common;

use std::ffi::c_void;
use std::hint::black_box;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use common::{Args, Bench, Row, check, human, median, print, write};
use transfer_tensor::cudarc::driver::sys;
use transfer_tensor::{Device, PinnedPool, PoolOptions};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const THREADS: usize = 8;
const LEASE: usize = 1 << 20;

fn main() -> Outcome<()> {
    let args = Args::read(&[], &[])?;
    let bench = Bench::open("x86_h200_sxm_gen5")?;
    let name = bench.device.platform().name();
    match &bench.sim {
        Some(_) => println!("no GPU: the simulated {name}; wall clock, so all but the leases is about the simulator"),
        None => println!("{name}; wall clock"),
    }
    let mut rows = Vec::new();
    let mut add = |row: Row| {
        print(&row);
        rows.push(row);
    };
    leases(&bench, &args, &mut add)?;
    blocks(&bench, &args, &mut add)?;
    first_lease(&bench, &args, &mut add)?;
    write(&args, &rows)
}

fn row(case: &str, bytes: usize, unit: &'static str, ours: f64, raw: Option<f64>, peer: Option<f64>) -> Row {
    let scale = if unit == "ns" { 1e9 } else { 1e3 };
    Row {
        case: case.into(),
        bytes,
        ours: ours * scale,
        raw: raw.map(|seconds| seconds * scale),
        peer: peer.map(|seconds| seconds * scale),
        ratio: raw.or(peer).map(|other| other / ours),
        unit,
        clock: "wall",
    }
}

fn seconds(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

fn device(bench: &Bench, pool: PoolOptions) -> Outcome<Device> {
    Ok(Device::builder(&bench.stream).pool(pool).build()?)
}

/// Acquire and release of a block that lies ready.
fn leases(bench: &Bench, args: &Args, add: &mut dyn FnMut(Row)) -> Outcome<()> {
    let (rounds, cycles) = if args.quick { (3, 20_000) } else { (15, 200_000) };
    let device = device(bench, PoolOptions::new().budget(1 << 30))?;
    let pool: &PinnedPool = device.pool();
    pool.reserve(LEASE, THREADS)?;
    let made = pool.stats().made;
    let shelf: Mutex<Vec<Box<[u8]>>> = Mutex::new((0..THREADS).map(|_| Box::default()).collect());
    let ours = || drop(black_box(pool.acquire(LEASE).expect("a lease")));
    let peer = || {
        let block = shelf.lock().expect("no panic").pop();
        shelf.lock().expect("no panic").extend(black_box(block));
    };
    for (case, threads) in [("lease", 1), ("lease, 8 threads", THREADS)] {
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..=rounds {
            let both = [a_cycle(threads, cycles, &ours), a_cycle(threads, cycles, &peer)];
            for (times, time) in times.iter_mut().zip(both).filter(|_| round > 0) {
                times.push(time);
            }
        }
        let [ours, peer] = times.map(median);
        add(row(case, LEASE, "ns", ours, None, Some(peer)));
    }
    assert_eq!(pool.stats().made, made, "the driver was called");
    Ok(())
}

/// The seconds of one of `cycles` runs, as a thread sees them.
fn a_cycle(threads: usize, cycles: usize, run: &(dyn Fn() + Sync)) -> f64 {
    let start = Barrier::new(threads);
    let one = || {
        start.wait();
        seconds(|| (0..cycles).for_each(|_| run())) / cycles as f64
    };
    if threads == 1 {
        return one();
    }
    let times: Vec<f64> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        all.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    times.iter().sum::<f64>() / threads as f64
}

/// A block that the driver is asked for, and its way back.
fn blocks(bench: &Bench, args: &Args, add: &mut dyn FnMut(Row)) -> Outcome<()> {
    let rounds = if args.quick { 3 } else { 9 };
    let sizes: &[usize] = if bench.sim.is_some() { &[1 << 20, 16 << 20] } else { &[1 << 20, 16 << 20, 256 << 20] };
    let device = device(bench, PoolOptions::new().budget(4 << 30))?;
    for &bytes in sizes {
        let [mut make, mut raw_make, mut free, mut raw_free, mut back] = [const { Vec::new() }; 5];
        for round in 0..=rounds {
            let mut block = None;
            let made = seconds(|| block = Some(device.pool().acquire(bytes).expect("a block")));
            let returned = seconds(|| drop(block.take()));
            let freed = seconds(|| assert_eq!(device.pool().trim(0), bytes as u64));
            let mut host: *mut c_void = std::ptr::null_mut();
            let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
            // SAFETY: the bench's context is current; the call writes one pointer.
            let raw_made = seconds(|| unsafe { check(sys::cuMemHostAlloc(&mut host, bytes, flags)) });
            // SAFETY: allocated just now, and used by nobody.
            let raw_freed = seconds(|| unsafe { check(sys::cuMemFreeHost(host)) });
            if round > 0 {
                make.push(made);
                back.push(returned);
                free.push(freed);
                raw_make.push(raw_made);
                raw_free.push(raw_freed);
            }
        }
        let raw_free = median(raw_free);
        add(row("make a block", bytes, "ms", median(make), Some(median(raw_make)), None));
        add(row("free a block", bytes, "ms", median(free), Some(raw_free), None));
        add(row("give a block back (raw: free)", bytes, "ms", median(back), Some(raw_free), None));
    }
    Ok(())
}

/// From the first line of a program to its first lease, while the reserve is made behind it; *raw* is `cuMemHostAlloc` of
/// the reserve, which a program would wait for otherwise.
fn first_lease(bench: &Bench, args: &Args, add: &mut dyn FnMut(Row)) -> Outcome<()> {
    let (rounds, block, count) = match bench.sim {
        Some(_) => (if args.quick { 1 } else { 3 }, 16 << 20, 4),
        None => (if args.quick { 1 } else { 3 }, 64 << 20, 64),
    };
    let bytes = block * count;
    println!("{} are reserved in blocks of {}", human(bytes), human(block));
    let (mut first, mut all, mut raw) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let start = Instant::now();
        let device = device(bench, PoolOptions::new().budget(2 * bytes as u64).reserve(block, count))?;
        let lease = device.pool().acquire(LEASE)?;
        first.push(start.elapsed().as_secs_f64());
        let pool = device.pool().clone();
        while pool.stats().idle < bytes as u64 && pool.stats().refused == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        all.push(start.elapsed().as_secs_f64());
        drop(lease);
        pool.trim(0);
        let mut host: *mut c_void = std::ptr::null_mut();
        // SAFETY: as above.
        raw.push(seconds(|| unsafe { check(sys::cuMemHostAlloc(&mut host, bytes, sys::CU_MEMHOSTALLOC_PORTABLE)) }));
        // SAFETY: as above.
        unsafe { check(sys::cuMemFreeHost(host)) };
    }
    let raw = median(raw);
    add(row("device made, first lease (raw: all)", bytes, "ms", median(first), Some(raw), None));
    add(row("the whole reserve", bytes, "ms", median(all), Some(raw), None));
    Ok(())
}
