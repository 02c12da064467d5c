//! Copies between the device and memory that is not page-locked, through page-locked slots: threads fill or empty them while
//! others travel.
//!
//! An asynchronous driver copy from or to pageable memory would do the same inside the driver with one thread, but blocks the
//! submitter and is documented only as "might be synchronous"; it is the fallback where nothing can be pinned, and the way
//! to go where the device reads ordinary memory itself.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::context::{Context, Way};
use super::copy;
use super::event::Event;
use super::host::Lent;
use super::ring::{Ring, Work, caught};
use super::slot::{Slot, in_a_slot};
use super::stream::Stream;
use crate::copy::pieces::{Blocks, Part, meeting};
use crate::copy::workers::Workers;
use crate::copy::{STAGED_PIECE, Sink, Source, chunks};
use crate::error::{Error, Result};
use crate::plan::Tuning;
use crate::pool::{PinnedBuffer, PinnedPool};
use crate::trace;

/// The threads of a copy to the host up to this size wait for the link awake: a sleep takes longer than a piece of it. On the way to the device
/// who waits leaves the memory to the others, and sleeps.
const AWAKE: usize = 64 << 20;

/// What several CPUs have just written the link reads slowly out of their caches, so below this size slots are filled past
/// these. In longer copies the link lags behind far enough, and what would be slow is its reading of memory beside all that the
/// CPUs do there.
const LARGE: usize = 192 << 20;

/// From this size on more threads fill slots: memory, not waking them, is what takes the time then.
const LONG: usize = 64 << 20;

/// The largest block on the way up of a copy that is not [`LARGE`]: larger ones are ready late.
const BLOCK_UP: usize = 4 << 20;

/// The parts of a copy by one thread: while one travels the next is filled.
const SUB_PIECE: usize = 128 << 10;

/// So many slots may be on their way at the end of copies; one more copy waits for the first.
const UNDER_WAY: usize = 16;

/// No slot is smaller, however small the pool: below, the driver's own way is as good.
const SMALLEST_SLOT: usize = 256 << 10;

/// The slots of a device, and what its staged copies go by.
#[derive(Debug)]
pub(crate) struct Staging {
    context: Arc<Context>,
    pool: PinnedPool,
    /// Bytes of a slot: as many as the largest piece has, less where the pool may not hold four of these.
    piece: usize,
    /// Those that no copy has now, oldest first: as many as copies had at one time, two for each thread.
    slots: Arc<Mutex<VecDeque<Slot>>>,
}

/// Gives the slots that nothing uses back to their pool; there may be others later.
fn release(slots: &Mutex<VecDeque<Slot>>) -> bool {
    let mut slots = slots.lock();
    let (idle, busy) =
        slots.drain(..).map(|mut slot| (slot.idle().unwrap_or(false), slot)).partition::<Vec<_>, _>(|(idle, _)| *idle);
    slots.extend(busy.into_iter().map(|(_, slot)| slot));
    drop(slots);
    drop(idle);
    true
}

impl Staging {
    pub(crate) fn new(context: &Arc<Context>, pool: &PinnedPool) -> Self {
        let slots: Arc<Mutex<VecDeque<Slot>>> = Arc::default();
        let kept = Arc::downgrade(&slots);
        pool.on_shortage(move || kept.upgrade().is_some_and(|slots| release(&slots)));
        let fourth = usize::try_from(pool.budget() / 4).unwrap_or(usize::MAX);
        // A power of two is a size of the pool's.
        let piece = (1 << fourth.max(1).ilog2()).clamp(SMALLEST_SLOT, STAGED_PIECE);
        Self { context: context.clone(), pool: pool.clone(), piece, slots }
    }

    /// Takes the slots out, each with the copy that may still use it: for the end, when they are to be freed.
    pub(crate) fn take_all(&mut self) -> Vec<(PinnedBuffer, Option<Arc<Event>>)> {
        std::mem::take(&mut *self.slots.lock()).into_iter().map(Slot::into_parts).collect()
    }

