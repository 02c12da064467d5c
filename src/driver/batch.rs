//! Many copies in one call (`cuMemcpyBatchAsync`, CUDA 12.8), or one by one where the driver lacks it.
//!
//! The function changed its signature in CUDA 13.0, and cudarc binds the one of its level. So it is asked for at run time,
//! under its first signature, which drivers keep, and under the second where they do not.

use std::ffi::c_uint;

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Way};
use super::copy;
use super::load::Driver;
use super::stream::Stream;
use crate::error::Result;

/// `CUmemcpyAttributes`, which older bindings do not know.
#[repr(C)]
pub(super) struct Attributes {
    /// When a source may be read.
    order: c_uint,
    source: Place,
    target: Place,
    flags: c_uint,
}

/// `CUmemLocation`: a hint for managed memory, of which there is none here.
#[repr(C)]
pub(super) struct Place {
    kind: c_uint,
    id: c_uint,
}

/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: in the order of the stream, as for single copies.
const IN_STREAM_ORDER: c_uint = 1;

type First = unsafe extern "C" fn(
    *mut sys::CUdeviceptr,
    *mut sys::CUdeviceptr,
    *mut usize,
    usize,
    *mut Attributes,
    *mut usize,
    usize,
    *mut usize,
    sys::CUstream,
) -> sys::CUresult;

type Second = unsafe extern "C" fn(
    *mut sys::CUdeviceptr,
    *mut sys::CUdeviceptr,
    *mut usize,
    usize,
    *mut Attributes,
    *mut usize,
    usize,
    sys::CUstream,
) -> sys::CUresult;

/// How a driver takes many copies at once.
#[derive(Debug, Clone, Copy)]
pub(super) enum BatchCall {
    First(First),
    Second(Second),
    Absent,
}

impl BatchCall {
    /// What the driver has for the current context's device.
    pub(super) fn find() -> Self {
        const NAME: &std::ffi::CStr = c"cuMemcpyBatchAsync";
        let Ok(driver) = Driver::get() else { return BatchCall::Absent };
        // SAFETY: the signature of CUDA 12.8.
        if let Some(call) = unsafe { driver.versioned::<First>(NAME, 12_080) } {
            return BatchCall::First(call);
        }
        // SAFETY: the signature of CUDA 13.0.
        match unsafe { driver.versioned::<Second>(NAME, 13_000) } {
            Some(call) => BatchCall::Second(call),
            None => BatchCall::Absent,
        }
    }
}

/// Copies that are to be submitted together; none of 0 bytes. Emptied and filled again for each round.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    device: Vec<sys::CUdeviceptr>,
    host: Vec<sys::CUdeviceptr>,
    bytes: Vec<usize>,
    /// Submit them one by one: the host's memory is pageable, which a batch is not promised to take.
    pageable: bool,
}

/// How often the driver was asked for what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counted {
    /// Blocks that the device moves.
    pub(crate) copies: u64,
    /// Calls that submit them; the launch of a kernel is one.
    pub(crate) calls: u64,
}

impl Counted {
    /// Copies that had a call each.
    pub(super) fn add_single(&mut self, copies: usize) {
        self.copies += copies as u64;
        self.calls += copies as u64;
    }
}

impl Copies {
    /// Host memory that is `pinned`, or not.
    pub(crate) fn new(pinned: bool) -> Self {
        Self { pageable: !pinned, ..Self::default() }
    }

