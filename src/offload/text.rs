//! The arithmetic, in words.

use std::fmt;

use super::advise::{Choice, OffloadAdvice, Sensitivity, Verdict};
use super::link::OffloadLink;
use super::step::Bound;
use super::workload::Workload;

fn gb(bytes: f64) -> String {
    format!("{:.1} GB", bytes / 1e9)
}

fn ms(seconds: f64) -> String {
    format!("{:.3} ms", seconds * 1e3)
}

/// What the workload does not say.
pub(super) fn assumed(w: &Workload) -> Vec<String> {
    let mut list = Vec::new();
    if w.activations > 0 && w.activations_in_dram.is_none() {
        list.push("all activations reach the device's memory".to_owned());
    }
    if w.weights > 0 && w.weight_passes.is_none() {
        list.push("an iteration needs each weight twice, forward and backward".to_owned());
    }
    if w.batches.is_empty() {
        list.push("no larger micro-batch was measured, so that free memory gains nothing".to_owned());
    }
    if w.activations > 0 || w.kv_cache > 0 {
        list.push("activations and the key-value cache grow with the micro-batch, everything else does not".to_owned());
    }
    if w.activations > 0 && w.checkpointing.is_none() {
        list.push("activations go out in the first third of an iteration, and come back in the rest".to_owned());
    }
    if w.device_bytes.is_none() {
        list.push("5 % of the device's memory are left to the driver, buffers and gaps".to_owned());
    }
    list.push("what moves does so beside computing".to_owned());
    list
}

/// What the workload says and can not be so.
pub(super) fn warnings(w: &Workload, link: &OffloadLink, own_gbs: f64) -> Vec<String> {
    let mut list = link.cut.clone();
    if own_gbs > link.memory_gbs {
        let peak = link.memory_gbs;
        list.push(format!(
            "{own_gbs:.0} GB/s of the workload's own are more than the {peak:.0} GB/s of the device's memory"
        ));
    }
    for batch in w.batches.iter().filter(|batch| batch.times > 1.0 && batch.seconds < w.seconds) {
        list.push(format!("{} times the micro-batch takes {}, less than one", batch.times, ms(batch.seconds)));
    }
    list
}

pub(super) fn steps(w: &Workload, advice: &OffloadAdvice, naive: &Choice) -> Vec<String> {
    let link = &advice.link;
    let parts = [w.weights, w.activations, w.kv_cache, w.optimizer, w.other];
    let all: f64 = parts.iter().map(|&part| part as f64).sum();
    let mut lines = vec![
        format!(
            "memory: {} weights + {} activations + {} key-value cache + {} optimizer + {} other = {} of {}",
            gb(w.weights as f64),
            gb(w.activations as f64),
            gb(w.kv_cache as f64),
            gb(w.optimizer as f64),
            gb(w.other as f64),
            gb(all),
            gb(link.device_bytes as f64),
        ),
        format!(
            "own traffic: ({} weights + 2 x {} activations) / {} = {:.1} GB/s of {:.0}; room below 85 %: {:.1} GB/s",
            gb(w.weights as f64),
            gb(w.in_dram() as f64),
            ms(w.seconds),
            advice.own_gbs,
            link.memory_gbs,
            advice.headroom_gbs,
        ),
        format!(
            "all weights in host memory: {} x {} / {} = {:.1} GB/s of {:.1} that the link carries",
            w.passes(),
            gb(w.weights as f64),
            ms(w.seconds),
            naive.needed_gbs,
            link.up_gbs,
        ),
    ];
    for choice in &advice.considered {
        lines.push(line(choice));
    }
    if link.one_memory {
        lines.push("CPU and GPU have one memory: there is nowhere to move anything to".to_owned());
    }
    lines.push(match (advice.verdict, &advice.choice) {
        (Verdict::DoesNotFit, _) | (_, None) => "nothing of this fits the device".to_owned(),
        (_, Some(choice)) => format!("best: {}", line(choice)),
    });
    if let Some(layers) = &advice.layers {
        lines.push(format!(
            "by layers: {} of {} in host memory, {} at a time on the device ({}): saves {}, a step of {}",
            layers.layers.len(),
            w.layers.len(),
            layers.depth,
            gb(layers.slots_bytes as f64),
            gb(layers.saved_bytes as f64),
            ms(layers.seconds),
        ));
    }
    lines
}

fn line(choice: &Choice) -> String {
    let f = &choice.fractions;
    let moved = [
        ("weights", f.weights),
        ("activations", f.activations),
        ("key-value cache", f.kv_cache),
        ("optimizer", f.optimizer),
    ];
    let moved: Vec<String> =
        moved.iter().filter(|(_, f)| *f > 0.0).map(|(what, f)| format!("{:.1} % of {what}", f * 100.0)).collect();
    let moved = if moved.is_empty() { "nothing moved".to_owned() } else { moved.join(", ") };
    let step = &choice.step;
    let bound = match step.bound() {
        Bound::Compute => "computing",
        Bound::Link => "the link",
        Bound::Memory => "the device's memory",
    };
    format!(
        "{} x micro-batch{}, {moved}: {} on the device, needs {:.1} GB/s; computes {}, link {}: {} at once ({} one after \
         another), bound by {bound}: {:.3} x",
        choice.batch,
        if choice.checkpoint { ", recomputing" } else { "" },
        gb(choice.device_bytes as f64),
        choice.needed_gbs,
        ms(step.compute),
        ms(step.link),
        ms(step.overlapped()),
        ms(step.serial()),
        choice.gain,
    )
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Resident => "resident",
            Verdict::Offload => "offload",
            Verdict::Checkpoint => "checkpoint",
            Verdict::Both => "both",
            Verdict::DoesNotFit => "does-not-fit",
        })
    }
}

impl fmt::Display for OffloadAdvice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {:.3} x the throughput, {:.1} % moved", self.verdict, self.gain, self.fraction * 100.0)?;
        self.steps.iter().try_for_each(|step| writeln!(f, "  {step}"))?;
        if let Some(Sensitivity { link, batch }) = &self.sensitivity {
            writeln!(f, "  if the link has 0.8 or 1.2 of its rate: {:.3} x, {:.3} x", link[0], link[1])?;
            writeln!(f, "  if larger micro-batches gain 0.8 or 1.2 of it: {:.3} x, {:.3} x", batch[0], batch[1])?;
        }
        self.assumed.iter().try_for_each(|line| writeln!(f, "  assumed: {line}"))?;
        self.link.notes.iter().try_for_each(|line| writeln!(f, "  note: {line}"))?;
        self.warnings.iter().try_for_each(|line| writeln!(f, "  warning: {line}"))
    }
}
