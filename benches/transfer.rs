//! One tensor, one transfer, against the raw driver call in the same run.
//!
//!     cargo bench --bench transfer -- [--quick] [--json FILE]
//!
//! Pinned-backed tensors of 4 KiB to 1 GiB, both ways. *raw* is `cuMemcpy…Async` from or to pinned memory and
//! `cuStreamSynchronize`; *ours* is the guard that makes the copy happen, its drop, and the wait. Rounds of both are
//! interleaved, medians are reported. Without a GPU the simulated H200 runs and only its virtual clock is reported: wall
//! time would measure this CPU's memcpy.

use std::sync::Arc;
use std::time::Instant;

use transfer_tensor::cudarc::driver::{CudaContext, CudaStream, sys};
use transfer_tensor::{Device, Strategy, TransferTensor};

const SIZES: [usize; 7] = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 256 << 20, 1 << 30];

#[derive(serde::Serialize)]
struct Row {
    case: &'static str,
    bytes: usize,
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
    fn open() -> Result<Self, Box<dyn std::error::Error>> {
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
    fn time(&self, run: impl FnOnce()) -> f64 {
        let Some(sim) = &self.sim else {
            let start = Instant::now();
            run();
            return start.elapsed().as_secs_f64();
        };
        let start = sim.clock(0).now_ns;
        run();
        (sim.clock(0).now_ns - start) as f64 * 1e-9
    }
}

fn check(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// Raw pinned and device memory of `bytes` bytes.
struct Raw {
    host: *mut std::ffi::c_void,
    device: sys::CUdeviceptr,
}

impl Raw {
    fn new(bytes: usize) -> Self {
        let (mut host, mut device) = (std::ptr::null_mut(), 0);
        // SAFETY: the bench's context is current.
        unsafe {
            check(sys::cuMemHostAlloc(
                &mut host,
                bytes,
                sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP,
            ));
            check(sys::cuMemAlloc_v2(&mut device, bytes));
            host.cast::<u8>().write_bytes(0x5a, bytes);
        }
        Self { host, device }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`; the bench has synchronised.
        unsafe {
            check(sys::cuMemFree_v2(self.device));
            check(sys::cuMemFreeHost(self.host));
        }
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn run(bench: &Bench, bytes: usize, rounds: usize) -> Result<[Row; 2], Box<dyn std::error::Error>> {
    let raw = Raw::new(bytes);
    let stream = &bench.stream;
    let handle = stream.cu_stream();
    let mut tensor: TransferTensor<u8> = bench.device.tensor().strategy(Strategy::Streamed).zeros(bytes)?;
    tensor.host_mut()?.fill(0x5a);
    drop(tensor.device(stream)?);
    let (mut up, mut down) = ([vec![], vec![]], [vec![], vec![]]);
    for _ in 0..rounds {
        up[0].push(bench.time(|| {
            // SAFETY: both ends are `bytes` long and stay.
            unsafe { check(sys::cuMemcpyHtoDAsync_v2(raw.device, raw.host, bytes, handle)) };
            // SAFETY: the bench's stream.
            unsafe { check(sys::cuStreamSynchronize(handle)) };
        }));
        drop(tensor.host_mut()?); // the device's copy is stale from here on
        up[1].push(bench.time(|| {
            drop(tensor.device(stream).expect("an upload"));
            // SAFETY: the bench's stream.
            unsafe { check(sys::cuStreamSynchronize(handle)) };
        }));
        down[0].push(bench.time(|| {
            // SAFETY: as above.
            unsafe { check(sys::cuMemcpyDtoHAsync_v2(raw.host, raw.device, bytes, handle)) };
            // SAFETY: as above.
            unsafe { check(sys::cuStreamSynchronize(handle)) };
        }));
        drop(tensor.device_mut(stream)?); // and the host's
        // SAFETY: as above.
        unsafe { check(sys::cuStreamSynchronize(handle)) };
        down[1].push(bench.time(|| drop(tensor.host().expect("a download"))));
    }
    let clock = if bench.sim.is_some() { "simulated" } else { "wall" };
    let row = |case, [raw, ours]: [Vec<f64>; 2]| {
        let (raw, ours) = (median(raw), median(ours));
        // Bandwidth where it is what matters, time where latency is.
        if bytes < 1 << 20 {
            Row { case, bytes, ours: ours * 1e6, raw: raw * 1e6, peer: None, ratio: raw / ours, unit: "us", clock }
        } else {
            let gbs = |seconds: f64| bytes as f64 / seconds * 1e-9;
            Row { case, bytes, ours: gbs(ours), raw: gbs(raw), peer: None, ratio: raw / ours, unit: "GB/s", clock }
        }
    };
    Ok([row("h2d", up), row("d2h", down)])
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut quick, mut json) = (false, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => quick = true,
            "--json" => json = Some(arguments.next().ok_or("--json needs a file")?),
            // Cargo's own.
            "--bench" | "--test" => quick |= argument == "--test",
            other => return Err(format!("unknown argument {other:?}; known: --quick, --json FILE").into()),
        }
    }
    let bench = Bench::open()?;
    println!(
        "{}: {}",
        bench.device.platform().name(),
        if bench.sim.is_some() { "simulated clock" } else { "wall clock" }
    );
    println!("{:>4} {:>12} {:>10} {:>10} {:>7}", "", "bytes", "ours", "raw", "ratio");
    let mut rows = Vec::new();
    for &bytes in SIZES.iter().filter(|&&bytes| !quick || bytes <= 16 << 20) {
        let rounds = if bench.sim.is_some() {
            3
        } else if bytes <= 1 << 20 {
            501
        } else if bytes <= 16 << 20 {
            51
        } else {
            9
        };
        for row in run(&bench, bytes, rounds)? {
            println!(
                "{:>4} {:>12} {:>10.2} {:>10.2} {:>7.3} {}",
                row.case, row.bytes, row.ours, row.raw, row.ratio, row.unit
            );
            rows.push(row);
        }
    }
    if let Some(file) = json {
        std::fs::write(file, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}
