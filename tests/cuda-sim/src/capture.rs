//! Stream capture and graphs.

#![deny(unsafe_code)]

use crate::sched::op::{self, Op};
use crate::sched::{self, Step};
use crate::state::State;
use crate::status::Res;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Capture {
    pub(crate) ctx: u64,
}
#[derive(Debug)]
pub(crate) struct Graph {}

/// What was put on a stream.
pub(crate) struct Queued {
    pub(crate) step: Arc<Step>,
    /// The call returns only when the step is done.
    pub(crate) blocks: bool,
}

pub(crate) fn check_unsafe(_st: &mut State, _device: usize) -> Res {
    Ok(())
}
pub(crate) fn check_sync(_st: &mut State, _device: usize, _stream: u64) -> Res {
    Ok(())
}
pub(crate) fn check_foreign_wait(_st: &mut State, _stream: u64) -> Res {
    Ok(())
}
pub(crate) fn refuse(_st: &mut State, _stream: u64) -> Res {
    Ok(())
}
pub(crate) fn abandon(_st: &mut State, _stream: u64) {}
pub(crate) fn tail(_st: &mut State, _stream: u64) -> Res<Option<(u64, Vec<usize>)>> {
    Ok(None)
}
pub(crate) fn join(_st: &mut State, _stream: u64, _capture: u64, _nodes: &[usize]) -> Res {
    Ok(())
}
pub(crate) fn enqueue(st: &mut State, stream: u64, op: Op) -> Res<Option<Queued>> {
    enqueue_after(st, stream, op, Vec::new())
}
pub(crate) fn enqueue_after(st: &mut State, stream: u64, op: Op, after: Vec<Arc<Step>>) -> Res<Option<Queued>> {
    let handle = st.stream(stream)?;
    let (device, ctx) = (handle.device, handle.ctx);
    if let Some(status) = st.sticky(ctx) {
        return Err(status);
    }
    let mut prepared = op::prepare(st, device, &op)?;
    prepared.work.after.extend(after);
    let step = sched::submit(st, stream, prepared.work)?;
    Ok(Some(Queued { step, blocks: prepared.blocks }))
}
