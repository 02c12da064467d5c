//! The state of the process: one lock over tables of devices, contexts, streams, events and steps.
//!
//! The lock is held for bookkeeping only: never while bytes move, a kernel runs, or a thread waits.

#![deny(unsafe_code)]

use crate::capture::{Capture, Graph};
use crate::device::Device;
use crate::memory::{Kind, Map};
use crate::module::Modules;
use crate::sched::body::FreeJob;
use crate::sched::{Node, Step, Tracker};
use crate::status::{INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, Res, Status};
use parking_lot::{Mutex, MutexGuard};
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

/// The lock, held.
pub(crate) type Guard = MutexGuard<'static, State>;

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| Mutex::new(State::default()));

/// Takes the lock.
pub(crate) fn lock() -> Guard {
    STATE.lock()
}

/// Everything the driver knows.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) initialised: bool,
    /// Failures of calls that are about no device.
    pub(crate) hostility: crate::hostility::Hostility,
    /// Orders submissions and completions.
    pub(crate) tick: u64,
    handles: u64,
    pub(crate) devices: Vec<Device>,
    pub(crate) contexts: HashMap<u64, Context>,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) memory: Map,
    /// Steps that are not done.
    pub(crate) nodes: HashMap<u64, Node>,
    /// Steps that wait for nothing and were not looked at yet.
    pub(crate) ready: VecDeque<u64>,
    pub(crate) tracker: Tracker,
    pub(crate) captures: HashMap<u64, Capture>,
    pub(crate) graphs: HashMap<u64, Graph>,
    pub(crate) execs: HashMap<u64, Graph>,
    pub(crate) modules: Modules,
    /// Memory pools made by the program, and the default one of each device: handle → device.
    pub(crate) pools: HashMap<u64, MemPool>,
}

impl State {
    /// A handle nobody else has, now or later.
    pub(crate) fn handle(&mut self) -> u64 {
        self.handles += 1;
        0x5c00_0000_0000 + self.handles * 64
    }

