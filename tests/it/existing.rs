//! Tensors made from memory that exists, and turned back into it.

use std::io::Write;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::Mmap;
use transfer_tensor::cudarc::driver::{CudaContext, CudaSlice, DevicePtr};
use transfer_tensor::{Backing, Direction, Strategy, TensorOptions, TransferTensor};

use crate::machines::{drain, pattern, xor_on_device, xor_on_host};
use crate::support::{Gpu, H200, SPARK};

#[test]
fn a_vec_comes_back_as_it_went() {
    let values: Vec<u64> = (0..5000).collect();
    let address = values.as_ptr();
    let tensor = TransferTensor::from_vec(values, [5000]).unwrap();
    let values = tensor.into_vec().unwrap();
    assert_eq!(values.as_ptr(), address);
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        let mut kept = values.clone();
        for pin in [false, true] {
            let address = kept.as_ptr();
            let mut tensor = gpu.device.tensor().pin(pin).from_vec(kept, [5000]).unwrap();
            if profile == SPARK && gpu.sim.is_some() {
                // One memory: the Vec itself is what the device uses.
                assert!(tensor.is_zero_copy());
                assert_eq!(tensor.device(&gpu.stream).unwrap().address(), address as u64);
                assert_eq!(tensor.copied_bytes(), (0, 0));
            }
            xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
            xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
            kept = tensor.into_vec().unwrap();
            assert_eq!(kept.as_ptr(), address, "{profile} {pin}");
            assert_eq!(kept, values);
        }
        gpu.finish();
    }
}

#[test]
fn values_come_back_from_a_refusal() {
    let gpu = Gpu::any(H200);
    let values = vec![1u8, 2, 3];
    let address = values.as_ptr();
    let refused = TransferTensor::from_vec(values, [4]).unwrap_err();
    assert!(refused.error.is_invalid_input() && refused.error.to_string().contains("[4]"), "{}", refused.error);
    let refused = gpu.device.tensor().strategy(Strategy::Coherent).from_vec(refused.value, [3]).unwrap_err();
    assert!(refused.error.is_unsupported(), "{}", refused.error);
    let refused =
        gpu.device.tensor().backing(Backing::Device).strategy(Strategy::ZeroCopy).from_vec(refused.value, [3]);
    let refused = refused.unwrap_err();
    assert!(refused.error.is_unsupported(), "{}", refused.error);
    assert_eq!(refused.value.as_ptr(), address);
    assert!(gpu.device.tensor().from_slice(&[1u8, 2], [3]).unwrap_err().is_invalid_input());
    gpu.finish();
}

fn mapped(bytes: &[u8]) -> Arc<Mmap> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    // SAFETY: nobody else has the file, which is not changed while it is mapped.
    Arc::new(unsafe { Mmap::map(&file) }.unwrap())
}

#[test]
fn parts_of_a_mapped_file_become_tensors() {
    for profile in [H200, SPARK, "gh200_480gb_numa"] {
        let gpu = match profile {
            H200 => Gpu::any(H200),
            _ => match Gpu::simulated(profile) {
                Some(gpu) => gpu,
                None => return,
            },
        };
        let bytes = pattern(1 << 20, 3);
        let map = mapped(&bytes);
        let of = |range, shape: &[usize]| gpu.device.tensor().from_shared_bytes::<u32, _>(map.clone(), range, shape);
        let mut tensor = of(4096..4096 + 400, &[10, 10]).unwrap();
        let expected: Vec<u32> =
            bytes[4096..4496].chunks(4).map(|four| u32::from_le_bytes(four.try_into().unwrap())).collect();
        assert_eq!(*tensor.host().unwrap(), *expected);
        assert_eq!(gpu.stream.clone_dtoh(&tensor.device(&gpu.stream).unwrap()).unwrap(), expected);
        gpu.stream.synchronize().unwrap();
        // Others may read it, so nobody writes to it.
        assert!(tensor.host_mut().unwrap_err().to_string().contains("read-only"));
        assert!(tensor.device_mut(&gpu.stream).unwrap_err().is_unsupported());
        assert!(tensor.view_mut(0..1).unwrap().host_mut().is_err());
        let refused = tensor.into_cuda_slice().unwrap_err();
        assert!(refused.error.is_unsupported());
        assert_eq!(refused.value.into_vec().unwrap(), expected);
        // Bad parts.
        assert!(of(4097..4497, &[100]).unwrap_err().to_string().contains("aligned"));
        assert!(of((1 << 20) - 4..(1 << 20) + 4, &[2]).unwrap_err().is_invalid_input());
        assert!(of(0..401, &[100]).unwrap_err().is_invalid_input());
        assert!(of(0..400, &[101]).unwrap_err().is_invalid_input());
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = of(8..4, &[1]);
        assert!(reversed.unwrap_err().is_invalid_input());
        assert_eq!(of(5..5, &[0]).unwrap().len(), 0);
        let backwards = gpu.device.tensor().direction(Direction::DeviceToHost);
        assert!(backwards.from_shared_bytes::<u8, _>(map.clone(), 0..8, [8]).unwrap_err().is_unsupported());
        drain(&gpu.device);
        // Nobody holds the map any more.
        assert_eq!(Arc::strong_count(&map), 1);
        gpu.finish();
    }
}

