//! Devices and their primary contexts.

use super::types::{Out, Text, put_text};
use crate::state::State;
use crate::status::{INVALID_DEVICE, INVALID_VALUE, Res};
use std::ffi::{c_char, c_void};

export! {
    fn cuDeviceGetCount(call, count: Out<i32>) {
        call.anywhere(|st| count.set(i32::try_from(st.devices.len()).unwrap_or(i32::MAX)))
    }

    fn cuDeviceGet(call, device: Out<i32>, ordinal: i32) {
        call.on_device(ordinal, |_, _| device.set(ordinal))
    }

    fn cuDeviceGetName(call, name: Out<c_char>, len: i32, device: i32) {
        call.on_device(device, |st, device| put_text(name, len, &st.device(device)?.profile.name))
    }

    fn cuDeviceGetUuid(call, uuid: Out<[u8; 16]>, device: i32) {
        call.on_device(device, |st, device| uuid.set(st.device(device)?.uuid()))
    }

    fn cuDeviceGetUuid_v2(call, uuid: Out<[u8; 16]>, device: i32) {
        call.on_device(device, |st, device| uuid.set(st.device(device)?.uuid()))
    }

    fn cuDeviceTotalMem_v2(call, bytes: Out<usize>, device: i32) {
        call.on_device(device, |st, device| bytes.set(usize::try_from(st.device(device)?.profile.total_mem).unwrap_or(usize::MAX)))
    }

    fn cuDeviceGetAttribute(call, value: Out<i32>, attribute: i32, device: i32) {
        call.args([u64::from(attribute.cast_unsigned()), 0, 0, 0]).on_device(device, |st, device| {
            value.set(attribute_of(st, device, attribute)?)
        })
    }

    fn cuDeviceGetPCIBusId(call, id: Out<c_char>, len: i32, device: i32) {
        call.on_device(device, |st, device| put_text(id, len, &st.device(device)?.pci_bus_id()))
    }

    fn cuDeviceGetByPCIBusId(call, device: Out<i32>, id: Text) {
        call.anywhere(|st| {
            let id = id.get()?.to_ascii_lowercase();
            let found = st.devices.iter().position(|dev| dev.pci_bus_id() == id);
            device.set(found.and_then(|ordinal| i32::try_from(ordinal).ok()).ok_or(INVALID_VALUE)?)
        })
    }

    fn cuDeviceComputeCapability(call, major: Out<i32>, minor: Out<i32>, device: i32) {
        call.on_device(device, |st, device| {
            major.set(attribute_of(st, device, 75)?)?;
            minor.set(attribute_of(st, device, 76)?)
        })
    }

    fn cuDeviceGetLuid(call, _luid: Out<c_char>, _mask: Out<u32>, device: i32) {
        call.on_device(device, |_, _| Err(crate::status::NOT_SUPPORTED))
    }

    fn cuDeviceGetProperties(call, _properties: Out<c_void>, device: i32) {
        call.on_device(device, |_, _| Err(crate::status::NOT_SUPPORTED))
    }

    fn cuDeviceCanAccessPeer(call, can: Out<i32>, device: i32, peer: i32) {
        call.on_device(device, |st, device| {
            let peer = ordinal(st, peer)?;
            can.set(i32::from(can_access(st, device, peer)))
        })
    }

    fn cuDeviceGetP2PAttribute(call, value: Out<i32>, attribute: u32, device: i32, peer: i32) {
        call.on_device(device, |st, device| {
            let peer = ordinal(st, peer)?;
            let can = can_access(st, device, peer);
            // 1: performance rank, 2: access, 3: native atomics, 4: array access.
            value.set(match attribute {
                1 => 0,
                2 | 4 => i32::from(can),
                3 => 0,
                _ => return Err(INVALID_VALUE),
            })
        })
    }

    fn cuDevicePrimaryCtxRetain(call, ctx: Out<u64>, device: i32) {
        call.not_in_capture().on_device(device, |st, device| {
            ctx.check()?;
            let flags = st.device(device)?.primary_flags;
            let primary = match st.device(device)?.primary {
                Some(primary) => primary,
                None => {
                    let primary = st.add_context(device, true, flags)?;
                    st.device(device)?.primary = Some(primary);
                    primary
                }
            };
            st.device(device)?.primary_refs += 1;
            ctx.set(primary)
        })
    }

    fn cuDevicePrimaryCtxRelease_v2(call, device: i32) {
        call.on_device(device, |st, device| release_primary(st, device, false))
    }

    fn cuDevicePrimaryCtxRelease(call, device: i32) {
        call.on_device(device, |st, device| release_primary(st, device, false))
    }

    fn cuDevicePrimaryCtxReset_v2(call, device: i32) {
        call.on_device(device, |st, device| match st.device(device)?.primary {
            Some(_) => release_primary(st, device, true),
            None => Ok(()),
        })
    }

    fn cuDevicePrimaryCtxSetFlags_v2(call, device: i32, flags: u32) {
        call.on_device(device, |st, device| {
            let dev = st.device(device)?;
            dev.primary_flags = flags;
            if let Some(ctx) = dev.primary {
                st.context_mut(ctx)?.flags = flags;
            }
            Ok(())
        })
    }

    fn cuDevicePrimaryCtxGetState(call, device: i32, flags: Out<u32>, active: Out<i32>) {
        call.on_device(device, |st, device| {
            let dev = st.device(device)?;
            flags.set(dev.primary_flags)?;
            active.set(i32::from(dev.primary.is_some()))
        })
    }
}

/// The value of a device's attribute; one that the machine does not have is an invalid value.
pub(super) fn attribute_of(st: &State, device: usize, attribute: i32) -> Res<i32> {
    let dev = st.devices.get(device).ok_or(INVALID_DEVICE)?;
    match attribute {
        // The address is made up for each device: see `pci_bus_id`.
        33 => Ok(i32::try_from(device % 255 + 1).unwrap_or(0)),
        34 => Ok(0),
        50 => Ok(i32::try_from(device / 255).unwrap_or(0)),
        _ => dev.profile.attribute(attribute).ok_or(INVALID_VALUE),
    }
}

fn ordinal(st: &State, device: i32) -> Res<usize> {
    usize::try_from(device).ok().filter(|device| *device < st.devices.len()).ok_or(INVALID_DEVICE)
}

/// Two discrete devices of one profile reach each other.
pub(super) fn can_access(st: &State, device: usize, peer: usize) -> bool {
    let key = |device: usize| st.devices.get(device).map(|dev| dev.profile.key.clone());
    let integrated = st.devices.get(device).is_none_or(|dev| dev.has(crate::profile::attribute::INTEGRATED));
    let blocked = |device: usize| st.devices.get(device).is_none_or(|dev| dev.hostility.no_peers);
    device != peer && !integrated && key(device) == key(peer) && !blocked(device) && !blocked(peer)
}

fn release_primary(st: &mut State, device: usize, reset: bool) -> Res {
    let dev = st.device(device)?;
    let Some(ctx) = dev.primary else { return Err(crate::status::INVALID_CONTEXT) };
    dev.primary_refs = if reset { 0 } else { dev.primary_refs.saturating_sub(1) };
    if dev.primary_refs == 0 {
        dev.primary = None;
        st.drop_context(ctx);
    }
    Ok(())
}
