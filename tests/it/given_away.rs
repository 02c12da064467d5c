//! Slices that are taken in and given away, and the ends of devices.

use std::sync::Arc;

use transfer_tensor::cudarc::driver::CudaContext;
use transfer_tensor::cudarc::driver::sys::{self, CUresult};
use transfer_tensor::{Backing, DType, DynTensor, Strategy, TensorOptions, TransferTensor};

use crate::pool::until;
use crate::support::{GH200, Gpu, H200, HANG, SPARK, builder, within};

const LEN: usize = 4096;

/// Page-locked memory of the caller's, in a tensor that knows no device: cudarc may copy from it all the same.
#[test]
fn host_only_memory_is_not_freed_under_a_copy() {
    struct Owner(*mut u8, Arc<CudaContext>);
    // SAFETY: the memory is the owner's alone.
    unsafe impl Send for Owner {}
    impl Drop for Owner {
        fn drop(&mut self) {
            self.1.bind_to_thread().unwrap();
            // SAFETY: from `cuMemHostAlloc`, freed once.
            unsafe { sys::cuMemFreeHost(self.0.cast()).result().unwrap() };
        }
    }
    let gpu = Gpu::any(H200);
    let mut on_device = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    let mut memory = std::ptr::null_mut();
    // SAFETY: the context is current; the memory is set before anybody looks.
    unsafe {
        sys::cuMemHostAlloc(&mut memory, LEN, 0).result().unwrap();
        memory.cast::<u8>().write_bytes(4, LEN);
    }
    let owner = Owner(memory.cast(), gpu.context.clone());
    let host = std::ptr::NonNull::new(memory.cast()).unwrap();
    // SAFETY: the owner keeps the memory, which nobody else uses.
    let mut tensor: TransferTensor<u8> =
        unsafe { TensorOptions::host_only().from_raw_host(host, [LEN], owner) }.unwrap();
    gpu.context.synchronize().unwrap();

    let gate = gpu.gate(&gpu.stream);
    gpu.stream.memcpy_htod(&tensor.host_mut().unwrap(), &mut on_device).unwrap();
    drop(tensor);
    gate.open();
    assert_eq!(gpu.stream.clone_dtoh(&on_device).unwrap(), [4; LEN]);
    drop(on_device);
    // The last handle is the owner's, on a thread of its own.
    while Arc::strong_count(&gpu.context) > 3 {
        std::thread::yield_now();
    }
    gpu.finish();
}

/// Memory that a copy still reads outlives the device's handle, which has the staging slots.
#[test]
fn staging_outlives_the_device() {
    for free_waits in [true, false] {
        let Some(gpu) = Gpu::built(builder(H200).free_waits(free_waits)) else { return };
        let kernels = gpu.kernels();
        let mut copy = gpu.both_sides(&[0u8; LEN]);
        let tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_vec(vec![6u8; LEN], [LEN]).unwrap();
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let guard = tensor.device(&gpu.stream).unwrap();
        kernels.copy(&gpu.stream, &mut copy.device_mut(&gpu.stream).unwrap(), &guard);
        drop(guard);
        drop((tensor, copy));
        let Gpu { sim, context, stream, device } = gpu;
        let sim = sim.unwrap();
        let asked = || sim.count("cuEventQuery");
        let freed = || sim.count("cuMemFreeHost") + sim.count("cuMemHostUnregister");
        let before = (asked(), freed());
        drop(device);
        // Who frees it has looked at it, more than once.
        until(|| asked() > before.0 + 20 || freed() > before.1);
        gate.open();
        stream.synchronize().unwrap();
        assert_eq!(sim.violations(), Vec::<String>::new());
        drop((stream, kernels, context));
    }
}

