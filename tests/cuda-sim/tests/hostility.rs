//! What goes wrong on purpose, and what is said about it.

mod common;

use common::*;
use cuda_sim::device;
use cudarc::driver::{CudaContext, sys};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

const H200: &str = "x86_h200_sxm_gen5";

#[test]
fn the_nth_call_fails() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let mut address = 0;
    let mut take = || {
        // SAFETY: a valid out-pointer.
        code(unsafe { sys::cuMemAlloc_v2(&raw mut address, 10) })
    };
    sim.fail_nth("cuMemAlloc", 2, 2);
    assert_eq!([take(), take(), take()], [0, 2, 0]);
    sim.fail_always("cuMemAlloc_v2", 46);
    assert_eq!([take(), take()], [46, 46]);
    sim.clear_failures();
    assert_eq!(take(), 0);
    assert_eq!(sim.count("cuMemAlloc"), 6);
    sim.fail_nth_after("cuMemAlloc", 1, 999);
    let before = sim.evidence().device_bytes;
    assert_eq!(take(), 999);
    assert_eq!(sim.evidence().device_bytes, before + 10);
    let calls = sim.calls();
    let failed: Vec<u32> = calls.iter().filter(|call| call.result != 0).map(|call| call.result).collect();
    assert_eq!(failed, [2, 46, 46, 999]);
    let ours = calls.iter().find(|call| call.name == "cuMemAlloc_v2").unwrap();
    assert_eq!(ours.bytes, 10);
    assert_ne!(ours.context, 0);
}

#[test]
fn a_fault_ends_every_waiter() {
    let sim = device(H200).unwrap();
    let ctx = context(sim.ordinal()) as usize;
    let (s, e) = (stream(), event());
    let held = stream();
    let gate = sim.gate(held as u64);
    // SAFETY: live handles.
    ok(unsafe { sys::cuEventRecord(e, held) });
    let (e, held) = (e as usize, held as usize);
    let waiter = std::thread::spawn(move || {
        // SAFETY: live handles.
        unsafe {
            ok(sys::cuCtxSetCurrent(ctx as _));
            let event = code(sys::cuEventSynchronize(e as _));
            (event, code(sys::cuStreamSynchronize(held as _)))
        }
    });
    std::thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    sim.fault_on_stream(s as u64, 719);
    assert_eq!(waiter.join().unwrap(), (719, 719));
    assert!(start.elapsed() < Duration::from_secs(1));
    // SAFETY: live handles.
    unsafe {
        assert_eq!(code(sys::cuEventQuery(e as _)), 719);
        let mut current = null_mut();
        ok(sys::cuCtxGetCurrent(&raw mut current));
        ok(sys::cuDevicePrimaryCtxRelease_v2(sim.ordinal() as i32));
    }
    drop(gate);
    // A new context is a new start.
    context(sim.ordinal());
    free(alloc(10));
}

#[test]
fn host_functions_do_not_run_after_a_fault_unless_asked() {
    extern "C" fn count(data: *mut std::ffi::c_void) {
        // SAFETY: the atomic below.
        unsafe { (*data.cast::<std::sync::atomic::AtomicU32>()).fetch_add(1, std::sync::atomic::Ordering::SeqCst) };
    }
    for (asked, runs) in [(false, 0), (true, 1)] {
        let sim = device(H200).unwrap();
        context(sim.ordinal());
        let s = stream();
        sim.callbacks_run(asked);
        let calls = std::sync::atomic::AtomicU32::new(0);
        let gate = sim.gate(s as u64);
        sim.fault_on_stream(s as u64, 700);
        // SAFETY: the atomic lives until the device is idle.
        ok(unsafe { sys::cuLaunchHostFunc(s, Some(count), (&raw const calls).cast_mut().cast()) });
        gate.open();
        sim.idle();
        assert_eq!(calls.into_inner(), runs);
    }
}

