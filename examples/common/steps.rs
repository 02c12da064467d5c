//! What the examples that work step after step share: their arguments, the GPU or the simulated one, and a kernel.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use cuda_sim::kernels::BUILTIN_PTX;
use serde_json::{Value, json};
use transfer_tensor::cudarc::driver::{CudaFunction, DeviceSlice as _, LaunchConfig, PushKernelArg as _};
use transfer_tensor::cudarc::nvrtc::Ptx;
use transfer_tensor::{DeviceMut, EgressStats, TransferTensor};

use super::gpu::refused;
use super::{Failure, MachineArgs};

/// No example's outputs take this long to be delivered; then something hangs.
pub const PATIENCE: Duration = Duration::from_secs(600);

#[derive(Debug, Clone, Args)]
pub struct StepArgs {
    #[command(flatten)]
    pub machine: MachineArgs,
    /// How many steps the device works
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// How many kernels run in a step: its work
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    pub passes: u64,
    /// How many outputs there may be at a time, under way or with a worker
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    pub capacity: u16,
    /// Folder for the file; a new one under the system's temporary folder, if not said
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Why this process was started for a simulated machine
    #[arg(long, hide = true)]
    pub no_gpu: Option<String>,
}

/// Makes the folder for an example's file; whoever runs it finds its name in what is printed.
pub fn folder(out: Option<&Path>) -> Result<PathBuf, Failure> {
    match out {
        Some(out) if out.exists() && !out.is_dir() => {
            Err(Failure::usage(format!("--out {}: it is no folder", out.display())))
        }
        Some(out) => {
            let failed = |error| Failure::other(format!("the folder {}: {error}", out.display()));
            std::fs::create_dir_all(out).map_err(failed).map(|()| out.to_owned())
        }
        None => {
            let made = tempfile::Builder::new().prefix("transfer-tensor-").tempdir();
            let failed = |error| Failure::other(format!("a temporary folder: {error}"));
            made.map_err(failed).map(tempfile::TempDir::keep)
        }
    }
}

/// Element `index` of what the device begins with: whole numbers below 2²⁰, which repeat late enough for an element in
/// a wrong place to show.
pub fn pattern(index: u64) -> f32 {
    (index.wrapping_mul(2_654_435_761) >> 7 & 0xF_FFFF) as f32
}

/// A device to work on, and its kernel.
#[derive(Debug)]
pub struct Gpu<'a> {
    gpu: &'a super::gpu::Gpu,
    add_one: CudaFunction,
}

impl Deref for Gpu<'_> {
    type Target = super::gpu::Gpu;

    fn deref(&self) -> &Self::Target {
        self.gpu
    }
}

/// Runs `main` with the GPU that the arguments name, or with a simulated one.
pub fn run(args: &StepArgs, main: impl FnOnce(&Gpu) -> Result<(), Failure>) -> Result<ExitCode, Failure> {
    // What an `f32` counts on top of the pattern.
    const MOST: u64 = 1 << 23;
    if args.steps.checked_mul(args.passes).is_none_or(|kernels| kernels > MOST) {
        return Err(Failure::usage(format!(
            "{} steps of {} passes: they must not exceed {MOST} in all",
            args.steps, args.passes
        )));
    }
    super::gpu::run(&args.machine, args.no_gpu.as_deref(), args.json, |gpu| main(&Gpu::new(gpu)?))
}

impl<'a> Gpu<'a> {
    fn new(gpu: &'a super::gpu::Gpu) -> Result<Self, Failure> {
        let module = gpu.stream.context().load_module(Ptx::from_src(BUILTIN_PTX));
        let module = module.map_err(|error| refused("loading", error))?;
        let add_one = module.load_function("add_one_f32").map_err(|error| refused("finding the kernel", error))?;
        Ok(Self { gpu, add_one })
    }

    /// Adds 1 to each element on the device, `passes` times.
    pub fn add_ones(&self, tensor: &mut TransferTensor<f32>, passes: u64) -> Result<(), Failure> {
        let mut elements = tensor.device_mut(&self.stream)?;
        (0..passes).try_for_each(|_| self.add_one(&mut elements))
    }

    fn add_one(&self, elements: &mut DeviceMut<'_, f32>) -> Result<(), Failure> {
        const THREADS: u32 = 256;
        // The kernel strides over what more blocks would do.
        const BLOCKS: u64 = 1 << 16;
        let len = elements.len() as u64;
        let Ok(blocks) = u32::try_from(len.div_ceil(THREADS.into()).clamp(1, BLOCKS)) else { return Ok(()) };
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        let mut launch = self.stream.launch_builder(&self.add_one);
        launch.arg(elements).arg(&len);
        // SAFETY: the arguments are those of the entry; the kernel touches `len` elements at the guard's address and
        // runs on the guard's stream.
        let launched = unsafe { launch.launch(config) };
        launched.map(drop).map_err(|error| refused("launching the kernel", error))
    }

    /// Copies a tensor to another of its size, on the device.
    pub fn copy(&self, from: &TransferTensor<f32>, to: &mut TransferTensor<f32>) -> Result<(), Failure> {
        let (from, mut to) = (from.device(&self.stream)?, to.device_mut(&self.stream)?);
        self.stream.memcpy_dtod(&from, &mut to).map_err(|error| refused("copying on the device", error))
    }

    /// How long the device takes for `steps` steps without anything else, by the wall; `ring` stands for the outputs.
    pub fn alone(
        &self,
        steps: u64,
        ring: &mut [TransferTensor<f32>],
        mut step: impl FnMut(&mut TransferTensor<f32>) -> Result<(), Failure>,
    ) -> Result<f64, Failure> {
        // Once without the clock: memory is made where it is first used.
        ring.iter_mut().try_for_each(&mut step)?;
        self.wait()?;
        let start = Instant::now();
        for (_, output) in (0..steps).zip((0..ring.len()).cycle()) {
            step(&mut ring[output])?;
        }
        self.wait()?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// A pool's numbers as JSON.
pub fn stats_json(stats: &EgressStats) -> Value {
    json!({
        "submitted": stats.submitted,
        "delivered": stats.delivered,
        "failed": stats.failed,
        "cancelled": stats.cancelled,
        "kept": stats.kept,
        "bytes": stats.bytes,
        "copying_seconds": stats.copying_time.as_secs_f64(),
        "waiting_seconds": stats.waiting_time.as_secs_f64(),
        "consuming_seconds": stats.consuming_time.as_secs_f64(),
    })
}
