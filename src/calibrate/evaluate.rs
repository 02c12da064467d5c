//! From samples to figures. Pure: whatever the samples are, what comes out is finite, positive and no more than the link can
//! carry, or is not there at all.
#![deny(unsafe_code)]

use crate::plan::Tuning;
use crate::platform::Ceiling;

use super::Scaling;

/// No memory of a host is faster, in GB/s.
pub(super) const FASTEST_MEMCPY: f64 = 4000.0;

/// No copy waits this long, in seconds.
const LONGEST_LATENCY: f64 = 1.0;

/// A way with fewer threads or smaller pieces is taken if it is within this share of the best.
const GOOD_ENOUGH: f64 = 0.97;

/// The sizes of pieces that staging may be set to, in bytes.
pub(super) const CHUNKS: std::ops::RangeInclusive<usize> = (64 << 10)..=(64 << 20);

/// The numbers of threads that staging may be set to.
pub(super) const THREADS: std::ops::RangeInclusive<usize> = 1..=256;

/// So many bytes in so many seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sample {
    pub(crate) bytes: usize,
    pub(crate) seconds: f64,
}

impl Sample {
    /// GB/s, where that is a number.
    fn gbs(self) -> Option<f64> {
        positive(self.bytes as f64 / self.seconds * 1e-9)
    }
}

/// Staged copies with these settings.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Staged {
    pub(crate) chunk: usize,
    pub(crate) threads: usize,
    pub(crate) up: Vec<Sample>,
    pub(crate) down: Vec<Sample>,
}

/// The same copy the driver's way and ours: what the caller waits, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Contest {
    pub(crate) bytes: usize,
    /// By one thread.
    pub(crate) alone: Vec<f64>,
    /// By several.
    pub(crate) together: Vec<f64>,
}

/// Everything that was measured.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Samples {
    pub(crate) up: Vec<Sample>,
    pub(crate) down: Vec<Sample>,
    pub(crate) both: Vec<Sample>,
    /// Copies of 4 KiB, either way, on the device's clock, in seconds.
    pub(crate) small: Vec<f64>,
    /// The same, as the caller waits.
    pub(crate) latency_up: Vec<f64>,
    pub(crate) latency_down: Vec<f64>,
    pub(crate) driver_up: Vec<Sample>,
    pub(crate) driver_down: Vec<Sample>,
    pub(crate) memcpy: Vec<(usize, Vec<Sample>)>,
    pub(crate) staged: Vec<Staged>,
    /// By size, ascending.
    pub(crate) contest_up: Vec<Contest>,
    pub(crate) contest_down: Vec<Contest>,
    pub(crate) notes: Vec<String>,
}

/// What follows from the samples; `None` where they say nothing.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Evaluated {
    pub(crate) up: Option<f64>,
    pub(crate) down: Option<f64>,
    pub(crate) both: Option<f64>,
    pub(crate) small: Option<f64>,
    pub(crate) latency_up: Option<f64>,
    pub(crate) latency_down: Option<f64>,
    pub(crate) driver_up: Option<f64>,
    pub(crate) driver_down: Option<f64>,
    pub(crate) memcpy: Vec<Scaling>,
    pub(crate) staged_up: Option<f64>,
    pub(crate) staged_down: Option<f64>,
    pub(crate) tuning: Tuning,
    pub(crate) notes: Vec<String>,
}

fn positive(number: f64) -> Option<f64> {
    (number.is_finite() && number > 0.0).then_some(number)
}

/// The median of those that are numbers above zero.
fn median(numbers: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut numbers: Vec<f64> = numbers.into_iter().filter_map(positive).collect();
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied()
}

fn rate(samples: &[Sample]) -> Option<f64> {
    median(samples.iter().filter_map(|sample| sample.gbs()))
}

