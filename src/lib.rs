//! Hand tensors between CPU and GPU.
#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

#[allow(unsafe_code)]
pub(crate) mod driver;
#[allow(unsafe_code)]
mod element;
mod error;
mod layout;
mod ranges;

pub use cudarc;
pub use element::{DType, Element};
pub use error::{Error, Refused, Result};
pub use layout::Shape;
