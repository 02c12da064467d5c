//! What the copy engine, the pool and the loader do when something goes wrong at the worst moment.

use std::time::Duration;

use transfer_tensor::cudarc::driver::CudaSlice;
use transfer_tensor::{Detector, Device, PoolOptions, WhenFull};

use crate::support::{Gpu, H200, within};

const MIB: usize = 1 << 20;

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8 ^ seed as u8).collect()
}

/// So many slots the engine makes before it waits for one.
const SLOTS: usize = 16;

/// A slot that an earlier upload's copy on another stream still reads is not free because a later copy, which had just taken
/// it, failed.
#[test]
fn a_failed_copy_does_not_free_what_an_earlier_one_uses() {
    for len in [64 << 10, 9 * MIB] {
        for down in [false, true] {
            // More threads have more slots.
            let Some(gpu) = Gpu::simulated(H200).map(Gpu::with_two_threads) else { return };
            let sim = gpu.sim.as_ref().unwrap();
            let (first, second) = (gpu.another_stream(), gpu.another_stream());
            // Smaller ones would share a slot.
            let (early, late) = (pattern((64 << 10) + 1, 1), pattern(64 << 10, 2));
            let mut targets: Vec<CudaSlice<u8>> =
                (0..SLOTS).map(|_| gpu.device.upload_new(&first, &vec![0; early.len()]).unwrap()).collect();
            let mut other: CudaSlice<u8> = gpu.device.upload_new(&second, &vec![0; len]).unwrap();
            let mut third: CudaSlice<u8> = gpu.device.upload_new(&second, &vec![0; late.len()]).unwrap();
            gpu.context.synchronize().unwrap();
            // As many as make all slots busy.
            let gate = gpu.gate(&first);
            for target in &mut targets {
                gpu.device.upload(&first, &early, target).unwrap();
            }
            // Each is asked once; then the oldest is taken, and waited for.
            sim.fail_nth("cuEventQuery", SLOTS as u64 + 1, 999);
            if down {
                gpu.device.download(&second, &other, &mut vec![0; len]).unwrap_err();
            } else {
                gpu.device.upload(&second, &vec![9; len], &mut other).unwrap_err();
            }
            sim.clear_failures();
            // It may have to wait for a slot.
            let gate = gate.open_later();
            gpu.device.upload(&second, &late, &mut third).unwrap();
            drop(gate);
            for target in &targets {
                assert!(gpu.device.download_vec(&first, target).unwrap() == early, "{len} {down}: overwritten");
            }
            assert!(gpu.device.download_vec(&second, &third).unwrap() == late);
            drop((targets, other, third, first, second));
            gpu.finish();
        }
    }
}

/// What copies once needed is not lent for ever: who waits for room within the pool's budget gets it.
#[test]
fn idle_slots_do_not_keep_the_pools_budget() {
    for budget in [4 * MIB, 16 * MIB] {
        let Some(gpu) = Gpu::simulated(H200) else { return };
        let pool = PoolOptions::new().budget(budget as u64);
        let device = Device::builder(&gpu.stream)
            .detector(Detector::new().fs_root(gpu.sim.as_ref().unwrap().host_root()))
            .pool(pool)
            .build()
            .unwrap();
        let source = pattern(40 * MIB, 5);
        let slice = device.upload_new(&gpu.stream, &source).unwrap();
        gpu.stream.synchronize().unwrap();
        let got = device.pool().acquire_or(3 * MIB, WhenFull::Wait(Duration::from_secs(5)));
        assert!(got.is_ok(), "{budget}: {:?}, {:?}", got.err(), device.pool().stats());
        assert!(device.download_vec(&gpu.stream, &slice).unwrap() == source);
        drop((got, slice));
        device.drain(crate::support::HANG).unwrap();
        drop(device);
        gpu.finish();
    }
}

/// Reserving nothing, however often, is done at once.
#[test]
fn reserving_blocks_of_no_bytes_ends() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let pool = gpu.device.pool().clone();
    assert_eq!(within(Duration::from_secs(20), move || pool.reserve(0, 1 << 40)).unwrap(), 0);
    gpu.finish();
}

/// The progress function may use another GPU by way of cudarc, which leaves that one's context current.
#[cfg(feature = "safetensors")]
#[test]
fn a_progress_function_may_leave_another_context_current() {
    let (Some(gpu), Some(other)) = (Gpu::simulated(H200), Gpu::simulated(H200)) else { return };
    for len in [64 << 10, 30 * MIB] {
        let bytes = pattern(len, 7);
        let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes].concat()).unwrap();
        let checkpoint = transfer_tensor::Checkpoint::open(&path).unwrap();
        let note = |_: transfer_tensor::Progress<'_>| {
            other.context.bind_to_thread().unwrap();
            std::ops::ControlFlow::Continue(())
        };
        let mut loaded = checkpoint.load(&gpu.device, &gpu.stream).progress(note).run().unwrap();
        let tensor = loaded.remove("a").unwrap().downcast::<u8>().unwrap();
        assert!(*tensor.host().unwrap() == *bytes);
        // Nothing of the other context is left among ours.
        drop(gpu.device.upload_new(&gpu.stream, &bytes).unwrap());
        drop((tensor, loaded));
    }
    other.finish();
    gpu.finish();
}
