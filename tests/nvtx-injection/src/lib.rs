//! An NVTX tool: it writes down what a process tells a profiler, for tests. NVTX loads it where `NVTX_INJECTION64_PATH` names it, and
//! [`OUT`] says which file it writes; a line for each call, of words between tabs, at once:
//!
//! | line | of |
//! |---|---|
//! | `push`, thread, domain, message, payload (`-`: none) | `nvtxDomainRangePushEx` |
//! | `pop`, thread, domain | `nvtxDomainRangePop` |
//! | `thread`, thread, name | `nvtxNameOsThreadA` |
//! | `stream`, handle, name | `nvtxNameCuStreamA` |
//!
//! The protocol is that of NVTX 3 (`nvToolsExt.h`, `nvtxDetail/nvtxTypes.h`): NVTX calls [`InitializeInjectionNvtx2`] with a
//! function that gives tables; one of those has a function that gives, for each module of the interface, the places of its function pointers,
//! into which a tool writes its own. Those it leaves out do nothing.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock};

/// The variable of the environment that names the file.
pub const OUT: &str = "NVTX_INJECTION_OUT";

/// `NvtxExportTableID`.
const CALLBACKS: u32 = 1;

/// `NvtxCallbackModule`, and the functions of each: `NvtxCallbackIdCore`, `NvtxCallbackIdCuda`, `NvtxCallbackIdCore2`.
const CORE: c_uint = 1;
const NAME_OS_THREAD_A: usize = 14;
const CUDA: c_uint = 2;
const NAME_CU_STREAM_A: usize = 5;
const CORE2: c_uint = 5;
const DOMAIN_RANGE_PUSH_EX: usize = 4;
const DOMAIN_RANGE_POP: usize = 5;
const DOMAIN_REGISTER_STRING_A: usize = 10;
const DOMAIN_CREATE_A: usize = 12;

/// `NVTX_PAYLOAD_TYPE_UNSIGNED_INT64`, and none.
const UNSIGNED_INT64: i32 = 1;
const NO_PAYLOAD: i32 = 0;
/// `NVTX_MESSAGE_TYPE_ASCII` and `NVTX_MESSAGE_TYPE_REGISTERED`.
const ASCII: i32 = 1;
const REGISTERED: i32 = 3;

type GetExportTable = unsafe extern "C" fn(u32) -> *const ExportTableCallbacks;
/// `NvtxFunctionPointer`: none that is called as such.
type Function = *const c_void;

/// `NvtxExportTableCallbacks`.
#[repr(C)]
#[derive(Debug)]
pub struct ExportTableCallbacks {
    struct_size: usize,
    get_module_function_table: Option<unsafe extern "C" fn(c_uint, *mut *mut *mut Function, *mut c_uint) -> c_int>,
}

/// `nvtxEventAttributes_v2`.
#[repr(C)]
struct EventAttributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    /// A string's address, or its handle.
    message: *const c_char,
}

static FILE: OnceLock<Mutex<File>> = OnceLock::new();

/// Domains and registered strings; the handle of each is its place here, from 1 on.
static NAMES: Mutex<Vec<String>> = Mutex::new(Vec::new());

thread_local! {
    static DEPTH: Cell<c_int> = const { Cell::new(0) };
}

fn note(line: std::fmt::Arguments<'_>) {
    if let Some(file) = FILE.get() {
        // One write, so that who reads meanwhile sees whole lines.
        let line = format!("{line}\n");
        let mut file = file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let _ = file.write_all(line.as_bytes());
    }
}

