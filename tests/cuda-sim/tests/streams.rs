//! Order on and between streams: bytes move when a step runs, never before.

mod common;

use common::*;
use cuda_sim::device;
use cudarc::driver::sys::{self, CUresult};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

const H200: &str = "x86_h200_sxm_gen5";
const NOT_READY: CUresult = CUresult::CUDA_ERROR_NOT_READY;

#[test]
fn a_pinned_source_is_read_when_the_copy_runs() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let (s, d) = (stream(), alloc(4096));
    let source = pinned(4096);
    source.fill(1);
    let gate = sim.gate(s as u64);
    ok(h2d(d, source, s));
    source.fill(2);
    // SAFETY: no pointers.
    assert_eq!(unsafe { sys::cuStreamQuery(s) }, NOT_READY);
    gate.open();
    ok(sync(s));
    assert_eq!(read(d, 4096), vec![2; 4096]);
    assert_eq!(sim.evidence().copied_h2d_pinned, 4096);
}

#[test]
fn a_small_pageable_source_is_read_at_once() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let (s, d) = (stream(), alloc(4096));
    let mut source = vec![1u8; 4096];
    let gate = sim.gate(s as u64);
    ok(h2d(d, &source, s));
    source.fill(2);
    gate.open();
    ok(sync(s));
    assert_eq!(read(d, 4096), vec![1; 4096]);
    assert_eq!(sim.evidence().copied_h2d_pageable, 4096);
}

#[test]
fn pageable_copies_block_the_submitter() {
    let sim = device(H200).unwrap();
    let ctx = context(sim.ordinal()) as usize;
    let (s, d) = (stream() as usize, alloc(1 << 20));
    for to_device in [true, false] {
        let gate = sim.gate(s as u64);
        let worker = std::thread::spawn(move || {
            // SAFETY: the context is alive.
            ok(unsafe { sys::cuCtxSetCurrent(ctx as _) });
            let mut host = vec![7u8; 1 << 20];
            ok(if to_device { h2d(d, &host, s as _) } else { d2h(&mut host, d, s as _) });
            host
        });
        std::thread::sleep(Duration::from_millis(30));
        assert!(!worker.is_finished());
        gate.open();
        assert_eq!(worker.join().unwrap(), vec![7; 1 << 20]);
    }
}

#[test]
fn events_order_streams() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let (a, b, e) = (stream(), stream(), event());
    let d = alloc(1024);
    let (first, second) = (pinned(1024), pinned(1024));
    first.fill(1);
    second.fill(2);
    // SAFETY: no pointers.
    ok(unsafe { sys::cuEventQuery(e) });
    let gate = sim.gate(a as u64);
    ok(h2d(d, first, a));
    // SAFETY: handles are alive.
    unsafe {
        ok(sys::cuEventRecord(e, a));
        ok(sys::cuStreamWaitEvent(b, e, 0));
    }
    ok(h2d(d, second, b));
    sim.idle();
    // SAFETY: handles are alive.
    unsafe {
        assert_eq!(sys::cuEventQuery(e), NOT_READY);
        assert_eq!(sys::cuStreamQuery(b), NOT_READY);
    }
    // A wait keeps the state at the time of the wait: recording again changes nothing.
    // SAFETY: handles are alive.
    ok(unsafe { sys::cuEventRecord(e, stream()) });
    gate.open();
    ok(sync(b));
    assert_eq!(read(d, 1024), vec![2; 1024]);
    assert_eq!(sim.violations(), Vec::<String>::new());
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams_only() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let (tied, free_one) = (blocking_stream(), stream());
    let gate = sim.gate(tied as u64);
    let d = alloc(64);
    // SAFETY: device memory of that size.
    unsafe {
        ok(sys::cuMemsetD8Async(d, 1, 64, null_mut()));
        assert_eq!(sys::cuStreamQuery(null_mut()), NOT_READY);
        ok(sys::cuMemsetD8Async(d, 2, 64, free_one));
    }
    ok(sync(free_one));
    assert_eq!(sim.peek(d, 64).unwrap(), vec![2; 64]);
    gate.open();
    ok(sync(null_mut()));
    assert_eq!(sim.peek(d, 64).unwrap(), vec![1; 64]);
}

