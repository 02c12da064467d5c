//! Safe code does not get at bytes in flight: the sequences of which it was shown that a literal wrapper around cudarc lets
//! it, and others of their kind. Rows 6 and 7, and the replay of a graph that a kernel launch was captured in, are cudarc's
//! own (`docs/safety.md`).

use std::mem::forget;
use std::sync::Arc;

use transfer_tensor::cudarc::driver::CudaContext;
use transfer_tensor::cudarc::driver::result::DriverError;
use transfer_tensor::cudarc::driver::sys::{self, CUresult};
use transfer_tensor::{Backing, TransferTensor};

use crate::support::{Gate, Gpu, H200, HANG, ORIN, within};

const LEN: usize = 4096;

/// Row 1. cudarc keeps one read event for each slice: the second reader overwrites the first.
#[test]
fn a_host_write_comes_after_every_foreign_reader() {
    let gpu = Gpu::any(H200);
    let (slow, fast) = (gpu.another_stream(), gpu.another_stream());
    let mut first = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    let mut second = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    let mut tensor = gpu.both_sides(&[0x11u8; LEN]);
    gpu.context.synchronize().unwrap();

    let gate = gpu.gate(&slow);
    let guard = tensor.device(&gpu.stream).unwrap();
    slow.memcpy_dtod(&guard, &mut first).unwrap();
    fast.memcpy_dtod(&guard, &mut second).unwrap();
    drop(guard);
    let opener = gate.open_later();
    tensor.host_mut().unwrap().fill(0x99);
    assert!(opener.opened(), "host_mut returned under a reader");
    drop(opener);

    assert_eq!(gpu.stream.clone_dtoh(&first).unwrap(), [0x11; LEN]);
    assert_eq!(gpu.stream.clone_dtoh(&second).unwrap(), [0x11; LEN]);
    drop((tensor, first, second, slow, fast));
    gpu.finish();
}

/// As row 1, for device memory that is freed under the reader.
#[test]
fn device_memory_is_not_freed_under_a_foreign_reader() {
    let gpu = Gpu::any(H200);
    let slow = gpu.another_stream();
    let mut copy = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    let tensor = gpu.on_device(&[0x11; LEN]);
    gpu.context.synchronize().unwrap();

    let gate = gpu.gate(&slow);
    slow.memcpy_dtod(&tensor.device(&gpu.stream).unwrap(), &mut copy).unwrap();
    drop(tensor);
    // The address is handed out first, if it was given back.
    let mut recycled = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    gpu.stream.memcpy_htod(&[0x22u8; LEN], &mut recycled).unwrap();
    gpu.stream.synchronize().unwrap();
    gate.open();

    slow.synchronize().unwrap();
    assert_eq!(slow.clone_dtoh(&copy).unwrap(), [0x11; LEN]);
    drop((copy, recycled, slow));
    gpu.finish();
}

/// Row 2. cudarc records nothing for a reader whose context object is in single-stream mode.
#[test]
fn a_reader_of_another_context_object_counts() {
    let gpu = Gpu::any(H200);
    let other = gpu.another_context();
    let slow = other.default_stream();
    let mut copy = slow.alloc_zeros::<u8>(LEN).unwrap();
    let mut tensor = gpu.both_sides(&[0x11u8; LEN]);
    gpu.context.synchronize().unwrap();

    let gate = gpu.gate(&slow);
    slow.memcpy_dtod(&tensor.device(&gpu.stream).unwrap(), &mut copy).unwrap();
    let opener = gate.open_later();
    tensor.host_mut().unwrap().fill(0x99);
    assert!(opener.opened(), "host_mut returned under a reader");
    drop(opener);

    assert_eq!(slow.clone_dtoh(&copy).unwrap(), [0x11; LEN]);
    drop((tensor, copy, slow, other));
    gpu.finish();
}

/// Row 2, the other way round: the guard's own stream is of another context object than the device's.
#[test]
fn a_guard_on_a_stream_of_another_context_object_is_waited_for() {
    let gpu = Gpu::any(H200);
    let (other, kernels) = (gpu.another_context(), gpu.kernels());
    let slow = other.new_stream().unwrap();
    let tensor = &mut gpu.both_sides(&[0x11u8; LEN]);
    gpu.context.synchronize().unwrap();

    let gate = gpu.gate(&slow);
    kernels.fill(&slow, &mut tensor.device_mut(&slow).unwrap(), 0x33);
    let opener = gate.open_later();
    assert_eq!(*tensor.host().unwrap(), [0x33; LEN]);
    assert!(opener.opened());
    drop(opener);
}

