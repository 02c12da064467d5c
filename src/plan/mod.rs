//! From a request, a platform and its memory to a decision with reasons. Pure: no driver, no clock, no files.
//!
//! For every way to hand the bytes over the cost model estimates the time: the copy, the GPU's first touch at the
//! bandwidth of where the bytes live, and further touches there or in the GPU's L2. Which ways are candidates by default
//! depends on the memory model. The least time wins; within 15 % of it, the candidate that duplicates least.
#![deny(unsafe_code)]

use std::fmt;

use crate::error::{Error, Kind, Result};
use crate::platform::{MemoryFigures, Platform};

mod cost;
pub(crate) mod figures;
pub(crate) mod kinds;
#[cfg(test)]
mod tests;
pub(crate) mod tuning;

pub use figures::{ByMemory, Figures, Rate};
pub use kinds::{Access, Backing, Direction, HostMemory, Strategy};
pub use tuning::Tuning;

use cost::{Candidate, Standing};

/// A candidate this much slower than the fastest is taken if it duplicates less.
const TOLERANCE: f64 = 1.15;

/// What is handed over, and how it will be touched.
///
/// ```
/// use transfer_tensor::{Access, Direction, Request};
/// let request = Request::new(8 << 20).direction(Direction::HostToDevice).access(Access::reuse(8)?);
/// assert_eq!(request.access.touches(), 8);
/// # Ok::<(), transfer_tensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Request {
    /// How many bytes.
    pub bytes: u64,
    /// Who produces them and who uses them.
    pub direction: Direction,
    /// How often the GPU touches each.
    pub access: Access,
    /// What holds them on the host side.
    pub host: HostMemory,
    /// The caller's choice of strategy; it beats the platform's.
    pub strategy: Option<Strategy>,
    /// The caller's choice of backing.
    pub backing: Option<Backing>,
}

impl Request {
    /// `bytes` from host to device, touched once, in memory that the plan chooses.
    pub fn new(bytes: u64) -> Self {
        Self { bytes, ..Self::default() }
    }

    /// Sets the direction.
    #[must_use]
    pub fn direction(mut self, direction: Direction) -> Self {
        self.direction = direction;
        self
    }

    /// Sets how often the GPU touches every byte.
    #[must_use]
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Says what the bytes live in.
    #[must_use]
    pub fn host(mut self, host: HostMemory) -> Self {
        self.host = host;
        self
    }

    /// Forces a strategy; `None` leaves it to the plan.
    #[must_use]
    pub fn strategy(mut self, strategy: impl Into<Option<Strategy>>) -> Self {
        self.strategy = strategy.into();
        self
    }

    /// Forces a backing; `None` leaves it to the plan.
    #[must_use]
    pub fn backing(mut self, backing: impl Into<Option<Backing>>) -> Self {
        self.backing = backing.into();
        self
    }
}

/// What one way of handing the bytes over would cost.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Estimate {
    /// How.
    pub strategy: Strategy,
    /// In which memory.
    pub backing: Backing,
    /// Estimated time, also where the way is not allowed. Always finite.
    pub seconds: f64,
    /// Bytes that would exist twice.
    pub duplicated_bytes: u64,
    /// It took part in the choice.
    pub allowed: bool,
    /// Why it did or did not.
    pub why: String,
}

/// How the bytes are handed over, and why.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Decision {
    /// How.
    pub strategy: Strategy,
    /// In which memory the GPU uses the bytes.
    pub backing: Backing,
    /// Size of the pieces a copy is cut into; 0 where nothing is cut.
    pub chunk_bytes: u64,
    /// Why, in sentences.
    pub reasons: Vec<String>,
    /// Every way that was considered, the chosen one included.
    pub estimates: Vec<Estimate>,
}

impl Decision {
    /// Nothing to decide: there is no device.
    pub(crate) fn host_only() -> Self {
        let (strategy, backing) = (Strategy::Host, Backing::Pageable);
        Self { strategy, backing, chunk_bytes: 0, reasons: Vec::new(), estimates: Vec::new() }
    }

    /// The estimate of the chosen way.
    pub fn chosen(&self) -> Option<&Estimate> {
        self.estimates.iter().find(|estimate| (estimate.strategy, estimate.backing) == (self.strategy, self.backing))
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.strategy, self.backing)?;
        if self.chunk_bytes > 0 {
            write!(f, ", in pieces of {} bytes", self.chunk_bytes)?;
        }
        for reason in &self.reasons {
            write!(f, "\n  - {reason}")?;
        }
        Ok(())
    }
}

