//! Copies between the device and memory that is not page-locked, through page-locked slots: threads fill or empty them while
//! others travel.
//!
//! An asynchronous driver copy from or to pageable memory would do the same inside the driver with one thread, but blocks the
//! submitter and is documented only as "might be synchronous"; it is the fallback where nothing can be pinned, and the way
//! to go where the device reads ordinary memory itself.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::context::{Context, Way};
use super::copy;
use super::event::Event;
use super::memory::Address;
use super::stream::Stream;
use crate::copy::pieces::{Part, Pieces, meeting};
use crate::copy::workers::Workers;
use crate::copy::{STAGED_PIECE, Sink, Source, chunks};
use crate::error::{Error, Result};
use crate::os::{HUGE_PAGE, copy_past_caches};
use crate::plan::Tuning;
use crate::pool::{PinnedBuffer, PinnedPool};

/// The threads of a copy up to this size wait for the link awake: a sleep takes longer than a piece of it.
const AWAKE: usize = 64 << 20;

/// The parts of a copy by one thread: while one travels the next is filled.
const SUB_PIECE: usize = 128 << 10;

/// So many small uploads may be on their way; one more waits for the first.
const IN_FLIGHT: usize = 8;

/// How long a thread sleeps while the link is behind.
const NAP: Duration = Duration::from_micros(20);

/// Above this a result is written past the caches: it would not stay in them.
const PAST_CACHES: usize = 1 << 20;

/// The slots of a device, and what its staged copies go by.
#[derive(Debug)]
pub(crate) struct Staging {
    context: Arc<Context>,
    pool: PinnedPool,
    /// Those that no copy has now, oldest first: as many as copies had at one time, two for each thread.
    slots: Mutex<VecDeque<Slot>>,
    /// Taken for calls of the driver while several threads copy: its own lock puts who waits for it to sleep, and waking up
    /// takes longer than a piece.
    turn: Mutex<()>,
}

#[derive(Debug)]
struct Slot {
    memory: PinnedBuffer,
    /// The copy that still uses it.
    busy: Option<Arc<Event>>,
}

impl Slot {
    /// Waits for the copy that uses it, awake.
    fn wait(&mut self) -> Result<()> {
        if let Some(event) = &self.busy {
            event.wait_awake()?;
            self.busy = None;
        }
        Ok(())
    }

    /// As [`wait`](Slot::wait), in turn with the copy's other threads; asleep, where the copy is long.
    fn wait_in_turn(&mut self, turn: &Mutex<()>, awake: bool) -> Result<()> {
        let Some(event) = &self.busy else { return Ok(()) };
        loop {
            let passed = {
                let _turn = spin(turn);
                event.query()?
            };
            if passed {
                self.busy = None;
                return Ok(());
            }
            if awake {
                (0..200).for_each(|_| std::hint::spin_loop());
            } else {
                std::thread::sleep(NAP);
            }
        }
    }

    /// Whether nothing uses it.
    fn idle(&mut self) -> bool {
        if self.busy.as_ref().is_some_and(|event| event.query().is_ok_and(|passed| passed)) {
            self.busy = None;
        }
        self.busy.is_none()
    }

    fn host(&self) -> *mut u8 {
        self.memory.host().as_ptr()
    }
}

impl Staging {
    pub(crate) fn new(context: &Arc<Context>, pool: &PinnedPool) -> Self {
        Self { context: context.clone(), pool: pool.clone(), slots: Mutex::default(), turn: Mutex::default() }
    }

    /// Takes the slots out, each with the copy that may still use it: for the end, when they are to be freed.
    pub(crate) fn take(&mut self) -> Vec<(PinnedBuffer, Option<Arc<Event>>)> {
        self.slots.get_mut().drain(..).map(|slot| (slot.memory, slot.busy)).collect()
    }

    /// A slot, perhaps still busy; `None` where nothing can be pinned.
    fn slot(&self) -> Option<Slot> {
        let oldest = self.slots.lock().pop_front();
        oldest.or_else(|| self.new_slot())
    }