    /// So many slots; busy ones only where there are many, and none is free. Fewer, or none, where no more can be pinned.
    fn take(&self, count: usize) -> Vec<Slot> {
        let mut taken = Vec::with_capacity(count);
        let mut slots = self.slots.lock();
        // The last ones used that are free: they are in the CPU's caches. Each is asked once.
        let mut index = slots.len();
        while taken.len() < count && index > 0 {
            index -= 1;
            if slots.get_mut(index).is_some_and(|slot| slot.idle().unwrap_or(false)) {
                taken.extend(slots.remove(index));
            }
        }
        while taken.len() < count {
            // Perhaps those that are left are another stream's, which is held.
            let busy = if slots.len() < UNDER_WAY { None } else { slots.pop_front() };
            let slot = busy.or_else(|| {
                // Not under the lock: who finds no room has idle slots given back.
                MutexGuard::unlocked(&mut slots, || self.pool.try_acquire(self.piece).ok())
                    .map(Slot::new)
                    .or_else(|| slots.pop_front())
            });
            match slot {
                Some(slot) => taken.push(slot),
                None => break,
            }
        }
        taken
    }

    /// A slot for a copy by one thread, and where in it, if that needs no wait: behind a small one before on the same queue.
    fn take_one(&self, bytes: usize, stream: &Stream) -> Option<(Slot, Option<usize>)> {
        let mut slots = self.slots.lock();
        if let Some(start) = slots.back().and_then(|slot| slot.room(bytes, stream)) {
            return slots.pop_back().map(|slot| (slot, Some(start)));
        }
        drop(slots);
        self.take(1).pop().map(|slot| (slot, None))
    }

    /// Gives the slots that nothing uses back to the pool; for when memory is short.
    pub(crate) fn release(&self) {
        release(&self.slots);
    }

    fn give(&self, slots: impl IntoIterator<Item = Slot>) {
        self.slots.lock().extend(slots);
    }

