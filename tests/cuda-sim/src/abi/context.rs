//! Contexts and which of them a thread works in.

use super::types::{In, Out};
use crate::sched;
use crate::state;
use crate::status::{
    INVALID_CONTEXT, INVALID_VALUE, PEER_ACCESS_ALREADY_ENABLED, PEER_ACCESS_NOT_ENABLED, PEER_ACCESS_UNSUPPORTED,
};
use std::ffi::c_void;

export! {
    fn cuCtxCreate_v2(call, ctx: Out<u64>, flags: u32, device: i32) {
        call.on_device(device, |st, device| create(st, ctx, flags, device))
    }

    fn cuCtxCreate_v3(call, ctx: Out<u64>, _affinity: In<u64>, _count: i32, flags: u32, device: i32) {
        call.on_device(device, |st, device| create(st, ctx, flags, device))
    }

    fn cuCtxCreate_v4(call, ctx: Out<u64>, _params: In<u64>, flags: u32, device: i32) {
        call.on_device(device, |st, device| create(st, ctx, flags, device))
    }

    fn cuCtxDestroy_v2(call, ctx: u64) {
        call.anywhere(|st| {
            if st.context(ctx)?.primary {
                return Err(INVALID_CONTEXT);
            }
            st.drop_context(ctx);
            if state::current() == ctx {
                state::pop();
            }
            Ok(())
        })
    }

    fn cuCtxGetCurrent(call, ctx: Out<u64>) {
        call.anywhere(|_| ctx.set(state::current()))
    }

    fn cuCtxSetCurrent(call, ctx: u64) {
        call.args([ctx, 0, 0, 0]).anywhere(|st| {
            if ctx != 0 {
                st.context(ctx)?;
            }
            state::set_current(ctx);
            Ok(())
        })
    }

    fn cuCtxPushCurrent_v2(call, ctx: u64) {
        call.args([ctx, 0, 0, 0]).anywhere(|st| {
            st.context(ctx)?;
            if state::push(ctx) { Ok(()) } else { Err(INVALID_VALUE) }
        })
    }

    fn cuCtxPopCurrent_v2(call, ctx: Out<u64>) {
        call.anywhere(|_| {
            let popped = state::pop().ok_or(INVALID_CONTEXT)?;
            ctx.set_if(popped);
            Ok(())
        })
    }

    fn cuCtxGetDevice(call, device: Out<i32>) {
        call.lenient().ctx(|_, here| device.set(i32::try_from(here.device).unwrap_or(-1)))
    }

    fn cuCtxGetDevice_v2(call, device: Out<i32>, ctx: u64) {
        call.anywhere(|st| {
            let ctx = if ctx == 0 { state::current() } else { ctx };
            device.set(i32::try_from(st.context(ctx)?.device).unwrap_or(-1))
        })
    }

    fn cuCtxSynchronize(call) {
        call.not_in_capture().ctx(|st, here| {
            sched::wait_context(st, here.ctx)?;
            crate::launch::fence(st, here.device);
            Ok(())
        })
    }

    fn cuCtxSynchronize_v2(call, ctx: u64) {
        call.not_in_capture().ctx(|st, here| {
            let ctx = if ctx == 0 { here.ctx } else { ctx };
            sched::wait_context(st, ctx)?;
            let device = st.context(ctx)?.device;
            crate::launch::fence(st, device);
            Ok(())
        })
    }

    fn cuCtxGetFlags(call, flags: Out<u32>) {
        call.lenient().ctx(|st, here| flags.set(st.context(here.ctx)?.flags))
    }

    fn cuCtxSetFlags(call, flags: u32) {
        call.ctx(|st, here| {
            st.context_mut(here.ctx)?.flags = flags;
            Ok(())
        })
    }

    fn cuCtxGetId(call, ctx: u64, id: Out<u64>) {
        call.anywhere(|st| {
            let ctx = if ctx == 0 { state::current() } else { ctx };
            id.set(st.context(ctx)?.id)
        })
    }

    fn cuCtxGetApiVersion(call, ctx: u64, version: Out<u32>) {
        call.anywhere(|st| {
            let ctx = if ctx == 0 { state::current() } else { ctx };
            st.context(ctx)?;
            version.set(3020)
        })
    }

    fn cuCtxGetStreamPriorityRange(call, least: Out<i32>, greatest: Out<i32>) {
        call.ctx(|_, _| {
            least.set_if(0);
            greatest.set_if(-5);
            Ok(())
        })
    }

    fn cuCtxGetLimit(call, value: Out<usize>, limit: u32) {
        call.ctx(|st, here| {
            let default = match limit {
                0 => 1024,
                1 => 1 << 20,
                2 => 8 << 20,
                3 => 2,
                4 => 2048,
                5..=8 => 0,
                _ => return Err(INVALID_VALUE),
            };
            value.set(st.context(here.ctx)?.limits.get(&limit).copied().unwrap_or(default))
        })
    }

    fn cuCtxSetLimit(call, limit: u32, value: usize) {
        call.ctx(|st, here| {
            if limit > 8 {
                return Err(INVALID_VALUE);
            }
            st.context_mut(here.ctx)?.limits.insert(limit, value);
            Ok(())
        })
    }

    fn cuCtxGetCacheConfig(call, config: Out<u32>) {
        call.ctx(|_, _| config.set(0))
    }

    fn cuCtxSetCacheConfig(call, _config: u32) {
        call.ctx(|_, _| Ok(()))
    }

    fn cuCtxGetSharedMemConfig(call, config: Out<u32>) {
        call.ctx(|_, _| config.set(0))
    }

    fn cuCtxSetSharedMemConfig(call, _config: u32) {
        call.ctx(|_, _| Ok(()))
    }

    fn cuCtxResetPersistingL2Cache(call) {
        call.ctx(|_, _| Ok(()))
    }

    fn cuCtxGetExecAffinity(call, _affinity: Out<c_void>, _kind: u32) {
        call.ctx(|_, _| Err(crate::status::NOT_SUPPORTED))
    }

    fn cuCtxEnablePeerAccess(call, peer: u64, flags: u32) {
        call.ctx(|st, here| {
            if flags != 0 {
                return Err(INVALID_VALUE);
            }
            let device = st.context(peer)?.device;
            if !super::device::can_access(st, here.device, device) {
                return Err(PEER_ACCESS_UNSUPPORTED);
            }
            let context = st.context_mut(here.ctx)?;
            if context.peers.contains(&peer) {
                return Err(PEER_ACCESS_ALREADY_ENABLED);
            }
            context.peers.push(peer);
            Ok(())
        })
    }

    fn cuCtxDisablePeerAccess(call, peer: u64) {
        call.ctx(|st, here| {
            st.context(peer)?;
            let peers = &mut st.context_mut(here.ctx)?.peers;
            let before = peers.len();
            peers.retain(|other| *other != peer);
            if peers.len() == before { Err(PEER_ACCESS_NOT_ENABLED) } else { Ok(()) }
        })
    }
}

fn create(st: &mut state::State, ctx: Out<u64>, flags: u32, device: usize) -> crate::status::Res {
    ctx.check()?;
    let handle = st.add_context(device, false, flags)?;
    if !state::push(handle) {
        return Err(INVALID_VALUE);
    }
    ctx.set(handle)
}
