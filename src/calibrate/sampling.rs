//! What is measured, in which order, and for how long.
#![deny(unsafe_code)]

use std::time::{Duration, Instant};

use super::evaluate::{Contest, Sample, Samples, Staged};
use crate::copy::STAGED_PIECE;
use crate::copy::workers::Workers;
use crate::device::Device;
use crate::driver::Way;
use crate::driver::measure::{Rig, Sizes};
use crate::error::Result;
use crate::plan::Tuning;
use crate::plan::tuning::MOST_THREADS;
use crate::platform::MemoryModel;

/// Nothing more is begun after this long. What was left out is said, and its built-in value stays.
const ENOUGH: Duration = Duration::from_millis(420);

/// The link and the clocks wake up under load: copies go on for at least the first, until their rate does not change, and at
/// most for the second.
const WARM: std::ops::RangeInclusive<Duration> = Duration::from_millis(20)..=Duration::from_millis(150);

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// A timed copy over the link is as large as fits a time, within these bounds.
const LINK: std::ops::RangeInclusive<usize> = 256 * KIB..=32 * MIB;
const LINK_TIME: f64 = 1e-3;

/// Pieces that staging is tried with, in bytes. It has slots for no larger ones.
const PIECES: [usize; 3] = [2 * MIB, 4 * MIB, STAGED_PIECE];

/// Copies that the driver's way and ours are compared at.
const CONTESTS: [usize; 9] = [32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB];

/// How large a pageable copy the driver is timed with.
const BY_DRIVER: usize = 16 * MIB;

/// Measures the device. The link first, which is what a calibration can not do without; the rest while there is time.
///
/// # Errors
/// A driver call was refused, or there is no room.
pub(super) fn measure(device: &Device) -> Result<Samples> {
    let start = Instant::now();
    let cores = Workers::get().limit();
    let platform = device.platform();
    let free = device.memory();
    let small = free.free_bytes < 4 << 30 || free.host_available.is_some_and(|bytes| bytes < 8 << 30);
    let sizes = if small {
        Sizes { pinned: 16 * MIB, copied: 16 * MIB }
    } else {
        Sizes { pinned: 64 * MIB, copied: 256 * MIB }
    };
    let rig = Rig::new(device.context(), sizes, device.placement())?;
    let mut samples = Samples::default();
    let session = Session { device, rig: &rig, start };
    session.link(&mut samples)?;
    session.memcpy(&mut samples, cores)?;
    session.by_driver(&mut samples)?;
    if platform.model() == MemoryModel::Coherent {
        samples.notes.push("ordinary memory is copied the driver's way: the device reads it over the link".into());
    } else {
        let best = session.staged(&mut samples, cores)?;
        session.contests(&mut samples, best)?;
    }
    Ok(samples)
}

struct Session<'a> {
    device: &'a Device,
    rig: &'a Rig,
    start: Instant,
}

fn repeated<T>(times: usize, mut one: impl FnMut() -> Result<T>) -> Result<Vec<T>> {
    (0..times).map(|_| one()).collect()
}

