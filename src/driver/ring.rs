//! One copy through page-locked slots by several threads.
//!
//! A block of the copy has a place in a slot while it is filled or emptied and while it travels; blocks take the places in turn. Threads
//! take the parts of the blocks in order. On the way up who ends the last part of a block sends it off, and who needs the
//! place next looks whether it has arrived; on the way down the first blocks are sent for at the beginning, who needs one looks
//! whether it is there, and who empties its last part sends for the next one of that place.
//!
//! Nobody waits for a block that was taken later than his own, so all of them get on.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::context::{Context, Way};
use super::event::Event;
use super::pinned::Address;
use super::stream::Stream;
use crate::copy::pieces::Blocks;
use crate::error::{Error, Result, quietly};

/// How long a thread of a long copy sleeps while the link is behind; waking takes longer still. On the way up
/// memory is the bottleneck and a wait is short; on the way down it is the link.
const NAP_UP: Duration = Duration::from_micros(20);
const NAP_DOWN: Duration = Duration::from_micros(60);

/// What is done with blocks and parts.
pub(super) trait Work: Send + Sync {
    /// Submits a block that lies, or is to lie, in a place.
    ///
    /// # Safety
    /// The place holds the block, and stays untouched until the lane has passed.
    unsafe fn submit(&self, block: Range<usize>, place: *mut u8, lane: &Stream) -> Result<()>;

    /// Fills or empties a part, which is there.
    fn part(&self, part: Range<usize>, there: &mut [u8]) -> Result<()>;
}

pub(super) struct Ring {
    context: Arc<Context>,
    lane: Stream,
    way: Way,
    blocks: Blocks,
    awake: bool,
    places: Vec<Place>,
    /// The next part: the block's number, and the part's in it.
    next: Mutex<(usize, usize)>,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
    work: Box<dyn Work>,
}

/// Room for a block, and what is in it.
struct Place {
    host: Address,
    /// The block whose parts may be worked on.
    open: AtomicUsize,
    /// How many of its parts are not done.
    left: AtomicUsize,
    travels: Mutex<Travels>,
}

/// The block that travels, and the event behind it.
struct Travels {
    block: usize,
    event: Option<Arc<Event>>,
}

/// What `work` returns, an error where it panics: what it has submitted is still to be waited for.
pub(super) fn caught(work: impl FnOnce() -> Result<()>) -> Result<()> {
    quietly(work).and_then(|result| result)
}

/// No block.
const NONE: usize = usize::MAX;

impl Ring {
    /// `places`: each with the copy that may still use it.
    ///
    /// # Safety
    /// The places are page-locked, each as long as any block, and the ring's alone until no thread is in it any more.
    pub(super) unsafe fn new(
        context: &Arc<Context>,
        lane: Stream,
        way: Way,
        blocks: Blocks,
        awake: bool,
        places: Vec<(Address, Option<Arc<Event>>)>,
        work: Box<dyn Work>,
    ) -> Self {
        let count = places.len();
        let place = |(index, (host, busy)): (usize, (Address, Option<Arc<Event>>))| {
            // On the way up a place that nothing uses is open at once. One that something does yet holds the block before.
            let open = way == Way::Up && busy.is_none();
            let parts = blocks.block(index).map_or(0, |block| blocks.parts(&block));
            Place {
                host,
                open: AtomicUsize::new(if open { index } else { NONE }),
                left: AtomicUsize::new(if open { parts } else { 0 }),
                travels: Mutex::new(Travels { block: index.wrapping_sub(count), event: busy }),
            }
        };
        Self {
            context: context.clone(),
            lane,
            way,
            blocks,
            awake,
            places: places.into_iter().enumerate().map(place).collect(),
            next: Mutex::new((0, 0)),
            failed: AtomicBool::new(false),
            error: Mutex::new(None),
            work,
        }
    }

    /// On the way down: sends for the first blocks.
    pub(super) fn begin(&self) {
        if self.way == Way::Down {
            let sent = self.places.iter().enumerate().try_for_each(|(index, place)| {
                // It stays there: if the wait fails, the slot is still in use.
                let before = place.travels.lock().event.clone();
                if let Some(event) = before {
                    let _range = crate::trace::range(c"wait", self.blocks.largest());
                    event.wait_awake()?;
                }
                self.send(place, index)
            });
            self.note(sent);
        }
    }

    /// What each thread does: part after part.
    pub(super) fn take_part(&self) {
        // Others wait for the parts that a thread has begun.
        self.note(caught(|| self.parts()));
    }

    fn note(&self, result: Result<()>) {
        if let Err(error) = result {
            self.error.lock().get_or_insert(error);
            self.failed.store(true, Ordering::SeqCst);
        }
    }

    /// The first error.
    pub(super) fn error(&self) -> Option<Error> {
        self.error.lock().take()
    }

