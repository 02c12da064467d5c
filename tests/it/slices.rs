//! One-shot copies between cudarc slices and ordinary memory.

use std::sync::Arc;

use proptest::prelude::*;
use transfer_tensor::cudarc::driver::{CudaContext, CudaSlice};

use crate::support::{GH200, Gpu, H200, HANG, SPARK, within};

const MIB: usize = 1 << 20;

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8 ^ seed as u8).collect()
}

#[test]
fn bytes_arrive_at_every_size_and_address() {
    for profile in [H200, GH200, SPARK] {
        let gpu = Gpu::any(profile);
        let sizes = [1, 4095, 4096, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 4 * MIB + 1, 13 * MIB + 5];
        for len in sizes {
            for offset in [0, 1, 3, 63] {
                if len > MIB && (profile != H200 || offset % 3 > 0) {
                    continue;
                }
                let source = pattern(len + offset, offset);
                let slice: CudaSlice<u8> = gpu.device.upload_new(&gpu.stream, &source[offset..]).unwrap();
                let mut target = vec![0xeeu8; len + offset + 7];
                gpu.device.download(&gpu.stream, &slice, &mut target[offset..]).unwrap();
                assert!(target[offset..offset + len] == source[offset..], "{profile}: {len} at {offset}");
                assert!(target[..offset].iter().chain(&target[offset + len..]).all(|&byte| byte == 0xee));
                assert!(gpu.device.download_vec(&gpu.stream, &slice).unwrap() == source[offset..]);
            }
        }
        gpu.finish();
    }
}

/// R86's neighbours: source and target share a huge page, and the copy is between two of its parts.
#[test]
fn source_and_target_may_lie_in_one_huge_page() {
    let gpu = Gpu::any(H200);
    let mut both = pattern(2 * MIB, 1);
    let (source, target) = both.split_at_mut(MIB);
    let slice = gpu.device.upload_new(&gpu.stream, source).unwrap();
    gpu.device.download(&gpu.stream, &slice, target).unwrap();
    assert!(source == target);
    drop(slice);
    gpu.finish();
}

/// More than 32 bits can count, and odd. On the simulator it takes 13 GiB of memory: with `TRANSFER_TENSOR_LARGE=1`.
#[test]
fn more_than_four_gib_travel_at_once() {
    if std::env::var_os("TRANSFER_TENSOR_LARGE").is_none() && crate::support::driver() == cuda_sim::Driver::Simulated {
        return;
    }
    let gpu = Gpu::any(H200);
    let len = (4 << 30) + 5 * MIB + 3;
    let block = pattern(MIB + 1, 9);
    let mut source = Vec::with_capacity(len + block.len());
    while source.len() < len {
        source.extend_from_slice(&block);
    }
    source.truncate(len);
    let slice = gpu.device.upload_new(&gpu.stream, &source).unwrap();
    assert!(gpu.device.download_vec(&gpu.stream, &slice).unwrap() == source);
    source.iter_mut().step_by(4096).for_each(|byte| *byte = 0);
    gpu.device.download(&gpu.stream, &slice, &mut source).unwrap();
    assert!(source.chunks(block.len()).all(|chunk| chunk == &block[..chunk.len()]));
    drop(slice);
    gpu.finish();
}

#[test]
fn refusals_name_the_values() {
    let gpu = Gpu::any(H200);
    let mut short: CudaSlice<u32> = gpu.device.upload_new(&gpu.stream, &[1u32, 2]).unwrap();
    let error = gpu.device.upload(&gpu.stream, &[1u32, 2, 3], &mut short).unwrap_err();
    assert!(error.is_invalid_input() && error.to_string().contains("0..3"), "{error}");
    let error = gpu.device.download(&gpu.stream, &short, &mut [0u32]).unwrap_err();
    assert!(error.is_invalid_input(), "{error}");
    let mut values = [7u32; 3];
    gpu.device.download(&gpu.stream, &short.slice(1..), &mut values).unwrap();
    assert_eq!(values, [2, 7, 7]);
    // Nothing is a valid copy, but no slice of the driver's.
    gpu.device.upload(&gpu.stream, &[0u32; 0], &mut short).unwrap();
    gpu.device.download(&gpu.stream, &short.slice(2..), &mut []).unwrap();
    assert!(gpu.device.upload_new(&gpu.stream, &[0u32; 0]).unwrap_err().is_unsupported());
    drop(short);
    gpu.finish();
}

