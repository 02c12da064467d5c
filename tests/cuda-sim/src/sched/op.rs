//! Operations as a program asks for them, and the work they become when they are put on a stream.
//!
//! An operation keeps addresses; looking them up happens each time it is put on a stream, so a graph that is launched
//! again meets whatever lives at its addresses then.

#![deny(unsafe_code)]

use super::body::{Body, Compare, CopyJob, FillJob, HostJob, Lane, Source, Tally, ValueJob, Work};
use super::bytes;
use super::track::{Access, Use};
use crate::clock::{self, Route};
use crate::launch::{self, KernelOp};
use crate::memory::{Kind, Span};
use crate::state::State;
use crate::status::{INVALID_VALUE, Res};

/// An operation.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    /// An event record.
    Record,
    /// A wait for what else the step is given to wait for.
    Join,
    Copy(CopyOp),
    Fill(FillOp),
    Kernel(KernelOp),
    Host(HostJob),
    Write {
        addr: u64,
        value: u64,
        wide: bool,
    },
    Wait {
        addr: u64,
        value: u64,
        wide: bool,
        compare: Compare,
    },
}

/// What the caller says an address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Device,
    Host,
    /// To be found out.
    Any,
}

/// One end of a copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct End {
    pub(crate) addr: u64,
    pub(crate) pitch: u64,
    pub(crate) side: Side,
}

/// A copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyOp {
    pub(crate) what: &'static str,
    pub(crate) dst: End,
    pub(crate) src: End,
    pub(crate) width: u64,
    pub(crate) height: u64,
    /// The source may be read at once, as the driver does with small pageable sources.
    pub(crate) stage: bool,
    /// Came with others in one call, and is not the first of them.
    pub(crate) batched: bool,
}

impl CopyOp {
    /// A copy of a single row.
    pub(crate) fn flat(what: &'static str, (dst, to): (u64, Side), (src, from): (u64, Side), len: u64) -> Self {
        Self {
            what,
            dst: End { addr: dst, pitch: len, side: to },
            src: End { addr: src, pitch: len, side: from },
            width: len,
            height: 1,
            stage: true,
            batched: false,
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.width.saturating_mul(self.height)
    }
}

/// A fill.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FillOp {
    pub(crate) addr: u64,
    pub(crate) value: u32,
    pub(crate) element: u64,
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) pitch: u64,
}

/// Work, and whether the call that asked for it returns only when it is done.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) work: Work,
    pub(crate) blocks: bool,
}

/// Pageable sources up to here are read before the call returns, which then does not wait.
const STAGED: u64 = 64 << 10;

/// Looks up an operation's addresses.
pub(crate) fn prepare(st: &mut State, device: usize, op: &Op) -> Res<Prepared> {
    let work = match op {
        Op::Record => Work::new("event record", Body::Nop, Lane::Inline),
        Op::Join => Work::new("event wait", Body::Nop, Lane::Inline),
        Op::Copy(copy) => return prepare_copy(st, device, copy),
        Op::Fill(fill) => prepare_fill(st, device, fill)?,
        Op::Kernel(kernel) => launch::prepare(st, kernel),
        Op::Host(job) => Work::new("host function", Body::Host(*job), Lane::Thread),
        Op::Write { addr, value, wide } => {
            let span = word(st, *addr, *wide)?;
            let body = Body::WriteValue(ValueJob { span, value: *value, wide: *wide });
            Work { uses: vec![span.alloc], ..Work::new("value write", body, Lane::Inline) }
        }
        Op::Wait { addr, value, wide, compare } => {
            let span = word(st, *addr, *wide)?;
            let body = Body::WaitValue(ValueJob { span, value: *value, wide: *wide }, *compare);
            Work { uses: vec![span.alloc], ..Work::new("value wait", body, Lane::Thread) }
        }
    };
    Ok(Prepared { work, blocks: false })
}

fn word(st: &State, addr: u64, wide: bool) -> Res<Span> {
    let len = if wide { 8 } else { 4 };
    if !addr.is_multiple_of(len) {
        return Err(INVALID_VALUE);
    }
    st.memory.span(addr, len).ok().flatten().ok_or(INVALID_VALUE)
}

/// Finds one end of a copy.
fn end(st: &State, device: usize, end: End, width: u64, height: u64) -> Res<Span> {
    let span = height
        .checked_sub(1)
        .and_then(|rows| rows.checked_mul(end.pitch))
        .and_then(|bytes| bytes.checked_add(width))
        .ok_or(INVALID_VALUE)?;
    let dev = st.devices.get(device).ok_or(INVALID_VALUE)?;
    match st.memory.span(end.addr, span).map_err(|()| INVALID_VALUE)? {
        Some(found) => {
            let unreachable = found.kind == Some(Kind::Device) && !dev.profile.behaviour.host_reads_device_memory;
            if end.side == Side::Host && unreachable {
                return Err(INVALID_VALUE);
            }
            Ok(found)
        }
        None => {
            if end.addr == 0 || (end.side == Side::Device && !dev.reads_pageable()) {
                return Err(INVALID_VALUE);
            }
            Ok(Span { alloc: 0, kind: None, engine: end.addr, start: end.addr, len: span, device })
        }
    }
}

