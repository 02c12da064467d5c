//! Pieces of address space: every piece is mapped twice, once where the program sees it and once where the engines do.
//!
//! The front mapping carries the protection a program meets (none for device memory); the alias is always readable
//! and writable, is never unmapped, and is what copy engines and kernels use. So a step that touches memory which was
//! freed under it reads poison or spoils the next owner, as on hardware, but never crashes the simulator.

use std::ptr;

/// Where a freed or fresh byte is known by.
pub(crate) const POISON: u8 = 0xDD;

/// The host's page size.
pub(crate) fn page_size() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// What a program may do with the front mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nothing: a touch is a segmentation fault.
    None,
    /// Read and write.
    ReadWrite,
}

impl Access {
    fn flags(self) -> i32 {
        match self {
            Self::None => libc::PROT_NONE,
            Self::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

/// A doubly mapped piece of memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    /// The address a program is given.
    pub(crate) front: u64,
    /// The same bytes for the engines.
    pub(crate) alias: u64,
    /// Length in bytes, whole pages.
    pub(crate) len: u64,
}

/// Maps `len` bytes (rounded up to pages) with a page behind them that nobody may touch.
pub(crate) fn map(len: u64, access: Access) -> Option<Segment> {
    let page = page_size();
    let len = len.max(1).checked_next_multiple_of(page)?;
    let bytes = usize::try_from(len).ok()?;
    let page = usize::try_from(page).ok()?;
    // SAFETY: the name is a C string; the result is checked.
    let fd = unsafe { libc::memfd_create(c"cuda-sim".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return None;
    }
    let segment = map_twice(fd, bytes, page, access);
    // SAFETY: `fd` is ours and open; mappings keep the memory alive.
    unsafe { libc::close(fd) };
    segment
}

fn map_twice(fd: i32, bytes: usize, page: usize, access: Access) -> Option<Segment> {
    let size = libc::off_t::try_from(bytes).ok()?;
    // SAFETY: `fd` is a fresh memfd of ours.
    if unsafe { libc::ftruncate(fd, size) } != 0 {
        return None;
    }
    let front = reserve(bytes.checked_add(page)?)?;
    let place = front as *mut libc::c_void;
    // SAFETY: replaces the beginning of a reservation that nobody else knows yet.
    let mapped = unsafe {
        libc::mmap(place, bytes, access.flags(), libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE, fd, 0)
    };
    if mapped == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: a new mapping at an address the kernel chooses.
    let alias = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            fd,
            0,
        )
    };
    if alias == libc::MAP_FAILED {
        return None;
    }
    Some(Segment { front, alias: alias as u64, len: bytes as u64 })
}

/// Address space that nothing is mapped to.
pub(crate) fn reserve(bytes: usize) -> Option<u64> {
    // SAFETY: a new mapping at an address the kernel chooses.
    let place = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    (place != libc::MAP_FAILED).then_some(place as u64)
}

/// Changes what the program may do with `[front, front + len)`.
pub(crate) fn protect(front: u64, len: u64, access: Access) {
    let Ok(len) = usize::try_from(len) else { return };
    // SAFETY: the range is a front mapping of ours; the engines never use it.
    unsafe { libc::mprotect(front as *mut libc::c_void, len, access.flags()) };
}

/// Bytes up to here are poisoned in full.
const FULL: u64 = 64 << 20;
/// What is poisoned at either end of a longer piece; the middle is given back to the system.
const EDGE: u64 = 1 << 20;

/// Fills freed memory with poison. Pages nobody touched are left alone, so a huge allocation costs nothing.
pub(crate) fn poison(alias: u64, len: u64) {
    if len <= FULL {
        poison_touched(alias, len);
        return;
    }
    let page = page_size();
    let middle = (alias + EDGE).next_multiple_of(page);
    let end = (alias + len - EDGE) / page * page;
    discard(middle, end - middle);
    poison_touched(alias, EDGE);
    poison_touched(alias + len - EDGE, EDGE);
}

/// Gives the pages back; they read as zeros afterwards.
pub(crate) fn discard(alias: u64, len: u64) {
    let page = page_size();
    let start = alias.next_multiple_of(page);
    let end = (alias + len) / page * page;
    if end <= start {
        return;
    }
    let Ok(bytes) = usize::try_from(end - start) else { return };
    // SAFETY: whole pages of an alias mapping of ours.
    unsafe { libc::madvise(start as *mut libc::c_void, bytes, libc::MADV_REMOVE) };
}

/// Poisons fresh memory at its edges, so that reading what was never written shows.
pub(crate) fn poison_fresh(alias: u64, len: u64) {
    let head = len.min(EDGE);
    fill(alias, head);
    let tail = (len - head).min(64 << 10);
    fill(alias + len - tail, tail);
}

fn fill(alias: u64, len: u64) {
    let Ok(len) = usize::try_from(len) else { return };
    // SAFETY: the range lies in an alias mapping, always writable and never unmapped.
    unsafe { ptr::write_bytes(alias as *mut u8, POISON, len) };
}

fn poison_touched(alias: u64, len: u64) {
    let page = page_size();
    let start = alias / page * page;
    let end = (alias + len).next_multiple_of(page);
    let Ok(span) = usize::try_from(end - start) else { return };
    let pages = span / usize::try_from(page).unwrap_or(4096);
    let mut resident = vec![0u8; pages];
    // SAFETY: whole pages of an alias mapping; one byte of answer for each.
    let known = unsafe { libc::mincore(start as *mut libc::c_void, span, resident.as_mut_ptr()) } == 0;
    for (index, state) in resident.iter().enumerate() {
        if known && state & 1 == 0 {
            continue;
        }
        let from = (start + index as u64 * page).max(alias);
        let to = (start + (index as u64 + 1) * page).min(alias + len);
        fill(from, to - from);
    }
}
