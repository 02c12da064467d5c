//! A page-locked buffer that staged copies go through, one after another.

use std::sync::Arc;

use super::event::Event;
use super::pinned::Address;
use super::stream::{Queue, Stream};
use crate::copy::chunks;
use crate::copy::pieces::Blocks;
use crate::error::Result;
use crate::pool::PinnedBuffer;

/// Small copies, up to [`SMALL`] bytes, follow each other in a slot up to here: whether it is free, a question to the driver, is asked
/// once for all of them.
const SHARED: usize = 512 << 10;
const SMALL: usize = 64 << 10;

/// Copies of the CPU's do not share cache lines, nor pairs of them.
const LINE: usize = 128;

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) memory: PinnedBuffer,
    /// The copy that still uses it.
    busy: Option<Arc<Event>>,
    /// The queue of that copy, and where the bytes begin that neither it nor any before uses.
    tail: Option<(Queue, usize)>,
}

impl Slot {
    pub(super) fn new(memory: PinnedBuffer) -> Self {
        Self { memory, busy: None, tail: None }
    }

    pub(super) fn into_parts(self) -> (PinnedBuffer, Option<Arc<Event>>) {
        (self.memory, self.busy)
    }

    /// Says what uses all of it from now on.
    pub(super) fn used(&mut self, busy: Option<Arc<Event>>) {
        (self.busy, self.tail) = (busy, None);
    }

    /// Says what uses its bytes up to `end` from now on, behind what used them before.
    pub(super) fn used_up_to(&mut self, end: usize, busy: Event, stream: &Stream) {
        self.busy = Some(Arc::new(busy));
        self.tail = Some((stream.queue(), end.next_multiple_of(LINE)));
    }

    /// Waits for the copy that uses it, awake.
    pub(super) fn wait(&mut self) -> Result<()> {
        if let Some(event) = &self.busy {
            let _range = crate::trace::range(c"wait", self.memory.len());
            event.wait_awake()?;
        }
        self.used(None);
        Ok(())
    }

    /// Where a small copy on `stream` may begin without a wait: the event behind it will lie behind those before, too.
    pub(super) fn room(&self, bytes: usize, stream: &Stream) -> Option<usize> {
        let (queue, start) = self.tail.as_ref().filter(|_| self.busy.is_some())?;
        (bytes <= SMALL && start + bytes <= SHARED.min(self.memory.len()) && queue.is_of(stream)).then_some(*start)
    }

    /// Whether nothing uses it.
    ///
    /// # Errors
    /// That can not be known: the device faulted.
    pub(super) fn idle(&mut self) -> Result<bool> {
        let idle = self.busy.as_ref().map_or(Ok(true), |event| event.query())?;
        if idle {
            self.used(None);
        }
        Ok(idle)
    }

    pub(super) fn host(&self) -> *mut u8 {
        self.memory.host().as_ptr()
    }

    /// Where blocks can be, each with the copy that still uses that.
    pub(super) fn places(&self, blocks: &Blocks) -> impl Iterator<Item = (Address, Option<Arc<Event>>)> {
        let count = in_a_slot(self.memory.len(), blocks);
        let starts = chunks(count * blocks.largest(), blocks.largest()).map(|(_, place)| place.start);
        // SAFETY: that many blocks are no longer than the slot.
        let place = |start| Address(unsafe { self.memory.host().add(start) });
        starts.map(move |start| (place(start), self.busy.clone()))
    }
}

/// How many blocks a slot of so many bytes has room for.
pub(super) fn in_a_slot(bytes: usize, blocks: &Blocks) -> usize {
    (bytes / blocks.largest().max(1)).max(1)
}
