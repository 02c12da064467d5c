//! From a workload and a platform to a verdict.
//!
//! For each micro-batch that was measured, what does not fit must go: the least that makes it fit, since moving more only takes longer.
//! What frees most for the link's time goes first. The micro-batch and the way that give the most throughput are chosen; what stays on
//! the device is preferred to what moves, and keeping activations to recomputing them, unless the other is better by a hundredth.

use crate::error::Result;
use crate::platform::Platform;

use super::link::OffloadLink;
use super::pipeline::{self, LayerAdvice};
use super::step::{Bound, StepTime};
use super::workload::{Batch, Fractions, Workload};

/// A gain below this is no reason to move anything.
const WORTH_IT: f64 = 1.01;

/// The share of the device's memory bandwidth above which there is no room for more (the talk's rule: 80 to 90 %).
const ROOM: f64 = 0.85;

/// Points of the curve.
const POINTS: u32 = 32;

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Verdict {
    /// Keep everything on the device.
    Resident,
    /// Keep part of it in host memory.
    Offload,
    /// Recompute activations.
    Checkpoint,
    /// Recompute activations, and keep part of the rest in host memory.
    Both,
    /// It does not fit, whatever is moved out or recomputed.
    DoesNotFit,
}

/// One way to run the workload.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Choice {
    /// How many times the micro-batch that the workload is of.
    pub batch: f64,
    /// What is kept in host memory.
    pub fractions: Fractions,
    /// Whether activations are recomputed.
    pub checkpoint: bool,
    /// Bytes that the device has to hold.
    pub device_bytes: u64,
    /// Bytes that host memory has to hold.
    pub host_bytes: u64,
    /// Bytes to the device in a step.
    pub up_bytes: u64,
    /// Bytes from the device in a step.
    pub down_bytes: u64,
    /// The step's parts.
    pub step: StepTime,
    /// Throughput, as a multiple of the workload's own.
    pub gain: f64,
    /// The same if nothing moved while the device computes.
    pub serial_gain: f64,
    /// 10⁹ bytes a second that the busier way of the link would have to carry for the step to be no longer than it computes.
    pub needed_gbs: f64,
}

/// A point of the curve of throughput against the fraction of the weights in host memory.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Point {
    /// Of the weights.
    pub fraction: f64,
    /// The best micro-batch that fits; 0 where none does.
    pub batch: f64,
    /// Its throughput, as a multiple of the workload's own; 0 where none fits.
    pub gain: f64,
}

/// The choice's gain if the inputs are off by a fifth.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Sensitivity {
    /// A link of 0.8 of the rate, and of 1.2.
    pub link: [f64; 2],
    /// A micro-batch that gains 0.8 of what was measured, and 1.2.
    pub batch: [f64; 2],
}

/// What was found, with the way there.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct OffloadAdvice {
    /// What to do.
    pub verdict: Verdict,
    /// The fraction of all that could be moved which is to be: weights, activations, key-value cache and optimizer state.
    pub fraction: f64,
    /// Throughput, as a multiple of the workload's own; 0 where it does not fit.
    pub gain: f64,
    /// What the chosen step is held up by.
    pub bound: Bound,
    /// 10⁹ bytes a second that naive offload of what is to be moved (of the weights, where nothing is) needs.
    pub needed_gbs: f64,
    /// What the link carries to the device.
    pub link_gbs: f64,
    /// The workload's own traffic to the device's memory: weights once, activations written and read.
    pub own_gbs: f64,
    /// What is left of the device's memory bandwidth below 85 % of its peak; less than nothing where there is no room.
    pub headroom_gbs: f64,
    /// What was chosen; `None` where nothing fits.
    pub choice: Option<Choice>,
    /// The same layer by layer, where weights are to be moved and the workload lists its layers; `None` too where they do not free enough.
    pub layers: Option<LayerAdvice>,
    /// All that was weighed, best first.
    pub considered: Vec<Choice>,
    /// Throughput against the fraction of the weights.
    pub curve: Vec<Point>,
    /// The chosen gain with other inputs.
    pub sensitivity: Option<Sensitivity>,
    /// The rates.
    pub link: OffloadLink,
    /// The arithmetic, line by line.
    pub steps: Vec<String>,
    /// What was not said and assumed.
    pub assumed: Vec<String>,
    /// What was said and not believed.
    pub warnings: Vec<String>,
}

