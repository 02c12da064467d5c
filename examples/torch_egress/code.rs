//! What a function returns.

use transfer_tensor::Error;

/// 0, or why not.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// Done.
    Ok = 0,
    /// Not in time.
    Timeout = 1,
    /// The pool was shut down, and `next` has given all.
    End = 2,
    /// An argument is wrong: null, or no such pool, output or stream.
    Invalid = 3,
    /// No usable driver, or no such device.
    NoDevice = 4,
    /// The pool takes nothing any more; an item was not delivered before its end.
    Closed = 5,
    /// No room was there in time.
    Full = 6,
    /// The item is larger than all room.
    TooLarge = 7,
    /// The stream is being captured into a graph.
    Capturing = 8,
    /// The device faulted; its context is lost.
    Fault = 9,
    /// The host or the device has no memory for it.
    OutOfMemory = 10,
    /// A panic: a defect of the library.
    Internal = 11,
    /// Something else; the text says what.
    Other = 12,
    /// The process is a child that was forked after its parent used the interface.
    Forked = 13,
    /// The driver refused in the midst of a copy, and may be at the memory for ever: it must stay as it is.
    InUse = 14,
}

/// A code and its text.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) code: Code,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        let code = match error {
            error if error.is_fault() => Code::Fault,
            error if error.is_forked() => Code::Forked,
            error if error.is_full() => Code::Full,
            error if error.is_closed() => Code::Closed,
            error if error.is_not_ready() => Code::Timeout,
            error if error.is_capturing() => Code::Capturing,
            error if error.is_no_driver() => Code::NoDevice,
            error if error.is_out_of_memory() => Code::OutOfMemory,
            error if error.is_invalid_input() => Code::Invalid,
            _ => Code::Other,
        };
        Self::new(code, error.to_string())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}