/// Handles in any order: tensors, device, streams, context.
#[test]
fn handles_may_be_dropped_in_any_order() {
    for order in 0..6 {
        let Some(gpu) = Gpu::simulated(if order % 2 == 0 { H200 } else { SPARK }) else { return };
        let kernels = gpu.kernels();
        let mut tensor = gpu.device.tensor().zeros::<u8>([LEN]).unwrap();
        let gate = gpu.gate(&gpu.stream);
        kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 5);
        let Gpu { sim, context, stream, device } = gpu;
        let mut handles: Vec<Box<dyn std::any::Any>> =
            vec![Box::new(tensor), Box::new(device), Box::new((context, stream, kernels))];
        // The six orders of three.
        let first = handles.swap_remove(order % 3);
        if order >= 3 {
            handles.reverse();
        }
        drop(first);
        let mut rest = handles.into_iter();
        drop(rest.next());
        gate.open();
        drop(rest.next());
        let sim = sim.unwrap();
        sim.idle();
        assert_eq!(sim.violations(), Vec::<String>::new());
        let start = std::time::Instant::now();
        while !sim.leaks().is_empty() && start.elapsed() < HANG {
            std::thread::yield_now();
        }
        assert_eq!(sim.leaks(), Vec::<String>::new(), "order {order}");
    }
}

/// Tracking is by range: parts that do not touch do not wait for each other, those that do, do.
#[test]
fn parts_wait_for_their_own_bytes_only() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let mut tensor = gpu.both_sides(&[0u8; 4 * LEN]).reshape([4, LEN]).unwrap();
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    {
        let (mut head, mut tail) = tensor.view_mut(..).unwrap().split_at(2).unwrap();
        kernels.fill(&gpu.stream, &mut head.device_mut(&gpu.stream).unwrap(), 1);
        // The gate is closed: this would hang.
        tail.host_mut().unwrap().fill(2);
    }
    assert!(tensor.view(2..).unwrap().host().unwrap().iter().all(|&x| x == 2));
    let opener = gate.open_later();
    assert!(tensor.view(1..3).unwrap().host().unwrap().starts_with(&[1; LEN]));
    assert!(opener.opened(), "an overlapping part was read under a writer");
    drop(opener);
    drop((tensor, kernels));
    gpu.finish();
}

/// As above, in bytes, with the conflict in one byte.
#[test]
fn one_byte_in_common_is_a_conflict() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let mut tensor = gpu.both_sides(&[0u8; LEN]);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    kernels.fill(&gpu.stream, &mut tensor.byte_range_mut(100..200).unwrap().device_mut(&gpu.stream).unwrap(), 1);
    assert_eq!(tensor.byte_range(..100).unwrap().host().unwrap()[99], 0);
    assert_eq!(tensor.byte_range(200..).unwrap().host().unwrap()[0], 0);
    let opener = gate.open_later();
    assert_eq!(tensor.byte_range(199..201).unwrap().host().unwrap()[..], [1, 0]);
    assert!(opener.opened());
    drop(opener);
    drop((tensor, kernels));
    gpu.finish();
}

/// A stream of ours is no stream of the caller's: in single-stream mode cudarc orders nothing.
#[test]
fn a_slice_that_is_given_away_belongs_to_the_callers_stream() {
    let gpu = Gpu::on_stream(H200, CudaContext::default_stream);
    let mut copy = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&[7u8; LEN], [LEN]).unwrap();
    // Allocated on our stream, as it is brought there first.
    let slice = tensor.to_device().unwrap().wait().unwrap().into_cuda_slice().unwrap();
    assert_eq!(slice.stream().cu_stream(), gpu.stream.cu_stream());
    let other = gpu.another_context().new_stream().unwrap();
    gpu.context.synchronize().unwrap();

    let gate = gpu.gate(&gpu.stream);
    gpu.stream.memcpy_dtod(&slice, &mut copy).unwrap();
    drop(slice);
    let recycled = other.clone_htod(&[8u8; LEN]).unwrap();
    other.synchronize().unwrap();
    gate.open();
    assert_eq!(gpu.stream.clone_dtoh(&copy).unwrap(), [7; LEN]);
    drop((recycled, other, copy));
    gpu.finish();
}

#[test]
fn a_slice_that_is_given_away_on_another_thread_comes_after_its_uses() {
    within(HANG, || {
        let gpu = Gpu::on_stream(H200, CudaContext::per_thread_stream);
        let kernels = gpu.kernels();
        let mut tensor = gpu.on_device(&[1; LEN]);
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 2);
        let opener = gate.open_later();
        let stream = gpu.stream.clone();
        let copied = std::thread::spawn(move || stream.clone_dtoh(&tensor.into_cuda_slice().unwrap()).unwrap());
        let copied = copied.join().unwrap();
        drop(opener);
        gpu.context.synchronize().unwrap();
        assert_eq!(copied, [2; LEN]);
        drop(kernels);
        gpu.finish();
    });
}

