//! What is measured, in which order, and for how long.
#![deny(unsafe_code)]

use std::time::{Duration, Instant};

use super::evaluate::{Contest, Sample, Samples, Staged};
use crate::device::Device;
use crate::driver::Way;
use crate::driver::measure::{PIECE, Rig, Sizes};
use crate::error::Result;
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

/// Pieces and threads that staging is tried with, as far as the machine has the CPUs.
const PIECES: [usize; 3] = [2 * MIB, MIB, 4 * MIB];
const THREADS: [usize; 6] = [1, 2, 4, 8, 12, 16];

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
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let platform = device.platform();
    let free = device.memory();
    let small = free.free_bytes < 4 << 30 || free.host_available.is_some_and(|bytes| bytes < 8 << 30);
    let most = cores.min(16);
    let sizes = if small {
        Sizes { pinned: 16 * MIB, copied: 16 * MIB }
    } else {
        Sizes { pinned: (2 * most * 4 * MIB).clamp(64 * MIB, 96 * MIB), copied: 128 * MIB }
    };
    // Where host and device share page tables or memory, allocating locks no pages either, and registering may be slow.
    let register =
        platform.capabilities().can_register && matches!(platform.model(), MemoryModel::Discrete | MemoryModel::Hmm);
    let rig = Rig::new(device.context(), sizes, register)?;
    let mut samples = Samples::default();
    let session = Session { device, rig: &rig, start };
    session.link(&mut samples)?;
    session.memcpy(&mut samples, most)?;
    session.by_driver(&mut samples)?;
    if platform.model() == MemoryModel::Coherent {
        samples.notes.push("ordinary memory is copied the driver's way: the device reads it over the link".into());
    } else {
        session.staged(&mut samples, most)?;
        session.contests(&mut samples)?;
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
        let small = |way| repeated(17, || Ok(self.rig.link(way, 4 * KIB, 1)?));
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
            *to = repeated(3, || Ok(Sample { bytes: BY_DRIVER, seconds: self.rig.by_driver(way, BY_DRIVER)?.0 }))?;
        }
        Ok(())
    }

    /// Threads first, with pieces of one size; then the other sizes with the best number of threads.
    fn staged(&self, samples: &mut Samples, most: usize) -> Result<()> {
        let mut threads: Vec<usize> = THREADS.into_iter().filter(|threads| *threads <= most).collect();
        if !threads.contains(&most) {
            threads.push(most);
        }
        let [first, others @ ..] = PIECES;
        for threads in threads {
            self.staged_with(samples, first, threads)?;
        }
        let total = |staged: &Staged| {
            let least = |all: &[Sample]| all.iter().map(|s| s.seconds / s.bytes as f64).fold(f64::INFINITY, f64::min);
            least(&staged.up) + least(&staged.down)
        };
        let best = samples.staged.iter().min_by(|a, b| total(a).total_cmp(&total(b))).map(|staged| staged.threads);
        for chunk in others {
            if let Some(threads) = best {
                self.staged_with(samples, chunk, threads)?;
            }
        }
        Ok(())
    }

    fn staged_with(&self, samples: &mut Samples, chunk: usize, threads: usize) -> Result<()> {
        if !self.rig.fits(chunk, threads)
            || self.is_over(&format!("staging by {threads} threads, {chunk} bytes"), &mut samples.notes)
        {
            return Ok(());
        }
        // So many that filling and emptying the slots does not count.
        let bytes = (32 * MIB * threads.min(8)).max(16 * chunk * threads);
        let sample = |way| Ok(Sample { bytes, seconds: self.rig.staged(way, chunk, threads, bytes)?.as_secs_f64() });
        let (up, down) = (repeated(2, || sample(Way::Up))?, repeated(2, || sample(Way::Down))?);
        samples.staged.push(Staged { chunk, threads, up, down });
        Ok(())
    }

    fn contests(&self, samples: &mut Samples) -> Result<()> {
        for (way, to) in [(Way::Up, &mut samples.contest_up), (Way::Down, &mut samples.contest_down)] {
            // Our way allocates its slots on the first use.
            self.rig.by_engine(self.device, way, MIB)?;
            for bytes in CONTESTS {
                if self.is_over(&format!("which way is faster at {bytes} bytes"), &mut samples.notes) {
                    return Ok(());
                }
                let mut contest = Contest { bytes, driver: Vec::new(), staged: Vec::new() };
                for _ in 0..5 {
                    contest.driver.push(self.rig.by_driver(way, bytes)?.1.as_secs_f64());
                    contest.staged.push(self.rig.by_engine(self.device, way, bytes)?.as_secs_f64());
                }
                to.push(contest);
            }
        }
        Ok(())
    }

    fn memcpy(&self, samples: &mut Samples, most: usize) -> Result<()> {
        for threads in THREADS.into_iter().filter(|threads| *threads <= most) {
            if self.is_over(&format!("copying on the host by {threads} threads"), &mut samples.notes) {
                return Ok(());
            }
            let pieces = if threads == 1 { 16 } else { 8 };
            let bytes = threads * pieces * PIECE;
            let one = || Ok(Sample { bytes, seconds: self.rig.memcpy(threads, pieces)?.as_secs_f64() });
            samples.memcpy.push((threads, repeated(2, one)?));
        }
        Ok(())
    }
}
