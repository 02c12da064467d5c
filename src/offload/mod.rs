//! Keeping part of a model in host memory: whether that pays and how much of it, and doing it.
//!
//! Memory that is free on the device can hold a larger micro-batch, which makes better use of it; what was moved out must come back
//! over the link in time. [`Workload::advise`] weighs the two: it needs no device, shows its arithmetic and says what it assumed. [`Offloader`] moves layers, [`ActivationStack`] activations.
#![deny(unsafe_code)]

mod advise;
mod builder;
mod choose;
mod layer;
mod link;
mod offloader;
mod pipeline;
mod ring;
mod stack;
mod step;
mod text;
mod workload;

pub use advise::{Choice, OffloadAdvice, Point, Sensitivity, Verdict};
pub use builder::{OffloadReport, OffloaderBuilder};
pub use layer::{ActiveLayer, ActiveTensor, OffloadLayer};
pub use link::{OffloadLink, pinned_budget};
pub use offloader::{OffloadStats, Offloader};
pub use pipeline::LayerAdvice;
pub use ring::LayerOrder;
pub use stack::{ActivationStack, ActivationStats};
pub use step::{Bound, StepTime};
pub use workload::{Batch, Checkpointing, Fractions, Workload, WorkloadLayer};

#[cfg(test)]
mod tests;