/// Row 3. Handle 0x2 is another stream on every thread.
#[test]
fn a_guard_on_a_per_thread_stream_that_was_forgotten_is_waited_for_by_another_thread() {
    within(HANG, || {
        let gpu = Gpu::on_stream(H200, CudaContext::per_thread_stream);
        let kernels = gpu.kernels();
        let tensor = &mut gpu.both_sides(&[0x11u8; LEN]);
        gpu.context.synchronize().unwrap();

        let gate = gpu.gate(&gpu.stream);
        let mut guard = tensor.device_mut(&gpu.stream).unwrap();
        kernels.fill(&gpu.stream, &mut guard, 0x33);
        forget(guard);
        let opener = gate.open_later();
        std::thread::scope(|scope| {
            let meet = scope.spawn(|| {
                assert_eq!(*tensor.host().unwrap(), [0x33; LEN]);
                assert!(opener.opened(), "host returned under a writer");
                tensor.host_mut().unwrap().fill(1);
            });
            meet.join().unwrap();
        });
        drop(opener);
        drop(kernels);
        gpu.finish_forgotten();
    });
}

/// As row 3, with the guard dropped, and met by work on the other thread's default stream.
#[test]
fn work_on_two_threads_default_streams_is_ordered() {
    within(HANG, || {
        let gpu = Gpu::on_stream(H200, CudaContext::per_thread_stream);
        let kernels = gpu.kernels();
        let (mut tensor, mut warm) = (gpu.on_device(&[0x11; LEN]), gpu.on_device(&[0; LEN]));
        std::thread::scope(|scope| {
            let (gpu, kernels) = (&gpu, &kernels);
            let (warmed, is_warm) = std::sync::mpsc::channel();
            let (hand, handed) = std::sync::mpsc::channel::<(&mut TransferTensor<u8>, Gate)>();
            let other = scope.spawn(move || {
                // A real driver makes a thread's default stream when that is first used, and may wait for the device to do so.
                kernels.xor(&gpu.stream, &mut warm.device_mut(&gpu.stream).unwrap());
                drop(warm);
                gpu.stream.synchronize().unwrap();
                warmed.send(()).unwrap();
                let (tensor, gate) = handed.recv().unwrap();
                kernels.xor(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
                gate.open();
                // It hangs where a thread ends whose default stream is not idle.
                gpu.stream.synchronize().unwrap();
            });
            is_warm.recv().unwrap();
            gpu.context.synchronize().unwrap();
            let gate = gpu.gate(&gpu.stream);
            kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 0x33);
            hand.send((&mut tensor, gate)).unwrap();
            other.join().unwrap();
        });
        let expected: Vec<u8> = (0..LEN).map(|i| 0x33 ^ crate::support::index_hash(i)).collect();
        assert_eq!(*tensor.host().unwrap(), expected);
        drop((tensor, kernels));
        gpu.finish();
    });
}

/// Row 4. An error that somebody parked makes cudarc's own waits and records skip their work.
#[test]
fn a_parked_error_does_not_make_a_wait_skip_its_work() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let park = || gpu.context.record_err::<()>(Err(DriverError(CUresult::CUDA_ERROR_NOT_SUPPORTED)));
    for shared in [true, false] {
        let values = [0x11u8; LEN];
        let mut tensor = if shared { gpu.both_sides(&values) } else { gpu.on_device(&values) };
        drop(tensor.host_mut().unwrap());
        drop(tensor.device_mut(&gpu.stream).unwrap());
        gpu.context.synchronize().unwrap();

        let gate = gpu.gate(&gpu.stream);
        let mut guard = tensor.device_mut(&gpu.stream).unwrap();
        kernels.fill(&gpu.stream, &mut guard, 0x33);
        park();
        drop(guard);
        park();
        let opener = gate.open_later();
        assert_eq!(*tensor.host().unwrap(), [0x33; LEN], "shared: {shared}");
        assert!(opener.opened(), "host returned under a writer");
        drop(opener);
    }
    let _ = gpu.context.check_err();
    drop(kernels);
    gpu.finish();
}

