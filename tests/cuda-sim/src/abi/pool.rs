//! The stream-ordered allocator.

use super::types::{In, Out};
use super::{Call, Here};
use crate::alloc;
use crate::capture;
use crate::memory::{Alloc, Block, Kind};
use crate::profile::attribute;
use crate::sched::body::FreeJob;
use crate::sched::{self, Access, Body, Lane, Use, Work};
use crate::state::{Guard, MemPool};
use crate::status::{INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY, Res, Status};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

export! {
    fn cuMemAllocAsync(call, address: Out<u64>, bytes: usize, stream: u64) {
        allocate(call, address, bytes, None, stream)
    }

    fn cuMemAllocFromPoolAsync(call, address: Out<u64>, bytes: usize, pool: u64, stream: u64) {
        allocate(call, address, bytes, Some(pool), stream)
    }

    fn cuMemFreeAsync(call, address: u64, stream: u64) {
        call.stream(stream).args([address, 0, 0, 0]).ctx(|st, here| {
            supported(st, here.device)?;
            let stream = st.stream_of(here.ctx, stream)?;
            capture::refuse(st, stream)?;
            if address == 0 {
                return Ok(());
            }
            let found = st.memory.at(address).filter(|found| found.kind == Kind::Device);
            let (id, len) = found.map(|found| (found.id, found.len)).ok_or(INVALID_VALUE)?;
            free(st, stream, id, len)
        })
    }

    fn cuDeviceGetDefaultMemPool(call, pool: Out<u64>, device: i32) {
        call.on_device(device, |st, device| {
            supported(st, device)?;
            pool.set(default_pool(st, device)?)
        })
    }

    fn cuDeviceGetMemPool(call, pool: Out<u64>, device: i32) {
        call.on_device(device, |st, device| {
            supported(st, device)?;
            let default = default_pool(st, device)?;
            let current = st.device(device)?.current_pool;
            pool.set(if current == 0 { default } else { current })
        })
    }

    fn cuDeviceSetMemPool(call, device: i32, pool: u64) {
        call.on_device(device, |st, device| {
            supported(st, device)?;
            if st.pools.get(&pool).is_none_or(|pool| pool.device != device) {
                return Err(INVALID_VALUE);
            }
            st.device(device)?.current_pool = pool;
            Ok(())
        })
    }

    fn cuMemPoolCreate(call, pool: Out<u64>, _properties: In<c_void>) {
        call.ctx(|st, here| {
            supported(st, here.device)?;
            let handle = st.handle();
            st.pools.insert(handle, MemPool { device: here.device, ..MemPool::default() });
            pool.set(handle)
        })
    }

    fn cuMemPoolDestroy(call, pool: u64) {
        call.anywhere(|st| {
            let found = st.pools.get(&pool).ok_or(INVALID_HANDLE)?;
            if found.default {
                return Err(INVALID_VALUE);
            }
            st.pools.remove(&pool);
            Ok(())
        })
    }

    fn cuMemPoolTrimTo(call, pool: u64, _keep: usize) {
        call.anywhere(|st| st.pools.get(&pool).map(|_| ()).ok_or(INVALID_HANDLE))
    }

    fn cuMemPoolSetAttribute(call, pool: u64, attribute: u32, value: Out<u64>) {
        call.anywhere(|st| {
            let found = st.pools.get_mut(&pool).ok_or(INVALID_HANDLE)?;
            // The first three are 32 bits wide.
            let value = if attribute <= 3 { u64::from(value.cast::<u32>().get()?) } else { value.get()? };
            found.attributes.insert(attribute, value);
            Ok(())
        })
    }

    fn cuMemPoolGetAttribute(call, pool: u64, attribute: u32, value: Out<u64>) {
        call.anywhere(|st| {
            let found = st.pools.get(&pool).ok_or(INVALID_HANDLE)?;
            let set = found.attributes.get(&attribute).copied();
            let level = st.devices.get(found.device).map(|dev| dev.evidence.level(Kind::Device)).unwrap_or_default();
            match attribute {
                // Reuse along events, opportunistically, along internal dependencies.
                1..=3 => value.cast::<u32>().set(u32::try_from(set.unwrap_or(1)).unwrap_or(1)),
                4 => value.set(set.unwrap_or(0)),
                5 | 7 => value.set(level.now),
                6 | 8 => value.set(level.peak),
                _ => Err(INVALID_VALUE),
            }
        })
    }

    fn cuMemPoolSetAccess(call, pool: u64, _access: In<c_void>, _count: usize) {
        call.anywhere(|st| st.pools.get(&pool).map(|_| ()).ok_or(INVALID_HANDLE))
    }
}

