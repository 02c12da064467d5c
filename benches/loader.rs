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

use std::fs;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use transfer_tensor::cudarc::driver::{CudaContext, CudaSlice, CudaStream, sys};
use transfer_tensor::{Checkpoint, Device, Reading};

type Failed = Box<dyn std::error::Error>;

#[derive(serde::Serialize)]
struct Row {
    case: String,
    bytes: u64,
    ours: f64,
    raw: f64,
    peer: Option<f64>,
    ratio: f64,
    unit: &'static str,
    clock: &'static str,
}

struct Bench {
    stream: Arc<CudaStream>,
    device: Device,
    sim: Option<cuda_sim::Device>,
}

impl Bench {
    fn open() -> Result<Self, Failed> {
        let real =
            std::env::var("TRANSFER_TENSOR_DRIVER").is_ok_and(|driver| driver == "real") || Device::open(0).is_ok();
        let sim = if real {
            None
        } else {
            cuda_sim::install()?;
            Some(cuda_sim::device("x86_h200_sxm_gen5")?)
        };
        let stream = CudaContext::new(sim.as_ref().map_or(0, |sim| sim.ordinal()))?.new_stream()?;
        let device = Device::new(&stream)?;
        Ok(Self { stream, device, sim })
    }

    /// Seconds that `run` took: by the wall, or by the simulated machine's clock.
    fn time<R>(&self, run: impl FnOnce() -> Result<R, Failed>) -> Result<f64, Failed> {
        let Some(sim) = &self.sim else {
            let start = Instant::now();
            let kept = run()?;
            let seconds = start.elapsed().as_secs_f64();
            // Freeing is not what is measured.
            drop(kept);
            self.stream.synchronize()?;
            return Ok(seconds);
        };
        let start = sim.clock(0).now_ns;
        let kept = run()?;
        let seconds = (sim.clock(0).now_ns - start) as f64 * 1e-9;
        drop(kept);
        Ok(seconds)
    }
}

/// Page-locked and device memory of one piece, copied as often as the bytes take.
struct Raw {
    host: *mut std::ffi::c_void,
    device: sys::CUdeviceptr,
    piece: usize,
}

impl Raw {
    const PIECE: u64 = 256 << 20;

    fn new(bytes: u64) -> Result<Self, Failed> {
        let piece = bytes.min(Self::PIECE) as usize;
        let (mut host, mut device) = (std::ptr::null_mut(), 0);
        // SAFETY: the bench's context is current; the memory is `piece` long.
        unsafe {
            let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
            sys::cuMemHostAlloc(&mut host, piece, flags).result()?;
            sys::cuMemAlloc_v2(&mut device, piece).result()?;
            host.cast::<u8>().write_bytes(0x5a, piece);
        }
        Ok(Self { host, device, piece })
    }

    fn copy(&self, bytes: u64, stream: &CudaStream) -> Result<(), Failed> {
        let mut left = bytes as usize;
        while left > 0 {
            let piece = left.min(self.piece);
            // SAFETY: both ends are as long and stay.
            unsafe { sys::cuMemcpyHtoDAsync_v2(self.device, self.host, piece, stream.cu_stream()).result()? };
            left -= piece;
        }
        Ok(stream.synchronize()?)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`; the bench has synchronised.
        unsafe {
            let _ = sys::cuMemFree_v2(self.device);
            let _ = sys::cuMemFreeHost(self.host);
        }
    }
}

/// Maps every file and copies tensor by tensor.
fn peer(files: &[PathBuf], stream: &Arc<CudaStream>) -> Result<Vec<CudaSlice<u8>>, Failed> {
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

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn run(bench: &Bench, case: &str, path: &Path, rounds: usize) -> Result<Vec<Row>, Failed> {
    let checkpoint = Checkpoint::open(path)?;
    let (bytes, files) = (checkpoint.bytes(), checkpoint.files().map(Path::to_owned).collect::<Vec<_>>());
    drop(checkpoint);
    let raw = Raw::new(bytes)?;
    let load = |reading| {
        bench.time(|| {
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
            bench.time(|| raw.copy(bytes, &bench.stream))?,
            bench.time(|| peer(&files, &bench.stream))?,
        ];
        // The first sets up slots, threads and pools, and reads the files.
        if round > 0 {
            all.into_iter().zip(&mut times).for_each(|(seconds, times)| times.push(seconds));
        }
    }
    let [read, map, raw, peer] = times.map(median);
    let gbs = |seconds: f64| bytes as f64 / seconds * 1e-9;
    let clock = if bench.sim.is_some() { "simulated" } else { "wall" };
    let row = |how: &str, ours: f64| Row {
        case: format!("{case} {how}"),
        bytes,
        ours: gbs(ours),
        raw: gbs(raw),
        peer: Some(gbs(peer)),
        ratio: raw / ours,
        unit: "GB/s",
        clock,
    };
    Ok(vec![row("read", read), row("map", map)])
}

/// A file of tensors of these sizes in bytes, as BF16.
fn write(path: &Path, first: usize, sizes: &[u64]) -> Result<Vec<String>, Failed> {
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
fn sharded(folder: &Path, bytes: u64) -> Result<PathBuf, Failed> {
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
fn parse_bytes(text: &str) -> Result<u64, Failed> {
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

fn main() -> Result<(), Failed> {
    let (mut quick, mut json, mut bytes, mut dir, mut model, mut keep) = (false, None, None, None, None, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--quick" => quick = true,
            "--keep" => keep = true,
            "--json" => json = Some(value()?),
            "--bytes" => bytes = Some(parse_bytes(&value()?)?),
            "--dir" => dir = Some(PathBuf::from(value()?)),
            "--model" => model = Some(PathBuf::from(value()?)),
            // Cargo's own.
            "--bench" | "--test" => quick |= argument == "--test",
            other => {
                let known = "--quick, --json FILE, --bytes N, --dir DIR, --model FILE|DIR, --keep";
                return Err(format!("unknown argument {other:?}; known: {known}").into());
            }
        }
    }
    let bench = Bench::open()?;
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
    println!(
        "{}: {}; files in {}",
        bench.device.platform().name(),
        if bench.sim.is_some() { "simulated clock" } else { "wall clock" },
        folder.path().display(),
    );
    println!("{:>14} {:>12} {:>8} {:>8} {:>8} {:>7}", "", "bytes", "ours", "raw", "peer", "ratio");
    let mut rows = Vec::new();
    for (case, path) in &cases {
        let rounds = if bench.sim.is_some() || quick { 3 } else { 7 };
        for row in run(&bench, case, path, rounds)? {
            let Row { case, bytes, ours, raw, peer, ratio, unit, .. } = &row;
            let peer = peer.unwrap_or(f64::NAN);
            println!("{case:>14} {bytes:>12} {ours:>8.2} {raw:>8.2} {peer:>8.2} {ratio:>7.3} {unit}");
            rows.push(row);
        }
    }
    if let Some(file) = json {
        fs::write(file, serde_json::to_string_pretty(&rows)?)?;
    }
    if keep {
        println!("kept: {}", folder.keep().display());
    }
    Ok(())
}
