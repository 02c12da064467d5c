//! Allocating, freeing and registering memory.

use super::Here;
use super::types::Out;
use crate::alloc::{self, Wanted};
use crate::memory::Kind;
use crate::profile::attribute;
use crate::sched;
use crate::state::{Guard, State};
use crate::status::{
    HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, Res,
};
use parking_lot::MutexGuard;

/// `CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY`.
const CAN_MAP_HOST_MEMORY: i32 = 19;
/// `CU_MEMHOSTREGISTER_READ_ONLY`.
const READ_ONLY: u32 = 8;
/// A single registration this long does not fit the kernel's table.
const REGISTER_MOST: u64 = 1 << 39;

export! {
    fn cuMemAlloc_v2(call, address: Out<u64>, bytes: usize) {
        call.bytes(bytes as u64).not_in_capture().ctx(|st, here| {
            address.check()?;
            if bytes == 0 {
                return Err(INVALID_VALUE);
            }
            let wanted = Wanted { kind: Kind::Device, len: bytes as u64, flags: 0, ordered: false };
            let base = make(st, here, wanted)?;
            address.set(base)
        })
    }

    fn cuMemAllocPitch_v2(call, address: Out<u64>, pitch: Out<usize>, width: usize, height: usize, element: u32) {
        call.bytes((width as u64).saturating_mul(height as u64)).not_in_capture().ctx(|st, here| {
            address.check()?;
            if width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
                return Err(INVALID_VALUE);
            }
            let row = width.checked_next_multiple_of(512).ok_or(OUT_OF_MEMORY)?;
            let len = row.checked_mul(height).ok_or(OUT_OF_MEMORY)? as u64;
            let base = make(st, here, Wanted { kind: Kind::Device, len, flags: 0, ordered: false })?;
            pitch.set(row)?;
            address.set(base)
        })
    }

    fn cuMemFree_v2(call, address: u64) {
        call.args([address, 0, 0, 0]).not_in_capture().ctx(|st, here| {
            if address == 0 {
                return Ok(());
            }
            let found = st.memory.at(address).filter(|found| matches!(found.kind, Kind::Device | Kind::Managed));
            let (id, ordered) = found.map(|found| (found.id, found.ordered)).ok_or(INVALID_VALUE)?;
            // Freeing stream-ordered memory this way waits for nothing.
            free(st, here, id, !ordered)
        })
    }

    fn cuMemHostAlloc(call, address: Out<u64>, bytes: usize, flags: u32) {
        call.bytes(bytes as u64).args([u64::from(flags), 0, 0, 0]).not_in_capture().ctx(|st, here| {
            if flags > 7 {
                return Err(INVALID_VALUE);
            }
            host_alloc(st, here, address, bytes, flags)
        })
    }

    fn cuMemAllocHost_v2(call, address: Out<u64>, bytes: usize) {
        call.bytes(bytes as u64).not_in_capture().ctx(|st, here| host_alloc(st, here, address, bytes, 0))
    }

    fn cuMemFreeHost(call, address: u64) {
        call.args([address, 0, 0, 0]).not_in_capture().ctx(|st, here| {
            if address == 0 {
                return Ok(());
            }
            let found = st.memory.at(address).filter(|found| found.kind == Kind::Pinned);
            let id = found.map(|found| found.id).ok_or(INVALID_VALUE)?;
            free(st, here, id, true)
        })
    }

    fn cuMemAllocManaged(call, address: Out<u64>, bytes: usize, flags: u32) {
        call.bytes(bytes as u64).not_in_capture().ctx(|st, here| {
            address.check()?;
            let dev = st.device(here.device)?;
            if let Some(error) = dev.profile.behaviour.managed_error {
                return Err(error);
            }
            if !dev.has(attribute::MANAGED_MEMORY) {
                return Err(NOT_SUPPORTED);
            }
            // Attached to all (1) or to the host (2).
            if bytes == 0 || !matches!(flags, 1 | 2) {
                return Err(INVALID_VALUE);
            }
            let wanted = Wanted { kind: Kind::Managed, len: bytes as u64, flags, ordered: false };
            let base = make(st, here, wanted)?;
            address.set(base)
        })
    }

    fn cuMemHostRegister_v2(call, address: u64, bytes: usize, flags: u32) {
        call.bytes(bytes as u64).args([address, u64::from(flags), 0, 0]).not_in_capture().ctx(|st, here| {
            register(st, here, address, bytes as u64, flags)
        })
    }

    fn cuMemHostUnregister(call, address: u64) {
        call.args([address, 0, 0, 0]).not_in_capture().ctx(|st, here| {
            let id = match st.memory.find(address) {
                Some(found) if found.kind == Kind::Registered && found.host_base == address => found.id,
                // The inside of a registration, or memory that was never registered but allocated.
                Some(_) => return Err(INVALID_VALUE),
                None => return Err(HOST_MEMORY_NOT_REGISTERED),
            };
            free(st, here, id, true)
        })
    }

    fn cuMemHostGetDevicePointer_v2(call, address: Out<u64>, host: u64, flags: u32) {
        call.args([host, 0, 0, 0]).ctx(|st, here| {
            address.check()?;
            if flags != 0 {
                return Err(INVALID_VALUE);
            }
            let dev = st.device(here.device)?;
            // An attribute that the profile does not state is unknown, not refused.
            let refused = dev.profile.attribute(CAN_MAP_HOST_MEMORY) == Some(0);
            if refused || !dev.profile.behaviour.gpu_can_access_sysmem {
                return Err(NOT_SUPPORTED);
            }
            let pageable = dev.reads_pageable();
            let found = st.memory.find(host).filter(|found| matches!(found.kind, Kind::Pinned | Kind::Registered));
            match found {
                Some(found) => address.set(found.device_base + (host - found.host_base))?,
                None if pageable && host != 0 => address.set(host)?,
                None => return Err(INVALID_VALUE),
            }
            crate::launch::fence(st, here.device);
            Ok(())
        })
    }

    fn cuMemHostGetFlags(call, flags: Out<u32>, address: u64) {
        call.ctx(|st, _| {
            let found = st.memory.find(address).filter(|found| matches!(found.kind, Kind::Pinned | Kind::Registered));
            // With unified addressing all page-locked memory is mapped.
            flags.set(found.ok_or(INVALID_VALUE)?.flags | 2)
        })
    }

    fn cuMemGetInfo_v2(call, free: Out<usize>, total: Out<usize>) {
        call.ctx(|st, here| {
            let dev = st.device(here.device)?;
            let (left, all) = mem_info(dev);
            free.set_if(usize::try_from(left).unwrap_or(usize::MAX));
            total.set_if(usize::try_from(all).unwrap_or(usize::MAX));
            Ok(())
        })
    }

    fn cuMemGetAddressRange_v2(call, base: Out<u64>, size: Out<usize>, address: u64) {
        call.ctx(|st, _| {
            let found = st.memory.find(address).ok_or(crate::status::NOT_FOUND)?;
            base.set_if(found.device_base);
            size.set_if(usize::try_from(found.len).unwrap_or(usize::MAX));
            Ok(())
        })
    }
}

