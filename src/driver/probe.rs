//! Asking a device what it is, what it can do and how much memory it has.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};

use super::{Bound, Driver, check};
use crate::error::{Error, Kind, Result};
use crate::platform::{Attributes, DriverMemory, Facts};

mod routes;

/// A retained primary context, current on this thread. Dropping it gives the context back and makes the previous one
/// current again. For callers who brought no context of their own.
#[derive(Debug)]
pub(crate) struct Primary {
    device: sys::CUdevice,
    previous: sys::CUcontext,
    /// Dropped last: releasing the context would break a capture in the mode that the thread came with.
    _relaxed: Relaxed,
}

impl Primary {
    pub(crate) fn retain(ordinal: usize) -> Result<Self> {
        Driver::get()?;
        // Before anything else: retaining a context breaks a capture too.
        let relaxed = Relaxed::enter()?;
        let mut device = 0;
        // SAFETY: the driver is loaded; the call writes one integer.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&mut device, as_int(ordinal)) })
            .map_err(|error| no_device(ordinal, &error))?;
        let (mut previous, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the call writes one pointer.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut previous) })?;
        // SAFETY: the device exists (above); the call writes one pointer. `drop` releases what is retained here.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) })
            .map_err(|error| no_device(ordinal, &error))?;
        let primary = Self { device, previous, _relaxed: relaxed };
        // SAFETY: the context was retained just above and stays so until `primary` is dropped.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })?;
        Ok(primary)
    }

    pub(crate) fn device(&self) -> sys::CUdevice {
        self.device
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: same thread (the type is not Send). This context was current when we came; null means "none".
        let _ = unsafe { sys::cuCtxSetCurrent(self.previous) };
        // SAFETY: retained once in `retain`, released once here.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// The relaxed capture mode on this thread, until dropped.
#[derive(Debug)]
struct Relaxed {
    mode: sys::CUstreamCaptureMode,
    /// Capture modes belong to the thread.
    _thread: std::marker::PhantomData<*const ()>,
}

impl Relaxed {
    fn enter() -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges this thread's mode with the one in `mode`; needs no context.
        let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        check("cuThreadExchangeStreamCaptureMode", exchanged)?;
        Ok(Self { mode, _thread: std::marker::PhantomData })
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: same thread; puts the mode back. A failure leaves the relaxed one, which harms nothing of ours.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.mode) };
    }
}

fn as_int(ordinal: usize) -> c_int {
    c_int::try_from(ordinal).unwrap_or(c_int::MAX)
}

#[cold]
fn no_device(ordinal: usize, error: &Error) -> Error {
    Error::new(Kind::NoDriver { why: format!("device {ordinal} is not usable: {error}") })
}

pub(crate) fn device_count() -> Result<usize> {
    Driver::get()?;
    let mut count = 0;
    // SAFETY: the driver is loaded; the call writes one integer.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Everything about the device of the caller's context.
pub(crate) fn facts_in(context: &Arc<CudaContext>, probe: bool) -> Result<Facts> {
    let _bound = Bound::enter(context)?;
    facts(context.cu_device(), context.ordinal(), probe)
}

/// Everything about `device`, whose context is current on this thread.
pub(crate) fn facts(device: sys::CUdevice, ordinal: usize, probe: bool) -> Result<Facts> {
    let driver = Driver::get()?;
    let mut notes = Vec::new();
    let attributes = attributes(driver, device, &mut notes);
    let mut total = 0;
    // SAFETY: `device` is valid; the call writes one integer.
    let told = check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&mut total, device) });
    if let Err(error) = told {
        notes.push(format!("the device's memory is unknown: {error}"));
    }
    let routes = if probe { routes::routes(&attributes, &mut notes) } else { Default::default() };
    Ok(Facts {
        ordinal,
        name: text(|to, len| {
            // SAFETY: writes at most `len` bytes at `to`, zero included.
            unsafe { sys::cuDeviceGetName(to, len, device) }
        })
        .unwrap_or_else(|| format!("device {ordinal}")),
        uuid: uuid(device),
        pci_bus_id: text(|to, len| {
            // SAFETY: writes at most `len` bytes at `to`, zero included.
            unsafe { sys::cuDeviceGetPCIBusId(to, len, device) }
        }),
        driver_version: driver.version(),
        total_bytes: total as u64,
        attributes,
        routes,
        notes,
    })
}

/// `cuDeviceGetAttribute` with plain integers: the binding level at hand may know neither the newer attributes nor the
/// codes that a newer driver answers.
type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_uint;

fn attributes(driver: &Driver, device: sys::CUdevice, notes: &mut Vec<String>) -> Attributes {
    // SAFETY: the type is that of cuDeviceGetAttribute, its enums passed as the integers they are in C.
    let Some(ask) = (unsafe { driver.optional::<GetAttribute>("cuDeviceGetAttribute") }) else {
        notes.push("the driver has no cuDeviceGetAttribute".into());
        return Attributes::default();
    };
    // A refusal means that this driver does not know the attribute (CUDA_ERROR_INVALID_VALUE): absent, not zero.
    let get = |id: c_int| {
        let mut value = 0;
        // SAFETY: `device` is valid; the call writes one integer.
        (unsafe { ask(&mut value, id, device) } == 0).then_some(value)
    };
    Attributes::read(get)
}

fn text(call: impl FnOnce(*mut c_char, c_int) -> sys::CUresult) -> Option<String> {
    let mut buffer = [0u8; 256];
    let code = call(buffer.as_mut_ptr().cast(), buffer.len() as c_int);
    if code != sys::CUresult::CUDA_SUCCESS {
        return None;
    }
    let text = CStr::from_bytes_until_nul(&buffer).ok()?.to_string_lossy().trim().to_owned();
    Some(text).filter(|text| !text.is_empty())
}

fn uuid(device: sys::CUdevice) -> Option<String> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `device` is valid; the call writes 16 bytes.
    let code = unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) };
    if code != sys::CUresult::CUDA_SUCCESS {
        return None;
    }
    Some(uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect())
}

/// The memory of the device whose context is current on this thread; `total` as `cuDeviceTotalMem` told it.
pub(crate) fn memory(total: u64) -> DriverMemory {
    let mut all = 0;
    // Twice, because on some machines the figure moves on its own (page cache in GPU memory).
    let free = (0..2).map(|_| {
        let mut free = 0;
        // SAFETY: a context is current; the call writes two integers.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut all) }).map(|()| free as u64)
    });
    let free = free.collect::<Result<Vec<_>>>().map_err(|error| error.to_string());
    DriverMemory { total: if total == 0 { all as u64 } else { total }, free }
}

/// The memory of the device of the caller's context.
pub(crate) fn memory_in(context: &Arc<CudaContext>, total: u64) -> Result<DriverMemory> {
    let _bound = Bound::enter(context)?;
    Ok(memory(total))
}

/// What is known when the device could not even be asked.
pub(crate) fn or_failed(asked: Result<DriverMemory>, total: u64) -> DriverMemory {
    asked.unwrap_or_else(|error| DriverMemory { total, free: Err(error.to_string()) })
}
