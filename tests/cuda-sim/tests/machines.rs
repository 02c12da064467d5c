//! What differs between machines, and work between two of them.

mod common;

use common::*;
use cuda_sim::{DeviceBuilder, device};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;

const H200: &str = "x86_h200_sxm_gen5";

#[test]
fn peers() {
    let (one, two) = (device(H200).unwrap(), device(H200).unwrap());
    let there = context(two.ordinal());
    let source = alloc(1000);
    // SAFETY: device memory of that size.
    ok(unsafe { sys::cuMemsetD8_v2(source, 5, 1000) });
    ok(sync(std::ptr::null_mut()));
    let ctx = CudaContext::new(one.ordinal()).unwrap();
    let stream = ctx.default_stream();
    let copy = ctx.load_module(Ptx::from_src(cuda_sim::kernels::BUILTIN_PTX)).unwrap();
    let copy = copy.load_function("copy_u8").unwrap();
    let here = alloc(1000);
    let mut can = 0;
    // SAFETY: live handles, memory of that size.
    unsafe {
        ok(sys::cuDeviceCanAccessPeer(&raw mut can, one.ordinal() as i32, two.ordinal() as i32));
        assert_eq!(can, 1);
        ok(sys::cuMemcpyDtoDAsync_v2(here, source, 1000, std::ptr::null_mut()));
        ok(sync(std::ptr::null_mut()));
        assert_eq!(read(here, 1000), vec![5; 1000]);
        ok(sys::cuMemsetD8_v2(here, 0, 1000));
        one.peer_writes_nothing(true);
        ok(sys::cuMemcpyDtoDAsync_v2(here, source, 1000, std::ptr::null_mut()));
        assert_eq!(read(here, 1000), vec![0; 1000]);
        ok(sys::cuCtxEnablePeerAccess(there, 0));
        assert_eq!(code(sys::cuCtxEnablePeerAccess(there, 0)), 704);
    }
    let run = || {
        let mut launch = stream.launch_builder(&copy);
        launch.arg(&here).arg(&source).arg(&1000u64);
        // SAFETY: both blocks have that size.
        unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.unwrap();
        stream.synchronize()
    };
    run().unwrap();
    assert_eq!(read(here, 1000), vec![5; 1000]);
    // SAFETY: a live context.
    ok(unsafe { sys::cuCtxDisablePeerAccess(there) });
    assert_eq!(run().unwrap_err().0 as u32, 700);
    one.no_peers(true);
    // SAFETY: a valid out-pointer.
    ok(unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, one.ordinal() as i32, two.ordinal() as i32) });
    assert_eq!(can, 0);
}

/// An old integrated device keeps what it saw of mapped memory until the host waits for it.
#[test]
fn a_stale_view_lasts_until_a_fence() {
    let text = "[platform.old.attributes]\nintegrated = 1\ncan_map_host_memory = 1\nhost_register_supported = 1\n\
                [platform.old.behaviour]\nio_coherent = false\n";
    let sim = DeviceBuilder::from_toml(text, "old").build().unwrap();
    let ctx = CudaContext::new(sim.ordinal()).unwrap();
    let stream = ctx.default_stream();
    let copy = ctx.load_module(Ptx::from_src(cuda_sim::kernels::BUILTIN_PTX)).unwrap();
    let copy = copy.load_function("copy_u8").unwrap();
    let (shared, d) = (pinned(16), alloc(16));
    let run = |to: u64, from: u64| {
        let mut launch = stream.launch_builder(&copy);
        launch.arg(&to).arg(&from).arg(&16u64);
        // SAFETY: both blocks have that size.
        unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.unwrap();
        sim.idle();
    };
    let address = shared.as_ptr() as u64;
    shared.fill(1);
    ok(sync(std::ptr::null_mut()));
    shared.fill(2);
    run(d, address);
    assert_eq!(sim.peek(d, 16).unwrap(), [1; 16], "what was there at the last fence");
    ok(sync(std::ptr::null_mut()));
    run(d, address);
    assert_eq!(sim.peek(d, 16).unwrap(), [2; 16]);
    // What the device writes the host sees.
    // SAFETY: device memory of that size.
    ok(unsafe { sys::cuMemsetD8_v2(d, 9, 16) });
    run(address, d);
    assert_eq!(shared, &[9; 16][..]);
}

#[test]
fn every_built_in_machine_copies() {
    for profile in cuda_sim::builtin_profiles() {
        let sim = device(&profile).unwrap();
        let ctx = CudaContext::new(sim.ordinal()).unwrap();
        let stream = ctx.default_stream();
        let data: Vec<u32> = (0..50_000).collect();
        let copied = stream.clone_htod(&data).unwrap();
        assert_eq!(stream.clone_dtoh(&copied).unwrap(), data, "{profile}");
        assert!(sim.clock(0).now_ns > 0, "{profile}");
        drop((copied, stream));
        drop(ctx);
        assert_eq!(sim.leaks(), Vec::<String>::new(), "{profile}");
        assert_eq!(sim.violations(), Vec::<String>::new(), "{profile}");
    }
}

#[test]
fn each_device_has_its_own_address_and_name() {
    let (one, two) = (device(H200).unwrap(), device("dgx_spark_gb10").unwrap());
    let (a, b) = (CudaContext::new(one.ordinal()).unwrap(), CudaContext::new(two.ordinal()).unwrap());
    assert_ne!(a.uuid().unwrap().bytes, b.uuid().unwrap().bytes);
    assert_eq!(b.name().unwrap(), "NVIDIA GB10");
    assert_eq!(a.compute_capability().unwrap(), (9, 0));
    let mut id = [0; 20];
    // SAFETY: a buffer of that size.
    ok(unsafe { sys::cuDeviceGetPCIBusId(id.as_mut_ptr(), 20, one.ordinal() as i32) });
    let mut back = -1;
    // SAFETY: a text with a zero, and a valid out-pointer.
    ok(unsafe { sys::cuDeviceGetByPCIBusId(&raw mut back, id.as_ptr()) });
    assert_eq!(back, one.ordinal() as i32);
}

#[test]
fn entry_points_by_name() {
    let _sim = device(H200).unwrap();
    let mut address = std::ptr::null_mut();
    // SAFETY: C strings and valid out-pointers.
    unsafe {
        let known = sys::cuGetProcAddress_v2(c"cuMemAlloc".as_ptr(), &raw mut address, 13000, 0, std::ptr::null_mut());
        ok(known);
        assert!(!address.is_null());
        let unknown = sys::cuGetProcAddress_v2(c"cuNothing".as_ptr(), &raw mut address, 13000, 0, std::ptr::null_mut());
        assert_eq!(code(unknown), 500);
        assert!(address.is_null());
    }
}
