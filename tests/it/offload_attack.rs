//! What tries to break layers and activations on the host: any mix of uses, tensors that outlive their stack, captures, other devices, forks.

use std::sync::Arc;

use transfer_tensor::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use transfer_tensor::{
    Access, ActivationStack, LayerOrder, OffloadLayer, Offloader, Strategy, TransferTensor, Workload, WorkloadLayer,
};

use crate::forked::in_a_forked_child;
use crate::offload::{LEN, build, layers, tensor};
use crate::support::{GH200, Gpu, H200, HANG, SPARK, index_hash};

/// Numbers that follow from a seed (xorshift).
struct Dice(u64);

impl Dice {
    fn of(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % sides
    }
}

/// On machines of each kind, and on one without memory pools; unordered steps in any order.
fn machines(mut test: impl FnMut(Gpu, Dice, String)) {
    let said: Option<u64> = std::env::var("CUDA_SIM_SEED").ok().and_then(|seed| seed.parse().ok());
    // One where a seed is said: then there are many runs.
    for seed in said.map_or(0..3, |seed| seed..seed + 1) {
        for (profile, pools) in [(H200, true), (GH200, true), (SPARK, true), (H200, false)] {
            let builder = crate::support::builder(profile).seed(seed).reorder(true);
            let builder = if pools { builder } else { builder.attribute(MEMORY_POOLS_SUPPORTED, 0) };
            let Some(gpu) = Gpu::built(builder) else { return };
            test(gpu, Dice::of(seed), format!("seed {seed} {profile} pools {pools}"));
        }
    }
}

const MEMORY_POOLS_SUPPORTED: i32 = 115;

/// Layers of owned and shared tensors, asked for in any order, on any stream, read, written, flushed and forgotten.
#[test]
fn any_mix_of_uses_finds_its_bytes() {
    machines(|gpu, mut dice, what| {
        let kernels = gpu.kernels();
        let count = 2 + dice.roll(6);
        let fused_values: Vec<u8> = (0..count * LEN).map(|at| index_hash(at + 3)).collect();
        let fused = match dice.roll(3) {
            0 => gpu.device.tensor().from_vec(fused_values.clone(), [count, LEN]).unwrap(),
            1 => gpu.device.tensor().from_slice(&fused_values, [count, LEN]).unwrap(),
            _ => gpu.both_sides(&fused_values).reshape([count, LEN]).unwrap(),
        }
        .into_shared();
        let (mut expected, mut layers) = (Vec::new(), Vec::new());
        for number in 0..count {
            let mut values: Vec<u8> = (0..LEN).map(|at| index_hash(at) ^ number as u8).collect();
            let mut own = match dice.roll(4) {
                0 => gpu.device.tensor().from_vec(values.clone(), [LEN]).unwrap(),
                1 => gpu.device.tensor().from_slice(&values, [LEN]).unwrap(),
                2 => gpu.on_device(&values),
                _ => gpu.both_sides(&values),
            };
            if dice.roll(2) == 0 {
                kernels.xor(&gpu.stream, &mut own.device_mut(&gpu.stream).unwrap());
                values.iter_mut().enumerate().for_each(|(at, value)| *value ^= index_hash(at));
            }
            expected.push(values);
            let part = || fused.rows(number..number + 1).unwrap();
            layers.push(OffloadLayer::new().tensor(own).tensor(part()).tensor(part()));
        }
        let mut builder = Offloader::builder(&gpu.device).depth(1 + dice.roll(4)).timed(dice.roll(2) == 0);
        builder = match dice.roll(3) {
            0 => builder.fraction(dice.roll(5) as f64 / 4.0),
            1 => builder.layers((0..count).filter(|_| dice.roll(2) == 0).chain([0, 0])),
            _ => builder,
        };
        builder = match dice.roll(3) {
            0 => builder.order(LayerOrder::ForwardBackward),
            1 => builder.order(LayerOrder::Explicit((0..dice.roll(9)).map(|_| dice.roll(count)).collect())),
            _ => builder,
        };
        if dice.roll(3) == 0 {
            builder = builder.pinned_limit((dice.roll(4) * LEN) as u64);
        }
        if dice.roll(2) == 0 {
            builder = builder.access(Access::reuse(64).unwrap());
        }
        let mut model = build(builder, layers);
        let streams =
            [gpu.stream.clone(), gpu.another_stream(), gpu.context.default_stream(), gpu.context.per_thread_stream()];
        let mut seen: Vec<(TransferTensor<u8>, Vec<u8>)> = Vec::new();
        for _ in 0..30 {
            let (number, stream) = (dice.roll(count), &streams[dice.roll(4)]);
            if dice.roll(10) == 0 {
                model.flush().unwrap();
            }
            let mut layer = model.layer(number, stream).unwrap();
            match dice.roll(3) {
                0 => {
                    let mut guard = layer.device_mut::<u8>(0).unwrap();
                    kernels.xor(stream, &mut guard);
                    expected[number].iter_mut().enumerate().for_each(|(at, value)| *value ^= index_hash(at));
                    if dice.roll(6) == 0 {
                        std::mem::forget(guard);
                    }
                }
                1 => {
                    let value = dice.roll(256) as u8;
                    kernels.fill(stream, &mut layer.device_mut(0).unwrap(), value);
                    expected[number].fill(value);
                }
                _ => {
                    let mut out = gpu.device.tensor().strategy(Strategy::Streamed).zeros([LEN]).unwrap();
                    let which = dice.roll(3);
                    let guard = layer.device::<u8>(which).unwrap();
                    kernels.copy(stream, &mut out.device_mut(stream).unwrap(), &guard);
                    if dice.roll(6) == 0 {
                        std::mem::forget(guard);
                    }
                    let fused = &fused_values[number * LEN..][..LEN];
                    seen.push((out, if which == 0 { expected[number].clone() } else { fused.to_vec() }));
                }
            }
            if dice.roll(8) == 0 {
                std::mem::forget(layer);
            }
        }
        for (at, (out, expected)) in seen.iter().enumerate() {
            assert!(*out.host().unwrap() == expected[..], "{what}: read {at}");
        }
        assert!(*fused.host().unwrap() == fused_values[..], "{what}");
        for (number, layer) in model.into_layers().unwrap().into_iter().enumerate() {
            let own: TransferTensor<u8> = layer.into_tensors().remove(0).downcast().unwrap();
            assert!(own.into_vec().unwrap() == expected[number], "{what}: layer {number}");
        }
        drop((seen, fused, kernels, streams));
        gpu.finish_forgotten();
    });
}

