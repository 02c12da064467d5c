//! A simulated CUDA driver: it takes the place of `libcuda.so`, so that code written against the driver interface runs
//! unchanged on a machine without a GPU.
//!
//! ```
//! use cudarc::driver::CudaContext;
//!
//! let device = cuda_sim::device("x86_h200_sxm_gen5").unwrap(); // installs the driver
//! let ctx = CudaContext::new(device.ordinal()).unwrap();
//! let stream = ctx.default_stream();
//! let copy = stream.clone_htod(&[1.0f32, 2.0]).unwrap();
//! assert_eq!(stream.clone_dtoh(&copy).unwrap(), [1.0, 2.0]);
//! assert_eq!(device.evidence().copied_h2d_pageable, 8);
//! assert!(device.violations().is_empty());
//! ```
//!
//! # How it is built
//!
//! The package is two things from one source. The `rlib` is what tests link: [`install`] finds `libcuda_sim.so` beside
//! the test, loads it, and from then on glibc answers `dlopen("libcuda.so")` with it, for that is its soname. The
//! `cdylib` is the driver. Statics exist twice, so the first half never touches driver state: it calls the `cusim_*`
//! functions of the second, which it finds by `dlsym`.
//!
//! Inside the driver, one lock guards the bookkeeping. Work on streams is a graph of steps; a step that waits for nothing
//! goes to its copy engine or to a thread, and bytes move only there. Every allocation is mapped twice: where the
//! program sees it, with the protection the platform gives it, and where the engines do.

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
    device, fail_call, host_works_ns, install, install_from_env, register_kernel,
};
