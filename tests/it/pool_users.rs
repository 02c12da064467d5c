//! What memory the driver is handed, and when what is page-locked beside the pool ends.

use cuda_sim::MemoryKind;
use transfer_tensor::cudarc::driver::{CudaSlice, sys};
use transfer_tensor::{Backing, PoolOptions, Strategy};

use crate::machines::{code, drain, pattern};
use crate::pool::{CALLS, CONFIDENTIAL, end, transfers_are_right, until, with_pool};
use crate::support::{Gpu, H200, HANG, SPARK, within};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// `CU_MEMHOSTALLOC_WRITECOMBINED`.
const WRITE_COMBINED: u64 = 4;

/// R31: a copy that is called asynchronous waits, where the memory is pageable: none is given any.
#[test]
fn downloads_never_name_pageable_memory_to_the_driver() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30));
    let mut expected = 0;
    for bytes in [1, 4097, 300 * KIB, 3 * MIB + 1, 20 * MIB + 5] {
        let values = pattern(bytes, 4);
        let slice: CudaSlice<u8> = device.upload_new(&gpu.stream, &values).unwrap();
        let mut target = vec![0u8; bytes];
        device.download(&gpu.stream, &slice, &mut target).unwrap();
        assert!(target == values && device.download_vec(&gpu.stream, &slice).unwrap() == values);
        // A tensor over the caller's own memory, both ways.
        let mut tensor = device.tensor().strategy(Strategy::Streamed).from_vec(target, [bytes]).unwrap();
        assert!(!tensor.is_pinned());
        drop(tensor.device_mut(&gpu.stream).unwrap());
        assert!(*tensor.host().unwrap() == *values);
        expected += 3 * bytes as u64;
    }
    gpu.context.synchronize().unwrap();
    let evidence = sim.evidence();
    assert_eq!((evidence.copied_d2h_pageable, evidence.copied_d2h_pinned), (0, expected));
    assert_eq!(sim.count("cuMemcpyDtoH"), 0, "the call that waits");
    assert!(sim.count("cuMemcpyDtoHAsync") > 0);
    end(gpu, device);
}

/// R31: so a download is submitted while its stream is held, wherever the host side is from the pool.
#[test]
fn submitting_a_download_to_pinned_memory_does_not_wait() {
    let gpu = Gpu::any(H200);
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30));
    let values = pattern(20 * MIB + 5, 5);
    let mut tensor = device.tensor().strategy(Strategy::Streamed).from_slice(&values, [values.len()]).unwrap();
    // Warm: what is needed is allocated.
    drop(tensor.device_mut(&gpu.stream).unwrap());
    let mut tensor = tensor.to_host().unwrap().wait().unwrap();
    assert!(tensor.is_pinned());
    gpu.stream.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    drop(tensor.device_mut(&gpu.stream).unwrap());
    let transfer = within(HANG, move || tensor.to_host().unwrap());
    let refused = transfer.try_wait().unwrap_err();
    assert!(refused.error.is_not_ready(), "{}", refused.error);
    gate.open();
    let tensor = refused.value.wait().unwrap();
    assert!(*tensor.host().unwrap() == *values);
    drop(tensor);
    end(gpu, device);
}

/// R32: memory that the system keeps in place is not page-locked for the driver.
#[cfg(target_os = "linux")]
#[test]
fn a_locked_vec_is_not_pinned() {
    let gpu = Gpu::any(H200);
    let values = pattern(64 * KIB, 6);
    let (address, bytes) = (values.as_ptr(), values.len());
    // SAFETY: the range is the vector's, and unlocked before it goes.
    let locked = unsafe { libc::mlock(address.cast(), bytes) } == 0;
    if !locked {
        eprintln!("mlock was refused ({}): nothing to see", std::io::Error::last_os_error());
    }
    let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_vec(values, [bytes]).unwrap();
    assert_eq!(tensor.host().unwrap().as_ptr(), address);
    assert!(!tensor.is_pinned());
    if let Some(sim) = &gpu.sim {
        assert_eq!(sim.memory_kind(address as u64), MemoryKind::Pageable);
    }
    drop(tensor.device_mut(&gpu.stream).unwrap());
    assert!(*tensor.host().unwrap() == *pattern(bytes, 6));
    if let Some(sim) = &gpu.sim {
        // It travels as pageable memory does.
        let evidence = sim.evidence();
        assert_eq!((evidence.copied_h2d_pageable, evidence.copied_d2h_pageable), (0, 0));
    }
    let values = tensor.into_vec().unwrap();
    if locked {
        // SAFETY: locked above.
        assert_eq!(unsafe { libc::munlock(address.cast(), bytes) }, 0);
    }
    drop(values);
    gpu.finish();
}

