//! Hand tensors between CPU and GPU.
#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

#[allow(unsafe_code)]
mod complete;
mod copy;
mod device;
#[allow(unsafe_code)]
pub(crate) mod driver;
#[allow(unsafe_code)]
mod element;
mod error;
mod layout;
#[allow(unsafe_code)]
mod os;
mod plan;
mod platform;
mod ranges;
mod sync;
#[allow(unsafe_code)]
mod tensor;

pub use cudarc;
pub use device::{Device, DeviceStats};
pub use driver::managed::{Advice, Location};
pub use element::{DType, Element};
pub use error::{Error, Refused, Result};
pub use layout::Shape;
pub use plan::{
    Access, Backing, ByMemory, Decision, Direction, Estimate, Figures, HostMemory, Rate, Request, Strategy, plan,
};
pub use platform::{Attributes, Capabilities, Detector, MemoryFigures, MemoryModel, Platform, Topology};
pub use tensor::{
    DeviceMut, DeviceRef, DynTensor, HostMut, HostRef, SharedTensor, TensorOptions, TensorView, TensorViewMut,
    Transfer, TransferTensor,
};
