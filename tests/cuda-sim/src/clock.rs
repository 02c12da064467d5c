//! Virtual time: how long a step takes on the modelled machine.

#![deny(unsafe_code)]

use crate::device::Device;

/// What kind of copy it is, as far as its speed goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    HostToDevice { pageable: bool },
    DeviceToHost { pageable: bool },
    OnDevice,
    Peer,
    OnHost,
}

/// The part of a copy's latency during which its engine is taken.
const ISSUE: f64 = 0.3;

/// Nanoseconds for bytes at a rate in GB/s.
pub(crate) fn at_rate(bytes: u64, gbs: f64) -> u64 {
    if gbs <= 0.0 {
        return 0;
    }
    // 1 GB/s is a byte a nanosecond.
    (bytes as f64 / gbs) as u64
}

/// What the engine still has to do for a copy that came with others in one call. Assumed: users report batches of small
/// copies at about half the time of single ones, with the submitter's part in it.
const BATCHED: f64 = 0.25;

/// The least a row takes the engine where the rows of a rectangle lie apart. Assumed, so that rows of a few bytes are
/// hundreds of times slower than one block, as users report.
const ROW_NS: u64 = 32;

/// How long a copy takes its engine. `rows` is 1 where the bytes are one block.
pub(crate) fn copy_ns(dev: &Device, route: Route, bytes: u64, rows: u64, batched: bool) -> u64 {
    let speed = &dev.profile.bandwidth;
    let rate = match route {
        Route::HostToDevice { pageable: false } => speed.h2d_pinned,
        Route::HostToDevice { pageable: true } => speed.h2d_pageable,
        Route::DeviceToHost { pageable: false } => speed.d2h_pinned,
        Route::DeviceToHost { pageable: true } => speed.d2h_pageable,
        Route::OnDevice => speed.dram / 2.0,
        Route::Peer => speed.h2d_pinned.min(speed.d2h_pinned),
        Route::OnHost => speed.cpu_memcpy,
    };
    let issue = issue_ns(dev);
    let issue = if batched { (issue as f64 * BATCHED) as u64 } else { issue };
    let least = if rows > 1 { rows.saturating_mul(ROW_NS) } else { 0 };
    issue + at_rate(bytes, rate).max(least)
}

/// The fixed cost of a copy on its engine.
pub(crate) fn issue_ns(dev: &Device) -> u64 {
    (dev.profile.bandwidth.latency_us * 1000.0 * ISSUE) as u64
}

/// What the host waits beyond the end of a copy.
pub(crate) fn latency_ns(dev: &Device) -> u64 {
    (dev.profile.bandwidth.latency_us * 1000.0 * (1.0 - ISSUE)) as u64
}

/// How long a kernel takes that reads and writes these bytes.
pub(crate) fn kernel_ns(dev: &Device, device_bytes: u64, host_bytes: u64) -> u64 {
    const LAUNCH_NS: u64 = 2000;
    let speed = &dev.profile.bandwidth;
    LAUNCH_NS + at_rate(device_bytes, speed.dram) + at_rate(host_bytes, speed.kernel_read_host)
}

/// A stretch of time in which an engine moves bytes at a rate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stretch {
    from: u64,
    to: u64,
    gbs: f64,
}

/// Takes an engine from `ready` on for a step that lasts `duration` when it has the link to itself, and returns when
/// the step ends.
///
/// Where the other direction's engine moves bytes at the same time, both get a fair share of what the link carries.
/// The other's step may have been accounted for at full speed already: what it had too much of is taken from its
/// engine's time afterwards, so that the sum over both directions is right in whatever order the steps came.
pub(crate) fn occupy(dev: &mut Device, index: usize, ready: u64, duration: u64, bytes: u64) -> u64 {
    let issue = issue_ns(dev).min(duration);
    let total = dev.profile.bandwidth.bidirectional_total;
    let Some(engine) = dev.engines.get(index) else { return ready + duration };
    let start = engine.clock_ns.max(ready) + issue;
    let work = duration - issue;
    let other = 1 - index.min(1);
    let mut mine = Ride::new(start, work, bytes);
    if let (Some(total), true, Some(other)) = (total, index < 2 && bytes > 0, dev.engines.get_mut(other)) {
        // They follow each other in time, so that those of the past are found by halves.
        let mut at = other.stretches.partition_point(|stretch| stretch.to <= mine.now);
        while let Some(stretch) = other.stretches.get(at).copied() {
            at += 1;
            if stretch.to <= mine.now {
                continue;
            }
            mine.run_until(stretch.from, mine.alone);
            if mine.left == 0 {
                break;
            }
            let share = mine.alone.min((total - stretch.gbs).max(total / 2.0));
            let before = mine.now;
            mine.run_until(stretch.to, share);
            // The other moves what is left of the link: the rest of its bytes follow later.
            let excess = stretch.gbs - (total - share);
            if excess > 0.0 {
                let owed = at_rate((excess * (mine.now - before) as f64) as u64, total / 2.0);
                other.stretches.push_back(Stretch {
                    from: other.clock_ns,
                    to: other.clock_ns + owed,
                    gbs: total / 2.0,
                });
                other.clock_ns += owed;
            }
        }
    }
    let end = mine.finish();
    // Only the first two engines, one a direction, share the link.
    let oldest = dev.engines.iter().take(2).map(|engine| engine.clock_ns).min().unwrap_or(0);
    if let Some(engine) = dev.engines.get_mut(index) {
        engine.clock_ns = end;
        let past = engine.stretches.partition_point(|stretch| stretch.to <= oldest);
        engine.stretches.drain(..past);
        engine.stretches.extend(mine.ridden.into_iter().filter(|stretch| stretch.to > stretch.from));
    }
    end
}

/// A step's way over the link.
struct Ride {
    now: u64,
    /// What is left, in nanoseconds at its own full rate.
    left: u64,
    /// Its rate when it is alone.
    alone: f64,
    ridden: Vec<Stretch>,
}

impl Ride {
    fn new(start: u64, work: u64, bytes: u64) -> Self {
        let alone = if work == 0 { 0.0 } else { bytes as f64 / work as f64 };
        Self { now: start, left: work, alone, ridden: Vec::new() }
    }

    /// Goes on at a rate until a time, or its end.
    fn run_until(&mut self, until: u64, rate: f64) {
        if until <= self.now || self.left == 0 || rate <= 0.0 {
            return;
        }
        let need = (self.left as f64 * self.alone / rate) as u64;
        let span = need.min(until - self.now);
        let done = if span == need { self.left } else { (span as f64 * rate / self.alone) as u64 };
        self.ridden.push(Stretch { from: self.now, to: self.now + span, gbs: rate });
        self.now += span;
        self.left -= done.min(self.left);
    }

    /// The end of the step.
    fn finish(&mut self) -> u64 {
        if self.alone > 0.0 {
            self.run_until(u64::MAX, self.alone);
        }
        self.now + std::mem::take(&mut self.left)
    }
}
