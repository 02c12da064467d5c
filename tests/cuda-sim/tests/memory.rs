//! Address spaces, lifetimes, registration.

mod common;

use common::*;
use cuda_sim::{DeviceBuilder, MemoryKind, device};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::ptr::null_mut;

const H200: &str = "x86_h200_sxm_gen5";

/// The signal that ends a child which does `work`, 0 if it ends by itself.
fn signal_of(work: impl FnOnce()) -> i32 {
    // SAFETY: the child only runs `work`, which touches memory, and leaves.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            // The harness's handler would print a report.
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            work();
            libc::_exit(0);
        }
        let mut status = 0;
        libc::waitpid(child, &raw mut status, 0);
        if libc::WIFSIGNALED(status) { libc::WTERMSIG(status) } else { 0 }
    }
}

fn touch(address: u64) -> i32 {
    // SAFETY: whether this is mapped is the question; the child answers.
    signal_of(move || unsafe {
        std::ptr::read_volatile(address as *const u8);
    })
}

#[test]
fn the_host_faults_on_device_memory() {
    for (profile, signal) in [(H200, libc::SIGSEGV), ("dgx_spark_gb10", libc::SIGSEGV), ("gh200_480gb_numa", 0)] {
        let sim = device(profile).unwrap();
        context(sim.ordinal());
        assert_eq!(touch(alloc(100)), signal, "{profile}");
    }
}

#[test]
fn freed_pinned_memory_is_out_of_reach_and_comes_back_poisoned() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let first = pinned(5000);
    first.fill(1);
    let address = first.as_ptr() as u64;
    assert_eq!(touch(address), 0);
    assert_eq!(sim.memory_kind(address + 4999), MemoryKind::Pinned);
    assert_eq!(touch(address + 8192), libc::SIGSEGV, "a page behind it");
    free_pinned(first);
    assert_eq!(touch(address), libc::SIGSEGV);
    let second = pinned(5000);
    assert_eq!(second.as_ptr() as u64, address);
    assert_eq!(second, &[0xDD; 5000][..]);
}

#[test]
fn device_memory_is_reused_at_once_and_poisoned() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    for size in [100, 1 << 20, 80 << 20] {
        let first = alloc(size);
        // SAFETY: device memory of that size.
        ok(unsafe { sys::cuMemsetD8_v2(first, 1, size) });
        ok(sync(null_mut()));
        free(first);
        let second = alloc(size);
        assert_eq!(first, second);
        assert_eq!(sim.peek(second, 50).unwrap(), vec![0xDD; 50]);
        assert_eq!(sim.peek(second + size as u64 - 50, 50).unwrap(), vec![0xDD; 50]);
        free(second);
    }
}

#[test]
fn stream_ordered_memory_is_reused_on_its_stream_before_the_free_has_run() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let (s, other) = (stream(), stream());
    let take = |s| {
        let mut address = 0;
        // SAFETY: a valid out-pointer.
        ok(unsafe { sys::cuMemAllocAsync(&raw mut address, 1000, s) });
        address
    };
    let first = take(s);
    let (ones, twos, back) = (pinned(1000), pinned(1000), pinned(1000));
    ones.fill(1);
    twos.fill(2);
    let gate = sim.gate(s as u64);
    ok(h2d(first, ones, s));
    ok(d2h(back, first, s));
    // SAFETY: the allocation is given up, in stream order.
    ok(unsafe { sys::cuMemFreeAsync(first, s) });
    assert_ne!(take(other), first, "another stream must not have it yet");
    assert_eq!(take(s), first);
    ok(h2d(first, twos, s));
    gate.open();
    ok(sync(s));
    assert_eq!(back, &[1; 1000][..]);
    assert_eq!(sim.peek(first, 1000).unwrap(), vec![2; 1000]);
    assert_eq!(sim.violations(), Vec::<String>::new());
}