    /// Copies `source`'s bytes to the device as `parts` say (ascending, disjoint), in the order of `stream`; into how many pieces
    /// they were cut. On return the source has been read; the device has the bytes once the stream has passed.
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
    ) -> Result<usize> {
        let bytes = parts.last().map_or(0, |part| part.source.end);
        // Waking others takes longer.
        if bytes <= tuning.crossover_up.min(self.piece)
            && let Some((slot, start)) = self.take_one(bytes, stream)
        {
            // SAFETY: the caller's.
            return unsafe { self.up_once(slot, start, parts, source, bytes, stream) };
        }
        // SAFETY: `share` returns when no thread is in the copy any more.
        let work = unsafe { Up { parts: Lent::new(parts), source: Lent::source(source), past_caches: bytes < LARGE } };
        let threads = if source.is_slow() || bytes >= LONG { tuning.busy_threads } else { tuning.threads };
        let largest = if source.is_slow() || bytes >= LARGE { self.piece } else { self.piece.min(BLOCK_UP) };
        let blocks = Blocks::new(bytes, tuning, at_most(threads), largest);
        if self.share(blocks, Way::Up, stream, Box::new(work))? {
            return Ok(blocks.count());
        }
        // SAFETY: the caller's.
        unsafe { up_unpinned(parts, source, bytes, stream) }
    }

    /// A copy by this thread through one slot; from `start` on nothing uses that.
    unsafe fn up_once(
        &self,
        mut slot: Slot,
        start: Option<usize>,
        parts: &[Part],
        source: &dyn Source,
        bytes: usize,
        stream: &Stream,
    ) -> Result<usize> {
        let step = || -> Result<()> {
            if start.is_none() {
                slot.wait()?;
            }
            let start = start.unwrap_or(0);
            let end = start.checked_add(bytes).filter(|&end| end <= slot.memory.len());
            let end = end.ok_or_else(|| Error::overflow("a staged piece"))?;
            for (_, piece) in chunks(bytes, SUB_PIECE) {
                // SAFETY: inside the slot (just checked), of which nothing uses these bytes; others may be on their way, so there is no
                // reference to the whole.
                let staged = unsafe {
                    let place = slot.host().add(start + piece.start);
                    source.fill(piece.start, std::slice::from_raw_parts_mut(place, piece.len()))?;
                    place
                };
                // SAFETY: the caller's word for the targets; the slot stays untouched until its event has passed.
                unsafe { submit_up(parts, &piece, staged, stream)? };
            }
            slot.used_up_to(end, Event::record(&self.context, stream)?, stream);
            Ok(())
        };
        let result = caught(step);
        self.settle(result.is_ok(), stream, stream, [slot]);
        result.map(|()| bytes.div_ceil(SUB_PIECE))
    }

    /// Copies `bytes` bytes from the device to `sink`, in the order of `stream`, and returns as [`up`](Staging::up); done then. `fresh`: the sink's
    /// pages are not there yet, and so many bytes lie before the first huge one's boundary.
    ///
    /// # Errors
    /// As [`up`](Staging::up).
    ///
    /// # Safety
    /// `source` is the device's, valid and undisturbed until this returns. The context is current.
    pub(crate) unsafe fn down(
        &self,
        sink: &dyn Sink,
        fresh: Option<usize>,
        source: u64,
        bytes: usize,
        tuning: &Tuning,
        stream: &Stream,
    ) -> Result<usize> {
        if bytes <= tuning.crossover_down.min(self.piece)
            && let Some(slot) = self.take(1).pop()
        {
            // SAFETY: the caller's.
            return unsafe { self.down_once(slot, sink, source, bytes, stream) };
        }
        // SAFETY: `share` returns when no thread is in the copy any more.
        let work = unsafe { Down { sink: Lent::sink(sink), source } };
        let blocks = match fresh {
            Some(phase) => Blocks::of_huge_pages(bytes, tuning, at_most(tuning.busy_threads), self.piece, phase),
            None => Blocks::new(bytes, tuning, at_most(tuning.threads), self.piece),
        };
        if self.share(blocks, Way::Down, stream, Box::new(work))? {
            return Ok(blocks.count());
        }
        // SAFETY: the caller's.
        unsafe { down_unpinned(sink, source, bytes, stream) }
    }

    unsafe fn down_once(
        &self,
        mut slot: Slot,
        sink: &dyn Sink,
        source: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Result<usize> {
        let step = || -> Result<()> {
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
                let waits = trace::range(c"wait", piece.len());
                event.wait_awake()?;
                drop(waits);
                let staged = slot.memory.get(piece.clone()).ok_or_else(|| Error::overflow("a staged piece"))?;
                sink.take(piece.start, staged)?;
            }
            Ok(())
        };
        let result = caught(step);
        self.settle(result.is_ok(), stream, stream, [slot]);
        result.map(|()| bytes.div_ceil(SUB_PIECE))
    }

    /// Does a copy with several threads; whether it was done: not where nothing can be pinned.
    fn share(&self, blocks: Blocks, way: Way, stream: &Stream, work: Box<dyn Work>) -> Result<bool> {
        let mut slots = self.take(blocks.under_way().min(blocks.count()).div_ceil(in_a_slot(self.piece, &blocks)));
        if slots.is_empty() {
            return Ok(false);
        }
        // On the caller's own stream: on one of ours it would hold up, and be held up by, copies of others. But the default stream
        // of a thread is another one for those that help.
        let detour = stream.is_per_thread();
        let lane = if detour { self.detour(way, stream) } else { Ok(stream.clone()) };
        let lane = match lane {
            Ok(lane) => lane,
            Err(error) => {
                self.give(slots);
                return Err(error);
            }
        };
        let places = slots.iter().flat_map(|slot| slot.places(&blocks)).take(blocks.count()).collect();
        let awake = way == Way::Down && blocks.bytes() <= AWAKE;
        // SAFETY: the places lie apart in the slots, which are this function's until the copy is over.
        let ring = unsafe { Ring::new(&self.context, lane.clone(), way, blocks, awake, places, work) };
        let (ring, helpers) = (Arc::new(ring), blocks.threads - 1);
        let here = ring.clone();
        ring.begin();
        let take_part = move || {
            let _range = trace::range(c"stage", blocks.bytes());
            here.take_part();
        };
        Workers::get().run(helpers, Box::new(take_part));
        let mut error = ring.error();
        if error.is_none() {
            // Each has held a block, so what used it before has passed.
            match self.passed(way, &lane, detour.then_some(stream)) {
                Ok(busy) => slots.iter_mut().for_each(|slot| slot.used(busy.clone())),
                Err(failed) => error = Some(failed),
            }
        }
        self.settle(error.is_none(), &lane, stream, slots);
        error.map_or(Ok(true), Err)
    }

    /// What tells that a copy's slots are free; `after` goes on then.
    fn passed(&self, way: Way, lane: &Stream, after: Option<&Stream>) -> Result<Option<Arc<Event>>> {
        if way == Way::Down {
            return Ok(None);
        }
        let event = Event::record(&self.context, lane)?;
        after.map_or(Ok(()), |stream| stream.wait_for(&event))?;
        Ok(Some(Arc::new(event)))
    }

    /// A stream of ours that comes after the caller's.
    fn detour(&self, way: Way, stream: &Stream) -> Result<Stream> {
        let lane = self.context.copy_stream(way)?;
        lane.wait_for(&Event::record(&self.context, stream)?)?;
        Ok(lane)
    }

    /// Takes slots back. After an error nothing may use them when the next copy takes them, whether or not the event of each
    /// was recorded: all that was submitted is waited for, and where that fails they are kept for ever.
    fn settle(&self, good: bool, lane: &Stream, stream: &Stream, slots: impl IntoIterator<Item = Slot>) {
        if good {
            return self.give(slots);
        }
        let idle = lane.synchronize();
        if idle.is_err() {
            // What is waited for later is the caller's stream: it comes after the lane, if that can be said.
            let _ = Event::record(&self.context, lane).and_then(|event| stream.wait_for(&event));
        }
        for mut slot in slots {
            // What it waits for may be an earlier copy, on another stream.
            match (&idle, slot.idle()) {
                (Ok(()), Ok(_)) => self.give([slot]),
                _ => {
                    self.context.count_leak();
                    std::mem::forget(slot);
                }
            }
        }
    }
}

