//! Finding the driver's library beside the test and loading it under the name of the real one.

use super::InstallError;
use crate::wire::ABI;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

/// The loaded library. It is never closed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Library(*mut c_void);

// SAFETY: a library handle may be used by any thread.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// The driver, loaded on first use.
pub(super) fn driver() -> Result<Library, InstallError> {
    static DRIVER: OnceLock<Result<Library, InstallError>> = OnceLock::new();
    DRIVER.get_or_init(load).clone()
}

/// A control function of the driver. `F` must be its type.
pub(super) fn function<F: Copy>(name: &'static str) -> Result<F, InstallError> {
    static KNOWN: OnceLock<Mutex<HashMap<&'static str, usize>>> = OnceLock::new();
    let library = driver()?;
    let known = KNOWN.get_or_init(Mutex::default);
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    let address = match known.get(name) {
        Some(address) => *address,
        None => {
            let address = symbol(library, name)?;
            known.insert(name, address);
            address
        }
    };
    assert!(size_of::<F>() == size_of::<usize>(), "only pointers to functions are looked up");
    // SAFETY: the address is that of the function, of the type `wire` and `control` agree on (the library was built
    // from the same text, see `matches`), and `F` has the size of a pointer.
    Ok(unsafe { std::mem::transmute_copy::<usize, F>(&address) })
}

fn symbol(library: Library, name: &str) -> Result<usize, InstallError> {
    let c_name = CString::new(name).map_err(|_| error(format!("no symbol {name:?}")))?;
    // SAFETY: an open library and a C string.
    let address = unsafe { libc::dlsym(library.0, c_name.as_ptr()) };
    if address.is_null() { Err(error(format!("the simulated driver has no {name}"))) } else { Ok(address as usize) }
}

fn error(message: impl Into<String>) -> InstallError {
    InstallError { message: message.into() }
}

const REAL_NAMES: [&CStr; 2] = [c"libcuda.so", c"libcuda.so.1"];

fn load() -> Result<Library, InstallError> {
    for name in REAL_NAMES {
        // SAFETY: a C string; NOLOAD only looks.
        let loaded = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_NOW) };
        if !loaded.is_null() {
            let ours = symbol(Library(loaded), "cusim_abi").is_ok();
            return if ours {
                Ok(Library(loaded))
            } else {
                Err(error(format!("{} is loaded already: install before the first CUDA call", name.to_string_lossy())))
            };
        }
    }
    let (candidates, searched) = candidates();
    let mut failures = Vec::new();
    for path in candidates {
        match open(&path) {
            Ok(library) if answers_to_real_name() => return Ok(library),
            Ok(_) => failures.push(format!("{}: not found again as libcuda.so", path.display())),
            Err(failure) => failures.push(format!("{}: {failure}", path.display())),
        }
    }
    if failures.is_empty() {
        let searched: Vec<String> = searched.iter().map(|dir| dir.display().to_string()).collect();
        return Err(error(format!("no libcuda_sim*.so in {}", searched.join(", "))));
    }
    Err(error(failures.join("; ")))
}

fn answers_to_real_name() -> bool {
    // SAFETY: a C string; NOLOAD only looks.
    let found = unsafe { libc::dlopen(REAL_NAMES[0].as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_NOW) };
    !found.is_null() && symbol(Library(found), "cusim_abi").is_ok()
}

fn open(path: &Path) -> Result<Library, String> {
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| "a zero in its name".to_owned())?;
    // SAFETY: a C string; the library's constructors do nothing.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if library.is_null() {
        return Err(last_error());
    }
    let library = Library(library);
    let abi = symbol(library, "cusim_abi").map_err(|error| error.to_string())?;
    // SAFETY: this symbol has had this type in every version.
    let abi = unsafe { std::mem::transmute::<usize, extern "C" fn() -> u64>(abi) };
    if abi() == ABI {
        return Ok(library);
    }
    // SAFETY: an open library nothing else uses yet.
    unsafe { libc::dlclose(library.0) };
    Err("built from another version of cuda-sim".to_owned())
}

fn last_error() -> String {
    // SAFETY: dlerror returns null or a C string that stays until the thread's next call of its kind.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "cannot be loaded".to_owned();
    }
    // SAFETY: not null, see above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Libraries that may be the driver, best first, and the folders that were searched.
fn candidates() -> (Vec<PathBuf>, Vec<PathBuf>) {
    if let Some(path) = std::env::var_os("CUDA_SIM_LIBRARY") {
        return (vec![PathBuf::from(path)], Vec::new());
    }
    let mut searched = Vec::new();
    let mut found = Vec::new();
    for tier in [beside_executable(), library_path()] {
        // A library that was built earlier may lie around: the newest comes first.
        let mut tier_found: Vec<(SystemTime, PathBuf)> = tier.iter().flat_map(|dir| libraries_in(dir)).collect();
        tier_found.sort_by_key(|(built, _)| std::cmp::Reverse(*built));
        found.extend(tier_found.into_iter().map(|(_, path)| path));
        searched.extend(tier);
    }
    (found, searched)
}

/// Tests lie in `deps`, examples beside it, binaries above it.
fn beside_executable() -> Vec<PathBuf> {
    let Ok(executable) = std::env::current_exe() else { return Vec::new() };
    let Some(dir) = executable.parent() else { return Vec::new() };
    let mut dirs = vec![dir.to_owned(), dir.join("deps")];
    if let Some(above) = dir.parent() {
        dirs.push(above.join("deps"));
        dirs.push(above.to_owned());
    }
    dirs
}

/// Where doctests find libraries.
fn library_path() -> Vec<PathBuf> {
    std::env::var_os("LD_LIBRARY_PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default()
}

fn libraries_in(dir: &Path) -> Vec<(SystemTime, PathBuf)> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let named = |name: &str| name.starts_with("libcuda_sim") && name.ends_with(".so");
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(named))
        .map(|entry| {
            let built = entry.metadata().and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
            (built, entry.path())
        })
        .collect()
}
