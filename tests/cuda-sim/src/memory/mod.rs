//! What is allocated, registered or managed, and at which address.

pub(crate) mod arena;
mod blocks;

pub(crate) use blocks::{Block, Pool};

use std::collections::{BTreeMap, HashMap};

/// The kinds of memory the driver tells apart; everything else is pageable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// `cuMemAlloc` and its stream-ordered relatives.
    Device,
    /// `cuMemHostAlloc`.
    Pinned,
    /// `cuMemHostRegister`.
    Registered,
    /// `cuMemAllocManaged`.
    Managed,
}

/// One allocation or registration.
#[derive(Debug, Clone)]
pub(crate) struct Alloc {
    pub(crate) id: u64,
    pub(crate) kind: Kind,
    /// Where the device sees it.
    pub(crate) device_base: u64,
    /// Where the host sees it (of device memory: the same, and not to be touched).
    pub(crate) host_base: u64,
    pub(crate) len: u64,
    /// Where the engines reach the bytes.
    pub(crate) engine: u64,
    pub(crate) device: usize,
    pub(crate) ctx: u64,
    pub(crate) flags: u32,
    /// The piece of address space under it; a registration has none.
    pub(crate) block: Option<Block>,
    /// Made by the stream-ordered allocator.
    pub(crate) ordered: bool,
    /// The device's stale copy of host memory, where the platform is not coherent.
    pub(crate) shadow: Option<u64>,
}

impl Alloc {
    /// The offset of an address given by either view.
    pub(crate) fn offset(&self, addr: u64) -> Option<u64> {
        [self.device_base, self.host_base]
            .into_iter()
            .filter_map(|base| addr.checked_sub(base))
            .find(|offset| *offset < self.len.max(1))
    }

    /// Whether the host may touch the bytes at all.
    pub(crate) fn on_host(&self) -> bool {
        self.kind != Kind::Device
    }
}

/// A range of bytes as a step uses it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    /// The allocation, or 0 for memory the driver knows nothing of.
    pub(crate) alloc: u64,
    pub(crate) kind: Option<Kind>,
    /// The address the engines use.
    pub(crate) engine: u64,
    /// Start within the allocation, or the address itself where there is none.
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) device: usize,
}

impl Span {
    /// Not in a mapping of ours: it may vanish under a copy.
    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self.kind, None | Some(Kind::Registered))
    }

    /// Not page-locked as far as the driver knows.
    pub(crate) fn is_pageable(&self) -> bool {
        self.kind.is_none()
    }
}

/// All allocations of all devices: one address space, as with unified addressing.
#[derive(Debug, Default)]
pub(crate) struct Map {
    allocs: HashMap<u64, Alloc>,
    by_address: BTreeMap<u64, u64>,
    /// Freed on a stream that has not come to the free yet: only steps that were queued before know them.
    retired: HashMap<u64, Alloc>,
    next: u64,
}

impl Map {
    pub(crate) fn insert(&mut self, mut alloc: Alloc) -> u64 {
        self.next += 1;
        let id = self.next;
        alloc.id = id;
        self.by_address.insert(alloc.device_base, id);
        if alloc.on_host() {
            self.by_address.insert(alloc.host_base, id);
        }
        self.allocs.insert(id, alloc);
        id
    }

    pub(crate) fn remove(&mut self, id: u64) -> Option<Alloc> {
        let alloc = self.allocs.remove(&id)?;
        for base in [alloc.device_base, alloc.host_base] {
            if self.by_address.get(&base) == Some(&id) {
                self.by_address.remove(&base);
            }
        }
        Some(alloc)
    }

    /// Takes an allocation off the addresses but keeps it for the steps before its free.
    pub(crate) fn retire(&mut self, id: u64) -> Option<Alloc> {
        let alloc = self.remove(id)?;
        self.retired.insert(id, alloc.clone());
        Some(alloc)
    }

    /// The free of a retired allocation has run.
    pub(crate) fn bury(&mut self, id: u64) {
        self.retired.remove(&id);
    }

    /// Whether steps may still use it.
    pub(crate) fn is_known(&self, id: u64) -> bool {
        self.allocs.contains_key(&id) || self.retired.contains_key(&id)
    }

    /// A retired allocation that `[addr, addr + len)` lies in.
    pub(crate) fn retired(&self, addr: u64, len: u64) -> Option<&Alloc> {
        let inside = |alloc: &&Alloc| {
            let offset = addr.checked_sub(alloc.device_base);
            offset.and_then(|offset| offset.checked_add(len)).is_some_and(|end| end <= alloc.len)
        };
        self.retired.values().find(inside)
    }

    pub(crate) fn get(&self, id: u64) -> Option<&Alloc> {
        self.allocs.get(&id)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Alloc> {
        self.allocs.values()
    }

    /// The allocation an address lies in.
    pub(crate) fn find(&self, addr: u64) -> Option<&Alloc> {
        let (_, id) = self.by_address.range(..=addr).next_back()?;
        let alloc = self.allocs.get(id)?;
        alloc.offset(addr).map(|_| alloc)
    }

    /// The allocation that begins at an address.
    pub(crate) fn at(&self, addr: u64) -> Option<&Alloc> {
        let id = self.by_address.get(&addr)?;
        self.allocs.get(id)
    }

    /// Whether `[addr, addr + len)` meets host memory the driver knows.
    pub(crate) fn meets(&self, addr: u64, len: u64) -> bool {
        let end = addr.saturating_add(len);
        if self.find(addr).is_some() {
            return true;
        }
        self.by_address.range(addr..end).next().is_some()
    }

    /// The span of `[addr, addr + len)`: `None` if it lies in no allocation, an error if it leaves one.
    pub(crate) fn span(&self, addr: u64, len: u64) -> Result<Option<Span>, ()> {
        let Some(alloc) = self.find(addr) else { return Ok(None) };
        let start = alloc.offset(addr).ok_or(())?;
        let end = start.checked_add(len).ok_or(())?;
        if end > alloc.len {
            return Err(());
        }
        Ok(Some(Span {
            alloc: alloc.id,
            kind: Some(alloc.kind),
            engine: alloc.engine + start,
            start,
            len,
            device: alloc.device,
        }))
    }
}
