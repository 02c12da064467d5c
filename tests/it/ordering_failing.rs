//! Copies whose end is not known, because a call failed.

use transfer_tensor::cudarc::driver::sys::CUresult;

use crate::support::{Gpu, H200};

const LEN: usize = 1 << 16;

/// R13, R58: a point that could not be recorded does not count as passed.
#[test]
fn a_record_that_failed_does_not_mean_done() {
    for code in [CUresult::CUDA_ERROR_INVALID_HANDLE, CUresult::CUDA_ERROR_OUT_OF_MEMORY] {
        for shared in [true, false] {
            let Some(gpu) = Gpu::simulated(H200) else { return };
            let (sim, kernels) = (gpu.sim.as_ref().unwrap(), gpu.kernels());
            let mut tensor = if shared { gpu.both_sides(&[0u8; LEN]) } else { gpu.on_device(&[0; LEN]) };
            drop(tensor.host_mut().unwrap());
            drop(tensor.device_mut(&gpu.stream).unwrap());
            gpu.context.synchronize().unwrap();
            // At the end of a guard.
            let gate = gpu.gate(&gpu.stream);
            let mut guard = tensor.device_mut(&gpu.stream).unwrap();
            kernels.fill(&gpu.stream, &mut guard, 1);
            sim.fail_nth("cuEventRecord", 1, code as u32);
            drop(guard);
            sim.clear_failures();
            let opener = gate.open_later();
            assert_eq!(*tensor.host().unwrap(), [1; LEN], "shared: {shared}");
            assert!(opener.opened());
            drop(opener);
            // And at its end, when it is dropped at once.
            let gate = gpu.gate(&gpu.stream);
            let mut guard = tensor.device_mut(&gpu.stream).unwrap();
            kernels.fill(&gpu.stream, &mut guard, 2);
            sim.fail_nth("cuEventRecord", 1, code as u32);
            drop(guard);
            sim.clear_failures();
            drop(tensor);
            drop(gpu.both_sides(&[1u8; LEN]));
            gate.open();
            drop(kernels);
            gpu.finish();
        }
    }
}

/// R13: the copy itself was submitted; its end could not be recorded, or the driver said no after doing it.
#[test]
fn a_copy_whose_end_is_not_known_is_waited_for() {
    for (call, after) in [("cuEventRecord", false), ("cuMemcpyDtoHAsync", true)] {
        let Some(gpu) = Gpu::simulated(H200) else { return };
        let (sim, kernels) = (gpu.sim.as_ref().unwrap(), gpu.kernels());
        let mut tensor = gpu.on_device(&[0; LEN]);
        drop(tensor.host_mut().unwrap());
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 3);
        if after {
            sim.fail_nth_after(call, 1, CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
        } else {
            sim.fail_nth(call, 1, CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
        }
        let refused = tensor.to_host().unwrap_err();
        sim.clear_failures();
        let mut tensor = refused.value;
        let opener = gate.open_later();
        tensor.host_mut().unwrap().iter().for_each(|&x| assert_eq!(x, 3));
        assert!(opener.opened(), "{call}: the host got memory that a copy writes to");
        drop(opener);
        // Once more, and dropped at once.
        let gate = gpu.gate(&gpu.stream);
        kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 4);
        if after {
            sim.fail_nth_after(call, 1, CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
        } else {
            sim.fail_nth(call, 1, CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
        }
        drop(tensor.to_host().unwrap_err());
        sim.clear_failures();
        drop(gpu.both_sides(&[1u8; LEN]));
        gate.open();
        drop(kernels);
        gpu.finish();
    }
}

/// R13, for a copy to the device: its source is not the caller's again before it was read.
#[test]
fn a_source_whose_copy_failed_after_all_is_waited_for() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let mut tensor = gpu.on_device(&[1; LEN]);
    tensor.host_mut().unwrap().fill(2);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    sim.fail_nth_after("cuMemcpyHtoDAsync", 1, CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
    tensor.device(&gpu.stream).unwrap_err();
    sim.clear_failures();
    let opener = gate.open_later();
    tensor.host_mut().unwrap().fill(3);
    assert!(opener.opened(), "written under a reader");
    drop(opener);
    assert_eq!(gpu.stream.clone_dtoh(&tensor.device(&gpu.stream).unwrap()).unwrap(), [3; LEN]);
    drop(tensor);
    gpu.finish();
}