/// R35: unregistering may take a second a gigabyte: who drops does not do it.
#[test]
fn unpinning_is_another_threads_work() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let options = || gpu.device.tensor().strategy(Strategy::Streamed).pin(true);
    let threads = |name: &str| -> Vec<u64> {
        sim.calls().iter().filter(|call| call.name.starts_with(name)).map(|call| call.thread).collect()
    };
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30).keep_idle(0));
    let last = with_pool(&gpu, PoolOptions::new().budget(1 << 30));
    // Making a device asks what the driver can do.
    sim.clear_calls();
    let tensor = options().from_vec(pattern(MIB, 1), [MIB]).unwrap();
    let shared = options().from_shared_bytes::<u8, _>(std::sync::Arc::new(pattern(MIB, 2)), 0..MIB, [MIB]).unwrap();
    assert!(tensor.is_pinned() && shared.is_pinned());
    let here = threads(CALLS[1])[0];
    drop((tensor, shared));
    // Blocks that are not kept, from either source.
    for bytes in [MIB, 5 * MIB] {
        drop(device.pool().acquire(bytes).unwrap());
    }
    // And those that are there when the last handle goes.
    for bytes in [MIB, 5 * MIB] {
        drop(last.pool().acquire(bytes).unwrap());
    }
    assert_eq!(last.pool().stats().idle, 6 << 20);
    drop(last);
    drain(&gpu.device);
    drain(&device);
    assert_eq!(device.pool().stats().reserved, 0);
    until(|| threads(CALLS[3]).len() == 4 && threads(CALLS[2]).len() == 2);
    assert!(threads(CALLS[0]).iter().all(|&thread| thread == here), "what is made is made here");
    for call in &CALLS[2..] {
        assert!(threads(call).iter().all(|&thread| thread != here), "{call}");
    }
    end(gpu, device);
}

/// R30: the CPU reads write-combined memory at a tenth of the speed.
#[test]
fn nothing_is_write_combined() {
    for profile in [H200, CONFIDENTIAL, SPARK] {
        let gpu = Gpu::any(profile);
        let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30));
        gpu.context.bind_to_thread().unwrap();
        let not_combined = |address: *const u8| {
            let mut flags = 0;
            // SAFETY: a valid place for the answer; the driver checks the address.
            assert_eq!(code(unsafe { sys::cuMemHostGetFlags(&raw mut flags, address.cast_mut().cast()) }), 0);
            assert_eq!(u64::from(flags) & WRITE_COMBINED, 0, "{profile}");
        };
        for bytes in [1, 64 * KIB, 5 * MIB] {
            not_combined(device.pool().acquire(bytes).unwrap().as_ptr());
        }
        if device.platform().capabilities().can_register {
            let options = device.tensor().strategy(Strategy::ZeroCopy).backing(Backing::Pinned);
            not_combined(options.zeros::<u8>([5 * MIB]).unwrap().host().unwrap().as_ptr());
        }
        transfers_are_right(&gpu, &device);
        if let Some(sim) = &gpu.sim {
            let allocations: Vec<_> = sim.calls().into_iter().filter(|call| call.name == CALLS[0]).collect();
            assert!(!allocations.is_empty());
            assert!(allocations.iter().all(|call| call.args[0] & WRITE_COMBINED == 0), "{profile}: {allocations:?}");
        }
        end(gpu, device);
    }
}
