//! The only place where bytes move.
//!
//! Memory of ours is reached through aliases that are never unmapped. Memory of the program's may be unmapped at any
//! time if the program is wrong: it is read and written by way of the kernel, which answers with an error instead of
//! a signal. Under AddressSanitizer plain copies are used instead, so that it sees them.

use crate::memory::Span;
use crate::status::{INVALID_VALUE, Res};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Set when the kernel refuses to copy within the process.
static PLAIN: AtomicBool = AtomicBool::new(cfg!(cusim_asan));

/// Copies `len` bytes between engine addresses; `foreign` ones are the program's own memory.
pub(crate) fn copy(dst: u64, dst_foreign: bool, src: u64, src_foreign: bool, len: u64) -> Res {
    let Ok(len) = usize::try_from(len) else { return Err(INVALID_VALUE) };
    if len == 0 {
        return Ok(());
    }
    if !PLAIN.load(Ordering::Relaxed) {
        let done = match (dst_foreign, src_foreign) {
            (false, false) => None,
            (false, true) => Some(kernel_copy(dst, src, len, Way::Read)),
            (true, false) => Some(kernel_copy(dst, src, len, Way::Write)),
            (true, true) => Some(bounce(dst, src, len)),
        };
        match done {
            None => {}
            Some(Moved::All) => return Ok(()),
            Some(Moved::Fault) => return Err(INVALID_VALUE),
            Some(Moved::Refused) => PLAIN.store(true, Ordering::Relaxed),
        }
    }
    let ends = |start: u64| readable(start) && readable(start + len as u64 - 1);
    if (dst_foreign && !ends(dst)) || (src_foreign && !ends(src)) {
        return Err(INVALID_VALUE);
    }
    // SAFETY: both ranges are aliases of ours, or memory the caller of the driver promised to keep valid until the
    // copy is done. `copy` allows the ranges to overlap.
    unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, len) };
    Ok(())
}

/// Reads program memory into a buffer at once.
pub(crate) fn stage(src: u64, len: u64) -> Res<Vec<u8>> {
    let size = usize::try_from(len).map_err(|_| INVALID_VALUE)?;
    let mut buffer = vec![0u8; size];
    copy(buffer.as_mut_ptr() as u64, false, src, true, len)?;
    Ok(buffer)
}

/// Whether program memory can be read at an address; true where the kernel does not say.
pub(crate) fn readable(addr: u64) -> bool {
    let mut byte = 0u8;
    !matches!(kernel_copy(&raw mut byte as u64, addr, 1, Way::Read), Moved::Fault)
}

/// The first page's address, of those that hold a range, that can not be read now.
pub(crate) fn first_unreadable(start: u64, len: u64) -> Option<u64> {
    const PAGE: u64 = 4096;
    let first = start - start % PAGE;
    (first..start + len).step_by(PAGE as usize).find(|page| !readable((*page).max(start)))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Read,
    Write,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Moved {
    All,
    Fault,
    Refused,
}

/// The most one call moves.
const PIECE: usize = 64 << 20;

fn kernel_copy(dst: u64, src: u64, len: usize, way: Way) -> Moved {
    // SAFETY: no preconditions.
    let me = unsafe { libc::getpid() };
    let mut done = 0;
    while done < len {
        let piece = (len - done).min(PIECE);
        let to = libc::iovec { iov_base: (dst + done as u64) as *mut libc::c_void, iov_len: piece };
        let from = libc::iovec { iov_base: (src + done as u64) as *mut libc::c_void, iov_len: piece };
        // SAFETY: the kernel checks both ranges and reports what it cannot reach.
        let moved = unsafe {
            match way {
                Way::Read => libc::process_vm_readv(me, &raw const to, 1, &raw const from, 1, 0),
                Way::Write => libc::process_vm_writev(me, &raw const from, 1, &raw const to, 1, 0),
            }
        };
        match usize::try_from(moved) {
            Ok(0) => return Moved::Fault,
            Ok(moved) => done += moved,
            Err(_) => {
                let error = std::io::Error::last_os_error().raw_os_error();
                return if error == Some(libc::EFAULT) { Moved::Fault } else { Moved::Refused };
            }
        }
    }
    Moved::All
}

fn bounce(dst: u64, src: u64, len: usize) -> Moved {
    const STEP: usize = 1 << 20;
    let mut buffer = vec![0u8; len.min(STEP)];
    let middle = buffer.as_mut_ptr() as u64;
    let mut done = 0;
    while done < len {
        let piece = (len - done).min(STEP);
        let offset = done as u64;
        for moved in
            [kernel_copy(middle, src + offset, piece, Way::Read), kernel_copy(dst + offset, middle, piece, Way::Write)]
        {
            if moved != Moved::All {
                return moved;
            }
        }
        done += piece;
    }
    Moved::All
}

/// Fills `count` elements of 1, 2 or 4 bytes.
pub(crate) fn fill(dst: &Span, offset: u64, value: u32, element: u64, count: u64) -> Res {
    let bytes = value.to_le_bytes();
    let element = usize::try_from(element.min(4)).map_err(|_| INVALID_VALUE)?;
    let pattern = &bytes[..element];
    let same = pattern.iter().all(|byte| *byte == pattern[0]);
    let len = usize::try_from(count).map_err(|_| INVALID_VALUE)?.checked_mul(element).ok_or(INVALID_VALUE)?;
    if len == 0 {
        return Ok(());
    }
    if same && !dst.is_foreign() {
        // SAFETY: the range lies in an alias of ours (the caller checked the span).
        unsafe { std::ptr::write_bytes((dst.engine + offset) as *mut u8, pattern[0], len) };
        return Ok(());
    }
    let chunk: Vec<u8> = pattern.iter().copied().cycle().take(len.min(1 << 16)).collect();
    let mut done = 0;
    while done < len {
        let piece = (len - done).min(chunk.len());
        let to = dst.engine + offset + done as u64;
        copy(to, dst.is_foreign(), chunk.as_ptr() as u64, false, piece as u64)?;
        done += piece;
    }
    Ok(())
}

/// Writes a word so that a host thread spinning on it sees it.
pub(crate) fn write_word(engine: u64, value: u64, wide: bool) {
    if wide {
        // SAFETY: an aligned word within an allocation (the caller checked), shared with the program as an atomic.
        unsafe { AtomicU64::from_ptr(engine as *mut u64) }.store(value, Ordering::Release);
    } else {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(engine as *mut u32) }.store(value as u32, Ordering::Release);
    }
}

/// Reads a word that a host thread may write at any time.
pub(crate) fn read_word(engine: u64, wide: bool) -> u64 {
    if wide {
        // SAFETY: an aligned word within an allocation (the caller checked), shared with the program as an atomic.
        unsafe { AtomicU64::from_ptr(engine as *mut u64) }.load(Ordering::Acquire)
    } else {
        // SAFETY: as above.
        u64::from(unsafe { AtomicU32::from_ptr(engine as *mut u32) }.load(Ordering::Acquire))
    }
}