/// So many threads, or those that there are: there are slots for all of them.
fn at_most(threads: usize) -> usize {
    threads.min(Workers::get().limit())
}

/// Host memory to places on the device.
struct Up {
    parts: Lent<[Part]>,
    source: Lent<dyn Source>,
    past_caches: bool,
}

impl Work for Up {
    unsafe fn submit(&self, block: Range<usize>, place: *mut u8, lane: &Stream) -> Result<()> {
        // SAFETY: the targets are the word given to `up`; the place that to this call.
        unsafe { submit_up(self.parts.get(), &block, place, lane) }
    }

    fn part(&self, part: Range<usize>, there: &mut [u8]) -> Result<()> {
        let source = self.source.get();
        if self.past_caches { source.fill_past_caches(part.start, there) } else { source.fill(part.start, there) }
    }
}

/// The device's memory to the host.
struct Down {
    sink: Lent<dyn Sink>,
    source: u64,
}

impl Work for Down {
    unsafe fn submit(&self, block: Range<usize>, place: *mut u8, lane: &Stream) -> Result<()> {
        // SAFETY: the source is the word given to `down`; the place that to this call.
        unsafe { copy::device_to_host(place, self.source + block.start as u64, block.len(), lane) }
    }

    fn part(&self, part: Range<usize>, there: &mut [u8]) -> Result<()> {
        self.sink.get().take(part.start, there)
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
unsafe fn up_unpinned(parts: &[Part], source: &dyn Source, bytes: usize, stream: &Stream) -> Result<usize> {
    let mut buffer = vec![0u8; STAGED_PIECE.min(bytes)];
    chunks(bytes, STAGED_PIECE).try_for_each(|(_, piece)| {
        source.fill(piece.start, buffer.get_mut(..piece.len()).unwrap_or_default())?;
        // SAFETY: the caller's; the wait ends the copies before the buffer is used again.
        let submitted = unsafe { submit_up(parts, &piece, buffer.as_ptr(), stream) };
        stream.synchronize().and(submitted)
    })?;
    Ok(bytes.div_ceil(STAGED_PIECE))
}

/// As [`up_unpinned`].
unsafe fn down_unpinned(sink: &dyn Sink, source: u64, bytes: usize, stream: &Stream) -> Result<usize> {
    let mut buffer = vec![0u8; STAGED_PIECE.min(bytes)];
    chunks(bytes, STAGED_PIECE).try_for_each(|(_, piece)| {
        let from = source + piece.start as u64;
        // SAFETY: the caller's; the wait ends the copy before the buffer is looked at.
        let submitted = unsafe { copy::device_to_host(buffer.as_mut_ptr(), from, piece.len(), stream) };
        stream.synchronize().and(submitted)?;
        sink.take(piece.start, buffer.get(..piece.len()).unwrap_or_default())
    })?;
    Ok(bytes.div_ceil(STAGED_PIECE))
}
