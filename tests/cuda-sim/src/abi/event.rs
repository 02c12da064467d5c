//! Events.

use super::types::Out;
use super::{Call, Here};
use crate::capture;
use crate::sched::{self, op::Op};
use crate::state::{Event, Guard};
use crate::status::{CAPTURED_EVENT, INVALID_HANDLE, INVALID_VALUE, NOT_READY, Res, Status};

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

export! {
    fn cuEventCreate(call, event: Out<u64>, flags: u32) {
        call.args([u64::from(flags), 0, 0, 0]).ctx(|st, here| {
            event.check()?;
            // An event for other processes cannot keep time.
            if flags > 7 || flags & 4 != 0 && flags & DISABLE_TIMING == 0 {
                return Err(INVALID_VALUE);
            }
            let handle = st.handle();
            let made = Event { ctx: here.ctx, flags, recorded: None, captured: None };
            st.events.insert(handle, made);
            event.set(handle)
        })
    }

    fn cuEventDestroy_v2(call, event: u64) {
        call.args([event, 0, 0, 0]).ctx(|st, _| st.events.remove(&event).map(|_| ()).ok_or(INVALID_HANDLE))
    }

    fn cuEventRecord(call, event: u64, stream: u64) {
        record(call, event, stream, 0)
    }

    fn cuEventRecordWithFlags(call, event: u64, stream: u64, flags: u32) {
        record(call, event, stream, flags)
    }

    fn cuEventQuery(call, event: u64) {
        call.args([event, 0, 0, 0]).ctx(|st, here| {
            let found = st.event(event)?;
            if found.captured.is_some() {
                return Err(CAPTURED_EVENT);
            }
            capture::check_unsafe(st, here.device)?;
            let found = st.event(event)?;
            let Some(step) = found.recorded.clone() else { return Ok(()) };
            if let Some(status) = st.sticky(step.ctx) {
                return Err(status);
            }
            if !step.is_done() {
                return Err(NOT_READY);
            }
            crate::state::host_reached(step.seen_ns());
            crate::launch::fence(st, step.device);
            Ok(())
        })
    }

    fn cuEventSynchronize(call, event: u64) {
        call.args([event, 0, 0, 0]).ctx(|st, here| {
            let found = st.event(event)?;
            if found.captured.is_some() {
                return Err(CAPTURED_EVENT);
            }
            capture::check_unsafe(st, here.device)?;
            let Some(step) = st.event(event)?.recorded.clone() else { return Ok(()) };
            sched::wait(st, &step)?;
            crate::launch::fence(st, step.device);
            Ok(())
        })
    }

    fn cuEventElapsedTime(call, milliseconds: Out<f32>, start: u64, end: u64) {
        call.ctx(|st, _| milliseconds.set(elapsed(st, start, end)?))
    }

    fn cuEventElapsedTime_v2(call, milliseconds: Out<f32>, start: u64, end: u64) {
        call.ctx(|st, _| milliseconds.set(elapsed(st, start, end)?))
    }
}

fn record(call: Call, event: u64, stream: u64, flags: u32) -> Status {
    call.stream(stream).args([event, 0, 0, 0]).ctx(|st, here| {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        record_on(st, here, event, stream)
    })
}

fn record_on(st: &mut Guard, here: Here, event: u64, stream: u64) -> Res {
    let stream = st.stream_of(here.ctx, stream)?;
    let ctx = st.stream(stream)?.ctx;
    if st.event(event)?.ctx != ctx {
        return Err(INVALID_HANDLE);
    }
    if let Some((capture, nodes)) = capture::tail(st, stream)? {
        let event = st.events.get_mut(&event).ok_or(INVALID_HANDLE)?;
        event.captured = Some((capture, nodes));
        return Ok(());
    }
    let queued = capture::enqueue(st, stream, Op::Record)?;
    let event = st.events.get_mut(&event).ok_or(INVALID_HANDLE)?;
    event.captured = None;
    event.recorded = queued.map(|queued| queued.step);
    Ok(())
}

fn elapsed(st: &Guard, start: u64, end: u64) -> Res<f32> {
    let mut at = [0; 2];
    for (at, event) in at.iter_mut().zip([start, end]) {
        let event = st.event(event)?;
        let step = event.recorded.as_ref().filter(|_| event.flags & DISABLE_TIMING == 0).ok_or(INVALID_HANDLE)?;
        if !step.is_done() {
            return Err(NOT_READY);
        }
        *at = step.end_ns();
    }
    Ok((at[1] as f64 - at[0] as f64) as f32 / 1e6)
}
