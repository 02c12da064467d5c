//! Carrying a step out.

use super::body::{Body, Compare, CopyJob, FillJob, FreeJob, HostFn, HostJob, Source, Tally, ValueJob};
use super::{Done, bytes, complete, fault, pump};
use crate::hostility::Callbacks;
use crate::memory::{Kind, Span, arena};
use crate::state::{self, State};
use crate::status::{ILLEGAL_ADDRESS, Res, SUCCESS, Status};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

/// Runs a step on the calling thread.
pub(crate) fn run(id: u64) {
    let mut guard = state::lock();
    let Some(node) = guard.nodes.get_mut(&id) else { return };
    let Some(body) = node.body.take() else { return };
    let (device, ctx) = (node.step.device, node.step.ctx);
    let uses = std::mem::take(&mut node.uses);
    let delay = guard.devices.get_mut(device).map(|dev| dev.hostility.delay()).unwrap_or_default();
    if !delay.before.is_zero() {
        drop(guard);
        thread::sleep(delay.before);
        guard = state::lock();
    }
    let stopped = guard.nodes.get(&id).and_then(|node| super::stopped(&guard, node));
    if let Some(status) = stopped {
        let callback = matches!(body, Body::Host(..))
            && guard.nodes.get(&id).is_some_and(|node| super::runs_anyway(&guard, device, node));
        if !callback {
            complete(&mut guard, id, Done::failed(status));
            pump(&mut guard);
            return;
        }
    }
    dead(&mut guard, id, device, &uses);
    let never = guard.devices.get(device).is_some_and(|dev| dev.hostility.callbacks == Callbacks::Never);
    let body = if never && matches!(body, Body::Host(..)) { Body::Nop } else { body };
    drop(guard);
    let mut end = perform(id, ctx, device, body);
    if !delay.after.is_zero() {
        thread::sleep(delay.after);
    }
    let mut guard = state::lock();
    if let Err(status) = end.result
        && end.sticky
    {
        fault(&mut guard, ctx, status);
    }
    if let (Some(lost), Some(dev)) = (end.unreachable.take(), guard.devices.get_mut(device)) {
        dev.evidence.violate([lost]);
    }
    if let Some((tally, bytes)) = end.moved {
        count(&mut guard, device, tally, bytes);
    }
    if let Some(job) = &end.freed {
        give_back(&mut guard, job);
    }
    let done = Done { status: end.result.err().unwrap_or(SUCCESS), duration_ns: end.duration_ns };
    complete(&mut guard, id, done);
    pump(&mut guard);
}

/// What came of a step.
struct End {
    result: Res,
    /// An error is a fault of the context.
    sticky: bool,
    moved: Option<(Tally, u64)>,
    duration_ns: Option<u64>,
    freed: Option<FreeJob>,
    /// What a copy of memory that the driver knows could not reach.
    unreachable: Option<String>,
}

impl End {
    fn of(result: Res) -> Self {
        Self { result, sticky: true, moved: None, duration_ns: None, freed: None, unreachable: None }
    }
}

fn perform(id: u64, ctx: u64, device: usize, body: Body) -> End {
    match body {
        Body::Copy(job) => {
            let result = copy(&job);
            let moved = result.is_ok().then_some((job.tally, job.width * job.height));
            // A bad pageable pointer is the error of the call that waits for the copy; anything else is a fault.
            let sticky = !job.touches_pageable();
            let unreachable = (sticky && result.is_err()).then(|| describe(id, &job));
            let result = if sticky { result.map_err(|_| ILLEGAL_ADDRESS) } else { result };
            End { sticky, moved, unreachable, ..End::of(result) }
        }
        Body::Fill(job) => End::of(fill(&job)),
        Body::Kernel(job) => {
            let ran = crate::launch::run(id, ctx, device, *job);
            End { duration_ns: Some(ran.duration_ns), ..End::of(ran.result) }
        }
        Body::Host(job) => {
            call_host(job, SUCCESS);
            End::of(Ok(()))
        }
        Body::WaitValue(job, compare) => End::of(wait_value(ctx, id, job, compare)),
        Body::Free(job) => {
            if job.poison {
                arena::poison(job.block.alias, job.len);
            }
            End { freed: Some(job), ..End::of(Ok(())) }
        }
        Body::Nop | Body::Gate | Body::Fault(_) | Body::WriteValue(_) => End::of(Ok(())),
    }
}

/// Does a step that moves no bulk of bytes, with the lock held. `None`: it is not done yet.
pub(crate) fn inline(st: &mut State, id: u64, body: Body) -> Option<Done> {
    match body {
        Body::Gate => {
            if let Some(node) = st.nodes.get_mut(&id) {
                node.running = true;
            }
            None
        }
        Body::Fault(status) => {
            let ctx = st.nodes.get(&id).map_or(0, |node| node.step.ctx);
            fault(st, ctx, status);
            Some(Done::failed(status))
        }
        Body::WriteValue(ValueJob { span, value, wide }) => {
            bytes::write_word(span.engine, value, wide);
            Some(Done::OK)
        }
        _ => Some(Done::OK),
    }
}