#[test]
fn a_bool_is_looked_at_before_it_is_handed_out() {
    let gpu = Gpu::any(H200);
    let bytes: CudaSlice<u8> = gpu.device.upload_new(&gpu.stream, &[0u8, 1, 2]).unwrap();
    {
        // SAFETY: as long and aligned; what the bytes are is what the test is about.
        let flags = unsafe { bytes.transmute::<bool>(3).unwrap() };
        let error = gpu.device.download_vec(&gpu.stream, &flags).unwrap_err();
        assert!(error.to_string().contains("element 2"), "{error}");
        let mut target = [true; 3];
        gpu.device.download(&gpu.stream, &flags, &mut target).unwrap_err();
        assert_eq!(target, [true; 3]);
        let two = flags.slice(..2);
        assert_eq!(gpu.device.download_vec(&gpu.stream, &two).unwrap(), [false, true]);
    }
    drop(bytes);
    gpu.finish();
}

/// On Grace the copy engine reads ordinary memory itself: nothing passes through pinned memory.
#[test]
fn a_coherent_link_needs_no_detour() {
    let Some(gpu) = Gpu::simulated(GH200) else { return };
    let pinned = gpu.device.pool().stats().made;
    let source = pattern(10 * MIB, 3);
    let slice = gpu.device.upload_new(&gpu.stream, &source).unwrap();
    assert!(gpu.device.download_vec(&gpu.stream, &slice).unwrap() == source);
    assert_eq!(gpu.device.pool().stats().made, pinned);
    drop(slice);
    gpu.finish();
}

/// Several callers at once, each with its own bytes; and uploads do not wait for the copies of those before.
#[test]
fn callers_do_not_disturb_each_other() {
    let gpu = Gpu::any(H200);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let gpu = &gpu;
            scope.spawn(move || {
                let stream = gpu.another_stream();
                for round in 0..2 {
                    let source = pattern(4 * MIB + seed * 1000 + round, seed * 16 + round);
                    let mut slice = gpu.device.upload_new(&stream, &source).unwrap();
                    let other = pattern(source.len(), 77);
                    gpu.device.upload(&stream, &other, &mut slice).unwrap();
                    gpu.device.upload(&stream, &source, &mut slice).unwrap();
                    assert!(gpu.device.download_vec(&stream, &slice).unwrap() == source);
                }
            });
        }
    });
    gpu.finish();
}

/// A copy that waits for its stream holds up no copy on another.
#[test]
fn a_held_stream_holds_up_no_other() {
    within(HANG, || {
        let gpu = Gpu::any(H200);
        let source = pattern(2 * MIB, 3);
        let mut held = gpu.device.upload_new(&gpu.stream, &source).unwrap();
        let free = gpu.another_stream();
        let mut slice = gpu.device.upload_new(&free, &source).unwrap();
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let waiting = gpu.device.upload_owned(&gpu.stream, vec![1u8; 2 * MIB]).unwrap();
        gpu.device.upload(&gpu.stream, &source[..MIB], &mut held).unwrap();
        let other = pattern(2 * MIB, 4);
        gpu.device.upload(&free, &other, &mut slice).unwrap();
        assert!(gpu.device.download_vec(&free, &slice).unwrap() == other);
        gate.open();
        drop((waiting.wait().unwrap(), held, slice, free));
        gpu.finish();
    });
}

