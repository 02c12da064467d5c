//! The kernel: it changes every byte of a tensor, and the CPU can undo that.

use std::sync::Arc;

use transfer_tensor::DeviceMut;
use transfer_tensor::cudarc::driver::{
    CudaContext, CudaFunction, CudaStream, DeviceSlice as _, LaunchConfig, PushKernelArg as _, result::DriverError,
};
use transfer_tensor::cudarc::nvrtc::Ptx;

use crate::common::Failure;

const PTX: &str = include_str!("../kernels/handoff.ptx");
/// The entry of the PTX.
pub(crate) const NAME: &str = "change_every_byte";

/// What is applied to byte `i`: the low byte of splitmix64's mix of `i`, made odd. It is never 0, so every byte changes.
pub(crate) const fn index_hash(i: u64) -> u8 {
    let z = i.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)).to_le_bytes()[0] | 1
}

cuda_sim::kernel! {
    /// The same as the PTX, for the simulated driver.
    pub(crate) fn change_every_byte(launch) {
        let (bytes, len) = (launch.arg(0)?, launch.arg(1)?);
        for (i, byte) in (0..).zip(launch.slice_mut::<u8>(bytes, len)?) {
            *byte ^= index_hash(i);
        }
        Ok(())
    }
}

/// The loaded kernel.
#[derive(Debug)]
pub(crate) struct Kernel(CudaFunction);

impl Kernel {
    pub(crate) fn load(context: &Arc<CudaContext>) -> Result<Self, Failure> {
        let module = context.load_module(Ptx::from_src(PTX)).map_err(|error| refused("loading the kernel", error))?;
        module.load_function(NAME).map(Self).map_err(|error| refused("finding the kernel", error))
    }

    /// Changes the elements that `bytes` stands for, on `stream`. Nothing to do is no launch.
    pub(crate) fn launch(&self, stream: &Arc<CudaStream>, bytes: &mut DeviceMut<'_, u8>) -> Result<(), Failure> {
        const THREADS: u32 = 256;
        // The kernel strides over what more blocks would do.
        const BLOCKS: u64 = 1 << 16;
        let len = bytes.len() as u64;
        let Ok(blocks) = u32::try_from(len.div_ceil(THREADS.into()).min(BLOCKS)) else { return Ok(()) };
        if blocks == 0 {
            return Ok(());
        }
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        let mut launch = stream.launch_builder(&self.0);
        launch.arg(bytes).arg(&len);
        // SAFETY: the arguments are those of the entry; the kernel touches `len` bytes at the guard's address and runs on
        // the guard's stream.
        let launched = unsafe { launch.launch(config) };
        launched.map(drop).map_err(|error| refused("launching the kernel", error))
    }
}

/// By number: cudarc's text of an error is another driver call.
fn refused(what: &str, error: DriverError) -> Failure {
    Failure::other(format!("{what} failed: {:?}", error.0))
}