/// Tensors of any kind, pushed and popped by any streams, used by several, forgotten.
#[test]
fn any_mix_of_activations_comes_back() {
    machines(|gpu, mut dice, what| {
        let kernels = gpu.kernels();
        let mut stack = ActivationStack::new(&gpu.device, dice.roll(4)).unwrap();
        let streams =
            [gpu.stream.clone(), gpu.another_stream(), gpu.context.default_stream(), gpu.context.per_thread_stream()];
        let (mut expected, mut others) = (Vec::<Vec<u8>>::new(), Vec::new());
        for _ in 0..40 {
            let stream = &streams[dice.roll(4)];
            if dice.roll(3) > 0 {
                let value = dice.roll(256) as u8;
                let options = gpu.device.tensor();
                let mut made: TransferTensor<u8> = match dice.roll(6) {
                    0 => options.from_slice(&[value; LEN], [LEN]).unwrap(),
                    1 => gpu.both_sides(&[value; LEN]),
                    2 => {
                        let shared = Arc::new(stream.clone_htod(&[value; LEN]).unwrap());
                        others.push((shared.clone(), value));
                        options.from_shared_cuda_slice(shared, [LEN]).unwrap()
                    }
                    3 => options.from_vec(vec![value; LEN], [LEN]).unwrap(),
                    4 => options.from_slice(&[], [0]).unwrap(),
                    _ => options.from_cuda_slice(stream.clone_htod(&[value; LEN]).unwrap(), [LEN]).unwrap(),
                };
                let mut values = vec![value; made.len()];
                if !made.is_empty() && dice.roll(2) == 0 {
                    // What others have, too, may only be read.
                    if let Ok(mut guard) = made.device_mut(stream) {
                        kernels.xor(stream, &mut guard);
                        values.iter_mut().enumerate().for_each(|(at, value)| *value ^= index_hash(at));
                        if dice.roll(8) == 0 {
                            std::mem::forget(guard);
                        }
                    }
                }
                if !made.is_empty() && dice.roll(3) == 0 {
                    let mut out = stream.alloc_zeros::<u8>(LEN).unwrap();
                    streams[dice.roll(4)].memcpy_dtod(&made.device(stream).unwrap(), &mut out).unwrap();
                }
                stack.push(made).unwrap();
                expected.push(values);
            } else if let Some(values) = expected.pop() {
                let top = stack.pop::<u8>().unwrap().unwrap();
                assert_eq!(top.len(), values.len());
                if top.is_empty() {
                    continue;
                }
                assert!(stream.clone_dtoh(&top.device(stream).unwrap()).unwrap() == values, "{what}");
                match dice.roll(4) {
                    0 => drop(top.into_cuda_slice()),
                    1 => {
                        stack.push(top).unwrap();
                        expected.push(values);
                    }
                    _ => {}
                }
            }
        }
        for (slice, value) in &others {
            assert!(gpu.stream.clone_dtoh(&**slice).unwrap() == [*value; LEN], "{what}");
        }
        for (tensor, values) in stack.into_tensors().into_iter().zip(&expected) {
            assert!(*tensor.downcast::<u8>().unwrap().host().unwrap() == values[..], "{what}");
        }
        drop((others, kernels, streams));
        assert_eq!(gpu.device.stats().free_errors, 0, "{what}");
        gpu.finish_forgotten();
    });
}

