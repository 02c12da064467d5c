//! What the operating system is asked for directly.

mod file;
#[cfg(feature = "safetensors")]
mod file_map;
mod files;
mod mapping;
mod maps;
mod stream;
mod thread;

pub(crate) use file::ReadFile;
#[cfg(feature = "safetensors")]
pub(crate) use file_map::FileMap;
pub(crate) use files::Files;
pub(crate) use mapping::{HUGE_PAGE, Mapping, advise_huge};
pub(crate) use maps::is_file_backed;
pub(crate) use stream::copy_past_caches;
pub(crate) use thread::spawn;

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::error::{Error, Kind, Result};

/// Alignment of ordinary host memory: a cache line for small blocks, a huge page for large ones, so that the kernel can
/// back them with huge pages (random access over 4 KiB pages is 170 × slower on a GB10; docs/platforms.md).
const CACHE_LINE: usize = 128;

/// Zeroed ordinary memory.
#[derive(Debug)]
pub(crate) struct Block {
    address: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for Block {}

impl Block {
    pub(crate) fn zeroed(bytes: usize) -> Result<Self> {
        let align = if bytes >= 2 * HUGE_PAGE { HUGE_PAGE } else { CACHE_LINE };
        let out_of_memory =
            |why: &str| Error::new(Kind::OutOfMemory { what: "host memory", bytes: bytes as u64, why: why.into() });
        let layout =
            Layout::from_size_align(bytes.max(1), align).map_err(|_| out_of_memory("larger than any object"))?;
        let refused = || out_of_memory("the system refused");
        if align < HUGE_PAGE {
            // SAFETY: the layout's size is not zero.
            let address = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?;
            return Ok(Self { address, layout });
        }
        // SAFETY: as above.
        let address = NonNull::new(unsafe { alloc(layout) }).ok_or_else(refused)?;
        // Before the first touch, which is the zeroing.
        advise_huge(address, bytes);
        // SAFETY: the block is ours and `bytes` long.
        unsafe { address.as_ptr().write_bytes(0, bytes) };
        Ok(Self { address, layout })
    }

    pub(crate) fn address(&self) -> NonNull<u8> {
        self.address
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed` with this layout.
        unsafe { dealloc(self.address.as_ptr(), self.layout) };
    }
}

/// Lets the calling thread's short sleeps end when they should: Linux otherwise adds up to 50 µs.
pub(crate) fn sleep_precisely() {
    #[cfg(target_os = "linux")]
    // SAFETY: sets a property of this thread; a refusal changes nothing.
    let _ = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000 as libc::c_ulong) };
}