#[test]
fn sizes_and_limits() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let mut address = 0;
    // SAFETY: valid out-pointers, and memory of the sizes given.
    unsafe {
        assert_eq!(code(sys::cuMemAlloc_v2(&raw mut address, 0)), 1);
        assert_eq!(code(sys::cuMemAllocAsync(&raw mut address, 0, null_mut())), 1);
        let mut host = null_mut();
        ok(sys::cuMemHostAlloc(&raw mut host, 0, 0));
        ok(sys::cuMemFreeHost(host));
        assert_eq!(code(sys::cuMemAlloc_v2(&raw mut address, 1 << 40)), 2);
        let huge = alloc(100 << 30);
        free(huge);
        let d = alloc(1000);
        let bytes = vec![0u8; 1001];
        assert_eq!(code(sys::cuMemcpyHtoD_v2(d, bytes.as_ptr().cast(), 1001)), 1);
        assert_eq!(code(sys::cuMemcpyHtoD_v2(d + 1, bytes.as_ptr().cast(), 1000)), 1);
        assert_eq!(code(sys::cuMemcpyHtoD_v2(d, null_mut(), 1000)), 1);
        assert_eq!(code(sys::cuMemcpyHtoD_v2(d, 16 as *const c_void, 1000)), 1);
        assert_eq!(code(sys::cuMemsetD8_v2(d, 0, 1001)), 1);
        ok(sys::cuMemcpyHtoD_v2(d, null_mut(), 0));
        ok(sys::cuMemsetD8_v2(d, 0, 0));
        assert_eq!(code(sys::cuMemFree_v2(d + 8)), 1);
        free(d);
        assert_eq!(code(sys::cuMemFree_v2(d)), 1);
        let mut kind = 0u32;
        let vector = [0u8; 8];
        assert_eq!(
            code(sys::cuPointerGetAttribute(
                (&raw mut kind).cast(),
                sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                vector.as_ptr() as u64
            )),
            1
        );
    }
    assert_eq!(sim.violations(), Vec::<String>::new());
}

fn register(place: *const u8, len: usize, flags: u32) -> u32 {
    // SAFETY: what is wrong with the range is the driver's to say.
    code(unsafe { sys::cuMemHostRegister_v2(place.cast_mut().cast(), len, flags) })
}

fn unregister(place: *const u8) -> u32 {
    // SAFETY: as above.
    code(unsafe { sys::cuMemHostUnregister(place.cast_mut().cast()) })
}

