//! Files that are read through a map.

use std::ops::Range;
use std::sync::Arc;

#[cfg(unix)]
use memmap2::Advice;
use memmap2::Mmap;
use parking_lot::Mutex;

use super::file::ReadFile;
use crate::error::Result;

/// A file's one map, if there is one.
#[derive(Debug, Default)]
pub(super) struct Shared(Mutex<Option<Arc<FileMap>>>);

impl ReadFile {
    /// Tells the system that the file is going to be read from front to back. A refusal changes nothing.
    pub(crate) fn advise_sequential(&self) {
        #[cfg(all(target_os = "linux", target_pointer_width = "64"))]
        {
            use std::ffi::c_int;
            use std::os::fd::AsRawFd as _;
            const POSIX_FADV_SEQUENTIAL: c_int = 2;
            unsafe extern "C" {
                fn posix_fadvise(file: c_int, offset: i64, length: i64, advice: c_int) -> c_int;
            }
            // SAFETY: takes no pointers; the file is open.
            let _ = unsafe { posix_fadvise(self.file.as_raw_fd(), 0, 0, POSIX_FADV_SEQUENTIAL) };
        }
    }

    /// The file's bytes in memory: one map, which all share.
    ///
    /// # Errors
    /// The system refused, or the file has another length by now.
    pub(crate) fn map(&self) -> Result<Arc<FileMap>> {
        let mut map = self.map.0.lock();
        if let Some(map) = &*map {
            return Ok(map.clone());
        }
        // SAFETY: read-only and private. If others cut the file, touching what is gone ends the process with SIGBUS; if they
        // write to it, the bytes may change under a reader. `Checkpoint` documents both, and has reads for who fears them.
        let mapped = unsafe { Mmap::map(&self.file) };
        let mapped = mapped.map_err(|error| self.failed(format!("mapping it: {error}")))?;
        if mapped.len() as u64 != self.bytes() {
            return Err(self.changed());
        }
        Ok(map.insert(Arc::new(FileMap(mapped))).clone())
    }
}

/// A file's bytes, mapped read-only.
#[derive(Debug)]
pub(crate) struct FileMap(Mmap);

impl AsRef<[u8]> for FileMap {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl FileMap {
    /// Tells the system that it is going to be read from front to back. A refusal changes nothing.
    pub(crate) fn advise_sequential(&self) {
        #[cfg(unix)]
        let _ = self.0.advise(Advice::Sequential);
    }

    /// Lets the system map the pages of a range at once, rather than some at a fault. A refusal changes nothing.
    pub(crate) fn populate(&self, range: &Range<usize>) {
        // Since Linux 5.14; before, the kernel maps 16 pages at a fault.
        #[cfg(target_os = "linux")]
        let _ = self.0.advise_range(Advice::PopulateRead, range.start, range.len());
        #[cfg(not(target_os = "linux"))]
        let _ = range;
    }

    /// Unmaps the pages of a range that was read: they stay in the page cache, but count no longer as this process's
    /// memory. Who reads them again finds the same bytes.
    pub(crate) fn drop_behind(&self, range: &Range<usize>) {
        // SAFETY: the map is private, read-only and of a file: dropped pages are read again from it, nothing is lost.
        #[cfg(unix)]
        let _ = unsafe { self.0.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len()) };
        #[cfg(not(unix))]
        let _ = range;
    }
}
