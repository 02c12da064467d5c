//! A simulated CUDA driver.

pub mod host;
pub mod kernels;
pub mod profile;
pub mod ptx;
