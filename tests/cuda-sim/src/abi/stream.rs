//! Streams and what waits on them.

use super::types::Out;
use super::{Call, Here};
use crate::capture;
use crate::sched::body::{Compare, HostFn, HostJob};
use crate::sched::op::Op;
use crate::sched::{self};
use crate::state::{Guard, StreamKind};
use crate::status::{INVALID_HANDLE, INVALID_VALUE, NOT_READY, Res, Status};
use std::ffi::c_void;

export! {
    fn cuStreamCreate(call, stream: Out<u64>, flags: u32) {
        call.args([u64::from(flags), 0, 0, 0]).ctx(|st, here| create(st, here, stream, flags, 0))
    }

    fn cuStreamCreateWithPriority(call, stream: Out<u64>, flags: u32, priority: i32) {
        call.args([u64::from(flags), 0, 0, 0]).ctx(|st, here| create(st, here, stream, flags, priority.clamp(-5, 0)))
    }

    fn cuStreamDestroy_v2(call, stream: u64) {
        call.stream(stream).ctx(|st, _| {
            let found = st.stream(stream)?;
            if !matches!(found.kind, StreamKind::Blocking | StreamKind::NonBlocking) {
                return Err(INVALID_HANDLE);
            }
            let ctx = found.ctx;
            capture::abandon(st, stream);
            // What is queued on it still runs.
            st.streams.remove(&stream);
            st.context_mut(ctx)?.streams.retain(|other| *other != stream);
            Ok(())
        })
    }

    fn cuStreamQuery(call, stream: u64) {
        call.stream(stream).ctx(|st, here| {
            let stream = st.stream_of(here.ctx, stream)?;
            capture::check_sync(st, here.device, stream)?;
            for step in tails(st, stream)? {
                if !step.is_done() {
                    return st.sticky(step.ctx).map_or(Err(NOT_READY), Err);
                }
                crate::state::host_reached(step.seen_ns());
            }
            Ok(())
        })
    }

    fn cuStreamSynchronize(call, stream: u64) {
        call.stream(stream).ctx(|st, here| {
            let stream = st.stream_of(here.ctx, stream)?;
            capture::check_sync(st, here.device, stream)?;
            for step in tails(st, stream)? {
                sched::wait(st, &step)?;
            }
            crate::launch::fence(st, here.device);
            Ok(())
        })
    }

    fn cuStreamWaitEvent(call, stream: u64, event: u64, flags: u32) {
        call.stream(stream).args([event, 0, 0, 0]).ctx(|st, here| {
            if flags > 1 {
                return Err(INVALID_VALUE);
            }
            let stream = st.stream_of(here.ctx, stream)?;
            let found = st.event(event)?;
            if let Some((from, nodes)) = found.captured.clone() {
                return capture::join(st, stream, from, &nodes);
            }
            let recorded = found.recorded.clone();
            capture::check_foreign_wait(st, stream)?;
            match recorded.filter(|step| !step.is_done()) {
                Some(step) => capture::enqueue_after(st, stream, Op::Join, vec![step]).map(|_| ()),
                None => Ok(()),
            }
        })
    }

    fn cuStreamWaitValue32(call, stream: u64, address: u64, value: u32, flags: u32) {
        wait_value(call, stream, address, u64::from(value), flags, false)
    }

    fn cuStreamWaitValue32_v2(call, stream: u64, address: u64, value: u32, flags: u32) {
        wait_value(call, stream, address, u64::from(value), flags, false)
    }

    fn cuStreamWaitValue64(call, stream: u64, address: u64, value: u64, flags: u32) {
        wait_value(call, stream, address, value, flags, true)
    }

    fn cuStreamWaitValue64_v2(call, stream: u64, address: u64, value: u64, flags: u32) {
        wait_value(call, stream, address, value, flags, true)
    }

    fn cuStreamWriteValue32(call, stream: u64, address: u64, value: u32, flags: u32) {
        write_value(call, stream, address, u64::from(value), flags, false)
    }

    fn cuStreamWriteValue32_v2(call, stream: u64, address: u64, value: u32, flags: u32) {
        write_value(call, stream, address, u64::from(value), flags, false)
    }

    fn cuStreamWriteValue64(call, stream: u64, address: u64, value: u64, flags: u32) {
        write_value(call, stream, address, value, flags, true)
    }

    fn cuStreamWriteValue64_v2(call, stream: u64, address: u64, value: u64, flags: u32) {
        write_value(call, stream, address, value, flags, true)
    }

    fn cuLaunchHostFunc(call, stream: u64, function: Option<unsafe extern "C" fn(*mut c_void)>, data: u64) {
        call.stream(stream).ctx(|st, here| {
            let function = HostFn::Plain(function.ok_or(INVALID_VALUE)?);
            let stream = st.stream_of(here.ctx, stream)?;
            capture::enqueue(st, stream, Op::Host(HostJob { function, data })).map(|_| ())
        })
    }

    fn cuStreamAddCallback(
        call, stream: u64, function: Option<unsafe extern "C" fn(*mut c_void, u32, *mut c_void)>, data: u64, flags: u32,
    ) {
        call.stream(stream).not_in_capture().ctx(|st, here| {
            if flags != 0 {
                return Err(INVALID_VALUE);
            }
            let function = HostFn::Callback(function.ok_or(INVALID_VALUE)?, stream);
            let stream = st.stream_of(here.ctx, stream)?;
            capture::enqueue(st, stream, Op::Host(HostJob { function, data })).map(|_| ())
        })
    }

    fn cuStreamGetCtx(call, stream: u64, ctx: Out<u64>) {
        call.stream(stream).ctx(|st, here| {
            let stream = st.stream_of(here.ctx, stream)?;
            ctx.set(st.stream(stream)?.ctx)
        })
    }

    fn cuStreamGetDevice(call, stream: u64, device: Out<i32>) {
        call.stream(stream).ctx(|st, here| {
            let stream = st.stream_of(here.ctx, stream)?;
            device.set(i32::try_from(st.stream(stream)?.device).unwrap_or(-1))
        })
    }

    fn cuStreamGetFlags(call, stream: u64, flags: Out<u32>) {
        call.stream(stream).ctx(|st, here| {
            let stream = st.stream_of(here.ctx, stream)?;
            flags.set(u32::from(st.stream(stream)?.kind == StreamKind::NonBlocking))
        })
    }

    fn cuStreamGetPriority(call, stream: u64, priority: Out<i32>) {
        call.stream(stream).ctx(|st, here| {
            let stream = st.stream_of(here.ctx, stream)?;
            priority.set(st.stream(stream)?.priority)
        })
    }

    fn cuStreamGetId(call, stream: u64, id: Out<u64>) {
        call.stream(stream).ctx(|st, here| {
            let stream = st.stream_of(here.ctx, stream)?;
            id.set(stream)
        })
    }

    fn cuStreamAttachMemAsync(call, stream: u64, address: u64, _len: usize, _flags: u32) {
        call.stream(stream).ctx(|st, here| {
            st.stream_of(here.ctx, stream)?;
            st.memory.find(address).map(|_| ()).ok_or(INVALID_VALUE)
        })
    }
}

