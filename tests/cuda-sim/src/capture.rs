//! Stream capture: work that is written down instead of done, and what is not allowed meanwhile.

#![deny(unsafe_code)]

use crate::sched::op::{self, Op};
use crate::sched::{self, Step};
use crate::state::{self, State, StreamKind};
use crate::status::{
    CAPTURED_EVENT, ILLEGAL_STATE, INVALID_HANDLE, INVALID_VALUE, Res, STREAM_CAPTURE_IMPLICIT,
    STREAM_CAPTURE_INVALIDATED, STREAM_CAPTURE_ISOLATION, STREAM_CAPTURE_MERGE, STREAM_CAPTURE_UNJOINED,
    STREAM_CAPTURE_UNMATCHED, STREAM_CAPTURE_UNSUPPORTED, STREAM_CAPTURE_WRONG_THREAD, Status,
};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Any thread's unsafe calls break the capture.
pub(crate) const GLOBAL: u32 = 0;
/// Nobody's do.
pub(crate) const RELAXED: u32 = 2;

/// Streams being captured together.
#[derive(Debug)]
pub(crate) struct Capture {
    pub(crate) ctx: u64,
    device: usize,
    mode: u32,
    thread: u64,
    origin: u64,
    broken: bool,
    nodes: Vec<GraphNode>,
    /// For each stream: the nodes its next one comes after.
    tails: HashMap<u64, Vec<usize>>,
}

/// A graph: operations and what each comes after.
#[derive(Debug, Clone, Default)]
pub(crate) struct Graph {
    pub(crate) ctx: u64,
    pub(crate) nodes: Vec<GraphNode>,
    /// The end of the last launch: launches of one executable graph follow each other.
    pub(crate) last: Option<Arc<Step>>,
}

/// An operation of a graph.
#[derive(Debug, Clone)]
pub(crate) struct GraphNode {
    op: Op,
    after: Vec<usize>,
}

/// What was put on a stream.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) step: Arc<Step>,
    /// The call returns only when the step is done.
    pub(crate) blocks: bool,
}

/// Whether a stream is captured (1), was until something broke it (2), or not (0), and the capture's id.
pub(crate) fn status(st: &State, stream: u64) -> Res<(u32, u64)> {
    let found = st.stream(stream)?;
    if found.kind == StreamKind::Legacy && implicit(st, found.ctx).is_some() {
        return Err(STREAM_CAPTURE_IMPLICIT);
    }
    Ok(match found.capture {
        Some(id) if st.captures.get(&id).is_none_or(|capture| capture.broken) => (2, id),
        Some(id) => (1, id),
        None => (0, 0),
    })
}

/// A capture in this context that using the legacy stream would break.
fn implicit(st: &State, ctx: u64) -> Option<u64> {
    let streams = &st.contexts.get(&ctx)?.streams;
    let capturing = |stream: &u64| st.streams.get(stream).filter(|stream| stream.syncs_with_legacy())?.capture;
    streams.iter().find_map(capturing)
}

