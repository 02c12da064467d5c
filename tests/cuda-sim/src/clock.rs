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

/// How long a copy takes its engine.
pub(crate) fn copy_ns(dev: &Device, route: Route, bytes: u64) -> u64 {
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
    issue_ns(dev) + at_rate(bytes, rate)
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

/// Takes an engine from `ready` on for `duration`, and returns when the step ends.
///
/// While the other direction's engine is taken too, both share what the link carries in total.
pub(crate) fn occupy(dev: &mut Device, index: usize, ready: u64, duration: u64) -> u64 {
    let Some(engine) = dev.engines.get(index) else { return ready + duration };
    let start = engine.clock_ns.max(ready);
    let mut end = start + duration;
    let speed = &dev.profile.bandwidth;
    if let Some(total) = speed.bidirectional_total
        && duration > 0
    {
        let other = dev.engines.iter().enumerate().filter(|(at, _)| *at != index && *at < 2);
        let busy_until = other.map(|(_, engine)| engine.clock_ns).max().unwrap_or(0);
        let alone = if index == 0 { speed.h2d_pinned } else { speed.d2h_pinned };
        let slow = (alone / (total / 2.0)).max(1.0);
        let shared = busy_until.saturating_sub(start);
        let stretched = (duration as f64 * slow) as u64;
        end = if shared >= stretched {
            start + stretched
        } else {
            start + shared + duration.saturating_sub((shared as f64 / slow) as u64)
        };
    }
    if let Some(engine) = dev.engines.get_mut(index) {
        engine.clock_ns = end;
    }
    end
}
