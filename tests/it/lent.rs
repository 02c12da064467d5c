//! Guards that lend their memory to streams, and captures.

use std::sync::Arc;

use transfer_tensor::cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut, DeviceSlice, SyncOnDrop};

use crate::support::{Gpu, H200};

const LEN: usize = 4096;

/// A host guard passed to cudarc's copies is waited for by the next access that conflicts, through it or the tensor.
#[test]
fn a_host_guard_that_a_stream_reads_is_written_after() {
    let gpu = Gpu::any(H200);
    for through_guard in [true, false] {
        let mut on_device = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
        let mut tensor = gpu.both_sides(&[1u8; LEN]);
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let mut host = tensor.host_mut().unwrap();
        gpu.stream.memcpy_htod(&host, &mut on_device).unwrap();
        // Looking is no conflict.
        assert_eq!(host[0], 1);
        let opener = gate.open_later();
        if through_guard {
            host.fill(2);
        } else {
            drop(host);
            tensor.host_mut().unwrap().fill(2);
        }
        assert!(opener.opened(), "written under a reader");
        drop(opener);
        assert_eq!(gpu.stream.clone_dtoh(&on_device).unwrap(), [1; LEN]);
    }
    gpu.finish();
}

#[test]
fn a_host_guard_that_a_stream_writes_is_read_after() {
    let gpu = Gpu::any(H200);
    for through_guard in [true, false] {
        let on_device = gpu.stream.clone_htod(&[3u8; LEN]).unwrap();
        let mut tensor = gpu.both_sides(&[1u8; LEN]);
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let mut host = tensor.host_mut().unwrap();
        gpu.stream.memcpy_dtoh(&on_device, &mut host).unwrap();
        let opener = gate.open_later();
        if through_guard {
            assert_eq!(*host, [3; LEN]);
        } else {
            drop(host);
            assert_eq!(*tensor.host().unwrap(), [3; LEN]);
        }
        assert!(opener.opened(), "read under a writer");
        drop(opener);
    }
    gpu.finish();
}

/// A target that looks at the source, through the guard or another part of the tensor, while cudarc asks for its address:
/// after the source was handed over, before the copy is submitted.
struct Nosy<'a> {
    target: &'a mut CudaSlice<u8>,
    look: &'a mut dyn FnMut(),
}

impl DeviceSlice<u8> for Nosy<'_> {
    fn len(&self) -> usize {
        self.target.len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.target.stream()
    }
}

impl DevicePtrMut<u8> for Nosy<'_> {
    fn device_ptr_mut<'s>(&'s mut self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>) {
        (self.look)();
        self.target.device_ptr_mut(stream)
    }
}

#[test]
fn a_look_through_the_guard_does_not_end_the_notice_of_a_copy_to_come() {
    let gpu = Gpu::any(H200);
    let mut on_device = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    let mut tensor = gpu.both_sides(&[1u8; LEN]);
    gpu.context.synchronize().unwrap();
    let slow = gpu.another_stream();
    {
        let mut host = tensor.host_mut().unwrap();
        let mut seen = 0;
        let mut gate = None;
        let mut look = || {
            seen = host[0];
            // From here: a look that waits must not hang.
            gate = Some(gpu.gate(&slow));
        };
        slow.memcpy_htod(&host, &mut Nosy { target: &mut on_device, look: &mut look }).unwrap();
        assert_eq!(seen, 1);
        let opener = gate.unwrap().open_later();
        host.fill(2);
        assert!(opener.opened(), "written under a reader");
    }
    assert_eq!(slow.clone_dtoh(&on_device).unwrap(), [1; LEN]);
    drop((on_device, tensor, slow));
    gpu.finish();
}

#[test]
fn a_look_at_another_part_does_not_end_the_notice_of_a_copy_to_come() {
    let gpu = Gpu::any(H200);
    let mut on_device = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    for on_host in [true, false] {
        let mut tensor = gpu.both_sides(&[1u8; 2 * LEN]);
        gpu.context.synchronize().unwrap();
        let slow = gpu.another_stream();
        {
            let (mut head, mut tail) = tensor.view_mut(..).unwrap().split_at(LEN).unwrap();
            let mut gate = None;
            let mut look = || {
                tail.host_mut().unwrap().fill(9);
                gate = Some(gpu.gate(&slow));
            };
            let mut target = Nosy { target: &mut on_device, look: &mut look };
            if on_host {
                slow.memcpy_htod(&head.host_mut().unwrap(), &mut target).unwrap();
            } else {
                slow.memcpy_dtod(&head.device_mut(&gpu.stream).unwrap(), &mut target).unwrap();
            }
            let opener = gate.unwrap().open_later();
            head.host_mut().unwrap().fill(2);
            assert!(opener.opened(), "written under a reader, on_host: {on_host}");
        }
        assert_eq!(slow.clone_dtoh(&on_device).unwrap(), [1; LEN]);
    }
    drop(on_device);
    gpu.finish();
}

/// The guard's own work comes after what it let another stream do.
#[test]
fn a_guards_own_stream_comes_after_the_foreign_reader() {
    let gpu = Gpu::any(H200);
    let slow = gpu.another_stream();
    let mut copy = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    let mut tensor = gpu.on_device(&[1; LEN]);
    gpu.context.synchronize().unwrap();
    {
        let gate = gpu.gate(&slow);
        let mut guard = tensor.device_mut(&gpu.stream).unwrap();
        slow.memcpy_dtod(&guard, &mut copy).unwrap();
        let _opener = gate.open_later();
        gpu.stream.memset_zeros(&mut guard).unwrap();
    }
    assert_eq!(*tensor.host().unwrap(), [0; LEN]);
    assert_eq!(slow.clone_dtoh(&copy).unwrap(), [1; LEN]);
    drop((tensor, copy, slow));
    gpu.finish();
}

/// Ours of a foreign stream and ours of the guard's.
#[test]
fn a_foreign_stream_comes_after_the_guards_own_work() {
    let gpu = Gpu::any(H200);
    let (kernels, other) = (gpu.kernels(), gpu.another_stream());
    let mut copy = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
    let mut tensor = gpu.on_device(&[1; LEN]);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let mut guard = tensor.device_mut(&gpu.stream).unwrap();
    kernels.fill(&gpu.stream, &mut guard, 2);
    other.memcpy_dtod(&guard, &mut copy).unwrap();
    drop(guard);
    gate.open();
    assert_eq!(other.clone_dtoh(&copy).unwrap(), [2; LEN]);
    drop((tensor, copy, other, kernels));
    gpu.finish();
}
