//! What a program keeps on the device and how long a step of it takes.

use crate::error::{Error, Kind, Result};

/// A program's memory and time, as it runs now: an iteration of training, or a step of inference.
///
/// Bytes are of all layers together; seconds are by the wall. What is not known stays at its default, and the advice says what it
/// assumed in its place.
#[derive(Debug, Clone, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields, default))]
#[non_exhaustive]
pub struct Workload {
    /// For people.
    pub name: String,
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of activations, at the micro-batch that `seconds` is of.
    pub activations: u64,
    /// How many of them reach the device's memory, rather than staying in its caches; all, if not said.
    pub activations_in_dram: Option<u64>,
    /// Bytes of a key-value cache. It grows with the micro-batch, like the activations.
    pub kv_cache: u64,
    /// Bytes of optimizer state, read and written once an iteration.
    pub optimizer: u64,
    /// Everything else that is to stay on the device.
    pub other: u64,
    /// Seconds of an iteration with everything on the device, and no more than it computes.
    pub seconds: f64,
    /// How often an iteration needs each weight: twice in training, forward and backward (the default); once in inference.
    pub weight_passes: Option<u32>,
    /// The layers one by one, in the order of the forward pass, where they were measured. What is not in the list stays on the device, and its time is
    /// after the layers'.
    pub layers: Vec<WorkloadLayer>,
    /// What larger micro-batches were measured to take.
    pub batches: Vec<Batch>,
    /// What recomputing activations would cost and free.
    pub checkpointing: Option<Checkpointing>,
    /// Bytes of the device's memory that all this may take; 95 % of it, if not said.
    pub device_bytes: Option<u64>,
    /// The link's rate each way, 10⁹ bytes a second, where the platform's own figures are not to be used. No more counts than the link
    /// can carry.
    pub link_gbs: Option<f64>,
    /// The share of the link that is there for this, if others use it too: above 0, at most 1.
    pub link_share: Option<f64>,
}

/// A layer that was measured, at the micro-batch that the workload is of.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub struct WorkloadLayer {
    /// Bytes of its weights.
    pub weights: u64,
    /// Seconds of an iteration that are its, all passes together.
    pub seconds: f64,
}

/// A micro-batch that was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub struct Batch {
    /// How many times as large as the one that the workload is of.
    pub times: f64,
    /// Seconds of an iteration of it.
    pub seconds: f64,
}

/// Recomputing activations in the backward pass, rather than keeping them.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields))]
pub struct Checkpointing {
    /// Seconds of the forward pass, which runs again.
    pub forward: f64,
    /// Bytes of activations that need not be kept.
    pub frees: u64,
}

/// How much of each kind is kept in host memory, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(deny_unknown_fields, default))]
pub struct Fractions {
    /// Of the weights.
    pub weights: f64,
    /// Of the activations.
    pub activations: f64,
    /// Of the key-value cache.
    pub kv_cache: f64,
    /// Of the optimizer's state.
    pub optimizer: f64,
}

impl Fractions {
    /// Of weights alone.
    pub fn of_weights(fraction: f64) -> Self {
        Self { weights: fraction, ..Self::default() }
    }

    pub(super) fn list(&self) -> [f64; 4] {
        [self.weights, self.activations, self.kv_cache, self.optimizer]
    }

    pub(super) fn check(&self) -> Result<()> {
        match self.list().iter().find(|fraction| !(0.0..=1.0).contains(*fraction)) {
            Some(fraction) => {
                Err(Error::new(Kind::Workload { what: "fractions", why: format!("{fraction} is not from 0 to 1") }))
            }
            None => Ok(()),
        }
    }
}

impl Batch {
    pub(super) fn check(&self) -> Result<()> {
        positive("times of a micro-batch", self.times)?;
        positive("seconds of a micro-batch", self.seconds)
    }
}

fn positive(what: &'static str, number: f64) -> Result<()> {
    if number.is_finite() && number > 0.0 {
        return Ok(());
    }
    Err(Error::new(Kind::Workload { what, why: format!("{number} is not a number above 0") }))
}