/// `ceiling` bounds one direction; `built_in` is kept where nothing better was found.
pub(crate) fn evaluate(samples: &Samples, ceiling: &Ceiling, built_in: Tuning) -> Evaluated {
    let mut notes = samples.notes.clone();
    let mut cut =
        |what: &str, rate: Option<f64>, ceiling: &Ceiling| rate.map(|gbs| ceiling.clamp(what, gbs, &mut notes));
    let twice = Ceiling { gbs: 2.0 * ceiling.gbs, why: format!("one way, {}", ceiling.why) };
    let host = Ceiling { gbs: FASTEST_MEMCPY, why: format!("no host's memory is faster than {FASTEST_MEMCPY} GB/s") };
    let up = cut("copy to the device", rate(&samples.up), ceiling);
    let down = cut("copy to the host", rate(&samples.down), ceiling);
    let both = cut("both directions at once", rate(&samples.both), &twice);
    let driver_up = cut("the driver's copy from pageable memory", rate(&samples.driver_up), ceiling);
    let driver_down = cut("the driver's copy to pageable memory", rate(&samples.driver_down), ceiling);
    let best = best(&samples.staged);
    let staged_up = cut("copy from pageable memory", best.and_then(|staged| rate(&staged.up)), ceiling);
    let staged_down = cut("copy to pageable memory", best.and_then(|staged| rate(&staged.down)), ceiling);
    let scaling = |(threads, samples): &(usize, Vec<Sample>)| {
        let gbs = cut("copy on the host", rate(samples), &host)?;
        Some(Scaling { threads: (*threads).max(1), gbs })
    };
    let memcpy = samples.memcpy.iter().filter_map(scaling).collect();
    let latency = |seconds: &[f64]| median(seconds.iter().copied()).map(|seconds| seconds.min(LONGEST_LATENCY));
    let tuning = Tuning {
        chunk: best.map_or(built_in.chunk, |staged| staged.chunk.clamp(*CHUNKS.start(), *CHUNKS.end())),
        threads: best.map_or(built_in.threads, |staged| staged.threads.clamp(*THREADS.start(), *THREADS.end())),
        busy_threads: built_in.busy_threads,
        crossover_up: crossover(&samples.contest_up).unwrap_or(built_in.crossover_up),
        crossover_down: crossover(&samples.contest_down).unwrap_or(built_in.crossover_down),
    };
    let (latency_up, latency_down) = (latency(&samples.latency_up), latency(&samples.latency_down));
    Evaluated {
        up,
        down,
        both,
        small: latency(&samples.small),
        latency_up,
        latency_down,
        driver_up,
        driver_down,
        memcpy,
        staged_up,
        staged_down,
        tuning,
        notes,
    }
}

/// The settings under which a byte there and back takes least time; of those that are nearly as good, the fewest threads,
/// then the smallest pieces: they leave more of the machine to others.
fn best(all: &[Staged]) -> Option<&Staged> {
    let round_trip = |staged: &Staged| positive(1.0 / (1.0 / rate(&staged.up)? + 1.0 / rate(&staged.down)?));
    let rated = all.iter().filter_map(|staged| Some((staged, round_trip(staged)?)));
    let most = rated.clone().map(|(_, gbs)| gbs).reduce(f64::max)?;
    rated
        .filter(|(_, gbs)| *gbs >= most * GOOD_ENOUGH)
        .min_by_key(|(staged, _)| (staged.threads, staged.chunk))
        .map(|(staged, _)| staged)
}

/// The size from which on our way is taken: where the sum over all sizes of what a wrong choice costs, as a share of the
/// better time, is least. So one odd sample does not move it far. `usize::MAX` where the driver's way always is as good.
fn crossover(contests: &[Contest]) -> Option<usize> {
    let known = contests.iter().filter_map(|contest| {
        let (alone, together) = (median(contest.alone.iter().copied())?, median(contest.together.iter().copied())?);
        // Above zero: one thread loses.
        positive(alone / together).map(|ratio| (contest.bytes, ratio.ln()))
    });
    // One thread for all sizes costs nothing yet; each size that several do instead adds what that costs or gains.
    let mut sizes: Vec<(usize, f64)> = known.collect();
    sizes.sort_by_key(|(bytes, _)| *bytes);
    if sizes.is_empty() {
        return None;
    }
    let (mut cost, mut least, mut at) = (0.0, -1e-9, usize::MAX);
    for (bytes, gain) in sizes.into_iter().rev() {
        cost -= gain;
        if cost < least {
            (least, at) = (cost, bytes);
        }
    }
    Some(at)
}
