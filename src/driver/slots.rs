//! Two page-locked buffers that take turns: one is packed or unpacked while the other travels.

use std::ops::Range;
use std::ptr::NonNull;

use super::pending::Pending;
use super::scatter::{self, Places};
use super::stream::Stream;
use super::{Event, context::synchronize};
use crate::batch::plan::Copy;
use crate::complete::free_later;
use crate::copy::{Sink, Source, chunks};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pool::PinnedBuffer;

/// Bytes of one buffer. Small enough that packing the first one does not keep the link waiting, large enough for it.
pub(crate) const ROUND: usize = 2 << 20;

/// The buffers of one transfer. Dropping them gives them back when the device is done with them.
#[derive(Debug)]
pub(crate) struct Slots<'d> {
    device: &'d Device,
    bytes: usize,
    /// How many copies are listed behind these bytes.
    places: usize,
    slots: [Option<Slot>; 2],
    turn: usize,
}

#[derive(Debug)]
pub(super) struct Slot {
    memory: Memory,
    /// Where the table of its copies is; empty where there is none.
    table: Range<usize>,
    /// What may still use it.
    busy: Option<Pending>,
}

#[derive(Debug)]
enum Memory {
    Pinned(PinnedBuffer),
    /// Where nothing can be page-locked: the driver stages it once more.
    Pageable(Box<[u8]>),
}

impl Memory {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Memory::Pinned(memory) => memory,
            Memory::Pageable(memory) => memory,
        }
    }

    /// For the device: not by way of a reference, which the device's access would outlive.
    fn start(&mut self) -> NonNull<u8> {
        match self {
            Memory::Pinned(memory) => memory.host(),
            Memory::Pageable(memory) => NonNull::from(&mut **memory).cast(),
        }
    }
}

impl Slot {
    fn new(memory: Memory, table: Range<usize>) -> Self {
        Self { memory, table, busy: None }
    }

    /// Where the packed bytes are.
    pub(super) fn start(&mut self) -> NonNull<u8> {
        self.memory.start()
    }

    /// Lists the copies of a round in the table, for the kernel; `None` where the device can not read it, it is too short, or
    /// they are too few to be worth a launch. The device is done with what was there.
    pub(super) fn list(&mut self, copies: impl Iterator<Item = Copy>) -> Option<Places> {
        let Memory::Pinned(memory) = &mut self.memory else { return None };
        let packed = memory.device_address().filter(|_| !self.table.is_empty())?;
        let mut free = memory.get_mut(self.table.clone())?.chunks_exact_mut(Copy::PLACE);
        let mut count = 0;
        for copy in copies {
            free.next()?.copy_from_slice(&copy.place()?);
            count += 1;
        }
        let table = packed + self.table.start as u64;
        (count >= scatter::WORTH_A_LAUNCH).then_some(Places { packed, table, count })
    }

    fn idle(&mut self) -> Result<()> {
        if let Some(pending) = &self.busy {
            let _range = crate::trace::wait(c"wait");
            pending.wait()?;
            self.busy = None;
        }
        Ok(())
    }
}

impl<'d> Slots<'d> {
    /// For transfers of `total` bytes in rounds.
    pub(crate) fn new(device: &'d Device, total: usize) -> Self {
        Self { device, bytes: total.min(ROUND), places: 0, slots: [None, None], turn: 0 }
    }

    /// Makes the buffers to come with a table of as many places as a round of `blocks` blocks may need copies.
    pub(super) fn with_table(&mut self, blocks: usize) {
        self.places = blocks.min(scatter::MOST_PLACES);
    }

    /// The most copies that a round may have.
    pub(super) fn most_copies(&mut self) -> usize {
        if self.pinned() && self.places > 0 { self.places } else { usize::MAX }
    }

    /// Whether page-locked memory can be had. Else the driver copies from and to pageable memory.
    pub(crate) fn pinned(&mut self) -> bool {
        if self.slots.iter().all(Option::is_none) && self.acquire(0).is_err() {
            // It may have been the table that was too much.
            let table = std::mem::take(&mut self.places);
            if table == 0 || self.acquire(0).is_err() {
                self.slots = [Some(Slot::new(Memory::Pageable(vec![0; self.bytes].into()), 0..0)), None];
            }
        }
        self.slots.iter().flatten().all(|slot| matches!(slot.memory, Memory::Pinned(_)))
    }

