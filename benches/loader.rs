//! A model in files to the device, against the raw driver call and against a map copied tensor by tensor, in the same run.
//!
//!     cargo bench --bench loader -- [--quick] [--json FILE] [--bytes N] [--dir DIR] [--model FILE|DIR] [--keep]
//!
//! *ours* is `Checkpoint::open`, `load` and the wait for the stream, device memory included. *raw* is `cuMemcpyHtoDAsync` of as
//! many bytes, from page-locked memory that exists to device memory that exists: the link's bound. *peer* is what candle does: a
//! memory map and cudarc's `clone_htod` for each tensor. The files were just written or read, so they are in the page cache. Cases:
//! `small` (as many small tensors as a sentence model has), `large` (one file), `sharded` (four files and an index;
//! `--bytes`, 8 GiB say), and `model`, the caller's own. Rounds of the three are interleaved, medians are reported. Without a GPU the simulated H200
//! runs and only its virtual clock is reported: it knows nothing of the time that reading a file takes.
//!
//! `--dir` names the folder for the files (the system's temporary one; /dev/shm keeps them in memory); `--keep` leaves them there, for
//! `benches/peers/safetensors_torch.py`.

mod common;

use std::fs;
use std::io::{BufWriter, Write as _};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{Args, Bench, Failure, Raw, Row, median, print};
use transfer_tensor::cudarc::driver::{CudaSlice, CudaStream, sys};
use transfer_tensor::{Checkpoint, Reading};

/// Seconds that `run` took; what it made is freed after that.
fn time<R>(bench: &Bench, run: impl FnOnce() -> Result<R, Failure>) -> Result<f64, Failure> {
    let mut kept = None;
    let seconds = bench.time(|| kept = Some(run()));
    kept.transpose()?;
    bench.stream.synchronize()?;
    Ok(seconds)
}

/// Page-locked memory of one piece is copied as often as the bytes take.
const PIECE: usize = 256 << 20;

fn copy(raw: &Raw, bytes: usize, stream: &CudaStream) -> Result<(), Failure> {
    for start in (0..bytes).step_by(raw.bytes) {
        let piece = raw.bytes.min(bytes - start);
        // SAFETY: both ends are as long and stay.
        unsafe { sys::cuMemcpyHtoDAsync_v2(raw.device, raw.host, piece, stream.cu_stream()).result()? };
    }
    Ok(stream.synchronize()?)
}

/// Maps every file and copies tensor by tensor.
fn peer(files: &[PathBuf], stream: &Arc<CudaStream>) -> Result<Vec<CudaSlice<u8>>, Failure> {
    let mut slices = Vec::new();
    for file in files {
        // SAFETY: the bench's own files, which nobody changes.
        let map = unsafe { memmap2::Mmap::map(&fs::File::open(file)?)? };
        let model = safetensors::SafeTensors::deserialize(&map)?;
        for (_, tensor) in model.iter().filter(|(_, tensor)| !tensor.data().is_empty()) {
            slices.push(stream.clone_htod(tensor.data())?);
        }
        // cudarc's copy reads the map until it has run.
        stream.synchronize()?;
    }
    Ok(slices)
}

fn run(bench: &Bench, case: &str, path: &Path, rounds: usize) -> Result<Vec<Row>, Failure> {
    let checkpoint = Checkpoint::open(path)?;
    let (bytes, files) = (checkpoint.bytes() as usize, checkpoint.files().map(Path::to_owned).collect::<Vec<_>>());
    drop(checkpoint);
    let raw = Raw::new(bytes.min(PIECE));
    // The first load of all makes what copies are staged through.
    for (how, reading) in [("read", Reading::Read), ("map", Reading::Map)] {
        if let Some((grown, locked)) = grown(bench, path, reading)? {
            println!("{case} {how}: the process grew by {grown:.1} MiB; {locked:.1} MiB are page-locked");
        }
    }
    let load = |reading| {
        time(bench, || {
            let tensors = Checkpoint::open(path)?.load(&bench.device, &bench.stream).reading(reading).run()?;
            bench.stream.synchronize()?;
            Ok(tensors)
        })
    };
    let mut times = [vec![], vec![], vec![], vec![]];
    for round in 0..=rounds {
        let all = [
            load(Reading::Read)?,
            load(Reading::Map)?,
            time(bench, || copy(&raw, bytes, &bench.stream))?,
            time(bench, || peer(&files, &bench.stream))?,
        ];
        // The first sets up slots, threads and pools, and reads the files.
        if round > 0 {
            all.into_iter().zip(&mut times).for_each(|(seconds, times)| times.push(seconds));
        }
    }
    let [read, map, raw, peer] = times.map(median);
    let gbs = |seconds: f64| bytes as f64 / seconds * 1e-9;
    let row = |how: &str, ours: f64| Row {
        case: format!("{case} {how}"),
        bytes,
        ours: gbs(ours),
        raw: Some(gbs(raw)),
        peer: Some(gbs(peer)),
        ratio: Some(raw / ours),
        unit: "GB/s",
        clock: bench.clock(),
    };
    Ok(vec![row("read", read), row("map", map)])
}

