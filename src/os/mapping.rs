//! Fresh anonymous memory on huge pages, near a device. Linux only; elsewhere there is none.

use std::ptr::NonNull;

#[cfg(target_os = "linux")]
use crate::error::Kind;
use crate::error::{Error, Result};

pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Private zeroed memory that starts on a huge page's boundary. Its pages are made when they are first touched.
#[derive(Debug)]
pub(crate) struct Mapping {
    address: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for Mapping {}
// SAFETY: nothing is reached through a shared reference but the address.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn address(&self) -> NonNull<u8> {
        self.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(target_os = "linux")]
impl Mapping {
    /// `bytes` bytes; on the NUMA node `node`, if the system agrees.
    pub(crate) fn new(bytes: usize, node: Option<u32>) -> Result<Self> {
        let refused = |why: String| Error::new(Kind::OutOfMemory { what: "host memory", bytes: bytes as u64, why });
        let whole = bytes.checked_add(HUGE_PAGE).ok_or_else(|| refused("larger than the address space".into()))?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping at an address of the system's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), whole, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(refused(std::io::Error::last_os_error().to_string()));
        }
        let start = start.cast::<u8>();
        let head = start.align_offset(HUGE_PAGE);
        // SAFETY: the parts before and after the aligned range are ours and nobody has them. A refusal wastes addresses.
        let address = unsafe {
            let address = start.add(head);
            for (part, len) in [(start, head), (address.add(bytes), HUGE_PAGE - head)] {
                if len > 0 {
                    let _ = libc::munmap(part.cast(), len);
                }
            }
            address
        };
        let address = NonNull::new(address).ok_or_else(|| refused("the system gave a null address".into()))?;
        let mapping = Self { address, bytes };
        // SAFETY: the range is ours; advice changes no contents, and where it is refused nothing is lost.
        unsafe {
            let _ = libc::madvise(address.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE);
        }
        if let Some(node) = node.filter(|&node| node < 64) {
            prefer_node(&mapping, node);
        }
        Ok(mapping)
    }
}

/// Before the first touch: its pages come from `node`, while there are some.
#[cfg(target_os = "linux")]
fn prefer_node(mapping: &Mapping, node: u32) {
    const MPOL_PREFERRED: libc::c_int = 1;
    let nodes = 1u64 << node;
    // SAFETY: the range is ours; the mask is one word, of which the call is told 65 bits (it takes one off). A refusal leaves
    // the process's own policy.
    let _ = unsafe {
        libc::syscall(libc::SYS_mbind, mapping.address.as_ptr(), mapping.bytes, MPOL_PREFERRED, &raw const nodes, 65, 0)
    };
}

#[cfg(not(target_os = "linux"))]
impl Mapping {
    pub(crate) fn new(_bytes: usize, _node: Option<u32>) -> Result<Self> {
        Err(Error::unsupported("mapping memory", "only done on Linux"))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        // SAFETY: mapped by `new`, unmapped once; the owner made sure that nothing uses it.
        unsafe {
            let _ = libc::munmap(self.address.as_ptr().cast(), self.bytes);
        }
    }
}

/// Advises huge pages for the whole ones inside memory that was not touched yet.
pub(crate) fn advise_huge(address: NonNull<u8>, bytes: usize) {
    let head = address.as_ptr().align_offset(HUGE_PAGE);
    let length = bytes.saturating_sub(head) / HUGE_PAGE * HUGE_PAGE;
    #[cfg(target_os = "linux")]
    if length > 0 {
        // SAFETY: the range lies inside memory of the caller's, and the advice does not change its contents.
        let _ = unsafe { libc::madvise(address.as_ptr().add(head).cast(), length, libc::MADV_HUGEPAGE) };
    }
    let _ = length;
}