impl Workload {
    /// So many bytes of weights and activations, and seconds of an iteration.
    pub fn new(weights: u64, activations: u64, seconds: f64) -> Self {
        Self { weights, activations, seconds, ..Self::default() }
    }

    /// Adds a micro-batch that was measured.
    #[must_use]
    pub fn batch(mut self, times: f64, seconds: f64) -> Self {
        self.batches.push(Batch { times, seconds });
        self
    }

    /// The share of an iteration that the forward pass is, in which activations are made: a third, where it was not said.
    pub(super) fn forward_share(&self) -> f64 {
        self.checkpointing.map_or(1.0 / 3.0, |checkpointing| checkpointing.forward / self.seconds)
    }

    /// What `seconds` is of.
    pub(super) fn own(&self) -> Batch {
        Batch { times: 1.0, seconds: self.seconds }
    }

    pub(super) fn passes(&self) -> u32 {
        self.weight_passes.unwrap_or(2)
    }

    pub(super) fn in_dram(&self) -> u64 {
        self.activations_in_dram.unwrap_or(self.activations)
    }

    /// Refuses what can not be.
    pub(super) fn check(&self) -> Result<()> {
        let no = |what: &'static str, why: String| Err(Error::new(Kind::Workload { what, why }));
        positive("seconds", self.seconds)?;
        if self.in_dram() > self.activations {
            let (part, all) = (self.in_dram(), self.activations);
            return no("activations_in_dram", format!("{part} bytes are more than the {all} bytes of activations"));
        }
        if self.passes() == 0 {
            return no("weight_passes", "0: an iteration that needs no weights".into());
        }
        let parts = [self.weights, self.activations, self.kv_cache, self.optimizer, self.other];
        if parts.iter().try_fold(0u64, |sum, part| sum.checked_add(*part)).is_none() {
            return no("weights", "all bytes together do not fit 64 bits".into());
        }
        self.batches.iter().try_for_each(Batch::check)?;
        // One that was measured twice, or the workload's own, took one time.
        let all = || std::iter::once(self.own()).chain(self.batches.iter().copied());
        for (index, Batch { times, seconds }) in all().enumerate() {
            if let Some(other) = all().take(index).find(|other| other.times == times && other.seconds != seconds) {
                return no("batches", format!("{times} times takes {} s, and {seconds} s", other.seconds));
            }
        }
        for layer in &self.layers {
            positive("seconds of a layer", layer.seconds)?;
        }
        let seconds: f64 = self.layers.iter().map(|layer| layer.seconds).sum();
        let bytes = self.layers.iter().try_fold(0u64, |sum, layer| sum.checked_add(layer.weights));
        if bytes.is_none_or(|bytes| bytes > self.weights) {
            let (bytes, all) = (bytes.map_or("too many".into(), |bytes| bytes.to_string()), self.weights);
            return no("layers", format!("their {bytes} bytes are more than the {all} bytes of weights"));
        }
        if seconds > self.seconds * 1.01 {
            let all = self.seconds;
            return no("layers", format!("their {seconds} s are more than the iteration's {all} s"));
        }
        if let Some(Checkpointing { forward, frees }) = self.checkpointing {
            positive("checkpointing.forward", forward)?;
            if forward >= self.seconds {
                let seconds = self.seconds;
                return no("checkpointing.forward", format!("{forward} s are no part of an iteration of {seconds} s"));
            }
            if frees > self.activations {
                let all = self.activations;
                return no(
                    "checkpointing.frees",
                    format!("{frees} bytes are more than the {all} bytes of activations"),
                );
            }
        }
        if self.device_bytes == Some(0) {
            return no("device_bytes", "0: there would be no room for anything".into());
        }
        if let Some(gbs) = self.link_gbs {
            positive("link_gbs", gbs)?;
        }
        match self.link_share {
            Some(share) if !(share > 0.0 && share <= 1.0) => {
                no("link_share", format!("{share} is not above 0 and at most 1"))
            }
            _ => Ok(()),
        }
    }
}
