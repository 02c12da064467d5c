//! Layers and activations on the host between their uses: the right bytes in any order, beside work, written to, forgotten, refused, faulted.

use std::sync::Arc;

use transfer_tensor::cudarc::driver::{CudaStream, sys};
use transfer_tensor::{
    Access, ActivationStack, DynTensor, LayerOrder, OffloadLayer, Offloader, OffloaderBuilder, PoolOptions,
    SharedTensor, Strategy, TransferTensor,
};

use crate::pool::until;
use crate::support::{GH200, Gpu, H200, HANG, Kernels, SPARK, index_hash};

/// Bytes of a layer's one tensor, above what stays on the device.
pub(crate) const LEN: usize = 80 << 10;

pub(crate) fn tensor(gpu: &Gpu, value: u8) -> TransferTensor<u8> {
    gpu.device.tensor().from_slice(&[value; LEN], [LEN]).unwrap()
}

/// Layers whose bytes say which they are.
pub(crate) fn layers(gpu: &Gpu, count: usize) -> Vec<OffloadLayer> {
    (0..count).map(|number| OffloadLayer::new().tensor(tensor(gpu, number as u8))).collect()
}

pub(crate) fn build(builder: OffloaderBuilder<'_>, layers: Vec<OffloadLayer>) -> Offloader {
    builder.build(layers).map_err(|refused| refused.error).unwrap()
}

/// What work on the stream finds in a layer's first tensor.
pub(crate) fn found(gpu: &Gpu, model: &mut Offloader, number: usize, stream: &Arc<CudaStream>) -> Vec<u8> {
    let layer = model.layer(number, stream).unwrap();
    gpu.stream.clone_dtoh(&layer.device::<u8>(0).unwrap()).unwrap()
}

/// Uses layers in the given order, each by a kernel that copies it: nobody waits for anything until the end.
fn step(gpu: &Gpu, kernels: &Kernels, model: &mut Offloader, order: &[usize]) {
    let mut seen: Vec<TransferTensor<u8>> =
        order.iter().map(|_| gpu.device.tensor().strategy(Strategy::Streamed).zeros([LEN]).unwrap()).collect();
    for (&number, seen) in order.iter().zip(&mut seen) {
        let layer = model.layer(number, &gpu.stream).unwrap();
        kernels.copy(&gpu.stream, &mut seen.device_mut(&gpu.stream).unwrap(), &layer.device(0).unwrap());
    }
    for (&number, seen) in order.iter().zip(&seen) {
        assert!(*seen.host().unwrap() == [number as u8; LEN], "layer {number} in {order:?}");
    }
}

#[test]
fn layers_are_there_when_they_are_used() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    for (fraction, depth) in [(1.0, 1), (1.0, 2), (1.0, 4), (0.5, 2), (0.25, 2), (0.0, 2)] {
        let model = Offloader::builder(&gpu.device).fraction(fraction).depth(depth);
        let mut model = build(model, layers(&gpu, 8));
        let on_host = (8.0 * fraction) as usize;
        assert_eq!(model.report().layers.len(), on_host);
        assert_eq!(model.report().slots, depth.min(on_host));
        for _ in 0..3 {
            step(&gpu, &kernels, &mut model, &[0, 1, 2, 3, 4, 5, 6, 7]);
        }
        let stats = model.stats();
        assert_eq!(stats.uses, 3 * on_host as u64);
        // With one slot nothing can be ahead but across the layers that stay.
        if depth > 1 {
            assert_eq!((stats.late, stats.hit_rate()), (0, 1.0), "{fraction} {depth}");
        }
        assert_eq!(stats.down_bytes, 0);
    }
    drop(kernels);
    gpu.finish();
}

/// Forward and back: what is still there is not brought again.
#[test]
fn layers_at_the_turn_are_kept() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let mut model = build(Offloader::builder(&gpu.device).order(LayerOrder::ForwardBackward).depth(2), layers(&gpu, 5));
    for _ in 0..2 {
        step(&gpu, &kernels, &mut model, &[0, 1, 2, 3, 4, 4, 3, 2, 1, 0]);
    }
    let stats = model.stats();
    // Two at each turn find themselves there, also where one step ends and the next begins.
    assert_eq!((stats.uses, stats.late, stats.kept), (20, 0, 2 + 4), "{stats:?}");
    drop((model, kernels));
    gpu.finish();
}