impl Workload {
    /// Whether keeping part of this in host memory pays on `platform`, and how much of it.
    ///
    /// The figures are those of the platform: measured, where its device was [calibrated](crate::Device::calibrate), else built in. No
    /// device is used.
    ///
    /// # Errors
    /// The workload contradicts itself: the error names the field and its value.
    pub fn advise(&self, platform: &Platform) -> Result<OffloadAdvice> {
        self.check()?;
        let link = OffloadLink::of(platform, self);
        Ok(Advisor { workload: self, link: &link }.advise())
    }

    /// One way to run this: a micro-batch, what of it is in host memory, and whether activations are recomputed. Whether it fits is for
    /// the caller to see.
    ///
    /// # Errors
    /// As [`advise`](Self::advise); a fraction is not from 0 to 1.
    pub fn weigh(&self, platform: &Platform, batch: Batch, fractions: Fractions, checkpoint: bool) -> Result<Choice> {
        self.check()?;
        batch.check()?;
        fractions.check()?;
        let link = OffloadLink::of(platform, self);
        Ok(Advisor { workload: self, link: &link }.choice(batch, fractions.list(), checkpoint))
    }
}

/// A kind of bytes at a micro-batch: how many, and how often each goes up and down in a step if it is in host memory.
#[derive(Debug, Clone, Copy)]
struct Part {
    bytes: f64,
    up: f64,
    down: f64,
}

struct Advisor<'a> {
    workload: &'a Workload,
    link: &'a OffloadLink,
}

