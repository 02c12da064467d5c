//! Many small pieces up, which a kernel brings to their places.

use std::ptr::null_mut;
use std::sync::Arc;

use transfer_tensor::cudarc::driver::{CudaContext, CudaSlice, CudaStream, sys};
use transfer_tensor::{BatchReport, Device, Error, PoolOptions};

use crate::batch::{apart, expected, filled, on_host, there_and_back};
use crate::batch_failing::each_call_fails;
use crate::machines::{built, code, drain, on, pattern, unseen};
use crate::ordering::OLD_JETSON;
use crate::pool::until;
use crate::support::{Gpu, H200, builder, from_env};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// More pieces than the kernel is loaded for.
const MANY: usize = 700;

fn upload(
    device: &Device,
    stream: &Arc<CudaStream>,
    parts: &[(usize, &[u8])],
    target: &mut CudaSlice<u8>,
) -> Result<BatchReport, Error> {
    let mut batch = device.batch(stream);
    batch.upload_parts(target, parts.iter().copied())?;
    batch.run()
}

/// How often a simulated driver was asked for something; 0 on a real one.
fn asked(gpu: &Gpu, call: &str) -> usize {
    gpu.sim.as_ref().map_or(0, |sim| sim.count(call))
}

/// Pieces of any length at any distance, some of them neighbours, from any address: a word's parts at either end.
#[test]
fn pieces_of_any_alignment_come_where_they_belong() {
    const LENGTHS: [usize; 19] = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 64, 100, 4095, 4096, 4097, 0, 12_345];
    let gpu = Gpu::any(H200);
    let bytes = pattern(13 * MIB, 4);
    let mut random = 1u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    let (mut parts, mut at) = (Vec::new(), 0);
    for i in 0..4000 {
        // In the middle one that goes by the staged way, by itself.
        let len = if i == 2000 { 9 * MIB } else { LENGTHS[next(LENGTHS.len())] };
        parts.push((at, &bytes[next(MIB)..][..len]));
        at += len + [0, 1, 2, 3, 4, 8, 16, 61][next(8)];
    }
    // Thousands of single bytes, at every third.
    for i in 0..20_000 {
        parts.push((at + 3 * i, &bytes[next(MIB)..][..1]));
    }
    let total = at + 60_000;
    let (floats, ints): (Vec<f32>, Vec<u64>) = ((0..5000).map(|i| i as f32 / 3.0).collect(), (0..3000).collect());
    let (mut some, mut others) = (vec![0f32; 10_000], vec![0u64; 9000]);
    floats.iter().enumerate().for_each(|(i, &x)| some[2 * i] = x);
    ints.chunks(3).enumerate().for_each(|(i, x)| others[9 * i + 1..][..3].copy_from_slice(x));
    let mut target = filled(&gpu, total, 7);
    let (mut float_target, mut int_target) =
        (gpu.stream.alloc_zeros::<f32>(10_000).unwrap(), gpu.stream.alloc_zeros::<u64>(9000).unwrap());
    let source = filled(&gpu, MIB, 0x5A);
    let mut back = vec![0; 100 * KIB];
    let mut batch = gpu.device.batch(&gpu.stream);
    batch.upload_parts(&mut target, parts.iter().copied()).unwrap();
    batch.upload_parts(&mut float_target, floats.chunks(1).enumerate().map(|(i, x)| (2 * i, x))).unwrap();
    batch.upload_parts(&mut int_target, ints.chunks(3).enumerate().map(|(i, x)| (9 * i + 1, x))).unwrap();
    batch.download_parts(&source, back.chunks_mut(100).enumerate().map(|(i, piece)| (i * 1000, piece))).unwrap();
    let report = batch.run().unwrap();
    assert_eq!(report.pieces, 30_000 + 1024);
    assert!(on_host(&gpu, &target) == expected(total, 7, &parts));
    assert!(gpu.stream.clone_dtoh(&float_target).unwrap() == some);
    assert!(gpu.stream.clone_dtoh(&int_target).unwrap() == others);
    assert!(back.iter().all(|&byte| byte == 0x5A));
    assert!(gpu.sim.is_none() || asked(&gpu, "cuLaunchKernel") > 3);
    drop((target, float_target, int_target, source));
    drain(&gpu.device);
    gpu.finish();
}

