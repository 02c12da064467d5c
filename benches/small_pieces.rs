//! Many small pieces, and strided rows, against the loops and the block copies they replace.
//!
//!     cargo bench --bench small_pieces -- [--quick] [--json FILE]
//!
//! | case | ours | raw | peer |
//! |---|---|---|---|
//! | `scattered`, `contiguous` | a batch of 10,000 × 4 KiB, each in a `Vec` of its own | a loop of `cuMemcpyHtoD` or `DtoH`, the same memory | a loop of cudarc's `memcpy_htod` or `dtoh` |
//! | `slices` | as `scattered`, each target a `CudaSlice` of its own, which cudarc orders one by one | the same | the same |
//! | `one block` | a batch of 5,000 × 16 KiB, neighbours on the device | one `cuMemcpy…Async` of as many bytes, pinned | one cudarc copy, pageable |
//! | `transposed`, `column`, `row slice` | rows of f32 `[4096, 4096]`, `[1 << 20, 2]`, `[2, 1 << 20]` | one `cuMemcpy…` of as many bytes, pageable | one cudarc copy, pageable |
//! | `device column` | every second f32 of device memory | the same | the same |
//!
//! Rounds of all three are interleaved, medians are reported; `ratio` is raw ÷ ours. Without a GPU the simulated H200 runs and
//! only its virtual clock is reported; it does not see the CPU pack, so that is added at the speed of one thread there, not
//! overlapped.

mod common;

use std::ops::Deref;

use common::{Args, Failure, Row, check, median, print, write};
use transfer_tensor::Rows;
use transfer_tensor::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, sys};

const KIB: usize = 1 << 10;

struct Bench {
    common: common::Bench,
    rounds: usize,
}

impl Deref for Bench {
    type Target = common::Bench;

    fn deref(&self) -> &common::Bench {
        &self.common
    }
}

fn address(slice: &CudaSlice<u8>, stream: &CudaStream) -> u64 {
    slice.device_ptr(stream).0
}

impl Bench {
    fn open(quick: bool) -> Result<Self, Failure> {
        let common = common::Bench::open("x86_h200_sxm_gen5")?;
        let rounds = match (&common.sim, quick) {
            (Some(_), _) => 1,
            (None, true) => 7,
            (None, false) => 15,
        };
        Ok(Self { common, rounds })
    }

    /// Seconds until `run` and what it submitted are done: by the wall, or by the simulated machine's clock. `packed` bytes pass
    /// through the CPU.
    fn time(&self, packed: usize, run: &mut dyn FnMut()) -> f64 {
        let seconds = self.common.time(|| {
            run();
            self.sync();
        });
        let packing = self.sim.as_ref().map_or(0.0, |sim| packed as f64 / sim.profile().bandwidth.cpu_memcpy * 1e-9);
        seconds + packing
    }

    /// Interleaved rounds; the first of each warms up.
    fn row(
        &self,
        case: &str,
        bytes: usize,
        mut ours: impl FnMut(),
        mut raw: impl FnMut(),
        mut peer: impl FnMut(),
    ) -> Row {
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..=self.rounds {
            times[0].push(self.time(bytes, &mut ours));
            times[1].push(self.time(0, &mut raw));
            times[2].push(self.time(0, &mut peer));
        }
        let [ours, raw, peer] = times.map(|mut times: Vec<f64>| {
            times.remove(0);
            median(times) * 1e6
        });
        let (raw, peer, ratio) = (Some(raw), Some(peer), Some(raw / ours));
        let row = Row { case: case.into(), bytes, ours, raw, peer, ratio, unit: "us", clock: self.clock() };
        print(&row);
        row
    }
}