impl Advisor<'_> {
    /// Weights, activations, key-value cache, optimizer state.
    fn parts(&self, batch: f64, checkpoint: bool) -> [Part; 4] {
        let w = self.workload;
        let kept = match w.checkpointing.filter(|_| checkpoint) {
            Some(checkpointing) => w.activations - checkpointing.frees,
            None => w.activations,
        };
        [
            Part { bytes: w.weights as f64, up: f64::from(w.passes()), down: 0.0 },
            Part { bytes: kept as f64 * batch, up: 1.0, down: 1.0 },
            Part { bytes: w.kv_cache as f64 * batch, up: 1.0, down: 0.0 },
            Part { bytes: w.optimizer as f64, up: 1.0, down: 1.0 },
        ]
    }

    /// The workload's own micro-batch, and those that were measured.
    fn batches(&self) -> Vec<Batch> {
        let own = self.workload.own();
        let others = self.workload.batches.iter().filter(|batch| batch.times != 1.0);
        std::iter::once(own).chain(others.copied()).collect()
    }

    /// What runs with these fractions.
    fn choice(&self, batch: Batch, fractions: [f64; 4], checkpoint: bool) -> Choice {
        let w = self.workload;
        let parts = self.parts(batch.times, checkpoint);
        let sum =
            |of: fn(&Part) -> f64| parts.iter().zip(fractions).map(|(part, f)| part.bytes * f * of(part)).sum::<f64>();
        let (up, down, host) = (sum(|part| part.up), sum(|part| part.down), sum(|_| 1.0));
        let all: f64 = parts.iter().map(|part| part.bytes).sum::<f64>() + w.other as f64;
        let again = w.checkpointing.filter(|_| checkpoint).map_or(0.0, |checkpointing| checkpointing.forward);
        let compute = batch.seconds * (1.0 + again / w.seconds);
        let own = w.weights as f64 + 2.0 * w.in_dram() as f64 * batch.times;
        // The forward pass, and the rest.
        let (moved, forward) = (parts[1].bytes * fractions[1], w.forward_share() * batch.seconds);
        let phases =
            forward.max(self.link.seconds(0.0, moved)) + (compute - forward).max(self.link.seconds(moved, 0.0));
        let in_memory = |bytes: f64| bytes / (self.link.memory_gbs.max(1e-9) * 1e9);
        let step = StepTime {
            compute,
            link: self.link.seconds(up, down),
            link_serial: self.link.seconds(up, 0.0) + self.link.seconds(0.0, down),
            phases: if moved > 0.0 { phases.max(compute) } else { compute },
            // That the step's own traffic fits into its own time was measured.
            memory: if up + down > 0.0 { in_memory(own).min(compute) + in_memory(up + down) } else { 0.0 },
        };
        let gain = |seconds: f64| batch.times * w.seconds / seconds;
        Choice {
            batch: batch.times,
            fractions: Fractions {
                weights: fractions[0],
                activations: fractions[1],
                kv_cache: fractions[2],
                optimizer: fractions[3],
            },
            checkpoint,
            device_bytes: (all - host).ceil() as u64,
            host_bytes: host.ceil() as u64,
            up_bytes: up.ceil() as u64,
            down_bytes: down.ceil() as u64,
            step,
            gain: gain(step.overlapped()),
            serial_gain: gain(step.serial()),
            needed_gbs: up.max(down) / compute / 1e9,
        }
    }

    /// The least of these kinds that makes a micro-batch fit, beside so much of the activations; what frees most for the link's time
    /// first.
    fn least(&self, batch: Batch, kinds: &[usize], activations: f64, checkpoint: bool) -> Option<Choice> {
        let parts = self.parts(batch.times, checkpoint);
        let all: f64 = parts.iter().map(|part| part.bytes).sum::<f64>() + self.workload.other as f64;
        let mut over = all - self.link.device_bytes as f64;
        let mut order: Vec<usize> = kinds.to_vec();
        let cost = |kind: usize| self.link.seconds(parts[kind].up, parts[kind].down);
        order.sort_by(|&a, &b| cost(a).total_cmp(&cost(b)));
        let mut fractions = [0.0, activations, 0.0, 0.0];
        over -= parts[1].bytes * activations;
        for kind in order {
            let bytes = parts[kind].bytes * (1.0 - fractions[kind]);
            if over > 0.0 && bytes > 0.0 {
                let least = (over / bytes).min(1.0);
                fractions[kind] = if least < 1.0 { fractions[kind] + (1.0 - fractions[kind]) * least } else { 1.0 };
                over -= bytes * least;
            }
        }
        // Of bytes, a fraction of one is a matter of rounding.
        (over < 1.0).then(|| self.choice(batch, fractions, checkpoint))
    }

    fn considered(&self) -> Vec<Choice> {
        const KINDS: [&[usize]; 6] = [&[], &[0], &[1], &[2], &[3], &[0, 1, 2, 3]];
        let kinds: &[&[usize]] = if self.link.one_memory { &KINDS[..1] } else { &KINDS };
        let ways = if self.workload.checkpointing.is_some() { &[false, true][..] } else { &[false] };
        let mut found: Vec<Choice> = Vec::new();
        for batch in self.batches() {
            for &checkpoint in ways {
                for kinds in kinds {
                    found.extend(self.least(batch, kinds, 0.0, checkpoint).filter(|choice| !found.contains(choice)));
                }
                // Activations, for which each phase has its own time, and then of the rest: the best of several shares.
                let share = |index| f64::from(index) / f64::from(POINTS);
                let mixed = !self.link.one_memory && self.least(batch, &[], 0.0, checkpoint).is_none();
                let shares = (1..=POINTS).filter(|_| mixed);
                let mix = shares.filter_map(|index| self.least(batch, &[0, 2, 3], share(index), checkpoint));
                let mix = mix.max_by(|a, b| a.gain.total_cmp(&b.gain).then(b.host_bytes.cmp(&a.host_bytes)));
                found.extend(mix.filter(|choice| !found.contains(choice)));
                // And all of the weights, for comparison.
                let whole = self.choice(batch, [1.0, 0.0, 0.0, 0.0], checkpoint);
                let counts = !self.link.one_memory && self.workload.weights > 0 && !found.contains(&whole);
                found.extend(Some(whole).filter(|whole| counts && whole.device_bytes <= self.link.device_bytes));
            }
        }
        // What moves less, and recomputes less, first where the gains are the same.
        let moved = |choice: &Choice| (choice.host_bytes, choice.checkpoint);
        found.sort_by(|a, b| b.gain.total_cmp(&a.gain).then_with(|| moved(a).cmp(&moved(b))));
        found
    }

    /// The best that moves something, if that is worth it; else the best of those that move nothing, recomputing only if that is worth
    /// it. (No such rule among those that move: a faster link must not be worse.)
    fn best<'c>(&self, considered: &'c [Choice]) -> Option<&'c Choice> {
        let of = |ranks: std::ops::RangeInclusive<u8>| considered.iter().find(|choice| ranks.contains(&rank(choice)));
        [of(0..=0), of(1..=1), of(2..=3)]
            .into_iter()
            .flatten()
            .reduce(|best, other| if other.gain > best.gain * WORTH_IT { other } else { best })
    }

    fn curve(&self) -> Vec<Point> {
        let all = self.batches();
        let point = |fraction: f64| {
            let fits = |batch: &Batch| {
                let choice = self.choice(*batch, [fraction, 0.0, 0.0, 0.0], false);
                (choice.device_bytes <= self.link.device_bytes).then_some(choice)
            };
            let best = all.iter().filter_map(fits).max_by(|a, b| a.gain.total_cmp(&b.gain));
            Point {
                fraction,
                batch: best.as_ref().map_or(0.0, |best| best.batch),
                gain: best.map_or(0.0, |best| best.gain),
            }
        };
        (0..=POINTS).map(|index| point(f64::from(index) / f64::from(POINTS))).collect()
    }

    fn sensitivity(&self, choice: &Choice) -> Sensitivity {
        let fractions = choice.fractions.list();
        let all = self.batches();
        let Some(batch) = all.into_iter().find(|batch| batch.times == choice.batch) else {
            return Sensitivity { link: [choice.gain; 2], batch: [choice.gain; 2] };
        };
        let link = |factor: f64| {
            let link = self.link.scaled(factor);
            Advisor { workload: self.workload, link: &link }.choice(batch, fractions, choice.checkpoint).gain
        };
        let measured = batch.times * self.workload.seconds / batch.seconds;
        let other = |factor: f64| {
            let gain = (1.0 + (measured - 1.0) * factor).max(1e-9);
            let batch = Batch { times: batch.times, seconds: batch.times * self.workload.seconds / gain };
            self.choice(batch, fractions, choice.checkpoint).gain
        };
        Sensitivity { link: [link(0.8), link(1.2)], batch: [other(0.8), other(1.2)] }
    }

    /// The weights that a choice moves, as whole layers.
    fn layers(&self, choice: &Choice) -> Option<LayerAdvice> {
        let w = self.workload;
        let moved = (w.weights as f64 * choice.fractions.weights).ceil() as u64;
        (moved > 0).then(|| pipeline::advise(w, moved, choice.step.compute, self.link.up_gbs))?
    }

    fn advise(&self) -> OffloadAdvice {
        let w = self.workload;
        let considered = self.considered();
        let choice = self.best(&considered).cloned();
        let verdict = choice.as_ref().map_or(Verdict::DoesNotFit, |choice| match rank(choice) {
            0 => Verdict::Resident,
            1 => Verdict::Checkpoint,
            2 => Verdict::Offload,
            _ => Verdict::Both,
        });
        let own_gbs = (w.weights as f64 + 2.0 * w.in_dram() as f64) / w.seconds / 1e9;
        let naive = self.choice(w.own(), [1.0, 0.0, 0.0, 0.0], false);
        let needed_gbs =
            choice.as_ref().filter(|choice| choice.host_bytes > 0).map_or(naive.needed_gbs, |c| c.needed_gbs);
        let fraction = choice.as_ref().map_or(0.0, |choice| {
            let all: f64 = self.parts(choice.batch, choice.checkpoint).iter().map(|part| part.bytes).sum();
            if all > 0.0 { (choice.host_bytes as f64 / all).min(1.0) } else { 0.0 }
        });
        let mut advice = OffloadAdvice {
            verdict,
            fraction,
            gain: choice.as_ref().map_or(0.0, |choice| choice.gain),
            bound: choice.as_ref().map_or(Bound::Memory, |choice| choice.step.bound()),
            needed_gbs,
            link_gbs: self.link.up_gbs,
            own_gbs,
            headroom_gbs: self.link.memory_gbs * ROOM - own_gbs,
            sensitivity: choice.as_ref().map(|choice| self.sensitivity(choice)),
            curve: self.curve(),
            link: self.link.clone(),
            layers: choice.as_ref().and_then(|choice| self.layers(choice)),
            choice,
            considered,
            steps: Vec::new(),
            assumed: super::text::assumed(w),
            warnings: super::text::warnings(w, self.link, own_gbs),
        };
        advice.steps = super::text::steps(w, &advice, &naive);
        advice
    }
}

/// How much there is to it: 0 nothing, 1 recomputing, 2 moving, 3 both.
fn rank(choice: &Choice) -> u8 {
    u8::from(choice.checkpoint) + 2 * u8::from(choice.host_bytes > 0)
}
