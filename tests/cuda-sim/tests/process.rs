//! How a process begins and ends. Each case runs in a child: this executable again, told what to do.

mod common;

use common::*;
use cuda_sim::device;
use cudarc::driver::{CudaContext, sys};
use std::process::{Command, Output};

const H200: &str = "x86_h200_sxm_gen5";
const CASE: &str = "CUDA_SIM_TEST_CASE";

fn child(case: &str) -> Output {
    let me = std::env::current_exe().unwrap();
    Command::new(me).args(["--exact", "the_child", "--nocapture", "--test-threads=1"]).env(CASE, case).output().unwrap()
}

#[track_caller]
fn quiet(output: &Output) {
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Does what the environment says; by itself, nothing.
#[test]
fn the_child() {
    match std::env::var(CASE).as_deref() {
        Ok("exit") => exit_with_copies_in_flight(),
        Ok("thread") => work_in_thread_local_destructors(),
        Ok("none") => no_devices(),
        Ok("too late") => too_late(),
        Ok("use after free") => copy_from_freed_memory(),
        _ => {}
    }
}

fn exit_with_copies_in_flight() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let (s, held) = (stream(), stream());
    let (d, source) = (alloc(16 << 20), pinned(16 << 20));
    std::mem::forget(sim.gate(held as u64));
    for _ in 0..20 {
        ok(h2d(d, source, s));
        ok(h2d(d, source, held));
    }
    std::process::exit(0);
}

fn work_in_thread_local_destructors() {
    struct Late(std::sync::Arc<CudaContext>);
    impl Drop for Late {
        fn drop(&mut self) {
            let stream = self.0.default_stream();
            let data = stream.clone_htod(&[1u8, 2, 3]).unwrap();
            assert_eq!(stream.clone_dtoh(&data).unwrap(), [1, 2, 3]);
        }
    }
    thread_local!(static LATE: std::cell::RefCell<Option<Late>> = const { std::cell::RefCell::new(None) });
    let sim = device(H200).unwrap();
    let ctx = CudaContext::new(sim.ordinal()).unwrap();
    std::thread::spawn(move || LATE.with(|late| *late.borrow_mut() = Some(Late(ctx)))).join().unwrap();
}

fn no_devices() {
    cuda_sim::install().unwrap();
    assert_eq!(CudaContext::device_count().unwrap_err().0 as u32, 100);
    cuda_sim::fail_call("cuInit", 2, 34).unwrap();
    let _sim = device(H200).unwrap();
    // SAFETY: no pointers.
    unsafe {
        ok(sys::cuInit(0));
        assert_eq!(code(sys::cuInit(0)), 34);
        ok(sys::cuInit(0));
    }
    assert_eq!(CudaContext::device_count().unwrap(), 1);
}

fn too_late() {
    let empty = std::env::temp_dir().join(format!("cuda-sim-empty-{}", std::process::id()));
    // SAFETY: this process has no other thread that reads the environment.
    unsafe { std::env::set_var("CUDA_SIM_LIBRARY", &empty) };
    let error = cuda_sim::install().unwrap_err().to_string();
    assert!(error.contains("cuda-sim-empty"), "{error}");
}

fn copy_from_freed_memory() {
    let sim = device(H200).unwrap();
    context(sim.ordinal());
    let s = stream();
    let d = alloc(1 << 20);
    let source = vec![1u8; 1 << 20];
    // Registered, so the copy does not wait.
    // SAFETY: memory of that size.
    ok(unsafe { sys::cuMemHostRegister_v2(source.as_ptr().cast_mut().cast(), source.len(), 0) });
    let gate = sim.gate(s as u64);
    ok(h2d(d, &source, s));
    drop(source);
    gate.open();
    // Without the sanitizer the copy reads what is left there.
    let _ = sync(s);
}

#[test]
fn a_process_may_end_at_any_time() {
    for _ in 0..5 {
        quiet(&child("exit"));
    }
    quiet(&child("thread"));
}

#[test]
fn a_process_may_find_no_device() {
    quiet(&child("none"));
    quiet(&child("too late"));
}

/// AddressSanitizer sees what the driver's threads do with the program's memory.
#[test]
fn the_sanitizer_catches_a_copy_from_freed_memory() {
    let output = child("use after free");
    let said = String::from_utf8_lossy(&output.stderr);
    if cfg!(cusim_asan) {
        assert!(said.contains("heap-use-after-free"), "{said}");
    } else {
        assert!(output.status.success(), "{said}");
    }
}
