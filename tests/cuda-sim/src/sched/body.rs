//! What a step does.

#![deny(unsafe_code)]

use super::step::Step;
use super::track::Access;
use crate::memory::Span;
use crate::status::Status;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The work of a step.
#[derive(Debug)]
pub(crate) enum Body {
    /// Nothing: an event record, a wait, a join.
    Nop,
    /// Holds its stream until it is opened.
    Gate,
    /// Faults its context.
    Fault(Status),
    Copy(CopyJob),
    Fill(FillJob),
    Kernel(Box<crate::launch::KernelJob>),
    /// A host function.
    Host(HostJob),
    /// Writes a word.
    WriteValue(ValueJob),
    /// Waits until a word has a value.
    WaitValue(ValueJob, Compare),
    /// The end of a stream-ordered allocation.
    Free(FreeJob),
}

/// Who carries a step out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// The scheduler itself, at once.
    Inline,
    /// Any thread.
    Thread,
    /// A copy engine: one step at a time.
    Engine(usize),
}

/// A step before it is submitted.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) what: &'static str,
    pub(crate) body: Body,
    pub(crate) lane: Lane,
    pub(crate) accesses: Vec<Access>,
    /// Allocations that must be alive when it runs.
    pub(crate) uses: Vec<u64>,
    /// What it touches is known only when it has run.
    pub(crate) opens: bool,
    /// Steps it comes after, beside the order of its stream.
    pub(crate) after: Vec<Arc<Step>>,
    pub(crate) duration_ns: u64,
    pub(crate) latency_ns: u64,
    /// Bytes it moves over the link.
    pub(crate) link_bytes: u64,
}

impl Work {
    pub(crate) fn new(what: &'static str, body: Body, lane: Lane) -> Self {
        Self {
            what,
            body,
            lane,
            accesses: Vec::new(),
            uses: Vec::new(),
            opens: false,
            after: Vec::new(),
            duration_ns: 0,
            latency_ns: 0,
            link_bytes: 0,
        }
    }
}

/// Where the bytes of a copy come from.
#[derive(Debug)]
pub(crate) enum Source {
    Span(Span),
    /// Read when the copy was submitted.
    Staged(Vec<u8>),
}

/// Which counter a copy adds to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tally {
    H2dPinned,
    H2dPageable,
    D2hPinned,
    D2hPageable,
    D2d,
    None,
}

/// A copy of `height` rows of `width` bytes.
#[derive(Debug)]
pub(crate) struct CopyJob {
    pub(crate) dst: Span,
    pub(crate) src: Source,
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) dst_pitch: u64,
    pub(crate) src_pitch: u64,
    pub(crate) tally: Tally,
    /// A peer copy that a test wants to go nowhere.
    pub(crate) lost: bool,
}

impl CopyJob {
    pub(crate) fn touches_pageable(&self) -> bool {
        let source = matches!(&self.src, Source::Span(span) if span.is_pageable());
        source || self.dst.is_pageable()
    }
}

/// A fill of `height` rows of `width` elements.
#[derive(Debug)]
pub(crate) struct FillJob {
    pub(crate) dst: Span,
    pub(crate) value: u32,
    /// Bytes of an element: 1, 2 or 4.
    pub(crate) element: u64,
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) pitch: u64,
}

/// A host function and its argument.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostJob {
    pub(crate) function: HostFn,
    pub(crate) data: u64,
}

/// The two signatures of host functions.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HostFn {
    /// `cuLaunchHostFunc`.
    Plain(unsafe extern "C" fn(*mut std::ffi::c_void)),
    /// `cuStreamAddCallback`: stream handle, status, data.
    Callback(unsafe extern "C" fn(*mut std::ffi::c_void, u32, *mut std::ffi::c_void), u64),
}

/// A word in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ValueJob {
    pub(crate) span: Span,
    pub(crate) value: u64,
    pub(crate) wide: bool,
}

/// When a wait for a value ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compare {
    /// The word is at least the value, cyclically.
    Geq,
    Eq,
    And,
    Nor,
}

/// A stream-ordered free.
#[derive(Debug, Clone)]
pub(crate) struct FreeJob {
    pub(crate) alloc: u64,
    pub(crate) stream: u64,
    pub(crate) device: usize,
    pub(crate) len: u64,
    pub(crate) block: crate::memory::Block,
    pub(crate) poison: bool,
    /// The block was already handed to a later allocation on the same stream.
    pub(crate) reused: Arc<AtomicBool>,
}
