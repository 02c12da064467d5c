//! The scheduler: steps wait for other steps, then for an engine, then run.
//!
//! A stream is a chain of steps. What waits for nothing is handed to a thread (or done on the spot where it moves no
//! bytes). Everything here runs with the lock held; [`run`] holds it only before and after the work itself.

pub(crate) mod body;
pub(crate) mod bytes;
pub(crate) mod op;
pub(crate) mod pool;
pub(crate) mod run;
pub(crate) mod step;
pub(crate) mod track;

pub(crate) use body::{Body, Lane, Work};
pub(crate) use step::Step;
pub(crate) use track::{Access, Tracker, Use};

use crate::hostility::Callbacks;
use crate::state::{self, Guard, State, StreamKind};
use crate::status::{DEINITIALIZED, INVALID_HANDLE, Res, SUCCESS, Status};
use std::sync::Arc;
use step::Place;

/// A step that is not done.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) step: Arc<Step>,
    waiting_on: usize,
    dependents: Vec<u64>,
    body: Option<Body>,
    lane: Lane,
    /// The virtual time at which it may start.
    ready_ns: u64,
    /// Virtual duration, where it is known beforehand.
    pub(crate) duration_ns: u64,
    /// Time until the host can see that it is done.
    pub(crate) latency_ns: u64,
    link_bytes: u64,
    /// Allocations it uses.
    uses: Vec<u64>,
    /// The tracker waits to hear what it used.
    opened: bool,
    /// It holds its engine, or is a gate that was reached.
    running: bool,
    /// It waits for a word, and so for the program.
    spins: bool,
    /// Its context is gone or its device faulted: it does nothing.
    cancelled: Option<Status>,
}

/// Puts work on a stream.
pub(crate) fn submit(st: &mut State, stream: u64, mut work: Work) -> Res<Arc<Step>> {
    let mut before = std::mem::take(&mut work.after);
    before.extend(stream_order(st, stream)?);
    let handle = st.stream_mut(stream)?;
    handle.seq += 1;
    let place = Place { stream, seq: handle.seq, ctx: handle.ctx, device: handle.device };
    let step = enter(st, place, before, work, true)?;
    st.stream_mut(stream)?.tail = Some(Arc::clone(&step));
    pump(st);
    Ok(step)
}

/// Puts work beside all streams: a node of a graph, ordered only by what it is given.
pub(crate) fn submit_loose(st: &mut State, ctx: u64, mut work: Work) -> Res<Arc<Step>> {
    let device = st.context(ctx)?.device;
    let stream = st.handle();
    let place = Place { stream, seq: 1, ctx, device };
    let before = std::mem::take(&mut work.after);
    let step = enter(st, place, before, work, false)?;
    pump(st);
    Ok(step)
}

/// What a step on this stream comes after by the rules of streams.
pub(crate) fn stream_order(st: &State, stream: u64) -> Res<Vec<Arc<Step>>> {
    let this = st.stream(stream)?;
    let mut before: Vec<Arc<Step>> = this.tail.iter().cloned().collect();
    let context = st.context(this.ctx)?;
    if this.kind == StreamKind::Legacy {
        for other in &context.streams {
            let other = st.stream(*other)?;
            if other.syncs_with_legacy() {
                before.extend(other.tail.iter().cloned());
            }
        }
    } else if this.syncs_with_legacy() {
        before.extend(st.stream(context.legacy)?.tail.iter().cloned());
    }
    before.retain(|step| !step.is_done());
    Ok(before)
}

fn enter(st: &mut State, place: Place, before: Vec<Arc<Step>>, work: Work, on_stream: bool) -> Res<Arc<Step>> {
    let tick = st.tick();
    let id = tick;
    let mut clock = Vec::new();
    let mut waiting_on = 0;
    let now = st.device(place.device)?.now_ns;
    let mut ready_ns = state::host_ns(now);
    for other in &before {
        if other.is_done() {
            ready_ns = ready_ns.max(other.end_ns());
            continue;
        }
        step::merge(&mut clock, other);
        if let Some(node) = st.nodes.get_mut(&other.id)
            && !node.dependents.contains(&id)
        {
            node.dependents.push(id);
            waiting_on += 1;
        }
    }
    if on_stream {
        ready_ns = ready_ns.max(st.stream(place.stream)?.clock_ns);
    }
    let step = Arc::new(Step::new(id, work.what, place, tick, clock));
    let mut found = Vec::new();
    for access in work.accesses {
        found.extend(st.tracker.note(&step, access));
    }
    if work.opens {
        st.tracker.open(&step);
    }
    st.nodes.insert(
        id,
        Node {
            step: Arc::clone(&step),
            waiting_on,
            dependents: Vec::new(),
            spins: matches!(work.body, Body::WaitValue(..)),
            body: Some(work.body),
            lane: work.lane,
            ready_ns,
            duration_ns: work.duration_ns,
            latency_ns: work.latency_ns,
            link_bytes: work.link_bytes,
            uses: work.uses,
            opened: work.opens,
            running: false,
            cancelled: None,
        },
    );
    let dev = st.device(place.device)?;
    dev.evidence.violate(found);
    dev.in_flight += 1;
    if dev.in_flight == 1 {
        crate::alloc::guard_managed(st, place.device, true);
    }
    if waiting_on == 0 {
        st.ready.push_back(id);
    }
    Ok(step)
}