pub(crate) fn begin(st: &mut State, stream: u64, mode: u32) -> Res {
    let found = st.stream(stream)?;
    let (ctx, device) = (found.ctx, found.device);
    if mode > RELAXED {
        return Err(INVALID_VALUE);
    }
    if found.kind == StreamKind::Legacy {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    if found.capture.is_some() {
        return Err(ILLEGAL_STATE);
    }
    let id = st.handle();
    let capture = Capture {
        ctx,
        device,
        mode,
        thread: state::thread_id(),
        origin: stream,
        broken: false,
        nodes: Vec::new(),
        tails: HashMap::from([(stream, Vec::new())]),
    };
    st.captures.insert(id, capture);
    st.stream_mut(stream)?.capture = Some(id);
    Ok(())
}

/// Ends the capture that began on a stream; the graph's handle.
pub(crate) fn end(st: &mut State, stream: u64) -> Res<u64> {
    let id = st.stream(stream)?.capture.ok_or(ILLEGAL_STATE)?;
    let capture = st.captures.get_mut(&id).ok_or(STREAM_CAPTURE_INVALIDATED)?;
    if capture.origin != stream {
        capture.broken = true;
        return Err(STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != state::thread_id() {
        return Err(STREAM_CAPTURE_WRONG_THREAD);
    }
    let Some(capture) = st.captures.remove(&id) else { return Err(ILLEGAL_STATE) };
    for stream in st.streams.values_mut().filter(|stream| stream.capture == Some(id)) {
        stream.capture = None;
    }
    if capture.broken {
        return Err(STREAM_CAPTURE_INVALIDATED);
    }
    if !capture.joined() {
        return Err(STREAM_CAPTURE_UNJOINED);
    }
    let graph = Graph { ctx: capture.ctx, nodes: capture.nodes, last: None };
    let handle = st.handle();
    st.graphs.insert(handle, graph);
    Ok(handle)
}

impl Capture {
    /// Whether the origin comes after everything that was captured.
    fn joined(&self) -> bool {
        let mut reached: HashSet<usize> = HashSet::new();
        let mut next = self.tails.get(&self.origin).cloned().unwrap_or_default();
        while let Some(index) = next.pop() {
            if reached.insert(index)
                && let Some(node) = self.nodes.get(index)
            {
                next.extend(&node.after);
            }
        }
        let streams_joined =
            self.tails.iter().all(|(_, tail)| tail.is_empty() || tail.iter().all(|node| reached.contains(node)));
        reached.len() == self.nodes.len() && streams_joined
    }
}

/// A call that may break captures: it is refused, and does, unless the thread's mode or the captures' allow it.
pub(crate) fn check_unsafe(st: &mut State, device: usize) -> Res {
    if st.captures.is_empty() || state::capture_mode() == RELAXED {
        return Ok(());
    }
    let me = state::thread_id();
    let global = state::capture_mode() == GLOBAL;
    let mut refused = false;
    for capture in st.captures.values_mut().filter(|capture| capture.device == device) {
        let mine = capture.thread == me && capture.mode != RELAXED;
        let anyone = global && capture.mode == GLOBAL;
        if mine || anyone {
            capture.broken = true;
            refused = true;
        }
    }
    if refused { Err(STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// Waiting for a stream, or asking whether it is done.
pub(crate) fn check_sync(st: &mut State, device: usize, stream: u64) -> Res {
    if st.captures.is_empty() {
        return Ok(());
    }
    refuse(st, stream)?;
    check_unsafe(st, device)
}

/// What cannot be captured, and breaks the capture of the stream it is asked for on.
pub(crate) fn refuse(st: &mut State, stream: u64) -> Res {
    if st.captures.is_empty() {
        return Ok(());
    }
    let found = st.stream(stream)?;
    let (own, status) = match found.capture {
        Some(id) => (Some(id), STREAM_CAPTURE_UNSUPPORTED),
        None if found.kind == StreamKind::Legacy => (implicit(st, found.ctx), STREAM_CAPTURE_IMPLICIT),
        None => (None, 0),
    };
    own.map_or(Ok(()), |id| Err(broken(st, id, status)))
}

fn broken(st: &mut State, id: u64, status: Status) -> Status {
    if let Some(capture) = st.captures.get_mut(&id) {
        capture.broken = true;
    }
    status
}

/// A stream goes away: its capture with it.
pub(crate) fn abandon(st: &mut State, stream: u64) {
    let Some(id) = st.streams.get(&stream).and_then(|stream| stream.capture) else { return };
    if let Some(capture) = st.captures.get_mut(&id) {
        capture.broken = true;
        capture.tails.remove(&stream);
        if capture.origin == stream {
            st.captures.remove(&id);
            for stream in st.streams.values_mut().filter(|stream| stream.capture == Some(id)) {
                stream.capture = None;
            }
        }
    }
}

/// The capture of a stream, which must be whole.
fn whole(st: &mut State, stream: u64) -> Res<Option<u64>> {
    let found = st.stream(stream)?;
    match found.capture {
        Some(id) if st.captures.get(&id).is_some_and(|capture| !capture.broken) => Ok(Some(id)),
        Some(_) => Err(STREAM_CAPTURE_INVALIDATED),
        None if found.kind == StreamKind::Legacy && !st.captures.is_empty() => {
            let hit = implicit(st, found.ctx);
            hit.map_or(Ok(None), |id| Err(broken(st, id, STREAM_CAPTURE_IMPLICIT)))
        }
        None => Ok(None),
    }
}

/// What an event recorded on a captured stream stands for.
pub(crate) fn tail(st: &mut State, stream: u64) -> Res<Option<(u64, Vec<usize>)>> {
    let Some(id) = whole(st, stream)? else { return Ok(None) };
    let capture = st.captures.get(&id).ok_or(STREAM_CAPTURE_INVALIDATED)?;
    Ok(Some((id, capture.tails.get(&stream).cloned().unwrap_or_default())))
}

/// A stream waits for a captured event: it joins the capture.
pub(crate) fn join(st: &mut State, stream: u64, id: u64, nodes: &[usize]) -> Res {
    match whole(st, stream)? {
        Some(own) if own != id => {
            broken(st, id, 0);
            return Err(broken(st, own, STREAM_CAPTURE_MERGE));
        }
        _ => {}
    }
    if st.stream(stream)?.kind == StreamKind::Legacy {
        return Err(broken(st, id, STREAM_CAPTURE_IMPLICIT));
    }
    // The event's capture has ended: it stands for nothing now.
    let capture = st.captures.get_mut(&id).ok_or(CAPTURED_EVENT)?;
    let tail = capture.tails.entry(stream).or_default();
    for node in nodes {
        if !tail.contains(node) {
            tail.push(*node);
        }
    }
    st.stream_mut(stream)?.capture = Some(id);
    Ok(())
}

/// A captured stream cannot wait for work outside the capture.
pub(crate) fn check_foreign_wait(st: &mut State, stream: u64) -> Res {
    match whole(st, stream)? {
        Some(id) => Err(broken(st, id, STREAM_CAPTURE_ISOLATION)),
        None => Ok(()),
    }
}

/// Puts an operation on a stream, or writes it down if the stream is captured.
pub(crate) fn enqueue(st: &mut State, stream: u64, op: Op) -> Res<Option<Queued>> {
    enqueue_after(st, stream, op, Vec::new())
}

/// The same, after steps of other streams.
pub(crate) fn enqueue_after(st: &mut State, stream: u64, op: Op, after: Vec<Arc<Step>>) -> Res<Option<Queued>> {
    if let Some(id) = whole(st, stream)? {
        write_down(st, id, stream, op)?;
        return Ok(None);
    }
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

fn write_down(st: &mut State, id: u64, stream: u64, mut op: Op) -> Res {
    // Looks the addresses up, so that a bad one is refused now as it would be outside a capture.
    if let Op::Copy(copy) = &mut op {
        copy.stage = false;
    }
    let device = st.stream(stream)?.device;
    op::prepare(st, device, &op)?;
    let capture = st.captures.get_mut(&id).ok_or(STREAM_CAPTURE_INVALIDATED)?;
    let index = capture.nodes.len();
    let after = capture.tails.insert(stream, vec![index]).unwrap_or_default();
    capture.nodes.push(GraphNode { op, after });
    Ok(())
}

/// Puts all of a graph on a stream.
pub(crate) fn launch(st: &mut State, exec: u64, stream: u64) -> Res {
    let graph = st.execs.get(&exec).cloned().ok_or(INVALID_HANDLE)?;
    refuse(st, stream)?;
    let handle = st.stream(stream)?;
    let (ctx, device) = (handle.ctx, handle.device);
    if let Some(status) = st.sticky(ctx) {
        return Err(status);
    }
    // All or nothing: what a node's addresses mean is looked up before the first is put on.
    let mut works = Vec::new();
    for node in &graph.nodes {
        match op::prepare(st, device, &node.op) {
            Ok(prepared) => works.push(prepared.work),
            Err(status) => {
                let text = "use after free: a graph is launched that uses memory which is not there any more";
                st.device(device)?.evidence.violate([text.to_owned()]);
                return Err(status);
            }
        }
    }
    let mut roots = sched::stream_order(st, stream)?;
    roots.extend(graph.last.iter().cloned());
    let mut steps: Vec<Arc<Step>> = Vec::new();
    for (node, mut work) in graph.nodes.iter().zip(works) {
        if node.after.is_empty() {
            work.after.extend(roots.iter().cloned());
        } else {
            work.after.extend(node.after.iter().filter_map(|index| steps.get(*index).cloned()));
        }
        steps.push(sched::submit_loose(st, ctx, work)?);
    }
    let end = enqueue_after(st, stream, Op::Join, steps)?;
    if let (Some(exec), Some(end)) = (st.execs.get_mut(&exec), end) {
        exec.last = Some(end.step);
    }
    Ok(())
}
