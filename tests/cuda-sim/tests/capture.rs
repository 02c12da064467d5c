//! Stream capture: what is refused meanwhile, and what a graph does when it is launched.

mod common;

use common::*;
use cuda_sim::device;
use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
use std::ptr::null_mut;

const H200: &str = "x86_h200_sxm_gen5";

fn begin(stream: sys::CUstream, mode: Mode) {
    // SAFETY: a live stream.
    ok(unsafe { sys::cuStreamBeginCapture_v2(stream, mode) });
}

fn end(stream: sys::CUstream) -> Result<sys::CUgraph, u32> {
    let mut graph = null_mut();
    // SAFETY: a live stream and a valid out-pointer.
    match code(unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) }) {
        0 => Ok(graph),
        status => Err(status),
    }
}

fn launch(graph: sys::CUgraph, stream: sys::CUstream) -> u32 {
    let mut exec = null_mut();
    // SAFETY: live handles and a valid out-pointer.
    unsafe {
        ok(sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
        code(sys::cuGraphLaunch(exec, stream))
    }
}

fn exchange(mode: Mode) -> Mode {
    let mut mode = mode;
    // SAFETY: a valid pointer.
    ok(unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) });
    mode
}

const GLOBAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const THREAD: Mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: Mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;

#[test]
fn a_graph_reads_the_same_addresses_again() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let (s, side, e) = (stream(), stream(), event());
    let (d, f) = (alloc(64), alloc(64));
    let source = pinned(64);
    source.fill(1);
    begin(s, GLOBAL);
    ok(h2d(d, source, s));
    // SAFETY: live handles, device memory of that size.
    unsafe {
        ok(sys::cuEventRecord(e, s));
        ok(sys::cuStreamWaitEvent(side, e, 0));
        ok(sys::cuMemcpyDtoDAsync_v2(f, d, 64, side));
        ok(sys::cuEventRecord(e, side));
        ok(sys::cuStreamWaitEvent(s, e, 0));
    }
    let graph = end(s).unwrap();
    assert_eq!(sim.evidence().copied_h2d_pinned, 0, "nothing runs while it is captured");
    for value in [3u8, 4] {
        source.fill(value);
        assert_eq!(launch(graph, s), 0);
        ok(sync(s));
        assert_eq!(read(f, 64), vec![value; 64]);
    }
    assert_eq!(sim.violations(), Vec::<String>::new());
    free(d);
    assert_eq!(launch(graph, s), 1);
    assert_eq!(sim.violations().len(), 1);
}

#[test]
fn unsafe_calls_break_a_capture() {
    let sim = device(H200).unwrap();
    let ctx = context(sim.ordinal()) as usize;
    let (s, e) = (stream(), event());
    // SAFETY: live handles throughout.
    unsafe {
        ok(sys::cuEventRecord(e, stream()));
        for mode in [GLOBAL, THREAD] {
            begin(s, mode);
            assert_eq!(code(sys::cuEventQuery(e)), 900);
            assert_eq!(code(sys::cuMemsetD8Async(alloc_address(), 0, 1, s)), 901);
            assert_eq!(end(s), Err(901));
        }
        begin(s, RELAXED);
        ok(sys::cuEventQuery(e));
        assert!(end(s).is_ok());
        // Another thread breaks a global capture, unless it is relaxed; a thread-local one it cannot.
        for (mode, relaxed, breaks) in [(GLOBAL, false, true), (GLOBAL, true, false), (THREAD, false, false)] {
            begin(s, mode);
            let e = e as usize;
            std::thread::spawn(move || {
                ok(sys::cuCtxSetCurrent(ctx as _));
                if relaxed {
                    assert_eq!(exchange(RELAXED), GLOBAL);
                }
                assert_eq!(code(sys::cuEventQuery(e as _)), if breaks { 900 } else { 0 });
            })
            .join()
            .unwrap();
            assert_eq!(end(s).is_err(), breaks);
        }
    }
}

/// Memory that is there for the whole process.
fn alloc_address() -> u64 {
    0x1000
}

#[test]
fn what_streams_and_events_answer_meanwhile() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let (s, other, tied, e) = (stream(), stream(), blocking_stream(), event());
    // SAFETY: live handles throughout.
    unsafe {
        begin(s, THREAD);
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        ok(sys::cuStreamIsCapturing(s, &raw mut status));
        assert_eq!(status, sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
        ok(sys::cuEventRecord(e, s));
        assert_eq!(code(sys::cuEventQuery(e)), 907);
        assert_eq!(code(sys::cuStreamSynchronize(s)), 900);
        assert_eq!(end(s), Err(901));
        // Work outside the capture.
        begin(s, THREAD);
        let outside = event();
        ok(sys::cuEventRecord(outside, other));
        assert_eq!(code(sys::cuStreamWaitEvent(s, outside, 0)), 905);
        assert_eq!(end(s), Err(901));
        // A stream that is not joined again.
        begin(s, THREAD);
        ok(sys::cuEventRecord(e, s));
        ok(sys::cuStreamWaitEvent(other, e, 0));
        ok(sys::cuLaunchHostFunc(other, Some(nothing), null_mut()));
        assert_eq!(end(s), Err(904));
        // The legacy stream.
        begin(tied, THREAD);
        assert_eq!(code(sys::cuStreamIsCapturing(null_mut(), &raw mut status)), 906);
        assert_eq!(code(sys::cuEventRecord(outside, null_mut())), 906);
        assert_eq!(end(tied), Err(901));
        assert_eq!(end(s), Err(401));
    }
}

extern "C" fn nothing(_: *mut std::ffi::c_void) {}