/// Row 5. Guards can be swapped; each goes on to stand for its own tensor.
#[test]
fn swapped_guards_stay_with_their_tensors() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let (mut a, mut b) = (gpu.both_sides(&[0u8; LEN]), gpu.both_sides(&[0u8; LEN]));
    let slow = gpu.another_stream();
    gpu.context.synchronize().unwrap();
    {
        let gate = gpu.gate(&slow);
        let mut first = a.device_mut(&slow).unwrap();
        let mut second = b.device_mut(&gpu.stream).unwrap();
        std::mem::swap(&mut first, &mut second);
        kernels.fill(&gpu.stream, &mut first, 2);
        kernels.fill(&slow, &mut second, 1);
        drop((first, second));
        assert_eq!(*b.host().unwrap(), [2; LEN]);
        let opener = gate.open_later();
        assert_eq!(*a.host().unwrap(), [1; LEN]);
        assert!(opener.opened());
    }
    drop((a, b, slow, kernels));
    gpu.finish();
}

/// Row 8. What safe code can have captured does not get at the memory, and the capture stays good.
#[test]
fn a_capture_does_not_get_at_the_memory() {
    let gpu = Gpu::any(H200);
    let mut tensor = gpu.both_sides(&[7u8; LEN]);
    let mut guard = tensor.device_mut(&gpu.stream).unwrap();
    gpu.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let _ = gpu.stream.memset_zeros(&mut guard);
    let graph = gpu.stream.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    drop(guard);
    {
        let mut host = tensor.host_mut().unwrap();
        host.fill(9);
        if let Ok(Some(graph)) = &graph {
            let _ = graph.launch();
        }
        gpu.stream.synchronize().unwrap();
        assert_eq!(*host, [9; LEN]);
    }
    assert_eq!(*tensor.host().unwrap(), [9; LEN]);
    drop((tensor, graph));
    let _ = gpu.context.check_err();
    gpu.finish();
}

/// As row 8, through a host guard: a captured copy would run when nobody waits for it.
#[test]
fn a_capture_is_not_lent_host_memory() {
    let gpu = Gpu::any(H200);
    // Of a context object in single-stream mode: cudarc submits nothing of its own for this slice.
    let single = gpu.another_context();
    let mut on_device = single.default_stream().alloc_zeros::<u8>(LEN).unwrap();
    let mut tensor = gpu.both_sides(&[7u8; LEN]);
    gpu.context.synchronize().unwrap();
    let mut host = tensor.host_mut().unwrap();
    gpu.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let _ = gpu.stream.memcpy_htod(&host, &mut on_device);
    // What cudarc made of its own slice; it would not end the capture for it.
    let _ = gpu.context.check_err();
    let graph = gpu.stream.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH);
    host.fill(9);
    if let Ok(Some(graph)) = &graph {
        let _ = graph.launch();
    }
    gpu.stream.synchronize().unwrap();
    assert_eq!(gpu.stream.clone_dtoh(&on_device).unwrap(), [0; LEN]);
    drop((host, graph, on_device, single));
    drop(tensor);
    let _ = gpu.context.check_err();
    gpu.finish();
}

/// What a guard submitted before the capture began is waited for when it can be; an open guard on the captured stream is an
/// error, not a broken capture.
#[test]
fn a_capture_survives_every_call() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let mut tensor = gpu.both_sides(&[7u8; LEN]);
    let mut other = gpu.both_sides(&[7u8; LEN]);
    let slice = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    gpu.context.synchronize().unwrap();
    let mut guard = tensor.device_mut(&gpu.stream).unwrap();
    kernels.fill(&gpu.stream, &mut guard, 8);
    gpu.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    drop(guard);
    assert!(tensor.host().unwrap_err().is_capturing());
    assert!(tensor.host_mut().unwrap_err().is_capturing());
    assert!(tensor.device(&gpu.stream).unwrap_err().is_capturing());
    assert!(tensor.device_mut(&gpu.stream).unwrap_err().is_capturing());
    let refused = gpu.device.tensor().from_cuda_slice(slice, [LEN]).unwrap_err();
    assert!(refused.error.is_capturing());
    // Nothing of it ran on the stream.
    assert_eq!(*other.host().unwrap(), [7; LEN]);
    other.host_mut().unwrap().fill(1);
    let extra = gpu.device.tensor().zeros::<u8>([LEN]).unwrap();
    assert_eq!(*extra.host().unwrap(), [0; LEN]);
    drop((tensor, extra));
    // What was in use on the captured stream is neither freed nor given up.
    assert!(gpu.device.drain(std::time::Duration::from_millis(20)).is_err());
    assert_eq!(gpu.device.stats().leaked, 0);
    let graph = gpu
        .stream
        .end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
        .expect("the capture is good");
    drop((graph, other, refused, kernels));
    gpu.finish();
}

