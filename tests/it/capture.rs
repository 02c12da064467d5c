//! While a stream is captured into a graph: a typed error before anything illegal, a capture that ends valid, and other
//! threads that notice nothing (field report R86).

use std::ptr::null_mut;
use std::sync::Arc;

use transfer_tensor::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, sys};
use transfer_tensor::{Advice, Backing, Error, Location, Strategy};

use crate::machines::{code, drain, kernel, pattern, xor_on_device, xor_on_host};
use crate::support::{Gpu, H200, SPARK};

use sys::CUstreamCaptureMode::{CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL};

/// A capture that is running.
pub(crate) struct Capture<'a> {
    stream: &'a Arc<CudaStream>,
}

impl<'a> Capture<'a> {
    pub(crate) fn begin(stream: &'a Arc<CudaStream>, mode: sys::CUstreamCaptureMode) -> Self {
        stream.context().bind_to_thread().unwrap();
        // SAFETY: a live stream.
        assert_eq!(code(unsafe { sys::cuStreamBeginCapture_v2(stream.cu_stream(), mode) }), 0);
        Self { stream }
    }

    /// How many nodes it has; fails if something broke it.
    pub(crate) fn end(self) -> usize {
        let (mut graph, mut nodes) = (null_mut(), 0);
        // SAFETY: a live stream, then a live graph, and valid places for the answers.
        unsafe {
            let ended = code(sys::cuStreamEndCapture(self.stream.cu_stream(), &raw mut graph));
            assert_eq!(ended, 0, "something broke the capture");
            assert!(!graph.is_null());
            assert_eq!(code(sys::cuGraphGetNodes(graph, null_mut(), &raw mut nodes)), 0);
            assert_eq!(code(sys::cuGraphDestroy(graph)), 0);
        }
        nodes
    }
}

#[track_caller]
fn refused<T>(result: Result<T, impl Into<Error>>) {
    match result {
        Ok(_) => panic!("it has worked on a stream that is captured"),
        Err(error) => {
            let error: Error = error.into();
            assert!(error.is_capturing(), "{error}");
        }
    }
}

