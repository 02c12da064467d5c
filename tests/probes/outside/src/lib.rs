//! A project's own code: it knows cudarc, and nothing of the simulated driver.

use cudarc::driver::{CudaContext, DriverError, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

/// Adds one to each number on device `ordinal`, with the entry `add_one_f32` of a module.
///
/// # Errors
/// The driver's.
pub fn add_one(ordinal: usize, ptx: &str, numbers: &[f32]) -> Result<Vec<f32>, DriverError> {
    let context = CudaContext::new(ordinal)?;
    let stream = context.new_stream()?;
    let kernel = context.load_module(Ptx::from_src(ptx))?.load_function("add_one_f32")?;
    let mut on_device = stream.clone_htod(numbers)?;
    let count = numbers.len() as u64;
    let mut launch = stream.launch_builder(&kernel);
    launch.arg(&mut on_device).arg(&count);
    // SAFETY: the entry takes a pointer to `count` floats and `count`.
    unsafe { launch.launch(LaunchConfig::for_num_elems(numbers.len() as u32)) }?;
    let result = stream.clone_dtoh(&on_device)?;
    stream.synchronize()?;
    Ok(result)
}
