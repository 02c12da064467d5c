//! A safetensors file that may be truncated, hostile, or changed while it is read.
//!
//! It is read with plain reads, not mapped: the bytes go straight into a tensor's memory, and a file that shrinks is an
//! error instead of a signal.

use std::fs::{self, File};
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use safetensors::tensor::{Dtype, Metadata};

use crate::common::Failure;

/// The format's own limit.
const LARGEST_HEADER: u64 = 100_000_000;
const LENGTH_BYTES: u64 = 8;

/// An open file whose header was checked.
#[derive(Debug)]
pub(crate) struct ModelFile {
    path: PathBuf,
    file: File,
    stamp: Stamp,
    /// Where the tensors' bytes begin.
    data: u64,
    /// In the order of the file.
    pub(crate) tensors: Vec<Entry>,
}

/// One tensor of the file.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Of the file's data.
    range: Range<u64>,
}

impl Entry {
    pub(crate) fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
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

impl ModelFile {
    /// Opens the file and checks its header against its length.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let shown = path.display();
        // Before opening: a FIFO would wait for its writer.
        let metadata = fs::metadata(path).map_err(|error| Failure::usage(format!("{shown}: {error}")))?;
        if !metadata.is_file() {
            return Err(Failure::usage(format!("{shown}: not a regular file")));
        }
        let mut file = File::open(path).map_err(|error| Failure::usage(format!("{shown}: {error}")))?;
        let stamp = file.metadata().map(|metadata| Stamp::of(&metadata)).map_err(|error| failed(path, &error))?;

        let bad = |why: &str| Failure::other(format!("{shown}: not a valid safetensors file: {}", shortened(why)));
        if stamp.bytes < LENGTH_BYTES {
            return Err(bad("it is shorter than the 8 bytes that give the header's length"));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut length).map_err(|error| failed(path, &error))?;
        let length = u64::from_le_bytes(length);
        if length > LARGEST_HEADER {
            return Err(bad(&format!("a header of {length} bytes is more than the format allows ({LARGEST_HEADER})")));
        }
        let data = LENGTH_BYTES + length;
        if data > stamp.bytes {
            let have = stamp.bytes - LENGTH_BYTES;
            return Err(bad(&format!(
                "truncated: the header has {length} bytes, the file only {have} after its length"
            )));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(|error| failed(path, &error))?;
        // `Metadata` and not `SafeTensors`: that one adds up the lengths unchecked, and takes the whole file as a slice.
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| bad(&error.to_string()))?;
        drop(header);

        // Offsets begin at 0 and leave no gap (checked by the crate), so the last one ends the file.
        let bytes = metadata.data_len() as u64;
        let have = stamp.bytes - data;
        if bytes > have {
            return Err(bad(&format!("truncated: its tensors have {bytes} bytes, the file only {have}")));
        }
        if bytes < have {
            return Err(bad(&format!("its tensors have {bytes} bytes, {} more follow", have - bytes)));
        }
        let tensors = metadata
            .offset_keys()
            .into_iter()
            .filter_map(|name| {
                let info = metadata.info(&name)?;
                let range = info.data_offsets.0 as u64..info.data_offsets.1 as u64;
                Some(Entry { name, dtype: info.dtype, shape: info.shape.clone(), range })
            })
            .collect();
        Ok(Self { path: path.into(), file, stamp, data, tensors })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of all tensors.
    pub(crate) fn bytes(&self) -> u64 {
        self.tensors.iter().map(Entry::bytes).sum()
    }

    /// Reads a tensor's bytes from `offset` on, as many as `target` takes.
    pub(crate) fn read(&self, entry: &Entry, offset: u64, target: &mut [u8]) -> Result<(), Failure> {
        let mut file = &self.file;
        let start = self.data + entry.range.start + offset;
        file.seek(SeekFrom::Start(start))
            .and_then(|_| file.read_exact(target))
            .map_err(|error| failed(&self.path, &error))
    }

    /// Fails if the file was written to or cut since it was opened.
    pub(crate) fn check_unchanged(&self) -> Result<(), Failure> {
        let now = self.file.metadata().map_err(|error| failed(&self.path, &error))?;
        if Stamp::of(&now) == self.stamp {
            return Ok(());
        }
        Err(Failure::other(format!("{}: the file was changed while it was read", self.path.display())))
    }
}

fn failed(path: &Path, error: &std::io::Error) -> Failure {
    let path = path.display();
    match error.kind() {
        ErrorKind::UnexpectedEof => Failure::other(format!("{path}: the file became shorter while it was read")),
        _ => Failure::other(format!("{path}: {error}")),
    }
}

/// A message that may quote the file, cut to what a person reads.
fn shortened(text: &str) -> String {
    const MOST: usize = 240;
    let mut shown: String = text.chars().take(MOST).flat_map(printable).collect();
    if text.chars().nth(MOST).is_some() {
        shown.push('…');
    }
    shown
}

/// A character as it may go to a terminal: control and formatting characters are escaped.
pub(crate) fn printable(c: char) -> impl Iterator<Item = char> {
    let plain = matches!(c, '"' | '\'' | '\\');
    plain.then_some(c).into_iter().chain((!plain).then(|| c.escape_debug()).into_iter().flatten())
}
