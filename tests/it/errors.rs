//! Whose error is whose: nobody's comes out of another's call (field report R68).

use cuda_sim::DeviceBuilder;
use transfer_tensor::Strategy;
use transfer_tensor::cudarc::driver::{DriverError, sys};

use crate::machines::{built, drain, pattern};
use crate::support::{Gpu, H200, SPARK};

/// Somebody's failed call, parked in the context as cudarc's drops do.
fn park(gpu: &Gpu) {
    // The thread that frees looks for errors of its own in the same place.
    drain(&gpu.device);
    gpu.context.record_err::<()>(Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED)));
}

/// R68: an error that another call left behind is not returned by ours, and is counted.
#[test]
fn a_stale_error_does_not_fail_a_good_transfer() {
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        for strategy in [Strategy::Streamed, Strategy::ZeroCopy] {
            let bytes = pattern(100_000, 1);
            park(&gpu);
            let tensor = gpu.device.tensor().strategy(strategy).from_slice(&bytes, [100_000]).unwrap();
            park(&gpu);
            let tensor = tensor.to_host().unwrap().wait().unwrap();
            let mut tensor = match strategy {
                // A slice of memory that came about on a stream of ours keeps that stream for ever.
                Strategy::Streamed => tensor,
                _ => tensor.to_device().unwrap().wait().unwrap(),
            };
            park(&gpu);
            {
                let guard = tensor.device_mut(&gpu.stream).unwrap();
                assert_ne!(guard.address(), 0);
                park(&gpu);
            }
            park(&gpu);
            assert_eq!(*tensor.host().unwrap(), *bytes);
            park(&gpu);
            let tensor = tensor.to_host().unwrap().wait().unwrap();
            if strategy == Strategy::Streamed {
                park(&gpu);
                let slice = tensor.into_cuda_slice().unwrap();
                park(&gpu);
                let tensor = gpu.device.tensor().from_cuda_slice(slice, [100_000]).unwrap();
                park(&gpu);
                assert_eq!(tensor.into_vec().unwrap(), bytes);
            } else {
                park(&gpu);
                drop(tensor);
            }
            drain(&gpu.device);
        }
        // Each was cleared by somebody: the last one is still there or counted, none was ours.
        assert!(gpu.device.stats().stale_errors > 0);
        assert_eq!(gpu.device.stats().free_errors, 0);
        let _ = gpu.context.check_err();
        gpu.finish();
    }
}

/// The same where the caller's stream belongs to a second handle of the context: cudarc parks errors in handles.
#[test]
fn a_stale_error_in_a_second_handle_is_no_other_case() {
    let gpu = Gpu::any(H200);
    let other = gpu.another_context();
    let stream = other.default_stream();
    let park = || other.record_err::<()>(Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED)));
    let bytes = pattern(10_000, 8);
    // Allocated, used, turned into a slice and back, freed: all with the stream of the second handle.
    let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&bytes, [10_000]).unwrap();
    park();
    drop(tensor.device_mut(&stream).unwrap());
    park();
    let slice = tensor.into_cuda_slice().unwrap();
    other.check_err().unwrap();
    park();
    let tensor = gpu.device.tensor().from_cuda_slice(slice, [10_000]).unwrap();
    park();
    assert_eq!(*tensor.host().unwrap(), *bytes);
    drop(tensor);
    drain(&gpu.device);
    other.check_err().unwrap();
    assert_eq!(gpu.device.stats().stale_errors, 4);
    if let Some(sim) = &gpu.sim {
        // And a free that fails is counted as ours, not left there.
        let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).zeros::<u8>([100]).unwrap();
        drop(tensor.device_mut(&stream).unwrap());
        sim.fail_nth("cuMemFreeAsync", 1, 999);
        drop(tensor);
        drain(&gpu.device);
        assert_eq!(gpu.device.stats().free_errors, 1);
        other.check_err().unwrap();
    }
}

/// The waits that cudarc submits for a slice that is handed over: if one fails, the slice may still be written to, so it is
/// not taken.
#[test]
fn a_slice_whose_users_can_not_be_waited_for_is_given_back() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let writer = gpu.context.new_stream().unwrap();
    let mut slice = gpu.stream.clone_htod(&pattern(5000, 9)).unwrap();
    gpu.stream.synchronize().unwrap();
    let gate = sim.gate(writer.cu_stream() as u64);
    writer.memset_zeros(&mut slice).unwrap();
    sim.fail_always("cuStreamWaitEvent", 999);
    let refused = gpu.device.tensor().from_cuda_slice(slice, [5000]).unwrap_err();
    assert_eq!(refused.error.driver_code(), Some(999), "{}", refused.error);
    let shared = std::sync::Arc::new(refused.value);
    let error = gpu.device.tensor().from_shared_cuda_slice(shared.clone(), [5000]).unwrap_err();
    assert_eq!(error.driver_code(), Some(999), "{error}");
    sim.clear_failures();
    gpu.context.check_err().unwrap();
    let tensor = gpu.device.tensor().from_shared_cuda_slice(shared, [5000]).unwrap();
    gate.open();
    assert_eq!(*tensor.host().unwrap(), [0u8; 5000]);
    drop((tensor, writer));
    gpu.finish();
}

/// R68, the other way: a free of ours that fails is ours; the next user of the context sees nothing of it.
#[test]
fn a_failing_drop_is_not_the_next_callers_error() {
    let frees = ["cuMemFreeAsync", "cuMemFreeHost", "cuMemHostUnregister", "cuMemFree"];
    for call in frees {
        for pools in [1, 0] {
            let Some(gpu) = built(DeviceBuilder::new(H200).attribute(115, pools)) else { return };
            let sim = gpu.sim.as_ref().unwrap();
            let make = |len: usize| {
                let options = gpu.device.tensor().strategy(Strategy::Streamed);
                let mut tensor = match call {
                    "cuMemHostUnregister" => options.pin(true).from_vec(pattern(len, 2), [len]).unwrap(),
                    _ => options.from_slice(&pattern(len, 2), [len]).unwrap(),
                };
                drop(tensor.device_mut(&gpu.stream).unwrap());
                tensor
            };
            let tensor = make(50_000);
            gpu.stream.synchronize().unwrap();
            let before = sim.count(call);
            sim.fail_nth(call, 1, 999);
            drop(tensor);
            drain(&gpu.device);
            let met = sim.count(call) > before;
            sim.clear_failures();
            gpu.context.check_err().unwrap();
            // Our own two threads share the one place that cudarc has for errors: the other may have found it there.
            let stats = gpu.device.stats();
            assert_eq!(stats.free_errors + stats.stale_errors, u64::from(met), "{call} {pools}");
            // The user's own next call, and our next transfer.
            gpu.stream.clone_htod(&[1u8, 2]).unwrap();
            assert_eq!(*make(1000).host().unwrap(), *pattern(1000, 2));
            drain(&gpu.device);
            gpu.context.check_err().unwrap();
        }
    }
}
