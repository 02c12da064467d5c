//! What carries the bytes, and how much host memory may hold them.

use crate::platform::Platform;

use super::workload::Workload;

/// A part in so many of the device's memory is left to the driver, to buffers that bytes pass through, and to gaps.
pub(super) const RESERVE: u64 = 20;

/// The rates that an advice is made from, 10⁹ bytes a second.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct OffloadLink {
    /// To the device.
    pub up_gbs: f64,
    /// From the device.
    pub down_gbs: f64,
    /// Both ways at once; what the two make together, where that was not measured.
    pub both_gbs: f64,
    /// The device's own memory.
    pub memory_gbs: f64,
    /// Bytes of the device's memory that there are for this.
    pub device_bytes: u64,
    /// CPU and GPU have one memory: there is nowhere to move anything to.
    pub one_memory: bool,
    /// Where the rates come from.
    pub notes: Vec<String>,
    /// What was said and is not possible.
    pub cut: Vec<String>,
}

impl OffloadLink {
    /// The platform's figures (measured ones, where it was calibrated), with what the workload says of the link.
    pub(super) fn of(platform: &Platform, workload: &Workload) -> Self {
        let (figures, ceiling) = (platform.figures(), platform.ceiling());
        let all = platform.total_bytes();
        let (mut notes, mut cut) = (Vec::new(), Vec::new());
        let (up, down) = (figures.host_to_device, figures.device_to_host);
        let (mut up_gbs, mut down_gbs) = (up.gbs, down.gbs);
        let mut both_gbs = platform.calibration().and_then(|found| found.both_ways).unwrap_or(up_gbs + down_gbs);
        if platform.calibration().is_none() {
            let assumed = if up.assumed || down.assumed { ", some of them assumed" } else { "" };
            notes.push(format!("rates of the link are built-in figures{assumed}, not measured on this machine"));
        }
        if let Some(said) = workload.link_gbs {
            let gbs = ceiling.clamp("the link that was said", said, &mut cut);
            (up_gbs, down_gbs, both_gbs) = (gbs, gbs, 2.0 * gbs);
        }
        if let Some(share) = workload.link_share {
            notes.push(format!("{:.0} % of the link are there for this", share * 100.0));
            (up_gbs, down_gbs, both_gbs) = (up_gbs * share, down_gbs * share, both_gbs * share);
        }
        Self {
            up_gbs,
            down_gbs,
            both_gbs,
            memory_gbs: figures.device_memory.gbs,
            device_bytes: workload.device_bytes.unwrap_or(all - all / RESERVE).min(all),
            one_memory: platform.model().is_one_memory(),
            notes,
            cut,
        }
    }

    /// Seconds that bytes up and down take, both at once.
    pub(super) fn seconds(&self, up: f64, down: f64) -> f64 {
        let at = |bytes: f64, gbs: f64| if bytes > 0.0 { bytes / (gbs.max(1e-9) * 1e9) } else { 0.0 };
        at(up, self.up_gbs).max(at(down, self.down_gbs)).max(at(up + down, self.both_gbs))
    }

    pub(super) fn scaled(&self, factor: f64) -> Self {
        Self {
            up_gbs: self.up_gbs * factor,
            down_gbs: self.down_gbs * factor,
            both_gbs: self.both_gbs * factor,
            ..self.clone()
        }
    }
}

/// How many bytes of `wanted` may be page-locked where no more than `cap` are allowed and `reserve` bytes of what the host has
/// `available` are to be left: min(`cap`, `available` − `reserve`), and no more than is wanted. What lies beyond would make the
/// system swap.
pub fn pinned_budget(wanted: u64, cap: u64, available: u64, reserve: u64) -> u64 {
    wanted.min(cap).min(available.saturating_sub(reserve))
}
