//! What a device does to a program that trusts it: failures, faults, delays, gates.

#![deny(unsafe_code)]

use crate::status::Status;
use std::collections::HashMap;
use std::time::Duration;

/// Settings of one device.
#[derive(Debug)]
pub(crate) struct Hostility {
    failures: HashMap<String, Vec<Failure>>,
    /// Every call answers this.
    pub(crate) sticky: Option<Status>,
    /// Every call answers `CUDA_ERROR_DEINITIALIZED`.
    pub(crate) gone: bool,
    /// A free waits for the work that may use the memory.
    pub(crate) free_waits: bool,
    /// Freed memory is filled with poison.
    pub(crate) poison: bool,
    /// Steps start late.
    pub(crate) late: bool,
    /// Steps that are ready are taken in any order, after random delays.
    pub(crate) reorder: bool,
    /// When host functions run.
    pub(crate) callbacks: Callbacks,
    /// What `cuMemGetInfo` answers.
    pub(crate) mem_info: Option<(u64, u64)>,
    /// Copies to and from a peer move nothing.
    pub(crate) peer_writes_nothing: bool,
    /// No peer access with any device.
    pub(crate) no_peers: bool,
    random: u64,
}

impl Default for Hostility {
    fn default() -> Self {
        Self {
            failures: HashMap::new(),
            sticky: None,
            gone: false,
            free_waits: true,
            poison: true,
            late: false,
            reorder: false,
            callbacks: Callbacks::UntilFault,
            mem_info: None,
            peer_writes_nothing: false,
            no_peers: false,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }
}

/// When host functions run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Callbacks {
    /// As on hardware: not after a fault.
    UntilFault,
    Never,
    Always,
}

#[derive(Debug)]
struct Failure {
    /// Calls until it happens; `None` for every call.
    left: Option<u64>,
    status: Status,
    /// The call does its work and then answers the error.
    after: bool,
}

/// A failure that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Injected {
    pub(crate) status: Status,
    pub(crate) after: bool,
}

/// The name of a call without the suffix of its version.
pub(crate) fn plain(name: &str) -> &str {
    let name = name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds")).unwrap_or(name);
    match name.rsplit_once("_v") {
        Some((head, tail)) if !tail.is_empty() && tail.bytes().all(|byte| byte.is_ascii_digit()) => head,
        _ => name,
    }
}

impl Hostility {
    /// The `nth` next call of a name fails (0: every call).
    pub(crate) fn fail(&mut self, call: &str, nth: u64, status: Status, after: bool) {
        let left = (nth > 0).then_some(nth);
        self.failures.entry(plain(call).to_owned()).or_default().push(Failure { left, status, after });
    }

    pub(crate) fn clear_failures(&mut self) {
        self.failures.clear();
    }

    /// The failure of this call, if there is one; counts the call.
    pub(crate) fn injected(&mut self, call: &str) -> Option<Injected> {
        if self.failures.is_empty() {
            return None;
        }
        let list = self.failures.get_mut(plain(call))?;
        let mut hit = None;
        list.retain_mut(|failure| {
            let found = Injected { status: failure.status, after: failure.after };
            match &mut failure.left {
                None => {
                    hit = hit.or(Some(found));
                    true
                }
                Some(1) => {
                    hit = Some(found);
                    false
                }
                Some(left) => {
                    *left -= 1;
                    true
                }
            }
        });
        hit
    }

    /// Seeds the scheduler.
    pub(crate) fn seed(&mut self, seed: u64) {
        self.random = seed ^ 0x9e37_79b9_7f4a_7c15;
    }

    /// A number below `bound`.
    pub(crate) fn random(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound.max(1)
    }

    /// How long the next step is held back.
    pub(crate) fn delay(&mut self) -> Delay {
        let most = match (self.late, self.reorder) {
            (true, _) => 1000,
            (false, true) => 300,
            (false, false) => return Delay::default(),
        };
        let before = Duration::from_micros(self.random(most));
        let after = if self.late { Duration::from_micros(self.random(most)) } else { Duration::ZERO };
        Delay { before, after }
    }
}

/// How long a step waits before it does its work, and before it is said to be done.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Delay {
    pub(crate) before: Duration,
    pub(crate) after: Duration,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_fails_once() {
        let mut hostility = Hostility::default();
        hostility.fail("cuMemAlloc_v2", 2, 2, false);
        assert_eq!(hostility.injected("cuMemAlloc"), None);
        assert_eq!(hostility.injected("cuMemAlloc_v2"), Some(Injected { status: 2, after: false }));
        assert_eq!(hostility.injected("cuMemAlloc_v2"), None);
    }

    #[test]
    fn versions_are_no_part_of_a_name() {
        assert_eq!(plain("cuMemAlloc_v2"), "cuMemAlloc");
        assert_eq!(plain("cuMemcpyHtoDAsync_v2_ptsz"), "cuMemcpyHtoDAsync");
        assert_eq!(plain("cuStreamWaitValue32"), "cuStreamWaitValue32");
    }
}