    pub(crate) fn tick(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    pub(crate) fn device(&mut self, ordinal: usize) -> Res<&mut Device> {
        self.devices.get_mut(ordinal).ok_or(INVALID_DEVICE)
    }

    pub(crate) fn context(&self, ctx: u64) -> Res<&Context> {
        self.contexts.get(&ctx).ok_or(INVALID_CONTEXT)
    }

    pub(crate) fn context_mut(&mut self, ctx: u64) -> Res<&mut Context> {
        self.contexts.get_mut(&ctx).ok_or(INVALID_CONTEXT)
    }

    /// The error a context is stuck in.
    pub(crate) fn sticky(&self, ctx: u64) -> Option<Status> {
        let context = self.contexts.get(&ctx)?;
        context.sticky.or_else(|| self.devices.get(context.device).and_then(|device| device.hostility.sticky))
    }

    /// The stream a handle stands for on this thread.
    pub(crate) fn stream_of(&mut self, ctx: u64, handle: u64) -> Res<u64> {
        match handle {
            0 | 1 => Ok(self.context(ctx)?.legacy),
            2 => self.per_thread(ctx, thread_id()),
            _ if self.streams.contains_key(&handle) => Ok(handle),
            _ => Err(INVALID_HANDLE),
        }
    }

    fn per_thread(&mut self, ctx: u64, thread: u64) -> Res<u64> {
        if let Some(stream) = self.context(ctx)?.per_thread.get(&thread) {
            return Ok(*stream);
        }
        let stream = self.add_stream(ctx, StreamKind::PerThread, 0)?;
        self.context_mut(ctx)?.per_thread.insert(thread, stream);
        Ok(stream)
    }

    pub(crate) fn add_stream(&mut self, ctx: u64, kind: StreamKind, priority: i32) -> Res<u64> {
        let handle = self.handle();
        let device = self.context(ctx)?.device;
        let clock_ns = self.device(device)?.now_ns;
        let stream =
            Stream { ctx, device, kind, priority, seq: 0, tail: None, capture: None, clock_ns, freed: Vec::new() };
        self.streams.insert(handle, stream);
        self.context_mut(ctx)?.streams.push(handle);
        Ok(handle)
    }

    pub(crate) fn stream(&self, stream: u64) -> Res<&Stream> {
        self.streams.get(&stream).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn stream_mut(&mut self, stream: u64) -> Res<&mut Stream> {
        self.streams.get_mut(&stream).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn event(&self, event: u64) -> Res<&Event> {
        self.events.get(&event).ok_or(INVALID_HANDLE)
    }

    /// Makes a context, with an id of its own. A device's primary context has the same handle whenever it is made.
    pub(crate) fn add_context(&mut self, device: usize, primary: bool, flags: u32) -> Res<u64> {
        let id = self.handle();
        let handle = if primary { *self.device(device)?.primary_handle.get_or_insert(id) } else { id };
        self.device(device)?;
        let context = Context {
            id,
            device,
            primary,
            flags,
            sticky: None,
            legacy: 0,
            per_thread: HashMap::new(),
            streams: Vec::new(),
            peers: Vec::new(),
            limits: HashMap::new(),
        };
        self.contexts.insert(handle, context);
        let legacy = self.add_stream(handle, StreamKind::Legacy, 0)?;
        self.context_mut(handle)?.legacy = legacy;
        Ok(handle)
    }

    /// Takes a context apart: what is left in it is a leak, and goes with it.
    pub(crate) fn drop_context(&mut self, ctx: u64) {
        let leaks = crate::evidence::live(self, ctx);
        let Some(context) = self.contexts.remove(&ctx) else { return };
        let stuck = context.sticky.is_some();
        for stream in context.streams {
            self.streams.remove(&stream);
        }
        self.events.retain(|_, event| event.ctx != ctx);
        self.modules.drop_context(ctx);
        self.captures.retain(|_, capture| capture.ctx != ctx);
        self.graphs.retain(|_, graph| graph.ctx != ctx);
        self.execs.retain(|_, graph| graph.ctx != ctx);
        crate::sched::cancel(self, ctx);
        let ids: Vec<u64> = self.memory.all().filter(|alloc| alloc.ctx == ctx).map(|alloc| alloc.id).collect();
        for id in ids {
            if let Some(alloc) = crate::alloc::detach(self, id)
                && let Some(block) = alloc.block
            {
                crate::memory::arena::poison(block.alias, alloc.len);
                crate::alloc::give_back(self, alloc.device, alloc.kind, block);
            }
        }
        if let Some(device) = self.devices.get_mut(context.device)
            && !stuck
        {
            device.evidence.leaks.extend(leaks.into_iter().map(|leak| format!("{leak} (context destroyed)")));
        }
    }
}

/// A context.
#[derive(Debug)]
pub(crate) struct Context {
    /// What no other context gets, also after this one's end.
    pub(crate) id: u64,
    pub(crate) device: usize,
    pub(crate) primary: bool,
    pub(crate) flags: u32,
    pub(crate) sticky: Option<Status>,
    pub(crate) legacy: u64,
    pub(crate) per_thread: HashMap<u64, u64>,
    pub(crate) streams: Vec<u64>,
    /// Contexts whose memory kernels of this one may touch.
    pub(crate) peers: Vec<u64>,
    pub(crate) limits: HashMap<u32, usize>,
}

/// How a stream came to be, and so whether it waits for the legacy stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamKind {
    Legacy,
    PerThread,
    Blocking,
    NonBlocking,
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) ctx: u64,
    pub(crate) device: usize,
    pub(crate) kind: StreamKind,
    pub(crate) priority: i32,
    pub(crate) seq: u64,
    /// The step submitted last.
    pub(crate) tail: Option<Arc<Step>>,
    pub(crate) capture: Option<u64>,
    pub(crate) clock_ns: u64,
    /// Blocks freed on it that it may have again at once.
    pub(crate) freed: Vec<FreeJob>,
}

impl Stream {
    /// Whether it and the legacy stream wait for each other.
    pub(crate) fn syncs_with_legacy(&self) -> bool {
        matches!(self.kind, StreamKind::PerThread | StreamKind::Blocking)
    }
}

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) ctx: u64,
    pub(crate) flags: u32,
    /// The step recorded last.
    pub(crate) recorded: Option<Arc<Step>>,
    /// Recorded in a capturing stream: the capture and the nodes it stands for.
    pub(crate) captured: Option<(u64, Vec<usize>)>,
}

