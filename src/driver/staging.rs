//! Copies between the device and pageable memory, through two pinned slots: one is filled or emptied by the CPU while the
//! other travels.
//!
//! An asynchronous driver copy from or to pageable memory would do the same inside the driver, but blocks the submitter, is
//! documented only as "might be synchronous", and is slower; it is the fallback where nothing can be pinned.

use std::sync::Arc;

use parking_lot::Mutex;

use super::context::Context;
use super::copy;
use super::event::Event;
use super::memory::Pinned;
use super::stream::Stream;
use crate::copy::{STAGED_PIECE, chunks};
use crate::error::Result;

/// Bytes of one slot.
const SLOT: usize = STAGED_PIECE;

/// The slots of one direction of one device. Copies that need them take turns.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
enum Slots {
    #[default]
    Untried,
    Ready([Slot; 2]),
    /// Pinning was refused: the driver's own pageable path is used.
    Refused,
}

#[derive(Debug)]
struct Slot {
    memory: Pinned,
    /// The copy that still uses it.
    busy: Option<Arc<Event>>,
}

impl Slot {
    fn wait(&mut self) -> Result<()> {
        if let Some(event) = &self.busy {
            event.wait()?;
            self.busy = None;
        }
        Ok(())
    }
}

impl Slots {
    fn get(&mut self, context: &Arc<Context>) -> Option<&mut [Slot; 2]> {
        if matches!(self, Slots::Untried) {
            let slot = || {
                Pinned::make(context, SLOT, super::memory::Placement::default())
                    .map(|memory| Slot { memory, busy: None })
            };
            *self = match (slot(), slot()) {
                (Ok(a), Ok(b)) => Slots::Ready([a, b]),
                _ => Slots::Refused,
            };
        }
        match self {
            Slots::Ready(slots) => Some(slots),
            _ => None,
        }
    }
}

impl Staging {
    /// Takes the slots out, each with the copy that may still use it: for the end, when they are to be freed.
    pub(crate) fn take(&mut self) -> Vec<(Pinned, Option<Arc<Event>>)> {
        match std::mem::take(self.slots.get_mut()) {
            Slots::Ready(slots) => slots.into_iter().map(|slot| (slot.memory, slot.busy)).collect(),
            Slots::Untried | Slots::Refused => Vec::new(),
        }
    }

    /// Copies `bytes` bytes of pageable memory to the device, in the order of `stream`. On return the source has been read;
    /// the device has the bytes once the stream has passed.
    ///
    /// # Errors
    /// The driver refused a piece. What was submitted before has run when this returns; the target is partly written.
    ///
    /// # Safety
    /// `source` is readable for `bytes` bytes during the call; `target` is the device's, valid and undisturbed until the
    /// stream has passed. The context is current.
    pub(crate) unsafe fn up(
        &self,
        context: &Arc<Context>,
        target: u64,
        source: *const u8,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        let mut guard = self.slots.lock();
        let Some(slots) = guard.get(context) else {
            // SAFETY: the caller's; the wait ends the copy before the source can go.
            let submitted = unsafe { copy::host_to_device(target, source, bytes, stream) };
            return stream.synchronize().and(submitted);
        };
        let mut step = |index: usize, offset: usize, len: usize| -> Result<()> {
            let slot = &mut slots[index % 2];
            slot.wait()?;
            let staged = slot.memory.host().as_ptr();
            // SAFETY: the slot is idle and at least `len` long; the source is valid by the caller's word.
            unsafe { std::ptr::copy_nonoverlapping(source.add(offset), staged, len) };
            // SAFETY: the slot stays ours and untouched until its event has passed.
            unsafe { copy::host_to_device(target + offset as u64, staged, len, stream)? };
            slot.busy = Some(Arc::new(Event::record(context, stream)?));
            Ok(())
        };
        let result = chunks(bytes, SLOT).try_for_each(|(index, range)| step(index, range.start, range.len()));
        if result.is_err() {
            drain(&mut guard, stream);
        }
        result
    }

    /// Copies `bytes` bytes from the device to pageable memory, in the order of `stream`; done when it returns.
    ///
    /// # Errors
    /// As [`up`](Staging::up).
    ///
    /// # Safety
    /// As [`up`](Staging::up), with the roles exchanged; nobody else touches the target during the call.
    pub(crate) unsafe fn down(
        &self,
        context: &Arc<Context>,
        target: *mut u8,
        source: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        let mut guard = self.slots.lock();
        let Some(slots) = guard.get(context) else {
            // SAFETY: the caller's; the wait ends the copy before the target is looked at.
            let submitted = unsafe { copy::device_to_host(target, source, bytes, stream) };
            return stream.synchronize().and(submitted);
        };
        let fetch = |index: usize, offset: usize, len: usize, slots: &mut [Slot; 2]| -> Result<()> {
            let slot = &mut slots[index % 2];
            slot.wait()?;
            // SAFETY: the slot is idle and stays ours until its event has passed.
            unsafe { copy::device_to_host(slot.memory.host().as_ptr(), source + offset as u64, len, stream)? };
            slot.busy = Some(Arc::new(Event::record(context, stream)?));
            Ok(())
        };
        let empty = |index: usize, offset: usize, len: usize, slots: &mut [Slot; 2]| -> Result<()> {
            let slot = &mut slots[index % 2];
            slot.wait()?;
            // SAFETY: the slot's copy has passed; the target is valid by the caller's word.
            unsafe { std::ptr::copy_nonoverlapping(slot.memory.host().as_ptr(), target.add(offset), len) };
            Ok(())
        };
        let mut previous = None;
        let result = chunks(bytes, SLOT)
            .try_for_each(|(index, range)| {
                fetch(index, range.start, range.len(), slots)?;
                match previous.replace((index, range)) {
                    Some((index, range)) => empty(index, range.start, range.len(), slots),
                    None => Ok(()),
                }
            })
            .and_then(|()| match previous {
                Some((index, range)) => empty(index, range.start, range.len(), slots),
                None => Ok(()),
            });
        if result.is_err() {
            drain(&mut guard, stream);
        }
        result
    }
}

/// After an error: nothing may use the slots when the next copy takes them, whether or not its event was recorded.
fn drain(slots: &mut Slots, stream: &Stream) {
    if let (Slots::Ready(ready), Err(_)) = (&mut *slots, stream.synchronize()) {
        // Not known to be idle: never touched, never freed.
        for slot in ready.iter_mut() {
            slot.busy = None;
        }
        std::mem::forget(std::mem::replace(slots, Slots::Untried));
    } else if let Slots::Ready(ready) = slots {
        for slot in ready.iter_mut() {
            slot.busy = None;
        }
    }
}
