//! Copies of memory that is handed over, in the background.

use transfer_tensor::cudarc::driver::CudaContext;

use crate::machines::pattern;
use crate::support::{GH200, Gpu, H200, HANG, SPARK, block_on, within};

const MIB: usize = 1 << 20;

#[test]
fn both_ends_come_back_with_the_same_bytes() {
    for profile in [H200, GH200, SPARK] {
        let gpu = Gpu::any(profile);
        for len in [1, 4096, 300_000, 5 * MIB + 3] {
            let source = pattern(len, 1);
            let (kept, slice) = gpu.device.upload_owned(&gpu.stream, source.clone()).unwrap().wait().unwrap();
            assert!(kept == source && slice.len() == len, "{profile}: {len}");
            let (values, slice) = gpu.device.download_owned(&gpu.stream, slice).unwrap().wait().unwrap();
            assert!(values == source && slice.len() == len, "{profile}: {len}");
            // The slice is the caller's again, like any other.
            assert!(gpu.stream.clone_dtoh(&slice).unwrap() == source);
        }
        gpu.finish();
    }
}

/// Nothing blocks at submission, whatever the stream waits for; and several are done in their order.
#[test]
fn submitting_does_not_wait_for_the_stream() {
    within(HANG, || {
        let gpu = Gpu::any(H200);
        let warm = gpu.device.upload_owned(&gpu.stream, vec![0u8; 2 * MIB]).unwrap().wait().unwrap();
        drop(warm);
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let (a, b) = (pattern(2 * MIB, 1), pattern(1000, 2));
        let first = gpu.device.upload_owned(&gpu.stream, a.clone()).unwrap();
        let second = gpu.device.upload_owned(&gpu.stream, b.clone()).unwrap();
        let first = first.try_wait().unwrap_err();
        assert!(first.error.is_not_ready());
        let first = first.value.unwrap();
        assert!(!first.is_complete() && !second.is_complete());
        gate.open();
        let (_, slice) = block_on(second).unwrap();
        assert!(first.is_complete(), "the second overtook the first");
        assert!(gpu.device.download_vec(&gpu.stream, &slice).unwrap() == b);
        let (_, slice_a) = first.wait().unwrap();
        assert!(gpu.device.download_vec(&gpu.stream, &slice_a).unwrap() == a);
        drop((slice, slice_a));
        gpu.finish();
    });
}

#[test]
fn a_ticket_may_be_dropped_or_forgotten_while_it_runs() {
    within(HANG, || {
        let gpu = Gpu::any(H200);
        let (_, slice) = gpu.device.upload_owned(&gpu.stream, pattern(3 * MIB, 4)).unwrap().wait().unwrap();
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        drop(gpu.device.upload_owned(&gpu.stream, pattern(3 * MIB, 5)).unwrap());
        drop(gpu.device.download_owned(&gpu.stream, slice).unwrap());
        let last = gpu.device.upload_owned(&gpu.stream, pattern(10, 6)).unwrap();
        gate.open();
        let (_, slice) = last.wait().unwrap();
        drop(slice);
        gpu.finish();
    });
}

/// The default stream of a thread is another one on the device's own thread: the point is taken where the call is made.
#[test]
fn a_per_thread_stream_means_the_callers() {
    within(HANG, || {
        let gpu = Gpu::on_stream(H200, CudaContext::per_thread_stream);
        let kernels = gpu.kernels();
        let mut tensor = gpu.on_device(&[1u8; 50_000]);
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 9);
        let slice = tensor.into_cuda_slice().unwrap();
        gpu.sim.iter().for_each(|sim| sim.clear_calls());
        let copying = gpu.device.download_owned(&gpu.stream, slice).unwrap();
        if let Some(sim) = &gpu.sim {
            // The copy is on its way, if too early, before the gate opens.
            while !sim.calls().iter().any(|call| call.name.starts_with("cuMemcpyDtoHAsync")) {
                std::thread::yield_now();
            }
        }
        gate.open();
        let (values, slice) = copying.wait().unwrap();
        assert_eq!(values, [9; 50_000]);
        drop((slice, kernels));
        gpu.finish();
    });
}

#[test]
fn refusals_give_back_what_was_handed_in() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let other = Gpu::simulated(SPARK).unwrap();
    let refused = gpu.device.upload_owned(&other.stream, vec![1u8, 2]).unwrap_err();
    assert!(refused.error.is_invalid_input());
    assert_eq!(refused.value, [1, 2]);
    assert!(gpu.device.upload_owned(&gpu.stream, Vec::<u8>::new()).unwrap_err().error.is_unsupported());
    let slice = other.device.upload_new(&other.stream, &[3u8, 4]).unwrap();
    let refused = gpu.device.download_owned(&other.stream, slice).unwrap_err();
    assert_eq!(other.device.download_vec(&other.stream, &refused.value).unwrap(), [3, 4]);
    drop(refused);
    other.finish();
    gpu.finish();
}

/// A fault comes out of the wait, and out of every later one.
#[test]
fn a_fault_ends_the_wait() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let copying = gpu.device.upload_owned(&gpu.stream, pattern(2 * MIB, 1)).unwrap();
    sim.sticky(700);
    gate.open();
    let error = within(HANG, move || copying.wait().map(drop).unwrap_err());
    assert!(error.is_fault(), "{error}");
    sim.sticky(0);
}