/// A tensor that came back: its device memory belongs to a stream of the stack's, which is gone here.
fn came_back(gpu: &Gpu) -> TransferTensor<u8> {
    let mut stack = ActivationStack::new(&gpu.device, 1).unwrap();
    for value in 0..3u8 {
        stack.push_slice(gpu.stream.clone_htod(&[value; LEN]).unwrap()).unwrap();
    }
    drop(stack.pop::<u8>().unwrap());
    stack.pop::<u8>().unwrap().unwrap()
}

#[test]
fn what_came_back_outlives_its_stack() {
    let gpu = Gpu::any(H200).keeping();
    // To be a slice of the caller's, with nothing left on the host.
    let mut tensor_1 = came_back(&gpu);
    tensor_1.release_host(&gpu.stream).unwrap();
    gpu.device.drain(HANG).unwrap();
    let slice = tensor_1.into_cuda_slice().map_err(|refused| refused.error).unwrap();
    assert!(gpu.stream.clone_dtoh(&slice).unwrap() == [1; LEN]);
    let mut tensor_2 = came_back(&gpu);
    tensor_2.host_mut().unwrap()[0] = 5;
    gpu.device.drain(HANG).unwrap();
    assert_eq!(gpu.stream.clone_dtoh(&tensor_2.into_cuda_slice().unwrap()).unwrap()[..2], [5, 1]);
    // To go out from another stack.
    let mut tensor_3 = came_back(&gpu);
    tensor_3.release_host(&gpu.stream).unwrap();
    gpu.device.drain(HANG).unwrap();
    let mut other = ActivationStack::new(&gpu.device, 1).unwrap();
    other.push(tensor_3).unwrap();
    other.push(tensor(&gpu, 9)).unwrap();
    drop(other.pop::<u8>().unwrap());
    let back = other.pop::<u8>().unwrap().unwrap();
    assert!(gpu.stream.clone_dtoh(&back.device(&gpu.stream).unwrap()).unwrap() == [1; LEN]);
    // And when its uses can not be named, so that the waiter frees it.
    let lent = came_back(&gpu);
    let (stream, mut target) = (gpu.another_stream(), gpu.stream.alloc_zeros::<u8>(LEN).unwrap());
    stream.memcpy_dtod(&lent.device(&gpu.stream).unwrap(), &mut target).unwrap();
    other.push(lent).unwrap();
    other.push(tensor(&gpu, 9)).unwrap();
    drop((other, back, slice));
    gpu.device.drain(HANG).unwrap();
    assert_eq!(gpu.device.stats().free_errors, 0);
    drop((stream, target));
    gpu.finish();
}