    fn parts(&self) -> Result<()> {
        // Entered, not only bound: events are asked for.
        let _bound = self.context.enter()?;
        while let Some((index, block, part)) = self.claim() {
            let Some(place) = self.places.get(index % self.places.len()) else { return Ok(()) };
            if !self.wait(place, index, &block)? {
                return Ok(());
            }
            let range = self.blocks.part(&block, part);
            // SAFETY: the place holds a block, the part lies in it and is this thread's alone; nothing travels until all parts
            // are done.
            let memory = unsafe {
                std::slice::from_raw_parts_mut(place.host.get().as_ptr().add(range.start - block.start), range.len())
            };
            self.work.part(range, memory)?;
            // Who is last sees what all the others wrote.
            if place.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                match self.way {
                    Way::Up => self.send(place, index)?,
                    Way::Down => self.send(place, index.saturating_add(self.places.len()))?,
                }
            }
        }
        Ok(())
    }

    fn claim(&self) -> Option<(usize, Range<usize>, usize)> {
        if self.failed.load(Ordering::SeqCst) {
            return None;
        }
        let mut next = self.next.lock();
        let (index, part) = *next;
        let block = self.blocks.block(index)?;
        *next = if part + 1 < self.blocks.parts(&block) { (index, part + 1) } else { (index + 1, 0) };
        Some((index, block, part))
    }

    /// Submits a block, if there is one of that number.
    fn send(&self, place: &Place, index: usize) -> Result<()> {
        let Some(block) = self.blocks.block(index) else { return Ok(()) };
        let mut travels = place.travels.lock();
        // SAFETY: the place is as large as any block, holds it (up) or is done with the one before (down), and nobody
        // touches it until the event has passed.
        unsafe { self.work.submit(block, place.host.get().as_ptr(), &self.lane)? };
        // On the way up nobody asks about the last block of a place: an event behind them all is the caller's.
        let asked = self.way == Way::Down || self.blocks.count() - index > self.places.len();
        let event = if asked { Some(Arc::new(Event::record(&self.context, &self.lane)?)) } else { None };
        *travels = Travels { block: index, event };
        Ok(())
    }

    /// Waits until the parts of block `index` may be worked on; false where the copy has failed.
    fn wait(&self, place: &Place, index: usize, block: &Range<usize>) -> Result<bool> {
        let (before, nap) = match self.way {
            Way::Up => (index.wrapping_sub(self.places.len()), NAP_UP),
            Way::Down => (index, NAP_DOWN),
        };
        let mut waits = None;
        loop {
            if place.open.load(Ordering::Acquire) == index {
                return Ok(true);
            }
            if self.failed.load(Ordering::SeqCst) {
                return Ok(false);
            }
            // One asks for all who wait.
            if let Some(mut travels) = place.travels.try_lock()
                && travels.block == before
                && let Some(event) = &travels.event
                && event.query_bound()?
            {
                travels.event = None;
                place.left.store(self.blocks.parts(block), Ordering::Relaxed);
                place.open.store(index, Ordering::Release);
                return Ok(true);
            }
            waits.get_or_insert_with(|| crate::trace::range(c"wait", block.len()));
            if self.awake {
                (0..64).for_each(|_| std::hint::spin_loop());
            } else {
                std::thread::sleep(nap);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::{CudaContext, DevicePtrMut};

    use super::super::stream::Stream;
    use crate::copy::{Sink, Source};
    use crate::device::Device;
    use crate::error::Result;

    /// Panics at one offset.
    struct Trap(usize);

    impl Source for Trap {
        fn fill(&self, offset: usize, into: &mut [u8]) -> Result<()> {
            assert!(!(offset..offset + into.len()).contains(&self.0), "the trap");
            Ok(())
        }
    }

    impl Sink for Trap {
        fn take(&self, offset: usize, from: &[u8]) -> Result<()> {
            assert!(!(offset..offset + from.len()).contains(&self.0), "the trap");
            Ok(())
        }
    }

    #[test]
    fn a_panic_is_an_error_and_nobody_waits_for_ever() {
        if std::env::var("TRANSFER_TENSOR_DRIVER").is_ok_and(|driver| driver == "real") {
            return; // This process would need the simulator's library beside it.
        }
        cuda_sim::install().unwrap();
        let sim = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
        let cuda = CudaContext::new(sim.ordinal()).unwrap();
        let device = Device::new(&cuda.default_stream()).unwrap();
        let stream = Stream::of_caller(&cuda.default_stream());
        for bytes in [200_000, 60 << 20] {
            let mut memory = cuda.default_stream().alloc_zeros::<u8>(bytes).unwrap();
            let address = memory.device_ptr_mut(stream.cuda()).0;
            for at in [0, bytes / 2, bytes - 1] {
                let _bound = device.context().to_submit().unwrap();
                // SAFETY: the memory is as long, and waited for before it goes.
                let (up, down) = unsafe {
                    let up = device.stage_up(address, &Trap(at), bytes, &stream);
                    (up, device.stage_down(&Trap(at), address, bytes, &stream))
                };
                assert!(up.is_err() && down.is_err(), "{bytes} {at}");
            }
            stream.synchronize().unwrap();
        }
        drop(device);
        assert_eq!(sim.violations(), Vec::<String>::new());
    }
}
