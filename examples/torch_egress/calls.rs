//! What every function of the interface begins and ends with.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::time::Duration;

use super::code::{Code, Failure};
use super::types::TT_FOREVER;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps a text for [`last_error`].
pub(crate) fn note(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that ends has no text any more.
    let _ = LAST.try_with(|last| last.replace(text));
}

pub(crate) fn last_error() -> *const c_char {
    // The text's own memory stays where it is until it is replaced.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// In a forked child nobody has the threads, nor perhaps the locks, of the parent's pools.
fn check_not_forked() -> Result<(), Failure> {
    static USED_BY: OnceLock<u32> = OnceLock::new();
    match std::process::id() {
        this if *USED_BY.get_or_init(|| this) == this => Ok(()),
        _ => Err(Failure::new(Code::Forked, "the process was forked after its parent used this library")),
    }
}

/// Runs what a function does; a failure becomes its code and a text, a panic too.
pub(crate) fn guarded(run: impl FnOnce() -> Result<(), Failure>) -> i32 {
    let failure = match catch_unwind(AssertUnwindSafe(|| check_not_forked().and_then(|()| run()))) {
        Ok(Ok(())) => return Code::Ok as i32,
        Ok(Err(failure)) => failure,
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(ToString::to_string);
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            // Its drop could panic again.
            std::mem::forget(panic);
            Failure::new(Code::Internal, format!("a panic: {}", text.as_deref().unwrap_or("no message")))
        }
    };
    note(&failure.text);
    failure.code as i32
}

/// A pointer that must not be null.
pub(crate) fn address<T>(pointer: *mut T, name: &str) -> Result<*mut T, Failure> {
    if pointer.is_null() {
        return Err(Failure::new(Code::Invalid, format!("{name} is null")));
    }
    Ok(pointer)
}

/// A time-out of the interface's.
pub(crate) fn timeout(ms: u32) -> Duration {
    if ms == TT_FOREVER { Duration::MAX } else { Duration::from_millis(ms.into()) }
}
