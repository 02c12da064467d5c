//! Whose error is whose, what a failing driver call leaves behind, and machines that lack something
//! (field reports R68, R77, R89, R90, R91).

use std::collections::BTreeMap;
use std::sync::LazyLock;

use cuda_sim::DeviceBuilder;
use transfer_tensor::cudarc::driver::{DriverError, LaunchConfig, PushKernelArg, sys};
use transfer_tensor::{Access, Backing, Direction, Error, Refused, Request, Strategy, TransferTensor};

use crate::machines::{built, drain, kernel, on, pattern, unseen};
use crate::support::{Gpu, H200, SPARK};

const MIB: usize = 1 << 20;
const PART: usize = 100_000;

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
            assert_eq!(gpu.device.stats().free_errors, u64::from(met), "{call} {pools}");
            // The user's own next call, and our next transfer.
            gpu.stream.clone_htod(&[1u8, 2]).unwrap();
            assert_eq!(*make(1000).host().unwrap(), *pattern(1000, 2));
            drain(&gpu.device);
            gpu.context.check_err().unwrap();
        }
    }
}

/// One way to move bytes there and back; an error at any point of it comes out, with what was handed in.
type Scenario = fn(&Gpu) -> Result<(), Error>;

/// More than two staging slots.
const STAGED: usize = 8 * PART + 12_345;

fn there_changed_and_back(gpu: &Gpu, tensor: TransferTensor<u8>, bytes: &[u8]) -> Result<(), Error> {
    let tensor = again_if_refused(tensor.to_device(), |tensor| tensor.to_device())?;
    let mut tensor = match tensor.wait() {
        Ok(tensor) => tensor,
        // The tensor is whole: what was not brought over is brought again.
        Err(Refused { value, .. }) => value,
    };
    // All of it may have been written to, a part in the middle is.
    let (start, len, value) = (bytes.len() / 2, 1000usize, 0x5Au8);
    let change = |tensor: &mut TransferTensor<u8>| {
        let guard = tensor.device_mut(&gpu.stream)?;
        let fill = kernel(&gpu.context, "fill_u8");
        let (at, len, value) = (guard.address() + start as u64, len as u64, u32::from(value));
        let mut launch = gpu.stream.launch_builder(&fill);
        launch.arg(&at).arg(&len).arg(&value);
        // SAFETY: that many bytes lie behind the address; the launch is on the guard's stream.
        unsafe { launch.launch(LaunchConfig::for_num_elems(1000)) }.unwrap();
        Ok::<(), Error>(())
    };
    change(&mut tensor).or_else(|_first| change(&mut tensor))?;
    let mut expected = bytes.to_vec();
    expected[start..start + len].fill(value);
    // A download that failed has lost nothing: the device still has the bytes.
    let tensor = match tensor.to_host() {
        Ok(ticket) => ticket.wait().unwrap_or_else(|refused| refused.value),
        Err(refused) => refused.value,
    };
    let host = tensor.host().or_else(|_first| tensor.host())?;
    assert!(*host == *expected, "wrong bytes after a failed call");
    Ok(())
}

fn again_if_refused<T, V>(
    first: Result<T, Refused<V>>,
    again: impl FnOnce(V) -> Result<T, Refused<V>>,
) -> Result<T, Error> {
    match first {
        Ok(done) => Ok(done),
        Err(Refused { value, .. }) => again(value).map_err(Error::from),
    }
}

fn from_pageable(gpu: &Gpu) -> Result<(), Error> {
    static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| pattern(STAGED, 3));
    let bytes = BYTES.clone();
    let options = || gpu.device.tensor().strategy(Strategy::Streamed);
    let tensor = again_if_refused(options().from_vec(bytes.clone(), [STAGED]), |v| options().from_vec(v, [STAGED]))?;
    there_changed_and_back(gpu, tensor, &bytes)
}

fn from_registered(gpu: &Gpu) -> Result<(), Error> {
    let bytes = pattern(PART + 1, 4);
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).pin(true).from_vec(bytes.clone(), [PART + 1]);
    there_changed_and_back(gpu, tensor?, &bytes)
}

fn from_pinned(gpu: &Gpu) -> Result<(), Error> {
    let bytes = pattern(PART + 7, 5);
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&bytes, [PART + 7])?;
    there_changed_and_back(gpu, tensor, &bytes)
}

fn in_place(gpu: &Gpu) -> Result<(), Error> {
    let bytes = pattern(PART + 9, 6);
    let tensor = gpu.device.tensor().strategy(Strategy::ZeroCopy).from_slice(&bytes, [PART + 9])?;
    there_changed_and_back(gpu, tensor, &bytes)
}

fn from_zeros(gpu: &Gpu) -> Result<(), Error> {
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).zeros::<u8>([PART])?;
    there_changed_and_back(gpu, tensor, &vec![0; PART])
}

