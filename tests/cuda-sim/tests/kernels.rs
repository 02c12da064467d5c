//! Modules and kernels.

mod common;

use common::*;
use cuda_sim::device;
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;

const H200: &str = "x86_h200_sxm_gen5";

#[test]
fn a_built_in_kernel_through_cudarc() {
    let sim = device(H200).unwrap();
    let ctx = CudaContext::new(sim.ordinal()).unwrap();
    let stream = ctx.default_stream();
    let module = ctx.load_module(Ptx::from_src(cuda_sim::kernels::BUILTIN_PTX)).unwrap();
    let add = module.load_function("add_one_f32").unwrap();
    let mut data = stream.clone_htod(&[1.0f32, 2.0, 3.0]).unwrap();
    let n = 3u64;
    let mut launch = stream.launch_builder(&add);
    launch.arg(&mut data).arg(&n);
    // SAFETY: the kernel takes a pointer to `n` floats.
    unsafe { launch.launch(LaunchConfig::for_num_elems(3)) }.unwrap();
    assert_eq!(stream.clone_dtoh(&data).unwrap(), [2.0, 3.0, 4.0]);
    assert_eq!(sim.evidence().kernels, 1);
    assert_eq!(sim.violations(), Vec::<String>::new());
    drop((data, add, module, stream));
    drop(ctx);
    assert_eq!(sim.leaks(), Vec::<String>::new());
}

#[test]
fn a_bad_address_faults_the_context_for_good() {
    let sim = device(H200).unwrap();
    let ctx = CudaContext::new(sim.ordinal()).unwrap();
    let stream = ctx.default_stream();
    let module = ctx.load_module(Ptx::from_src(cuda_sim::kernels::BUILTIN_PTX)).unwrap();
    let oob = module.load_function("oob").unwrap();
    let data = stream.alloc_zeros::<u8>(16).unwrap();
    let mut launch = stream.launch_builder(&oob);
    launch.arg(&data);
    // SAFETY: nothing is touched, the kernel faults.
    unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.unwrap();
    assert_eq!(stream.synchronize().unwrap_err().0 as u32, 700);
    assert_eq!(stream.alloc_zeros::<u8>(16).unwrap_err().0 as u32, 700);
    assert_eq!(code(unsafe_query()), 700);
    let other = device(H200).unwrap();
    context(other.ordinal());
    free(alloc(16));
}

/// `cuStreamQuery` of the legacy stream.
fn unsafe_query() -> sys::CUresult {
    // SAFETY: no pointers.
    unsafe { sys::cuStreamQuery(std::ptr::null_mut()) }
}

cuda_sim::kernel! {
    /// Doubles bytes.
    fn double_u8(launch) {
        let (p, n) = (launch.arg::<u64>(0)?, launch.arg::<u64>(1)?);
        for byte in launch.slice_mut::<u8>(p, n as usize)? {
            *byte *= 2;
        }
        Ok(())
    }
}

const MINE: &str =
    ".version 7.0\n.target sm_70\n.address_size 64\n.entry double_u8(.param .u64 p, .param .u64 n) { ret; }\n";

#[test]
fn kernels_reach_pinned_but_not_pageable_memory() {
    cuda_sim::register_kernel("double_u8", double_u8).unwrap();
    for (profile, pageable) in [(H200, false), ("dgx_spark_gb10", true)] {
        let sim = device(profile).unwrap();
        let ctx = CudaContext::new(sim.ordinal()).unwrap();
        let stream = ctx.default_stream();
        let double = ctx.load_module(Ptx::from_src(MINE)).unwrap().load_function("double_u8").unwrap();
        let (mut vector, fixed) = (vec![3u8; 100], pinned(100));
        fixed.fill(4);
        for (place, good) in [(fixed.as_mut_ptr() as u64, true), (vector.as_mut_ptr() as u64, pageable)] {
            let mut launch = stream.launch_builder(&double);
            launch.arg(&place).arg(&100u64);
            // SAFETY: 100 bytes there, which nobody uses until the stream is done.
            unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.unwrap();
            assert_eq!(stream.synchronize().is_ok(), good, "{profile}");
        }
        assert_eq!(fixed, &[8; 100][..]);
        assert_eq!(vector, vec![if pageable { 6 } else { 3 }; 100]);
    }
}

/// A primary context that is made again has the handle of the one before, and another id; modules end with their context.
#[test]
fn a_primary_context_made_again_is_another_one() {
    let sim = device(H200).unwrap();
    let mut lives = Vec::new();
    for _ in 0..2 {
        let ctx = CudaContext::new(sim.ordinal()).unwrap();
        let (mut module, mut id) = (std::ptr::null_mut(), 0);
        let text = format!("{MINE}\0");
        // SAFETY: a live context, valid places for the answers, and a text that ends with a NUL.
        unsafe {
            ok(sys::cuCtxGetId(ctx.cu_ctx(), &raw mut id));
            ok(sys::cuModuleLoadData(&raw mut module, text.as_ptr().cast()));
        }
        lives.push((ctx.cu_ctx(), id));
        assert!(sim.leaks().iter().any(|leak| leak.starts_with("module")));
    }
    assert_eq!(lives[0].0, lives[1].0);
    assert_ne!(lives[0].1, lives[1].1);
    assert_eq!(sim.leaks(), Vec::<String>::new());
}
