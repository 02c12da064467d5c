//! Raw driver calls, as a program makes them through cudarc's bindings.

#![allow(dead_code)]

use cudarc::driver::sys::{self, CUresult};

/// Makes `ordinal`'s primary context current and returns it.
pub(crate) fn context(ordinal: usize) -> sys::CUcontext {
    let mut ctx = std::ptr::null_mut();
    // SAFETY: out-pointers are valid; the ordinal is checked by the driver.
    unsafe {
        ok(sys::cuInit(0));
        ok(sys::cuDevicePrimaryCtxRetain(&raw mut ctx, ordinal as i32));
        ok(sys::cuCtxSetCurrent(ctx));
    }
    ctx
}

/// Asserts success.
#[track_caller]
pub(crate) fn ok(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

/// The number of a result.
pub(crate) fn code(result: CUresult) -> u32 {
    result as u32
}

pub(crate) fn stream() -> sys::CUstream {
    let mut stream = std::ptr::null_mut();
    // SAFETY: a valid out-pointer.
    ok(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
    stream
}

pub(crate) fn blocking_stream() -> sys::CUstream {
    let mut stream = std::ptr::null_mut();
    // SAFETY: a valid out-pointer.
    ok(unsafe { sys::cuStreamCreate(&raw mut stream, 0) });
    stream
}

pub(crate) fn event() -> sys::CUevent {
    let mut event = std::ptr::null_mut();
    // SAFETY: a valid out-pointer.
    ok(unsafe { sys::cuEventCreate(&raw mut event, 0) });
    event
}

pub(crate) fn alloc(bytes: usize) -> u64 {
    let mut address = 0;
    // SAFETY: a valid out-pointer.
    ok(unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) });
    address
}

/// Pinned memory as a slice; it lives until [`free_pinned`].
pub(crate) fn pinned(bytes: usize) -> &'static mut [u8] {
    let mut place = std::ptr::null_mut();
    // SAFETY: a valid out-pointer; the memory is readable and writable and nobody else's.
    unsafe {
        ok(sys::cuMemHostAlloc(&raw mut place, bytes, 0));
        std::slice::from_raw_parts_mut(place.cast(), bytes)
    }
}

pub(crate) fn free_pinned(memory: &'static mut [u8]) {
    // SAFETY: from `pinned`, and given up here.
    ok(unsafe { sys::cuMemFreeHost(memory.as_mut_ptr().cast()) });
}

pub(crate) fn free(address: u64) {
    // SAFETY: from `alloc`.
    ok(unsafe { sys::cuMemFree_v2(address) });
}

pub(crate) fn h2d(to: u64, from: &[u8], stream: sys::CUstream) -> CUresult {
    // SAFETY: the caller keeps the source alive.
    unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream) }
}

pub(crate) fn d2h(to: &mut [u8], from: u64, stream: sys::CUstream) -> CUresult {
    // SAFETY: the caller keeps the destination alive.
    unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream) }
}

pub(crate) fn sync(stream: sys::CUstream) -> CUresult {
    // SAFETY: no pointers.
    unsafe { sys::cuStreamSynchronize(stream) }
}

pub(crate) fn read(from: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: the vector is as long as the copy.
    ok(unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, len) });
    bytes
}
