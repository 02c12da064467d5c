//! The crate's one error type.
//!
//! [`Error`] is opaque: what a caller needs is in its predicates and its text. Formatting it never calls the driver
//! (cudarc's own `DriverError` does, and panics where there is none), so an error can be printed anywhere, also after the
//! driver is gone.
#![deny(unsafe_code)]

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

/// What this crate's fallible functions return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate: one pointer, cheap to clone, and `Send + Sync`.
///
/// Ask the predicates ([`is_no_driver`](Error::is_no_driver), [`is_capturing`](Error::is_capturing), …) rather than
/// the text; [`driver_code`](Error::driver_code) gives CUDA's number where CUDA refused.
#[derive(Clone)]
pub struct Error {
    kind: Arc<Kind>,
}

/// Why. Private, so that a new reason breaks nobody.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// There is no usable driver; `why` says what was tried.
    NoDriver { why: String },
    /// The loaded driver lacks a function that this crate needs.
    MissingSymbol { symbol: &'static str },
    /// A driver call failed.
    Driver { call: &'static str, code: u32, name: String },
    /// A stream or context that a wait depended on had already faulted.
    Fault { code: u32, name: String, seen_in: &'static str },
    /// The stream is being captured into a graph.
    Capturing { operation: &'static str },
    /// The process was forked after CUDA was initialised.
    Forked,
    /// The tensor has no device.
    HostOnly { operation: &'static str },
    /// The stream belongs to another context than the tensor's.
    WrongContext { operation: &'static str },
    /// A size does not fit 64-bit arithmetic or the address space.
    Overflow { what: String },
    /// A shape and a number of elements disagree.
    Shape { shape: Vec<usize>, needs: usize, got: usize },
    /// A range lies outside what it indexes.
    Range { start: usize, end: usize, len: usize, unit: &'static str },
    /// Two parts of one request would be written to the same bytes.
    Overlap { what: String },
    /// The requested view is not one contiguous block.
    NonContiguous { shape: Vec<usize>, strides: Vec<isize> },
    /// An address or offset is not aligned for the element.
    Misaligned { what: &'static str, value: usize, align: usize },
    /// A byte is not a value of the element type.
    InvalidValue { dtype: &'static str, index: usize, byte: u8 },
    /// A description of a workload can not be so: which of its numbers.
    Workload { what: &'static str, why: String },
    /// The run-time type is not the asked one.
    DType { expected: &'static str, got: &'static str },
    /// A name, number or string from outside could not be understood.
    Parse { what: &'static str, value: String, expected: String },
    /// The machine cannot do what was asked.
    Unsupported { what: String, why: String },
    /// Memory could not be had.
    OutOfMemory { what: &'static str, bytes: u64, why: String },
    /// The memory is already registered with the driver by somebody else.
    AlreadyRegistered { address: usize, bytes: usize },
    /// The tensor may only be read.
    ReadOnly { why: &'static str },
    /// The transfer is still running.
    NotReady,
    /// Something else still shares the tensor.
    Shared { what: &'static str },
    /// There is no room in a pool now.
    Full { items: usize, bytes: u64, most_items: usize, most_bytes: u64 },
    /// One item is more than a pool may ever hold.
    TooLarge { bytes: u64, most: u64 },
    /// A pool takes and delivers nothing any more.
    Closed { why: String },
    /// The caller took an item back.
    Withdrawn,
    /// The caller's function panicked.
    Panicked { message: String },
    /// A thread of this crate could not be started or is gone.
    Thread { what: String },
    /// A file could not be opened or read, or was changed meanwhile.
    File { path: PathBuf, why: String },
    /// What a file says about itself does not hold.
    #[cfg_attr(not(feature = "safetensors"), allow(dead_code))]
    BadFile { path: PathBuf, what: &'static str, why: String },
    /// A model has no tensor of this name.
    #[cfg_attr(not(feature = "safetensors"), allow(dead_code))]
    UnknownTensor { name: String, path: PathBuf, tensors: usize },
    /// The caller's progress function said that it is enough.
    #[cfg_attr(not(feature = "safetensors"), allow(dead_code))]
    Cancelled { done: u64, total: u64 },
}

impl Error {
    #[cold]
    pub(crate) fn new(kind: Kind) -> Self {
        Self { kind: Arc::new(kind) }
    }

    #[cold]
    pub(crate) fn unsupported(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(Kind::Unsupported { what: what.into(), why: why.into() })
    }

    #[cold]
    pub(crate) fn overflow(what: impl Into<String>) -> Self {
        Self::new(Kind::Overflow { what: what.into() })
    }

    /// There is no number `index` among `len` of these.
    #[cold]
    pub(crate) fn absent(index: usize, len: usize, unit: &'static str) -> Self {
        Self::new(Kind::Range { start: index, end: index.saturating_add(1), len, unit })
    }

    /// A lack of memory, told of the bytes that were asked for rather than of the larger block for them.
    pub(crate) fn of_request(self, request: u64) -> Self {
        match &*self.kind {
            Kind::OutOfMemory { what, why, .. } => {
                Self::new(Kind::OutOfMemory { what, bytes: request, why: why.clone() })
            }
            _ => self,
        }
    }

    /// No usable CUDA driver: none installed, the toolkit's stub library, or no device.
    pub fn is_no_driver(&self) -> bool {
        matches!(*self.kind, Kind::NoDriver { .. } | Kind::MissingSymbol { .. })
    }

    /// A stream that took part is being captured into a CUDA graph; nothing illegal was called, the capture goes on.
    pub fn is_capturing(&self) -> bool {
        matches!(*self.kind, Kind::Capturing { .. })
    }

    /// The device or its context has faulted (illegal address, launch failure, …), before or during this transfer.
    /// CUDA contexts do not recover from this.
    pub fn is_fault(&self) -> bool {
        match *self.kind {
            Kind::Fault { .. } => true,
            Kind::Driver { code, .. } => is_sticky(code),
            _ => false,
        }
    }

    /// The process was forked after CUDA was initialised; the child can not use CUDA.
    pub fn is_forked(&self) -> bool {
        matches!(*self.kind, Kind::Forked)
    }

    /// The device, the host or a limit on pinned memory has no room for what was asked.
    pub fn is_out_of_memory(&self) -> bool {
        match *self.kind {
            Kind::OutOfMemory { .. } => true,
            Kind::Driver { code, .. } => code == 2,
            _ => false,
        }
    }

    /// The machine, its driver or this kind of tensor cannot do what was asked.
    pub fn is_unsupported(&self) -> bool {
        match *self.kind {
            Kind::Unsupported { .. } | Kind::HostOnly { .. } | Kind::ReadOnly { .. } => true,
            Kind::Driver { code, .. } => code == 801,
            _ => false,
        }
    }

    /// The request itself is wrong: a shape, range, alignment, type, name or number.
    pub fn is_invalid_input(&self) -> bool {
        matches!(
            *self.kind,
            Kind::Overflow { .. }
                | Kind::Shape { .. }
                | Kind::Range { .. }
                | Kind::Overlap { .. }
                | Kind::NonContiguous { .. }
                | Kind::Misaligned { .. }
                | Kind::InvalidValue { .. }
                | Kind::Workload { .. }
                | Kind::DType { .. }
                | Kind::Parse { .. }
                | Kind::WrongContext { .. }
                | Kind::UnknownTensor { .. }
                | Kind::TooLarge { .. }
        )
    }

    /// A file could not be opened, read or mapped, or it was changed while it was read.
    pub fn is_file(&self) -> bool {
        matches!(*self.kind, Kind::File { .. })
    }

    /// What a file says about itself does not hold: it is cut, its header lies, a part of it is missing.
    pub fn is_bad_file(&self) -> bool {
        matches!(*self.kind, Kind::BadFile { .. })
    }

    /// The caller asked to stop: by his progress function, or by cancelling a ticket.
    pub fn is_cancelled(&self) -> bool {
        matches!(*self.kind, Kind::Cancelled { .. } | Kind::Withdrawn)
    }

    /// There is no room now, and waiting was not asked for, or took too long; ask again later.
    pub fn is_full(&self) -> bool {
        matches!(*self.kind, Kind::Full { .. })
    }

    /// The pool was shut down, or stopped at an error.
    pub fn is_closed(&self) -> bool {
        matches!(*self.kind, Kind::Closed { .. })
    }

    /// The caller's own function panicked.
    pub fn is_panic(&self) -> bool {
        matches!(*self.kind, Kind::Panicked { .. })
    }

    /// The view asked for is strided, overlapping or reversed: not one contiguous block.
    pub fn is_non_contiguous(&self) -> bool {
        matches!(*self.kind, Kind::NonContiguous { .. })
    }

    /// The memory is already registered (pinned) by somebody else. It *is* pinned; this crate will not unregister it.
    pub fn is_already_registered(&self) -> bool {
        matches!(*self.kind, Kind::AlreadyRegistered { .. })
    }

    /// The transfer is still running; ask again later.
    pub fn is_not_ready(&self) -> bool {
        matches!(*self.kind, Kind::NotReady)
    }

    /// CUDA's own number (`CUresult`), where a driver call was refused.
    pub fn driver_code(&self) -> Option<u32> {
        match *self.kind {
            Kind::Driver { code, .. } | Kind::Fault { code, .. } => Some(code),
            _ => None,
        }
    }
}

/// The `CUresult` codes after which a context is lost (CUDA driver API, `CUresult`: "leaves the process in an
/// inconsistent state").
pub(crate) fn is_sticky(code: u32) -> bool {
    matches!(code, 214 | 220 | 700 | 702 | 709 | 710 | 714..=719 | 721)
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.kind {
            Kind::NoDriver { why } => write!(f, "no CUDA driver: {why}"),
            Kind::MissingSymbol { symbol } => {
                write!(f, "no CUDA driver: the installed one has no function {symbol}; it is too old or a stub")
            }
            Kind::Driver { call, code, name } => write!(f, "{call} failed: {name} ({code})"),
            Kind::Fault { code, name, seen_in } => {
                write!(f, "the device faulted, seen in {seen_in}: {name} ({code}); its context is lost")
            }
            Kind::Capturing { operation } => {
                write!(f, "{operation}: the stream is being captured into a graph, which a transfer can not be part of")
            }
            Kind::Forked => f.write_str("this process was forked after CUDA was initialised; the child can not use it"),
            Kind::HostOnly { operation } => write!(f, "{operation}: the tensor is host-only, it has no device"),
            Kind::WrongContext { operation } => {
                write!(f, "{operation}: the stream belongs to another context than the tensor")
            }
            Kind::Overflow { what } => write!(f, "size overflow: {what}"),
            Kind::Shape { shape, needs, got } => {
                write!(f, "shape {shape:?} needs {needs} elements, got {got}")
            }
            Kind::Range { start, end, len, unit } => write!(f, "range {start}..{end} is outside of 0..{len} {unit}"),
            Kind::Overlap { what } => write!(f, "{what}, overlap"),
            Kind::NonContiguous { shape, strides } => {
                write!(f, "shape {shape:?} with strides {strides:?} is not one contiguous block; copy it first")
            }
            Kind::Misaligned { what, value, align } => write!(f, "{what} {value:#x} is not aligned to {align} bytes"),
            Kind::InvalidValue { dtype, index, byte } => {
                write!(f, "element {index} holds byte {byte:#04x}, which is no {dtype}")
            }
            Kind::Workload { what, why } => write!(f, "the workload's {what}: {why}"),
            Kind::DType { expected, got } => write!(f, "the tensor holds {got}, not {expected}"),
            Kind::Parse { what, value, expected } => write!(f, "{what} {value:?} is not {expected}"),
            Kind::Unsupported { what, why } => write!(f, "{what} is not possible here: {why}"),
            Kind::OutOfMemory { what, bytes, why } => write!(f, "no room for {bytes} bytes of {what}: {why}"),
            Kind::AlreadyRegistered { address, bytes } => {
                write!(f, "{bytes} bytes at {address:#x} are already registered by somebody else (they are pinned)")
            }
            Kind::ReadOnly { why } => write!(f, "the tensor is read-only: {why}"),
            Kind::NotReady => f.write_str("the transfer is still running"),
            Kind::Shared { what } => write!(f, "{what} is still shared"),
            Kind::Full { items, bytes, most_items, most_bytes } => write!(
                f,
                "no room now: {items} of {most_items} items with {bytes} of {most_bytes} bytes are under way or kept"
            ),
            Kind::TooLarge { bytes, most } => write!(f, "an item of {bytes} bytes never fits into {most}"),
            Kind::Closed { why } => write!(f, "nothing is taken any more: {why}"),
            Kind::Withdrawn => f.write_str("cancelled by the caller"),
            Kind::Panicked { message } => write!(f, "the caller's function panicked: {message}"),
            Kind::Thread { what } => write!(f, "a worker thread is not available: {what}"),
            Kind::File { path, why } => write!(f, "{}: {why}", path.display()),
            Kind::BadFile { path, what, why } => write!(f, "{}: not a valid {what}: {why}", path.display()),
            Kind::UnknownTensor { name, path, tensors } => {
                write!(f, "{}: there is no tensor {name:?} among its {tensors}", path.display())
            }
            Kind::Cancelled { done, total } => write!(f, "cancelled by the caller after {done} of {total} bytes"),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.kind, f)
    }
}

impl std::error::Error for Error {}

/// Runs what is the caller's; a panic of it, and of what it panicked with, is an error and ends no thread of ours.
pub(crate) fn quietly<T>(run: impl FnOnce() -> T) -> Result<T> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            std::mem::forget(again);
        }
        Error::new(Kind::Panicked { message: text.unwrap_or_else(|| "no message".into()) })
    })
}

/// A refusal that gives back what was handed in, so that nothing is lost.
///
/// ```
/// use transfer_tensor::TransferTensor;
/// let tensor = TransferTensor::from_vec(vec![1u8, 2, 3], [3])?;
/// let refused = tensor.into_cuda_slice().expect_err("it is host-only");
/// assert!(refused.error.is_unsupported());
/// assert_eq!(refused.value.into_vec()?, [1, 2, 3]);
/// # Ok::<(), transfer_tensor::Error>(())
/// ```
pub struct Refused<T> {
    /// Why.
    pub error: Error,
    /// What was handed in.
    pub value: T,
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<T> fmt::Display for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl<T> std::error::Error for Refused<T> {}

impl<T> From<Refused<T>> for Error {
    fn from(refused: Refused<T>) -> Self {
        refused.error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_pointer_and_says_what_it_knows() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
        let error = Error::new(Kind::Range { start: 3, end: 9, len: 5, unit: "rows" });
        assert_eq!(error.to_string(), "range 3..9 is outside of 0..5 rows");
        assert!(error.is_invalid_input() && !error.is_fault());
    }

    #[test]
    fn sticky_codes_are_faults_and_refusals_are_not() {
        let driver = |code| Error::new(Kind::Driver { call: "cuX", code, name: String::new() });
        assert!(driver(700).is_fault() && driver(719).is_fault());
        assert!(!driver(2).is_fault() && driver(2).is_out_of_memory());
        assert!(driver(801).is_unsupported());
    }
}