/// Row 9. The user's read is queued on his thread's default stream; the last handle is dropped on another thread.
#[test]
fn a_shared_slice_is_not_freed_under_another_threads_reader() {
    within(HANG, || {
        let gpu = Gpu::on_stream(H200, CudaContext::per_thread_stream);
        let mut copy = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
        let mut slice = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
        gpu.stream.memcpy_htod(&[5u8; LEN], &mut slice).unwrap();
        let slice = Arc::new(slice);
        let tensor = gpu.device.tensor().from_shared_cuda_slice(slice.clone(), [LEN]).unwrap();
        assert_eq!(*tensor.host().unwrap(), [5; LEN]);
        // Of another context object, so that the first stays in single-stream mode.
        let other = gpu.another_context().new_stream().unwrap();
        gpu.context.synchronize().unwrap();

        let gate = gpu.gate(&gpu.stream);
        gpu.stream.memcpy_dtod(&*slice, &mut copy).unwrap();
        drop(slice);
        // A real driver may let a free, or another thread's first use of its stream, wait for the device; and it hangs where a
        // thread ends whose default stream is not idle.
        let (opener, its) = (gate.open_later(), gpu.sim.is_none().then(|| gpu.stream.clone()));
        let drops = move || {
            drop(tensor);
            its.map_or(Ok(()), |stream| stream.synchronize()).unwrap();
        };
        std::thread::spawn(drops).join().unwrap();
        let recycled = other.clone_htod(&[6u8; LEN]).unwrap();
        other.synchronize().unwrap();
        drop(opener);
        assert_eq!(gpu.stream.clone_dtoh(&copy).unwrap(), [5; LEN]);
        drop((recycled, other, copy));
        gpu.finish();
    });
}

/// As row 9, with the roles exchanged: the read is ours, and the user drops the last handle on another thread than the one
/// that dropped the tensor.
#[test]
fn a_shared_slice_is_not_freed_under_our_reader() {
    within(HANG, || {
        let gpu = Gpu::on_stream(H200, CudaContext::per_thread_stream);
        let other_context = gpu.another_context();
        let (slow, other) = (other_context.new_stream().unwrap(), other_context.new_stream().unwrap());
        let mut copy = slow.alloc_zeros::<u8>(LEN).unwrap();
        let mut slice = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
        gpu.stream.memcpy_htod(&[5u8; LEN], &mut slice).unwrap();
        let slice = Arc::new(slice);
        let tensor = gpu.device.tensor().from_shared_cuda_slice(slice.clone(), [LEN]).unwrap();
        gpu.context.synchronize().unwrap();

        let gate = gpu.gate(&slow);
        slow.memcpy_dtod(&tensor.device(&slow).unwrap(), &mut copy).unwrap();
        // A real driver may let a free, or another thread's first use of its stream, wait for the device.
        let opener = gate.open_later();
        std::thread::spawn(move || drop(tensor)).join().unwrap();
        drop(slice);
        let recycled = other.clone_htod(&[6u8; LEN]).unwrap();
        other.synchronize().unwrap();
        drop(opener);
        slow.synchronize().unwrap();
        assert_eq!(slow.clone_dtoh(&copy).unwrap(), [5; LEN]);
        drop((recycled, other, copy, slow, other_context));
        gpu.finish();
    });
}