/// A refused call leaves the tensor its bytes.
#[test]
fn a_slice_that_is_refused_leaves_the_tensor_as_it_was() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let mut refusals = 0;
    for call in ["cuMemAllocAsync", "cuMemcpyDtoDAsync", "cuEventRecord", "cuStreamWaitEvent"] {
        for nth in 1..6 {
            let mut tensor = came_back(&gpu);
            tensor.release_host(&gpu.stream).unwrap();
            gpu.device.drain(HANG).unwrap();
            sim.fail_nth(call, nth, 999);
            let slice = tensor.into_cuda_slice();
            sim.clear_failures();
            if let Err(refused) = slice {
                refusals += 1;
                assert!(*refused.value.host().unwrap() == [1; LEN], "{call} {nth}");
            }
            let _ = gpu.context.check_err();
        }
    }
    assert!(refusals > 4, "{refusals}");
    gpu.device.drain(HANG).unwrap();
    assert_eq!(sim.violations(), Vec::<String>::new());
}

#[test]
fn a_stack_takes_only_tensors_of_its_device() {
    let gpu = Gpu::any(H200);
    let mut stack = ActivationStack::new(&gpu.device, 1).unwrap();
    let host_only = TransferTensor::from_vec(vec![7u8; 10], [10]).unwrap();
    let refused = stack.push(host_only).unwrap_err();
    assert!(refused.error.to_string().contains("host-only"), "{}", refused.error);
    assert_eq!(refused.value.len(), 10);
    if let Some(foreign) = Gpu::simulated(H200) {
        assert!(stack.push(tensor(&foreign, 7)).unwrap_err().error.to_string().contains("context"));
        let slice = foreign.stream.clone_htod(&[1u8; LEN]).unwrap();
        assert!(stack.push_slice(slice).is_err());
        drop(foreign.on_device(&[1; LEN]));
        foreign.finish();
    }
    assert!(stack.is_empty());
    drop(stack);
    gpu.finish();
}

/// What leaves was made on a stream that is captured now: the capture is left alone, whoever frees the memory.
#[test]
fn a_capture_is_not_broken_by_what_leaves() {
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    for lent in [false, true] {
        let gpu = Gpu::any(H200).keeping();
        let mut stack = ActivationStack::new(&gpu.device, 1).unwrap();
        let slice = gpu.stream.clone_htod(&[1u8; LEN]).unwrap();
        let made = gpu.device.tensor().from_cuda_slice(slice, [LEN]).unwrap();
        let (third, other) = (gpu.another_stream(), gpu.another_stream());
        let mut target = other.alloc_zeros::<u8>(LEN).unwrap();
        if lent {
            other.memcpy_dtod(&made.device(&third).unwrap(), &mut target).unwrap();
        }
        stack.push(made).unwrap();
        let top = tensor(&gpu, 2);
        gpu.context.synchronize().unwrap();
        gpu.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        stack.push(top).unwrap();
        drop(gpu.stream.end_capture(flags).unwrap());
        gpu.device.drain(HANG).unwrap();
        assert_eq!(gpu.device.stats().free_errors, 0);
        drop((stack, target, third, other));
        gpu.finish();
    }
}

#[test]
fn a_forked_child_is_told() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let mut model = Some(build(Offloader::builder(&gpu.device).depth(2).timed(true), layers(&gpu, 4)));
    let mut stack = ActivationStack::new(&gpu.device, 1).unwrap();
    // Current on both sides: nothing would have to be copied.
    let both = tensor(&gpu, 1);
    drop(both.device(&gpu.stream).unwrap());
    stack.push(both).unwrap();
    let (mut stack, mut extra) = (Some(stack), Some(tensor(&gpu, 5)));
    drop(model.as_mut().unwrap().layer(0, &gpu.stream).unwrap().device_mut::<u8>(0).unwrap());
    let status = in_a_forked_child(&mut || {
        let (mut model, mut stack) = (model.take().unwrap(), stack.take().unwrap());
        let layer = model.layer(1, &gpu.stream).and_then(|layer| layer.device::<u8>(0).map(drop));
        let mut told = layer.is_err_and(|error| error.is_forked());
        told &= model.flush().is_err_and(|error| error.is_forked());
        told &= model.into_layers().is_err_and(|refused| refused.error.is_forked());
        told &= stack.push(extra.take().unwrap()).is_err_and(|refused| refused.error.is_forked());
        drop(stack);
        told
    });
    assert_eq!(status, 0);
    drop((model, stack, extra));
    gpu.finish();
}

