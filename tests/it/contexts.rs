//! Several devices, contexts and threads: nothing of ours touches another device, and a thread's current context is after a
//! call what it was before (field reports R59, R60, R70).

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;

use transfer_tensor::cudarc::driver::sys;
use transfer_tensor::{Strategy, TransferTensor};

use crate::machines::{code, drain, pattern, unseen, xor_on_device, xor_on_host};
use crate::support::{Gpu, H200, SPARK};

/// The thread's current context.
fn current() -> sys::CUcontext {
    let mut context = null_mut();
    // SAFETY: a valid place for the answer.
    assert_eq!(code(unsafe { sys::cuCtxGetCurrent(&raw mut context) }), 0);
    context
}

fn make_current(context: sys::CUcontext) {
    // SAFETY: null, or a context that the test holds.
    assert_eq!(code(unsafe { sys::cuCtxSetCurrent(context) }), 0);
}

/// Every public call that reaches the driver, on the calling thread; `check` runs after each.
fn everything(gpu: &Gpu, mut check: impl FnMut(&str)) {
    let device = transfer_tensor::Device::new(&gpu.stream).unwrap();
    check("Device::new");
    let _ = device.memory();
    check("memory");
    let _ = transfer_tensor::Platform::detect(gpu.context.ordinal());
    check("Platform::detect");
    for strategy in [Strategy::Streamed, Strategy::ZeroCopy] {
        let options = || device.tensor().strategy(strategy);
        let mut tensor = options().from_slice(&pattern(100_000, 1), [1000, 100]).unwrap();
        check("from_slice");
        drop(tensor.device_mut(&gpu.stream).unwrap());
        check("device_mut and its drop");
        drop(tensor.device(&gpu.stream).unwrap());
        check("device and its drop");
        tensor.host_mut().unwrap()[0] ^= 1;
        check("host_mut");
        let tensor = tensor.to_device().unwrap().wait().unwrap();
        check("to_device and wait");
        let ticket = tensor.to_host().unwrap();
        check("to_host");
        let mut tensor = loop_until_done(ticket);
        check("is_complete and try_wait");
        tensor.release_device().unwrap();
        check("release_device");
        tensor.release_host(&gpu.stream).unwrap();
        check("release_host");
        let shared = tensor.into_shared();
        drop(shared.rows(1..5).unwrap().device(&gpu.stream).unwrap());
        check("a part of a shared tensor");
        drop(shared);
        check("drop");
    }
    let tensor = device.tensor().pin(true).strategy(Strategy::Streamed).from_vec(pattern(5000, 2), [5000]).unwrap();
    check("from_vec, pinned");
    let slice = tensor.into_cuda_slice().unwrap();
    check("into_cuda_slice");
    let tensor = device.tensor().from_cuda_slice(slice, [5000]).unwrap();
    check("from_cuda_slice");
    assert_eq!(tensor.into_vec().unwrap(), pattern(5000, 2));
    check("into_vec");
    drain(&device);
    drop(device);
    check("drop of the device");
}

fn loop_until_done(mut ticket: transfer_tensor::Transfer<u8>) -> TransferTensor<u8> {
    loop {
        match ticket.try_wait() {
            Ok(tensor) => return tensor,
            Err(refused) => {
                assert!(refused.error.is_not_ready(), "{}", refused.error);
                ticket = refused.value;
                std::thread::yield_now();
            }
        }
    }
}

/// R60: with no context, and with a foreign one. (A context of the same device where there is one device only.)
#[test]
fn every_call_leaves_the_current_context_as_it_was() {
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(current().is_null());
                everything(&gpu, |call| assert!(current().is_null(), "{call} left a context behind"));
            });
            scope.spawn(|| {
                let foreign = Foreign::new(&gpu);
                make_current(foreign.0);
                everything(&gpu, |call| assert_eq!(current(), foreign.0, "after {call}"));
                make_current(null_mut());
            });
            scope.spawn(|| {
                let own = gpu.context.cu_ctx();
                make_current(own);
                everything(&gpu, |call| assert_eq!(current(), own, "after {call}"));
            });
        });
        gpu.finish();
    }
}

/// A context that is not the tensor's: of another device, or a second one of the only device.
struct Foreign(sys::CUcontext);

impl Foreign {
    fn new(gpu: &Gpu) -> Self {
        type Create = unsafe extern "C" fn(*mut sys::CUcontext, u32, i32) -> u32;
        unsafe extern "C" {
            fn dlopen(name: *const c_char, flags: i32) -> *mut c_void;
            fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
        }
        let device = unseen(H200).map_or(gpu.context.cu_device(), |other| i32::try_from(other.ordinal()).unwrap());
        let mut context = null_mut();
        // SAFETY: the library is loaded; every driver has this function, of this type, whatever the bindings call it.
        // Creating makes current, which is taken back.
        unsafe {
            let library = dlopen([c"libcuda.so.1", c"libcuda.so"][usize::from(gpu.sim.is_some())].as_ptr(), 2);
            let create = dlsym(library, c"cuCtxCreate_v2".as_ptr());
            assert!(!create.is_null());
            let create: Create = std::mem::transmute(create);
            assert_eq!(create(&raw mut context, 0, device), 0);
        }
        make_current(null_mut());
        Self(context)
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: made above, current nowhere any more.
        unsafe { sys::cuCtxDestroy_v2(self.0) };
    }
}