fn create(st: &mut Guard, here: Here, stream: Out<u64>, flags: u32, priority: i32) -> Res {
    stream.check()?;
    let kind = match flags {
        0 => StreamKind::Blocking,
        1 => StreamKind::NonBlocking,
        _ => return Err(INVALID_VALUE),
    };
    let handle = st.add_stream(here.ctx, kind, priority)?;
    stream.set(handle)
}

/// What a wait for a stream waits for: its last step, and for the legacy stream those of all streams tied to it.
fn tails(st: &Guard, stream: u64) -> Res<Vec<std::sync::Arc<sched::Step>>> {
    let this = st.stream(stream)?;
    let mut tails: Vec<_> = this.tail.iter().cloned().collect();
    if this.kind == StreamKind::Legacy {
        for other in &st.context(this.ctx)?.streams {
            let other = st.stream(*other)?;
            if other.syncs_with_legacy() {
                tails.extend(other.tail.iter().cloned());
            }
        }
    }
    Ok(tails)
}

fn wait_value(call: Call, stream: u64, addr: u64, value: u64, flags: u32, wide: bool) -> Status {
    call.stream(stream).args([addr, value, u64::from(flags), 0]).ctx(|st, here| {
        // Bit 30 asks for a flush of remote writes first.
        let compare = match flags & !(1 << 30) {
            0 => Compare::Geq,
            1 => Compare::Eq,
            2 => Compare::And,
            3 => Compare::Nor,
            _ => return Err(INVALID_VALUE),
        };
        let stream = st.stream_of(here.ctx, stream)?;
        capture::enqueue(st, stream, Op::Wait { addr, value, wide, compare }).map(|_| ())
    })
}

fn write_value(call: Call, stream: u64, addr: u64, value: u64, flags: u32, wide: bool) -> Status {
    call.stream(stream).args([addr, value, u64::from(flags), 0]).ctx(|st, here| {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        let stream = st.stream_of(here.ctx, stream)?;
        capture::enqueue(st, stream, Op::Write { addr, value, wide }).map(|_| ())
    })
}