/// In an order that was said, in none, and in another than was said.
#[test]
fn any_order_finds_the_right_layer() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let said = vec![3, 1, 1, 4, 0];
    let model = Offloader::builder(&gpu.device).order(LayerOrder::Explicit(said.clone())).depth(2);
    let mut model = build(model, layers(&gpu, 6));
    step(&gpu, &kernels, &mut model, &said);
    step(&gpu, &kernels, &mut model, &said);
    assert_eq!(model.stats().late, 0);
    // 5 and 2 are in no order; 0 comes too early.
    step(&gpu, &kernels, &mut model, &[5, 0, 2, 3, 3, 1, 5, 4, 0, 0]);
    assert!(model.stats().late > 0);
    drop(model);
    let none = Offloader::builder(&gpu.device).order(LayerOrder::Explicit(Vec::new())).depth(2);
    let mut none = build(none, layers(&gpu, 3));
    step(&gpu, &kernels, &mut none, &[2, 0, 1, 1, 2]);
    assert_eq!((none.stats().ahead, none.stats().late), (0, 4));
    drop((none, kernels));
    gpu.finish();
}

/// What follows is brought while the work on the layer in use still runs, and not to where that work is.
#[test]
fn copies_run_beside_the_work() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let kernels = gpu.kernels();
    let mut model = build(Offloader::builder(&gpu.device).depth(3), layers(&gpu, 6));
    let mut seen = gpu.on_device(&[0; LEN]);
    let sim = gpu.sim.as_ref().unwrap();
    assert_eq!(found(&gpu, &mut model, 0, &gpu.stream), [0; LEN]);
    gpu.context.synchronize().unwrap();
    let before = sim.evidence().copied_h2d_pinned;
    let came = || sim.evidence().copied_h2d_pinned - before;
    let gate = gpu.gate(&gpu.stream);
    {
        let layer = model.layer(1, &gpu.stream).unwrap();
        kernels.copy(&gpu.stream, &mut seen.device_mut(&gpu.stream).unwrap(), &layer.device(0).unwrap());
    }
    // The third comes to the slot of the first, beside the work on the second; the fourth to that of the second, behind its work.
    until(|| came() == LEN as u64);
    drop(model.layer(2, &gpu.stream).unwrap());
    assert_eq!(model.stats().up_bytes, 5 * LEN as u64);
    assert_eq!(came(), LEN as u64);
    gate.open();
    assert!(*seen.host().unwrap() == [1; LEN]);
    gpu.context.synchronize().unwrap();
    assert_eq!(came(), 2 * LEN as u64);
    assert_eq!(found(&gpu, &mut model, 4, &gpu.stream), [4; LEN]);
    drop((model, kernels, seen));
    gpu.finish();
}

/// An optimizer writes to the layers: the next step finds that, and so does who takes them back.
#[test]
fn what_is_written_goes_home() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    for fraction in [1.0, 0.5, 0.0] {
        let mut model = build(Offloader::builder(&gpu.device).fraction(fraction).depth(2), layers(&gpu, 6));
        for round in 0..3 {
            for number in 0..6 {
                let mut layer = model.layer(number, &gpu.stream).unwrap();
                kernels.xor(&gpu.stream, &mut layer.device_mut(0).unwrap());
            }
            if round == 0 {
                model.flush().unwrap();
            }
        }
        let moved = (6.0 * fraction) as u64;
        let layers = model.into_layers().unwrap();
        for (number, layer) in layers.into_iter().enumerate() {
            let tensor: TransferTensor<u8> = layer.into_tensors().remove(0).downcast().unwrap();
            let values = tensor.host().unwrap();
            assert!((0..LEN).all(|at| values[at] == number as u8 ^ index_hash(at)), "layer {number}, {moved} moved");
        }
    }
    drop(kernels);
    gpu.finish();
}

