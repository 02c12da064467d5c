//! Machines that no built-in profile is, raw driver calls, and small things that several files need.

use std::sync::Arc;
use std::time::Duration;

use cuda_sim::kernels::BUILTIN_PTX;
use cuda_sim::{DeviceBuilder, Driver};
use transfer_tensor::cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, PushKernelArg, sys};
use transfer_tensor::cudarc::nvrtc::Ptx;
use transfer_tensor::{Detector, Device, DeviceMut, Element};

use crate::support::{Gpu, builder, driver, from_env};

/// A simulated device as `builder` describes it; `None` where tests run on a real one.
pub(crate) fn built(builder: DeviceBuilder) -> Option<Gpu> {
    Gpu::built(from_env(builder))
}

/// A fresh simulated device that nobody has looked at, to prepare; `None` where tests run on a real one.
pub(crate) fn unseen(profile: &str) -> Option<cuda_sim::Device> {
    match driver() {
        Driver::Real => None,
        Driver::Simulated => Some(builder(profile).build().expect("a built-in profile")),
    }
}

/// The crate's view of a device that a test has prepared.
pub(crate) fn on(sim: cuda_sim::Device) -> Gpu {
    on_with(sim, |context| context.new_stream().expect("a stream"))
}

/// As [`on`], with another stream of the context than a fresh one.
pub(crate) fn on_with(sim: cuda_sim::Device, stream: impl FnOnce(&Arc<CudaContext>) -> Arc<CudaStream>) -> Gpu {
    let context = CudaContext::new(sim.ordinal()).expect("a context");
    let stream = stream(&context);
    let detector = Detector::new().fs_root(sim.host_root());
    let device = Device::with_detector(&stream, &detector).expect("a device");
    Gpu { sim: Some(sim), context, stream, device }
}

/// CUDA's number of a result.
pub(crate) fn code(result: sys::CUresult) -> u32 {
    result as u32
}

/// The built-in kernel `name`.
pub(crate) fn kernel(context: &Arc<CudaContext>, name: &str) -> CudaFunction {
    let module = context.load_module(Ptx::from_src(BUILTIN_PTX)).expect("the built-in module");
    module.load_function(name).expect("a built-in kernel")
}

/// XORs every byte with the hash of its index, on the guard's stream; twice is nothing.
pub(crate) fn xor_on_device<T: Element>(context: &Arc<CudaContext>, stream: &Arc<CudaStream>, data: &mut DeviceMut<T>) {
    use transfer_tensor::cudarc::driver::DeviceSlice;
    let bytes = data.num_bytes() as u64;
    let function = kernel(context, "xor_index_u8");
    let mut launch = stream.launch_builder(&function);
    launch.arg(&*data).arg(&bytes);
    let threads = LaunchConfig::for_num_elems(u32::try_from(bytes).expect("small"));
    // SAFETY: the kernel's arguments are an address of the guard and its length in bytes; it runs on the guard's stream.
    unsafe { launch.launch(threads) }.expect("a launch");
}

/// As [`xor_on_device`], on the host.
pub(crate) fn xor_on_host(bytes: &mut [u8]) {
    for (i, byte) in (0u64..).zip(bytes) {
        *byte ^= cuda_sim::kernels::index_hash(i);
    }
}

/// Bytes that are not all alike, and differ from those of another seed. They repeat after 8191, which is no size of anything
/// here, so that a piece in another place is seen too.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    const PERIOD: u64 = 8191;
    let one = |i: u64| (i.wrapping_mul(31).wrapping_add(seed.wrapping_mul(97)) >> 1) as u8 ^ (i >> 8) as u8;
    let period: Vec<u8> = (0..PERIOD.min(len as u64)).map(one).collect();
    let mut all = Vec::with_capacity(len);
    while all.len() < len {
        all.extend_from_slice(&period[..period.len().min(len - all.len())]);
    }
    all
}

/// Waits until what was dropped has been freed.
pub(crate) fn drain(device: &Device) {
    device.drain(Duration::from_secs(30)).expect("nothing holds the memory");
}
