//! What a driver answers to odd questions, measured on an H200 (driver 580). The simulated driver must give the same answers,
//! or tests on it prove nothing; a real one is asked the same, so that a change of driver shows.

use std::ffi::c_void;
use std::ptr::null_mut;

use memmap2::{Mmap, MmapMut};
use transfer_tensor::cudarc::driver::sys;

use crate::machines::code;
use crate::support::{Gpu, H200};

const INVALID_VALUE: u32 = 1;
const ALREADY_REGISTERED: u32 = 712;
const NOT_REGISTERED: u32 = 713;
const PAGE: usize = 4096;

/// A device with its context current on this thread.
fn asked() -> Gpu {
    let gpu = Gpu::any(H200);
    gpu.context.bind_to_thread().unwrap();
    gpu
}

/// Two pages of ordinary memory that begin on a page.
fn pages(count: usize) -> MmapMut {
    let mut map = MmapMut::map_anon(count * PAGE).unwrap();
    map.fill(1);
    map
}

fn register(memory: &[u8], flags: u32) -> u32 {
    // SAFETY: the range is mapped; every test unregisters it before it goes.
    code(unsafe { sys::cuMemHostRegister_v2(memory.as_ptr().cast_mut().cast(), memory.len(), flags) })
}

fn unregister(memory: *const u8) -> u32 {
    // SAFETY: the driver checks the address.
    code(unsafe { sys::cuMemHostUnregister(memory.cast_mut().cast()) })
}

/// Device memory that frees itself.
struct Allocation(sys::CUdeviceptr);

impl Allocation {
    fn new(bytes: usize) -> Self {
        let mut address = 0;
        // SAFETY: a valid place for the answer.
        assert_eq!(code(unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) }), 0);
        Self(address)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: allocated above, and the tests below wait for their copies.
        unsafe { sys::cuMemFree_v2(self.0) };
    }
}

#[test]
fn an_unaligned_base_can_be_registered() {
    let _gpu = asked();
    let memory = pages(2);
    assert_eq!(register(&memory[17..1000], 0), 0);
    assert_eq!(unregister(memory[17..].as_ptr()), 0);
}

#[test]
fn the_same_range_and_an_overlapping_one_are_registered_already() {
    let _gpu = asked();
    let memory = pages(4);
    assert_eq!(register(&memory[..2 * PAGE], 0), 0);
    assert_eq!(register(&memory[..2 * PAGE], 0), ALREADY_REGISTERED);
    assert_eq!(register(&memory[PAGE..3 * PAGE], 0), ALREADY_REGISTERED);
    assert_eq!(register(&memory[100..200], 0), ALREADY_REGISTERED);
    assert_eq!(unregister(memory.as_ptr()), 0);
    // What was refused left nothing behind.
    assert_eq!(register(&memory[PAGE..3 * PAGE], 0), 0);
    assert_eq!(unregister(memory[PAGE..].as_ptr()), 0);
}

#[test]
fn disjoint_ranges_of_one_page_can_both_be_registered() {
    let _gpu = asked();
    let memory = pages(1);
    assert_eq!(register(&memory[..100], 0), 0);
    assert_eq!(register(&memory[2000..2100], 0), 0);
    assert_eq!(unregister(memory.as_ptr()), 0);
    assert_eq!(unregister(memory[2000..].as_ptr()), 0);
}

#[test]
fn only_the_base_of_a_registration_ends_it_and_only_once() {
    let _gpu = asked();
    let memory = pages(2);
    assert_eq!(register(&memory, 0), 0);
    assert_eq!(unregister(memory[64..].as_ptr()), INVALID_VALUE);
    assert_eq!(unregister(memory.as_ptr()), 0);
    assert_eq!(unregister(memory.as_ptr()), NOT_REGISTERED);
}

#[test]
fn an_allocated_block_is_not_unregistered() {
    let _gpu = asked();
    let mut block: *mut c_void = null_mut();
    // SAFETY: a valid place for the answer; freed below.
    unsafe {
        assert_eq!(code(sys::cuMemHostAlloc(&raw mut block, PAGE, 0)), 0);
        assert_eq!(unregister(block.cast()), INVALID_VALUE);
        assert_eq!(code(sys::cuMemFreeHost(block)), 0);
    }
}

