//! The half that tests link: finds and loads the driver, and speaks to it through its control functions.
//!
//! It must not touch any state of the driver directly: its own copy of that state is not the driver's.

mod device;
mod error;
mod load;
mod report;

pub use device::{Device, DeviceBuilder, Gate};
pub use error::{InstallError, SimError};
pub use report::{Call, Clock, Evidence, MemoryKind};

use crate::kernels::KernelFn;
use crate::profile::Profile;
use crate::wire::RawText;

/// Which driver the process uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driver {
    /// The simulated one; [`install`] has put it in place.
    Simulated,
    /// Whatever the system has.
    Real,
}

/// Puts the simulated driver in place of libcuda, for the whole process. May be called any number of times, by any
/// thread, but before the first call of the real driver.
///
/// # Errors
/// The driver's library was not found or could not be loaded, or a real driver is loaded already.
pub fn install() -> Result<(), InstallError> {
    load::driver().map(|_| ())
}

/// Like [`install`], unless the environment says `TRANSFER_TENSOR_DRIVER=real`: then nothing is loaded.
///
/// # Errors
/// As [`install`].
pub fn install_from_env() -> Result<Driver, InstallError> {
    if std::env::var_os("TRANSFER_TENSOR_DRIVER").is_some_and(|driver| driver == "real") {
        return Ok(Driver::Real);
    }
    install().map(|()| Driver::Simulated)
}

/// The names of the built-in profiles.
#[must_use]
pub fn builtin_profiles() -> Vec<String> {
    Profile::builtin_keys().into_iter().map(str::to_owned).collect()
}

/// A fresh device of a built-in profile, with an ordinal of its own. Installs the driver if that was not done.
///
/// # Errors
/// No such profile, or as [`install`].
pub fn device(profile: &str) -> Result<Device, SimError> {
    DeviceBuilder::new(profile).build()
}

/// Makes a kernel known under the name of a PTX entry, for all devices. Write it with [`kernel!`](crate::kernel).
///
/// # Errors
/// As [`install`].
pub fn register_kernel(name: &str, kernel: KernelFn) -> Result<(), InstallError> {
    let register: extern "C" fn(RawText, KernelFn) -> bool = load::function("cusim_register_kernel")?;
    register(RawText::of(name), kernel);
    Ok(())
}

/// The `n`th call of this name (0: every call) that is about no device returns `code`: `cuInit`, `cuDeviceGetCount`,
/// and others on a thread without a context. It holds for the whole process, so give the test a binary of its own.
///
/// # Errors
/// As [`install`].
pub fn fail_call(call: &str, n: u64, code: u32) -> Result<(), InstallError> {
    let fail: extern "C" fn(usize, RawText, u64, u32, bool) -> bool = load::function("cusim_fail")?;
    fail(usize::MAX, RawText::of(call), n, code, false);
    Ok(())
}

/// The calling thread works for this long in virtual time: work it submits afterwards starts no earlier.
///
/// # Errors
/// As [`install`].
pub fn host_works_ns(device: &Device, ns: u64) -> Result<(), InstallError> {
    let works: extern "C" fn(usize, u64) -> bool = load::function("cusim_host_works")?;
    works(device.ordinal(), ns);
    Ok(())
}