/// Every entry point that is given the captured stream refuses; every other one works. The capture ends with what the
/// caller put into it, nothing less and nothing more.
fn every_entry_point(gpu: &Gpu, strategy: Strategy, mode: sys::CUstreamCaptureMode) {
    let stream = &gpu.stream;
    let options = || gpu.device.tensor().strategy(strategy);
    let bytes = pattern(200_000, 1);
    let len = bytes.len();
    // Warm: on the device, with a use on the stream that will be captured; and cold: nothing allocated yet.
    let mut warm = options().from_slice(&bytes, [len]).unwrap();
    drop(warm.device_mut(stream).unwrap());
    let mut cold = options().from_slice(&bytes, [len]).unwrap();
    let mut zeros = options().zeros::<u8>([len]).unwrap();
    let dropped = {
        let mut tensor = options().from_slice(&bytes, [len]).unwrap();
        drop(tensor.device_mut(stream).unwrap());
        tensor
    };
    let slice = stream.clone_htod(&bytes).unwrap();
    let (shared_slice, own) = (Arc::new(stream.clone_htod(&bytes).unwrap()), stream.clone_htod(&bytes).unwrap());
    let to_slice = gpu.device.tensor().from_cuda_slice(own, [len]).unwrap();
    let managed = options().strategy(Strategy::ZeroCopy).backing(Backing::Managed).zeros::<u8>([len]).unwrap();
    let other = gpu.context.new_stream().unwrap();
    let mut scratch = stream.clone_htod(&bytes).unwrap();
    // The address beforehand: asking cudarc inside a capture would record events there.
    let scratch_address = scratch.device_ptr_mut(stream).0;
    stream.synchronize().unwrap();

    let capture = Capture::begin(stream, mode);
    // One node of the caller's own.
    // SAFETY: the scratch memory is as long.
    assert_eq!(code(unsafe { sys::cuMemsetD8Async(scratch_address, 3, len, stream.cu_stream()) }), 0);

    refused(warm.device(stream));
    refused(warm.device_mut(stream));
    refused(cold.device(stream));
    refused(zeros.device_mut(stream));
    refused(warm.view(5..10).unwrap().device(stream));
    refused(managed.prefetch(Location::Device, stream));
    refused(gpu.device.tensor().from_shared_cuda_slice(shared_slice.clone(), [len]));
    let slice = match gpu.device.tensor().from_cuda_slice(slice, [len]) {
        Ok(_) => panic!("the slice's stream is captured"),
        Err(refused) => {
            assert!(refused.error.is_capturing(), "{}", refused.error);
            refused.value
        }
    };
    let to_slice = match to_slice.into_cuda_slice() {
        Ok(_) => panic!("the slice's stream is captured"),
        Err(refused) => {
            assert!(refused.error.is_capturing(), "{}", refused.error);
            refused.value
        }
    };
    if strategy == Strategy::Streamed {
        refused(cold.release_host(stream));
    }
    // A guard of another stream, asked for the captured one, gives no address; a launch with it would be refused.
    {
        let guard = warm.device_mut(&other).unwrap();
        assert_eq!(guard.device_ptr(stream).0, 0);
    }
    // What does not need the captured stream works: other streams, the host side, tickets, new tensors.
    managed.advise(Advice::ReadMostly, Location::Device).unwrap();
    drop(cold.device_mut(&other).unwrap());
    assert_eq!(*cold.host().unwrap(), *bytes);
    cold.host_mut().unwrap()[0] = 7;
    let cold = cold.to_device().unwrap().wait().unwrap().to_host().unwrap().wait().unwrap();
    assert_eq!(cold.host().unwrap()[..2], [7, bytes[1]]);
    assert_eq!(*warm.host().unwrap(), *bytes);
    let fresh = options().from_vec(bytes.clone(), [len]).unwrap();
    assert_eq!(fresh.to_device().unwrap().wait().unwrap().into_vec().unwrap(), bytes);
    let _ = gpu.device.memory();
    let _ = transfer_tensor::Device::new(&other).unwrap();
    // Dropping never needs the stream: the memory goes when the capture has ended.
    drop((dropped, zeros));
    assert!(gpu.device.stats().leaked == 0);

    assert_eq!(capture.end(), 1);
    // And all is as before.
    assert_eq!(*warm.host().unwrap(), *bytes);
    xor_on_device(&gpu.context, stream, &mut warm.device_mut(stream).unwrap());
    let mut expected = bytes.clone();
    xor_on_host(&mut expected);
    assert_eq!(*warm.host().unwrap(), *expected);
    assert_eq!(*to_slice.host().unwrap(), *bytes);
    assert_eq!(stream.clone_dtoh(&to_slice.into_cuda_slice().unwrap()).unwrap(), bytes);
    assert_eq!(gpu.device.tensor().from_cuda_slice(slice, [len]).unwrap().into_vec().unwrap(), bytes);
    drop((warm, cold, managed, scratch, shared_slice));
    drain(&gpu.device);
    stream.synchronize().unwrap();
    gpu.context.check_err().unwrap();
    assert_eq!(gpu.device.stats().leaked, 0);
}

#[test]
fn every_entry_point_refuses_a_captured_stream_and_the_capture_ends_valid() {
    for profile in [H200, SPARK] {
        for strategy in [Strategy::Streamed, Strategy::ZeroCopy] {
            for mode in [CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_GLOBAL] {
                let gpu = Gpu::any(profile);
                every_entry_point(&gpu, strategy, mode);
                gpu.finish();
            }
        }
    }
}

