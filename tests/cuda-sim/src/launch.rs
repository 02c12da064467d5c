//! Kernels on streams: their arguments, what they may touch, what they touched.

use crate::clock;
use crate::kernels::{KernelCall, KernelFn};
use crate::memory::{Alloc, Kind, Span};
use crate::sched::op::place;
use crate::sched::{Access, Body, Lane, Use, Work, bytes};
use crate::state::{self, State};
use crate::status::{ILLEGAL_ADDRESS, Res};
use parking_lot::Mutex;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

/// A launch as it was asked for; the arguments are copied.
#[derive(Debug, Clone)]
pub(crate) struct KernelOp {
    pub(crate) name: &'static str,
    pub(crate) kernel: KernelFn,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) params: Vec<Vec<u8>>,
}

/// A launch on its way.
#[derive(Debug)]
pub(crate) struct KernelJob {
    op: KernelOp,
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) result: Res,
    pub(crate) duration_ns: u64,
}

/// Makes a launch a step. What the arguments point at is noted; what the kernel does there shows when it has run.
pub(crate) fn prepare(st: &State, op: &KernelOp) -> Work {
    let mut uses = Vec::new();
    let mut accesses = Vec::new();
    for param in &op.params {
        for word in param.chunks_exact(8) {
            let mut raw = [0; 8];
            raw.copy_from_slice(word);
            let Some(found) = st.memory.find(u64::from_ne_bytes(raw)) else { continue };
            if !uses.contains(&found.id) {
                uses.push(found.id);
                accesses.push(Access { key: found.id, start: 0, end: found.len.max(1), how: Use::Mention });
            }
        }
    }
    let body = Body::Kernel(Box::new(KernelJob { op: op.clone() }));
    Work { uses, accesses, opens: true, ..Work::new(op.name, body, Lane::Thread) }
}

/// What a running kernel hands back to the driver when it wants memory.
struct Runner {
    ctx: u64,
    device: usize,
    touched: Mutex<Vec<Touch>>,
    fault: Mutex<Option<u32>>,
}

/// A range a kernel asked for.
#[derive(Debug, Clone, Copy)]
struct Touch {
    span: Span,
    write: bool,
    /// The device's stale copy, and the bytes it is a copy of.
    shadow: Option<(u64, u64)>,
}

/// Runs a kernel on the calling thread.
pub(crate) fn run(step: u64, ctx: u64, device: usize, job: KernelJob) -> Ran {
    let op = job.op;
    let runner = Runner { ctx, device, touched: Mutex::default(), fault: Mutex::default() };
    let pointers: Vec<*const c_void> = op.params.iter().map(|param| param.as_ptr().cast()).collect();
    let sizes: Vec<usize> = op.params.iter().map(Vec::len).collect();
    let call = KernelCall {
        grid: op.grid,
        block: op.block,
        shared: op.shared,
        params: pointers.as_ptr(),
        param_sizes: sizes.as_ptr(),
        nparams: pointers.len(),
        ctx: ptr::from_ref(&runner).cast(),
        translate,
        fault,
    };
    // SAFETY: the call and everything it points to live until the kernel returns; a registered kernel is a function
    // that takes such a call.
    unsafe { (op.kernel)(&raw const call) };
    finish(step, device, &runner)
}

fn finish(step: u64, device: usize, runner: &Runner) -> Ran {
    let touched = std::mem::take(&mut *runner.touched.lock());
    for touch in &touched {
        if let (true, Some((shadow, host))) = (touch.write, touch.shadow) {
            let _ = bytes::copy(host, touch.span.is_foreign(), shadow, false, touch.span.len);
        }
    }
    let result = runner.fault.lock().map_or(Ok(()), Err);
    let mut st = state::lock();
    let node = st.nodes.get(&step).map(|node| Arc::clone(&node.step));
    let mut found = Vec::new();
    let (mut on_device, mut on_host) = (0, 0);
    for touch in touched {
        match touch.span.kind {
            Some(Kind::Device) => on_device += touch.span.len,
            _ => on_host += touch.span.len,
        }
        if let Some(step) = &node {
            let (key, start) = place(&touch.span);
            let how = if touch.write { Use::Write } else { Use::Read };
            found.extend(st.tracker.note(step, Access { key, start, end: start + touch.span.len, how }));
        }
    }
    let Some(dev) = st.devices.get_mut(device) else { return Ran { result, duration_ns: 0 } };
    dev.evidence.violate(found);
    dev.evidence.kernels += 1;
    Ran { result, duration_ns: clock::kernel_ns(dev, on_device, on_host) }
}