#[test]
fn a_slice_is_adopted_and_given_back_in_place() {
    let gpu = Gpu::any(H200);
    let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let slice: CudaSlice<f32> = gpu.stream.clone_htod(&values).unwrap();
    let address = slice.device_ptr(&gpu.stream).0;
    let mut tensor = gpu.device.tensor().from_cuda_slice(slice, [10, 100]).unwrap();
    assert_eq!((tensor.strategy(), tensor.backing()), (Strategy::Streamed, Backing::Device));
    assert_eq!(tensor.host_backing(), None);
    assert_eq!(tensor.copied_bytes(), (0, 0));
    assert_eq!(*tensor.host().unwrap(), *values);
    assert_eq!(tensor.copied_bytes(), (0, 4000));
    tensor.view_mut(3..4).unwrap().host_mut().unwrap().fill(-1.0);
    let slice = tensor.into_cuda_slice().unwrap();
    assert_eq!(slice.device_ptr(&gpu.stream).0, address);
    let mut expected = values.clone();
    expected[300..400].fill(-1.0);
    assert_eq!(gpu.stream.clone_dtoh(&slice).unwrap(), expected);
    gpu.stream.synchronize().unwrap();
    // Its length is its own; the slice comes back.
    let refused = gpu.device.tensor().from_cuda_slice(slice, [999]).unwrap_err();
    assert!(refused.error.is_invalid_input());
    let slice = refused.value;
    let refused = TensorOptions::host_only().from_cuda_slice(slice, [1000]).unwrap_err();
    assert!(refused.error.is_unsupported());
    assert_eq!(refused.value.device_ptr(&gpu.stream).0, address);
    drop(refused);
    gpu.finish();
}

#[test]
fn a_tensor_of_ours_becomes_a_slice_that_outlives_everything() {
    let gpu = Gpu::any(H200);
    let slice = {
        let device = transfer_tensor::Device::new(&gpu.stream).unwrap();
        let tensor = device.tensor().from_vec((0..100u16).collect(), [100]).unwrap();
        // Brought there on a stream of ours.
        tensor.to_device().unwrap().wait().unwrap().into_cuda_slice().unwrap()
    };
    assert_eq!(gpu.stream.clone_dtoh(&slice).unwrap(), (0..100).collect::<Vec<u16>>());
    gpu.stream.synchronize().unwrap();
    drop(slice);
    gpu.stream.synchronize().unwrap();
    gpu.context.check_err().unwrap();
}

#[test]
fn a_slice_that_others_hold_is_read_only() {
    let gpu = Gpu::any(H200);
    let slice = Arc::new(gpu.stream.clone_htod(&(0..64i64).collect::<Vec<_>>()).unwrap());
    let mut tensor = gpu.device.tensor().from_shared_cuda_slice(slice.clone(), [64]).unwrap();
    assert!((0..64).eq(tensor.host().unwrap().iter().copied()));
    assert!(tensor.host_mut().is_err() && tensor.device_mut(&gpu.stream).is_err());
    let refused = tensor.into_cuda_slice().unwrap_err();
    assert!(refused.error.is_unsupported());
    drop(refused);
    drain(&gpu.device);
    gpu.stream.synchronize().unwrap();
    assert_eq!(Arc::strong_count(&slice), 1);
    assert_eq!(gpu.stream.clone_dtoh(&*slice).unwrap()[63], 63);
    drop(slice);
    gpu.finish();
}

#[test]
fn a_slice_of_another_context_is_refused() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let Some(other) = Gpu::simulated(H200) else { return };
    let slice = other.stream.clone_htod(&[1u8, 2, 3]).unwrap();
    let refused = gpu.device.tensor().from_cuda_slice(slice, [3]).unwrap_err();
    assert!(refused.error.is_invalid_input() && refused.error.to_string().contains("context"), "{}", refused.error);
    assert_eq!(other.stream.clone_dtoh(&refused.value).unwrap(), [1, 2, 3]);
    let shared = Arc::new(refused.value);
    assert!(gpu.device.tensor().from_shared_cuda_slice(shared.clone(), [3]).is_err());
    drop(shared);
    // Nor is a stream of another context any use.
    let mut tensor = gpu.device.tensor().zeros::<u8>([3]).unwrap();
    assert!(tensor.device(&other.stream).unwrap_err().is_invalid_input());
    assert!(tensor.device_mut(&other.stream).unwrap_err().is_invalid_input());
    assert!(tensor.release_host(&other.stream).unwrap_err().is_invalid_input());
    drop(tensor);
    gpu.finish();
    other.finish();
}