/// One load does for all devices, streams and batches of a context; rounds end where they have as many copies as the table has
/// places.
#[test]
fn many_scattered_pieces_are_a_launch_for_each_round() {
    let gpu = Gpu::any(H200);
    let other = Device::new(&gpu.another_context().new_stream().unwrap()).unwrap();
    for device in [&gpu.device, &gpu.device, &other] {
        let [up, _] = there_and_back(&gpu, device, MANY, 4 * KIB).unwrap();
        assert_eq!((up.copies, up.calls), (MANY as u64, 2), "two rounds");
    }
    let bytes = pattern(40_000, 1);
    let parts = apart(&bytes, 1);
    let mut target = filled(&gpu, 80_000, 7);
    let report = upload(&gpu.device, &gpu.stream, &parts, &mut target).unwrap();
    assert_eq!((report.copies, report.calls), (40_000, 3));
    assert!(on_host(&gpu, &target) == expected(80_000, 7, &parts));
    if gpu.sim.is_some() {
        assert_eq!((asked(&gpu, "cuModuleLoadData"), asked(&gpu, "cuModuleUnload")), (1, 0));
        assert_eq!(asked(&gpu, "cuLaunchKernel"), 3 * 2 + 3);
        assert_eq!(asked(&gpu, "cuMemcpyBatchAsync"), 3 * 2, "the downloads");
    }
    drop(target);
    drain(&other);
    drop(other);
    gpu.finish();
}

/// Few pieces are no reason to load a kernel, nor are few in a round to launch it.
#[test]
fn few_pieces_go_without_the_kernel() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    there_and_back(&gpu, &gpu.device, 255, 4 * KIB).unwrap();
    assert_eq!(asked(&gpu, "cuModuleLoadData"), 0);
    let [up, _] = there_and_back(&gpu, &gpu.device, 300, 20 * KIB).unwrap();
    assert!(up.calls < 5, "{up:?}");
    assert_eq!((asked(&gpu, "cuModuleLoadData"), asked(&gpu, "cuLaunchKernel")), (1, 0));
    drain(&gpu.device);
    gpu.finish();
}

/// A container without the driver's compiler, PTX that it does not know, a driver before CUDA 12: as before there was a kernel. It
/// is asked once.
#[test]
fn without_the_kernel_the_batch_call_does() {
    let check = |gpu: Gpu, batches: usize, loads: usize| {
        for _ in 0..2 {
            there_and_back(&gpu, &gpu.device, MANY, 4 * KIB).unwrap();
        }
        assert_eq!((asked(&gpu, "cuMemcpyBatchAsync"), asked(&gpu, "cuLaunchKernel")), (batches, 0));
        assert_eq!(asked(&gpu, "cuModuleLoadData"), loads);
        drain(&gpu.device);
        gpu.finish();
    };
    for (call, refusal, loads) in [
        ("cuModuleLoadData", 221, 1),
        ("cuModuleLoadData", 222, 1),
        ("cuModuleGetFunction", 500, 1),
        ("cuCtxGetId", 1, 0),
    ] {
        let Some(sim) = unseen(H200) else { return };
        sim.fail_always(call, refusal);
        check(on(sim), 8, loads);
    }
    check(built(builder(H200).driver_version(11_080)).unwrap(), 0, 0);
}

/// Where kernels do not reach page-locked memory, or see it late, the copy engine does the work.
#[test]
fn a_device_that_can_not_read_the_packed_bytes_gets_copies() {
    let Some(confidential) = Gpu::simulated("h100_h200_confidential") else { return };
    let old = built(from_env(cuda_sim::DeviceBuilder::from_toml(OLD_JETSON, "old"))).unwrap();
    let pageable = Gpu::simulated(H200).unwrap();
    pageable.sim.as_ref().unwrap().fail_always("cuMemHostAlloc", 2);
    for gpu in [confidential, old, pageable] {
        there_and_back(&gpu, &gpu.device, MANY, 4 * KIB + 1).unwrap();
        assert_eq!(asked(&gpu, "cuLaunchKernel"), 0);
        drain(&gpu.device);
        gpu.finish();
    }
}

