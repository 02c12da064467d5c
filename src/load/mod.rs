//! Files of tensors, streamed to where the device uses them.
#![deny(unsafe_code)]

mod header;
mod progress;
mod run;
mod select;
mod source;

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::CudaStream;

pub use progress::Progress;
pub use select::{Load, Reading};

use self::header::{Entry, LARGEST_HEADER, LENGTH_BYTES, parse, parse_index, quoted};
use crate::device::Device;
use crate::element::DType;
use crate::error::{Error, Kind, Result};
use crate::os::ReadFile;

const MODEL: &str = "safetensors file";
const INDEX: &str = "index of a sharded model";

/// A model in safetensors files, opened: what its tensors are is known, their bytes are not read yet.
///
/// ```
/// # cuda_sim::install().unwrap();
/// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
/// # let device = transfer_tensor::Device::open(gpu.ordinal())?;
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let bytes = [0u8; 12];
/// # let weight = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![3], &bytes)?;
/// # std::fs::write(&path, safetensors::serialize([("weight", weight)], None)?)?;
/// use transfer_tensor::{Checkpoint, TransferTensor};
///
/// let checkpoint = Checkpoint::open(&path)?;
/// for tensor in checkpoint.tensors() {
///     println!("{} {} {:?}: {} bytes", tensor.name(), tensor.file_dtype(), tensor.shape(), tensor.bytes());
/// }
/// let stream = device.stream();
/// let mut tensors = checkpoint.load(&device, stream).run()?;
/// let weight: TransferTensor<f32> = tensors.remove("weight").ok_or("no weight")?.downcast()?;
/// # let _ = &weight;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Files that others change
///
/// The files must stay as they are while they are read. A file that is cut or written to meanwhile is an error where it is
/// *read* ([`Reading::Read`], the default where bytes are copied). Where it is *mapped* ([`Reading::Map`], the default where the
/// device uses the host's memory in place), cutting it ends the process with SIGBUS as soon as the bytes that are gone are
/// touched, and writing to it changes the tensors: the operating system offers no way to keep others from it. Replace
/// models by renaming a new file over the old one.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    shards: Vec<ReadFile>,
    /// By shard, and within one as they lie in the file.
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

/// One tensor of a [`Checkpoint`], as its file describes it.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    entry: Entry,
    shard: usize,
}

impl TensorInfo {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.entry.name
    }

    /// The name of the element type in the file, such as `BF16` or `F4`.
    pub fn file_dtype(&self) -> &str {
        &self.entry.dtype
    }

    /// The element type it is loaded with. Types that have no counterpart in this crate (those of 4 and 6 bits, complex
    /// numbers, exponents alone) travel as their bytes, [`DType::U8`].
    pub fn dtype(&self) -> DType {
        self.counterpart().unwrap_or(DType::U8)
    }

    fn counterpart(&self) -> Option<DType> {
        self.entry.dtype.parse().ok()
    }

    /// The extents, in elements of the file's type.
    pub fn shape(&self) -> &[usize] {
        &self.entry.shape
    }

    /// The extents it is loaded with: [`shape`](Self::shape), or the number of bytes where it travels as those.
    pub fn loaded_shape(&self) -> Vec<usize> {
        match self.counterpart() {
            Some(_) => self.entry.shape.clone(),
            None => vec![self.bytes() as usize],
        }
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.entry.range.end - self.entry.range.start
    }

    fn range(&self) -> &Range<u64> {
        &self.entry.range
    }
}

