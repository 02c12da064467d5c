//! What the copy engine is set to: pieces, threads, and from which size on it is used at all.
#![deny(unsafe_code)]

use crate::copy::STAGED_PIECE;

/// More threads than this did not make staged copies faster on an H200's link.
pub(crate) const MOST_THREADS: usize = 8;

/// Where the CPU takes longer than the link, more do (`bandwidth --sweep` tries them).
const MOST_BUSY_THREADS: usize = 12;

/// Up to this size one thread copies alone: it needs no hand-over.
const CROSSOVER: usize = 512 << 10;

/// How copies between pageable host memory and the device are done: built-in values, or what
/// [`Device::calibrate`](crate::Device::calibrate) measured.
///
/// All sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Tuning {
    /// Size of the largest blocks that pass through pinned memory; at least 1, at most 8 MiB count, or 4 MiB of memory to the device. Copies below 64 MiB,
    /// and devices whose pool has a budget below 32 MiB, have smaller ones.
    pub chunk: usize,
    /// Threads that copy at once, the caller's included; at least 1, at most as many as the process has CPUs, and 32.
    pub threads: usize,
    /// As `threads`, where the CPU takes longer than the link: for copies to the device from 64 MiB on, files, and memory whose
    /// pages are not there yet.
    pub busy_threads: usize,
    /// Copies to the device of no more bytes than this, and than 8 MiB, are done by the caller's thread alone.
    pub crossover_up: usize,
    /// As `crossover_up`, for copies from the device.
    pub crossover_down: usize,
}

impl Tuning {
    /// The built-in values for a machine with `cores` CPUs to run on.
    pub(crate) fn built_in(cores: usize) -> Self {
        Self {
            chunk: STAGED_PIECE,
            threads: cores.clamp(1, MOST_THREADS),
            busy_threads: cores.clamp(1, MOST_BUSY_THREADS),
            crossover_up: CROSSOVER,
            crossover_down: CROSSOVER,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_follow_the_machine_within_bounds() {
        let threads = |cores| Tuning::built_in(cores).threads;
        assert_eq!([threads(0), threads(1), threads(2), threads(12), threads(200)], [1, 1, 2, 8, 8]);
    }
}