fn on_device(span: &Span) -> bool {
    matches!(span.kind, Some(Kind::Device | Kind::Managed))
}

fn prepare_copy(st: &mut State, device: usize, op: &CopyOp) -> Res<Prepared> {
    if op.height > 1 && (op.dst.pitch < op.width || op.src.pitch < op.width) {
        return Err(INVALID_VALUE);
    }
    let dst = end(st, device, op.dst, op.width, op.height)?;
    let src = end(st, device, op.src, op.width, op.height)?;
    let bytes = op.bytes();
    let dev = st.device(device)?;
    let (route, tally, lane) = match (on_device(&src), on_device(&dst)) {
        (false, true) => {
            let pageable = src.is_pageable();
            let tally = if pageable { Tally::H2dPageable } else { Tally::H2dPinned };
            (Route::HostToDevice { pageable }, tally, Lane::Engine(dev.engine(true)))
        }
        (true, false) => {
            let pageable = dst.is_pageable();
            let tally = if pageable { Tally::D2hPageable } else { Tally::D2hPinned };
            (Route::DeviceToHost { pageable }, tally, Lane::Engine(dev.engine(false)))
        }
        (true, true) if src.device != dst.device => (Route::Peer, Tally::D2d, Lane::Engine(dev.engine(false))),
        (true, true) => (Route::OnDevice, Tally::D2d, Lane::Thread),
        (false, false) => (Route::OnHost, Tally::None, Lane::Thread),
    };
    let apart = op.height > 1 && (op.dst.pitch != op.width || op.src.pitch != op.width);
    let rows = if apart { op.height } else { 1 };
    let duration_ns = clock::copy_ns(dev, route, bytes, rows, op.batched);
    let latency_ns = clock::latency_ns(dev);
    let lost = route == Route::Peer && dev.hostility.peer_writes_nothing;
    let small = op.stage && src.is_pageable() && on_device(&dst) && op.height == 1 && bytes <= STAGED;
    let (source, mut accesses) = if small {
        (Source::Staged(bytes::stage(src.engine, bytes)?), Vec::new())
    } else {
        (Source::Span(src), accesses(&src, op.src.pitch, op.width, op.height, Use::Read))
    };
    accesses.extend(self::accesses(&dst, op.dst.pitch, op.width, op.height, Use::Write));
    let blocks = !small && (src.is_pageable() || dst.is_pageable());
    let body = Body::Copy(CopyJob {
        dst,
        src: source,
        width: op.width,
        height: op.height,
        dst_pitch: op.dst.pitch,
        src_pitch: op.src.pitch,
        tally,
        lost,
    });
    let uses = [src.alloc, dst.alloc].into_iter().filter(|alloc| *alloc != 0).collect();
    let link_bytes = if matches!(lane, Lane::Engine(_)) { bytes } else { 0 };
    let work = Work { accesses, uses, duration_ns, latency_ns, link_bytes, ..Work::new(op.what, body, lane) };
    Ok(Prepared { work, blocks })
}

fn prepare_fill(st: &mut State, device: usize, op: &FillOp) -> Res<Work> {
    let width = op.width.checked_mul(op.element).ok_or(INVALID_VALUE)?;
    if op.height > 1 && op.pitch < width || !op.addr.is_multiple_of(op.element) {
        return Err(INVALID_VALUE);
    }
    let to = End { addr: op.addr, pitch: op.pitch, side: Side::Device };
    let dst = end(st, device, to, width, op.height)?;
    let dev = st.device(device)?;
    let duration_ns = clock::kernel_ns(dev, width.saturating_mul(op.height), 0);
    let body = Body::Fill(FillJob {
        dst,
        value: op.value,
        element: op.element,
        width: op.width,
        height: op.height,
        pitch: op.pitch,
    });
    let accesses = accesses(&dst, op.pitch, width, op.height, Use::Write);
    let uses = if dst.alloc == 0 { Vec::new() } else { vec![dst.alloc] };
    Ok(Work { accesses, uses, duration_ns, ..Work::new("memset", body, Lane::Thread) })
}

/// The uses of a rectangle. Rows apart from each other are noted one by one if they are few; many are not tracked.
fn accesses(span: &Span, pitch: u64, width: u64, height: u64, how: Use) -> Vec<Access> {
    const ROWS: u64 = 64;
    let mut list = Vec::new();
    let (key, base) = place(span);
    if height <= 1 || pitch == width {
        list.push(Access { key, start: base, end: base + width * height, how });
    } else if height <= ROWS {
        list.extend((0..height).map(|row| {
            let start = base + row * pitch;
            Access { key, start, end: start + width, how }
        }));
    }
    if span.alloc != 0 && (key == 0 || list.is_empty()) {
        list.push(Access { key: span.alloc, start: span.start, end: span.start + span.len, how: Use::Mention });
    }
    list
}

/// What the tracker knows a span by: its allocation, or plain addresses for the program's own memory.
pub(crate) fn place(span: &Span) -> (u64, u64) {
    if span.is_foreign() { (0, span.engine) } else { (span.alloc, span.start) }
}
