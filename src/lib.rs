//! Hand tensors between CPU and GPU.
#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

#[allow(unsafe_code)]
pub(crate) mod driver;
mod error;

pub use cudarc;
pub use error::{Error, Refused, Result};
