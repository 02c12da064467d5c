//! Initialisation, versions, errors, entry points by name.

use super::types::{In, Out, Text};
use crate::state::State;
use crate::status::{INVALID_VALUE, NO_DEVICE, NOT_FOUND, Res, Status};
use std::ffi::{CString, c_char, c_void};
use std::ptr;

export! {
    fn cuInit(call, flags: u32) {
        call.before_init(|st| {
            if flags != 0 {
                return Err(INVALID_VALUE);
            }
            if st.devices.is_empty() {
                return Err(NO_DEVICE);
            }
            st.initialised = true;
            Ok(())
        })
    }

    fn cuDriverGetVersion(call, version: Out<i32>) {
        call.before_init(|st| version.set(driver_version(st)))
    }

    fn cuGetErrorName(call, error: Status, text: Out<*const c_char>) {
        let _ = call;
        answer(error, text, crate::status::name(error)).err().unwrap_or(0)
    }

    fn cuGetErrorString(call, error: Status, text: Out<*const c_char>) {
        let _ = call;
        answer(error, text, crate::status::text(error)).err().unwrap_or(0)
    }

    fn cuGetProcAddress(call, name: Text, address: Out<*mut c_void>, version: i32, _flags: u64) {
        call.before_init(|st| address.set(look_up(&name.get()?, version, driver_version(st))?))
    }

    fn cuGetProcAddress_v2(
        call, name: Text, address: Out<*mut c_void>, version: i32, _flags: u64, found: Out<u32>,
    ) {
        call.before_init(|st| match look_up(&name.get()?, version, driver_version(st)) {
            Ok(function) => {
                found.set_if(0);
                address.set(function)
            }
            Err(status) => {
                // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
                found.set_if(1);
                address.set(ptr::null_mut())?;
                Err(status)
            }
        })
    }

    fn cuGetExportTable(call, table: Out<*const c_void>, _id: In<[u8; 16]>) {
        call.before_init(|_| {
            table.set(ptr::null())?;
            Err(INVALID_VALUE)
        })
    }
}

fn answer(error: Status, text: Out<*const c_char>, found: Option<&'static std::ffi::CStr>) -> Res {
    let _ = error;
    match found {
        Some(found) => text.set(found.as_ptr()),
        None => {
            text.set(ptr::null())?;
            Err(INVALID_VALUE)
        }
    }
}

/// The version of the machine the thread works on, else of the newest one.
fn driver_version(st: &State) -> i32 {
    let ctx = crate::state::current();
    let device = st.contexts.get(&ctx).map(|context| context.device);
    let of = |device: usize| st.devices.get(device).map(|dev| dev.profile.driver_version);
    let newest = st.devices.iter().map(|dev| dev.profile.driver_version).max();
    device.and_then(of).or(newest).unwrap_or(13000)
}

/// Functions that not every driver has: the CUDA version that brought a signature, and the symbol that has it.
const DATED: &[(&str, &[(i32, &str)])] = &[
    ("cuCtxGetId", &[(12_000, "cuCtxGetId")]),
    ("cuMemcpyBatchAsync", &[(13_000, "cuMemcpyBatchAsync_v2"), (BATCHES_FROM, "cuMemcpyBatchAsync")]),
];

/// The CUDA version that brought `cuMemcpyBatchAsync`.
pub(super) const BATCHES_FROM: i32 = 12_080;

/// The exported function of a name: for a dated one the newest that both the caller and the driver know, else the newest
/// version, as the header's macros pick it.
fn look_up(name: &str, asked: i32, driver: i32) -> Res<*mut c_void> {
    if let Some((_, versions)) = DATED.iter().find(|(dated, _)| *dated == name) {
        let known = versions.iter().find(|(from, _)| *from <= asked && *from <= driver).ok_or(NOT_FOUND)?;
        return symbol(known.1);
    }
    for version in ["_v4", "_v3", "_v2", ""] {
        // These headers still map the plain name to the first version.
        if version == "_v4" && name == "cuCtxCreate" {
            continue;
        }
        let found = symbol(&format!("{name}{version}"))?;
        if !found.is_null() {
            return Ok(found);
        }
    }
    Err(NOT_FOUND)
}

/// A symbol of this library.
fn symbol(name: &str) -> Res<*mut c_void> {
    let name = CString::new(name).map_err(|_| INVALID_VALUE)?;
    let here: extern "C" fn(u32) -> Status = cuInit;
    // SAFETY: all fields of `Dl_info` may be zero.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is that of a function, and `info` can be written.
    if unsafe { libc::dladdr(here as *const c_void, &raw mut info) } == 0 {
        return Err(NOT_FOUND);
    }
    // SAFETY: the path came from the loader; NOLOAD only finds what is loaded, and that never goes.
    let library = unsafe { libc::dlopen(info.dli_fname, libc::RTLD_NOLOAD | libc::RTLD_NOW) };
    if library.is_null() {
        return Err(NOT_FOUND);
    }
    // SAFETY: an open library and a C string.
    Ok(unsafe { libc::dlsym(library, name.as_ptr()) })
}