/// Pieces in memory of their own, `distance` apart on the device.
fn pieces(bench: &Bench, case: &str, count: usize, len: usize, distance: usize) -> Result<[Row; 2], Failure> {
    let stream = &bench.stream;
    let sources: Vec<Vec<u8>> = (0..count).map(|i| vec![i as u8; len]).collect();
    let [mut back, mut raw_back, mut peer_back] = [(); 3].map(|()| sources.clone());
    let mut ours = stream.alloc_zeros::<u8>(count * distance)?;
    let mut peer = stream.alloc_zeros::<u8>(count * distance)?;
    let raw = stream.alloc_zeros::<u8>(count * distance)?;
    let raw = address(&raw, stream);
    let up = bench.row(
        &format!("{case} up"),
        count * len,
        || {
            let mut batch = bench.device.batch(stream);
            let parts = sources.iter().enumerate().map(|(i, source)| (i * distance, &source[..]));
            batch.upload_parts(&mut ours, parts).expect("pieces");
            batch.run().expect("an upload");
        },
        || {
            for (i, source) in sources.iter().enumerate() {
                // SAFETY: inside the allocation; both ends are that long.
                unsafe { check(sys::cuMemcpyHtoD_v2(raw + (i * distance) as u64, source.as_ptr().cast(), len)) };
            }
        },
        || {
            for (i, source) in sources.iter().enumerate() {
                stream.memcpy_htod(source, &mut peer.slice_mut(i * distance..i * distance + len)).expect("an upload");
            }
        },
    );
    let down = bench.row(
        &format!("{case} down"),
        count * len,
        || {
            let mut batch = bench.device.batch(stream);
            let parts = back.iter_mut().enumerate().map(|(i, target)| (i * distance, &mut target[..]));
            batch.download_parts(&ours, parts).expect("pieces");
            batch.run().expect("a download");
        },
        || {
            for (i, target) in raw_back.iter_mut().enumerate() {
                // SAFETY: inside the allocation; both ends are that long.
                unsafe { check(sys::cuMemcpyDtoH_v2(target.as_mut_ptr().cast(), raw + (i * distance) as u64, len)) };
            }
        },
        || {
            for (i, target) in peer_back.iter_mut().enumerate() {
                stream.memcpy_dtoh(&peer.slice(i * distance..i * distance + len), target).expect("a download");
            }
        },
    );
    assert!(back == sources && raw_back == sources && peer_back == sources, "wrong bytes");
    Ok([up, down])
}

/// As `pieces`, up, each to an allocation of its own.
fn slices(bench: &Bench, count: usize, len: usize) -> Result<Row, Failure> {
    let stream = &bench.stream;
    let sources: Vec<Vec<u8>> = (0..count).map(|i| vec![i as u8; len]).collect();
    let targets = || (0..count).map(|_| stream.alloc_zeros::<u8>(len)).collect::<Result<Vec<_>, _>>();
    let (mut ours, mut peer) = (targets()?, targets()?);
    let raw: Vec<u64> = peer.iter().map(|slice| address(slice, stream)).collect();
    Ok(bench.row(
        "slices up",
        count * len,
        || {
            let mut batch = bench.device.batch(stream);
            for (source, target) in sources.iter().zip(&mut ours) {
                batch.upload(source, target).expect("a piece");
            }
            batch.run().expect("an upload");
        },
        || {
            for (source, &target) in sources.iter().zip(&raw) {
                // SAFETY: both ends are that long.
                unsafe { check(sys::cuMemcpyHtoD_v2(target, source.as_ptr().cast(), len)) };
            }
        },
        || {
            for (source, target) in sources.iter().zip(&mut peer) {
                stream.memcpy_htod(source, target).expect("an upload");
            }
        },
    ))
}

/// Neighbours on the device against one copy of all of them.
fn one_block(bench: &Bench, count: usize, len: usize) -> Result<[Row; 2], Failure> {
    let stream = &bench.stream;
    let bytes = count * len;
    let sources: Vec<Vec<u8>> = (0..count).map(|i| vec![i as u8; len]).collect();
    let (mut back, mut whole) = (sources.clone(), vec![1u8; bytes]);
    let (mut ours, mut other) = (stream.alloc_zeros::<u8>(bytes)?, stream.alloc_zeros::<u8>(bytes)?);
    let raw = address(&other, stream);
    let mut pinned = std::ptr::null_mut();
    // SAFETY: the bench's context is current.
    unsafe { check(sys::cuMemHostAlloc(&mut pinned, bytes, sys::CU_MEMHOSTALLOC_PORTABLE)) };
    // SAFETY: allocated just now, that long.
    unsafe { pinned.cast::<u8>().write_bytes(1, bytes) };
    let up = bench.row(
        "one block up",
        bytes,
        || {
            let mut batch = bench.device.batch(stream);
            batch.upload_parts(&mut ours, sources.iter().enumerate().map(|(i, s)| (i * len, &s[..]))).expect("pieces");
            batch.run().expect("an upload");
        },
        // SAFETY: both ends are that long, and stay.
        || unsafe { check(sys::cuMemcpyHtoDAsync_v2(raw, pinned, bytes, stream.cu_stream())) },
        || stream.memcpy_htod(&whole, &mut other).expect("an upload"),
    );
    let down = bench.row(
        "one block down",
        bytes,
        || {
            let mut batch = bench.device.batch(stream);
            let parts = back.iter_mut().enumerate().map(|(i, target)| (i * len, &mut target[..]));
            batch.download_parts(&ours, parts).expect("pieces");
            batch.run().expect("a download");
        },
        // SAFETY: both ends are that long, and stay.
        || unsafe { check(sys::cuMemcpyDtoHAsync_v2(pinned, raw, bytes, stream.cu_stream())) },
        || stream.memcpy_dtoh(&other, &mut whole).expect("a download"),
    );
    assert!(back == sources, "wrong bytes");
    // SAFETY: from `cuMemHostAlloc`; the bench has synchronised.
    unsafe { check(sys::cuMemFreeHost(pinned)) };
    Ok([up, down])
}