/// Several tensors of several types, small ones that stay, one that is tied, several written at once.
#[test]
fn tensors_of_any_type_and_of_each_other() {
    let gpu = Gpu::any(H200);
    let tied: SharedTensor<f32> = gpu.device.tensor().from_vec(vec![1.5f32; LEN], [2, LEN / 2]).unwrap().into_shared();
    let make = |number: usize| {
        let wide = gpu.device.tensor().from_vec(vec![number as u64; LEN / 8], [LEN / 8]).unwrap();
        let small = gpu.device.tensor().from_vec(vec![number as i16; 100], [100]).unwrap();
        let none = gpu.device.tensor().from_vec(Vec::<u8>::new(), [0]).unwrap();
        OffloadLayer::new()
            .tensor(wide)
            .tensor(small)
            .tensor(none)
            .tensor(tied.clone())
            .tensor(tied.rows(1..).unwrap())
            .tensor(tied.clone())
            .tensor(DynTensor::from(tensor(&gpu, number as u8)))
    };
    let mut model = build(Offloader::builder(&gpu.device), (0..4).map(make).collect());
    // The tied one counts once.
    assert_eq!(model.report().host_bytes, (4 * 2 * LEN + 4 * LEN) as u64);
    assert_eq!(model.report().resident_bytes, 4 * 200);
    for number in [0, 1, 2, 3, 1] {
        let mut layer = model.layer(number, &gpu.stream).unwrap();
        let read = |got: Vec<f32>, len: usize| assert!(got == vec![1.5; len]);
        read(gpu.stream.clone_dtoh(&layer.device::<f32>(3).unwrap()).unwrap(), LEN);
        read(gpu.stream.clone_dtoh(&layer.device::<f32>(4).unwrap()).unwrap(), LEN / 2);
        assert_eq!(gpu.stream.clone_dtoh(&layer.device::<u64>(0).unwrap()).unwrap(), vec![number as u64; LEN / 8]);
        assert_eq!(gpu.stream.clone_dtoh(&layer.device::<i16>(1).unwrap()).unwrap(), [number as i16; 100]);
        assert_eq!(layer.device::<u8>(2).unwrap().address(), 0);
        // Tied within a layer, it is there once.
        assert_eq!(layer.device::<f32>(3).unwrap().address(), layer.device::<f32>(5).unwrap().address());
        assert!(layer.tensors()[0].is_offloaded() && !layer.tensors()[1].is_offloaded());
        assert!(layer.device_mut::<f32>(3).unwrap_err().to_string().contains("shared"));
        assert!(layer.device::<i32>(3).unwrap_err().to_string().contains("F32"));
        assert!(layer.device::<u8>(7).unwrap_err().to_string().contains('7'));
        let [wide, .., bytes] = layer.tensors_mut() else { panic!("seven tensors") };
        let (wide, bytes) = (wide.device_mut::<u64>().unwrap(), bytes.device_mut::<u8>().unwrap());
        assert_ne!(wide.address(), bytes.address());
    }
    drop((model, tied));
    gpu.finish();
}