/// By how many MiB the process grows at most while it loads the file, and how many it holds page-locked then (Linux).
fn grown(bench: &Bench, path: &Path, reading: Reading) -> Result<Option<(f64, f64)>, Failure> {
    let resident = || {
        let status = fs::read_to_string("/proc/self/status").ok()?;
        let of = |name| {
            status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<f64>().ok())
        };
        Some(of("VmRSS:")? / 1024.0)
    };
    let Some(before) = resident() else { return Ok(None) };
    let mut most = before;
    let note = |_: transfer_tensor::Progress<'_>| {
        most = resident().map_or(most, |now| most.max(now));
        ControlFlow::Continue(())
    };
    let load = Checkpoint::open(path)?.load(&bench.device, &bench.stream).reading(reading).progress(note).run()?;
    bench.stream.synchronize()?;
    drop(load);
    Ok(Some((most - before, bench.device.pool().stats().reserved as f64 / (1 << 20) as f64)))
}

/// A file of tensors of these sizes in bytes, as BF16.
fn write(path: &Path, first: usize, sizes: &[u64]) -> Result<Vec<String>, Failure> {
    let (mut header, mut offset, mut names) = (serde_json::Map::new(), 0, Vec::new());
    for (number, size) in sizes.iter().enumerate() {
        let name = format!("layers.{}.weight", first + number);
        let entry =
            serde_json::json!({ "dtype": "BF16", "shape": [size / 2], "data_offsets": [offset, offset + size] });
        header.insert(name.clone(), entry);
        names.push(name);
        offset += size;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::new(fs::File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let block: Vec<u8> = (0..1u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    while offset > 0 {
        let piece = offset.min(block.len() as u64);
        file.write_all(&block[..piece as usize])?;
        offset -= piece;
    }
    file.flush()?;
    Ok(names)
}

/// Sizes as in a language model's layer: a few large ones, small ones between; about `bytes` in all.
fn layers(bytes: u64) -> Vec<u64> {
    let quarter = (bytes / 256).clamp(1 << 18, 8 << 20) & !1;
    let unit = quarter * 4;
    let (mut sizes, mut left) = (Vec::new(), bytes & !1);
    while left > 0 {
        for size in [unit, 8 << 10, quarter, quarter, unit, 8 << 10, unit * 3] {
            let size = size.min(left);
            if size > 0 {
                sizes.push(size);
            }
            left -= size;
        }
    }
    sizes
}

/// Four files and their index.
fn sharded(folder: &Path, bytes: u64) -> Result<PathBuf, Failure> {
    fs::create_dir_all(folder)?;
    let mut map = serde_json::Map::new();
    let mut first = 0;
    for shard in 0..4 {
        let file = format!("model-{shard}.safetensors");
        let names = write(&folder.join(&file), first, &layers(bytes / 4))?;
        first += names.len();
        map.extend(names.into_iter().map(|name| (name, file.clone().into())));
    }
    let path = folder.join("model.safetensors.index.json");
    fs::write(&path, serde_json::json!({ "metadata": { "total_size": bytes }, "weight_map": map }).to_string())?;
    Ok(path)
}

/// A number of bytes, or of KiB, MiB, GiB.
fn parse_bytes(text: &str) -> Result<u64, Failure> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let factor: u64 = match text[digits.len()..].trim() {
        "" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        other => return Err(format!("unknown unit {other:?}; known: KiB, MiB, GiB").into()),
    };
    digits.parse::<u64>()?.checked_mul(factor).ok_or_else(|| format!("{text}: too large").into())
}

fn main() -> Result<(), Failure> {
    let args = Args::read(&["--keep"], &["--bytes", "--dir", "--model"])?;
    let (quick, bytes) = (args.quick, args.value("--bytes").map(parse_bytes).transpose()?);
    let (dir, model) = (args.value("--dir").map(PathBuf::from), args.value("--model").map(PathBuf::from));
    let bench = Bench::open("x86_h200_sxm_gen5")?;
    let dir = dir.unwrap_or_else(std::env::temp_dir);
    let folder = tempfile::Builder::new().prefix("transfer-tensor-loader-").tempdir_in(&dir)?;

    let mut cases = Vec::new();
    match model {
        Some(model) => cases.push(("model", model)),
        None => {
            let small = folder.path().join("small.safetensors");
            // As many tensors, and about as many bytes, as the 16-bit MiniLM.
            let sizes: Vec<u64> = (0..104).map(|i| if i == 0 { 23_440_896 } else { [768, 294_912][i % 2] }).collect();
            write(&small, 0, &sizes)?;
            cases.push(("small", small));
            let large = folder.path().join("large.safetensors");
            write(&large, 0, &layers(if quick { 32 << 20 } else { 256 << 20 }))?;
            cases.push(("large", large));
            if let Some(bytes) = bytes.or((!quick).then_some(1 << 30)) {
                cases.push(("sharded", sharded(&folder.path().join("sharded"), bytes)?));
            }
        }
    }
    bench.announce();
    println!("files in {}", folder.path().display());
    let mut rows = Vec::new();
    for (case, path) in &cases {
        let rounds = if bench.sim.is_some() || quick { 3 } else { 7 };
        for row in run(&bench, case, path, rounds)? {
            print(&row);
            rows.push(row);
        }
    }
    common::write(&args, &rows)?;
    if args.has("--keep") {
        println!("kept: {}", folder.keep().display());
    }
    Ok(())
}