    fn new_slot(&self) -> Option<Slot> {
        match self.pool.try_acquire(STAGED_PIECE) {
            Ok(memory) => Some(Slot { memory, busy: None }),
            Err(_) => self.slots.lock().pop_front(),
        }
    }

    /// As [`slot`](Staging::slot), for one that is used alone: the last one used, if it is free, for it is in the CPU's caches.
    fn hot_slot(&self) -> Option<Slot> {
        let mut slots = self.slots.lock();
        if slots.back_mut().is_some_and(Slot::idle) {
            return slots.pop_back();
        }
        if slots.front_mut().is_some_and(Slot::idle) {
            return slots.pop_front();
        }
        if slots.len() >= IN_FLIGHT {
            return slots.pop_front();
        }
        drop(slots);
        self.new_slot()
    }

    /// Gives the slots that nothing uses back to the pool; for when memory is short.
    pub(crate) fn release(&self) {
        let mut slots = self.slots.lock();
        let idle = slots.iter_mut().map_while(|slot| slot.idle().then_some(())).count();
        let released: Vec<_> = slots.drain(..idle).collect();
        drop(slots);
        drop(released);
    }

    fn give(&self, slots: impl IntoIterator<Item = Slot>) {
        self.slots.lock().extend(slots);
    }

    /// Copies `source`'s bytes to the device as `parts` say (ascending, disjoint), in the order of `stream`. On return the
    /// source has been read; the device has the bytes once the stream has passed.
    ///
    /// # Errors
    /// The source's own, or the driver refused a piece. What was submitted before has run when this returns; the target is
    /// partly written.
    ///
    /// # Safety
    /// The parts' targets are the device's, valid and undisturbed until the stream has passed. The context is current.
    pub(crate) unsafe fn up(
        &self,
        parts: &[Part],
        source: &dyn Source,
        tuning: &Tuning,
        stream: &Stream,
    ) -> Result<()> {
        let bytes = parts.last().map_or(0, |part| part.source.end);
        // Waking others takes longer.
        if bytes <= tuning.crossover_up.min(STAGED_PIECE)
            && let Some(slot) = self.hot_slot()
        {
            // SAFETY: the caller's.
            return unsafe { self.up_once(slot, parts, source, bytes, stream) };
        }
        let pieces = Pieces::new(bytes, 0, tuning, STAGED_PIECE);
        // SAFETY: `share` returns when no thread is in the job any more.
        let source_there = unsafe { Lent::source(source) };
        // SAFETY: as above.
        let parts_there = unsafe { Lent::new(parts) };
        let awake = bytes <= AWAKE;
        let each = move |job: &Job, slot: &mut Slot, piece: Range<usize>| -> Result<()> {
            slot.wait_in_turn(job.turn, awake)?;
            let staged = slot.memory.get_mut(..piece.len()).ok_or_else(|| Error::overflow("a staged piece"))?;
            source_there.get().fill(piece.start, staged)?;
            let _turn = spin(job.turn);
            // SAFETY: the caller's word for the targets; the slot stays untouched until its event has passed.
            unsafe { submit_up(parts_there.get(), &piece, slot.host(), job.lane)? };
            slot.busy = Some(Arc::new(Event::record(job.context, job.lane)?));
            Ok(())
        };
        let rest = self.share(pieces, Way::Up, stream, true, Box::new(Single(each)))?;
        if rest < bytes {
            // SAFETY: the caller's.
            return unsafe { up_unpinned(parts, source, rest..bytes, stream) };
        }
        Ok(())
    }

    /// A copy by this thread through one slot.
    unsafe fn up_once(
        &self,
        mut slot: Slot,
        parts: &[Part],
        source: &dyn Source,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        let mut step = || -> Result<()> {
            slot.wait()?;
            for (_, piece) in chunks(bytes, SUB_PIECE) {
                let staged = slot.memory.get_mut(piece.clone()).ok_or_else(|| Error::overflow("a staged piece"))?;
                source.fill(piece.start, staged)?;
                // SAFETY: the caller's word for the targets; the slot stays untouched until its event has passed.
                unsafe { submit_up(parts, &piece, slot.host().add(piece.start), stream)? };
            }
            slot.busy = Some(Arc::new(Event::record(&self.context, stream)?));
            Ok(())
        };
        let result = step();
        self.settle(result.is_ok(), std::slice::from_ref(stream), stream, [slot]);
        result
    }

