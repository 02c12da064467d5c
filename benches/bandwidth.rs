//! Copies of every kind of host memory, at every size, both ways.
//!
//!     cargo bench --bench bandwidth -- [--quick] [--json FILE] [--only WORD] [--sweep] [--cpu]
//!
//! *raw* is the driver's copy of page-locked memory (`cuMemcpy…Async` and a wait) of the same size in the same rounds, the
//! ceiling of the link; *peer* is what the driver itself, or cudarc, does with the same host memory. Medians of interleaved
//! rounds. Without a GPU the simulated H200, GH200 and Spark run, by their own clocks. `--sweep` tries pieces and threads of
//! staged copies instead; `--cpu` tells the process's CPU time, in percent of one core, while copies run for ten seconds (*raw*:
//! what copying the bytes itself takes, where the CPU does that) and after them.

mod common;

use std::ffi::c_void;
use std::time::{Duration, Instant};

use common::{Args, Bench, Raw, Row, check, cpu_time, human, medians, print, write};
use transfer_tensor::cudarc::driver::{CudaSlice, sys};
use transfer_tensor::{Access, Backing, Device, Strategy, TransferTensor};

const SIZES: [usize; 10] =
    [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];

fn rounds(bytes: usize, quick: bool) -> usize {
    match bytes {
        _ if quick => 3,
        0..0x10_0000 => 201,
        0x10_0000..0x400_0000 => 41,
        0x400_0000..0x2000_0000 => 11,
        _ => 7,
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::read(&["--sweep", "--cpu"], &["--only"])?;
    let first = Bench::open("x86_h200_sxm_gen5")?;
    let simulated = first.sim.is_some();
    let mut rows = Vec::new();
    if args.has("--sweep") {
        first.announce();
        sweep(&first, &args, &mut rows)?;
        return write(&args, &rows);
    }
    if args.has("--cpu") {
        first.announce();
        cpu(&first, &args, &mut rows)?;
        return write(&args, &rows);
    }
    let mut benches = vec![first];
    if simulated {
        benches.push(Bench::open("gh200_480gb_numa")?);
        benches.push(Bench::open("dgx_spark_gb10")?);
    }
    for bench in &benches {
        bench.announce();
        all(bench, &args, &mut rows)?;
    }
    write(&args, &rows)
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn all(bench: &Bench, args: &Args, rows: &mut Vec<Row>) -> Outcome {
    let most = if bench.sim.is_some() { 64 << 20 } else { 1 << 30 };
    let only = |case: &str| args.value("--only").is_none_or(|only| case.contains(only));
    let mut add = |row: Row| {
        print(&row);
        rows.push(row);
    };
    for bytes in SIZES.into_iter().filter(|&bytes| bytes <= most && !(args.quick && bytes > 16 << 20)) {
        let rounds = rounds(bytes, args.quick);
        let raw = Raw::new(bytes);
        if only("pageable") {
            pageable(bench, &raw, rounds, &mut add)?;
        }
        if only("fresh") {
            fresh(bench, &raw, rounds.min(21), &mut add)?;
        }
        if only("pinned") {
            pinned(bench, &raw, rounds, &mut add)?;
        }
        if only("both") {
            both(bench, bytes, rounds, &mut add)?;
        }
        // Managed memory moves page by page: no more than a few hundred MiB of it.
        for (name, backing) in [("managed", Backing::Managed), ("mapped", Backing::Pinned)] {
            if only(name) && bytes <= 64 << 20 {
                in_place(bench, name, backing, &raw, rounds.min(21), &mut add)?;
            }
        }
        if only("write-combined") && bytes >= 64 << 10 {
            write_combined(bench, &raw, rounds.min(11), &mut add);
        }
    }
    Ok(())
}

/// An upload against the raw copy alone: seconds of each.
fn up_and_raw(
    bench: &Bench,
    device: &Device,
    raw: &Raw,
    rounds: usize,
    source: &[u8],
    slice: &mut CudaSlice<u8>,
) -> [f64; 2] {
    medians(
        bench,
        rounds,
        [
            &mut || {
                device.upload(&bench.stream, source, slice).expect("an upload");
                bench.sync();
            },
            &mut || {
                raw.up(bench);
                bench.sync();
            },
        ],
    )
}

/// Memory that was touched before, one shot: ours against the driver's and cudarc's own copy.
fn pageable(bench: &Bench, raw: &Raw, rounds: usize, add: &mut dyn FnMut(Row)) -> Outcome {
    let (bytes, stream, device) = (raw.bytes, &bench.stream, &bench.device);
    let (source, mut target) = (vec![0x5au8; bytes], vec![1u8; bytes]);
    let (mut other, mut another) = (vec![2u8; bytes], vec![3u8; bytes]);
    let mut slice: CudaSlice<u8> = stream.alloc_zeros(bytes)?;
    let mut peer: CudaSlice<u8> = stream.alloc_zeros(bytes)?;
    let [ours, raw_up, driver, cudarc] = medians(
        bench,
        rounds,
        [
            &mut || {
                device.upload(stream, &source, &mut slice).expect("an upload");
                bench.sync();
            },
            &mut || {
                raw.up(bench);
                bench.sync();
            },
            // It returns when a small source has been read; the bytes are there when its stream is idle. SAFETY: as long.
            &mut || unsafe {
                check(sys::cuMemcpyHtoD_v2(raw.device, source.as_ptr().cast(), bytes));
                check(sys::cuStreamSynchronize(std::ptr::null_mut()));
            },
            &mut || {
                stream.memcpy_htod(&source, &mut peer).expect("a copy");
                bench.sync();
            },
        ],
    );
    add(Row::of_seconds(bench, "h2d pageable", bytes, ours, Some(raw_up), Some(driver)));
    add(Row::of_seconds(bench, "h2d pageable, cudarc", bytes, ours, Some(raw_up), Some(cudarc)));
    if bytes >= 1 << 20 {
        // Between the driver's copies, which one thread does, the others fall asleep and their cores slow down.
        let [ours, raw_up] = up_and_raw(bench, device, raw, rounds, &source, &mut slice);
        add(Row::of_seconds(bench, "h2d pageable, back to back", bytes, ours, Some(raw_up), None));
    }
    let [ours, raw_down, driver, cudarc] = medians(
        bench,
        rounds,
        [
            &mut || device.download(stream, &slice, &mut target).expect("a download"),
            &mut || {
                raw.down(bench);
                bench.sync();
            },
            // SAFETY: both ends are as long.
            &mut || unsafe { check(sys::cuMemcpyDtoH_v2(other.as_mut_ptr().cast(), raw.device, bytes)) },
            &mut || {
                stream.memcpy_dtoh(&peer, &mut another).expect("a copy");
                bench.sync();
            },
        ],
    );
    assert!(target == source);
    add(Row::of_seconds(bench, "d2h pageable", bytes, ours, Some(raw_down), Some(driver)));
    add(Row::of_seconds(bench, "d2h pageable, cudarc", bytes, ours, Some(raw_down), Some(cudarc)));
    Ok(())
}

/// Device to a new `Vec`.
fn fresh(bench: &Bench, raw: &Raw, rounds: usize, add: &mut dyn FnMut(Row)) -> Outcome {
    let (bytes, stream, device) = (raw.bytes, &bench.stream, &bench.device);
    let slice = device.upload_new(stream, &vec![0x5au8; bytes])?;
    let [ours, raw_down, cudarc] = medians(
        bench,
        rounds,
        [
            &mut || drop(std::hint::black_box(device.download_vec(stream, &slice).expect("a download"))),
            &mut || {
                raw.down(bench);
                bench.sync();
            },
            &mut || {
                let values = stream.clone_dtoh(&slice).expect("a copy");
                bench.sync();
                drop(std::hint::black_box(values));
            },
        ],
    );
    add(Row::of_seconds(bench, "d2h fresh Vec", bytes, ours, Some(raw_down), Some(cudarc)));
    Ok(())
}

/// A tensor with a pinned host side.
fn pinned(bench: &Bench, raw: &Raw, rounds: usize, add: &mut dyn FnMut(Row)) -> Outcome {
    let stream = &bench.stream;
    let mut tensor: TransferTensor<u8> = bench.device.tensor().strategy(Strategy::Streamed).zeros(raw.bytes)?;
    tensor.host_mut()?.fill(0x5a);
    drop(tensor.device(stream)?);
    let (mut up, mut down) = ([vec![], vec![]], [vec![], vec![]]);
    for _ in 0..rounds {
        up[1].push(bench.time(|| {
            raw.up(bench);
            bench.sync();
        }));
        drop(tensor.host_mut()?); // the device's copy is stale from here on
        up[0].push(bench.time(|| {
            drop(tensor.device(stream).expect("an upload"));
            bench.sync();
        }));
        down[1].push(bench.time(|| {
            raw.down(bench);
            bench.sync();
        }));
        drop(tensor.device_mut(stream)?); // and the host's
        bench.sync();
        down[0].push(bench.time(|| drop(tensor.host().expect("a download"))));
    }
    for (case, [ours, raw_copy]) in [("h2d pinned", up), ("d2h pinned", down)] {
        let (ours, raw_copy) = (common::median(ours), common::median(raw_copy));
        add(Row::of_seconds(bench, case, raw.bytes, ours, Some(raw_copy), None));
    }
    Ok(())
}

/// Both ways at once: the total of two pinned copies.
fn both(bench: &Bench, bytes: usize, rounds: usize, add: &mut dyn FnMut(Row)) -> Outcome {
    let (a, b) = (Raw::new(bytes), Raw::new(bytes));
    let other = bench.stream.context().new_stream()?;
    let tensor = || bench.device.tensor().strategy(Strategy::Streamed).zeros::<u8>(bytes);
    let (mut up, mut down) = (tensor()?, tensor()?);
    up.host_mut()?.fill(1);
    down.host_mut()?.fill(2);
    let mut holds = Some((up.to_device()?.wait()?, down.to_device()?.wait()?));
    let (mut ours, mut raw) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        raw.push(bench.time(|| {
            a.up(bench);
            // SAFETY: both ends are as long and stay.
            unsafe { check(sys::cuMemcpyDtoHAsync_v2(b.host, b.device, bytes, other.cu_stream())) };
            bench.sync();
            // SAFETY: the bench's stream.
            unsafe { check(sys::cuStreamSynchronize(other.cu_stream())) };
        }));
        let Some((mut up, mut down)) = holds.take() else { break };
        drop(up.host_mut()?);
        drop(down.device_mut(&bench.stream)?);
        bench.sync();
        ours.push(bench.time(|| {
            let (going, coming) = (up.to_device().expect("a ticket"), down.to_host().expect("a ticket"));
            holds = Some((going.wait().expect("a copy"), coming.wait().expect("a copy")));
        }));
    }
    let (ours, raw) = (common::median(ours), common::median(raw));
    add(Row::of_seconds(bench, "both ways pinned", 2 * bytes, ours, Some(raw), None));
    Ok(())
}

/// Memory that both sides see: a copy on the device out of it, and into it.
fn in_place(
    bench: &Bench,
    name: &str,
    backing: Backing,
    raw: &Raw,
    rounds: usize,
    add: &mut dyn FnMut(Row),
) -> Outcome {
    let (bytes, stream) = (raw.bytes, &bench.stream);
    let options = bench.device.tensor().strategy(Strategy::ZeroCopy).backing(backing).access(Access::Streaming);
    let Ok(mut tensor) = options.zeros::<u8>(bytes) else { return Ok(()) };
    let copy = |out: bool, tensor: &mut TransferTensor<u8>| {
        let guard = tensor.device_mut(stream).expect("a guard");
        let (from, to) = if out { (guard.address(), raw.device) } else { (raw.device, guard.address()) };
        // SAFETY: both ends are as long and stay.
        unsafe { check(sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.cu_stream())) };
        drop(guard);
        bench.sync();
    };
    for (way, out) in [("h2d", true), ("d2h", false)] {
        let (mut ours, mut raws) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            tensor.host_mut()?[0] = 1;
            ours.push(bench.time(|| copy(out, &mut tensor)));
            raws.push(bench.time(|| {
                if out {
                    raw.up(bench)
                } else {
                    raw.down(bench)
                }
                bench.sync();
            }));
        }
        let (ours, raws) = (common::median(ours), common::median(raws));
        add(Row::of_seconds(bench, format!("{way} {name}, in place"), bytes, ours, Some(raws), None));
    }
    Ok(())
}

