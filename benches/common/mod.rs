//! What the benches share: the device, the clock, raw memory, rows and their output.
#![allow(dead_code)] // Each bench uses its part.

pub(crate) mod overlap;

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use transfer_tensor::cudarc::driver::{CudaContext, CudaStream, sys};
use transfer_tensor::{Device, Tuning};

pub(crate) type Failure = Box<dyn std::error::Error>;

/// One measurement: ours against the raw driver call and a peer, in the same run.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Row {
    pub(crate) case: String,
    pub(crate) bytes: usize,
    pub(crate) ours: f64,
    pub(crate) raw: Option<f64>,
    pub(crate) peer: Option<f64>,
    /// How good ours is against raw: above 1 is better.
    pub(crate) ratio: Option<f64>,
    pub(crate) unit: &'static str,
    pub(crate) clock: &'static str,
}

impl Row {
    /// Seconds for `bytes` bytes as GB/s, or as µs below 1 MiB, where latency counts.
    pub(crate) fn of_seconds(
        bench: &Bench,
        case: impl Into<String>,
        bytes: usize,
        ours: f64,
        raw: Option<f64>,
        peer: Option<f64>,
    ) -> Row {
        let large = bytes >= 1 << 20;
        let show = |seconds: f64| if large { bytes as f64 / seconds * 1e-9 } else { seconds * 1e6 };
        Row {
            case: case.into(),
            bytes,
            ours: show(ours),
            raw: raw.map(show),
            peer: peer.map(show),
            ratio: raw.map(|raw| raw / ours),
            unit: if large { "GB/s" } else { "us" },
            clock: bench.clock(),
        }
    }

    /// As [`of_seconds`](Self::of_seconds), by the wall in any case.
    pub(crate) fn of_wall(bench: &Bench, case: &str, bytes: usize, ours: f64, raw: Option<f64>) -> Row {
        Row { clock: "wall", ..Self::of_seconds(bench, case, bytes, ours, raw, None) }
    }
}

/// What the command line says: `--quick`, `--json FILE`, and what the bench knows beside.
pub(crate) struct Args {
    pub(crate) quick: bool,
    pub(crate) json: Option<String>,
    more: Vec<(String, Option<String>)>,
}

impl Args {
    /// `flags` stand alone, `values` are followed by one.
    pub(crate) fn read(flags: &[&str], values: &[&str]) -> Result<Args, Failure> {
        let mut args = Args { quick: false, json: None, more: Vec::new() };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value"));
            match word.as_str() {
                "--quick" => args.quick = true,
                "--json" => args.json = Some(value()?),
                // Cargo's own.
                "--bench" => {}
                "--test" => args.quick = true,
                known if flags.contains(&known) => args.more.push((word, None)),
                known if values.contains(&known) => {
                    let value = value()?;
                    args.more.push((word, Some(value)));
                }
                _ => {
                    let known = ["--quick", "--json FILE"].iter().chain(flags).map(|flag| (*flag).to_owned());
                    let known: Vec<_> = known.chain(values.iter().map(|value| format!("{value} VALUE"))).collect();
                    return Err(format!("unknown argument {word:?}; known: {}", known.join(", ")).into());
                }
            }
        }
        Ok(args)
    }

    pub(crate) fn has(&self, word: &str) -> bool {
        self.more.iter().any(|(more, _)| more == word)
    }

    pub(crate) fn value(&self, word: &str) -> Option<&str> {
        self.more.iter().find(|(more, _)| more == word).and_then(|(_, value)| value.as_deref())
    }
}

/// Whether there is a real device to measure.
pub(crate) fn is_real() -> bool {
    std::env::var("TRANSFER_TENSOR_DRIVER").is_ok_and(|driver| driver == "real") || Device::open(0).is_ok()
}

pub(crate) struct Bench {
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) device: Device,
    pub(crate) sim: Option<cuda_sim::Device>,
}

impl Bench {
    /// The real device where there is one, else the simulated `profile`.
    pub(crate) fn open(profile: &str) -> Result<Self, Failure> {
        let sim = if is_real() {
            None
        } else {
            cuda_sim::install()?;
            Some(cuda_sim::device(profile)?)
        };
        let stream = CudaContext::new(sim.as_ref().map_or(0, |sim| sim.ordinal()))?.new_stream()?;
        let device = Device::new(&stream)?;
        Ok(Self { stream, device, sim })
    }

    pub(crate) fn tuned(&self, tuning: Tuning) -> Device {
        Device::builder(&self.stream).tuning(tuning).build().expect("a device")
    }