/// What the system calls this thread.
fn thread() -> String {
    let link = std::fs::read_link("/proc/thread-self").unwrap_or_default();
    link.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

fn names() -> MutexGuard<'static, Vec<String>> {
    NAMES.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn name(handle: *const c_void) -> String {
    handle.addr().checked_sub(1).and_then(|at| names().get(at).cloned()).unwrap_or_default()
}

/// # Safety
/// As [`text`].
unsafe fn handle(string: *const c_char) -> *const c_void {
    let mut names = names();
    // SAFETY: the caller's.
    names.push(unsafe { text(string) });
    std::ptr::without_provenance(names.len())
}

/// # Safety
/// A C string, or null.
unsafe fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: the caller's.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}

unsafe extern "C" fn domain_create(name: *const c_char) -> *const c_void {
    // SAFETY: as NVTX says.
    unsafe { handle(name) }
}

unsafe extern "C" fn register_string(_domain: *const c_void, string: *const c_char) -> *const c_void {
    // SAFETY: as NVTX says.
    unsafe { handle(string) }
}

unsafe extern "C" fn range_push(domain: *const c_void, attributes: *const EventAttributes) -> c_int {
    // SAFETY: as NVTX says.
    let attributes = unsafe { &*attributes };
    let message = match attributes.message_type {
        // SAFETY: as its type says.
        ASCII => unsafe { text(attributes.message) },
        REGISTERED => name(attributes.message.cast()),
        other => format!("a message of type {other}"),
    };
    let payload = match attributes.payload_type {
        NO_PAYLOAD => "-".to_owned(),
        UNSIGNED_INT64 => attributes.payload.to_string(),
        other => format!("a payload of type {other}"),
    };
    note(format_args!("push\t{}\t{}\t{message}\t{payload}", thread(), name(domain)));
    DEPTH.replace(DEPTH.get() + 1)
}

unsafe extern "C" fn range_pop(domain: *const c_void) -> c_int {
    note(format_args!("pop\t{}\t{}", thread(), name(domain)));
    DEPTH.set(DEPTH.get() - 1);
    DEPTH.get()
}

unsafe extern "C" fn name_os_thread(thread: u32, name: *const c_char) {
    // SAFETY: as NVTX says.
    note(format_args!("thread\t{thread}\t{}", unsafe { text(name) }));
}

unsafe extern "C" fn name_cu_stream(stream: *const c_void, name: *const c_char) {
    // SAFETY: as NVTX says.
    note(format_args!("stream\t{}\t{}", stream.addr(), unsafe { text(name) }));
}

/// Called by NVTX, once; not 0 if the tool is there.
///
/// # Safety
/// For NVTX only.
#[unsafe(no_mangle)]
#[allow(non_snake_case)] // NVTX looks for this name.
pub unsafe extern "C" fn InitializeInjectionNvtx2(get_export_table: Option<GetExportTable>) -> c_int {
    let Some(file) = std::env::var_os(OUT).and_then(|path| File::options().append(true).create(true).open(path).ok())
    else {
        return 0;
    };
    let _ = FILE.set(Mutex::new(file));
    // SAFETY: NVTX gives a function that takes any number.
    let table = get_export_table.map(|get| unsafe { get(CALLBACKS) });
    // SAFETY: null or a table that stays.
    let Some(table) = table.and_then(|table| unsafe { table.as_ref() }) else { return 0 };
    let Some(get_module) = table.get_module_function_table.filter(|_| table.struct_size >= size_of_val(table)) else {
        return 0;
    };
    let functions: [(c_uint, usize, Function); 6] = [
        (CORE, NAME_OS_THREAD_A, name_os_thread as *const c_void),
        (CUDA, NAME_CU_STREAM_A, name_cu_stream as *const c_void),
        (CORE2, DOMAIN_RANGE_PUSH_EX, range_push as *const c_void),
        (CORE2, DOMAIN_RANGE_POP, range_pop as *const c_void),
        (CORE2, DOMAIN_REGISTER_STRING_A, register_string as *const c_void),
        (CORE2, DOMAIN_CREATE_A, domain_create as *const c_void),
    ];
    for (module, number, function) in functions {
        let (mut places, mut count) = (std::ptr::null_mut(), 0);
        // SAFETY: both are valid. It gives an array of so many pointers, each null or a place of a function's pointer, of which nobody makes use
        // before this returns.
        unsafe {
            if get_module(module, &mut places, &mut count) == 0 || number >= count as usize {
                return 0;
            }
            match (*places.add(number)).as_mut() {
                Some(place) => *place = function,
                None => return 0,
            }
        }
    }
    1
}
