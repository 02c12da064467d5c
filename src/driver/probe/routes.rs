//! Trying the zero-copy routes: an attribute is a hint, a call that worked is a fact.
//!
//! Each probe allocates a few pages, lets the device write them through its own pointer (a memset on a stream of ours) and
//! looks at the result on the host. No device memory is allocated and nothing is copied. Pageable memory is not probed: a
//! copy from it proves nothing, since the driver would stage it.

use std::alloc::Layout;
use std::ffi::c_void;

use cudarc::driver::sys;

use crate::driver::check;
use crate::error::{Error, Kind, Result};
use crate::platform::{Attributes, Route, Routes};

/// One page on every machine, also those with 64 KiB pages.
const BLOCK: usize = 64 << 10;
/// What the device writes: at the start of the block, where it lies does not matter.
const WRITTEN: usize = 64;
const PATTERN: u8 = 0xA5;

/// Tries what the attributes do not rule out. A context is current on this thread.
pub(super) fn routes(attributes: &Attributes, notes: &mut Vec<String>) -> Routes {
    let mut routes = Routes::default();
    let stream = match ProbeStream::new() {
        Ok(stream) => stream,
        Err(error) => {
            notes.push(format!("no route could be tried: {error}"));
            return routes;
        }
    };
    let ruled_out = |attribute: Option<i32>| attribute == Some(0);
    let map = !ruled_out(attributes.can_map_host_memory);

    match Pinned::new() {
        Ok(block) => {
            routes.pin = Route::Works;
            if map {
                routes.pinned = route(host_block(&stream, block.at));
            }
        }
        Err(error) => routes.pin = route(Err(error)),
    }
    if !ruled_out(attributes.host_register_supported) {
        match Registered::new(0) {
            Ok(block) => {
                routes.register = Route::Works;
                if map {
                    routes.registered = route(host_block(&stream, block.at.cast()));
                }
            }
            Err(error) => routes.register = route(Err(error)),
        }
        if routes.register == Route::Works && attributes.read_only_host_register_supported.is_some_and(|flag| flag != 0)
        {
            routes.read_only = route(Registered::new(sys::CU_MEMHOSTREGISTER_READ_ONLY).map(drop));
        }
    }
    if attributes.managed_memory.is_some_and(|flag| flag != 0) {
        let concurrent = attributes.concurrent_managed_access.is_some_and(|flag| flag != 0);
        routes.managed = route(Managed::new().and_then(|block| {
            // Without concurrent access the host must not touch the block while any work runs, ours or another's.
            if concurrent { written(&stream, block.at, block.at as *const u8) } else { Ok(()) }
        }));
    }
    routes
}

fn route(tried: Result<()>) -> Route {
    match tried {
        Ok(()) => Route::Works,
        Err(error) => Route::Refused(error.to_string()),
    }
}

/// The device writes through its pointer to the host block at `host`.
fn host_block(stream: &ProbeStream, host: *mut c_void) -> Result<()> {
    let mut device = 0;
    // SAFETY: `host` is the start of a live page-locked or registered block; the call writes one pointer.
    check("cuMemHostGetDevicePointer", unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0) })?;
    written(stream, device, host.cast())
}

/// The device writes the pattern at `device`; it must appear at `host`.
fn written(stream: &ProbeStream, device: sys::CUdeviceptr, host: *const u8) -> Result<()> {
    // SAFETY: `device` is the device's pointer to a live block of BLOCK bytes, which outlives the synchronize below.
    check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(device, PATTERN, WRITTEN, stream.0) })?;
    // SAFETY: the stream is ours and alive.
    check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream.0) })?;
    for at in 0..WRITTEN {
        // SAFETY: inside the block; the device's write has completed. Volatile: the compiler saw nobody write.
        let byte = unsafe { host.add(at).read_volatile() };
        if byte != PATTERN {
            let what = "what the device writes to host memory".to_owned();
            let why = format!("byte {at} is {byte:#04x} instead of {PATTERN:#04x}");
            return Err(Error::new(Kind::Unsupported { what, why }));
        }
    }
    Ok(())
}

/// A stream of ours that no other stream waits for.
struct ProbeStream(sys::CUstream);

impl ProbeStream {
    fn new() -> Result<Self> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; the call writes one pointer.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        Ok(Self(stream))
    }
}

impl Drop for ProbeStream {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once; all its work was waited for.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

struct Pinned {
    at: *mut c_void,
}

impl Pinned {
    fn new() -> Result<Self> {
        let mut at = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a context is current; the call writes one pointer.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut at, BLOCK, flags) })?;
        Ok(Self { at })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once; the device's use of it was waited for.
        let _ = unsafe { sys::cuMemFreeHost(self.at) };
    }
}

struct Managed {
    at: sys::CUdeviceptr,
}

impl Managed {
    fn new() -> Result<Self> {
        let mut at = 0;
        let flags = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
        // SAFETY: a context is current; the call writes one pointer.
        check("cuMemAllocManaged", unsafe { sys::cuMemAllocManaged(&mut at, BLOCK, flags) })?;
        Ok(Self { at })
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once; the device's use of it was waited for.
        let _ = unsafe { sys::cuMemFree_v2(self.at) };
    }
}

/// A page of ordinary memory of ours, registered.
struct Registered {
    at: *mut u8,
}

impl Registered {
    const LAYOUT: Layout = match Layout::from_size_align(BLOCK, BLOCK) {
        Ok(layout) => layout,
        Err(_) => Layout::new::<u8>(),
    };

    fn new(flags: u32) -> Result<Self> {
        // SAFETY: the layout's size is not zero.
        let at = unsafe { std::alloc::alloc_zeroed(Self::LAYOUT) };
        if at.is_null() {
            return Err(Error::new(Kind::OutOfMemory {
                what: "host memory",
                bytes: BLOCK as u64,
                why: "the allocator refused".into(),
            }));
        }
        let flags = flags | sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the block is ours, BLOCK bytes long and aligned to its size; `drop` unregisters before it is freed.
        let registered = check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(at.cast(), BLOCK, flags) });
        if let Err(error) = registered {
            // SAFETY: allocated above with this layout; the driver refused to take it.
            unsafe { std::alloc::dealloc(at, Self::LAYOUT) };
            return Err(error);
        }
        Ok(Self { at })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered in `new`; the device's use of it was waited for.
        if unsafe { sys::cuMemHostUnregister(self.at.cast()) } == sys::CUresult::CUDA_SUCCESS {
            // SAFETY: allocated in `new` with this layout and no longer registered.
            unsafe { std::alloc::dealloc(self.at, Self::LAYOUT) };
        }
        // Else the driver may still hold the pages: 64 KiB are left to it.
    }
}