    pub(crate) fn clock(&self) -> &'static str {
        if self.sim.is_some() { "simulated" } else { "wall" }
    }

    /// Says once what runs.
    pub(crate) fn announce(&self) {
        let name = self.device.platform().name();
        match &self.sim {
            Some(_) => println!("no GPU: the simulated {name}, by its own clock"),
            None => println!("{name}"),
        }
    }

    /// As [`announce`](Self::announce), for a bench that goes by the wall in any case.
    pub(crate) fn announce_wall(&self) {
        let name = self.device.platform().name();
        match &self.sim {
            Some(_) => println!("no GPU: the simulated {name}, few of everything; wall clock"),
            None => println!("{name}; wall clock"),
        }
    }

    /// Seconds that `run` took: by the wall, or by the simulated machine's clock.
    pub(crate) fn time(&self, run: impl FnOnce()) -> f64 {
        let Some(sim) = &self.sim else {
            let start = Instant::now();
            run();
            return start.elapsed().as_secs_f64();
        };
        let start = sim.clock(0).now_ns;
        run();
        ((sim.clock(0).now_ns - start) as f64 * 1e-9).max(1e-9)
    }

    /// Has the driver keep what is freed in stream order, as programs do that allocate in a loop: else it is given back to
    /// the system at every wait.
    pub(crate) fn keep_freed_memory(&self) -> Result<(), Failure> {
        if !self.stream.context().has_async_alloc() {
            println!("no allocation in stream order: fresh results are cuMemAlloc's");
            return Ok(());
        }
        let (mut pool, mut most) = (std::ptr::null_mut(), u64::MAX);
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the calls write a handle and read a `u64`, which is what the attribute is.
        unsafe {
            sys::cuDeviceGetDefaultMemPool(&mut pool, self.stream.context().cu_device()).result()?;
            sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut most).cast()).result()?;
        }
        Ok(())
    }

    pub(crate) fn sync(&self) {
        // SAFETY: the bench's stream.
        unsafe { check(sys::cuStreamSynchronize(self.stream.cu_stream())) };
    }
}

#[track_caller]
pub(crate) fn check(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// Pinned and device memory of `bytes` bytes, by raw calls.
pub(crate) struct Raw {
    pub(crate) host: *mut c_void,
    pub(crate) device: sys::CUdeviceptr,
    pub(crate) bytes: usize,
}

impl Raw {
    pub(crate) fn new(bytes: usize) -> Self {
        Self::with_flags(bytes, sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP)
    }

    pub(crate) fn with_flags(bytes: usize, flags: u32) -> Self {
        let (mut host, mut device) = (std::ptr::null_mut(), 0);
        // SAFETY: the bench's context is current.
        unsafe {
            check(sys::cuMemHostAlloc(&mut host, bytes, flags));
            check(sys::cuMemAlloc_v2(&mut device, bytes));
            host.cast::<u8>().write_bytes(0x5a, bytes);
        }
        Self { host, device, bytes }
    }

    pub(crate) fn up(&self, bench: &Bench) {
        self.up_on(&bench.stream);
    }

    pub(crate) fn down(&self, bench: &Bench) {
        self.down_on(&bench.stream);
    }

    pub(crate) fn up_on(&self, stream: &CudaStream) {
        // SAFETY: both ends are `bytes` long and stay.
        unsafe { check(sys::cuMemcpyHtoDAsync_v2(self.device, self.host, self.bytes, stream.cu_stream())) };
    }

    pub(crate) fn down_on(&self, stream: &CudaStream) {
        // SAFETY: as above.
        unsafe { check(sys::cuMemcpyDtoHAsync_v2(self.host, self.device, self.bytes, stream.cu_stream())) };
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

pub(crate) fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The median of `rounds` times of each, interleaved, after one of each that does not count.
pub(crate) fn medians<const N: usize>(bench: &Bench, rounds: usize, mut runs: [&mut dyn FnMut(); N]) -> [f64; N] {
    let mut times = [const { Vec::new() }; N];
    for round in 0..=rounds {
        for (run, times) in runs.iter_mut().zip(&mut times) {
            let seconds = bench.time(run);
            if round > 0 {
                times.push(seconds);
            }
        }
    }
    times.map(median)
}

pub(crate) fn human(bytes: usize) -> String {
    match bytes {
        0..0x400 => format!("{bytes} B"),
        0x400..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.4} GiB", bytes as f64 / (1u64 << 30) as f64).replace(".0000", ""),
    }
}

pub(crate) fn print(row: &Row) {
    let show = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.2}"));
    println!(
        "{:40} {:>9}  ours {:>9.2}  raw {:>9}  peer {:>9} {:5} ratio {}",
        row.case,
        human(row.bytes),
        row.ours,
        show(row.raw),
        show(row.peer),
        row.unit,
        row.ratio.map_or("-".into(), |ratio| format!("{ratio:.3}")),
    );
}

/// Writes the rows where `--json` says.
pub(crate) fn write(args: &Args, rows: &[Row]) -> Result<(), Failure> {
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(rows)?)?;
    }
    Ok(())
}

/// What all threads of this process have computed.
pub(crate) fn cpu_time() -> Duration {
    #[cfg(target_os = "linux")]
    {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call writes one time.
        assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) }, 0);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
    #[cfg(not(target_os = "linux"))]
    Duration::ZERO
}
