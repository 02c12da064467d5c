//! Submitting copies. The context is current and the stream is not being captured: the callers see to both.

use cudarc::driver::sys;

use super::call::check;
use super::stream::Stream;
use crate::copy::{PINNED_PIECE, chunks};
use crate::error::Result;

/// Submits a copy of `bytes` bytes from host memory to the device, in pieces if it is large.
///
/// # Errors
/// The driver refused a piece; those before it are submitted.
///
/// # Safety
/// `source` and `target` are valid for `bytes` bytes, and stay so, undisturbed, until the stream has passed the copy.
pub(crate) unsafe fn host_to_device(target: u64, source: *const u8, bytes: usize, stream: &Stream) -> Result<()> {
    chunks(bytes, PINNED_PIECE).try_for_each(|(_, piece)| {
        let target = target + piece.start as u64;
        // SAFETY: the caller's; the piece lies inside both ends.
        let code = unsafe {
            let source = source.add(piece.start).cast();
            sys::cuMemcpyHtoDAsync_v2(target, source, piece.len(), stream.handle())
        };
        check("cuMemcpyHtoDAsync", code)
    })
}

/// Submits a copy of `bytes` bytes from the device to host memory.
///
/// # Safety
/// As [`host_to_device`], with the roles exchanged.
pub(crate) unsafe fn device_to_host(target: *mut u8, source: u64, bytes: usize, stream: &Stream) -> Result<()> {
    chunks(bytes, PINNED_PIECE).try_for_each(|(_, piece)| {
        let source = source + piece.start as u64;
        // SAFETY: the caller's; the piece lies inside both ends.
        let code = unsafe {
            let target = target.add(piece.start).cast();
            sys::cuMemcpyDtoHAsync_v2(target, source, piece.len(), stream.handle())
        };
        check("cuMemcpyDtoHAsync", code)
    })
}

/// Submits a copy of `bytes` bytes from device memory to device memory.
///
/// # Safety
/// As [`host_to_device`].
pub(crate) unsafe fn device_to_device(target: u64, source: u64, bytes: usize, stream: &Stream) -> Result<()> {
    // SAFETY: the caller's.
    let code = unsafe { sys::cuMemcpyDtoDAsync_v2(target, source, bytes, stream.handle()) };
    check("cuMemcpyDtoDAsync", code)
}

/// Submits zeroing `bytes` bytes of device memory.
///
/// # Safety
/// As [`host_to_device`], for `target`.
pub(crate) unsafe fn zero(target: u64, bytes: usize, stream: &Stream) -> Result<()> {
    // SAFETY: the caller's.
    check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(target, 0, bytes, stream.handle()) })
}
