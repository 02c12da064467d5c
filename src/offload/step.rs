//! How long a step takes that computes while bytes travel.

/// What a step is held up by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Bound {
    /// Computing.
    Compute,
    /// The link between host and device.
    Link,
    /// The device's own memory, with what comes and goes over the link.
    Memory,
}

/// The parts of a step, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct StepTime {
    /// Computing alone.
    pub compute: f64,
    /// What the link needs for all that moves, both ways at once.
    pub link: f64,
    /// The same one way after the other.
    pub link_serial: f64,
    /// Computing, with activations going out no later than they are made, and back while they are needed.
    pub phases: f64,
    /// What the device's memory needs for the step's own traffic and all that moves.
    pub memory: f64,
}

impl StepTime {
    /// A step that computes for so long and moves bytes for so long.
    pub fn new(compute: f64, link: f64) -> Self {
        Self { compute, link, link_serial: link, phases: compute, memory: 0.0 }
    }

    /// One after the other.
    pub fn serial(&self) -> f64 {
        self.compute.max(self.memory) + self.link_serial
    }

    /// As much as possible at once: the longest part. No step is shorter.
    pub fn overlapped(&self) -> f64 {
        self.compute.max(self.link).max(self.phases).max(self.memory)
    }

    /// The longest part.
    pub fn bound(&self) -> Bound {
        let link = self.link.max(self.phases);
        if link > self.compute.max(self.memory) {
            Bound::Link
        } else if self.memory > self.compute {
            Bound::Memory
        } else {
            Bound::Compute
        }
    }
}
