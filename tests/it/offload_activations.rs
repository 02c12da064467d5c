//! Activations that go out and come back: the right ones, their memory, and nobody held up.

use transfer_tensor::{ActivationStack, TransferTensor};

use crate::offload::LEN;
use crate::support::{Gpu, H200};

/// Pushed and popped in any nesting, each comes back as it was.
#[test]
fn activations_come_back_last_first() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    for depth in [1, 2, 5] {
        let mut stack = ActivationStack::new(&gpu.device, depth).unwrap();
        let mut expected = Vec::new();
        let mut next = 0u8;
        for (pushes, pops) in [(6, 2), (1, 3), (4, 0), (0, 4), (3, 3), (2, 4)] {
            for _ in 0..pushes {
                let mut made: TransferTensor<u8> =
                    gpu.device.tensor().from_cuda_slice(gpu.stream.alloc_zeros(LEN).unwrap(), [LEN]).unwrap();
                kernels.fill(&gpu.stream, &mut made.device_mut(&gpu.stream).unwrap(), next);
                stack.push(made).unwrap();
                expected.push(next);
                next += 1;
            }
            for _ in 0..pops {
                let top = stack.pop::<u8>().unwrap().unwrap();
                let value = expected.pop().unwrap();
                assert_eq!(gpu.stream.clone_dtoh(&top.device(&gpu.stream).unwrap()).unwrap(), [value; LEN]);
            }
            assert_eq!(stack.len(), expected.len());
        }
        assert!(stack.pop::<u8>().unwrap().is_none());
        let stats = stack.stats();
        assert_eq!(stats.out_bytes, stats.back_bytes);
        assert!(stats.out > 0, "{depth}");
    }
    drop(kernels);
    gpu.finish();
}

/// What is out takes no device memory, whose free does not hold up the stream that made it.
#[test]
fn activations_that_are_out_take_no_device_memory() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let mut stack = ActivationStack::new(&gpu.device, 1).unwrap();
    let sim = gpu.sim.as_ref().unwrap();
    let make = |value: u8| gpu.stream.clone_htod(&[value; LEN]).unwrap();
    let level = || {
        gpu.context.synchronize().unwrap();
        sim.evidence().device_bytes
    };
    let none = level();
    for value in 0..5 {
        stack.push_slice(make(value)).unwrap();
    }
    assert_eq!(level() - none, LEN as u64);
    assert!(stack.pop::<f32>().unwrap_err().to_string().contains("U8"));
    assert_eq!(stack.len(), 5);
    // The copy out is held up, and so is the free; the work that follows is not.
    let other = gpu.another_stream();
    let slow = gpu.stream.clone_htod(&[9u8; LEN]).unwrap();
    let slow = gpu.device.tensor().from_cuda_slice(slow, [LEN]).unwrap();
    let gate = gpu.gate(&other);
    drop(slow.device(&other).unwrap());
    stack.push(slow).unwrap();
    stack.push_slice(make(7)).unwrap();
    gpu.stream.synchronize().unwrap();
    gate.open();
    assert_eq!(level() - none, LEN as u64);
    drop((stack, other));
    gpu.finish();
}
