//! What the copy engine is set to: pieces, threads, and from which size on it is used at all.
#![deny(unsafe_code)]

use crate::copy::STAGED_PIECE;
use crate::platform::MemoryModel;

/// More threads than this do not make staged copies faster: on an H200's link eight fill it, more only disturb each other.
pub(crate) const MOST_THREADS: usize = 8;

/// Below this size the driver's own way of copying pageable memory is taken: it needs no hand-over between threads.
const CROSSOVER: usize = 256 << 10;

/// How copies between pageable host memory and the device are done: built-in values, or what
/// [`Device::calibrate`](crate::Device::calibrate) measured.
///
/// All sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Tuning {
    /// Size of the pieces that pass through pinned memory; at least 1.
    pub chunk: usize,
    /// Threads that copy at once, the caller's included; at least 1.
    pub threads: usize,
    /// Copies to the device of fewer bytes than this go the driver's own way; `usize::MAX`: all do.
    pub crossover_up: usize,
    /// As `crossover_up`, for copies from the device.
    pub crossover_down: usize,
}

impl Tuning {
    /// The built-in values for a machine with `cores` CPUs to run on.
    pub(crate) fn built_in(model: MemoryModel, cores: usize) -> Self {
        // Across a coherent link the device reads ordinary memory itself: a detour would only cost.
        let crossover = if model == MemoryModel::Coherent { usize::MAX } else { CROSSOVER };
        Self {
            chunk: STAGED_PIECE,
            threads: cores.clamp(1, MOST_THREADS),
            crossover_up: crossover,
            crossover_down: crossover,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_follow_the_machine_within_bounds() {
        let threads = |cores| Tuning::built_in(MemoryModel::Discrete, cores).threads;
        assert_eq!([threads(0), threads(1), threads(2), threads(12), threads(200)], [1, 1, 2, 8, 8]);
    }

    #[test]
    fn nothing_is_staged_across_a_coherent_link() {
        assert_eq!(Tuning::built_in(MemoryModel::Coherent, 72).crossover_up, usize::MAX);
        assert_eq!(Tuning::built_in(MemoryModel::Discrete, 16).crossover_down, 256 << 10);
    }
}
