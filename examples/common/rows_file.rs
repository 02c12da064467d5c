//! One file that rows of `f32` are added to while they are made: `.npy` or `.safetensors`. Both begin with a header
//! that says how many there are, which is set at the end.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use clap::ValueEnum;
use transfer_tensor::Checkpoint;

use super::Failure;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Npy,
    Safetensors,
}

impl Format {
    pub fn extension(self) -> &'static str {
        match self {
            Format::Npy => "npy",
            Format::Safetensors => "safetensors",
        }
    }

    /// The header, as long for any number of rows. Elements are little-endian, as on every machine with CUDA.
    fn header(self, rows: u64, row: u64) -> Vec<u8> {
        const NPY: &[u8] = b"\x93NUMPY\x01\x00";
        match self {
            Format::Npy => {
                let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {row}), }}");
                let room = HEADER - NPY.len() - 2;
                let mut header = [NPY, &(room as u16).to_le_bytes(), text.as_bytes()].concat();
                header.resize(HEADER - 1, b' ');
                header.push(b'\n');
                header
            }
            Format::Safetensors => {
                let bytes = rows * row * ELEMENT;
                let text =
                    format!(r#"{{"{TENSOR}":{{"dtype":"F32","shape":[{rows},{row}],"data_offsets":[0,{bytes}]}}}}"#);
                let mut header = [&(HEADER as u64 - 8).to_le_bytes(), text.as_bytes()].concat();
                header.resize(HEADER, b' ');
                header
            }
        }
    }
}

/// Room for any numbers, and a multiple of what both formats align elements to.
const HEADER: usize = 256;
const ELEMENT: u64 = size_of::<f32>() as u64;
/// The tensor's name in a safetensors file.
const TENSOR: &str = "outputs";

/// The file while it is written, by several threads.
#[derive(Debug)]
pub struct RowsFile {
    file: File,
    format: Format,
    /// Elements of a row.
    row: u64,
}

impl RowsFile {
    /// Begins the file, over one that is there. Until [`finish`](Self::finish) its header says that there are no rows:
    /// what was interrupted is not taken for whole.
    pub fn create(path: &Path, format: Format, row: u64) -> io::Result<Self> {
        let mut file = File::create(path)?;
        file.write_all(&format.header(0, row))?;
        Ok(Self { file, format, row })
    }

    /// Writes rows, the first of which is number `first`, where they belong.
    pub fn put(&self, first: u64, values: &[f32]) -> io::Result<()> {
        let place = HEADER as u64 + first * self.row * ELEMENT;
        write_at(&self.file, place, bytemuck::cast_slice(values))
    }

    /// Says how many rows there are; the file's length.
    pub fn finish(&self, rows: u64) -> io::Result<u64> {
        write_at(&self.file, 0, &self.format.header(rows, self.row))?;
        Ok(self.file.metadata()?.len())
    }
}

#[cfg(unix)]
fn write_at(file: &File, place: u64, bytes: &[u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, place)
}

#[cfg(windows)]
fn write_at(file: &File, mut place: u64, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, bytes, place)? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => (place, bytes) = (place + written as u64, &bytes[written..]),
        }
    }
    Ok(())
}

/// Reads bytes of the elements, from an offset on.
type ReadAt = Box<dyn FnMut(u64, &mut [u8]) -> Result<(), Failure>>;

/// Reads the file as others would, and compares every element, given by row and column; how many there are.
pub fn check(
    path: &Path,
    format: Format,
    rows: u64,
    row: u64,
    expected: impl Fn(u64, u64) -> f32,
) -> Result<u64, Failure> {
    let wrong = |what: String| Failure::other(format!("{}: {what}", path.display()));
    let failed = |error: io::Error| wrong(error.to_string());
    let mut reader: ReadAt = match format {
        Format::Npy => {
            let mut file = File::open(path).map_err(failed)?;
            let mut header = [0; HEADER];
            file.read_exact(&mut header).map_err(failed)?;
            let length = file.metadata().map_err(failed)?.len();
            if header != *format.header(rows, row) || length != HEADER as u64 + rows * row * ELEMENT {
                return Err(wrong(format!("its header or its length is not that of {rows} x {row} numbers")));
            }
            Box::new(move |offset, into| {
                file.seek(SeekFrom::Start(HEADER as u64 + offset)).map_err(Failure::other)?;
                file.read_exact(into).map_err(Failure::other)
            })
        }
        Format::Safetensors => {
            let file = Checkpoint::open(path)?;
            let shape = file.get(TENSOR).map(|tensor| (tensor.file_dtype().to_owned(), tensor.shape().to_vec()));
            if shape != Some(("F32".into(), vec![rows as usize, row as usize])) {
                return Err(wrong(format!("its tensor is {shape:?}")));
            }
            Box::new(move |offset, into| Ok(file.read(TENSOR, offset, into)?))
        }
    };
    let mut piece = vec![0_f32; (rows * row).min(1 << 18) as usize];
    let mut first = 0;
    while first < rows * row {
        let len = (rows * row - first).min(piece.len() as u64);
        let piece = &mut piece[..len as usize];
        reader(first * ELEMENT, bytemuck::cast_slice_mut(piece))?;
        for (index, value) in (first..).zip(&*piece) {
            let (at, column) = (index / row, index % row);
            let expected = expected(at, column);
            if value.to_bits() != expected.to_bits() {
                return Err(wrong(format!("row {at}, column {column} is {value}, not {expected}")));
            }
        }
        first += len;
    }
    Ok(rows * row)
}