impl Session<'_> {
    /// Whether there is no time for more; then `what` is left out.
    fn is_over(&self, what: &str, notes: &mut Vec<String>) -> bool {
        let over = self.start.elapsed() > ENOUGH;
        if over {
            notes.push(format!("not measured for lack of time: {what}"));
        }
        over
    }

    /// Copies until the rate is stable. How many bytes take about the time that a sample should.
    fn warm(&self, way: Way) -> Result<usize> {
        let (mut bytes, begun) = (MIB, Instant::now());
        let mut rates = [0f64; 4];
        loop {
            let seconds = self.rig.link(way, bytes, 1)?;
            let rate = bytes as f64 / seconds.max(1e-9);
            rates.rotate_left(1);
            rates[3] = rate;
            let fitting = (rate * LINK_TIME) as usize;
            let next = fitting.next_power_of_two().clamp(*LINK.start(), *LINK.end()).min(self.rig.largest());
            let most = rates.iter().copied().fold(0.0, f64::max);
            let stable = bytes == next && rates.iter().all(|rate| *rate >= 0.98 * most);
            bytes = next;
            let elapsed = begun.elapsed();
            // A stable rate on a link that sleeps is not the one to come.
            let awake = || self.device.platform().topology_now().link_is_at_maximum() != Some(false);
            if elapsed >= *WARM.end() || (stable && elapsed >= *WARM.start() && awake()) {
                return Ok(bytes);
            }
        }
    }

    fn link(&self, samples: &mut Samples) -> Result<()> {
        let up = self.warm(Way::Up)?;
        let sample = |way, bytes| Ok(Sample { bytes, seconds: self.rig.link(way, bytes, 1)? });
        samples.up = repeated(5, || sample(Way::Up, up))?;
        samples.down = repeated(5, || sample(Way::Down, up))?;
        // Both are to end at the same time, also where one direction is slower.
        let seconds = |all: &[Sample]| all.iter().map(|sample| sample.seconds).fold(f64::INFINITY, f64::min);
        let ratio = seconds(&samples.up) / seconds(&samples.down);
        let share = |ratio: f64| if ratio.is_finite() { (up as f64 * ratio.clamp(0.1, 1.0)) as usize } else { up };
        let (there, back) = (share(1.0 / ratio), share(ratio));
        let both = || Ok(Sample { bytes: 4 * (there + back), seconds: self.rig.both(there, back, 4)? });
        samples.both = repeated(3, both)?;
        let small = |way| repeated(17, || self.rig.link(way, 4 * KIB, 1));
        samples.small = [small(Way::Up)?, small(Way::Down)?].concat();
        let latency = |way| repeated(33, || Ok(self.rig.latency(way, 4 * KIB)?.as_secs_f64()));
        samples.latency_up = latency(Way::Up)?;
        samples.latency_down = latency(Way::Down)?;
        Ok(())
    }

    fn by_driver(&self, samples: &mut Samples) -> Result<()> {
        for (way, to) in [(Way::Up, &mut samples.driver_up), (Way::Down, &mut samples.driver_down)] {
            if self.is_over("the driver's pageable copies", &mut samples.notes) {
                return Ok(());
            }
            *to = repeated(3, || Ok(Sample { bytes: BY_DRIVER, seconds: self.rig.by_driver(way, BY_DRIVER)? }))?;
        }
        Ok(())
    }

    /// Threads first, with pieces of one size; then the other sizes with the best number of threads. Returns the best of all.
    fn staged(&self, samples: &mut Samples, cores: usize) -> Result<Tuning> {
        let mut best = (f64::INFINITY, self.device.tuning());
        let mut with = |best: &mut (f64, Tuning), chunk: usize, threads: usize| -> Result<()> {
            if self.is_over(&format!("staging by {threads} threads, {} KiB", chunk >> 10), &mut samples.notes) {
                return Ok(());
            }
            // As many for large copies too: that is what is measured.
            let tuning = Tuning { chunk, threads, busy_threads: threads, ..self.device.tuning() };
            let staged = self.staged_with(&tuning)?;
            let least = |all: &[Sample]| all.iter().map(|s| s.seconds / s.bytes as f64).fold(f64::INFINITY, f64::min);
            let seconds = least(&staged.up) + least(&staged.down);
            if seconds < best.0 {
                *best = (seconds, tuning);
            }
            samples.staged.push(staged);
            Ok(())
        };
        let [first, others @ ..] = PIECES;
        for threads in threads(cores) {
            with(&mut best, first, threads)?;
        }
        let threads = best.1.threads;
        for chunk in others {
            with(&mut best, chunk, threads)?;
        }
        Ok(best.1)
    }

    fn staged_with(&self, tuning: &Tuning) -> Result<Staged> {
        // Few threads take long: they get less to do.
        let bytes = self.rig.bytes().min(32 * MIB * tuning.threads);
        let sample =
            |way| Ok(Sample { bytes, seconds: self.rig.staged(self.device, way, bytes, tuning)?.as_secs_f64() });
        // Slots are made when they are first needed.
        sample(Way::Up)?;
        let (up, down) = (repeated(2, || sample(Way::Up))?, repeated(2, || sample(Way::Down))?);
        Ok(Staged { chunk: tuning.chunk, threads: tuning.threads, up, down })
    }

    fn contests(&self, samples: &mut Samples, tuning: Tuning) -> Result<()> {
        for (way, to) in [(Way::Up, &mut samples.contest_up), (Way::Down, &mut samples.contest_down)] {
            for bytes in CONTESTS {
                if self.is_over(&format!("which way is faster at {} KiB", bytes >> 10), &mut samples.notes) {
                    return Ok(());
                }
                let mut contest = Contest { bytes, alone: Vec::new(), together: Vec::new() };
                let with = |crossover| Tuning { crossover_up: crossover, crossover_down: crossover, ..tuning };
                for _ in 0..5 {
                    contest.alone.push(self.rig.staged(self.device, way, bytes, &with(usize::MAX))?.as_secs_f64());
                    contest.together.push(self.rig.staged(self.device, way, bytes, &with(0))?.as_secs_f64());
                }
                to.push(contest);
            }
        }
        Ok(())
    }

    fn memcpy(&self, samples: &mut Samples, cores: usize) -> Result<()> {
        for threads in threads(cores) {
            if self.is_over(&format!("copying on the host by {threads} threads"), &mut samples.notes) {
                return Ok(());
            }
            let one = || {
                let (bytes, taken) = self.rig.memcpy(threads, 32 * MIB * threads)?;
                Ok(Sample { bytes, seconds: taken.as_secs_f64() })
            };
            samples.memcpy.push((threads, repeated(2, one)?));
        }
        Ok(())
    }
}

/// The numbers of threads that are tried on a machine with `cores` CPUs.
fn threads(cores: usize) -> Vec<usize> {
    let most = cores.clamp(1, MOST_THREADS);
    let mut all: Vec<usize> = (0..).map(|power| 1 << power).take_while(|threads| *threads < most).collect();
    all.push(most);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_double_up_to_what_there_is() {
        let all: Vec<_> = [0, 1, 2, 6, 8, 16, 72].map(threads).into();
        let expected: [&[usize]; 7] = [&[1], &[1], &[1, 2], &[1, 2, 4, 6], &[1, 2, 4, 8], &[1, 2, 4, 8], &[1, 2, 4, 8]];
        assert_eq!(all, expected);
    }
}