/// A memory pool: a name for a device's memory with a few attributes.
#[derive(Debug, Default)]
pub(crate) struct MemPool {
    pub(crate) device: usize,
    pub(crate) default: bool,
    pub(crate) attributes: HashMap<u32, u64>,
}

/// What one kind of memory is called in reports.
pub(crate) fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Device => "device memory",
        Kind::Pinned => "pinned memory",
        Kind::Registered => "registered memory",
        Kind::Managed => "managed memory",
    }
}

/// The contexts pushed by one thread. Plain data: nothing runs when the thread ends.
#[derive(Clone, Copy)]
struct Stack {
    contexts: [u64; 32],
    depth: usize,
}

thread_local! {
    static STACK: Cell<Stack> = const { Cell::new(Stack { contexts: [0; 32], depth: 0 }) };
    static THREAD: Cell<u64> = const { Cell::new(0) };
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
    static CAPTURE_MODE: Cell<u32> = const { Cell::new(0) };
    static HOST_NS: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// A number for the calling thread, never used again.
pub(crate) fn thread_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    THREAD.with(|cell| {
        if cell.get() == 0 {
            cell.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        cell.get()
    })
}

/// The calling thread's current context, 0 for none.
pub(crate) fn current() -> u64 {
    STACK.with(|cell| {
        let stack = cell.get();
        stack.depth.checked_sub(1).and_then(|top| stack.contexts.get(top)).copied().unwrap_or(0)
    })
}

/// Replaces the calling thread's current context (0 pops it).
pub(crate) fn set_current(ctx: u64) {
    if ctx == 0 {
        pop();
        return;
    }
    STACK.with(|cell| {
        let mut stack = cell.get();
        stack.depth = stack.depth.max(1);
        if let Some(top) = stack.contexts.get_mut(stack.depth - 1) {
            *top = ctx;
        }
        cell.set(stack);
    });
}

/// Pushes a context; false if the stack is full.
pub(crate) fn push(ctx: u64) -> bool {
    STACK.with(|cell| {
        let mut stack = cell.get();
        let Some(slot) = stack.contexts.get_mut(stack.depth) else { return false };
        *slot = ctx;
        stack.depth += 1;
        cell.set(stack);
        true
    })
}

/// Pops the current context, if there is one.
pub(crate) fn pop() -> Option<u64> {
    STACK.with(|cell| {
        let mut stack = cell.get();
        stack.depth = stack.depth.checked_sub(1)?;
        let ctx = stack.contexts.get(stack.depth).copied();
        cell.set(stack);
        ctx
    })
}

/// Whether the calling thread runs a host function of a stream.
pub(crate) fn in_callback() -> bool {
    IN_CALLBACK.with(Cell::get)
}

pub(crate) fn set_in_callback(inside: bool) {
    IN_CALLBACK.with(|cell| cell.set(inside));
}

/// The calling thread's capture interaction mode.
pub(crate) fn capture_mode() -> u32 {
    CAPTURE_MODE.with(Cell::get)
}

pub(crate) fn set_capture_mode(mode: u32) -> u32 {
    CAPTURE_MODE.with(|cell| cell.replace(mode))
}

/// The calling thread's virtual time; a thread that never waited starts at `now`.
pub(crate) fn host_ns(now: u64) -> u64 {
    HOST_NS.with(|cell| {
        if cell.get() == u64::MAX {
            cell.set(now);
        }
        cell.get()
    })
}

/// The calling thread's virtual time is at least this from now on.
pub(crate) fn host_reached(ns: u64) {
    HOST_NS.with(|cell| {
        let now = cell.get();
        cell.set(if now == u64::MAX { ns } else { now.max(ns) });
    });
}

/// The calling thread works for this long in virtual time.
pub(crate) fn host_works(now: u64, ns: u64) {
    let start = host_ns(now);
    HOST_NS.with(|cell| cell.set(start.saturating_add(ns)));
}