    pub(crate) fn clear(&mut self) {
        self.device.clear();
        self.host.clear();
        self.bytes.clear();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn push(&mut self, device: u64, host: *const u8, bytes: usize) {
        self.device.push(device);
        self.host.push(host as u64);
        self.bytes.push(bytes);
    }

    /// Submits all of them; they run in no particular order, after what is on the stream. The context is current.
    ///
    /// # Errors
    /// The driver refused one. Others may be submitted.
    ///
    /// # Safety
    /// Both ends of each are valid and stay undisturbed until the stream has passed. No two of them write the same bytes.
    pub(crate) unsafe fn submit(
        &mut self,
        context: &Context,
        way: Way,
        stream: &Stream,
        counted: &mut Counted,
    ) -> Result<()> {
        // The call refuses default streams, and nothing to do. For one copy it is no gain.
        let alone = self.bytes.len() <= 1 || stream.is_default() || self.pageable;
        let call = if alone { BatchCall::Absent } else { context.batches() };
        let (count, handle) = (self.bytes.len(), stream.handle());
        let (device, host) = (self.device.as_mut_ptr(), self.host.as_mut_ptr());
        let (target, source) = match way {
            Way::Up => (device, host),
            Way::Down => (host, device),
        };
        let nowhere = || Place { kind: 0, id: 0 };
        let mut how = Attributes { order: IN_STREAM_ORDER, source: nowhere(), target: nowhere(), flags: 0 };
        let mut first = 0usize;
        let (how, first, bytes) = (&raw mut how, &raw mut first, self.bytes.as_mut_ptr());
        let code = match call {
            // SAFETY: the arrays are `count` long; the attributes hold from copy 0 on; the copies are the caller's.
            BatchCall::First(call) => unsafe {
                let mut failed = 0usize;
                call(target, source, bytes, count, how, first, 1, &raw mut failed, handle)
            },
            // SAFETY: as above.
            BatchCall::Second(call) => unsafe { call(target, source, bytes, count, how, first, 1, handle) },
            // SAFETY: the caller's.
            BatchCall::Absent => return unsafe { self.one_by_one(way, stream, counted) },
        };
        if code == sys::CUresult::CUDA_ERROR_NOT_SUPPORTED {
            // A driver that has the function, but not for this device.
            // SAFETY: the caller's; nothing was submitted.
            return unsafe { self.one_by_one(way, stream, counted) };
        }
        check("cuMemcpyBatchAsync", code)?;
        counted.copies += count as u64;
        counted.calls += 1;
        Ok(())
    }

    /// # Safety
    /// As [`submit`](Copies::submit).
    unsafe fn one_by_one(&self, way: Way, stream: &Stream, counted: &mut Counted) -> Result<()> {
        for ((&device, &host), &bytes) in self.device.iter().zip(&self.host).zip(&self.bytes) {
            let host = std::ptr::with_exposed_provenance_mut::<u8>(host as usize);
            // SAFETY: the caller's.
            unsafe {
                match way {
                    Way::Up => copy::host_to_device(device, host, bytes, stream)?,
                    Way::Down => copy::device_to_host(host, device, bytes, stream)?,
                }
            }
            counted.add_single(crate::copy::chunks(bytes, crate::copy::PINNED_PIECE).count());
        }
        Ok(())
    }
}

/// Rows of a block of device memory and of host memory, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rectangle {
    pub(crate) device: u64,
    pub(crate) device_pitch: usize,
    pub(crate) host: *mut u8,
    pub(crate) host_pitch: usize,
    pub(crate) width: usize,
    pub(crate) rows: usize,
}

impl Rectangle {
    /// Submits a copy of all rows. The context is current.
    ///
    /// # Errors
    /// The driver refused it.
    ///
    /// # Safety
    /// The rows are valid on both sides and stay undisturbed until the stream has passed; the host's are page-locked. The
    /// pitches are not smaller than the width.
    pub(crate) unsafe fn submit(&self, way: Way, stream: &Stream, counted: &mut Counted) -> Result<()> {
        let (host, device) = (sys::CUmemorytype::CU_MEMORYTYPE_HOST, sys::CUmemorytype::CU_MEMORYTYPE_DEVICE);
        let up = way == Way::Up;
        let rectangle = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: if up { host } else { device },
            srcHost: self.host.cast(),
            srcDevice: self.device,
            srcArray: std::ptr::null_mut(),
            srcPitch: if up { self.host_pitch } else { self.device_pitch },
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: if up { device } else { host },
            dstHost: self.host.cast(),
            dstDevice: self.device,
            dstArray: std::ptr::null_mut(),
            dstPitch: if up { self.device_pitch } else { self.host_pitch },
            WidthInBytes: self.width,
            Height: self.rows,
        };
        // SAFETY: the caller's.
        check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&raw const rectangle, stream.handle()) })?;
        counted.add_single(1);
        Ok(())
    }
}

/// The largest distance of two rows that `cuMemcpy2DAsync` takes (attribute 11 of every device is this or more).
pub(crate) const MOST_PITCH: usize = i32::MAX as usize;

/// Whether host memory is page-locked, in one piece. The context is current.
pub(crate) fn is_pinned(host: *const u8, bytes: usize) -> bool {
    const HOST: u32 = sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32;
    let last = host.wrapping_add(bytes.saturating_sub(1));
    let kind = |at: *const u8| {
        let mut kind = 0u32;
        // SAFETY: the call writes four bytes, and only looks the address up.
        let code = unsafe {
            let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
            sys::cuPointerGetAttribute((&raw mut kind).cast(), attribute, at as u64)
        };
        (code == sys::CUresult::CUDA_SUCCESS).then_some(kind)
    };
    let block = |at: *const u8| {
        let mut id = 0u64;
        // SAFETY: the call writes eight bytes, and only looks the address up.
        let code = unsafe {
            let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
            sys::cuPointerGetAttribute((&raw mut id).cast(), attribute, at as u64)
        };
        (code == sys::CUresult::CUDA_SUCCESS && id != 0).then_some(id)
    };
    kind(host) == Some(HOST)
        && kind(last) == Some(HOST)
        && matches!((block(host), block(last)), (Some(first), Some(last)) if first == last)
}

/// The addresses of the allocation that `address` lies in, if the driver says. The context is current.
pub(crate) fn allocation(address: u64) -> Option<std::ops::Range<u64>> {
    let ask = |attribute: sys::CUpointer_attribute| {
        let mut value = 0u64;
        // SAFETY: both attributes are eight bytes; the call only looks the address up.
        let code = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) };
        (code == sys::CUresult::CUDA_SUCCESS).then_some(value)
    };
    let start = ask(sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)?;
    let bytes = ask(sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE)?;
    Some(start..start.checked_add(bytes)?)
}
