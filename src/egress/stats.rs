//! What a pool has done, and how it is.
#![deny(unsafe_code)]

use std::time::Duration;

use crate::error::Error;

/// Numbers of an [`EgressPool`](crate::EgressPool) since it was made. Every item that was taken is in exactly one of `in_flight`, `waiting`,
/// `consuming`, `delivered`, `failed` and `cancelled`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct EgressStats {
    /// Items taken.
    pub submitted: u64,
    /// Items whose copy has not run.
    pub in_flight: u64,
    /// Items that are on the host and wait for a worker, or for one before them.
    pub waiting: u64,
    /// Items that a consumer is at.
    pub consuming: u64,
    /// Items that were delivered.
    pub delivered: u64,
    /// Items that ended with an error: of the device, of a consumer that panicked, of a shutdown.
    pub failed: u64,
    /// Items whose tickets were cancelled in time.
    pub cancelled: u64,
    /// Bytes of the items that came to the host; of a [`Chunked`](crate::Chunked) one those that its two chunks have room for.
    pub bytes: u64,
    /// Outputs that take room now: under way, or kept by whoever got them; and their bytes.
    pub kept: u64,
    /// See `kept`.
    pub kept_bytes: u64,
    /// How long all items together took from `submit` until they were on the host, ...
    pub copying_time: Duration,
    /// ... waited for a worker, ...
    pub waiting_time: Duration,
    /// ... and were with consumers.
    pub consuming_time: Duration,
}

/// Whether an [`EgressPool`](crate::EgressPool) works.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EgressHealth {
    /// Threads that run the consumer; they outlive its panics.
    pub workers: usize,
    /// How often the consumer panicked.
    pub panics: u64,
    /// The last error of an item, if there was one.
    pub last_error: Option<Error>,
    /// The device faulted: nothing it had under way comes any more.
    pub faulted: bool,
    /// Nothing is taken any more: the pool was shut down, or stopped at an error.
    pub closed: bool,
}

/// What became of the items that were open when [`EgressPool::shutdown`](crate::EgressPool::shutdown) began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Shutdown {
    /// Items that were delivered.
    pub delivered: u64,
    /// Items that failed, or were cancelled by their tickets.
    pub failed: u64,
    /// Items that were not delivered in time. Their tickets say so; their copies end, and their memory is freed, later.
    pub abandoned: u64,
}
