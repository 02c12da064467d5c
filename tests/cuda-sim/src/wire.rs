//! What crosses between the halves: the library a program links and the driver it loads. Plain C data, since the two
//! have their own statics and may have their own allocators.

#![deny(unsafe_code)]

use std::ffi::c_void;

/// Equal in both halves if they were built from the same definitions.
pub(crate) const ABI: u64 = fingerprint(include_str!("wire.rs"));

const fn fingerprint(text: &str) -> u64 {
    let bytes = text.as_bytes();
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut at = 0;
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(0x100_0000_01b3);
        at += 1;
    }
    hash
}

/// Receives a piece of text.
pub(crate) type TextSink = extern "C" fn(user: *mut c_void, text: *const u8, len: usize);
/// Receives a call of the log.
pub(crate) type CallSink = extern "C" fn(user: *mut c_void, call: *const RawCall);

/// A text by pointer and length.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawText {
    pub(crate) start: *const u8,
    pub(crate) len: usize,
}

impl RawText {
    pub(crate) fn of(text: &str) -> Self {
        Self { start: text.as_ptr(), len: text.len() }
    }
}

/// A call of the log.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawCall {
    pub(crate) seq: u64,
    pub(crate) name: RawText,
    pub(crate) thread: u64,
    pub(crate) context: u64,
    pub(crate) stream: u64,
    pub(crate) bytes: u64,
    pub(crate) result: u32,
    pub(crate) args: [u64; 4],
}

/// Byte counters.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RawEvidence {
    pub(crate) device_bytes: u64,
    pub(crate) device_bytes_peak: u64,
    pub(crate) pinned_bytes: u64,
    pub(crate) pinned_bytes_peak: u64,
    pub(crate) registered_bytes: u64,
    pub(crate) registered_bytes_peak: u64,
    pub(crate) managed_bytes: u64,
    pub(crate) managed_bytes_peak: u64,
    pub(crate) copied_h2d_pinned: u64,
    pub(crate) copied_h2d_pageable: u64,
    pub(crate) copied_d2h_pinned: u64,
    pub(crate) copied_d2h_pageable: u64,
    pub(crate) copied_d2d: u64,
    pub(crate) kernels: u64,
}

/// Virtual clocks in nanoseconds.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RawClock {
    pub(crate) stream_ns: u64,
    pub(crate) h2d_ns: u64,
    pub(crate) d2h_ns: u64,
    pub(crate) now_ns: u64,
    pub(crate) host_ns: u64,
}

/// What `cusim_set` sets.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Setting {
    Seed,
    FreeWaits,
    Poison,
    Reorder,
    Late,
    CallbacksRun,
    Gone,
    /// A status; 0 heals.
    Sticky,
    HostFree,
    PeerWritesNothing,
    NoPeers,
    ClearFailures,
    ClearCalls,
    ClearMemInfo,
    ClearViolations,
    /// The test is done with the device.
    Retired,
    /// What the driver says its version is, and which functions it has by it.
    DriverVersion,
}

impl Setting {
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        const ALL: [Setting; 17] = [
            Setting::Seed,
            Setting::FreeWaits,
            Setting::Poison,
            Setting::Reorder,
            Setting::Late,
            Setting::CallbacksRun,
            Setting::Gone,
            Setting::Sticky,
            Setting::HostFree,
            Setting::PeerWritesNothing,
            Setting::NoPeers,
            Setting::ClearFailures,
            Setting::ClearCalls,
            Setting::ClearMemInfo,
            Setting::ClearViolations,
            Setting::Retired,
            Setting::DriverVersion,
        ];
        ALL.get(number as usize).copied()
    }
}