/// How often each driver call is made in a scenario that goes well.
fn calls_of(profile: &str, scenario: Scenario) -> Option<BTreeMap<String, u64>> {
    let gpu = Gpu::simulated(profile)?;
    let sim = gpu.sim.as_ref().unwrap();
    // Modules are the test's business.
    let _warm = kernel(&gpu.context, "xor_index_u8");
    sim.clear_calls();
    scenario(&gpu).unwrap();
    drain(&gpu.device);
    let mut calls = BTreeMap::new();
    for call in sim.calls() {
        *calls.entry(call.name).or_insert(0) += 1;
    }
    Some(calls)
}

/// Calls whose failure the test's own cudarc calls would meet are not.
fn is_ours(call: &str) -> bool {
    !["cuModule", "cuLaunch", "cuFunc", "cuCtx"].iter().any(|prefix| call.starts_with(prefix))
}

/// What is not destroyed is left over; and cudarc loses an allocation for which it can not make its events.
fn may_leak(call: &str) -> bool {
    ["Destroy", "Release", "EventCreate"].iter().any(|word| call.contains(word))
}

/// R77: whichever call fails, and whether or not it did its work before it failed: an error or the right bytes, nothing
/// parked, nothing that runs on memory which is gone, and the next transfer is exact.
fn survives_every_failure(profile: &str, scenario: Scenario) {
    let Some(calls) = calls_of(profile, scenario) else { return };
    let calls: Vec<_> = calls.into_iter().filter(|(call, _)| is_ours(call)).collect();
    assert!(calls.len() > 5, "{calls:?}");
    for (call, times) in calls {
        // The polls of an event are as many as time makes them: the first few stand for all.
        let times = if call == "cuEventQuery" { times.min(4) } else { times };
        for nth in 1..=times {
            for after in [false, true] {
                let gpu = Gpu::simulated(profile).unwrap();
                let sim = gpu.sim.as_ref().unwrap();
                let what = format!("{call} {nth} of {times}, after its work: {after}");
                // Work that is still running when the failure comes.
                let gate = sim.gate(gpu.stream.cu_stream() as u64);
                let opener = std::thread::spawn(move || {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                    gate.open();
                });
                match after {
                    false => sim.fail_nth(&call, nth, 999),
                    true => sim.fail_nth_after(&call, nth, 999),
                }
                let result = scenario(&gpu);
                opener.join().unwrap();
                sim.clear_failures();
                if let Err(error) = result {
                    assert!(error.driver_code() == Some(999) || error.is_unsupported(), "{what}: {error}");
                }
                gpu.context.check_err().unwrap_or_else(|error| panic!("{what}: parked {:?}", error.0));
                scenario(&gpu).unwrap_or_else(|error| panic!("{what}: the next transfer: {error}"));
                drain(&gpu.device);
                assert_eq!(sim.violations(), Vec::<String>::new(), "{what}");
                gpu.context.check_err().unwrap_or_else(|error| panic!("{what}: parked {:?}", error.0));
                // A free that failed frees nothing. (Where two threads' errors meet in the one place that cudarc has for them, it
                // may have been taken for an older one.)
                let stats = gpu.device.stats();
                if !may_leak(&call) && !after && stats.leaked + stats.free_errors + stats.stale_errors == 0 {
                    println!("{what}");
                    gpu.finish();
                }
            }
        }
    }
}

#[test]
fn a_staged_transfer_survives_the_failure_of_any_call() {
    survives_every_failure(H200, from_pageable);
}

#[test]
fn a_registered_transfer_survives_the_failure_of_any_call() {
    survives_every_failure(H200, from_registered);
}

#[test]
fn a_pinned_transfer_survives_the_failure_of_any_call() {
    survives_every_failure(H200, from_pinned);
}

#[test]
fn a_tensor_of_zeros_survives_the_failure_of_any_call() {
    survives_every_failure(H200, from_zeros);
}

#[test]
fn a_tensor_in_place_survives_the_failure_of_any_call() {
    survives_every_failure(SPARK, in_place);
    survives_every_failure("jetson_agx_orin_64gb", in_place);
}

/// A failed pinned allocation is no null pointer with a length: it stays refused, or serves when there is room again.
#[test]
fn a_failed_pinned_allocation_leaves_nothing_behind() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let before = sim.evidence().pinned_bytes;
    sim.fail_always("cuMemHostAlloc", 2);
    let error = gpu.device.tensor().strategy(Strategy::ZeroCopy).backing(Backing::Pinned).zeros::<u8>([MIB]);
    assert!(error.unwrap_err().is_out_of_memory());
    // Ordinary memory serves where it was not asked for by name.
    from_pinned(&gpu).unwrap();
    from_pageable(&gpu).unwrap();
    drain(&gpu.device);
    assert_eq!(sim.evidence().pinned_bytes, before);
    sim.clear_failures();
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&[1u8; 100], [100]).unwrap();
    assert!(tensor.is_pinned());
    from_pageable(&gpu).unwrap();
    drop(tensor);
    drain(&gpu.device);
    gpu.finish();
}

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
