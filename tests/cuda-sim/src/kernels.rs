//! Kernels of the simulated device: Rust functions registered under the names of PTX entries.
//!
//! A kernel is called once per launch, not once per thread, on the thread that runs the stream's
//! step. It sees device memory through [`Launch`], which translates device addresses and turns a
//! bad one into the fault that the hardware would raise.
//!
//! ```
//! use cuda_sim::kernels::{Fault, Launch};
//!
//! cuda_sim::kernel! {
//!     /// `p[i] *= factor`, under the entry `scale_f32(.param .u64 p, .param .u64 n, .param .f32 factor)`.
//!     pub fn scale_f32(launch) {
//!         let (p, n, factor) = (launch.arg(0)?, launch.arg(1)?, launch.arg::<f32>(2)?);
//!         for x in launch.slice_mut::<f32>(p, n)? {
//!             *x *= factor;
//!         }
//!         Ok(())
//!     }
//! }
//! ```

mod builtin;

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;

use parking_lot::RwLock;

pub use builtin::{BUILTINS, index_hash};

/// A module with the built-in kernels, which a real GPU runs as well.
pub const BUILTIN_PTX: &str = include_str!("../kernels/kernels.ptx");

/// What the driver calls to run a kernel. It may be called by several threads at once.
pub type KernelFn = unsafe extern "C" fn(*const KernelCall);

/// One launch, as it crosses the C boundary between the driver and a kernel.
#[repr(C)]
#[derive(Debug)]
pub struct KernelCall {
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block in each dimension.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    /// A pointer to each argument, copied when the kernel was submitted.
    pub params: *const *const c_void,
    /// The size of each argument in bytes, as the PTX entry declares it.
    pub param_sizes: *const usize,
    /// How many arguments there are.
    pub nparams: usize,
    /// The driver's own, handed back to the functions below.
    pub ctx: *const c_void,
    /// From a device address to where its bytes are now, readable and writable for `len` bytes
    /// until the kernel returns. Null where the device may not touch all of them.
    pub translate: unsafe extern "C" fn(ctx: *const c_void, address: u64, len: usize, write: bool) -> *mut u8,
    /// Faults the context with a result code; of several, the first counts.
    pub fault: unsafe extern "C" fn(ctx: *const c_void, code: u32),
}

/// Why a kernel ended early. It sticks: the context is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// An address that is not mapped for the device, or freed.
    IllegalAddress,
    /// An address that is no multiple of the element's size.
    MisalignedAddress,
    /// Anything else; also a panic, and an argument that the entry does not have.
    LaunchFailed,
}

impl Fault {
    /// The driver's result code.
    #[must_use]
    pub const fn code(self) -> u32 {
        match self {
            Self::IllegalAddress => 700,
            Self::MisalignedAddress => 716,
            Self::LaunchFailed => 719,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::IllegalAddress => "illegal address",
            Self::MisalignedAddress => "misaligned address",
            Self::LaunchFailed => "launch failed",
        })
    }
}

impl std::error::Error for Fault {}

mod sealed {
    /// Plain numbers: no padding, every bit pattern a value.
    pub trait Number: Copy + 'static {}
}

/// The element types that kernels read and write: the plain numbers.
pub trait Element: sealed::Number {}

macro_rules! elements {
    ($($name:ty)*) => { $(
        impl sealed::Number for $name {}
        impl Element for $name {}
    )* };
}
elements!(u8 i8 u16 i16 u32 i32 u64 i64 usize isize f32 f64);

/// A launch, as its kernel sees it.
#[derive(Debug)]
pub struct Launch<'a> {
    call: &'a KernelCall,
}

