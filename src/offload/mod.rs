//! Whether keeping part of a model in host memory pays, and how much of it.
//!
//! Memory that is free on the device can hold a larger micro-batch, which makes better use of it; what was moved out must come back
//! over the link in time. [`Workload::advise`] weighs the two: it needs no device, shows its arithmetic and says what it assumed.
#![deny(unsafe_code)]

mod advise;
mod link;
mod step;
mod text;
mod workload;

pub use advise::{Choice, OffloadAdvice, Point, Sensitivity, Verdict};
pub use link::{OffloadLink, pinned_budget};
pub use step::{Bound, StepTime};
pub use workload::{Batch, Checkpointing, Fractions, Workload};

#[cfg(test)]
mod tests;