/// The block of a stream-ordered free may be handed out again, if its own stream has not done so already.
fn give_back(st: &mut State, job: &FreeJob) {
    st.memory.bury(job.alloc);
    st.tracker.forget(job.alloc);
    if let Some(stream) = st.streams.get_mut(&job.stream) {
        stream.freed.retain(|other| !Arc::ptr_eq(&other.reused, &job.reused));
    }
    if !job.reused.load(Ordering::Relaxed) {
        crate::alloc::give_back(st, job.device, Kind::Device, job.block);
    }
}

/// Notes uses of allocations that are no more.
fn dead(st: &mut State, id: u64, device: usize, uses: &[u64]) {
    let gone: Vec<u64> = uses.iter().copied().filter(|alloc| !st.memory.is_known(*alloc)).collect();
    if gone.is_empty() {
        return;
    }
    let Some(node) = st.nodes.get(&id) else { return };
    let (what, stream) = (node.step.what, node.step.stream);
    let found = gone.into_iter().map(|alloc| {
        format!("use after free: {what} (step {id} on stream {stream:#x}) runs on freed allocation {alloc}")
    });
    let found: Vec<String> = found.collect();
    if let Some(dev) = st.devices.get_mut(device) {
        dev.evidence.violate(found);
    }
}

fn count(st: &mut State, device: usize, tally: Tally, bytes: u64) {
    let Some(dev) = st.devices.get_mut(device) else { return };
    let copied = &mut dev.evidence.copied;
    match tally {
        Tally::H2dPinned => copied.h2d_pinned += bytes,
        Tally::H2dPageable => copied.h2d_pageable += bytes,
        Tally::D2hPinned => copied.d2h_pinned += bytes,
        Tally::D2hPageable => copied.d2h_pageable += bytes,
        Tally::D2d => copied.d2d += bytes,
        Tally::None => {}
    }
}

fn copy(job: &CopyJob) -> Res {
    if job.lost {
        return Ok(());
    }
    let (src, src_foreign) = match &job.src {
        Source::Span(span) => (span.engine, span.is_foreign()),
        Source::Staged(bytes) => (bytes.as_ptr() as u64, false),
    };
    let whole = job.height == 1 || (job.width == job.dst_pitch && job.width == job.src_pitch);
    let (rows, width) = if whole { (1, job.width * job.height) } else { (job.height, job.width) };
    for row in 0..rows {
        let to = job.dst.engine + row * job.dst_pitch;
        bytes::copy(to, job.dst.is_foreign(), src + row * job.src_pitch, src_foreign, width)?;
    }
    Ok(())
}

/// Both ends of a copy that failed, and what of the program's memory is missing there: for page-locked memory that was
/// unmapped while a copy needed it.
fn describe(id: u64, job: &CopyJob) -> String {
    let error = std::io::Error::last_os_error();
    let len = job.width * job.height;
    let end = |span: &Span| {
        let missing = (span.is_foreign()).then(|| bytes::first_unreadable(span.engine, len)).flatten();
        let missing = missing.map_or(String::new(), |at| format!(", nothing is mapped at {at:#x}"));
        format!("{:?} memory at {:#x}{missing}", span.kind, span.engine)
    };
    let src = match &job.src {
        Source::Span(span) => end(span),
        Source::Staged(_) => "bytes staged by the driver".to_owned(),
    };
    format!("copy {id} of {len} bytes from {src} to {} failed ({error})", end(&job.dst))
}

fn fill(job: &FillJob) -> Res {
    for row in 0..job.height {
        bytes::fill(&job.dst, row * job.pitch, job.value, job.element, job.width).map_err(|_| ILLEGAL_ADDRESS)?;
    }
    Ok(())
}

fn call_host(job: HostJob, status: Status) {
    state::set_in_callback(true);
    let data = job.data as *mut std::ffi::c_void;
    match job.function {
        // SAFETY: the program gave this function to be called with this argument, once, from a thread of the driver.
        HostFn::Plain(function) => unsafe { function(data) },
        // SAFETY: as above.
        HostFn::Callback(function, stream) => unsafe { function(stream as *mut std::ffi::c_void, status, data) },
    }
    state::set_in_callback(false);
}

/// Looks at a word until it has the value, the context faults or goes.
fn wait_value(ctx: u64, id: u64, job: ValueJob, compare: Compare) -> Res {
    let mut looks = 0u32;
    loop {
        let word = bytes::read_word(job.span.engine, job.wide);
        let hit = match compare {
            Compare::Geq if job.wide => (word.wrapping_sub(job.value)).cast_signed() >= 0,
            Compare::Geq => ((word as u32).wrapping_sub(job.value as u32)).cast_signed() >= 0,
            Compare::Eq => word == job.value,
            Compare::And => word & job.value != 0,
            Compare::Nor if job.wide => !(word | job.value) != 0,
            Compare::Nor => !((word | job.value) as u32) != 0,
        };
        if hit {
            return Ok(());
        }
        looks += 1;
        if looks < 200 {
            thread::yield_now();
            continue;
        }
        // The word is the program's: nobody tells us when it changes.
        thread::sleep(Duration::from_micros(if looks < 2000 { 20 } else { 200 }));
        let guard = state::lock();
        let stopped = guard.nodes.get(&id).and_then(|node| super::stopped(&guard, node));
        if stopped.is_some() || !guard.contexts.contains_key(&ctx) {
            return stopped.map_or(Ok(()), Err);
        }
    }
}