/// The table of what an H200 answered.
#[test]
fn registration_answers_as_measured() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let memory = vec![0u8; 100_000];
    let at = |offset: usize| memory[offset..].as_ptr();
    assert_eq!(register(at(1), 10_000, 0), 0, "an unaligned base");
    assert_eq!(register(at(1), 10_000, 0), 712, "the same range again");
    assert_eq!(register(at(5000), 10_000, 0), 712, "an overlapping one");
    assert_eq!(register(at(0), 2, 0), 712, "an overlapping one, from before");
    assert_eq!(register(at(10_001), 100, 0), 0, "a disjoint range on the same page");
    assert_eq!(unregister(at(2)), 1, "an interior pointer");
    assert_eq!(unregister(at(1)), 0);
    assert_eq!(unregister(at(1)), 713, "twice");
    assert_eq!(unregister(at(10_001)), 0);
    assert_eq!(register(at(0), 0, 0), 1, "0 bytes");
    let fixed = pinned(100);
    assert_eq!(unregister(fixed.as_ptr()), 1, "a block from cuMemHostAlloc");
    assert_eq!(register(fixed.as_ptr(), 100, 0), 712);
    // SAFETY: a fresh mapping.
    let read_only =
        unsafe { libc::mmap(null_mut(), 8192, libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    assert_eq!(register(read_only.cast(), 8192, 0), 1, "a read-only mapping, flags 0");
    assert_eq!(register(read_only.cast(), 8192, 8), 0, "a read-only mapping, READ_ONLY");
    assert_eq!(unregister(read_only.cast()), 0);
    assert_eq!(register(16 as *const u8, 100, 0), 1, "nothing there");
    assert_eq!(sim.evidence().registered_bytes, 0);
    let other = DeviceBuilder::new(H200).attribute(113, 0).build().unwrap();
    context(other.ordinal());
    assert_eq!(register(read_only.cast(), 8192, 8), 801);
}

/// One registration may not be as long as 512 GiB, wherever it lies.
#[test]
fn the_longest_registration() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    const MOST: usize = 1 << 39;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh mapping, of which no page is touched.
    let place = unsafe { libc::mmap(null_mut(), MOST, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_ne!(place, libc::MAP_FAILED);
    assert_eq!(register(place.cast(), MOST, 0), 2);
    assert_eq!(register(place.cast(), MOST - 1, 0), 0, "nothing of the refused one is left");
    assert_eq!(sim.evidence().registered_bytes, MOST as u64 - 1);
    assert_eq!(unregister(place.cast()), 0);
    // SAFETY: mapped above.
    unsafe { libc::munmap(place, MOST) };
}

#[test]
fn the_log_has_the_flags_of_page_locked_memory() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let mut host = null_mut();
    // SAFETY: a valid out-pointer.
    ok(unsafe { sys::cuMemHostAlloc(&raw mut host, 100, 5) });
    let call = sim.calls().into_iter().find(|call| call.name == "cuMemHostAlloc").unwrap();
    assert_eq!((call.bytes, call.args[0]), (100, 5));
}

#[test]
fn profiles_refuse_what_their_machines_refuse() {
    let text = "[platform.x.attributes]\nhost_register_supported = 1\nmanaged_memory = 1\n\
                can_use_host_pointer_for_registered_mem = 0\ncan_map_host_memory = 1\n\
                [platform.x.behaviour]\npinned_limit_bytes = 100000\n";
    let sim = DeviceBuilder::from_toml(text, "x").build().unwrap();
    context(sim.ordinal());
    let memory = vec![0u8; 50_000];
    assert_eq!(register(memory.as_ptr(), 50_000, 0), 0);
    let mut host = null_mut();
    let mut device_view = 0;
    // SAFETY: valid out-pointers.
    unsafe {
        assert_eq!(code(sys::cuMemHostAlloc(&raw mut host, 60_000, 0)), 2);
        ok(sys::cuMemHostAlloc(&raw mut host, 40_000, 0));
        ok(sys::cuMemHostGetDevicePointer_v2(&raw mut device_view, memory[10..].as_ptr().cast_mut().cast(), 0));
    }
    assert_ne!(device_view, memory[10..].as_ptr() as u64);
    assert_eq!(sim.memory_kind(device_view), MemoryKind::Registered);
    assert_eq!(unregister(memory.as_ptr()), 0);
    let mut address = 0;
    // SAFETY: a valid out-pointer.
    assert_eq!(code(unsafe { sys::cuMemAllocAsync(&raw mut address, 1, null_mut()) }), 801);
    let mut value = 0;
    let unknown = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X;
    // SAFETY: a valid out-pointer.
    let status = unsafe { sys::cuDeviceGetAttribute(&raw mut value, unknown, sim.ordinal() as i32) };
    assert!([0, 1].contains(&code(status)));
}

#[test]
fn managed_memory_is_out_of_reach_while_the_device_works() {
    let sim = device("jetson_agx_orin_64gb").unwrap();
    context(sim.ordinal());
    let s = stream();
    let mut address = 0;
    // SAFETY: a valid out-pointer.
    ok(unsafe { sys::cuMemAllocManaged(&raw mut address, 1000, sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32) });
    assert_eq!(touch(address), 0);
    let gate = sim.gate(s as u64);
    assert_eq!(touch(address), libc::SIGSEGV);
    gate.open();
    ok(sync(s));
    assert_eq!(touch(address), 0);
}

#[test]
fn rectangles() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let d = alloc(64);
    let host: Vec<u8> = (0..64).collect();
    let mut copy: sys::CUDA_MEMCPY2D = sys::CUDA_MEMCPY2D {
        srcXInBytes: 1,
        srcY: 1,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: host.as_ptr().cast(),
        srcDevice: 0,
        srcArray: null_mut(),
        srcPitch: 8,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: null_mut(),
        dstDevice: d,
        dstArray: null_mut(),
        dstPitch: 4,
        WidthInBytes: 3,
        Height: 4,
    };
    // SAFETY: the rectangle lies in both blocks.
    unsafe {
        ok(sys::cuMemsetD8_v2(d, 99, 64));
        ok(sys::cuMemcpy2D_v2(&raw const copy));
        assert_eq!(read(d, 16), [9, 10, 11, 99, 17, 18, 19, 99, 25, 26, 27, 99, 33, 34, 35, 99]);
        copy.Height = 17;
        assert_eq!(code(sys::cuMemcpy2D_v2(&raw const copy)), 1);
    }
}
