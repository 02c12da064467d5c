//! Bytes and time: from the driver's evidence on a simulated machine, counted by this program on a real one.

use std::time::{Duration, Instant};

use cuda_sim::{Device as Simulated, Evidence};
use transfer_tensor::{Backing, Strategy, TransferTensor};

/// Bytes that this program's tensors hold.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Holding {
    /// Device memory.
    pub(crate) device: u64,
    /// Host memory that the driver gave or pinned.
    pub(crate) pinned: u64,
    /// Ordinary host memory, which the driver does not see.
    pub(crate) pageable: u64,
}

impl Holding {
    /// What a tensor holds. `on_device`: it was used on the device and not released there.
    pub(crate) fn of(tensor: &TransferTensor<u8>, on_device: bool) -> Self {
        let bytes = tensor.bytes() as u64;
        let mut holding = Self::default();
        match tensor.host_backing() {
            None => {}
            Some(Backing::Pageable) => holding.pageable = bytes,
            Some(_) => holding.pinned = bytes,
        }
        if on_device && tensor.strategy() == Strategy::Streamed {
            holding.device = bytes;
        }
        holding
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            device: self.device + other.device,
            pinned: self.pinned + other.pinned,
            pageable: self.pageable + other.pageable,
        }
    }
}

/// Measures one run on one machine.
#[derive(Debug)]
pub(crate) struct Meter<'m> {
    simulated: Option<&'m Simulated>,
    stream: u64,
    before: Evidence,
    /// Copied so far, by the crate's counters.
    counted: u64,
    /// The driver's peaks at the last sample, by kind of host memory.
    last_peaks: [u64; 3],
    host_peak: u64,
    device_peak: u64,
    pageable_peak: u64,
}

/// A moment, to measure from.
#[derive(Debug)]
pub(crate) struct Mark {
    at: Instant,
    virtual_ns: u64,
    copied: u64,
}

impl<'m> Meter<'m> {
    /// Counts from now on; what detection did before is left out.
    pub(crate) fn new(simulated: Option<&'m Simulated>, stream: u64) -> Self {
        let before = simulated.map(Simulated::evidence).unwrap_or_default();
        let last_peaks = peaks(&before);
        let (counted, host_peak, device_peak, pageable_peak) = (0, 0, 0, 0);
        Self { simulated, stream, before, counted, last_peaks, host_peak, device_peak, pageable_peak }
    }

    /// Now.
    pub(crate) fn mark(&self) -> Mark {
        let virtual_ns = self.simulated.map_or(0, |device| device.clock(self.stream).host_ns);
        Mark { at: Instant::now(), virtual_ns, copied: self.copied() }
    }

    /// Time since `mark`: virtual on a simulated machine.
    pub(crate) fn elapsed(&self, mark: &Mark) -> Duration {
        match self.simulated {
            Some(device) => Duration::from_nanos(device.clock(self.stream).host_ns.saturating_sub(mark.virtual_ns)),
            None => mark.at.elapsed(),
        }
    }

    /// Bytes copied since `mark`.
    pub(crate) fn copied_since(&self, mark: &Mark) -> u64 {
        self.copied() - mark.copied
    }

    /// Tells what a tensor says of its own copies.
    pub(crate) fn count(&mut self, copied: u64) {
        self.counted += copied;
    }

    /// Bytes copied so far.
    pub(crate) fn copied(&self) -> u64 {
        match self.simulated {
            Some(device) => copied(&device.evidence()) - copied(&self.before),
            None => self.counted,
        }
    }

    /// Notes how much is held at this moment, and was at most since the last.
    pub(crate) fn sample(&mut self, holding: Holding) {
        self.pageable_peak = self.pageable_peak.max(holding.pageable);
        let seen_by_driver = match self.simulated {
            None => {
                self.device_peak = self.device_peak.max(holding.device);
                holding.pinned
            }
            Some(device) => {
                let evidence = device.evidence();
                let now = [evidence.pinned_bytes, evidence.registered_bytes, evidence.managed_bytes];
                let last = std::mem::replace(&mut self.last_peaks, peaks(&evidence));
                // A kind whose peak grew had that peak since the last sample.
                let kinds = now.iter().zip(self.last_peaks).zip(last);
                kinds.map(|((now, peak), last)| if peak > last { peak } else { *now }).sum()
            }
        };
        self.host_peak = self.host_peak.max(seen_by_driver + holding.pageable);
    }

    /// Device memory at most.
    pub(crate) fn device_peak(&self) -> u64 {
        self.simulated.map_or(self.device_peak, |device| device.evidence().device_bytes_peak)
    }

    /// Host memory at most: what the driver gave or pinned, and ordinary memory of this program's tensors.
    pub(crate) fn host_peak(&self) -> u64 {
        self.host_peak
    }

    /// Ordinary memory in the host's peak.
    pub(crate) fn pageable_peak(&self) -> u64 {
        self.pageable_peak
    }

    /// What the simulated driver holds against the program: uses of freed memory, unordered accesses.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.simulated.map(Simulated::violations).unwrap_or_default()
    }

    /// Kernels that ran, by the driver's evidence.
    pub(crate) fn kernels(&self) -> Option<u64> {
        self.simulated.map(|device| device.evidence().kernels - self.before.kernels)
    }
}

/// Of host memory: from `cuMemHostAlloc`, registered, managed.
fn peaks(evidence: &Evidence) -> [u64; 3] {
    [evidence.pinned_bytes_peak, evidence.registered_bytes_peak, evidence.managed_bytes_peak]
}

fn copied(evidence: &Evidence) -> u64 {
    evidence.copied_h2d_pinned
        + evidence.copied_h2d_pageable
        + evidence.copied_d2h_pinned
        + evidence.copied_d2h_pageable
        + evidence.copied_d2d
}