fn make(st: &mut Guard, here: Here, wanted: Wanted) -> Res<u64> {
    let id = alloc::allocate(st, here.ctx, wanted)?;
    st.memory.get(id).map(|found| found.device_base).ok_or(OUT_OF_MEMORY)
}

fn host_alloc(st: &mut Guard, here: Here, address: Out<u64>, bytes: usize, flags: u32) -> Res {
    address.check()?;
    if let Some(error) = st.device(here.device)?.profile.behaviour.host_alloc_error {
        return Err(error);
    }
    let base = make(st, here, Wanted { kind: Kind::Pinned, len: bytes as u64, flags, ordered: false })?;
    address.set(base)
}

/// Ends an allocation or registration, after the work that is queued if the device's frees wait.
fn free(st: &mut Guard, here: Here, id: u64, waits: bool) -> Res {
    if waits && st.device(here.device)?.hostility.free_waits {
        let owner = st.memory.get(id).map(|found| found.ctx);
        sched::wait_context(st, here.ctx)?;
        if let Some(owner) = owner.filter(|owner| *owner != here.ctx && st.contexts.contains_key(owner)) {
            sched::wait_context(st, owner)?;
        }
    }
    alloc::release(st, id)
}

fn register(st: &mut Guard, here: Here, address: u64, len: u64, flags: u32) -> Res {
    let dev = st.device(here.device)?;
    if let Some(error) = dev.profile.behaviour.host_register_error {
        return Err(error);
    }
    if dev.profile.attribute(attribute::HOST_REGISTER_SUPPORTED) == Some(0) {
        return Err(NOT_SUPPORTED);
    }
    if address == 0 || len == 0 || flags > 15 || address.checked_add(len).is_none() {
        return Err(INVALID_VALUE);
    }
    if len >= REGISTER_MOST {
        return Err(OUT_OF_MEMORY);
    }
    let read_only = flags & READ_ONLY != 0;
    if read_only && !dev.has(attribute::READ_ONLY_HOST_REGISTER) {
        return Err(NOT_SUPPORTED);
    }
    // Where registration does not lock pages it takes any mapping.
    let needs_write = !read_only && dev.profile.behaviour.host_register_page_locks;
    if st.memory.meets(address, len) {
        return Err(HOST_MEMORY_ALREADY_REGISTERED);
    }
    if !MutexGuard::unlocked(st, || crate::maps::allows(address, len, needs_write)) {
        return Err(INVALID_VALUE);
    }
    let st: &mut State = st;
    if st.memory.meets(address, len) {
        return Err(HOST_MEMORY_ALREADY_REGISTERED);
    }
    alloc::register(st, here.ctx, address, len, flags).map(|_| ())
}

/// What `cuMemGetInfo` answers.
fn mem_info(dev: &crate::device::Device) -> (u64, u64) {
    if let Some(set) = dev.hostility.mem_info {
        return set;
    }
    let total = dev.profile.total_mem;
    let used = dev.evidence.level(Kind::Device).now + dev.evidence.level(Kind::Managed).now;
    if dev.profile.behaviour.meminfo_free_is_memfree {
        return (dev.host_free.saturating_sub(used).min(total), total);
    }
    // A context and the driver itself take a little.
    (total.saturating_sub(used).saturating_sub(512 << 20), total)
}