    /// Copies `bytes` bytes from the device to `sink`, in the order of `stream`; done when it returns.
    ///
    /// # Errors
    /// As [`up`](Staging::up).
    ///
    /// # Safety
    /// `source` is the device's, valid and undisturbed until this returns. The context is current.
    pub(crate) unsafe fn down(
        &self,
        sink: &dyn Sink,
        phase: usize,
        source: u64,
        bytes: usize,
        tuning: &Tuning,
        stream: &Stream,
    ) -> Result<()> {
        if bytes <= tuning.crossover_down.min(STAGED_PIECE)
            && let Some(slot) = self.hot_slot()
        {
            // SAFETY: the caller's.
            return unsafe { self.down_once(slot, sink, source, bytes, stream) };
        }
        let pieces = Pieces::new(bytes, phase, tuning, STAGED_PIECE);
        // SAFETY: `share` returns when no thread is in the job any more.
        let sink_there = unsafe { Lent::sink(sink) };
        let awake = bytes <= AWAKE;
        let fetch = move |job: &Job, slot: &mut Slot, piece: Range<usize>| -> Result<()> {
            slot.wait_in_turn(job.turn, awake)?;
            let _turn = spin(job.turn);
            // SAFETY: the slot is idle and stays ours until its event has passed; the source is valid by the caller's word.
            unsafe { copy::device_to_host(slot.host(), source + piece.start as u64, piece.len(), job.lane)? };
            slot.busy = Some(Arc::new(Event::record(job.context, job.lane)?));
            Ok(())
        };
        let empty = move |job: &Job, slot: &mut Slot, piece: Range<usize>| -> Result<()> {
            slot.wait_in_turn(job.turn, awake)?;
            let staged = slot.memory.get(..piece.len()).ok_or_else(|| Error::overflow("a staged piece"))?;
            sink_there.get().take(piece.start, staged)
        };
        let rest = self.share(pieces, Way::Down, stream, false, Box::new(Double(fetch, empty)))?;
        if rest < bytes {
            // SAFETY: the caller's.
            return unsafe { down_unpinned(sink, source, rest..bytes, stream) };
        }
        Ok(())
    }

    unsafe fn down_once(
        &self,
        mut slot: Slot,
        sink: &dyn Sink,
        source: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        let mut step = || -> Result<()> {
            slot.wait()?;
            let mut arrivals = Vec::with_capacity(bytes.div_ceil(SUB_PIECE));
            for (_, piece) in chunks(bytes, SUB_PIECE) {
                // SAFETY: the slot is idle and stays ours until its events have passed; the source is the caller's word.
                unsafe {
                    let staged = slot.host().add(piece.start);
                    copy::device_to_host(staged, source + piece.start as u64, piece.len(), stream)?;
                }
                arrivals.push((Event::record(&self.context, stream)?, piece));
            }
            for (event, piece) in arrivals {
                event.wait_awake()?;
                let staged = slot.memory.get(piece.clone()).ok_or_else(|| Error::overflow("a staged piece"))?;
                sink.take(piece.start, staged)?;
            }
            Ok(())
        };
        let result = step();
        self.settle(result.is_ok(), std::slice::from_ref(stream), stream, [slot]);
        result
    }