/// A guard that lives when the capture begins was not recorded, and is not recorded into the graph when it goes.
#[test]
fn a_guard_that_is_dropped_during_a_capture_stays_out_of_it() {
    for strategy in [Strategy::Streamed, Strategy::ZeroCopy] {
        let gpu = Gpu::any(H200);
        let mut tensor = gpu.device.tensor().strategy(strategy).from_slice(&pattern(1000, 2), [1000]).unwrap();
        {
            let mut guard = tensor.device_mut(&gpu.stream).unwrap();
            xor_on_device(&gpu.context, &gpu.stream, &mut guard);
            let capture = Capture::begin(&gpu.stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
            drop(guard);
            // Its end is not known now: no look at the bytes, no free, but an error, and at once.
            refused(tensor.host());
            refused(tensor.host_mut());
            assert_eq!(capture.end(), 0);
        }
        let mut expected = pattern(1000, 2);
        xor_on_host(&mut expected);
        assert_eq!(*tensor.host().unwrap(), *expected);
        drop(tensor);
        drain(&gpu.device);
        gpu.context.check_err().unwrap();
        assert_eq!(gpu.device.stats().leaked, 0);
        gpu.finish();
    }
}

/// The other threads' transfers go on, in every mode of the capture: ours do not break it, nor it them. On the thread that
/// waits (which asks for events) as on the callers'.
#[test]
fn other_threads_transfer_while_one_captures() {
    for mode in [CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_GLOBAL] {
        let gpu = Gpu::any(H200);
        let captured = gpu.context.new_stream().unwrap();
        let add = kernel(&gpu.context, "add_one_f32");
        // So that no module is loaded while the capture runs.
        let warm = kernel(&gpu.context, "xor_index_u8");
        let capture = Capture::begin(&captured, mode);
        std::thread::scope(|scope| {
            for thread in 0..3u64 {
                let gpu = &gpu;
                scope.spawn(move || {
                    for round in 0..5 {
                        let bytes = pattern(3_000_000, thread * 100 + round);
                        let options = gpu.device.tensor().pin(round % 2 == 0);
                        let tensor = options.from_vec(bytes.clone(), [bytes.len()]).unwrap();
                        let tensor = tensor.to_device().unwrap().wait().unwrap();
                        let mut tensor = tensor.to_host().unwrap().wait().unwrap();
                        drop(tensor.device_mut(&gpu.stream).unwrap());
                        assert!(*tensor.host().unwrap() == *bytes);
                        // Freed by the waiter's thread.
                        drop(tensor);
                    }
                });
            }
        });
        drain(&gpu.device);
        assert_eq!(capture.end(), 0);
        drop((captured, add, warm));
        gpu.context.check_err().unwrap();
        assert_eq!(gpu.device.stats().leaked, 0);
        gpu.finish();
    }
}

/// The legacy stream while a stream that it waits for is captured: refused, and the capture lives.
#[test]
fn the_legacy_stream_is_refused_while_a_blocking_stream_is_captured() {
    let gpu = Gpu::any(H200);
    let legacy = gpu.context.default_stream();
    let mut tensor = gpu.device.tensor().from_slice(&pattern(1000, 3), [1000]).unwrap();
    drop(tensor.device_mut(&legacy).unwrap());
    tensor = tensor.to_host().unwrap().wait().unwrap();
    let mut blocking = null_mut();
    gpu.context.bind_to_thread().unwrap();
    // SAFETY: a valid place for the answer; the stream is destroyed below.
    assert_eq!(code(unsafe { sys::cuStreamCreate(&raw mut blocking, 0) }), 0);
    // SAFETY: the stream outlives its wrapper.
    let captured = unsafe { gpu.context.wrap_borrowed_stream(blocking) };
    let capture = Capture::begin(&captured, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    refused(tensor.device_mut(&legacy));
    refused(tensor.device(&legacy));
    assert_eq!(*tensor.host().unwrap(), *pattern(1000, 3));
    drop(tensor.device_mut(&gpu.stream).unwrap());
    assert_eq!(capture.end(), 0);
    xor_on_device(&gpu.context, &legacy, &mut tensor.device_mut(&legacy).unwrap());
    let mut expected = pattern(1000, 3);
    xor_on_host(&mut expected);
    assert_eq!(*tensor.host().unwrap(), *expected);
    drop((tensor, legacy, captured));
    drain(&gpu.device);
    // SAFETY: idle, and its wrapper is gone.
    assert_eq!(code(unsafe { sys::cuStreamDestroy_v2(blocking) }), 0);
    gpu.finish();
}

/// One-shot copies as well, in both directions.
#[test]
fn one_shot_copies_refuse_a_captured_stream() {
    let gpu = Gpu::any(H200);
    let mut slice = gpu.device.upload_new(&gpu.stream, &[1u8; 100]).unwrap();
    gpu.stream.synchronize().unwrap();
    for mode in [CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL] {
        let capture = Capture::begin(&gpu.stream, mode);
        refused(gpu.device.upload(&gpu.stream, &[2u8; 100], &mut slice));
        refused(gpu.device.upload_new(&gpu.stream, &[2u8; 100]));
        refused(gpu.device.download(&gpu.stream, &slice, &mut [0u8; 100]));
        refused(gpu.device.download_vec(&gpu.stream, &slice));
        assert_eq!(capture.end(), 0);
    }
    assert_eq!(gpu.device.download_vec(&gpu.stream, &slice).unwrap(), [1; 100]);
    drop(slice);
    gpu.finish();
}
