//! Is there a driver, and does it have the functions this crate calls?
//!
//! cudarc panics when the library or a function is missing. So before the first call we open the same library under the
//! same names and look the functions up; only then is cudarc touched. A success is remembered, a failure is not: the
//! library may be installed, or loaded by somebody, later.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys;

use super::call::check;
use crate::error::{Error, Kind, Result};

/// Every driver function this crate calls through cudarc, plus those that cudarc's own types call on our behalf.
/// (A test compares this list with the source.)
const REQUIRED: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetPCIBusId",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemAllocManaged",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpy2DAsync_v2",
    "cuMemsetD8Async",
    "cuPointerGetAttribute",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuThreadExchangeStreamCaptureMode",
];

/// The loaded driver. Only [`Driver::get`] makes one, so whoever holds it may call the functions of `REQUIRED`.
#[derive(Debug)]
pub(crate) struct Driver {
    library: libloading::Library,
    version: i32,
}

impl Driver {
    /// Loads and initialises the driver, once a process.
    ///
    /// # Errors
    /// No library, a missing function, `cuInit` refusing (also the toolkit's stub library, which answers 34), or a
    /// process that was forked after CUDA was initialised.
    pub(crate) fn get() -> Result<&'static Driver> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            check_not_forked()?;
            return Ok(driver);
        }
        let library = open()?;
        for symbol in REQUIRED {
            // SAFETY: the symbol is only looked up, never called with this type.
            if unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_err() {
                return Err(Error::new(Kind::MissingSymbol { symbol }));
            }
        }
        // SAFETY: the function exists (checked above) and takes no pointers.
        let code = unsafe { sys::cuInit(0) };
        check("cuInit", code)
            .map_err(|error| Error::new(Kind::NoDriver { why: format!("{error}{}", hint(code as u32)) }))?;
        let mut version: c_int = 0;
        // SAFETY: the function exists and writes one integer.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
        let driver = DRIVER.get_or_init(|| Driver { library, version });
        watch_forks();
        check_not_forked()?;
        Ok(driver)
    }

    /// The CUDA version the driver supports: 1000 × major + 10 × minor.
    pub(crate) fn version(&self) -> i32 {
        self.version
    }

    /// A function that not every driver or binding level has.
    ///
    /// # Safety
    /// `F` must be the function pointer type of `symbol`.
    pub(crate) unsafe fn optional<F: Copy>(&self, symbol: &'static str) -> Option<F> {
        // SAFETY: the caller vouches for the type; the library is never unloaded.
        unsafe { self.library.get::<F>(symbol.as_bytes()).ok().map(|found| *found) }
    }

    /// A function in the form it had in CUDA `version` (1000 × major + 10 × minor), for those whose signature changed: the
    /// driver gives the newest that is not younger. `None` where it is older, or can not be asked (before 11.3).
    ///
    /// # Safety
    /// `F` must be the function pointer type of `symbol` in that version.
    pub(crate) unsafe fn versioned<F: Copy>(&self, symbol: &'static CStr, version: c_int) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a function pointer") };
        // SAFETY: the type of the function's first version, which drivers keep under the plain name.
        let ask = unsafe { self.optional::<GetProcAddress>("cuGetProcAddress")? };
        let mut found = std::ptr::null_mut();
        // SAFETY: a C string; the call writes one pointer.
        let code = unsafe { ask(symbol.as_ptr(), &mut found, version, 0) };
        if code != 0 || found.is_null() {
            return None;
        }
        // SAFETY: not null, as large as `F`, and of its type by the caller's word.
        Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
    }
}

/// `cuGetProcAddress`, its answer as a plain number: a newer driver may give codes that the bindings do not know.
type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_uint;

/// Set in a child that was forked after the driver was initialised.
static FORKED: AtomicBool = AtomicBool::new(false);

/// CUDA is unusable in such a child (CUDA C++ Programming Guide, "fork"): say so instead of hanging. A flag rather than a
/// look at the process id, which is a system call, on every transfer. Who waits for another thread asks too: there is none in the child,
/// and a lock that it had when the process was forked is never free there.
pub(crate) fn check_not_forked() -> Result<()> {
    if FORKED.load(Ordering::Relaxed) { Err(Error::new(Kind::Forked)) } else { Ok(()) }
}

#[cfg(unix)]
fn watch_forks() {
    type Handler = Option<unsafe extern "C" fn()>;
    unsafe extern "C" {
        fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
    }
    unsafe extern "C" fn forked() {
        FORKED.store(true, Ordering::Relaxed);
    }
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only sets a flag. If it can not be installed, a forked child meets the driver's own error.
        let _ = unsafe { pthread_atfork(None, None, Some(forked)) };
    });
}

#[cfg(not(unix))]
fn watch_forks() {}

fn hint(code: u32) -> &'static str {
    match code {
        34 => " (this is the toolkit's stub library, not a driver)",
        100 => " (the driver sees no device)",
        _ => "",
    }
}

/// The driver's names, in the order in which cudarc tries them. (Its own list, `get_lib_name_candidates`, exists only in
/// builds that load the driver at run time.)
#[cfg(windows)]
const NAMES: &[&str] = &["cuda.dll", "nvcuda.dll"];
#[cfg(not(windows))]
const NAMES: &[&str] = &["libcuda.so", "libcuda.so.1", "libnvcuda.so"];

/// Opens what cudarc would open.
fn open() -> Result<libloading::Library> {
    let mut first_error = None;
    for &name in NAMES {
        // SAFETY: loading the driver runs its initialisers, as cudarc itself does.
        match unsafe { libloading::Library::new(name) } {
            Ok(library) => return Ok(library),
            Err(error) => first_error = first_error.or(Some(format!("{name}: {error}"))),
        }
    }
    let why = first_error.unwrap_or_else(|| "no library name to try".into());
    Err(Error::new(Kind::NoDriver { why }))
}