/// Where cudarc could not order our stream after the slice's uses, the slice is not taken.
#[test]
fn a_slice_is_adopted_after_its_uses_or_not_at_all() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let slow = gpu.another_stream();
    let mut slice = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    let source = gpu.both_sides(&[4u8; LEN]);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&slow);
    slow.memcpy_dtod(&source.device(&slow).unwrap(), &mut slice).unwrap();
    sim.fail_nth("cuStreamWaitEvent", 1, CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
    sim.fail_nth("cuStreamWaitEvent", 2, CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
    let refused = gpu.device.tensor().from_cuda_slice(slice, [LEN]).unwrap_err();
    sim.clear_failures();
    let opener = gate.open_later();
    let tensor = gpu.device.tensor().from_cuda_slice(refused.value, [LEN]).unwrap();
    assert_eq!(*tensor.host().unwrap(), [4; LEN]);
    assert!(opener.opened());
    drop(opener);
    drop((tensor, source, slow));
    let _ = gpu.context.check_err();
    gpu.finish();
}

/// No byte becomes a `bool` that is none, also where cudarc does the copying.
#[test]
fn cudarc_copies_no_byte_to_a_bool_that_is_none() {
    let gpu = Gpu::any(H200);
    let bytes = gpu.device.tensor().from_slice(&[1u8, 0, 2], [3]).unwrap();
    let refused = DynTensor::from_bytes(bytes, DType::Bool, [3]).unwrap().downcast::<bool>().unwrap_err();
    assert!(refused.error.to_string().contains("element 2"), "{}", refused.error);
    let file = Arc::new(vec![1u8, 0, 2]);
    gpu.device.tensor().from_shared_bytes::<bool, _>(file, 0..3, [3]).unwrap_err();

    // A kernel wrote one all the same.
    let kernels = gpu.kernels();
    let good = gpu.device.tensor().from_slice(&[1u8, 0, 1], [3]).unwrap();
    let good = DynTensor::from_bytes(good, DType::Bool, [3]).unwrap();
    let mut bad = good.downcast::<bool>().unwrap();
    let mut target = gpu.both_sides(&[true; 3]);
    {
        let guard = bad.device_mut(&gpu.stream).unwrap();
        let (function, len, value) = (kernels.function("fill_u8"), 3u64, 2u32);
        use transfer_tensor::cudarc::driver::{LaunchConfig, PushKernelArg};
        // SAFETY: the parameters are the kernel's. That it writes what is no `bool` is the point.
        unsafe {
            let mut launch = gpu.stream.launch_builder(&function);
            launch.arg(&guard).arg(&len).arg(&value).launch(LaunchConfig::for_num_elems(3)).unwrap();
        }
        let mut host = target.host_mut().unwrap();
        gpu.stream.memcpy_dtoh(&guard, &mut host).unwrap();
        assert!(host.is_empty(), "a bool of 2");
    }
    target.host().unwrap_err();
    bad.host().unwrap_err();
    drop((target, bad, refused, kernels));
    gpu.finish();
}

/// Concurrent managed access: the CPU may read while the device works elsewhere, and waits for what it works on.
#[test]
fn managed_memory_is_read_while_the_device_works_elsewhere() {
    for profile in [H200, GH200, SPARK] {
        let gpu = Gpu::any(profile);
        let kernels = gpu.kernels();
        let managed = || gpu.device.tensor().strategy(Strategy::ZeroCopy).backing(Backing::Managed);
        let Ok(mut busy) = managed().zeros::<u8>([LEN]) else { continue };
        let idle = managed().zeros::<u8>([LEN]).unwrap();
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        kernels.fill(&gpu.stream, &mut busy.device_mut(&gpu.stream).unwrap(), 3);
        assert_eq!(*idle.host().unwrap(), [0; LEN]);
        let opener = gate.open_later();
        assert_eq!(*busy.host().unwrap(), [3; LEN]);
        assert!(opener.opened());
        drop(opener);
        drop((busy, idle, kernels));
        gpu.finish();
    }
}
