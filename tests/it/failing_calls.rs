//! Every driver call of a transfer fails once: what is left behind (field report R77).

use std::collections::BTreeMap;
use std::sync::LazyLock;

use transfer_tensor::cudarc::driver::{LaunchConfig, PushKernelArg};
use transfer_tensor::{Backing, Error, Refused, Strategy, TransferTensor};

use crate::machines::{drain, kernel, pattern};
use crate::support::{Gpu, H200, SPARK};

const MIB: usize = 1 << 20;
const PART: usize = 100_000;

/// One way to move bytes there and back; an error at any point of it comes out, with what was handed in.
pub(crate) type Scenario = fn(&Gpu) -> Result<(), Error>;

/// More pieces than two threads have staging slots.
const STAGED: usize = 2 * MIB + 12_345;

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

pub(crate) fn from_pageable(gpu: &Gpu) -> Result<(), Error> {
    static BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| pattern(STAGED, 3));
    let bytes = BYTES.clone();
    let options = || gpu.device.tensor().strategy(Strategy::Streamed);
    let tensor = again_if_refused(options().from_vec(bytes.clone(), [STAGED]), |v| options().from_vec(v, [STAGED]))?;
    there_changed_and_back(gpu, tensor, &bytes)
}

pub(crate) fn from_registered(gpu: &Gpu) -> Result<(), Error> {
    let bytes = pattern(PART + 1, 4);
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).pin(true).from_vec(bytes.clone(), [PART + 1]);
    there_changed_and_back(gpu, tensor?, &bytes)
}

pub(crate) fn from_pinned(gpu: &Gpu) -> Result<(), Error> {
    let bytes = pattern(PART + 7, 5);
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&bytes, [PART + 7])?;
    there_changed_and_back(gpu, tensor, &bytes)
}

pub(crate) fn in_place(gpu: &Gpu) -> Result<(), Error> {
    let bytes = pattern(PART + 9, 6);
    let tensor = gpu.device.tensor().strategy(Strategy::ZeroCopy).from_slice(&bytes, [PART + 9])?;
    there_changed_and_back(gpu, tensor, &bytes)
}

pub(crate) fn from_zeros(gpu: &Gpu) -> Result<(), Error> {
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
pub(crate) fn survives_every_failure(profile: &str, scenario: Scenario) {
    let Some(calls) = calls_of(profile, scenario) else { return };
    let calls: Vec<_> = calls.into_iter().filter(|(call, _)| is_ours(call)).collect();
    assert!(calls.len() > 5, "{calls:?}");
    for (call, times) in calls {
        // The polls of an event are as many as time makes them, and each enters the context: the first few stand for all.
        let times = match call.as_str() {
            "cuEventQuery" => times.min(4),
            "cuThreadExchangeStreamCaptureMode" => times.min(40),
            _ => times,
        };
        for nth in 1..=times {
            // Memory that is registered although the driver said it is not: nobody can know, and it would stay so for other tests.
            let after: &[bool] = if call == "cuMemHostRegister_v2" { &[false] } else { &[false, true] };
            for &after in after {
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

/// What was submitted of a copy before one of its calls failed has run when the error comes out: neither the staging slots nor
/// the caller's memory are touched any more.
#[test]
fn a_copy_that_fails_half_way_is_drained_before_its_error() {
    let cases = [
        ("cuMemcpyHtoDAsync", 2, STAGED, true),
        ("cuMemcpyDtoHAsync", 2, STAGED, false),
        // The event behind all of a copy whose blocks have a place each, and one behind a block whose place another needs.
        ("cuEventRecord", 1, STAGED, true),
        ("cuEventRecord", 2, 12 * MIB, true),
    ];
    for (call, nth, len, upload) in cases {
        // More threads have more places, and need none again.
        let Some(gpu) = Gpu::simulated(H200).map(Gpu::with_two_threads) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        let bytes = pattern(len, 7);
        let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_vec(bytes.clone(), [len]).unwrap();
        // So that nothing is allocated behind the gate.
        drop(tensor.device_mut(&gpu.stream).unwrap());
        gpu.stream.synchronize().unwrap();
        if upload {
            drop(tensor.host_mut().unwrap());
        }
        let opener = if upload {
            let opener = gpu.gate(&gpu.stream).open_later();
            sim.fail_nth(call, nth, 999);
            let error = tensor.device_mut(&gpu.stream).map(drop).expect_err(call);
            assert_eq!(error.driver_code(), Some(999), "{call}: {error}");
            opener
        } else {
            let gate = gpu.gate(&gpu.stream);
            // A write on the held stream, which the download comes after.
            drop(tensor.device_mut(&gpu.stream).unwrap());
            let opener = gate.open_later();
            sim.fail_nth(call, nth, 999);
            let error = tensor.host().map(drop).expect_err(call);
            assert_eq!(error.driver_code(), Some(999), "{call}: {error}");
            opener
        };
        assert!(opener.opened(), "{call}: the error came while the first piece was on its way");
        sim.clear_failures();
        assert!(*tensor.host().unwrap() == *bytes);
        drop(tensor);
        drain(&gpu.device);
        gpu.finish();
    }
}