#[test]
fn the_per_thread_stream_is_another_one_on_each_thread() {
    let sim = device(H200).unwrap();
    let ctx = context(sim.ordinal()) as usize;
    let per_thread = 2 as sys::CUstream;
    let gate = sim.gate(2);
    // SAFETY: no pointers.
    assert_eq!(unsafe { sys::cuStreamQuery(per_thread) }, NOT_READY);
    std::thread::spawn(move || {
        // SAFETY: the context is alive.
        unsafe {
            ok(sys::cuCtxSetCurrent(ctx as _));
            ok(sys::cuStreamQuery(2 as _));
        }
    })
    .join()
    .unwrap();
    gate.open();
    ok(sync(per_thread));
}

#[test]
fn both_directions_overlap() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let (up, down) = (stream(), stream());
    let (a, b) = (alloc(8 << 20), alloc(8 << 20));
    let (from, to) = (pinned(8 << 20), pinned(8 << 20));
    let start = sim.clock(0).now_ns;
    for _ in 0..8 {
        ok(h2d(a, from, up));
        ok(d2h(to, b, down));
    }
    ok(sync(up));
    ok(sync(down));
    let clock = sim.clock(0);
    let total = 16.0 * (8 << 20) as f64 / (clock.now_ns - start) as f64;
    assert!((90.0..100.0).contains(&total), "{total} GB/s in both directions");
    let one = 8.0 * (8 << 20) as f64 / (clock.h2d_ns - start) as f64;
    assert!((45.0..56.0).contains(&one), "{one} GB/s to the device");
}

#[test]
fn a_word_opens_a_stream() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let (s, t) = (stream(), stream());
    let word = pinned(8);
    word.fill(0);
    let address = word.as_ptr() as u64;
    // SAFETY: the word is pinned and aligned.
    unsafe {
        ok(sys::cuStreamWaitValue32_v2(s, address, 5, 0));
        assert_eq!(sys::cuStreamQuery(s), NOT_READY);
        sim.idle();
        ok(sys::cuStreamWriteValue32_v2(t, address, 5, 0));
    }
    ok(sync(s));
    assert_eq!(word[0], 5);
}

#[test]
fn host_functions_run_in_order_and_may_not_call_the_driver() {
    extern "C" fn work(data: *mut std::ffi::c_void) {
        let mut free = 0;
        let mut total = 0;
        // SAFETY: valid out-pointers; the data is the atomic below.
        unsafe {
            let answer = code(sys::cuMemGetInfo_v2(&raw mut free, &raw mut total));
            (*data.cast::<std::sync::atomic::AtomicU32>()).store(answer, std::sync::atomic::Ordering::SeqCst);
        }
    }
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let s = stream();
    let answer = std::sync::atomic::AtomicU32::new(0);
    // SAFETY: the atomic outlives the stream's work.
    ok(unsafe { sys::cuLaunchHostFunc(s, Some(work), (&raw const answer).cast_mut().cast()) });
    ok(sync(s));
    assert_eq!(answer.into_inner(), 800);
}

#[test]
fn submitting_is_cheap() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let s = stream();
    let d = alloc(4096);
    let source = pinned(4096);
    let gate = sim.gate(s as u64);
    let start = Instant::now();
    for _ in 0..2000 {
        ok(h2d(d, source, s));
    }
    let each = start.elapsed() / 2000;
    gate.open();
    ok(sync(s));
    println!("{each:?} each");
    assert!(each < Duration::from_millis(1), "{each:?}");
}

#[test]
fn late_and_reordered_work_is_still_ordered() {
    let sim = cuda_sim::DeviceBuilder::new(H200).complete_late(true).reorder(true).seed(7).build().unwrap();
    context(sim.ordinal());
    let (s, d) = (stream(), alloc(256));
    let source = pinned(256);
    let target = pinned(256);
    for round in 0..20u8 {
        source.fill(round);
        ok(h2d(d, source, s));
        ok(d2h(target, d, s));
        ok(sync(s));
        assert_eq!(target, &vec![round; 256][..]);
    }
    assert_eq!(sim.violations(), Vec::<String>::new());
}