/// Rows of f32 against a copy of as many bytes in one block.
fn rows(bench: &Bench, case: &str, elements: usize, source: &[f32], how: &Rows) -> Result<Vec<Row>, Failure> {
    let stream = &bench.stream;
    let bytes = elements * 4;
    let mut block = vec![1f32; elements];
    let (mut ours, mut other) = (stream.alloc_zeros::<f32>(elements)?, stream.alloc_zeros::<f32>(elements)?);
    let raw = other.device_ptr_mut(stream).0;
    let mut back = source.to_vec();
    let up = bench.row(
        &format!("{case} up"),
        bytes,
        || bench.device.upload_rows(stream, source, how, &mut ours).expect("rows"),
        // SAFETY: both ends are that long.
        || unsafe { check(sys::cuMemcpyHtoD_v2(raw, block.as_ptr().cast(), bytes)) },
        || stream.memcpy_htod(&block, &mut other).expect("an upload"),
    );
    let mut second = block.clone();
    let down = bench.row(
        &format!("{case} down"),
        bytes,
        || bench.device.download_rows(stream, &ours, how, &mut back).expect("rows"),
        // SAFETY: both ends are that long.
        || unsafe { check(sys::cuMemcpyDtoH_v2(block.as_mut_ptr().cast(), raw, bytes)) },
        || stream.memcpy_dtoh(&other, &mut second).expect("a download"),
    );
    assert!(back == source, "wrong values");
    Ok(vec![up, down])
}

/// Every second element of device memory.
fn device_column(bench: &Bench, elements: usize) -> Result<Row, Failure> {
    let stream = &bench.stream;
    let device = stream.clone_htod(&vec![1f32; 2 * elements])?;
    let raw = device.device_ptr(stream).0;
    let [mut ours, mut block, mut peer] = [(); 3].map(|()| vec![0f32; elements]);
    let how = Rows::new(elements, 1).device_pitch(2);
    Ok(bench.row(
        "device column down",
        elements * 4,
        || bench.device.download_rows(stream, &device, &how, &mut ours).expect("rows"),
        // SAFETY: both ends are that long.
        || unsafe { check(sys::cuMemcpyDtoH_v2(block.as_mut_ptr().cast(), raw, elements * 4)) },
        || stream.memcpy_dtoh(&device.slice(..elements), &mut peer).expect("a download"),
    ))
}

fn main() -> Result<(), Failure> {
    let args = Args::read(&[], &[])?;
    let quick = args.quick;
    let bench = Bench::open(quick)?;
    bench.announce();
    let less = if quick { 10 } else { 1 };
    let mut all = Vec::new();
    all.extend(pieces(&bench, "scattered", 10_000 / less, 4 * KIB, 8 * KIB)?);
    all.extend(pieces(&bench, "contiguous", 10_000 / less, 4 * KIB, 4 * KIB)?);
    all.push(slices(&bench, 10_000 / less, 4 * KIB)?);
    all.extend(one_block(&bench, 5000 / less, 16 * KIB)?);
    let side = if quick { 1024 } else { 4096 };
    let long = if quick { 1 << 17 } else { 1 << 20 };
    let values: Vec<f32> = (0..(side * side).max(2 * long)).map(|i| i as f32).collect();
    let transposed = Rows::new(side, side).host_pitch(1).host_step(side);
    all.extend(rows(&bench, "transposed", side * side, &values[..side * side], &transposed)?);
    all.extend(rows(&bench, "column", long, &values[..2 * long], &Rows::new(long, 1).host_pitch(2))?);
    all.extend(rows(&bench, "row slice", long, &values[long..2 * long], &Rows::new(1, long))?);
    all.push(device_column(&bench, long)?);
    write(&args, &all)
}