    fn acquire(&mut self, index: usize) -> Result<()> {
        // Places are aligned as they are long.
        let table = self.bytes.next_multiple_of(Copy::PLACE);
        let table = table..table + self.places * Copy::PLACE;
        let bytes = if table.is_empty() { self.bytes } else { table.end };
        let memory = Memory::Pinned(self.device.pool().try_acquire(bytes)?);
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = Some(Slot::new(memory, table));
        }
        Ok(())
    }

    /// Whose turn it is; the same one's again where a second can not be had.
    fn next(&mut self) -> usize {
        let index = self.turn % 2;
        self.turn += 1;
        let pinned = self.pinned();
        let there = self.slots.get(index).is_some_and(Option::is_some) || (pinned && self.acquire(index).is_ok());
        if there { index } else { 1 - index }
    }

    fn slot(&mut self, index: usize) -> Result<&mut Slot> {
        let slot = self.slots.get_mut(index).and_then(Option::as_mut);
        slot.ok_or_else(|| Error::unsupported("packing", "no page-locked memory is to be had"))
    }

    /// Packs and submits bytes of `source` in `rounds`, none of which is longer than [`ROUND`]; returns when the source has been
    /// read. `submit` gets a round and where it is packed. The context is current.
    ///
    /// # Errors
    /// Those of `source`, `submit` and the driver; then work may be in flight: [`drain`].
    pub(super) fn up(
        &mut self,
        stream: &Stream,
        rounds: impl Iterator<Item = Range<usize>>,
        source: &dyn Source,
        mut submit: impl FnMut(Range<usize>, &mut Slot) -> Result<()>,
    ) -> Result<()> {
        let (context, bytes) = (self.device.context(), self.bytes);
        for round in rounds {
            let index = self.next();
            let slot = self.slot(index)?;
            slot.idle()?;
            let packed = slot.memory.bytes().get_mut(..round.len()).filter(|packed| packed.len() <= bytes);
            let packed = packed.ok_or_else(|| Error::unsupported("packing", "a round is longer than its buffer"))?;
            source.fill(round.start, packed)?;
            // Until there is an event: if the driver refuses half of it, the other half runs.
            slot.busy = Some(Pending::Stream(stream.clone()));
            submit(round, slot)?;
            slot.busy = Some(Pending::Event(Event::record(context, stream)?.into()));
        }
        Ok(())
    }

    /// Submits and unpacks the bytes `range` in rounds of at most `step` bytes; done when it returns. `submit` gets a round's
    /// range and where it is to be packed. The context is current.
    ///
    /// # Errors
    /// As [`up`](Slots::up).
    pub(crate) fn down(
        &mut self,
        stream: &Stream,
        range: Range<usize>,
        step: usize,
        sink: &dyn Sink,
        mut submit: impl FnMut(Range<usize>, NonNull<u8>) -> Result<()>,
    ) -> Result<()> {
        let (context, step) = (self.device.context(), step.min(self.bytes));
        let unpack = |slot: &mut Slot, round: Range<usize>| {
            slot.idle()?;
            sink.take(round.start, slot.memory.bytes().get(..round.len()).unwrap_or_default())
        };
        // The round before, which is unpacked once the next one is on its way.
        let mut before: Option<(usize, Range<usize>)> = None;
        for round in rounds(range, step) {
            let index = self.next();
            if let Some((last, full)) = before.take_if(|(last, _)| *last == index) {
                // One buffer alone is emptied before it is filled again.
                unpack(self.slot(last)?, full)?;
            }
            let slot = self.slot(index)?;
            slot.idle()?;
            slot.busy = Some(Pending::Stream(stream.clone()));
            submit(round.clone(), slot.memory.start())?;
            slot.busy = Some(Pending::Event(Event::record(context, stream)?.into()));
            if let Some((last, full)) = before.replace((index, round)) {
                unpack(self.slot(last)?, full)?;
            }
        }
        match before {
            Some((last, full)) => unpack(self.slot(last)?, full),
            None => Ok(()),
        }
    }
}

impl Drop for Slots<'_> {
    fn drop(&mut self) {
        for Slot { memory, busy, .. } in self.slots.iter_mut().filter_map(Option::take) {
            // Without something to wait for it is given back here and now.
            if let Some(pending) = busy {
                let (context, waiter) = (self.device.context(), self.device.waiter());
                free_later(context, context.cuda().clone(), waiter, Box::new(memory), vec![pending]);
            }
        }
    }
}

/// Cuts bytes into rounds of at most `step` bytes.
pub(super) fn rounds(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    chunks(range.len(), step).map(move |(_, piece)| range.start + piece.start..range.start + piece.end)
}

/// Waits for all that was submitted to `stream`, where that can not be left to an event.
///
/// # Errors
/// The device faulted, or the driver is gone.
pub(crate) fn drain(device: &Device, stream: &Stream) -> Result<()> {
    let _range = crate::trace::wait(c"wait");
    stream.synchronize().or_else(|_| synchronize(device.context().cuda()))
}
