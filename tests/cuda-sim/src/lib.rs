//! A simulated CUDA driver.

mod abi;
mod alloc;
mod capture;
mod client;
mod clock;
mod control;
mod device;
mod evidence;
pub mod host;
mod hostility;
pub mod kernels;
mod launch;
mod maps;
mod memory;
mod module;
pub mod profile;
pub mod ptx;
mod sched;
mod state;
mod status;
mod wire;

pub use client::{
    Call, Clock, Device, DeviceBuilder, Driver, Evidence, Gate, InstallError, MemoryKind, SimError, builtin_profiles,
    device, host_works_ns, install, install_from_env, register_kernel,
};
