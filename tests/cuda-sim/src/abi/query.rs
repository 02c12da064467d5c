//! What the driver knows about a pointer.

use super::types::{In, Out};
use crate::memory::{Alloc, Kind};
use crate::state::State;
use crate::status::{INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, Res};
use std::ffi::c_void;

export! {
    fn cuPointerGetAttribute(call, data: Out<c_void>, attribute: u32, address: u64) {
        call.args([address, u64::from(attribute), 0, 0]).ctx(|st, _| {
            let found = st.memory.find(address).ok_or(INVALID_VALUE)?;
            answer(st, found, data, attribute, address)
        })
    }

    fn cuPointerGetAttributes(call, count: u32, attributes: In<u32>, data: In<Out<c_void>>, address: u64) {
        call.args([address, 0, 0, 0]).ctx(|st, _| {
            for index in 0..count as usize {
                let (attribute, place) = (attributes.at(index)?, data.at(index)?);
                match st.memory.find(address) {
                    Some(found) => answer(st, found, place, attribute, address)?,
                    None => blank(place, attribute)?,
                }
            }
            Ok(())
        })
    }

    fn cuPointerSetAttribute(call, _value: In<c_void>, _attribute: u32, address: u64) {
        call.ctx(|st, _| st.memory.find(address).map(|_| ()).ok_or(INVALID_VALUE))
    }

    fn cuMemRangeGetAttribute(call, data: Out<i32>, size: usize, attribute: u32, address: u64, _len: usize) {
        call.ctx(|st, _| {
            managed(st, address)?;
            for index in 0..size / 4 {
                // Read mostly: no; preferred location and the like: none (CU_DEVICE_INVALID).
                data.at(index).set(if attribute == 1 { 0 } else { -2 })?;
            }
            Ok(())
        })
    }

    fn cuMemAdvise(call, address: u64, _len: usize, _advice: u32, _device: i32) {
        call.ctx(|st, here| reachable(st, here.device, address))
    }

    fn cuMemAdvise_v2(call, address: u64, _len: usize, _advice: u32, _location: u64) {
        call.ctx(|st, here| reachable(st, here.device, address))
    }

    fn cuMemPrefetchAsync(call, address: u64, _len: usize, device: i32, stream: u64) {
        call.stream(stream).ctx(|st, here| {
            st.stream_of(here.ctx, stream)?;
            prefetch(st, here.device, address, if device < 0 { 2 } else { 1 }, device)
        })
    }

    fn cuMemPrefetchAsync_v2(call, address: u64, _len: usize, location: u64, _flags: u32, stream: u64) {
        call.stream(stream).ctx(|st, here| {
            st.stream_of(here.ctx, stream)?;
            // The location is two 32-bit fields passed in one register: kind, then number.
            let (kind, number) = (location as u32, ((location >> 32) as u32).cast_signed());
            prefetch(st, here.device, address, kind, number)
        })
    }
}

fn managed(st: &State, address: u64) -> Res {
    let found = st.memory.find(address).filter(|found| found.kind == Kind::Managed);
    found.map(|_| ()).ok_or(INVALID_VALUE)
}

/// Managed memory, or any host memory where the device reads it.
fn reachable(st: &State, device: usize, address: u64) -> Res {
    let pageable = st.devices.get(device).is_some_and(crate::device::Device::reads_pageable);
    match st.memory.find(address) {
        None if pageable && address != 0 => Ok(()),
        _ => managed(st, address),
    }
}

fn prefetch(st: &State, device: usize, address: u64, kind: u32, number: i32) -> Res {
    reachable(st, device, address)?;
    let to_device = kind == 1;
    if to_device {
        let target = usize::try_from(number).ok().and_then(|target| st.devices.get(target));
        let target = target.ok_or(INVALID_DEVICE)?;
        if target.guards_managed() {
            return Err(INVALID_DEVICE);
        }
    }
    Ok(())
}

fn answer(st: &State, found: &Alloc, data: Out<c_void>, attribute: u32, address: u64) -> Res {
    let offset = found.offset(address).unwrap_or(0);
    let host = found.kind != Kind::Device;
    let reads = st.devices.get(found.device).is_some_and(|dev| dev.profile.behaviour.host_reads_device_memory);
    match attribute {
        1 => data.cast::<u64>().set(found.ctx),
        // Host is 1, device is 2; managed memory counts as the device's.
        2 => data.cast::<u32>().set(if matches!(found.kind, Kind::Device | Kind::Managed) { 2 } else { 1 }),
        3 => data.cast::<u64>().set(found.device_base + offset),
        4 if host || reads => data.cast::<u64>().set(found.host_base + offset),
        4 => Err(INVALID_VALUE),
        6 => data.cast::<u32>().set(0),
        7 => data.cast::<u64>().set(found.id),
        8 => data.cast::<u32>().set(u32::from(found.kind == Kind::Managed)),
        9 => data.cast::<i32>().set(i32::try_from(found.device).unwrap_or(-1)),
        10 => data.cast::<u32>().set(u32::from(found.kind == Kind::Device && !found.ordered)),
        11 => data.cast::<u64>().set(found.device_base),
        12 => data.cast::<u64>().set(found.len),
        13 => data.cast::<u32>().set(1),
        14 => data.cast::<u64>().set(0),
        15 => data.cast::<u32>().set(0),
        16 => data.cast::<u32>().set(3),
        17 => data.cast::<u64>().set(0),
        _ => Err(NOT_SUPPORTED),
    }
}

/// The plural call answers nothing, in the width of the attribute, for memory the driver does not know.
fn blank(data: Out<c_void>, attribute: u32) -> Res {
    match attribute {
        1 | 3 | 4 | 7 | 11 | 12 | 14 | 17 => data.cast::<u64>().set(0),
        9 => data.cast::<i32>().set(-2),
        2 | 6 | 8 | 10 | 13 | 15 | 16 => data.cast::<u32>().set(0),
        _ => Err(INVALID_VALUE),
    }
}