/// Starts everything that is ready.
pub(crate) fn pump(st: &mut State) {
    while let Some(id) = st.ready.pop_front() {
        start(st, id);
    }
}

/// What stops a step from doing its work: a fault of its context, or its end.
fn stopped(st: &State, node: &Node) -> Option<Status> {
    node.cancelled.or_else(|| st.sticky(node.step.ctx))
}

fn start(st: &mut State, id: u64) {
    let Some(node) = st.nodes.get(&id) else { return };
    let device = node.step.device;
    if let Some(status) = stopped(st, node)
        && !(matches!(node.body, Some(Body::Host(..))) && runs_anyway(st, device, node))
    {
        complete(st, id, Done::failed(status));
        return;
    }
    match node.lane {
        Lane::Inline => {
            let Some(body) = st.nodes.get_mut(&id).and_then(|node| node.body.take()) else { return };
            if let Some(done) = run::inline(st, id, body) {
                complete(st, id, done);
            }
        }
        Lane::Thread => pool::push(id),
        Lane::Engine(engine) => {
            if let Some(engine) = st.devices.get_mut(device).and_then(|dev| dev.engines.get_mut(engine)) {
                engine.queue.push_back(id);
            }
            kick(st, device, engine);
        }
    }
}

/// Host functions run after a fault only where a test asks for it.
fn runs_anyway(st: &State, device: usize, node: &Node) -> bool {
    node.cancelled.is_none() && st.devices.get(device).is_some_and(|dev| dev.hostility.callbacks == Callbacks::Always)
}

fn kick(st: &mut State, device: usize, engine: usize) {
    let Some(dev) = st.devices.get_mut(device) else { return };
    let reorder = dev.hostility.reorder;
    let waiting = dev.engines.get(engine).map_or(0, |engine| engine.queue.len());
    if waiting == 0 {
        return;
    }
    let pick = if reorder { dev.hostility.random(waiting as u64) as usize } else { 0 };
    let Some(engine) = dev.engines.get_mut(engine) else { return };
    if engine.busy {
        return;
    }
    if let Some(id) = engine.queue.remove(pick) {
        engine.busy = true;
        if let Some(node) = st.nodes.get_mut(&id) {
            node.running = true;
        }
        pool::push(id);
    }
}

/// How a step ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Done {
    pub(crate) status: Status,
    /// Its duration in virtual time, if it is known only now.
    pub(crate) duration_ns: Option<u64>,
}

impl Done {
    pub(crate) const OK: Self = Self { status: SUCCESS, duration_ns: None };

    pub(crate) fn failed(status: Status) -> Self {
        Self { status, duration_ns: Some(0) }
    }
}

/// A step is done: frees its engine, releases what waits for it.
pub(crate) fn complete(st: &mut State, id: u64, done: Done) {
    let Some(node) = st.nodes.remove(&id) else { return };
    let step = node.step;
    let duration = done.duration_ns.unwrap_or(node.duration_ns);
    let tick = st.tick();
    let mut end = node.ready_ns + duration;
    if let Some(dev) = st.devices.get_mut(step.device) {
        if let Lane::Engine(index) = node.lane {
            end = crate::clock::occupy(dev, index, node.ready_ns, duration, node.link_bytes);
            if node.running
                && let Some(engine) = dev.engines.get_mut(index)
            {
                engine.busy = false;
            }
        }
        dev.now_ns = dev.now_ns.max(end);
        dev.in_flight = dev.in_flight.saturating_sub(1);
    }
    if let Some(stream) = st.streams.get_mut(&step.stream) {
        stream.clock_ns = stream.clock_ns.max(end);
    }
    step.finish(tick, done.status, end, end + node.latency_ns);
    if node.opened {
        st.tracker.close(&step);
    }
    for dependent in node.dependents {
        if let Some(waiting) = st.nodes.get_mut(&dependent) {
            waiting.ready_ns = waiting.ready_ns.max(end);
            waiting.waiting_on = waiting.waiting_on.saturating_sub(1);
            if waiting.waiting_on == 0 {
                st.ready.push_back(dependent);
            }
        }
    }
    if st.devices.get(step.device).is_some_and(|dev| dev.in_flight == 0) {
        crate::alloc::guard_managed(st, step.device, false);
    }
    if let Lane::Engine(index) = node.lane {
        kick(st, step.device, index);
    }
    if let Some(dev) = st.devices.get(step.device) {
        dev.notify();
    }
}

