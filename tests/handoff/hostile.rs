//! Files that are cut, lie about themselves, or want to be trouble on a terminal.

use std::fs;
use std::path::Path;

use super::{refused, run, small_model};

/// A file with this header and as many bytes of data.
fn write(path: &Path, header: &str, data: usize) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 1);
    fs::write(path, bytes).unwrap();
}

fn hand_over(path: &Path) -> std::process::Output {
    run(&[path.to_str().unwrap(), "--simulate", "dgx_spark_gb10", "--json"])
}

#[test]
fn every_truncation_of_a_good_file_is_refused() {
    let (folder, file, _) = small_model();
    let good = fs::read(file).unwrap();
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let path = folder.path().join("cut.safetensors");
    let lengths = (0..12).chain((12..header).step_by(23)).chain(header - 1..header + 3).chain([good.len() - 1]);
    for length in lengths {
        fs::write(&path, &good[..length]).unwrap();
        let line = refused(&hand_over(&path), 1);
        assert!(line.contains("cut.safetensors: not a valid safetensors file"), "{length}: {line}");
    }
    // Nor may anything follow.
    fs::write(&path, [&good[..], b"!"].concat()).unwrap();
    assert!(refused(&hand_over(&path), 1).contains("1 more follow"));
}

#[test]
fn headers_that_lie_are_refused() {
    // Tensors that each may be, but whose lengths add up to 2^64 with what precedes them: 8 and the header's length.
    let wrapping = |header_bytes: u64| {
        let all = u64::MAX - 8 - header_bytes + 1;
        let each = all / 8;
        let entry = |i: u64| {
            let (start, end) = (i * each, if i == 7 { all } else { (i + 1) * each });
            format!(r#""{i}":{{"dtype":"U8","shape":[{}],"data_offsets":[{start},{end}]}}"#, end - start)
        };
        let header = format!("{{{}", (0..8).map(entry).collect::<Vec<_>>().join(","));
        format!("{header:<0$}}}", header_bytes as usize - 1)
    };
    let deep = "[".repeat(100_000);
    let cases: &[(&str, usize, &str)] = &[
        ("", 0, "EOF"),
        ("[]", 0, "expected"),
        ("{", 0, "EOF"),
        ("null", 0, "expected"),
        (&deep, 0, "safetensors"),
        (r#"{"a":1}"#, 0, "expected"),
        (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 3, "truncated"),
        (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,5]}}"#, 5, "invalid shape"),
        (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}}"#, 5, "offset"),
        (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#, 4, "offset"),
        (r#"{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}"#, 4, "invalid value"),
        (r#"{"a":{"dtype":"U8","shape":[4.5],"data_offsets":[0,4]}}"#, 4, "invalid type"),
        (r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#, 2, "byte boundary"),
        (r#"{"a":{"dtype":"U7","shape":[4],"data_offsets":[0,4]}}"#, 4, "unknown variant `U7`"),
        (r#"{"a":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#, 0, "overflow"),
        (r#"{"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}}"#, 0, "overflow"),
        // The same bytes twice, and a gap.
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
            4,
            "offset",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}}"#,
            5,
            "offset",
        ),
        (&wrapping(1024), 0, "truncated"),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.safetensors");
    for (header, data, says) in cases {
        write(&path, header, *data);
        let line = refused(&hand_over(&path), 1);
        assert!(line.contains(says), "{says}: {line}");
    }
    for length in [5, 100_000_001, u64::MAX] {
        fs::write(&path, length.to_le_bytes()).unwrap();
        refused(&hand_over(&path), 1);
    }
    fs::write(&path, [&3u64.to_le_bytes()[..], b"{\xff}"].concat()).unwrap();
    refused(&hand_over(&path), 1);
}

#[test]
fn names_can_not_speak_to_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("names.safetensors");
    let name = r"a\u001b[31mb\nc\u202ed";
    write(&path, &format!(r#"{{"{name}":{{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}}}"#), 4);
    let output = run(&[path.to_str().unwrap(), "--simulate", "dgx_spark_gb10"]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains(r"a\u{1b}[31mb\nc\u{202e}d") && !text.contains('\u{1b}') && !text.contains('\u{202e}'),
        "{text}"
    );
    // In an error too, and no more of it than a line takes.
    let long = name.repeat(10_000);
    write(&path, &format!(r#"{{"{long}":{{"dtype":"U8","shape":[4],"data_offsets":[1,5]}}}}"#), 5);
    refused(&hand_over(&path), 1);
}

#[test]
fn a_model_without_tensors_is_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nothing.safetensors");
    write(&path, r#"{"__metadata__":{"format":"pt"}}"#, 0);
    let output = hand_over(&path);
    assert!(output.status.success());
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["totals"]["tensors"], 0);
    assert_eq!(answer["totals"]["host_bytes_peak"], 0);
}
