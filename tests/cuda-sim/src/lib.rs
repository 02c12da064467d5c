//! A simulated CUDA driver.

pub mod host;
pub mod profile;
