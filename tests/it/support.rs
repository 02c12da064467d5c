//! One device a test: simulated, unless `TRANSFER_TENSOR_DRIVER=real`.

use std::sync::Arc;

use cuda_sim::Driver;
use transfer_tensor::cudarc::driver::{CudaContext, CudaStream};
use transfer_tensor::{Detector, Device};

/// A device, its context and a stream of the test's own.
pub(crate) struct Gpu {
    /// The simulated device; `None` on a real one.
    pub(crate) sim: Option<cuda_sim::Device>,
    pub(crate) context: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) device: Device,
}

pub(crate) const H200: &str = "x86_h200_sxm_gen5";
pub(crate) const SPARK: &str = "dgx_spark_gb10";

impl Gpu {
    /// A fresh simulated device of `profile`; the real one, if tests run on that.
    pub(crate) fn any(profile: &str) -> Gpu {
        match cuda_sim::install_from_env().expect("the simulated driver is built beside the tests") {
            Driver::Real => Gpu::on(None, 0),
            Driver::Simulated => Gpu::simulated(profile).expect("simulated"),
        }
    }

    /// A fresh simulated device of `profile`; `None` where tests run on a real one.
    pub(crate) fn simulated(profile: &str) -> Option<Gpu> {
        match cuda_sim::install_from_env().expect("the simulated driver is built beside the tests") {
            Driver::Real => None,
            Driver::Simulated => {
                let sim = cuda_sim::device(profile).expect("a built-in profile");
                let ordinal = sim.ordinal();
                Some(Gpu::on(Some(sim), ordinal))
            }
        }
    }

    fn on(sim: Option<cuda_sim::Device>, ordinal: usize) -> Gpu {
        let context = CudaContext::new(ordinal).expect("a context");
        let stream = context.new_stream().expect("a stream");
        let detector = match &sim {
            Some(sim) => Detector::new().fs_root(sim.host_root()),
            None => Detector::new(),
        };
        let device = Device::with_detector(&stream, &detector).expect("a device");
        Gpu { sim, context, stream, device }
    }
}
