//! Making and ending allocations and registrations.

#![deny(unsafe_code)]

use crate::memory::{Alloc, Block, Kind, arena};
use crate::state::{Guard, State};
use crate::status::{INVALID_VALUE, OUT_OF_MEMORY, Res};
use parking_lot::MutexGuard;

/// What an allocation is to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) kind: Kind,
    pub(crate) len: u64,
    pub(crate) flags: u32,
    pub(crate) ordered: bool,
}

/// Makes an allocation in a context and returns its id.
pub(crate) fn allocate(guard: &mut Guard, ctx: u64, wanted: Wanted) -> Res<u64> {
    let (device, block, poison) = take_block(guard, ctx, wanted)?;
    if poison && !block.used {
        MutexGuard::unlocked(guard, || arena::poison_fresh(block.alias, wanted.len));
    }
    let st: &mut State = guard;
    let shadow = shadow(st, device, wanted)?;
    let id = st.memory.insert(Alloc {
        id: 0,
        kind: wanted.kind,
        device_base: block.front,
        host_base: block.front,
        len: wanted.len,
        engine: block.alias,
        device,
        ctx,
        flags: wanted.flags,
        block: Some(block),
        ordered: wanted.ordered,
        shadow,
    });
    let dev = st.device(device)?;
    dev.evidence.gained(wanted.kind, wanted.len);
    if wanted.kind == Kind::Managed && dev.guards_managed() && dev.in_flight > 0 {
        arena::protect(block.front, block.capacity, arena::Access::None);
    }
    Ok(id)
}

fn take_block(st: &mut State, ctx: u64, wanted: Wanted) -> Res<(usize, Block, bool)> {
    let device = st.context(ctx)?.device;
    let dev = st.device(device)?;
    let used = dev.evidence.level(wanted.kind).now;
    let after = used.checked_add(wanted.len).ok_or(OUT_OF_MEMORY)?;
    let limit = match wanted.kind {
        Kind::Device | Kind::Managed => Some(dev.profile.total_mem),
        Kind::Pinned | Kind::Registered => dev.profile.behaviour.pinned_limit_bytes,
    };
    let other = match wanted.kind {
        Kind::Pinned => dev.evidence.level(Kind::Registered).now,
        _ => 0,
    };
    if limit.is_some_and(|limit| after.saturating_add(other) > limit) {
        return Err(OUT_OF_MEMORY);
    }
    let block = dev.blocks(wanted.kind).take(wanted.len).ok_or(OUT_OF_MEMORY)?;
    Ok((device, block, dev.hostility.poison))
}

/// A device's own view of host memory, where the platform is not coherent.
fn shadow(st: &mut State, device: usize, wanted: Wanted) -> Res<Option<u64>> {
    let coherent = st.device(device)?.profile.behaviour.io_coherent;
    if coherent || !matches!(wanted.kind, Kind::Pinned | Kind::Registered) {
        return Ok(None);
    }
    let segment = arena::map(wanted.len, arena::Access::None).ok_or(OUT_OF_MEMORY)?;
    Ok(Some(segment.alias))
}

/// Notes a registration of the program's own memory.
pub(crate) fn register(st: &mut State, ctx: u64, addr: u64, len: u64, flags: u32) -> Res<u64> {
    let device = st.context(ctx)?.device;
    let dev = st.device(device)?;
    let pinned = dev.evidence.level(Kind::Pinned).now + dev.evidence.level(Kind::Registered).now;
    let limit = dev.profile.behaviour.pinned_limit_bytes;
    if limit.is_some_and(|limit| pinned.saturating_add(len) > limit) {
        return Err(OUT_OF_MEMORY);
    }
    let same = dev.has(crate::profile::attribute::CAN_USE_HOST_POINTER);
    let device_base = if same {
        addr
    } else {
        let span = usize::try_from(len).map_err(|_| INVALID_VALUE)?;
        let page = arena::page_size();
        // The device's address keeps the offset in the page, as a mapping would.
        arena::reserve(span + 2 * page as usize).ok_or(OUT_OF_MEMORY)? + addr % page
    };
    let wanted = Wanted { kind: Kind::Registered, len, flags, ordered: false };
    let shadow = shadow(st, device, wanted)?;
    let id = st.memory.insert(Alloc {
        id: 0,
        kind: Kind::Registered,
        device_base,
        host_base: addr,
        len,
        engine: addr,
        device,
        ctx,
        flags,
        block: None,
        ordered: false,
        shadow,
    });
    st.device(device)?.evidence.gained(Kind::Registered, len);
    Ok(id)
}

/// Takes an allocation off the map: from now on its addresses mean nothing.
pub(crate) fn detach(st: &mut State, id: u64) -> Option<Alloc> {
    let alloc = st.memory.remove(id)?;
    st.tracker.forget(id);
    if let Some(dev) = st.devices.get_mut(alloc.device) {
        dev.evidence.lost(alloc.kind, alloc.len);
    }
    Some(alloc)
}

/// Ends an allocation in the order of a stream: its free is queued.
pub(crate) fn end_ordered(st: &mut State, id: u64) {
    if let Some(alloc) = st.memory.retire(id)
        && let Some(dev) = st.devices.get_mut(alloc.device)
    {
        dev.evidence.lost(alloc.kind, alloc.len);
    }
}

/// Ends an allocation at once: poisons the bytes and makes the block the next to be handed out.
pub(crate) fn release(guard: &mut Guard, id: u64) -> Res {
    let busy = guard.tracker.unfinished(id);
    let Some(alloc) = detach(guard, id) else { return Err(INVALID_VALUE) };
    let dev = guard.device(alloc.device)?;
    dev.evidence.violate(busy);
    let poison = dev.hostility.poison;
    let Some(block) = alloc.block else { return Ok(()) };
    if alloc.on_host() {
        arena::protect(block.front, block.capacity, arena::Access::None);
    }
    if poison {
        MutexGuard::unlocked(guard, || arena::poison(block.alias, alloc.len));
    }
    give_back(guard, alloc.device, alloc.kind, block);
    Ok(())
}

/// Returns a block to its device.
pub(crate) fn give_back(st: &mut State, device: usize, kind: Kind, block: Block) {
    if let Some(dev) = st.devices.get_mut(device) {
        dev.blocks(kind).give(block);
    }
}

/// Lets or forbids the host to touch a device's managed memory.
pub(crate) fn guard_managed(st: &mut State, device: usize, busy: bool) {
    /// `CU_MEM_ATTACH_HOST`: the device does not touch it.
    const ATTACH_HOST: u32 = 2;
    let Some(dev) = st.devices.get(device) else { return };
    if !dev.guards_managed() || dev.evidence.level(Kind::Managed).now == 0 {
        return;
    }
    let access = if busy { arena::Access::None } else { arena::Access::ReadWrite };
    for alloc in st.memory.all() {
        let ours = alloc.device == device && alloc.kind == Kind::Managed && alloc.flags != ATTACH_HOST;
        if let (true, Some(block)) = (ours, alloc.block) {
            arena::protect(block.front, block.capacity, access);
        }
    }
}
