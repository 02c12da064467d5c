//! Files that are read at given offsets.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

#[cfg(feature = "safetensors")]
use super::file_map::Shared;
use crate::error::{Error, Kind, Result};

/// A regular file, open for reading, that remembers how it was when it was opened.
#[derive(Debug)]
pub(crate) struct ReadFile {
    path: PathBuf,
    pub(super) file: File,
    stamp: Stamp,
    #[cfg(feature = "safetensors")]
    pub(super) map: Shared,
}

/// What tells that a file was changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stamp {
    bytes: u64,
    modified: Option<SystemTime>,
    /// Its device and its number there, where that is known: another file may have taken its name.
    identity: (u64, u64),
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Self {
        #[cfg(unix)]
        let identity = {
            use std::os::unix::fs::MetadataExt as _;
            (metadata.dev(), metadata.ino())
        };
        #[cfg(not(unix))]
        let identity = (0, 0);
        Self { bytes: metadata.len(), modified: metadata.modified().ok(), identity }
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
        Ok(Self {
            path: path.into(),
            file,
            stamp,
            #[cfg(feature = "safetensors")]
            map: Shared::default(),
        })
    }

    #[cfg(feature = "safetensors")]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// How it was when it was opened.
    pub(super) fn stamp(&self) -> &Stamp {
        &self.stamp
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

    /// Fails if the file was written to or cut since it was opened.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        let now = self.file.metadata().map_err(|error| failed(&self.path, error.to_string()))?;
        if Stamp::of(&now) == self.stamp { Ok(()) } else { Err(self.changed()) }
    }

    /// What is wrong with it.
    pub(crate) fn failed(&self, why: impl Into<String>) -> Error {
        failed(&self.path, why)
    }

    pub(super) fn changed(&self) -> Error {
        self.failed("the file was changed while it was read")
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
