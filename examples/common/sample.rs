//! A model file made up on the spot: every kind of tensor that a reader must cope with.

use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::Failure;

/// A sample file; it is gone when this is dropped.
#[derive(Debug)]
pub struct Sample {
    path: PathBuf,
    _folder: TempDir,
}

/// Name, type, shape. The first is longer than one piece of a copy through staging memory.
const TENSORS: &[(&str, Dtype, &[usize])] = &[
    ("embedding.weight", Dtype::F32, &[3001, 384]),
    ("layer.0.attention.weight", Dtype::F16, &[384, 385]),
    ("layer.0.attention.bias", Dtype::F16, &[385]),
    ("layer.0.mlp.weight", Dtype::BF16, &[384, 1537]),
    ("layer.0.mlp.weight.packed", Dtype::F4, &[127, 66]),
    ("layer.0.mlp.weight.scale", Dtype::F8_E8M0, &[127, 3]),
    ("layer.1.mlp.weight", Dtype::F8_E4M3, &[333, 7]),
    ("layer.1.mlp.weight.six_bit", Dtype::F6_E2M3, &[5, 12]),
    ("layer.1.gate.weight", Dtype::F8_E5M2, &[31]),
    ("layer.1.mask", Dtype::BOOL, &[127]),
    ("adapter.empty", Dtype::F32, &[0, 384]),
    ("rotation", Dtype::C64, &[3, 5]),
    ("inverse_frequency", Dtype::F64, &[33]),
    ("position_ids", Dtype::I64, &[1, 513]),
    ("steps", Dtype::U64, &[]),
    ("token_counts", Dtype::U32, &[17]),
    ("histogram", Dtype::U16, &[3]),
    ("offsets.int32", Dtype::I32, &[5]),
    ("offsets.int16", Dtype::I16, &[1]),
    ("quantized", Dtype::I8, &[101]),
    ("one_byte", Dtype::U8, &[]),
];

impl Sample {
    /// Writes the sample to a temporary folder, as one file.
    pub fn make() -> Result<Self, Failure> {
        let folder = folder()?;
        let path = folder.path().join("sample.safetensors");
        write(&path, TENSORS, &mut 1)?;
        Ok(Self { path, _folder: folder })
    }

    /// As [`make`](Sample::make), as several files and their index.
    pub fn sharded() -> Result<Self, Failure> {
        let folder = folder()?;
        let (mut seed, mut map) = (1, Map::new());
        for (number, tensors) in TENSORS.chunks(8).enumerate() {
            let file = format!("sample-{number}.safetensors");
            write(&folder.path().join(&file), tensors, &mut seed)?;
            map.extend(tensors.iter().map(|(name, ..)| ((*name).to_owned(), Value::from(file.clone()))));
        }
        let path = folder.path().join("sample.safetensors.index.json");
        let index = json!({ "metadata": {}, "weight_map": map });
        std::fs::write(&path, index.to_string()).map_err(failed)?;
        Ok(Self { path, _folder: folder })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn folder() -> Result<TempDir, Failure> {
    let made = tempfile::Builder::new().prefix("transfer-tensor-sample-").tempdir();
    made.map_err(|error| Failure::other(format!("a temporary folder for the sample: {error}")))
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::other(format!("the sample: {error}"))
}

fn write(path: &Path, tensors: &[(&str, Dtype, &[usize])], seed: &mut u64) -> Result<(), Failure> {
    let contents: Vec<Vec<u8>> =
        tensors.iter().map(|(_, dtype, shape)| content(seed, *dtype, shape.iter().product())).collect();
    let mut views = Vec::new();
    for ((name, dtype, shape), bytes) in tensors.iter().zip(&contents) {
        views.push((*name, TensorView::new(*dtype, shape.to_vec(), bytes).map_err(failed)?));
    }
    std::fs::write(path, serialize(views, None).map_err(failed)?).map_err(failed)
}

/// Bytes without a pattern, so that a byte in the wrong place shows.
fn content(seed: &mut u64, dtype: Dtype, elements: usize) -> Vec<u8> {
    let bytes = (elements * dtype.bitsize()).div_ceil(8);
    let mut next = || {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seed.to_be_bytes()[0]
    };
    (0..bytes).map(|_| if dtype == Dtype::BOOL { next() & 1 } else { next() }).collect()
}