/// Why nothing of ours is write-combined: the CPU reading such memory (*ours* here is the crate's pinned memory).
fn write_combined(bench: &Bench, raw: &Raw, rounds: usize, add: &mut dyn FnMut(Row)) {
    if bench.sim.is_some() {
        return; // It would measure this CPU.
    }
    let combined = Raw::with_flags(raw.bytes, sys::CU_MEMHOSTALLOC_WRITECOMBINED);
    let mut into = vec![0u8; raw.bytes];
    // SAFETY: both ends are as long.
    let mut read =
        |from: *mut c_void| unsafe { std::ptr::copy_nonoverlapping(from.cast(), into.as_mut_ptr(), raw.bytes) };
    let (mut plain, mut slow) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        plain.push(bench.time(|| read(raw.host)));
        slow.push(bench.time(|| read(combined.host)));
    }
    let (plain, slow) = (common::median(plain), common::median(slow));
    add(Row::of_seconds(bench, "CPU reads pinned (raw: write-combined)", raw.bytes, plain, Some(slow), None));
}

/// Pieces × threads of staged copies.
fn sweep(bench: &Bench, args: &Args, rows: &mut Vec<Row>) -> Outcome {
    let sizes: &[usize] =
        if args.quick { &[16 << 20] } else { &[1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30] };
    let stream = &bench.stream;
    for &bytes in sizes {
        let rounds = rounds(bytes, args.quick).min(9);
        let raw = Raw::new(bytes);
        let (source, mut target) = (vec![0x5au8; bytes], vec![1u8; bytes]);
        let mut slice: CudaSlice<u8> = stream.alloc_zeros(bytes)?;
        for threads in [4, 8, 12] {
            for chunk in [2 << 20, 4 << 20, 8 << 20] {
                let mut tuning = bench.device.tuning();
                (tuning.threads, tuning.busy_threads, tuning.chunk) = (threads, threads, chunk);
                (tuning.crossover_up, tuning.crossover_down) = (0, 0);
                let device: Device = bench.tuned(tuning);
                let [up, raw_up] = up_and_raw(bench, &device, &raw, rounds, &source, &mut slice);
                let [down, raw_down] = medians(
                    bench,
                    rounds,
                    [&mut || device.download(stream, &slice, &mut target).expect("a download"), &mut || {
                        raw.down(bench);
                        bench.sync();
                    }],
                );
                for (way, ours, raw) in [("h2d", up, raw_up), ("d2h", down, raw_down)] {
                    let case = format!("{way} {threads} threads {}", human(chunk));
                    let row = Row::of_seconds(bench, case, bytes, ours, Some(raw), None);
                    print(&row);
                    rows.push(row);
                }
            }
        }
    }
    Ok(())
}

