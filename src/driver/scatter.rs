//! One kernel in place of many copies: it reads packed bytes from page-locked memory and writes each block to its place.
//!
//! Up, `cuMemcpyBatchAsync` takes for each small copy as long as packing several KiB; the kernel reads at the link's speed
//! (`benches/small_pieces.rs`).

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::batch::Counted;
use super::call::check;
use super::context::Context;
use super::load::Driver;
use super::stream::Stream;
use crate::error::Result;

/// PTX, which the driver compiles for its device, and the NUL that ends it.
const MODULE: &str = concat!(include_str!("kernels/scatter.ptx"), "\0");

/// A transfer of at least so many blocks asks for the kernel: the first in a context loads it, which takes as long as some
/// hundred copies, and much longer where the driver has yet to compile it.
pub(super) const WORTH_LOADING: usize = 256;

/// A round of at least so many copies is one launch. A block of threads takes one copy: fewer would not keep the link busy where
/// packed bytes do not lie as their target does, and go one by one.
pub(super) const WORTH_A_LAUNCH: u32 = 128;

/// The most copies of a launch: their table takes 256 KiB.
pub(super) const MOST_PLACES: usize = 16 << 10;

/// Threads of a block, and blocks of a launch: enough for the link, and a part of a large GPU only.
const THREADS: c_uint = 128;
const BLOCKS: c_uint = 512;

/// What a launch brings where. All addresses are the device's.
#[derive(Debug)]
pub(super) struct Places {
    /// Where the packed bytes begin.
    pub(super) packed: u64,
    /// The list of [`place`](crate::batch::plan::Copy::place)s.
    pub(super) table: u64,
    /// How many there are.
    pub(super) count: u32,
}

/// The kernel, loaded into a context.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel(sys::CUfunction);

// SAFETY: a handle; the driver's functions take it from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// What loading gave, once for each context of the process.
type Loaded = Arc<OnceLock<Option<Kernel>>>;

/// By the context's id, which no later context gets again, as its handle may be. Kernels are never unloaded: that would wait until
/// nothing runs on the device. They end with their context.
static LOADED: Mutex<BTreeMap<u64, Loaded>> = Mutex::new(BTreeMap::new());

impl Kernel {
    /// The kernel in `context`, which is current. `None` where the driver has no ids of contexts (before CUDA 12.0) or refuses to
    /// load it, for instance without its compiler, as in some containers; it is not asked again.
    ///
    /// The first call for a context waits until nothing runs on the device; those of other threads wait for the first.
    pub(super) fn find(context: &Context) -> Option<Self> {
        let id = id(context)?;
        // Not under the lock: who loads waits for a device, and others have another.
        let loaded = LOADED.lock().entry(id).or_default().clone();
        *loaded.get_or_init(|| Self::load(context).ok())
    }

    fn load(context: &Context) -> Result<Self> {
        // In the relaxed mode: loading allocates.
        let _bound = context.enter()?;
        let (mut module, mut function) = (null_mut(), null_mut());
        // SAFETY: the context is current; the text ends with a NUL; the call writes one handle.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut module, MODULE.as_ptr().cast()) })?;
        let name = c"transfer_tensor_scatter".as_ptr();
        // SAFETY: the module was loaded just now; a C string; the call writes one handle.
        check("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&mut function, module, name) })?;
        Ok(Self(function))
    }

    /// Submits a launch. The context that it was found for is current.
    ///
    /// # Errors
    /// The driver refused it.
    ///
    /// # Safety
    /// The packed bytes and the table stay as they are until the stream has passed; each place is of valid device memory, which
    /// nobody else uses until then, and no two have a byte in common.
    pub(super) unsafe fn launch(self, places: Places, stream: &Stream, counted: &mut Counted) -> Result<()> {
        let Places { mut packed, mut table, mut count } = places;
        let mut arguments: [*mut c_void; 3] =
            [(&raw mut packed).cast(), (&raw mut table).cast(), (&raw mut count).cast()];
        let (blocks, arguments) = (count.clamp(1, BLOCKS), arguments.as_mut_ptr());
        // SAFETY: two addresses and a `u32`, as the kernel declares them, read during the call; the memory is the caller's.
        let code = unsafe {
            sys::cuLaunchKernel(self.0, blocks, 1, 1, THREADS, 1, 1, 0, stream.handle(), arguments, null_mut())
        };
        check("cuLaunchKernel", code)?;
        counted.copies += u64::from(count);
        counted.calls += 1;
        Ok(())
    }
}

/// The context's id in this process, if the driver gives it.
fn id(context: &Context) -> Option<u64> {
    type GetId = unsafe extern "C" fn(sys::CUcontext, *mut u64) -> c_uint;
    // SAFETY: the signature of CUDA 12.0.
    let ask = unsafe { Driver::get().ok()?.versioned::<GetId>(c"cuCtxGetId", 12_000)? };
    let mut id = 0;
    // SAFETY: a live context; the call writes eight bytes.
    let code = unsafe { ask(context.cuda().cu_ctx(), &mut id) };
    (code == 0).then_some(id)
}
