//! What a device has seen: calls, bytes, violations, leaks.

#![deny(unsafe_code)]

use crate::memory::Kind;
use crate::state::{State, StreamKind, kind_name};
use std::collections::HashMap;

/// A call that was made.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) seq: u64,
    pub(crate) name: &'static str,
    pub(crate) thread: u64,
    pub(crate) ctx: u64,
    pub(crate) stream: u64,
    pub(crate) bytes: u64,
    pub(crate) result: u32,
    pub(crate) args: [u64; 4],
}

/// Calls kept in the log; older ones only count.
const LOG: usize = 1 << 20;

/// Everything noted about one device.
#[derive(Debug, Default)]
pub(crate) struct Evidence {
    calls: Vec<Call>,
    counts: HashMap<&'static str, u64>,
    pub(crate) resident: HashMap<Kind, Level>,
    pub(crate) copied: Copied,
    pub(crate) kernels: u64,
    pub(crate) violations: Vec<String>,
    /// What was left when a context went.
    pub(crate) leaks: Vec<String>,
}

/// A number of bytes and the most it has been.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Level {
    pub(crate) now: u64,
    pub(crate) peak: u64,
}

/// Bytes that were copied, by kind.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Copied {
    pub(crate) h2d_pinned: u64,
    pub(crate) h2d_pageable: u64,
    pub(crate) d2h_pinned: u64,
    pub(crate) d2h_pageable: u64,
    pub(crate) d2d: u64,
}

impl Evidence {
    pub(crate) fn call(&mut self, call: Call) {
        *self.counts.entry(crate::hostility::plain(call.name)).or_default() += 1;
        if self.calls.len() < LOG {
            self.calls.push(call);
        }
    }

    pub(crate) fn calls(&self) -> &[Call] {
        &self.calls
    }

    pub(crate) fn clear_calls(&mut self) {
        self.calls.clear();
        self.counts.clear();
    }

    pub(crate) fn count(&self, name: &str) -> u64 {
        self.counts.get(crate::hostility::plain(name)).copied().unwrap_or(0)
    }

    pub(crate) fn gained(&mut self, kind: Kind, bytes: u64) {
        let level = self.resident.entry(kind).or_default();
        level.now += bytes;
        level.peak = level.peak.max(level.now);
    }

    pub(crate) fn lost(&mut self, kind: Kind, bytes: u64) {
        let level = self.resident.entry(kind).or_default();
        level.now = level.now.saturating_sub(bytes);
    }

    pub(crate) fn level(&self, kind: Kind) -> Level {
        self.resident.get(&kind).copied().unwrap_or_default()
    }

    /// Notes violations, up to a sensible number.
    pub(crate) fn violate(&mut self, found: impl IntoIterator<Item = String>) {
        for violation in found {
            if self.violations.len() < 1000 {
                self.violations.push(violation);
            }
        }
    }
}

/// What is alive in one context, but for its modules: those end with it, and many programs leave it to that.
pub(crate) fn live(st: &State, ctx: u64) -> Vec<String> {
    let mut found = Vec::new();
    for alloc in st.memory.all().filter(|alloc| alloc.ctx == ctx) {
        let kind = kind_name(alloc.kind);
        found.push(format!("{} bytes of {kind} at {:#x}", alloc.len, alloc.device_base));
    }
    for (handle, stream) in st.streams.iter().filter(|(_, stream)| stream.ctx == ctx) {
        if matches!(stream.kind, StreamKind::Blocking | StreamKind::NonBlocking) {
            found.push(format!("stream {handle:#x}"));
        }
    }
    for (handle, _) in st.events.iter().filter(|(_, event)| event.ctx == ctx) {
        found.push(format!("event {handle:#x}"));
    }
    found.sort();
    found
}

/// What is alive on a device, contexts included.
pub(crate) fn leaks(st: &State, device: usize) -> Vec<String> {
    let mut found = st.devices.get(device).map(|d| d.evidence.leaks.clone()).unwrap_or_default();
    for (handle, _) in st.contexts.iter().filter(|(_, context)| context.device == device) {
        found.push(format!("context {handle:#x}"));
        found.extend(live(st, *handle));
        found.extend(st.modules.live(*handle));
    }
    found
}