/// What follows on the stream comes after the pieces, whichever lanes they took.
#[test]
fn the_stream_goes_on_when_all_has_arrived() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let source = pattern(9 * MIB + 3, 5);
    let mut slice = gpu.device.upload_new(&gpu.stream, &source).unwrap();
    for round in 0..4 {
        let source = pattern(source.len(), round);
        gpu.device.upload(&gpu.stream, &source, &mut slice).unwrap();
        let mut tensor = gpu.on_device(&vec![0; source.len()]);
        let from = gpu.device.tensor().from_shared_cuda_slice(Arc::new(slice), [source.len()]).unwrap();
        kernels.copy(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), &from.device(&gpu.stream).unwrap());
        assert!(*tensor.host().unwrap() == *source);
        drop(from);
        slice = gpu.device.upload_new(&gpu.stream, &source).unwrap();
    }
    drop((slice, kernels));
    gpu.finish();
}

/// More blocks than there are slots: none is filled again before its block has travelled, none emptied before it is there.
#[test]
fn a_slot_is_used_again_when_its_block_has_arrived() {
    let gpu = Gpu::any(H200);
    // So that nothing is allocated behind the gate.
    let mut slice = gpu.device.upload_new(&gpu.stream, &pattern(40 * MIB + 1, 1)).unwrap();
    let mut target = gpu.device.download_vec(&gpu.stream, &slice).unwrap();
    let source = pattern(40 * MIB + 1, 2);
    let opener = gpu.gate(&gpu.stream).open_later();
    gpu.device.upload(&gpu.stream, &source, &mut slice).unwrap();
    assert!(opener.opened(), "filled while it was held");
    drop(opener);
    let opener = gpu.gate(&gpu.stream).open_later();
    gpu.device.download(&gpu.stream, &slice, &mut target).unwrap();
    assert!(opener.opened(), "emptied while it was held");
    drop(opener);
    assert!(target == source);
    drop(slice);
    gpu.finish();
}

/// The next copy takes other slots than one that is held.
#[test]
fn a_slot_that_still_travels_is_not_used_again() {
    let gpu = Gpu::any(H200);
    // So that nothing is allocated behind the gate.
    let warm = gpu.device.upload_new(&gpu.stream, &pattern(40 * MIB, 1)).unwrap();
    let sources = [2, 3].map(|seed| pattern(3 * MIB + 1, seed));
    let mut slices =
        sources.each_ref().map(|source| gpu.device.upload_new(&gpu.stream, &vec![0u8; source.len()]).unwrap());
    gpu.stream.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    for (source, slice) in sources.iter().zip(&mut slices) {
        gpu.device.upload(&gpu.stream, source, slice).unwrap();
    }
    gate.open();
    for (source, slice) in sources.iter().zip(&slices) {
        assert!(gpu.stream.clone_dtoh(slice).unwrap() == *source);
    }
    drop((warm, slices));
    gpu.finish();
}

/// A copy comes after what its stream was given before, and the stream goes on after it; with one slot and with several, on a
/// stream of the caller's and on a thread's default one, which is another for the threads that help.
#[test]
fn a_copy_has_its_place_on_the_stream() {
    for gpu in [Gpu::any(H200), Gpu::on_stream(H200, CudaContext::per_thread_stream)] {
        has_its_place(&gpu);
        gpu.finish();
    }
}

fn has_its_place(gpu: &Gpu) {
    for len in [100_000, 7 * MIB + 5] {
        let (before, source) = (pattern(len, 1), pattern(len, 2));
        let mut slice = gpu.device.upload_new(&gpu.stream, &before).unwrap();
        assert!(gpu.device.download_vec(&gpu.stream, &slice).unwrap() == before);

        let gate = gpu.gate(&gpu.stream);
        gpu.stream.memset_zeros(&mut slice).unwrap();
        gpu.device.upload(&gpu.stream, &source, &mut slice).unwrap();
        gate.open();
        assert!(gpu.device.download_vec(&gpu.stream, &slice).unwrap() == source, "{len}: uploaded too early");

        let gate = gpu.gate(&gpu.stream);
        gpu.device.upload(&gpu.stream, &before, &mut slice).unwrap();
        gpu.stream.memset_zeros(&mut slice).unwrap();
        gate.open();
        gpu.stream.synchronize().unwrap();
        assert!(gpu.stream.clone_dtoh(&slice).unwrap().iter().all(|&byte| byte == 0), "{len}: uploaded too late");

        gpu.device.upload(&gpu.stream, &before, &mut slice).unwrap();
        gpu.stream.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        gpu.stream.memset_zeros(&mut slice).unwrap();
        let opener = gate.open_later();
        let values = gpu.device.download_vec(&gpu.stream, &slice).unwrap();
        assert!(values.iter().all(|&byte| byte == 0), "{len}: downloaded too early");
        drop(opener);
    }
}

