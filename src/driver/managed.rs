//! Hints for managed memory.
//!
//! `cuMemAdvise` and `cuMemPrefetchAsync` changed their signature in CUDA 12.2 and 13.0, and cudarc binds the one of its
//! level. Drivers keep the first version under the plain name, so that one is looked up at run time.

use cudarc::driver::sys;

use super::call::check;
use super::context::Context;
use super::load::Driver;
use super::stream::Stream;
use crate::error::{Error, Result};

/// How managed memory will be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Advice {
    /// Mostly read: every reader may keep a copy.
    ReadMostly,
    /// Takes `ReadMostly` back.
    UnsetReadMostly,
    /// Should live at the location.
    PreferredLocation,
    /// Takes `PreferredLocation` back.
    UnsetPreferredLocation,
    /// The location accesses it: keep it mapped there.
    AccessedBy,
    /// Takes `AccessedBy` back.
    UnsetAccessedBy,
}

/// Where managed memory is advised or moved to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Location {
    /// The tensor's device.
    Device,
    /// The host.
    Host,
}

impl Location {
    /// `CU_DEVICE_CPU` is −1.
    fn id(self, context: &Context) -> sys::CUdevice {
        match self {
            Location::Device => context.cuda().cu_device(),
            Location::Host => -1,
        }
    }
}

type AdviseFn = unsafe extern "C" fn(sys::CUdeviceptr, usize, u32, sys::CUdevice) -> sys::CUresult;
type PrefetchFn = unsafe extern "C" fn(sys::CUdeviceptr, usize, sys::CUdevice, sys::CUstream) -> sys::CUresult;

fn absent(what: &'static str) -> Error {
    Error::unsupported(what, "the driver does not have the function")
}

/// The range lies in a managed allocation; the context is current.
pub(crate) fn advise(context: &Context, address: u64, bytes: usize, advice: Advice, location: Location) -> Result<()> {
    // SAFETY: the signature of the function's first version (CUDA 8.0).
    let call: AdviseFn = unsafe { Driver::get()?.optional("cuMemAdvise") }.ok_or_else(|| absent("cuMemAdvise"))?;
    let advice = match advice {
        Advice::ReadMostly => 1,
        Advice::UnsetReadMostly => 2,
        Advice::PreferredLocation => 3,
        Advice::UnsetPreferredLocation => 4,
        Advice::AccessedBy => 5,
        Advice::UnsetAccessedBy => 6,
    };
    // SAFETY: takes no pointers of ours; an unknown range is refused.
    check("cuMemAdvise", unsafe { call(address, bytes, advice, location.id(context)) })
}

/// As [`advise`]; the stream is not being captured.
pub(crate) fn prefetch(
    context: &Context,
    address: u64,
    bytes: usize,
    location: Location,
    stream: &Stream,
) -> Result<()> {
    // SAFETY: the signature of the function's first version (CUDA 8.0).
    let call: PrefetchFn =
        unsafe { Driver::get()?.optional("cuMemPrefetchAsync") }.ok_or_else(|| absent("cuMemPrefetchAsync"))?;
    // SAFETY: the stream is alive; an unknown range is refused.
    check("cuMemPrefetchAsync", unsafe { call(address, bytes, location.id(context), stream.handle()) })
}