/// R100: the device's memory falls by what the report says is saved, and a step allocates nothing.
#[test]
fn device_memory_falls_by_what_is_saved() {
    let gpu = Gpu::any(H200);
    // A driver's pool gives memory back by chunks, of two of these on an H200: what goes are neighbours.
    let big = if gpu.sim.is_some() { 4 << 20 } else { 64 << 20 };
    let free = || {
        gpu.context.synchronize().unwrap();
        gpu.device.drain(HANG).unwrap();
        // What was freed in stream order goes back to the device.
        gpu.context.bind_to_thread().unwrap();
        if gpu.sim.is_none() {
            let mut pool = std::ptr::null_mut();
            // SAFETY: the context is current; the calls write a handle, and give back what nobody has.
            unsafe {
                sys::cuDeviceGetDefaultMemPool(&mut pool, gpu.context.cu_device()).result().unwrap();
                sys::cuMemPoolTrimTo(pool, 0).result().unwrap();
            }
        }
        transfer_tensor::cudarc::driver::result::mem_get_info().unwrap().0 as u64
    };
    let all = free();
    let layer = |number: usize| {
        let slice = gpu.device.upload_new(&gpu.stream, &vec![number as u8; big]).unwrap();
        OffloadLayer::new().tensor(gpu.device.tensor().from_cuda_slice(slice, [big]).unwrap())
    };
    let layers: Vec<_> = (0..16).map(layer).collect();
    let resident = all - free();
    let mut model = build(Offloader::builder(&gpu.device).layers(0..12).depth(2), layers);
    let report = model.report().clone();
    assert_eq!((report.host_bytes, report.saved_bytes), (12 * big as u64, 10 * big as u64));
    let now = all - free();
    let slack = if gpu.sim.is_some() { 0 } else { big as u64 }; // a chunk of the driver's
    assert!((resident - now).abs_diff(report.saved_bytes) <= slack, "{resident} before, {now} after: {report}");
    let mut steps = |count: usize| {
        for _ in 0..count {
            for number in 0..16 {
                drop(model.layer(number, &gpu.stream).unwrap().device::<u8>(0).unwrap());
            }
        }
    };
    steps(1);
    if let Some(sim) = &gpu.sim {
        sim.clear_calls();
        steps(2);
        let calls = ["cuMemAlloc", "cuMemAllocAsync", "cuMemHostAlloc", "cuMemHostRegister", "cuMemFree"];
        assert_eq!(calls.map(|call| sim.count(call)), [0; 5]);
    }
    drop(model);
    gpu.finish();
}

/// One memory: nothing is moved, and the report says so.
#[test]
fn one_memory_moves_nothing() {
    let Some(gpu) = Gpu::simulated(SPARK) else { return };
    let mut model = build(Offloader::builder(&gpu.device), layers(&gpu, 4));
    assert_eq!((model.report().layers.len(), model.report().slots), (0, 0));
    assert!(model.report().to_string().contains("one memory"), "{}", model.report());
    for number in 0..4 {
        assert_eq!(found(&gpu, &mut model, number, &gpu.stream), [number as u8; LEN]);
    }
    assert_eq!((model.stats().uses, model.stats().up_bytes, model.stats().hit_rate()), (0, 0, 1.0));
    let mut activations = ActivationStack::new(&gpu.device, 1).unwrap();
    for value in 0..4u8 {
        activations.push_slice(gpu.stream.clone_htod(&[value; LEN]).unwrap()).unwrap();
    }
    assert_eq!(activations.stats(), Default::default());
    let sim = gpu.sim.as_ref().unwrap();
    let before = sim.evidence().copied_d2h_pinned;
    for _ in 0..4 {
        drop(activations.pop::<u8>().unwrap().unwrap());
    }
    assert_eq!(sim.evidence().copied_d2h_pinned, before);
    drop((model, activations));
    gpu.finish();
}

/// A coherent link: what is touched once is read where it is; what is touched often comes, if it is asked for.
#[test]
fn a_coherent_link_reads_in_place_or_brings() {
    let Some(gpu) = Gpu::simulated(GH200) else { return };
    let mut model = build(Offloader::builder(&gpu.device), layers(&gpu, 4));
    assert_eq!(model.report().in_place_bytes, 4 * LEN as u64, "{}", model.report());
    assert_eq!(found(&gpu, &mut model, 2, &gpu.stream), [2; LEN]);
    assert_eq!(model.stats().up_bytes, 0);
    drop(model);
    let often = Access::reuse(64).unwrap();
    let mut model = build(Offloader::builder(&gpu.device).access(often), layers(&gpu, 4));
    assert_eq!(model.report().layers.len(), 4, "{}", model.report());
    for number in [0, 1, 2, 3] {
        assert_eq!(found(&gpu, &mut model, number, &gpu.stream), [number as u8; LEN]);
    }
    assert!(model.stats().up_bytes >= 4 * LEN as u64);
    drop(model);
    gpu.finish();
}