/// Where the copy engine is at the caller's memory itself, the call returns when it is done with it. (The simulator's driver
/// waits by itself, as a real one might: that the crate waits as well is seen from its calls.)
#[test]
fn memory_that_the_copy_engine_reaches_is_the_callers_again_on_return() {
    let Some(gpu) = Gpu::simulated(GH200) else { return };
    let waits = || gpu.sim.as_ref().unwrap().count("cuStreamSynchronize");
    let source = pattern(MIB, 1);
    let mut slice = gpu.device.upload_new(&gpu.stream, &pattern(MIB, 2)).unwrap();
    gpu.stream.synchronize().unwrap();
    let (opener, before) = (gpu.gate(&gpu.stream).open_later(), waits());
    gpu.device.upload(&gpu.stream, &source, &mut slice).unwrap();
    assert!(opener.opened() && waits() > before, "the source is yet to be read");
    drop(opener);
    let mut target = vec![0; MIB];
    let (opener, before) = (gpu.gate(&gpu.stream).open_later(), waits());
    gpu.device.download(&gpu.stream, &slice, &mut target).unwrap();
    assert!(opener.opened() && waits() > before, "the target is yet to be written");
    drop(opener);
    assert!(target == source);
    drop(slice);
    gpu.finish();
}

/// A block that the driver refuses never travels: whoever waits for its slot goes home, with the error.
#[test]
fn nobody_waits_for_a_block_that_was_refused() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let gpu = within(HANG, move || {
        let sim = gpu.sim.as_ref().unwrap();
        let (source, mut target) = (pattern(48 * MIB, 1), vec![0; 48 * MIB]);
        let mut slice = gpu.device.upload_new(&gpu.stream, &source).unwrap();
        gpu.device.download(&gpu.stream, &slice, &mut target).unwrap();
        // The first blocks are held until all threads are there; one behind them is refused.
        let opener = gpu.gate(&gpu.stream).open_later();
        sim.fail_nth("cuMemcpyHtoDAsync", 6, 999);
        let error = gpu.device.upload(&gpu.stream, &source, &mut slice).unwrap_err();
        assert_eq!(error.driver_code(), Some(999), "{error}");
        drop(opener);
        let opener = gpu.gate(&gpu.stream).open_later();
        sim.fail_nth("cuMemcpyDtoHAsync", 6, 999);
        let error = gpu.device.download(&gpu.stream, &slice, &mut target).unwrap_err();
        assert_eq!(error.driver_code(), Some(999), "{error}");
        drop(opener);
        sim.clear_failures();
        gpu.device.upload(&gpu.stream, &source, &mut slice).unwrap();
        assert!(gpu.device.download_vec(&gpu.stream, &slice).unwrap() == source);
        drop(slice);
        gpu
    });
    gpu.finish();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn any_part_of_any_vec_travels(len in 1usize..3_000_000, from in 0usize..64, seed in 0usize..256) {
        let gpu = Gpu::any(H200);
        let source = pattern(len + from, seed);
        let slice = gpu.device.upload_new(&gpu.stream, &source[from..]).unwrap();
        prop_assert!(gpu.device.download_vec(&gpu.stream, &slice).unwrap() == source[from..]);
        drop(slice);
        gpu.finish();
    }
}