/// A budget with room for one buffer, and not for its table; then for that too.
#[test]
fn a_small_pool_does() {
    let gpu = Gpu::any(H200);
    for (budget, launches) in [(2 * MIB, 0), (2 * MIB + 256 * KIB, 3)] {
        let pool = PoolOptions::new().budget(budget as u64);
        let device = Device::builder(&gpu.stream).pool(pool).build().unwrap();
        let before = asked(&gpu, "cuLaunchKernel");
        there_and_back(&gpu, &device, 2 * MANY, 4 * KIB).unwrap();
        assert_eq!(asked(&gpu, "cuLaunchKernel") - before, if gpu.sim.is_some() { launches } else { 0 });
        drain(&device);
    }
    gpu.finish();
}

/// The device reads the packed bytes and the table when it comes to the kernel: nobody has them before.
#[test]
fn buffers_and_tables_stay_until_the_kernel_has_run() {
    let gpu = Gpu::any(H200);
    // A pool that keeps what comes back, and hands it out next.
    let device = Device::builder(&gpu.stream).pool(PoolOptions::new()).build().unwrap();
    let other = gpu.another_stream();
    let bytes = [1, 2, 3].map(|seed| pattern(10 * MIB, seed));
    // Each with places of its own.
    let short = [apart(&bytes[0][..MIB], KIB), apart(&bytes[1][..MIB], 2 * KIB)];
    let long = apart(&bytes[2], 4 * KIB + 5);
    let mut targets = [2, 2, 21].map(|mib| filled(&gpu, mib * MIB, 7));
    let [first, second, third] = &mut targets;
    // Warm: the kernel is loaded, and there is a buffer for each that will be in use.
    upload(&device, &gpu.stream, &long, third).unwrap();
    let warm = [(); 4].map(|()| device.pool().acquire(2 * MIB + 256 * KIB).unwrap());
    drop(warm);
    let warm = [(); 4].map(|()| device.pool().acquire(MIB + 128 * KIB).unwrap());
    drop(warm);
    gpu.stream.memset_zeros(third).unwrap();
    gpu.stream.synchronize().unwrap();
    drain(&device);
    let gate = gpu.gate(&gpu.stream);
    upload(&device, &gpu.stream, &short[0], first).unwrap();
    upload(&device, &other, &short[1], second).unwrap();
    // More rounds than buffers: the first two have to have passed.
    let opener = gate.open_later();
    upload(&device, &gpu.stream, &long, third).unwrap();
    assert!(opener.opened(), "a buffer was packed again before it was read");
    assert!(on_host(&gpu, first) == expected(2 * MIB, 7, &short[0]));
    other.synchronize().unwrap();
    assert!(on_host(&gpu, second) == expected(2 * MIB, 7, &short[1]));
    assert!(on_host(&gpu, third) == expected(21 * MIB, 0, &long));
    drop((targets, other));
    drain(&device);
    drop(device);
    drain(&gpu.device);
    gpu.finish();
}

/// Whichever call fails, before or after its work: a typed error or a batch without the kernel; nothing is in flight then, nothing
/// is leaked, and the next batch is right.
#[test]
fn scattered_batches_survive_the_failure_of_any_call() {
    const OURS: [&str; 11] = [
        "cuCtxGetId",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer",
        "cuThreadExchangeStreamCaptureMode",
        "cuStreamIsCapturing",
        "cuGetProcAddress",
        "cuEventRecord",
        "cuEventQuery",
    ];
    let bytes = pattern(5 * MIB, 1);
    let parts = apart(&bytes, 4 * KIB + 3);
    let everything = |gpu: &Gpu, target: &mut CudaSlice<u8>| -> Result<(), Error> {
        upload(&gpu.device, &gpu.stream, &parts, target)?;
        assert!(on_host(gpu, target) == expected(11 * MIB, 7, &parts), "wrong bytes");
        Ok(())
    };
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let mut target = filled(&gpu, 11 * MIB, 7);
    let sim = gpu.sim.as_ref().unwrap();
    sim.clear_calls();
    everything(&gpu, &mut target).unwrap();
    drain(&gpu.device);
    let times = OURS.map(|call| (call, sim.count(call)));
    assert!(times.iter().all(|&(_, times)| times > 0), "{times:?}");
    // The mode is asked for as often as it is.
    let few = times.map(|(call, times)| (call, times.min(4) as u64));
    each_call_fails(
        few,
        |gpu| filled(gpu, 11 * MIB, 7),
        |gpu, target, failing| {
            let done = everything(gpu, target);
            assert!(done.is_err() || failing != Some("cuLaunchKernel"), "a launch that failed is an error");
            done
        },
    );
}