/// However far the caller is ahead of the device, what is timed is bounded.
#[test]
fn stalls_are_timed_for_so_many_uses_only() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let mut model = build(Offloader::builder(&gpu.device).depth(2).timed(true), layers(&gpu, 4));
    gpu.context.synchronize().unwrap();
    sim.clear_calls();
    let gate = gpu.gate(&gpu.stream);
    for number in 0..400 {
        drop(model.layer(number % 4, &gpu.stream).unwrap().device::<u8>(0).unwrap());
    }
    assert!(sim.count("cuEventElapsedTime") < 500, "{}", sim.count("cuEventElapsedTime"));
    // Two for each that is timed, and few others, which go round.
    assert!(sim.count("cuEventCreate") < 200, "{}", sim.count("cuEventCreate"));
    gate.open();
    gpu.context.synchronize().unwrap();
    assert!(model.stats().stalled.is_some());
    drop(model);
    gpu.finish();
}

/// Streams go back: over weights that others share, offloaders come and go.
#[test]
fn offloaders_that_come_and_go_leave_no_streams() {
    let gpu = Gpu::any(H200).keeping();
    let shared: Vec<_> = (0..4u8).map(|value| tensor(&gpu, value).into_shared()).collect();
    for round in 0..20 {
        let layers = shared.iter().map(|tensor| OffloadLayer::new().tensor(tensor.clone())).collect();
        let mut model = build(Offloader::builder(&gpu.device), layers);
        for number in 0..4 {
            drop(model.layer(number, &gpu.stream).unwrap().device::<u8>(0).unwrap());
        }
        gpu.context.synchronize().unwrap();
        drop(model);
        gpu.device.drain(HANG).unwrap();
        if let (0, Some(sim)) = (round, &gpu.sim) {
            sim.clear_calls();
        }
    }
    if let Some(sim) = &gpu.sim {
        // Memory that the last one frees may still be on a stream's way.
        assert!(sim.count("cuStreamCreate") <= 4, "{}", sim.count("cuStreamCreate"));
    }
    drop(shared);
    gpu.finish();
}

/// Parts of one memory, of which some stay: all of it does, and the report says so.
#[test]
fn what_stays_counts_with_all_its_memory() {
    let gpu = Gpu::any(H200);
    let fused = gpu.device.tensor().strategy(Strategy::Streamed).from_vec(vec![1u8; 8 * LEN], [8, LEN]).unwrap();
    let fused = fused.into_shared();
    let layers = (0..8).map(|number| OffloadLayer::new().tensor(fused.rows(number..number + 1).unwrap())).collect();
    let model = build(Offloader::builder(&gpu.device).layers(0..7).depth(1), layers);
    let report = model.report();
    assert_eq!((report.resident_bytes, report.saved_bytes), (8 * LEN as u64, 0));
    assert!(report.to_string().contains("the same memory"), "{report}");
    drop((model, fused));
    gpu.finish();
}

#[test]
fn layers_beyond_64_bits_are_refused() {
    let gpu = Gpu::any(H200);
    for (weights, layers) in [(u64::MAX, [u64::MAX; 2]), (u64::MAX, [u64::MAX / 2 + 1; 2])] {
        let mut workload = Workload::new(weights, 0, 0.1);
        workload.layers = layers.iter().map(|&weights| WorkloadLayer { weights, seconds: 0.001 }).collect();
        let error = workload.advise(gpu.device.platform()).unwrap_err();
        assert!(error.to_string().contains("layers"), "{error}");
    }
    gpu.finish();
}
