//! What the example writes, and how it refuses bad arguments.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_embeddings"))
        .args(arguments)
        .env_remove("TRANSFER_TENSOR_STRATEGY")
        .output()
        .unwrap()
}

fn json(folder: &Path, arguments: &[&str]) -> Value {
    let fixed = ["--json", "--simulate", "x86_h200_sxm_gen5", "--out", folder.to_str().unwrap()];
    let output = run(&[&fixed, arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// As the examples say: what a device begins with.
fn pattern(index: u64) -> f32 {
    (index.wrapping_mul(2_654_435_761) >> 7 & 0xF_FFFF) as f32
}

#[test]
fn embeddings_are_in_an_arrow_file_with_their_ids() {
    use arrow_array::cast::AsArray as _;
    use arrow_array::types::{Float32Type, UInt64Type};

    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--rows", "37", "--dim", "19", "--steps", "11", "--passes", "2", "--capacity", "3"];
    let json = json(folder.path(), &arguments);
    let path = folder.path().join("embeddings.arrow");
    assert_eq!(json["file"], path.to_str().unwrap());
    assert_eq!((&json["rows"], &json["rows_checked"]), (&(37 * 11).into(), &(37 * 11).into()));
    assert_eq!(json["file_bytes"], fs::metadata(&path).unwrap().len());
    let bytes = fs::read(&path).unwrap();
    assert!(bytes.starts_with(b"ARROW1") && bytes.ends_with(b"ARROW1"));

    let reader = arrow_ipc::reader::FileReader::try_new(std::io::Cursor::new(bytes), None).unwrap();
    assert_eq!(reader.num_batches(), 11);
    let mut all = 0;
    for (step, batch) in (0..).zip(reader) {
        let batch = batch.unwrap();
        let ids = batch.column_by_name("id").unwrap().as_primitive::<UInt64Type>();
        let embeddings = batch.column_by_name("embedding").unwrap().as_fixed_size_list();
        assert_eq!((embeddings.value_length(), batch.num_rows()), (19, 37));
        for (row, id) in (0..).zip(ids.values()) {
            assert_eq!(*id, step * 37 + row);
            let embedding = embeddings.value(row as usize);
            for (column, value) in (0..).zip(embedding.as_primitive::<Float32Type>().values()) {
                assert_eq!(*value, pattern(row * 19 + column) + ((step + 1) * 2) as f32, "id {id}, number {column}");
            }
            all += 1;
        }
    }
    assert_eq!(all, 37 * 11);
}

#[test]
fn bad_arguments_end_with_2_and_one_line() {
    for arguments in [&["--rows", "0"][..], &["--rows", "1048576", "--dim", "65536"], &["--simulate", "zx81"]] {
        let output = run(arguments);
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), line.trim_end().lines().count()), (Some(2), 1), "{line}");
    }
}