    /// Does the pieces with several threads; where the first begins that nobody could do for want of slots.
    fn share(&self, pieces: Pieces, way: Way, stream: &Stream, join: bool, work: Box<dyn Work>) -> Result<usize> {
        let lanes =
            std::env::var("TT_LANES").ok().and_then(|l| l.parse().ok()).unwrap_or(Context::LANES).min(pieces.threads);
        let lanes = (0..lanes).map(|lane| self.context.lane(way, lane)).collect::<Result<Vec<_>>>()?;
        let start = Event::record(&self.context, stream)?;
        lanes.iter().try_for_each(|lane| lane.wait_for(&start))?;
        let job = Arc::new(Shared {
            pieces,
            next: AtomicUsize::new(0),
            came: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
            used: Mutex::new(Vec::new()),
            lanes,
            work,
        });
        // SAFETY: `run` returns when no thread is in the job any more.
        let staging = unsafe { Lent::new(self) };
        let here = job.clone();
        Workers::get().run(pieces.threads - 1, Box::new(move || here.take_part(staging.get())));
        let mut error = job.error.lock().take();
        if join && error.is_none() {
            // The caller's stream goes on when the pieces are there.
            let arrived = job.lanes.iter().try_for_each(|lane| stream.wait_for(&Event::record(&self.context, lane)?));
            error = arrived.err();
        }
        self.settle(error.is_none(), &job.lanes, stream, std::mem::take(&mut *job.used.lock()));
        match error {
            Some(error) => Err(error),
            None => Ok(job.next.load(Ordering::SeqCst)),
        }
    }

    /// Takes slots back. After an error nothing may use them when the next copy takes them, whether or not the event of each
    /// was recorded: all that was submitted is waited for, and where that fails they are kept for ever.
    fn settle(&self, good: bool, lanes: &[Stream], stream: &Stream, slots: impl IntoIterator<Item = Slot>) {
        if good {
            return self.give(slots);
        }
        let idle = lanes.iter().map(Stream::synchronize).fold(Ok(()), Result::and);
        if idle.is_err() {
            // What is waited for later is the caller's stream: it comes after them, if that can be said.
            let _ = lanes.iter().try_for_each(|lane| stream.wait_for(&Event::record(&self.context, lane)?));
        }
        for mut slot in slots {
            slot.busy = None;
            match idle {
                Ok(()) => self.give([slot]),
                Err(_) => std::mem::forget(slot),
            }
        }
    }
}

/// What one thread needs for its pieces.
struct Job<'j> {
    context: &'j Arc<Context>,
    lane: &'j Stream,
    turn: &'j Mutex<()>,
}

/// Takes a lock that is held for a few microseconds, without sleeping.
fn spin(turn: &Mutex<()>) -> MutexGuard<'_, ()> {
    for _ in 0..1000 {
        if let Some(guard) = turn.try_lock() {
            return guard;
        }
        (0..20).for_each(|_| std::hint::spin_loop());
    }
    turn.lock()
}

/// What is done with a thread's two slots.
trait Work: Send + Sync {
    /// Begins a piece in a slot.
    fn begin(&self, job: &Job, slot: &mut Slot, piece: Range<usize>) -> Result<()>;

    /// Ends it.
    fn end(&self, job: &Job, slot: &mut Slot, piece: Range<usize>) -> Result<()>;
}

/// Nothing is left to do when a piece is submitted.
struct Single<F>(F);

impl<F: Fn(&Job, &mut Slot, Range<usize>) -> Result<()> + Send + Sync> Work for Single<F> {
    fn begin(&self, job: &Job, slot: &mut Slot, piece: Range<usize>) -> Result<()> {
        (self.0)(job, slot, piece)
    }

    fn end(&self, _: &Job, _: &mut Slot, _: Range<usize>) -> Result<()> {
        Ok(())
    }
}

/// A piece is submitted, and looked at when it has come.
struct Double<F, E>(F, E);

impl<F, E> Work for Double<F, E>
where
    F: Fn(&Job, &mut Slot, Range<usize>) -> Result<()> + Send + Sync,
    E: Fn(&Job, &mut Slot, Range<usize>) -> Result<()> + Send + Sync,
{
    fn begin(&self, job: &Job, slot: &mut Slot, piece: Range<usize>) -> Result<()> {
        (self.0)(job, slot, piece)
    }

    fn end(&self, job: &Job, slot: &mut Slot, piece: Range<usize>) -> Result<()> {
        (self.1)(job, slot, piece)
    }
}