/// The `translate` of a launch: where the bytes at a device address are.
unsafe extern "C" fn translate(ctx: *const c_void, address: u64, len: usize, write: bool) -> *mut u8 {
    // SAFETY: `run` passed its runner, which lives until the kernel returns.
    let runner = unsafe { &*ctx.cast::<Runner>() };
    match reach(&state::lock(), runner, address, len as u64, write) {
        Some(touch) => {
            runner.touched.lock().push(touch);
            touch.shadow.map_or(touch.span.engine, |(shadow, _)| shadow) as *mut u8
        }
        None => {
            runner.fault.lock().get_or_insert(ILLEGAL_ADDRESS);
            ptr::null_mut()
        }
    }
}

/// The `fault` of a launch: the first one counts.
unsafe extern "C" fn fault(ctx: *const c_void, code: u32) {
    // SAFETY: `run` passed its runner, which lives until the kernel returns.
    let runner = unsafe { &*ctx.cast::<Runner>() };
    runner.fault.lock().get_or_insert(code);
}

/// Whether and where a kernel of the runner's context reaches `[address, address + len)`.
fn reach(st: &State, runner: &Runner, address: u64, len: u64, write: bool) -> Option<Touch> {
    /// `CU_MEMHOSTREGISTER_READ_ONLY`.
    const READ_ONLY: u32 = 8;
    let dev = st.devices.get(runner.device)?;
    let Some(span) = st.memory.span(address, len).ok()? else {
        if let Some(alloc) = st.memory.retired(address, len) {
            return Some(Touch { span: retired_span(alloc, address, len), write, shadow: None });
        }
        let pageable = dev.reads_pageable()
            && address != 0
            && bytes::readable(address)
            && bytes::readable(address.checked_add(len)?.checked_sub(1)?);
        let span = Span { alloc: 0, kind: None, engine: address, start: address, len, device: runner.device };
        return pageable.then_some(Touch { span, write, shadow: None });
    };
    let alloc = st.memory.get(span.alloc)?;
    let allowed = match alloc.kind {
        Kind::Managed => true,
        Kind::Device => {
            let peers = &st.contexts.get(&runner.ctx)?.peers;
            alloc.device == runner.device || peers.contains(&alloc.ctx)
        }
        Kind::Pinned | Kind::Registered => {
            let by_device_address = address.checked_sub(alloc.device_base).is_some_and(|offset| offset < alloc.len);
            dev.profile.behaviour.gpu_can_access_sysmem
                && (by_device_address || dev.reads_pageable())
                && !(write && alloc.kind == Kind::Registered && alloc.flags & READ_ONLY != 0)
        }
    };
    let shadow =
        alloc.shadow.filter(|_| alloc.device == runner.device).map(|shadow| (shadow + span.start, span.engine));
    allowed.then_some(Touch { span, write, shadow })
}

fn retired_span(alloc: &Alloc, address: u64, len: u64) -> Span {
    let start = address - alloc.device_base;
    Span { alloc: alloc.id, kind: Some(alloc.kind), engine: alloc.engine + start, start, len, device: alloc.device }
}

/// What the host wrote so far is visible to the device from here on: a point where the program waited for it.
pub(crate) fn fence(st: &State, device: usize) {
    if st.devices.get(device).is_none_or(|dev| dev.profile.behaviour.io_coherent) {
        return;
    }
    for alloc in st.memory.all().filter(|alloc| alloc.device == device) {
        if let Some(shadow) = alloc.shadow {
            let _ = bytes::copy(shadow, false, alloc.engine, alloc.block.is_none(), alloc.len);
        }
    }
}