#[test]
fn a_copy_of_registered_memory_that_is_gone_is_told() {
    const LEN: usize = 16 << 12;
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    // SAFETY: a new mapping of the program's own; only the driver uses it after it is gone, which copies by way of the kernel.
    let place = unsafe {
        let (rw, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        libc::mmap(std::ptr::null_mut(), LEN, rw, kind, -1, 0)
    };
    assert_ne!(place, libc::MAP_FAILED);
    // SAFETY: mapped just now.
    ok(unsafe { sys::cuMemHostRegister_v2(place, LEN, 0) });
    let target = alloc(LEN);
    // The second half is gone, as under a program that unmaps what a copy still needs; but nobody else gets the addresses.
    // SAFETY: nothing else uses it.
    assert_eq!(unsafe { libc::mprotect(place.byte_add(LEN / 2), LEN / 2, libc::PROT_NONE) }, 0);
    let s = stream();
    // SAFETY: the driver answers for what it cannot read.
    let _ = unsafe { sys::cuMemcpyHtoDAsync_v2(target, place, LEN, s) };
    // SAFETY: a stream of ours.
    assert_eq!(code(unsafe { sys::cuStreamSynchronize(s) }), 700);
    let told = sim.violations();
    let missing = format!("nothing is mapped at {:#x}", place as usize + LEN / 2);
    assert!(told.iter().any(|told| told.contains(&missing)), "{told:?}");
    // SAFETY: nothing uses it any more.
    assert_eq!(unsafe { libc::munmap(place, LEN) }, 0);
}

#[test]
fn a_free_that_does_not_wait_is_reported() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    sim.set_free_waits(false);
    let s = stream();
    let (d, target, source) = (alloc(4096), pinned(4096), pinned(4096));
    let gate = sim.gate(s as u64);
    ok(d2h(target, d, s));
    free(d);
    assert_eq!(sim.violations().len(), 1, "{:?}", sim.violations());
    ok(h2d(alloc(4096), source, s));
    free_pinned(source);
    assert_eq!(sim.violations().len(), 2, "{:?}", sim.violations());
    gate.open();
    ok(sync(s));
    assert_eq!(target, &[0xDD; 4096][..]);
    assert!(sim.violations().iter().all(|text| text.starts_with("use after free")), "{:?}", sim.violations());
}

#[test]
fn a_free_that_waits_is_not() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let s = stream();
    let (d, target) = (alloc(4 << 20), pinned(4 << 20));
    for _ in 0..4 {
        ok(d2h(target, d, s));
    }
    free(d);
    // SAFETY: no pointers.
    ok(unsafe { sys::cuStreamQuery(s) });
    assert_eq!(sim.violations(), Vec::<String>::new());
}

#[test]
fn a_free_on_another_stream_is_reported() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let (s, other, e) = (stream(), stream(), event());
    let target = pinned(1000);
    let mut address = 0;
    for ordered in [false, true] {
        // SAFETY: valid pointers, live handles; the memory is given up.
        unsafe {
            ok(sys::cuMemAllocAsync(&raw mut address, 1000, s));
            ok(sync(s));
            let gate = sim.gate(other as u64);
            ok(d2h(target, address, other));
            if ordered {
                ok(sys::cuEventRecord(e, other));
                ok(sys::cuStreamWaitEvent(s, e, 0));
            }
            ok(sys::cuMemFreeAsync(address, s));
            gate.open();
            ok(sync(other));
            ok(sync(s));
        }
        let found = sim.violations();
        assert_eq!(found.is_empty(), ordered, "{found:?}");
        sim.clear_violations();
    }
}