/// R60: made on one thread, copied on a second, dropped on a third that never saw a context and a fourth with another's.
#[test]
fn a_tensor_may_change_threads_at_every_step() {
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        for strategy in [Strategy::Streamed, Strategy::ZeroCopy] {
            for foreign_thread in [false, true] {
                let tensor = on_a_thread(|| {
                    let options = gpu.device.tensor().strategy(strategy);
                    options.from_slice(&pattern(300_000, 3), [300_000]).unwrap()
                });
                let mut tensor = on_a_thread(|| tensor.to_device().unwrap()).wait().unwrap();
                let tensor = on_a_thread(|| {
                    xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
                    make_current(null_mut());
                    tensor
                });
                let mut expected = pattern(300_000, 3);
                xor_on_host(&mut expected);
                assert!(on_a_thread(|| *tensor.host().unwrap() == *expected));
                on_a_thread(|| {
                    let foreign = foreign_thread.then(|| Foreign::new(&gpu));
                    let before = foreign.as_ref().map_or(null_mut(), |context| context.0);
                    make_current(before);
                    drop(tensor);
                    assert_eq!(current(), before);
                    make_current(null_mut());
                });
                drain(&gpu.device);
            }
        }
        assert_eq!(gpu.device.stats().leaked, 0);
        gpu.context.check_err().unwrap();
        gpu.finish();
    }
}

fn on_a_thread<R: Send>(body: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| scope.spawn(body).join().unwrap())
}

/// R59: a crate bound to one device never touches another: no call, no context, whatever thread does the work.
#[test]
fn no_other_device_is_touched() {
    let Some(other) = unseen(H200) else { return };
    let gpu = Gpu::simulated(H200).unwrap();
    assert!(gpu.context.ordinal() > other.ordinal());
    other.clear_calls();
    on_a_thread(|| everything(&gpu, |_| ()));
    // Frees that wait, staging that grows, tasks that are woken: on threads of the crate's own.
    let gate = gpu.sim.as_ref().unwrap().gate(gpu.stream.cu_stream() as u64);
    for i in 0..4 {
        let options = gpu.device.tensor().strategy(if i % 2 == 0 { Strategy::Streamed } else { Strategy::ZeroCopy });
        let mut tensor = options.from_slice(&pattern(9 << 20, i), [9 << 20]).unwrap();
        drop(tensor.device_mut(&gpu.stream).unwrap());
        on_a_thread(|| drop(tensor));
    }
    drop(gate);
    drain(&gpu.device);
    let calls = other.calls();
    assert!(calls.is_empty(), "{calls:?}");
    assert_eq!(other.leaks(), Vec::<String>::new());
    assert_eq!(other.evidence().device_bytes_peak + other.evidence().pinned_bytes_peak, 0);
    let me = gpu.context.cu_ctx() as u64;
    // Ours know their context, or ask which one is current, or set it.
    let lost: Vec<_> = gpu.sim.as_ref().unwrap().calls().into_iter().filter(|call| call.context != me).collect();
    for call in &lost {
        let about_contexts = call.name.starts_with("cuCtx") || call.name.starts_with("cuDevice");
        assert!(about_contexts || call.name == "cuThreadExchangeStreamCaptureMode", "{call:?}");
    }
    gpu.finish();
}

/// Detection that is not asked for a device only looks.
#[test]
fn two_devices_side_by_side_keep_their_own() {
    let (Some(a), Some(b)) = (Gpu::simulated(H200), Gpu::simulated(SPARK)) else { return };
    assert_ne!(a.device.platform().model(), b.device.platform().model());
    let mut tensors: Vec<_> = [&a, &b, &a, &b]
        .iter()
        .enumerate()
        .map(|(i, gpu)| gpu.device.tensor().from_slice(&pattern(50_000, i as u64), [50_000]).unwrap())
        .collect();
    for (gpu, tensor) in [&a, &b, &a, &b].iter().zip(&mut tensors) {
        xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
    }
    for (i, tensor) in tensors.iter().enumerate() {
        let mut expected = pattern(50_000, i as u64);
        xor_on_host(&mut expected);
        assert_eq!(*tensor.host().unwrap(), *expected);
    }
    assert_eq!(tensors[0].strategy(), Strategy::Streamed);
    assert_eq!(tensors[1].strategy(), Strategy::ZeroCopy);
    drop(tensors);
    for gpu in [a, b] {
        drain(&gpu.device);
        gpu.context.check_err().unwrap();
        gpu.finish();
    }
}
