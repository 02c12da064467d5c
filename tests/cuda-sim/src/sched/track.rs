//! Which bytes are in use by which step, and whether two uses can meet.
//!
//! Two uses are a violation when they overlap, at least one changes the bytes (or ends or begins their life), and
//! neither step is ordered before the other. A step that had finished when the other was submitted is ordered before
//! it, so code that waits on the host is never blamed.

#![deny(unsafe_code)]

use super::step::Step;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// What a step does to a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
    /// A kernel was given a pointer into the allocation: what it does there is not known yet.
    Mention,
    /// The allocation begins or ends with this step.
    Life,
}

impl Use {
    fn conflicts(self, other: Self) -> bool {
        match (self, other) {
            (Self::Life, _) | (_, Self::Life) => true,
            (Self::Mention, _) | (_, Self::Mention) => false,
            (Self::Write, _) | (_, Self::Write) => true,
            (Self::Read, Self::Read) => false,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Read => "reads",
            Self::Write => "writes",
            Self::Mention => "was given",
            Self::Life => "allocates or frees",
        }
    }
}

/// A range and its use. `key` is the allocation, or 0 for memory outside any: then the range is of addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub(crate) key: u64,
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) how: Use,
}

#[derive(Debug)]
struct Entry {
    access: Access,
    step: Arc<Step>,
}

/// The uses that may still meet another.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    entries: HashMap<u64, Vec<Entry>>,
    /// Submit ticks of unfinished steps whose uses are known only when they run, by device.
    open: HashMap<usize, BTreeSet<u64>>,
}

impl Tracker {
    /// Notes a use and returns a sentence for each earlier one it conflicts with.
    pub(crate) fn note(&mut self, step: &Arc<Step>, access: Access) -> Vec<String> {
        if access.start >= access.end {
            return Vec::new();
        }
        let list = self.entries.entry(access.key).or_default();
        if list.len() >= 64 && list.len().is_power_of_two() {
            let open = &self.open;
            list.retain(|entry| needed(open, &entry.step));
        }
        let mut found = Vec::new();
        for entry in list.iter() {
            let other = entry.access;
            let meet = access.start < other.end && other.start < access.end;
            if meet && access.how.conflicts(other.how) && entry.step.id != step.id && !entry.step.ordered(step) {
                found.push(sentence(&entry.step, other, step, access));
            }
        }
        // What meets an earlier use that this one covers, on the same stream, meets this one as well.
        list.retain(|entry| !(covers(access, entry.access) && precedes(&entry.step, step)));
        list.push(Entry { access, step: Arc::clone(step) });
        found
    }

    /// Steps that still use an allocation which is being freed without regard to them.
    pub(crate) fn unfinished(&self, key: u64) -> Vec<String> {
        let list = self.entries.get(&key).map_or(&[][..], Vec::as_slice);
        list.iter()
            .filter(|entry| !entry.step.is_done())
            .map(|entry| {
                format!(
                    "use after free: memory freed while {} (step {} on stream {:#x}) {} bytes {:#x}..{:#x} of it",
                    entry.step.what,
                    entry.step.id,
                    entry.step.stream,
                    entry.access.how.name(),
                    entry.access.start,
                    entry.access.end
                )
            })
            .collect()
    }

    /// The allocation is gone.
    pub(crate) fn forget(&mut self, key: u64) {
        self.entries.remove(&key);
    }

    /// A step whose uses are not known yet.
    pub(crate) fn open(&mut self, step: &Step) {
        self.open.entry(step.device).or_default().insert(step.submitted);
    }

    pub(crate) fn close(&mut self, step: &Step) {
        if let Some(set) = self.open.get_mut(&step.device) {
            set.remove(&step.submitted);
        }
    }
}

fn covers(new: Access, old: Access) -> bool {
    new.start <= old.start
        && old.end <= new.end
        && (new.how == old.how || (new.how, old.how) == (Use::Write, Use::Read))
}

fn precedes(old: &Step, new: &Step) -> bool {
    old.stream == new.stream && old.seq < new.seq
}

/// Whether a use can still meet one that is not noted yet.
fn needed(open: &HashMap<usize, BTreeSet<u64>>, step: &Step) -> bool {
    let Some(done) = step.done_tick() else { return true };
    let oldest = open.get(&step.device).and_then(BTreeSet::first);
    oldest.is_some_and(|submitted| *submitted <= done)
}

fn sentence(first: &Step, a: Access, second: &Step, b: Access) -> String {
    let kind = if a.how == Use::Life || b.how == Use::Life { "use after free" } else { "overlap" };
    format!(
        "{kind}: {} (step {} on stream {:#x}) {} bytes {:#x}..{:#x} and {} (step {} on stream {:#x}) {} bytes \
         {:#x}..{:#x} of the same memory, and neither is ordered before the other",
        first.what,
        first.id,
        first.stream,
        a.how.name(),
        a.start,
        a.end,
        second.what,
        second.id,
        second.stream,
        b.how.name(),
        b.start,
        b.end
    )
}
