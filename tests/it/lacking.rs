//! Machines that lack something: memory pools, managed memory, the whole of a GPU (field reports R89, R90, R91).

use cuda_sim::DeviceBuilder;
use transfer_tensor::cudarc::driver::{LaunchConfig, PushKernelArg};
use transfer_tensor::{Access, Backing, Direction, Request, Strategy};

use crate::failing_calls::{from_pageable, from_pinned, from_zeros, in_place};
use crate::machines::{built, drain, kernel, on, unseen};
use crate::support::{Gpu, H200, SPARK};

const MIB: usize = 1 << 20;

/// R90: no stream-ordered allocation (TCC, fractional vGPU, old GPUs): everything works with the plain kind, and a free
/// waits for who uses the memory, though not in the caller's drop.
#[test]
fn without_memory_pools_a_free_waits_for_the_users() {
    for profile in [H200, "vgpu_timesliced_fractional"] {
        let Some(gpu) = built(DeviceBuilder::new(profile).attribute(115, 0)) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        assert!(!gpu.device.platform().capabilities().memory_pools);
        for scenario in [from_pageable, from_pinned, from_zeros] {
            scenario(&gpu).unwrap();
        }
        drain(&gpu.device);
        assert_eq!(sim.count("cuMemAllocAsync") + sim.count("cuMemFreeAsync"), 0);
        // A tensor that a held stream uses is dropped; the same size is asked for again and again.
        let len = MIB;
        let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).zeros::<u8>([len]).unwrap();
        let mut target = gpu.stream.clone_htod(&vec![1u8; len]).unwrap();
        let fill = kernel(&gpu.context, "fill_u8");
        let address = tensor.device_mut(&gpu.stream).unwrap().address();
        gpu.stream.synchronize().unwrap();
        let frees = sim.count("cuMemFree");
        let gate = sim.gate(gpu.stream.cu_stream() as u64);
        {
            let guard = tensor.device_mut(&gpu.stream).unwrap();
            let (bytes, value) = (len as u64, 7u32);
            let mut launch = gpu.stream.launch_builder(&fill);
            launch.arg(&guard).arg(&bytes).arg(&value);
            // SAFETY: as many bytes at the guard's address, on its stream.
            unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.unwrap();
            gpu.stream.memcpy_dtod(&guard, &mut target).unwrap();
        }
        drop(tensor);
        let other = gpu.context.new_stream().unwrap();
        for _ in 0..20 {
            let mut next = gpu.device.tensor().strategy(Strategy::Streamed).zeros::<u8>([len]).unwrap();
            assert_ne!(next.device_mut(&other).unwrap().address(), address, "it is in use");
        }
        assert!(gpu.device.drain(std::time::Duration::from_millis(50)).unwrap_err().is_not_ready());
        gate.open();
        assert_eq!(gpu.stream.clone_dtoh(&target).unwrap(), vec![7u8; len]);
        drain(&gpu.device);
        assert!(sim.count("cuMemFree") > frees);
        assert_eq!(sim.violations(), Vec::<String>::new());
        drop((target, fill, other));
        gpu.finish();
    }
}

/// A driver that answers 801 to the first stream-ordered allocation although the attribute promised it.
#[test]
fn a_refused_stream_ordered_allocation_is_a_typed_error_or_served_otherwise() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    sim.fail_always("cuMemAllocAsync", 801);
    if let Err(error) = from_pinned(&gpu) {
        assert!(error.is_unsupported(), "{error}");
    }
    sim.clear_failures();
    from_pinned(&gpu).unwrap();
    drain(&gpu.device);
    gpu.context.check_err().unwrap();
    gpu.finish();
}

/// R91: managed memory that a vGPU does not have, or says it has and refuses.
#[test]
fn managed_memory_that_is_not_there_is_an_error_by_name_and_no_choice_otherwise() {
    let without = |attribute: bool| {
        if attribute {
            return built(DeviceBuilder::new(SPARK).attribute(83, 0));
        }
        let sim = unseen(SPARK)?;
        sim.fail_always("cuMemAllocManaged", 801);
        Some(on(sim))
    };
    for attribute in [true, false] {
        let Some(gpu) = without(attribute) else { return };
        assert!(!gpu.device.platform().capabilities().managed);
        let reused = || gpu.device.tensor().access(Access::reuse(8).unwrap());
        let error = reused().backing(Backing::Managed).zeros::<f32>([1 << 20]).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("managed"), "{error}");
        let tensor = reused().zeros::<f32>([1 << 20]).unwrap();
        assert_eq!(tensor.strategy(), Strategy::ZeroCopy);
        assert_ne!(tensor.backing(), Backing::Managed);
        in_place(&gpu).unwrap();
        drop(tensor);
        drain(&gpu.device);
        gpu.finish();
    }
    // Refused from one day to the next: what was planned is replaced, and the reasons say so.
    let Some(gpu) = Gpu::simulated(SPARK) else { return };
    gpu.sim.as_ref().unwrap().fail_always("cuMemAllocManaged", 801);
    let tensor = gpu.device.tensor().access(Access::reuse(8).unwrap()).zeros::<f32>([1 << 20]).unwrap();
    assert_ne!(tensor.backing(), Backing::Managed);
    let why = tensor.decision().reasons.join("\n");
    assert!(why.contains("managed memory was refused") && why.contains("801"), "{why}");
    drop(tensor);
    drain(&gpu.device);
    gpu.finish();
    // And on a vGPU.
    let Some(gpu) = Gpu::simulated("vgpu_timesliced_fractional") else { return };
    let error = gpu.device.tensor().backing(Backing::Managed).strategy(Strategy::ZeroCopy).zeros::<u8>([8]);
    assert!(error.unwrap_err().is_unsupported());
    from_pageable(&gpu).unwrap();
    drain(&gpu.device);
    gpu.finish();
}

/// R89: of a MIG slice the driver tells the slice; nobody asks NVML, and a UUID is no number.
#[test]
fn a_mig_slice_is_what_the_driver_says() {
    let Some(gpu) = Gpu::simulated("mig_1g_h100") else { return };
    let platform = gpu.device.platform();
    let total = gpu.sim.as_ref().unwrap().profile().total_mem;
    assert_eq!(platform.total_bytes(), total);
    assert!(total < 20 << 30, "a slice, not the whole GPU: {total}");
    let memory = gpu.device.memory();
    assert_eq!(memory.total_bytes, total);
    assert!(memory.free_bytes <= total);
    let uuid = platform.uuid().unwrap();
    assert!(uuid.len() == 32 && uuid.chars().all(|digit| digit.is_ascii_hexdigit()), "{uuid}");
    for (bytes, fits) in [(total / 2, true), (total + 1, false)] {
        let plan = gpu.device.plan(&Request::new(bytes).strategy(Strategy::Streamed));
        assert_eq!(plan.is_ok(), fits, "{bytes}");
    }
    let error = gpu.device.plan(&Request::new(total + 1).strategy(Strategy::Streamed)).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(gpu.device.plan(&Request::new(1 << 20).direction(Direction::DeviceToHost)).is_ok());
    from_pageable(&gpu).unwrap();
    drain(&gpu.device);
    gpu.finish();
}
