//! The kernels: one that reads a layer's weights, and one that only takes time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use transfer_tensor::cudarc::driver::{CudaFunction, CudaStream, DeviceSlice as _, LaunchConfig, PushKernelArg as _};
use transfer_tensor::cudarc::nvrtc::Ptx;
use transfer_tensor::{DeviceMut, DeviceRef};

use crate::common::Failure;
use crate::common::gpu::{Gpu, refused};

const PTX: &str = include_str!("../kernels/offload.ptx");

/// What a layer does to a word of the state.
pub(crate) const fn folded(state: u32, weight: u32) -> u32 {
    state.rotate_left(5).wrapping_mul(0x9E37_79B1) ^ weight
}

cuda_sim::kernel! {
    /// The same as the PTX, for the simulated driver.
    fn fold(launch) {
        let (state, weights, len) = (launch.arg(0)?, launch.arg(1)?, launch.arg(2)?);
        let weights = launch.slice::<u32>(weights, len)?.to_vec();
        for (word, weight) in launch.slice_mut::<u32>(state, len)?.iter_mut().zip(weights) {
            *word = folded(*word, weight);
        }
        Ok(())
    }
}

cuda_sim::kernel! {
    /// The simulated device's ticks are nanoseconds. It sleeps: copies need this CPU's cores.
    fn spin(launch) {
        std::thread::sleep(Duration::from_nanos(launch.arg(0)?));
        Ok(())
    }
}

/// The loaded kernels, and how long a tick is.
#[derive(Debug)]
pub(crate) struct Kernels {
    fold: CudaFunction,
    spin: CudaFunction,
    ticks_per_second: f64,
}

impl Kernels {
    /// Loads them, and measures how many ticks are a second.
    pub(crate) fn load(gpu: &Gpu) -> Result<Self, Failure> {
        if gpu.is_simulated() {
            cuda_sim::register_kernel("fold", fold).map_err(Failure::other)?;
            cuda_sim::register_kernel("spin", spin).map_err(Failure::other)?;
        }
        let module = gpu.stream.context().load_module(Ptx::from_src(PTX));
        let module = module.map_err(|error| refused("loading the kernels", error))?;
        let find = |name| module.load_function(name).map_err(|error| refused("finding a kernel", error));
        let mut kernels = Self { fold: find("fold")?, spin: find("spin")?, ticks_per_second: 1e9 };
        // The first brings the clock up to its speed.
        let ticks = if gpu.is_simulated() { 2_000_000 } else { 200_000_000 };
        for _ in 0..2 {
            let start = Instant::now();
            kernels.spin(&gpu.stream, ticks)?;
            gpu.wait()?;
            kernels.ticks_per_second = ticks as f64 / start.elapsed().as_secs_f64();
        }
        Ok(kernels)
    }

    pub(crate) fn ticks(&self, seconds: f64) -> u64 {
        (seconds * self.ticks_per_second) as u64
    }

    /// A layer's work: reads its weights, and takes so many ticks.
    pub(crate) fn layer(
        &self,
        stream: &Arc<CudaStream>,
        state: &mut DeviceMut<'_, u32>,
        weights: &DeviceRef<'_, u32>,
        ticks: u64,
    ) -> Result<(), Failure> {
        let len = weights.len().min(state.len()) as u64;
        let blocks = u32::try_from(len.div_ceil(256)).unwrap_or(u32::MAX).clamp(1, 4096);
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        let mut launch = stream.launch_builder(&self.fold);
        launch.arg(state).arg(weights).arg(&len);
        // SAFETY: the arguments are those of the entry; both guards are of this stream and have `len` words.
        unsafe { launch.launch(config) }.map_err(|error| refused("launching a kernel", error))?;
        self.spin(stream, ticks)
    }

    fn spin(&self, stream: &Arc<CudaStream>, ticks: u64) -> Result<(), Failure> {
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        let mut launch = stream.launch_builder(&self.spin);
        launch.arg(&ticks);
        // SAFETY: the argument is that of the entry; the kernel touches no memory.
        unsafe { launch.launch(config) }.map(drop).map_err(|error| refused("launching a kernel", error))
    }
}