/// What was launched before a launch failed, or by it, has run when the error comes out; until then it has its buffers.
#[test]
fn a_launch_that_is_refused_is_drained_before_its_error() {
    for (nth, after) in [(1, true), (2, false), (2, true), (3, false)] {
        let Some(gpu) = Gpu::simulated(H200) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        let bytes = pattern(5 * MIB, 7);
        let parts = apart(&bytes, 4 * KIB);
        let mut target = filled(&gpu, 10 * MIB, 0);
        upload(&gpu.device, &gpu.stream, &parts, &mut target).unwrap();
        gpu.stream.synchronize().unwrap();
        drain(&gpu.device);
        sim.set_free_waits(false);
        let opener = gpu.gate(&gpu.stream).open_later();
        match after {
            false => sim.fail_nth("cuLaunchKernel", nth, 701),
            true => sim.fail_nth_after("cuLaunchKernel", nth, 701),
        }
        let error = upload(&gpu.device, &gpu.stream, &parts, &mut target).unwrap_err();
        assert_eq!(error.driver_code(), Some(701), "{error}");
        assert!(error.to_string().contains("cuLaunchKernel"), "{error}");
        assert!(opener.opened(), "the error came while the first round was on its way");
        sim.clear_failures();
        drop(target);
        drain(&gpu.device);
        gpu.finish();
    }
}

/// A kernel ends with its context. The next primary context of the device has the same handle, and loads it anew.
#[test]
fn a_context_that_is_made_again_loads_its_own_kernel() {
    let Some(sim) = unseen(H200) else { return };
    let mut handles = Vec::new();
    for lives in 1..4 {
        let context = CudaContext::new(sim.ordinal()).unwrap();
        handles.push(context.cu_ctx() as u64);
        let stream = context.new_stream().unwrap();
        let device = Device::new(&stream).unwrap();
        let bytes = pattern(MIB, lives);
        let parts = apart(&bytes, KIB);
        let mut target = stream.clone_htod(&vec![7; 2 * MIB]).unwrap();
        for _ in 0..2 {
            upload(&device, &stream, &parts, &mut target).unwrap();
        }
        assert!(stream.clone_dtoh(&target).unwrap() == expected(2 * MIB, 7, &parts));
        assert_eq!((sim.count("cuModuleLoadData"), sim.count("cuLaunchKernel")), (lives as usize, 2 * lives as usize));
        drop(target);
        drain(&device);
        drop((device, stream, context));
        // The device's thread is the last that knows the context.
        until(|| sim.count("cuDevicePrimaryCtxRelease") == lives as usize);
        sim.idle();
    }
    assert!(handles.windows(2).all(|pair| pair[0] == pair[1]), "{handles:x?}");
    assert_eq!(sim.leaks(), Vec::<String>::new());
    assert_eq!(sim.violations(), Vec::<String>::new());
}

/// Loading is nothing that a capture allows on any thread, unless that thread says so.
#[test]
fn another_threads_capture_goes_on_while_the_kernel_is_loaded() {
    let gpu = Gpu::any(H200);
    let captured = gpu.another_stream();
    let bytes = pattern(MIB, 1);
    let parts = apart(&bytes, KIB);
    let mut target = filled(&gpu, 2 * MIB, 7);
    gpu.context.bind_to_thread().unwrap();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: a live stream.
    assert_eq!(code(unsafe { sys::cuStreamBeginCapture_v2(captured.cu_stream(), mode) }), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| upload(&gpu.device, &gpu.stream, &parts, &mut target).unwrap());
    });
    let mut graph = null_mut();
    // SAFETY: a live stream, a valid place for the answer, and then a graph that is ours.
    unsafe {
        assert_eq!(
            code(sys::cuStreamEndCapture(captured.cu_stream(), &raw mut graph)),
            0,
            "something broke the capture"
        );
        assert_eq!(code(sys::cuGraphDestroy(graph)), 0);
    }
    assert!(gpu.sim.is_none() || asked(&gpu, "cuLaunchKernel") == 1);
    assert!(on_host(&gpu, &target) == expected(2 * MIB, 7, &parts));
    drop((target, captured));
    drain(&gpu.device);
    gpu.finish();
}
