//! Two page-locked buffers that take turns: one is packed or unpacked while the other travels.

use std::ops::Range;
use std::ptr::NonNull;

use super::pending::Pending;
use super::stream::Stream;
use super::{Event, context::synchronize};
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
    slots: [Option<Slot>; 2],
    turn: usize,
}

#[derive(Debug)]
struct Slot {
    memory: Memory,
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
    fn idle(&mut self) -> Result<()> {
        if let Some(pending) = &self.busy {
            pending.wait()?;
            self.busy = None;
        }
        Ok(())
    }
}

impl<'d> Slots<'d> {
    /// For transfers of `total` bytes in rounds.
    pub(crate) fn new(device: &'d Device, total: usize) -> Self {
        Self { device, bytes: total.min(ROUND), slots: [None, None], turn: 0 }
    }

    /// Whether page-locked memory can be had. Else the driver copies from and to pageable memory.
    pub(crate) fn pinned(&mut self) -> bool {
        if self.slots.iter().all(Option::is_none) && self.acquire(0).is_err() {
            self.slots = [Some(Slot { memory: Memory::Pageable(vec![0; self.bytes].into()), busy: None }), None];
        }
        self.slots.iter().flatten().all(|slot| matches!(slot.memory, Memory::Pinned(_)))
    }

    fn acquire(&mut self, index: usize) -> Result<()> {
        let memory = Memory::Pinned(self.device.pool().try_acquire(self.bytes)?);
        if let Some(slot) = self.slots.get_mut(index) {
            *slot = Some(Slot { memory, busy: None });
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

    /// Packs and submits the bytes `range` of `source` in rounds of at most `step` bytes; returns when the source has been
    /// read. `submit` gets a round's range and where it is packed. The context is current.
    ///
    /// # Errors
    /// Those of `source`, `submit` and the driver; then work may be in flight: [`drain`].
    pub(crate) fn up(
        &mut self,
        stream: &Stream,
        range: Range<usize>,
        step: usize,
        source: &dyn Source,
        mut submit: impl FnMut(Range<usize>, NonNull<u8>) -> Result<()>,
    ) -> Result<()> {
        let (context, step) = (self.device.context(), step.min(self.bytes));
        for (_, piece) in chunks(range.len(), step) {
            let index = self.next();
            let slot = self.slot(index)?;
            slot.idle()?;
            let round = range.start + piece.start..range.start + piece.end;
            let packed = slot.memory.bytes().get_mut(..round.len()).unwrap_or_default();
            source.fill(round.start, packed)?;
            // Until there is an event: if the driver refuses half of it, the other half runs.
            slot.busy = Some(Pending::Stream(stream.clone()));
            submit(round, slot.memory.start())?;
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
        for (_, piece) in chunks(range.len(), step) {
            let round = range.start + piece.start..range.start + piece.end;
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
        for Slot { memory, busy } in self.slots.iter_mut().filter_map(Option::take) {
            // Without something to wait for it is given back here and now.
            if let Some(pending) = busy {
                let (context, waiter) = (self.device.context(), self.device.waiter());
                free_later(context, context.cuda().clone(), waiter, Box::new(memory), vec![pending]);
            }
        }
    }
}

/// Waits for all that was submitted to `stream`, where that can not be left to an event.
///
/// # Errors
/// The device faulted, or the driver is gone.
pub(crate) fn drain(device: &Device, stream: &Stream) -> Result<()> {
    stream.synchronize().or_else(|_| synchronize(device.context().cuda()))
}
