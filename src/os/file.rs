//! Files that are read at given offsets, by reads or through a map.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

#[cfg(unix)]
use memmap2::Advice;
use memmap2::Mmap;
use parking_lot::Mutex;

use crate::error::{Error, Kind, Result};

/// A regular file, open for reading, that remembers how it was when it was opened.
#[derive(Debug)]
pub(crate) struct ReadFile {
    path: PathBuf,
    file: File,
    stamp: Stamp,
    map: Mutex<Option<Arc<FileMap>>>,
}

/// What tells that a file was changed.
#[derive(Debug, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Self {
        Self { bytes: metadata.len(), modified: metadata.modified().ok() }
    }
}

impl ReadFile {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = |error: io::Error| failed(path, error.to_string());
        // Before opening: a FIFO would wait for its writer.
        if !fs::metadata(path).map_err(failed)?.is_file() {
            return Err(self::failed(path, "not a regular file"));
        }
        let file = File::open(path).map_err(failed)?;
        let stamp = Stamp::of(&file.metadata().map_err(failed)?);
        Ok(Self { path: path.into(), file, stamp, map: Mutex::new(None) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Its length when it was opened.
    pub(crate) fn bytes(&self) -> u64 {
        self.stamp.bytes
    }

    /// Fills `into` with the bytes from `offset` on. May be called from several threads at once.
    ///
    /// # Errors
    /// The file ends before, or the system refused.
    pub(crate) fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        read_exact_at(&self.file, offset, into).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                let (now, end) = (self.file.metadata().map_or(0, |metadata| metadata.len()), into.len() as u64);
                let (end, before) = (offset.saturating_add(end), self.stamp.bytes);
                failed(
                    &self.path,
                    format!(
                        "the file became shorter while it was read: bytes {offset}..{end} of {before} were asked, {now} are left"
                    ),
                )
            }
            _ => failed(&self.path, format!("reading at byte {offset}: {error}")),
        })
    }

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
        let mut map = self.map.lock();
        if let Some(map) = &*map {
            return Ok(map.clone());
        }
        // SAFETY: read-only and private. If others cut the file, touching what is gone ends the process with SIGBUS; if they
        // write to it, the bytes may change under a reader. `Checkpoint` documents both, and has reads for who fears them.
        let mapped = unsafe { Mmap::map(&self.file) };
        let mapped = mapped.map_err(|error| failed(&self.path, format!("mapping it: {error}")))?;
        if mapped.len() as u64 != self.stamp.bytes {
            return Err(self.changed());
        }
        Ok(map.insert(Arc::new(FileMap(mapped))).clone())
    }

    /// Fails if the file was written to or cut since it was opened.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        let now = self.file.metadata().map_err(|error| failed(&self.path, error.to_string()))?;
        if Stamp::of(&now) == self.stamp { Ok(()) } else { Err(self.changed()) }
    }

    fn changed(&self) -> Error {
        failed(&self.path, "the file was changed while it was read")
    }
}

fn failed(path: &Path, why: impl Into<String>) -> Error {
    Error::new(Kind::File { path: path.into(), why: why.into() })
}

#[cfg(unix)]
fn read_exact_at(file: &File, offset: u64, into: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut offset: u64, mut into: &mut [u8]) -> io::Result<()> {
    while !into.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, into, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                into = into.get_mut(read..).unwrap_or_default();
                offset += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
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
