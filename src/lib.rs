//! Hand tensors between CPU and GPU.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub(crate) mod driver;
mod error;
mod plan;
mod platform;

pub use cudarc;
pub use error::{Error, Refused, Result};
pub use plan::{
    Access, Backing, ByMemory, Decision, Direction, Estimate, Figures, HostMemory, Rate, Request, Strategy, plan,
};
pub use platform::{Attributes, Capabilities, Detector, MemoryFigures, MemoryModel, Platform, Topology};