/// Tells when it goes.
#[allow(dead_code)] // Only kept.
struct Owner(Arc<()>);

#[test]
fn raw_host_memory_is_used_in_place_until_its_owner_may_go() {
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        let alive = Arc::new(());
        let mut memory = pattern(10_000, 4);
        let expected = {
            let mut changed = memory.clone();
            xor_on_host(&mut changed);
            changed
        };
        let start = NonNull::new(memory.as_mut_ptr()).unwrap();
        for pin in [false, true] {
            let options = gpu.device.tensor().pin(pin);
            // SAFETY: the Vec stays, unmoved and untouched, until the owner is gone (waited for below).
            let tensor = unsafe { options.from_raw_host(start, [100, 100], Owner(alive.clone())) };
            let mut tensor = tensor.unwrap();
            xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
            assert!(*tensor.host().unwrap() == *expected);
            xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
            assert_eq!(Arc::strong_count(&alive), 2);
            // A copy: the memory is not a Vec's.
            assert_eq!(tensor.into_vec().unwrap(), pattern(10_000, 4));
            drain(&gpu.device);
            assert_eq!(Arc::strong_count(&alive), 1);
        }
        assert_eq!(memory, pattern(10_000, 4));
        // A bad address: the owner goes at once.
        // SAFETY: refused before it is looked at.
        let refused =
            unsafe { gpu.device.tensor().from_raw_host(start.add(1).cast::<u16>(), [2], Owner(alive.clone())) };
        let aligned = (start.as_ptr() as usize + 1).is_multiple_of(2);
        assert!(aligned || refused.unwrap_err().is_invalid_input());
        drain(&gpu.device);
        assert_eq!(Arc::strong_count(&alive), 1);
        gpu.finish();
    }
}

#[test]
fn raw_device_memory_is_used_in_place_until_its_owner_may_go() {
    let gpu = Gpu::any(H200);
    let slice = gpu.stream.clone_htod(&pattern(4096, 5)).unwrap();
    gpu.stream.synchronize().unwrap();
    let (address, alive) = (slice.device_ptr(&gpu.stream).0, Arc::new(()));
    // SAFETY: the owner keeps the slice, which nobody else has; the stream is idle.
    let tensor = unsafe { gpu.device.tensor().from_raw_device::<u8>(address, [4096], (slice, Owner(alive.clone()))) };
    let mut tensor = tensor.unwrap();
    assert_eq!(tensor.device(&gpu.stream).unwrap().address(), address);
    xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
    let mut expected = pattern(4096, 5);
    xor_on_host(&mut expected);
    assert_eq!(*tensor.host().unwrap(), *expected);
    assert_eq!(Arc::strong_count(&alive), 2);
    let refused = tensor.into_cuda_slice().unwrap_err();
    assert!(refused.error.is_unsupported());
    drop(refused);
    drain(&gpu.device);
    assert_eq!(Arc::strong_count(&alive), 1);
    // SAFETY: refused before it is looked at.
    let refused = unsafe { gpu.device.tensor().from_raw_device::<u32>(address + 2, [1], Owner(alive.clone())) };
    assert!(refused.unwrap_err().is_invalid_input());
    // SAFETY: as above.
    let refused = unsafe { TensorOptions::host_only().from_raw_device::<u32>(address, [1], Owner(alive.clone())) };
    assert!(refused.unwrap_err().is_unsupported());
    assert_eq!(Arc::strong_count(&alive), 1);
    gpu.finish();
}

/// What one handle of a device's context makes, another handle's stream may use: contexts are told apart by CUDA's handle.
#[test]
fn two_handles_of_one_context_are_one_context() {
    let gpu = Gpu::any(H200);
    let other = CudaContext::new(gpu.context.ordinal()).unwrap();
    let stream = other.default_stream();
    let mut tensor = gpu.device.tensor().from_vec(pattern(1000, 6), [1000]).unwrap();
    xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
    xor_on_device(&other, &stream, &mut tensor.device_mut(&stream).unwrap());
    assert_eq!(*tensor.host().unwrap(), *pattern(1000, 6));
    drop((tensor, stream, other));
    gpu.finish();
}
