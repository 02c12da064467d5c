//! The example `handoff`: its contract as users see it, files that lie, and that its comparison can fail.
#![cfg(target_os = "linux")]

mod contract;
mod hostile;
mod parts;

// The example's own parts, for what can not be seen from outside.
#[path = "../../examples/common/mod.rs"]
mod common;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/handoff/handover.rs"]
mod handover;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/handoff/kernel.rs"]
mod kernel;
#[allow(dead_code, reason = "the example uses the rest")]
#[path = "../../examples/handoff/meter.rs"]
mod meter;

#[path = "../built/mod.rs"]
mod built;

use std::process::{Command, Output};

use safetensors::tensor::{Dtype, TensorView, serialize};
use tempfile::TempDir;

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(built::example("handoff"));
    command.args(arguments).env_remove("TRANSFER_TENSOR_STRATEGY");
    command
}

fn run(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

/// Checks that it failed with this code, said why in one line on stderr, and printed nothing else; the line.
fn refused(output: &Output, code: i32) -> String {
    let line = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{line}");
    assert!(line.starts_with("error: ") && line.ends_with('\n') && line.lines().count() == 1, "{line:?}");
    assert!(line.len() < 1000 && !line.chars().any(|c| c.is_control() && c != '\n'), "{line:?}");
    assert_eq!(output.stdout, b"", "{line}");
    line
}

/// A folder with a small model in `model.safetensors`; its bytes in all.
fn small_model() -> (TempDir, String, u64) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensors: [(&str, Dtype, &[usize]); 7] = [
        ("weight", Dtype::F32, &[129, 33]),
        ("packed", Dtype::F4, &[3, 2]),
        ("six", Dtype::F6_E3M2, &[4]),
        ("empty", Dtype::BF16, &[7, 0]),
        ("scalar", Dtype::I64, &[]),
        ("mask", Dtype::BOOL, &[31]),
        ("byte", Dtype::U8, &[1]),
    ];
    let content = |bytes: usize| (0..bytes).map(|i| (i * 7 % 251 % 2) as u8).collect::<Vec<_>>();
    let bytes = |dtype: Dtype, shape: &[usize]| shape.iter().product::<usize>() * dtype.bitsize() / 8;
    let contents: Vec<_> = tensors.iter().map(|(_, dtype, shape)| content(bytes(*dtype, shape))).collect();
    let views = tensors
        .iter()
        .zip(&contents)
        .map(|((name, dtype, shape), content)| (*name, TensorView::new(*dtype, shape.to_vec(), content).unwrap()));
    std::fs::write(&path, serialize(views, None).unwrap()).unwrap();
    let total = contents.iter().map(|content| content.len() as u64).sum();
    (folder, path.to_str().unwrap().to_owned(), total)
}