/// R99: no more is page-locked than the host can spare; the rest works from ordinary memory.
#[test]
fn no_more_is_page_locked_than_the_budget() {
    let gpu = Gpu::any(H200);
    let layers = |gpu: &Gpu| -> Vec<OffloadLayer> {
        let vec = |number: usize| gpu.device.tensor().from_vec(vec![number as u8; LEN], [LEN]).unwrap();
        (0..6).map(|number| OffloadLayer::new().tensor(vec(number))).collect()
    };
    let model = Offloader::builder(&gpu.device).pinned_limit(2 * LEN as u64 + 5);
    let mut model = build(model, layers(&gpu));
    assert_eq!((model.report().host_bytes, model.report().pinned_bytes), (6 * LEN as u64, 2 * LEN as u64));
    assert!(model.report().to_string().contains("ordinary memory"), "{}", model.report());
    for number in [0, 1, 2, 3, 4, 5, 0] {
        assert_eq!(found(&gpu, &mut model, number, &gpu.stream), [number as u8; LEN]);
    }
    drop(model);
    let mut all = build(Offloader::builder(&gpu.device), layers(&gpu));
    assert_eq!(all.report().pinned_bytes, 6 * LEN as u64);
    assert_eq!(found(&gpu, &mut all, 5, &gpu.stream), [5; LEN]);
    drop(all);
    gpu.finish();
}

#[test]
fn what_can_not_be_is_refused_and_comes_back() {
    let gpu = Gpu::any(H200);
    let refused = |builder: OffloaderBuilder<'_>, what: &str| {
        let refused = builder.build(layers(&gpu, 3)).unwrap_err();
        assert!(refused.error.to_string().contains(what), "{}", refused.error);
        assert_eq!(refused.value.len(), 3);
    };
    refused(Offloader::builder(&gpu.device).fraction(1.5), "1.5");
    refused(Offloader::builder(&gpu.device).fraction(f64::NAN), "NaN");
    refused(Offloader::builder(&gpu.device).layers([0, 3]), "3");
    refused(Offloader::builder(&gpu.device).order(LayerOrder::Explicit(vec![7])), "7");
    let host_only = OffloadLayer::new().tensor(TransferTensor::from_vec(vec![0u8; LEN], [LEN]).unwrap());
    assert!(Offloader::builder(&gpu.device).build(vec![host_only]).is_err());
    let mut none = build(Offloader::builder(&gpu.device), Vec::new());
    assert!(none.is_empty() && none.layer(0, &gpu.stream).is_err());
    let mut model = build(Offloader::builder(&gpu.device).layers([1]), layers(&gpu, 3));
    assert_eq!(model.report().layers, [1]);
    assert!(model.layer(3, &gpu.stream).unwrap_err().to_string().contains('3'));
    assert_eq!(found(&gpu, &mut model, 1, &gpu.stream), [1; LEN]);
    drop((none, model));
    gpu.finish();
}

/// A strict pool and one that is too small say so, or do with ordinary memory.
#[test]
fn without_page_locked_memory_it_works_from_ordinary_memory() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    gpu.sim.as_ref().unwrap().fail_always("cuMemHostRegister", 2);
    gpu.sim.as_ref().unwrap().fail_always("cuMemHostAlloc", 2);
    let device = crate::pool::with_pool(&gpu, PoolOptions::new().keep_idle(0));
    let layer =
        |number: usize| OffloadLayer::new().tensor(device.tensor().from_vec(vec![number as u8; LEN], [LEN]).unwrap());
    let mut model = build(Offloader::builder(&device), (0..4).map(layer).collect());
    assert_eq!(model.report().pinned_bytes, 0);
    for number in [0, 1, 2, 3] {
        let mut layer = model.layer(number, &gpu.stream).unwrap();
        assert_eq!(gpu.stream.clone_dtoh(&layer.device::<u8>(0).unwrap()).unwrap(), [number as u8; LEN]);
        gpu.stream.memset_zeros(&mut layer.device_mut::<u8>(0).unwrap()).unwrap();
    }
    for layer in model.into_layers().unwrap() {
        let tensor: TransferTensor<u8> = layer.into_tensors().remove(0).downcast().unwrap();
        assert!(*tensor.host().unwrap() == [0; LEN]);
    }
    drop(device);
    gpu.finish();
}
