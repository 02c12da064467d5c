//! Layers whose guards are forgotten, that are dropped early, or on a device that faults, refuses or is being captured.

use transfer_tensor::{ActivationStack, Offloader, TransferTensor};

use crate::offload::{LEN, build, found, layers};
use crate::support::{Gpu, H200, HANG, index_hash, within};

/// Guards that are forgotten keep their stream's work before what comes to the slot next.
#[test]
fn forgotten_guards_stay_sound() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let mut model = build(Offloader::builder(&gpu.device).depth(2), layers(&gpu, 4));
    let mut seen = gpu.on_device(&[0; LEN]);
    let gate = gpu.gate(&gpu.stream);
    {
        let layer = model.layer(0, &gpu.stream).unwrap();
        let guard = layer.device::<u8>(0).unwrap();
        kernels.copy(&gpu.stream, &mut seen.device_mut(&gpu.stream).unwrap(), &guard);
        std::mem::forget(guard);
        std::mem::forget(layer);
    }
    // Layer 2 comes to the slot of layer 0.
    for number in [1, 2, 3] {
        drop(model.layer(number, &gpu.stream).unwrap());
    }
    gate.open();
    assert!(*seen.host().unwrap() == [0; LEN]);
    assert_eq!(found(&gpu, &mut model, 3, &gpu.stream), [3; LEN]);
    drop((model, kernels, seen));
    gpu.finish_forgotten();
}

/// Dropped while copies and work wait: nobody waits, and all is freed.
#[test]
fn dropped_early_it_frees_all() {
    let gpu = Gpu::any(H200).keeping();
    let kernels = gpu.kernels();
    let mut model = build(Offloader::builder(&gpu.device).depth(2), layers(&gpu, 4));
    let mut activations = ActivationStack::new(&gpu.device, 1).unwrap();
    let seen: Vec<_> = (0..3).map(|value| gpu.on_device(&[value; LEN])).collect();
    let gate = gpu.gate(&gpu.stream);
    for number in 0..4 {
        let mut layer = model.layer(number, &gpu.stream).unwrap();
        kernels.xor(&gpu.stream, &mut layer.device_mut(0).unwrap());
    }
    for mut seen in seen {
        kernels.xor(&gpu.stream, &mut seen.device_mut(&gpu.stream).unwrap());
        activations.push(seen).unwrap();
    }
    let _ = activations.pop::<u8>().unwrap();
    drop((model, activations));
    gate.open();
    drop(kernels);
    gpu.finish();
}

/// A fault ends everything with the device's error, at once.
#[test]
fn a_fault_is_told_and_nothing_hangs() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let mut model = build(Offloader::builder(&gpu.device).depth(2), layers(&gpu, 4));
    let mut activations = ActivationStack::new(&gpu.device, 1).unwrap();
    for value in 0..3 {
        activations.push(gpu.on_device(&[value; LEN])).unwrap();
    }
    drop(model.layer(0, &gpu.stream).unwrap().device_mut::<u8>(0).unwrap());
    gpu.sim.as_ref().unwrap().sticky(700);
    let stream = gpu.stream.clone();
    within(HANG, move || {
        let told = (0..4)
            .find_map(|number| model.layer(number, &stream).and_then(|layer| layer.device::<u8>(0).map(drop)).err());
        assert!(told.expect("a fault").is_fault());
        assert!(model.flush().unwrap_err().is_fault());
        let refused = model.into_layers().unwrap_err();
        assert!(refused.error.is_fault());
        drop(refused.value);
        let told = (0..3).find_map(|_| {
            activations.pop::<u8>().and_then(|top| top.map(|top| top.device(&stream).map(drop)).transpose()).err()
        });
        assert!(told.expect("a fault").is_fault());
        drop(activations);
    });
    gpu.device.drain(HANG).unwrap();
}

/// Whatever the driver refuses, once: it is told or tried again, and the bytes are right after it.
#[test]
fn any_call_may_be_refused_once_and_no_layer_is_lost() {
    const CALLS: [&str; 8] = [
        "cuEventRecord",
        "cuEventCreate",
        "cuStreamWaitEvent",
        "cuMemcpyHtoDAsync",
        "cuMemcpyDtoHAsync",
        "cuStreamIsCapturing",
        "cuThreadExchangeStreamCaptureMode",
        "cuEventQuery",
    ];
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let kernels = gpu.kernels();
    let sim = gpu.sim.as_ref().unwrap();
    let mut told = 0;
    for call in CALLS {
        for nth in 1..12 {
            let mut model = build(Offloader::builder(&gpu.device).depth(2), layers(&gpu, 4));
            gpu.context.synchronize().unwrap();
            sim.fail_nth(call, nth, 999);
            let mut written = [0u32; 4];
            for number in [0, 1, 2, 3, 0, 1] {
                let Ok(mut layer) = model.layer(number, &gpu.stream) else {
                    told += 1;
                    continue;
                };
                // A guard that is not given has written nothing.
                match layer.device_mut::<u8>(0) {
                    Ok(mut guard) => kernels.xor(&gpu.stream, &mut guard),
                    Err(_) => {
                        told += 1;
                        continue;
                    }
                }
                written[number] += 1;
            }
            let flushed = model.flush();
            sim.clear_failures();
            told += u32::from(flushed.is_err());
            let layers = model.into_layers().unwrap();
            for (number, layer) in layers.into_iter().enumerate() {
                let tensor: TransferTensor<u8> = layer.into_tensors().remove(0).downcast().unwrap();
                let values = tensor.host().unwrap();
                let hash = |at| if written[number] % 2 == 1 { index_hash(at) } else { 0 };
                assert!((0..LEN).all(|at| values[at] == number as u8 ^ hash(at)), "{call} {nth}: layer {number}");
            }
            let _ = gpu.context.check_err();
        }
    }
    assert!(told > 20, "{told}");
    drop(kernels);
    gpu.device.drain(HANG).unwrap();
    assert_eq!(sim.violations(), Vec::<String>::new());
}

/// In a capture nothing is done, and that is said.
#[test]
fn a_capture_is_refused() {
    use transfer_tensor::cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let gpu = Gpu::any(H200);
    let mut model = build(Offloader::builder(&gpu.device).timed(true), layers(&gpu, 4));
    gpu.context.synchronize().unwrap();
    gpu.stream.begin_capture(CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    let refused = model.layer(0, &gpu.stream).and_then(|layer| layer.device::<u8>(0).map(drop)).unwrap_err();
    assert!(refused.is_capturing(), "{refused}");
    let flags =
        transfer_tensor::cudarc::driver::sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let _ = gpu.stream.end_capture(flags).unwrap();
    for number in 0..4 {
        assert_eq!(found(&gpu, &mut model, number, &gpu.stream), [number as u8; LEN]);
    }
    gpu.context.synchronize().unwrap();
    assert!(model.stats().stalled.is_some());
    drop(model);
    gpu.finish();
}