#[test]
fn nothing_can_not_be_registered() {
    let _gpu = asked();
    let memory = pages(1);
    assert_eq!(register(&memory[..0], 0), INVALID_VALUE);
}

#[test]
fn allocating_nothing_works_on_the_host_and_not_on_the_device() {
    let _gpu = asked();
    let (mut block, mut address) = (null_mut(), 0);
    // SAFETY: valid places for the answers; what was allocated is freed.
    unsafe {
        assert_eq!(code(sys::cuMemHostAlloc(&raw mut block, 0, 0)), 0);
        if !block.is_null() {
            assert_eq!(code(sys::cuMemFreeHost(block)), 0);
        }
        assert_eq!(code(sys::cuMemAlloc_v2(&raw mut address, 0)), INVALID_VALUE);
    }
}

#[test]
fn copies_and_memsets_of_nothing_succeed() {
    let gpu = asked();
    let device = Allocation::new(64);
    let (stream, mut host) = (gpu.stream.cu_stream(), [0u8; 8]);
    // SAFETY: all addresses are valid, for nothing.
    unsafe {
        assert_eq!(code(sys::cuMemcpyHtoDAsync_v2(device.0, host.as_ptr().cast(), 0, stream)), 0);
        assert_eq!(code(sys::cuMemcpyDtoHAsync_v2(host.as_mut_ptr().cast(), device.0, 0, stream)), 0);
        assert_eq!(code(sys::cuMemcpyDtoDAsync_v2(device.0, device.0, 0, stream)), 0);
        assert_eq!(code(sys::cuMemsetD8Async(device.0, 1, 0, stream)), 0);
        assert_eq!(code(sys::cuStreamSynchronize(stream)), 0);
    }
}

#[test]
fn a_read_only_mapping_needs_the_read_only_flag() {
    let gpu = asked();
    let mut memory = MmapMut::map_anon(2 * PAGE).unwrap();
    memory.fill(3);
    let memory: Mmap = memory.make_read_only().unwrap();
    assert_eq!(register(&memory, 0), INVALID_VALUE);
    let mut supported = 0;
    // SAFETY: a valid place for the answer.
    let asked = unsafe {
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
        sys::cuDeviceGetAttribute(&raw mut supported, attribute, gpu.context.cu_device())
    };
    assert_eq!((code(asked), supported), (0, 1));
    assert_eq!(register(&memory, sys::CU_MEMHOSTREGISTER_READ_ONLY), 0);
    assert_eq!(unregister(memory.as_ptr()), 0);
}

#[test]
fn a_copy_past_the_end_of_an_allocation_is_refused() {
    let gpu = asked();
    // A whole granule of the driver's, so that nothing of its own lies behind.
    let bytes = 2 << 20;
    let (device, host) = (Allocation::new(bytes), vec![0u8; bytes + 16]);
    // SAFETY: the source is long enough; the target's end is what is tested.
    unsafe {
        let past = sys::cuMemcpyHtoDAsync_v2(device.0, host.as_ptr().cast(), bytes + 16, gpu.stream.cu_stream());
        assert_eq!(code(past), INVALID_VALUE);
        // It is refused, not a fault.
        assert_eq!(code(sys::cuStreamSynchronize(gpu.stream.cu_stream())), 0);
    }
}

#[test]
fn an_event_that_was_never_recorded_counts_as_done() {
    let _gpu = asked();
    let mut event = null_mut();
    // SAFETY: a valid place for the answer, then a live event.
    unsafe {
        assert_eq!(code(sys::cuEventCreate(&raw mut event, 2)), 0);
        assert_eq!(code(sys::cuEventQuery(event)), 0);
        assert_eq!(code(sys::cuEventSynchronize(event)), 0);
        assert_eq!(code(sys::cuEventDestroy_v2(event)), 0);
    }
}

#[test]
fn the_driver_does_not_know_pageable_memory() {
    let _gpu = asked();
    let memory = [0u8; 64];
    let mut kind = 0u32;
    // SAFETY: a valid place for the answer, of the attribute's size.
    let answer = unsafe {
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        sys::cuPointerGetAttribute((&raw mut kind).cast(), attribute, memory.as_ptr() as u64)
    };
    assert_eq!(code(answer), INVALID_VALUE);
}
