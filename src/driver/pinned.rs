//! Page-locked memory of ours, as RAII. Who drops it has made sure that nothing uses it.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::sys;

use super::call::check;
use super::context::Context;
use super::memory::{Registration, count_failure, device_pointer, no_memory, out_of_memory};
use crate::copy::workers::Workers;
use crate::error::Result;
use crate::os::{HUGE_PAGE, Mapping};

/// How page-locked memory is made on a machine.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Placement {
    /// Large blocks are mapped by us, on huge pages, touched by several threads and then registered: `cuMemHostAlloc` touches
    /// every small page with one (`benches/pool.rs` compares them).
    pub(crate) map: bool,
    /// The NUMA node that such blocks come from.
    pub(crate) node: Option<u32>,
}

/// Blocks from this size on are worth the threads.
const MAPPED: usize = 4 << 20;

/// Page-locked memory, portable, mapped into the device, never write-combined (the CPU would read it at a tenth of the
/// speed). Its bytes are whatever was there before.
#[derive(Debug)]
pub(crate) struct Pinned {
    host: NonNull<u8>,
    device: Option<u64>,
    bytes: usize,
    /// Ours, registered; else it is from `cuMemHostAlloc`.
    mapping: Option<Mapping>,
    context: Arc<Context>,
}

// SAFETY: the memory belongs to this value alone, and the driver frees it from any thread.
unsafe impl Send for Pinned {}
// SAFETY: nothing is reached through a shared reference but the addresses, and the bytes for reading.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// # Errors
    /// The driver refused.
    pub(crate) fn make(context: &Arc<Context>, bytes: usize, placement: Placement) -> Result<Self> {
        if placement.map
            && bytes >= MAPPED
            && let Ok(pinned) = Self::map(context, bytes, placement.node)
        {
            return Ok(pinned);
        }
        Self::alloc(context, bytes)
    }

    fn alloc(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _bound = context.enter()?;
        let mut host = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current; the call writes one pointer.
        let code = unsafe { sys::cuMemHostAlloc(&mut host, bytes, flags) };
        check("cuMemHostAlloc", code).map_err(|error| out_of_memory(error, "pinned host memory", bytes))?;
        let host = NonNull::new(host.cast()).ok_or_else(|| no_memory("pinned host memory", bytes))?;
        let device = device_pointer(host);
        Ok(Self { host, device, bytes, mapping: None, context: context.clone() })
    }

    fn map(context: &Arc<Context>, bytes: usize, node: Option<u32>) -> Result<Self> {
        let mapping = Mapping::new(bytes, node)?;
        touch(&mapping);
        let host = mapping.address();
        // SAFETY: the mapping stays until `drop` has unregistered it.
        let registration = unsafe { Registration::new(context, host, bytes, false)? };
        let device = Some(registration.device());
        Ok(Self { host, device, bytes, mapping: Some(mapping), context: context.clone() })
    }

    pub(crate) fn host(&self) -> NonNull<u8> {
        self.host
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address at which the device sees it, if it does.
    pub(crate) fn device(&self) -> Option<u64> {
        self.device
    }

    /// The first `len` bytes. Nothing of ours uses memory of which there is such a reference.
    pub(crate) fn slice(&self, len: usize) -> &[u8] {
        // SAFETY: ours, `bytes` long, and set: the system gives no memory that is not.
        unsafe { std::slice::from_raw_parts(self.host.as_ptr(), len.min(self.bytes)) }
    }

    /// As [`slice`](Pinned::slice).
    pub(crate) fn slice_mut(&mut self, len: usize) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr(), len.min(self.bytes)) }
    }
}

/// Has the pages of a fresh mapping made by several threads.
pub(super) fn touch(mapping: &Mapping) {
    let (start, pages) = (Address(mapping.address()), mapping.bytes().div_ceil(HUGE_PAGE));
    let (next, bytes) = (AtomicUsize::new(0), mapping.bytes());
    let share = move || {
        loop {
            let page = next.fetch_add(1, Ordering::Relaxed);
            if page >= pages {
                return;
            }
            // Where the system has no huge page, small ones.
            for offset in (page * HUGE_PAGE..bytes.min((page + 1) * HUGE_PAGE)).step_by(4 << 10) {
                // SAFETY: inside the mapping, which nobody else has, and which outlives the call of `run`.
                unsafe { start.get().as_ptr().add(offset).write_volatile(0) };
            }
        }
    };
    Workers::get().run(pages - 1, Box::new(share));
}

/// An address that may go to other threads.
#[derive(Clone, Copy)]
pub(super) struct Address(pub(super) NonNull<u8>);

impl Address {
    /// A method, so that a closure takes the whole.
    pub(super) fn get(self) -> NonNull<u8> {
        self.0
    }
}

// SAFETY: only an address.
unsafe impl Send for Address {}
// SAFETY: only an address.
unsafe impl Sync for Address {}

impl Drop for Pinned {
    fn drop(&mut self) {
        let freed = self.context.enter().and_then(|_bound| {
            let host = self.host.as_ptr().cast();
            match &self.mapping {
                // SAFETY: from `cuMemHostAlloc`, freed once; the owner made sure that nothing uses it.
                None => check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(host) }),
                // SAFETY: registered by `map`, unregistered once; as above.
                Some(_) => check("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(host) }),
            }
        });
        if freed.is_err() {
            // The driver would take whoever got the addresses next for registered.
            std::mem::forget(self.mapping.take());
        }
        count_failure(&self.context, &freed);
    }
}