#[test]
fn unordered_overlap_is_reported() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let (a, b, e) = (stream(), stream(), event());
    let (d, x, y) = (alloc(1000), pinned(1000), pinned(1000));
    let (gate, second) = (sim.gate(a as u64), sim.gate(b as u64));
    ok(h2d(d, &x[..500], a));
    ok(h2d(d + 500, &y[..500], b));
    assert_eq!(sim.violations(), Vec::<String>::new(), "two halves");
    ok(d2h(&mut y[500..], d + 500, a));
    ok(h2d(d, &x[..500], b));
    assert_eq!(sim.violations().len(), 2, "{:?}", sim.violations());
    sim.clear_violations();
    gate.open();
    second.open();
    ok(sync(a));
    ok(sync(b));
    // Ordered by the host, by an event, by way of a third stream.
    ok(h2d(d, x, a));
    let third = stream();
    // SAFETY: live handles.
    unsafe {
        ok(sys::cuEventRecord(e, a));
        ok(sys::cuStreamWaitEvent(third, e, 0));
        ok(sys::cuEventRecord(e, third));
        ok(sys::cuStreamWaitEvent(b, e, 0));
    }
    ok(h2d(d, y, b));
    ok(sync(b));
    assert_eq!(sim.violations(), Vec::<String>::new());
}

#[test]
fn what_is_left_is_a_leak() {
    let sim = device(H200).unwrap();
    let ctx = CudaContext::new(sim.ordinal()).unwrap();
    let stream = ctx.new_stream().unwrap();
    let data = stream.alloc_zeros::<u8>(10).unwrap();
    assert!(sim.leaks().iter().any(|leak| leak.starts_with("context")));
    ctx.bind_to_thread().unwrap();
    let lost = alloc(123);
    drop((data, stream));
    drop(ctx);
    let leaks = sim.leaks();
    assert_eq!(leaks.len(), 1, "{leaks:?}");
    assert!(leaks[0].contains(&format!("{lost:#x}")));
}

#[test]
fn an_event_belongs_to_its_context() {
    let (one, two) = (device(H200).unwrap(), device(H200).unwrap());
    context(one.ordinal());
    let (e, s) = (event(), stream());
    context(two.ordinal());
    let other = stream();
    // SAFETY: live handles.
    unsafe {
        assert_eq!(code(sys::cuEventRecord(e, other)), 400);
        ok(sys::cuEventRecord(e, s));
        ok(sys::cuStreamWaitEvent(other, e, 0));
        assert_eq!(code(sys::cuEventRecord(null_mut(), other)), 400);
        ok(sys::cuStreamDestroy_v2(other));
        assert_eq!(code(sys::cuStreamSynchronize(other)), 400);
    }
}

#[test]
fn a_driver_that_is_gone() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let s = stream();
    let gate = sim.gate(s as u64);
    sim.driver_gone(true);
    // SAFETY: live handles.
    unsafe {
        assert_eq!(code(sys::cuStreamSynchronize(s)), 4);
        let mut current = null_mut();
        assert_eq!(code(sys::cuCtxGetCurrent(&raw mut current)), 4);
    }
    drop(gate);
    sim.driver_gone(false);
    ok(sync(s));
    sim.sticky(719);
    assert_eq!(code(sync(s)), 719);
    sim.sticky(0);
    ok(sync(s));
}

#[test]
fn no_context_no_work() {
    let sim = device(H200).unwrap();
    // SAFETY: takes no pointers.
    ok(unsafe { sys::cuInit(0) });
    sim.clear_calls();
    std::thread::spawn(|| {
        let mut address = 0;
        // SAFETY: a valid out-pointer.
        assert_eq!(code(unsafe { sys::cuMemAlloc_v2(&raw mut address, 10) }), 201);
    })
    .join()
    .unwrap();
    let mut device = 0;
    // SAFETY: a valid out-pointer.
    assert_eq!(code(unsafe { sys::cuDeviceGet(&raw mut device, -1) }), 101);
    assert_eq!(sim.calls().len(), 0);
}

#[test]
fn memory_figures() {
    let sim = device("dgx_spark_gb10").unwrap();
    context(sim.ordinal());
    let info = || {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid out-pointers.
        ok(unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) });
        (free as u64, total as u64)
    };
    let mut figures = sim.profile().host.clone();
    figures.free = 41 << 30;
    sim.set_host(&figures).unwrap();
    assert_eq!(info().0, 41 << 30);
    sim.set_mem_info(7, 9);
    assert_eq!(info(), (7, 9));
    sim.clear_mem_info();
    assert_eq!(info().0, 41 << 30);
    assert!(sim.host_root().join("proc/meminfo").exists());
}