/// A fault: the context is stuck in it, and what was queued in it ends with it.
pub(crate) fn fault(st: &mut State, ctx: u64, status: Status) {
    let Ok(context) = st.context_mut(ctx) else { return };
    context.sticky.get_or_insert(status);
    let device = context.device;
    release_held(st, |node| node.step.ctx == ctx);
    if let Some(dev) = st.devices.get(device) {
        dev.notify();
    }
}

/// Ends what is queued in a context that is going away; what runs now runs to its end.
pub(crate) fn cancel(st: &mut State, ctx: u64) {
    for node in st.nodes.values_mut().filter(|node| node.step.ctx == ctx) {
        node.cancelled = Some(DEINITIALIZED);
    }
    release_held(st, |node| node.step.ctx == ctx);
    pump(st);
}

/// Completes gates: nothing behind them runs, so nobody may wait for them.
pub(crate) fn release_held(st: &mut State, which: impl Fn(&Node) -> bool) {
    let held: Vec<u64> = st
        .nodes
        .iter()
        .filter(|(_, node)| node.lane == Lane::Inline && node.running && which(node))
        .map(|(id, _)| *id)
        .collect();
    for id in held {
        let done = st.nodes.get(&id).and_then(|node| stopped(st, node)).map_or(Done::OK, Done::failed);
        complete(st, id, done);
    }
}

/// Opens the gate that is this step.
pub(crate) fn open_gate(st: &mut State, id: u64) {
    match st.nodes.get_mut(&id) {
        Some(node) if node.running => complete(st, id, Done::OK),
        // Not reached yet: it will not hold when it is.
        Some(node) => node.body = Some(Body::Nop),
        None => {}
    }
    pump(st);
}

/// Waits until a step is done, or its context is stuck in an error.
pub(crate) fn wait(guard: &mut Guard, step: &Arc<Step>) -> Res {
    loop {
        let st: &mut State = guard;
        if step.is_done() {
            state::host_reached(step.seen_ns());
            let sticky = st.sticky(step.ctx);
            return sticky.or(Some(step.status()).filter(|status| *status != SUCCESS)).map_or(Ok(()), Err);
        }
        if let Some(status) = st.sticky(step.ctx) {
            return Err(status);
        }
        if !st.contexts.contains_key(&step.ctx) {
            return Err(INVALID_HANDLE);
        }
        let dev = st.device(step.device)?;
        if dev.hostility.gone {
            return Err(DEINITIALIZED);
        }
        dev.waiters += 1;
        let changed = dev.changed;
        changed.wait(guard);
        if let Ok(dev) = guard.device(step.device) {
            dev.waiters -= 1;
        }
    }
}

/// Waits until a device has nothing to do but what a gate or an unwritten word holds back.
pub(crate) fn wait_idle(guard: &mut Guard, device: usize) {
    loop {
        let active = guard.nodes.values().any(|node| {
            let held = node.waiting_on > 0 || (node.lane == Lane::Inline && node.running) || node.spins;
            node.step.device == device && !held
        });
        let Some(dev) = guard.devices.get_mut(device).filter(|_| active) else { return };
        dev.waiters += 1;
        let changed = dev.changed;
        changed.wait(guard);
        if let Some(dev) = guard.devices.get_mut(device) {
            dev.waiters -= 1;
        }
    }
}

/// Waits for all work of a context that is queued now.
pub(crate) fn wait_context(guard: &mut Guard, ctx: u64) -> Res {
    let tails: Vec<Arc<Step>> = {
        let context = guard.context(ctx)?;
        context.streams.iter().filter_map(|stream| guard.streams.get(stream)?.tail.clone()).collect()
    };
    for tail in tails {
        wait(guard, &tail)?;
    }
    // Streams that were destroyed with work on them.
    let rest: Vec<Arc<Step>> =
        guard.nodes.values().filter(|node| node.step.ctx == ctx).map(|node| Arc::clone(&node.step)).collect();
    let orphans: Vec<Arc<Step>> = rest.into_iter().filter(|step| !guard.streams.contains_key(&step.stream)).collect();
    for step in orphans {
        wait(guard, &step)?;
    }
    guard.sticky(ctx).map_or(Ok(()), Err)
}
