//! The only place that calls `cudarc::driver::{sys, result}`.

pub(crate) mod call;
pub(crate) mod load;

pub(crate) use call::{Bound, check};
pub(crate) use load::Driver;