/// Plans `request` on `platform` with the memory that is free now.
///
/// # Errors
/// A forced strategy or backing that the machine does not have, a platform whose override could not be understood, or
/// bytes that fit nowhere. The error names the reason.
pub fn plan(platform: &Platform, memory: &MemoryFigures, request: &Request) -> Result<Decision> {
    if (request.host, request.direction) == (HostMemory::ReadOnly, Direction::DeviceToHost) {
        return Err(Error::unsupported("a transfer from device to host", "the host memory may only be read"));
    }
    let (forced, origin) = match request.strategy {
        Some(strategy) => (Some(strategy), ""),
        None => platform.forced_strategy()?,
    };
    let candidates = cost::candidates(platform, memory, request);
    let asked = |candidate: &&Candidate| {
        forced.is_none_or(|strategy| strategy == candidate.strategy)
            && request.backing.is_none_or(|backing| backing == candidate.backing)
    };
    // `AskedOnly` ways take part only when their strategy was named.
    let last = if forced.is_some() { Standing::AskedOnly } else { Standing::LastResort };
    let standing = candidates.iter().filter(asked).map(|candidate| candidate.standing).min();
    let Some(standing) = standing.filter(|standing| *standing <= last) else {
        return Err(refusal(request, forced, origin, candidates.iter().filter(asked)));
    };
    let group = |candidate: &&Candidate| asked(candidate) && candidate.standing == standing;
    let least = candidates.iter().filter(group).map(|candidate| candidate.seconds).fold(f64::INFINITY, f64::min);
    let chosen = candidates
        .iter()
        .filter(group)
        .filter(|candidate| candidate.seconds <= least * TOLERANCE)
        // `min_by` keeps the first of equals, so the order of the candidates settles ties.
        .min_by(|a, b| a.duplicated_bytes.cmp(&b.duplicated_bytes).then(a.seconds.total_cmp(&b.seconds)));
    let Some(chosen) = chosen else {
        return Err(refusal(request, forced, origin, candidates.iter().filter(asked)));
    };

    let mut reasons = vec![platform.why_model()];
    match forced {
        Some(strategy) => reasons.push(format!("strategy {strategy} was asked for{origin}")),
        None if standing > Standing::Default => {
            reasons
                .push("none of the ways this kind of machine prefers is possible here; this is the next best".into());
        }
        None => {}
    }
    if let Some(backing) = request.backing {
        reasons.push(format!("backing {backing} was asked for"));
    }
    reasons.push(cost::why_chosen(chosen, least, candidates.iter().filter(group), request));
    reasons.push(format!("figures: {}", platform.figures().source));
    reasons.extend(platform.notes().iter().cloned());
    let (strategy, backing) = (chosen.strategy, chosen.backing);
    let estimates = candidates
        .iter()
        .map(|candidate| Estimate {
            strategy: candidate.strategy,
            backing: candidate.backing,
            seconds: candidate.seconds,
            duplicated_bytes: candidate.duplicated_bytes,
            allowed: group(&candidate),
            why: candidate.why.clone(),
        })
        .collect();
    let chunk_bytes = cost::chunk_bytes(strategy, request);
    if chunk_bytes > 0 {
        reasons.push(format!("copied in pieces of {} MiB", chunk_bytes >> 20));
    }
    Ok(Decision { strategy, backing, chunk_bytes, reasons, estimates })
}

#[cold]
fn refusal<'a>(
    request: &Request,
    forced: Option<Strategy>,
    origin: &str,
    asked: impl Iterator<Item = &'a Candidate> + Clone,
) -> Error {
    let what = match (forced, request.backing) {
        (Some(strategy), Some(backing)) => format!("strategy {strategy}{origin} with backing {backing}"),
        (Some(strategy), None) => format!("strategy {strategy}{origin}"),
        (None, Some(backing)) => format!("backing {backing}"),
        (None, None) => "a transfer".into(),
    };
    if let Some(candidate) = asked.clone().find(|candidate| candidate.standing == Standing::TooBig) {
        let why = match (forced, request.backing) {
            (None, None) => candidate.why.clone(),
            _ => format!("{what}: {}", candidate.why),
        };
        return Error::new(Kind::OutOfMemory { what: "tensor", bytes: request.bytes, why });
    }
    let mut why: Vec<&str> = asked.map(|candidate| candidate.why.as_str()).collect();
    why.dedup();
    if why.is_empty() {
        return Error::unsupported(what, "the two do not go together");
    }
    Error::unsupported(what, why.join("; "))
}