impl Launch<'_> {
    /// Blocks in each dimension.
    #[must_use]
    pub fn grid(&self) -> [u32; 3] {
        self.call.grid
    }

    /// Threads of a block in each dimension.
    #[must_use]
    pub fn block(&self) -> [u32; 3] {
        self.call.block
    }

    /// Dynamic shared memory in bytes.
    #[must_use]
    pub fn shared_bytes(&self) -> u32 {
        self.call.shared
    }

    /// Threads in all.
    #[must_use]
    pub fn threads(&self) -> u64 {
        let sizes = self.call.grid.iter().chain(&self.call.block);
        sizes.fold(1, |product, size| product.saturating_mul(u64::from(*size)))
    }

    /// Argument `index` as the entry declares it.
    ///
    /// # Errors
    /// [`Fault::LaunchFailed`] if the entry has no such argument or declares another size.
    pub fn arg<T: Element>(&self, index: usize) -> Result<T, Fault> {
        if index >= self.call.nparams {
            return Err(Fault::LaunchFailed);
        }
        // SAFETY: `run`'s caller promised `nparams` sizes and pointers, each to as many bytes as
        // its size says; the size is checked before the pointer is read, unaligned.
        unsafe {
            if *self.call.param_sizes.add(index) != size_of::<T>() {
                return Err(Fault::LaunchFailed);
            }
            let param = *self.call.params.add(index);
            Ok(param.cast::<T>().read_unaligned())
        }
    }

    /// `len` elements of device-visible memory.
    ///
    /// The device shares that memory with the host and with other streams, as hardware does:
    /// what an unordered writer does to it meanwhile shows here, and is the test's own doing.
    ///
    /// # Errors
    /// The fault that touching these bytes raises.
    pub fn slice<T: Element>(&self, address: u64, len: usize) -> Result<&[T], Fault> {
        if len == 0 {
            return Ok(&[]);
        }
        let start = self.bytes::<T>(address, len, false)?;
        // SAFETY: `translate` answered for all the bytes until the kernel returns, which outlives
        // `self`; every bit pattern is a value of `T`; the alignment is checked. No other
        // reference of this kernel writes to them: `slice_mut` borrows the launch exclusively.
        Ok(unsafe { slice::from_raw_parts(start, len) })
    }

    /// `len` elements of device-visible memory, to be written. While they are borrowed the
    /// launch lends nothing else; copy what is needed out of [`Launch::slice`] first.
    ///
    /// # Errors
    /// The fault that touching these bytes raises.
    pub fn slice_mut<T: Element>(&mut self, address: u64, len: usize) -> Result<&mut [T], Fault> {
        if len == 0 {
            return Ok(&mut []);
        }
        let start = self.bytes::<T>(address, len, true)?;
        // SAFETY: as in `slice`; and the exclusive borrow of the launch makes this the only
        // reference that this kernel has.
        Ok(unsafe { slice::from_raw_parts_mut(start, len) })
    }

    /// Copies bytes within device-visible memory; the two ranges may overlap.
    ///
    /// # Errors
    /// The fault that touching these bytes raises.
    pub fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), Fault> {
        if bytes == 0 {
            return Ok(());
        }
        let source = self.bytes::<u8>(from, bytes, false)?;
        let target = self.bytes::<u8>(to, bytes, true)?;
        // SAFETY: both ranges are answered for until the kernel returns; `copy` allows overlap,
        // and the exclusive borrow means that no reference into either exists.
        unsafe { std::ptr::copy(source, target, bytes) };
        Ok(())
    }

    fn bytes<T: Element>(&self, address: u64, len: usize, write: bool) -> Result<*mut T, Fault> {
        let bytes = len
            .checked_mul(size_of::<T>())
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .ok_or(Fault::IllegalAddress)?;
        if !address.is_multiple_of(align_of::<T>() as u64) {
            return Err(Fault::MisalignedAddress);
        }
        // SAFETY: `run`'s caller promised a `translate` that takes any address and length.
        let start = unsafe { (self.call.translate)(self.call.ctx, address, bytes, write) };
        let start = start.cast::<T>();
        if start.is_null() {
            Err(Fault::IllegalAddress)
        } else if start.is_aligned() {
            Ok(start)
        } else {
            Err(Fault::MisalignedAddress)
        }
    }
}

/// Runs a kernel's body for one launch. A fault, and a panic, are reported to the driver; neither
/// crosses the boundary. [`kernel!`](crate::kernel) writes the call.
///
/// # Safety
/// `call` points to a launch as [`KernelCall`] describes it, valid until this returns.
pub unsafe fn run(call: *const KernelCall, body: impl FnOnce(&mut Launch<'_>) -> Result<(), Fault>) {
    // SAFETY: the caller's promise.
    let call = unsafe { &*call };
    let fault = match catch_unwind(AssertUnwindSafe(|| body(&mut Launch { call }))) {
        Ok(Ok(())) => return,
        Ok(Err(fault)) => fault,
        Err(payload) => {
            // Dropping what was thrown may throw again: then it stays.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
                std::mem::forget(payload);
            }
            Fault::LaunchFailed
        }
    };
    // SAFETY: the caller promised a `fault` that takes any code.
    unsafe { (call.fault)(call.ctx, fault.code()) };
}

/// Writes a [`KernelFn`] around a body that gets a [`Launch`] and returns `Result<(), Fault>`.
/// See the [module](crate::kernels) for an example.
#[macro_export]
macro_rules! kernel {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident($launch:ident) $body:block) => {
        $(#[$attribute])*
        ///
        /// # Safety
        /// For the driver to call: `call` points to a valid launch.
        $visibility unsafe extern "C" fn $name(call: *const $crate::kernels::KernelCall) {
            // SAFETY: the caller's promise is `run`'s.
            unsafe {
                $crate::kernels::run(
                    call,
                    |$launch: &mut $crate::kernels::Launch<'_>|
                        -> ::core::result::Result<(), $crate::kernels::Fault> { $body },
                );
            }
        }
    };
}

/// The kernels a driver knows, by the names of their PTX entries.
#[derive(Debug)]
pub struct Registry {
    kernels: RwLock<HashMap<String, KernelFn>>,
}

impl Registry {
    /// With the built-in kernels.
    #[must_use]
    pub fn with_builtins() -> Self {
        let known = BUILTINS.iter().chain([&builtin::SCATTER]).map(|(name, kernel)| ((*name).to_owned(), *kernel));
        Self { kernels: RwLock::new(known.collect()) }
    }

    /// Adds a kernel, or replaces the one of that name; launches in flight keep what they had.
    pub fn insert(&self, name: impl Into<String>, kernel: KernelFn) {
        self.kernels.write().insert(name.into(), kernel);
    }

    /// The kernel of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<KernelFn> {
        self.kernels.read().get(name).copied()
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::with_builtins()
    }
}

#[cfg(test)]
mod tests;