/// What the process computes while it copies, and after.
fn cpu(bench: &Bench, args: &Args, rows: &mut Vec<Row>) -> Outcome {
    if bench.sim.is_some() {
        println!("the simulated driver copies with this CPU: there is nothing to tell without a GPU");
        return Ok(());
    }
    let long = Duration::from_secs(if args.quick { 1 } else { 10 });
    let stream = &bench.stream;
    let mut add = |case: &str, bytes: usize, ours: f64, raw: Option<f64>| {
        let row = Row {
            case: case.into(),
            bytes,
            ours: 100.0 * ours,
            raw: raw.map(|raw| 100.0 * raw),
            peer: None,
            ratio: raw.map(|raw| raw / ours),
            unit: "% of a core",
            clock: bench.clock(),
        };
        print(&row);
        rows.push(row);
    };
    for bytes in [16 << 20, 256 << 20] {
        let tensor: TransferTensor<u8> = bench.device.tensor().strategy(Strategy::Streamed).zeros(bytes)?;
        let mut kept = Some(tensor);
        let mut up = || {
            kept.iter_mut().for_each(|tensor| drop(tensor.host_mut().expect("the host's bytes")));
            let ticket = kept.take().map(|tensor: TransferTensor<u8>| tensor.to_device().expect("a ticket"));
            kept = ticket.map(|ticket| ticket.wait().expect("a copy"));
        };
        add("CPU, pinned copies up, waited for", bytes, busy(long, &mut up), None);
    }
    let bytes = 1 << 30;
    let (source, mut target) = (vec![0x5au8; bytes], vec![1u8; bytes]);
    let mut slice: CudaSlice<u8> = stream.alloc_zeros(bytes)?;
    // The same bytes by the same number of threads, without a device.
    let copying = |target: &mut [u8]| {
        let threads = bench.device.tuning().threads;
        let part = bytes.div_ceil(threads);
        std::thread::scope(|scope| {
            for (from, to) in source.chunks(part).zip(target.chunks_mut(part)) {
                scope.spawn(move || {
                    from.chunks(4 << 20).zip(to.chunks_mut(4 << 20)).for_each(|(a, b)| b.copy_from_slice(a))
                });
            }
        });
    };
    let (start, before) = (Instant::now(), cpu_time());
    let mut count = 0u32;
    while start.elapsed() < long / 10 {
        copying(&mut target);
        count += 1;
    }
    let each = (cpu_time() - before).as_secs_f64() / f64::from(count);
    let mut copies = 0u32;
    let start = Instant::now();
    let mut up = || {
        bench.device.upload(stream, &source, &mut slice).expect("an upload");
        copies += 1;
    };
    let ours = busy(long, &mut up);
    let raw = each * f64::from(copies) / start.elapsed().as_secs_f64();
    add("CPU, pageable copies up", bytes, ours, Some(raw));
    let mut copies = 0u32;
    let start = Instant::now();
    let mut down = || {
        bench.device.download(stream, &slice, &mut target).expect("a download");
        copies += 1;
    };
    let ours = busy(long, &mut down);
    let raw = each * f64::from(copies) / start.elapsed().as_secs_f64();
    add("CPU, pageable copies down", bytes, ours, Some(raw));
    add("CPU, idle after them", 0, busy(long, &mut || std::thread::sleep(long / 10)), None);
    Ok(())
}

/// The CPU time of this process over the time that passed, while `run` is called again and again.
fn busy(long: Duration, run: &mut dyn FnMut()) -> f64 {
    let (start, before) = (Instant::now(), cpu_time());
    while start.elapsed() < long {
        run();
    }
    (cpu_time() - before).as_secs_f64() / start.elapsed().as_secs_f64()
}
