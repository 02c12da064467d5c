//! Submitting copies. The context is current and the stream is not being captured: the callers see to both.

use cudarc::driver::sys;

use super::call::check;
use super::stream::Stream;
use crate::error::Result;

/// Submits a copy of `bytes` bytes from host memory to the device.
///
/// # Safety
/// `source` and `target` are valid for `bytes` bytes, and stay so, undisturbed, until the stream has passed the copy.
pub(crate) unsafe fn host_to_device(target: u64, source: *const u8, bytes: usize, stream: &Stream) -> Result<()> {
    // SAFETY: the caller's.
    let code = unsafe { sys::cuMemcpyHtoDAsync_v2(target, source.cast(), bytes, stream.handle()) };
    check("cuMemcpyHtoDAsync", code)
}

/// Submits a copy of `bytes` bytes from the device to host memory.
///
/// # Safety
/// As [`host_to_device`], with the roles exchanged.
pub(crate) unsafe fn device_to_host(target: *mut u8, source: u64, bytes: usize, stream: &Stream) -> Result<()> {
    // SAFETY: the caller's.
    let code = unsafe { sys::cuMemcpyDtoHAsync_v2(target.cast(), source, bytes, stream.handle()) };
    check("cuMemcpyDtoHAsync", code)
}

/// Submits zeroing `bytes` bytes of device memory.
///
/// # Safety
/// As [`host_to_device`], for `target`.
pub(crate) unsafe fn zero(target: u64, bytes: usize, stream: &Stream) -> Result<()> {
    // SAFETY: the caller's.
    check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(target, 0, bytes, stream.handle()) })
}