/// A copy that threads do together.
struct Shared {
    pieces: Pieces,
    /// Where the next piece begins.
    next: AtomicUsize,
    came: AtomicUsize,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
    used: Mutex<Vec<Slot>>,
    lanes: Vec<Stream>,
    work: Box<dyn Work>,
}

impl Shared {
    /// What each thread does: takes two slots, then piece after piece, each begun before the one before it is ended.
    fn take_part(&self, staging: &Staging) {
        let came = self.came.fetch_add(1, Ordering::Relaxed);
        let Some(lane) = self.lanes.get(came % self.lanes.len().max(1)) else { return };
        let mut slots = Vec::with_capacity(2);
        if let Err(error) = self.pieces_of_one(staging, lane, &mut slots) {
            self.failed.store(true, Ordering::SeqCst);
            self.error.lock().get_or_insert(error);
        }
        self.used.lock().append(&mut slots);
    }

    fn pieces_of_one(&self, staging: &Staging, lane: &Stream, slots: &mut Vec<Slot>) -> Result<()> {
        let context = &staging.context;
        let _bound = context.to_submit()?;
        let job = Job { context, lane, turn: &staging.turn };
        let mut begun: Option<(usize, Range<usize>)> = None;
        loop {
            if slots.len() < 2 {
                slots.extend(staging.slot());
            }
            let index = match (&begun, slots.len()) {
                (_, 0) => return Ok(()),
                (Some((used, _)), 2) => 1 - used.min(&1),
                _ => 0,
            };
            // With one slot, what is in it must be ended before the next begins.
            if slots.len() == 1
                && let Some((index, piece)) = begun.take()
            {
                self.end(&job, slots, index, piece)?;
            }
            let piece = if self.failed.load(Ordering::SeqCst) { None } else { self.claim() };
            if let Some(piece) = &piece
                && let Some(slot) = slots.get_mut(index)
            {
                self.work.begin(&job, slot, piece.clone())?;
            }
            let last = piece.is_none();
            if let Some((index, piece)) = std::mem::replace(&mut begun, piece.map(|piece| (index, piece))) {
                self.end(&job, slots, index, piece)?;
            }
            if last {
                return Ok(());
            }
        }
    }

    fn claim(&self) -> Option<Range<usize>> {
        let end = |start| self.pieces.at(start).map(|piece| piece.end);
        self.pieces.at(self.next.fetch_update(Ordering::SeqCst, Ordering::SeqCst, end).ok()?)
    }

    fn end(&self, job: &Job, slots: &mut [Slot], index: usize, piece: Range<usize>) -> Result<()> {
        slots.get_mut(index).map_or(Ok(()), |slot| self.work.end(job, slot, piece))
    }
}

/// Submits what of `piece`, which lies at `staged`, goes where.
///
/// # Safety
/// As [`copy::host_to_device`], for each part.
unsafe fn submit_up(parts: &[Part], piece: &Range<usize>, staged: *const u8, lane: &Stream) -> Result<()> {
    meeting(parts, piece).try_for_each(|(range, target)| {
        // SAFETY: the caller's; the range lies inside the piece.
        unsafe { copy::host_to_device(target, staged.add(range.start - piece.start), range.len(), lane) }
    })
}

/// Without page-locked memory: the driver's own way, from a buffer, piece by piece.
unsafe fn up_unpinned(parts: &[Part], source: &dyn Source, rest: Range<usize>, stream: &Stream) -> Result<()> {
    let mut buffer = vec![0u8; STAGED_PIECE.min(rest.len())];
    let mut from = rest.start;
    while from < rest.end {
        let piece = from..rest.end.min(from + buffer.len());
        source.fill(piece.start, buffer.get_mut(..piece.len()).unwrap_or_default())?;
        // SAFETY: the caller's; the wait ends the copies before the buffer is used again.
        let submitted = unsafe { submit_up(parts, &piece, buffer.as_ptr(), stream) };
        stream.synchronize().and(submitted)?;
        from = piece.end;
    }
    Ok(())
}