impl Checkpoint {
    /// Opens a `.safetensors` file, the `.index.json` of a sharded model, or a folder with one index or, without an index,
    /// one file. Reads headers only.
    ///
    /// # Errors
    /// [`is_file`](Error::is_file): something is not there or can not be read (a missing shard is named), or a folder holds no
    /// model, or several.
    /// [`is_bad_file`](Error::is_bad_file): a header is too long, cut, not what the format asks, or does not agree with the file's
    /// length; a name is there twice; the index names a tensor that its file does not have, or a file outside its folder.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_dir() {
            return Self::open(model_of(path)?);
        }
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json")) {
            return Self::open_index(path);
        }
        let (file, entries) = open_shard(path)?;
        Self::assemble(path, vec![(file, entries)])
    }

    fn open_index(path: &Path) -> Result<Self> {
        let bad = |why: String| bad(path, INDEX, why);
        let file = ReadFile::open(path)?;
        if file.bytes() > LARGEST_HEADER {
            return Err(bad(format!("{} bytes are more than it may have ({LARGEST_HEADER})", file.bytes())));
        }
        let mut text = vec![0; file.bytes() as usize];
        file.read_at(0, &mut text)?;
        let wanted = parse_index(&text).map_err(bad)?;
        let mut names: Vec<&String> = wanted.values().collect();
        names.sort();
        names.dedup();
        let folder = path.parent().unwrap_or(Path::new(""));
        let shards = names.iter().map(|name| open_shard(&folder.join(name))).collect::<Result<Vec<_>>>()?;
        let checkpoint = Self::assemble(path, shards)?;
        for (name, file) in &wanted {
            let found = checkpoint.get(name).and_then(|info| checkpoint.shards.get(info.shard));
            if found.is_none_or(|shard| shard.path() != folder.join(file)) {
                return Err(bad(format!("tensor {} is not in {}", quoted(name), quoted(file))));
            }
        }
        Ok(checkpoint)
    }

    fn assemble(path: &Path, opened: Vec<(ReadFile, Vec<Entry>)>) -> Result<Self> {
        let mut checkpoint = Self { path: path.into(), shards: vec![], tensors: vec![], by_name: HashMap::new() };
        for (shard, (file, entries)) in opened.into_iter().enumerate() {
            for entry in entries {
                let number = checkpoint.tensors.len();
                if let Some(first) = checkpoint.by_name.insert(entry.name.clone(), number) {
                    let first = checkpoint.tensors.get(first).and_then(|info| checkpoint.shards.get(info.shard));
                    let first = first.map(|file| file.path().display().to_string()).unwrap_or_default();
                    let why = format!("tensor {} is in {} too", quoted(&entry.name), quoted(&first));
                    return Err(bad(file.path(), MODEL, why));
                }
                checkpoint.tensors.push(TensorInfo { entry, shard });
            }
            checkpoint.shards.push(file);
        }
        Ok(checkpoint)
    }

    /// The path of the file or index it was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that hold its tensors.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.shards.iter().map(ReadFile::path)
    }

    /// Its tensors: file by file, in the order in which they lie there.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(*self.by_name.get(name)?)
    }

    /// The bytes of all its tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(TensorInfo::bytes).sum()
    }

    /// Loads its tensors to where `device` uses them, those that need a copy in the order of `stream`. Nothing happens before
    /// [`Load::run`].
    pub fn load<'a>(&'a self, device: &'a Device, stream: &'a Arc<CudaStream>) -> Load<'a> {
        Load::new(self, device, stream)
    }

    /// Reads the bytes of tensor `name` from byte `offset` of it on, as many as `into` takes, on the host.
    ///
    /// # Errors
    /// There is no such tensor, it ends before, or the file can not be read.
    pub fn read(&self, name: &str, offset: u64, into: &mut [u8]) -> Result<()> {
        let (info, file) = self.find(name)?;
        let end = offset.checked_add(into.len() as u64).filter(|&end| end <= info.bytes());
        if end.is_none() {
            let (start, len) = (usize::try_from(offset).unwrap_or(usize::MAX), info.bytes() as usize);
            let end = start.saturating_add(into.len());
            return Err(Error::new(Kind::Range { start, end, len, unit: "bytes of the tensor" }));
        }
        file.read_at(info.range().start + offset, into)
    }

    /// Checks that no file was cut or written to since it was opened, by length and time.
    ///
    /// # Errors
    /// One was.
    pub fn check_unchanged(&self) -> Result<()> {
        self.shards.iter().try_for_each(ReadFile::check_unchanged)
    }

    fn find(&self, name: &str) -> Result<(&TensorInfo, &ReadFile)> {
        let info = self.get(name).ok_or_else(|| self.unknown(name))?;
        Ok((info, self.shard(info)?))
    }

    fn shard(&self, info: &TensorInfo) -> Result<&ReadFile> {
        self.shards.get(info.shard).ok_or_else(|| self.unknown(info.name()))
    }

    fn unknown(&self, name: &str) -> Error {
        Error::new(Kind::UnknownTensor { name: name.into(), path: self.path.clone(), tensors: self.tensors.len() })
    }
}

fn bad(path: &Path, what: &'static str, why: impl Into<String>) -> Error {
    Error::new(Kind::BadFile { path: path.into(), what, why: why.into() })
}

fn open_shard(path: &Path) -> Result<(ReadFile, Vec<Entry>)> {
    let bad = |why: String| bad(path, MODEL, why);
    let file = ReadFile::open(path)?;
    if file.bytes() < LENGTH_BYTES {
        return Err(bad("it is shorter than the 8 bytes that give the header's length".into()));
    }
    let mut first = [0; LENGTH_BYTES as usize];
    file.read_at(0, &mut first)?;
    let mut header = vec![0; header::length(first, file.bytes()).map_err(bad)?];
    file.read_at(LENGTH_BYTES, &mut header)?;
    let entries = parse(&header, file.bytes()).map_err(bad)?;
    Ok((file, entries))
}

/// The one model of a folder.
fn model_of(folder: &Path) -> Result<PathBuf> {
    let failed = |why: String| Error::new(Kind::File { path: folder.into(), why });
    let (mut indexes, mut files) = (Vec::new(), Vec::new());
    for item in std::fs::read_dir(folder).map_err(|error| failed(error.to_string()))? {
        let path = item.map_err(|error| failed(error.to_string()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        if name.ends_with(".safetensors.index.json") {
            indexes.push(path);
        } else if name.ends_with(".safetensors") {
            files.push(path);
        }
    }
    let mut found = if indexes.is_empty() { files } else { indexes };
    found.sort();
    match (found.pop(), found.pop()) {
        (Some(one), None) => Ok(one),
        (Some(last), Some(other)) => {
            let [other, last] =
                [other, last].map(|path| quoted(&path.file_name().unwrap_or_default().to_string_lossy()));
            Err(failed(format!("a folder of more than one model, such as {other} and {last}")))
        }
        (None, _) => Err(failed("a folder without a .safetensors file or an index of some".into())),
    }
}