/// Row 10. Without a context bound the free would fail, leak, and park an error for the next caller.
#[test]
fn the_last_slice_is_freed_on_a_fresh_thread() {
    let gpu = Gpu::on_stream(H200, CudaContext::default_stream);
    let slice = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    let adopted = gpu.device.tensor().from_cuda_slice(slice, [LEN]).unwrap();
    let shared = Arc::new(gpu.stream.alloc_zeros::<u8>(LEN).unwrap());
    let shared = gpu.device.tensor().from_shared_cuda_slice(shared, [LEN]).unwrap();
    let own = gpu.on_device(&[1; LEN]);
    assert!(!gpu.context.is_in_multi_stream_mode());
    std::thread::spawn(move || drop((adopted, shared, own))).join().unwrap();
    gpu.context.check_err().expect("no error is parked");
    gpu.stream.synchronize().unwrap();
    if let Some(sim) = &gpu.sim {
        gpu.device.drain(HANG).unwrap();
        assert_eq!(sim.evidence().device_bytes, 0);
    }
    assert_eq!(gpu.device.stats().free_errors, 0);
    gpu.finish();
}

/// Row 11. Any later work on the device would make a live host reference fault.
#[test]
fn managed_memory_without_concurrent_access_is_refused() {
    for profile in [ORIN, "wsl2_rtx"] {
        let Some(gpu) = Gpu::simulated(profile) else { return };
        let error = gpu.device.tensor().backing(Backing::Managed).zeros::<u8>([LEN]).unwrap_err();
        assert!(error.is_unsupported(), "{error}");
        for options in [gpu.device.tensor(), gpu.device.tensor().access(transfer_tensor::Access::reuse(100).unwrap())] {
            let tensor = options.zeros::<u8>([LEN]).unwrap();
            assert_ne!(tensor.backing(), Backing::Managed);
        }
        gpu.finish();
    }
}

/// Row 12. `upgrade_device_ptr` panics where an error is parked.
#[test]
fn a_view_is_made_where_an_error_is_parked() {
    let gpu = Gpu::any(H200);
    let mut tensor = gpu.on_device(&[3; LEN]);
    {
        let mut guard = tensor.device_mut(&gpu.stream).unwrap();
        gpu.context.record_err::<()>(Err(DriverError(CUresult::CUDA_ERROR_NOT_SUPPORTED)));
        // SAFETY: used on the guard's stream while the guard lives.
        let view = unsafe { guard.as_cuda_view() }.unwrap();
        let _ = gpu.context.check_err();
        assert_eq!(gpu.stream.clone_dtoh(&view).unwrap(), [3; LEN]);
        gpu.context.record_err::<()>(Err(DriverError(CUresult::CUDA_ERROR_NOT_SUPPORTED)));
        // SAFETY: as above.
        let mut view = unsafe { guard.as_cuda_view_mut() }.unwrap();
        let _ = gpu.context.check_err();
        gpu.stream.memset_zeros(&mut view).unwrap();
    }
    assert_eq!(*tensor.host().unwrap(), [0; LEN]);
    drop(tensor);
    gpu.finish();
}

#[test]
fn a_forgotten_guard_is_waited_for() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    for shared in [true, false] {
        let mut tensor = if shared { gpu.both_sides(&[1u8; LEN]) } else { gpu.on_device(&[1; LEN]) };
        drop(tensor.host_mut().unwrap());
        drop(tensor.device_mut(&gpu.stream).unwrap());
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let mut guard = tensor.device_mut(&gpu.stream).unwrap();
        kernels.fill(&gpu.stream, &mut guard, 2);
        forget(guard);
        let opener = gate.open_later();
        tensor.host_mut().unwrap().iter().for_each(|&x| assert_eq!(x, 2));
        assert!(opener.opened(), "host_mut returned under a writer");
        drop(opener);
        assert_eq!(*tensor.host().unwrap(), [2; LEN]);
    }
    drop(kernels);
    gpu.finish_forgotten();
}

#[test]
fn memory_is_not_freed_under_a_forgotten_guard() {
    let gpu = Gpu::any(H200);
    let mut copy = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    for shared in [true, false] {
        let tensor = if shared { gpu.both_sides(&[1u8; LEN]) } else { gpu.on_device(&[1; LEN]) };
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let guard = tensor.device(&gpu.stream).unwrap();
        gpu.stream.memcpy_dtod(&guard, &mut copy).unwrap();
        forget(guard);
        drop(tensor);
        gate.open();
        assert_eq!(gpu.stream.clone_dtoh(&copy).unwrap(), [1; LEN]);
    }
    drop(copy);
    gpu.finish_forgotten();
}