/// As [`up_unpinned`].
unsafe fn down_unpinned(sink: &dyn Sink, source: u64, rest: Range<usize>, stream: &Stream) -> Result<()> {
    let mut buffer = vec![0u8; STAGED_PIECE.min(rest.len())];
    let mut from = rest.start;
    while from < rest.end {
        let piece = from..rest.end.min(from + buffer.len());
        // SAFETY: the caller's; the wait ends the copy before the buffer is looked at.
        let submitted = unsafe { copy::device_to_host(buffer.as_mut_ptr(), source + from as u64, piece.len(), stream) };
        stream.synchronize().and(submitted)?;
        sink.take(piece.start, buffer.get(..piece.len()).unwrap_or_default())?;
        from = piece.end;
    }
    Ok(())
}

/// Ordinary host memory that is read.
pub(crate) struct HostSource(Address);

impl HostSource {
    /// # Safety
    /// `start` is readable for the whole copy, from any thread.
    pub(crate) unsafe fn new(start: *const u8) -> Option<Self> {
        std::ptr::NonNull::new(start.cast_mut()).map(|start| Self(Address(start)))
    }
}

impl Source for HostSource {
    fn fill(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        // SAFETY: by the word given to `new`; the engine asks for nothing beyond the copy's length.
        unsafe { std::ptr::copy_nonoverlapping(self.0.get().as_ptr().add(offset), into.as_mut_ptr(), into.len()) };
        Ok(())
    }
}

/// Ordinary host memory that is written.
pub(crate) struct HostSink {
    start: Address,
    past_caches: bool,
}

impl HostSink {
    /// # Safety
    /// `start` is writable for `bytes` bytes, and nobody looks there, until the copy returns.
    pub(crate) unsafe fn new(start: *mut u8, bytes: usize) -> Option<Self> {
        let start = Address(std::ptr::NonNull::new(start)?);
        Some(Self { start, past_caches: bytes >= PAST_CACHES })
    }

    /// The bytes before the first huge page's boundary: two threads should not make one page.
    pub(crate) fn phase(&self) -> usize {
        self.start.get().as_ptr().align_offset(HUGE_PAGE)
    }
}

impl Sink for HostSink {
    fn take(&self, offset: usize, from: &[u8]) -> Result<()> {
        // SAFETY: by the word given to `new`; the engine gives nothing beyond the copy's length.
        unsafe {
            let target = self.start.get().as_ptr().add(offset);
            if self.past_caches {
                copy_past_caches(from.as_ptr(), target, from.len());
            } else {
                std::ptr::copy_nonoverlapping(from.as_ptr(), target, from.len());
            }
        }
        Ok(())
    }
}

/// A reference that threads of a job use, which ends before the reference does.
struct Lent<T: ?Sized>(*const T);

// SAFETY: used as a shared reference to a `Sync` value.
unsafe impl<T: ?Sized + Sync> Send for Lent<T> {}
// SAFETY: as above.
unsafe impl<T: ?Sized + Sync> Sync for Lent<T> {}

impl<T: ?Sized> Clone for Lent<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: ?Sized> Copy for Lent<T> {}

impl<T: ?Sized> Lent<T> {
    /// # Safety
    /// Nobody calls `get` once the reference is over.
    unsafe fn new(value: &T) -> Self {
        Self(value)
    }

    fn get(&self) -> &T {
        // SAFETY: the word given when it was made.
        unsafe { &*self.0 }
    }
}

impl Lent<dyn Source> {
    /// # Safety
    /// As [`new`](Lent::new).
    unsafe fn source(value: &dyn Source) -> Self {
        // SAFETY: only the lifetime in the type changes; the caller's word keeps to it.
        Self(unsafe { std::mem::transmute::<*const (dyn Source + '_), *const dyn Source>(value) })
    }
}

impl Lent<dyn Sink> {
    /// # Safety
    /// As [`new`](Lent::new).
    unsafe fn sink(value: &dyn Sink) -> Self {
        // SAFETY: as for a source.
        Self(unsafe { std::mem::transmute::<*const (dyn Sink + '_), *const dyn Sink>(value) })
    }
}