fn supported(st: &Guard, device: usize) -> Res {
    let dev = st.devices.get(device).ok_or(INVALID_VALUE)?;
    if dev.has(attribute::MEMORY_POOLS_SUPPORTED) { Ok(()) } else { Err(NOT_SUPPORTED) }
}

fn default_pool(st: &mut Guard, device: usize) -> Res<u64> {
    let known = st.device(device)?.default_pool;
    if known != 0 {
        return Ok(known);
    }
    let handle = st.handle();
    st.pools.insert(handle, MemPool { device, default: true, ..MemPool::default() });
    st.device(device)?.default_pool = handle;
    Ok(handle)
}

fn allocate(call: Call, address: Out<u64>, bytes: usize, pool: Option<u64>, stream: u64) -> Status {
    call.stream(stream).bytes(bytes as u64).ctx(|st, here| {
        address.check()?;
        supported(st, here.device)?;
        let stream = st.stream_of(here.ctx, stream)?;
        capture::refuse(st, stream)?;
        if let Some(pool) = pool {
            st.pools.get(&pool).ok_or(INVALID_HANDLE)?;
        }
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let id = take(st, here, stream, bytes as u64)?;
        let base = st.memory.get(id).map(|found| found.device_base).ok_or(OUT_OF_MEMORY)?;
        let life = Access { key: id, start: 0, end: bytes as u64, how: Use::Life };
        let work = Work { accesses: vec![life], ..Work::new("cuMemAllocAsync", Body::Nop, Lane::Inline) };
        sched::submit(st, stream, work)?;
        address.set(base)
    })
}

/// Memory for a stream: what was freed on it last if that fits, even if the free has not run yet.
fn take(st: &mut Guard, here: Here, stream: u64, len: u64) -> Res<u64> {
    let freed = &st.stream(stream)?.freed;
    let fits = |block: &Block| block.capacity >= len && block.capacity <= len.saturating_mul(4).max(4096);
    let found = freed.iter().rposition(|job| fits(&job.block));
    let Some(index) = found else {
        let wanted = alloc::Wanted { kind: Kind::Device, len, flags: 0, ordered: true };
        return alloc::allocate(st, here.ctx, wanted);
    };
    let dev = st.device(here.device)?;
    if dev.evidence.level(Kind::Device).now + len > dev.profile.total_mem {
        return Err(OUT_OF_MEMORY);
    }
    dev.evidence.gained(Kind::Device, len);
    let job = st.stream_mut(stream)?.freed.remove(index);
    job.reused.store(true, Ordering::Relaxed);
    let block = job.block;
    Ok(st.memory.insert(Alloc {
        id: 0,
        kind: Kind::Device,
        device_base: block.front,
        host_base: block.front,
        len,
        engine: block.alias,
        device: here.device,
        ctx: here.ctx,
        flags: 0,
        block: Some(block),
        ordered: true,
        shadow: None,
    }))
}

fn free(st: &mut Guard, stream: u64, id: u64, len: u64) -> Res {
    let life = Access { key: id, start: 0, end: len.max(1), how: Use::Life };
    let block = st.memory.get(id).and_then(|found| found.block).ok_or(INVALID_VALUE)?;
    let device = st.stream(stream)?.device;
    let poison = st.device(device)?.hostility.poison;
    let job = FreeJob { alloc: id, stream, device, len, block, poison, reused: Arc::new(AtomicBool::new(false)) };
    let body = Body::Free(job.clone());
    let work = Work { accesses: vec![life], ..Work::new("cuMemFreeAsync", body, Lane::Thread) };
    st.stream_mut(stream)?.freed.push(job);
    sched::submit(st, stream, work)?;
    alloc::end_ordered(st, id);
    Ok(())
}
