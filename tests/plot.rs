//! The example `plot` as its users see it: charts of what benches write, one-line errors.

mod built;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn plot(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(built::example("plot")).args(arguments).current_dir(folder).output().unwrap()
}

#[track_caller]
fn drawn(folder: &Path, arguments: &[&str]) -> String {
    let output = plot(folder, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn refused(folder: &Path, arguments: &[&str], code: i32, says: &str) {
    let output = plot(folder, arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(error.lines().count() == 1 && error.starts_with("error: ") && error.contains(says), "{error}");
}

fn row(case: &str, bytes: u64, ours: &str, peer: &str, unit: &str) -> String {
    format!(
        r#"{{"case": "{case}", "bytes": {bytes}, "ours": {ours}, "raw": 50.0, "peer": {peer}, "ratio": 1, "unit": "{unit}", "clock": "wall"}}"#
    )
}

fn write(folder: &Path, name: &str, rows: &[String]) {
    fs::write(folder.join(name), format!("[{}]", rows.join(","))).unwrap();
}

/// How many lines a chart shows, and its text.
fn chart(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
    assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    text
}

#[test]
fn each_case_and_unit_is_a_chart_with_its_lines() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [
        row("h2d", 1 << 30, "55.0", "21.0", "GB/s"),
        row("h2d", 1 << 20, "37.0", "11.0", "GB/s"),
        row("h2d", 4096, "9.7", "null", "us"),
        row("d2h x1 <pageable> & more", 1 << 20, "36.0", "null", "GB/s"),
    ];
    write(folder.path(), "transfer.json", &rows);
    let out = drawn(folder.path(), &["transfer.json", "--out", "charts/of today"]);
    let charts = folder.path().join("charts/of today");
    assert_eq!(fs::read_dir(&charts).unwrap().count(), 3, "{out}");
    let both = chart(&charts.join("transfer-h2d-GB-s.svg"));
    for word in ["ours", "raw", "peer", "GB/s", "h2d, wall clock", "1.0 MiB"] {
        assert!(both.contains(word), "{word}: {both}");
    }
    let alone = chart(&charts.join("transfer-h2d-us.svg"));
    assert!(alone.contains("µs") && !alone.contains("peer"), "{alone}");
    let escaped = chart(&charts.join("transfer-d2h-x1-pageable-more-GB-s.svg"));
    assert!(escaped.contains("&lt;pageable&gt;") && !escaped.contains("<pageable>"), "{escaped}");
}

#[test]
fn without_files_it_says_what_it_is_for_and_draws_a_sample() {
    let folder = tempfile::tempdir().unwrap();
    let out = drawn(folder.path(), &[]);
    assert!(out.contains("--json") && out.contains("sample-h2d-GB-s.svg"), "{out}");
    chart(&folder.path().join("sample-h2d-GB-s.svg"));
    chart(&folder.path().join("sample-h2d-us.svg"));
    assert!(drawn(folder.path(), &["--help"]).contains("--out <DIR>"));
}

#[test]
fn odd_numbers_make_a_chart_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let rows = [
        row("zero", 0, "0.0", "0.0", "GB/s"),
        row("large", u64::MAX, "1e300", "-1.0", "GB/s"),
        // The same file name.
        row("h2d x1", 1, "1.0", "null", "GB/s"),
        row("h2d/x1", 1, "1.0", "null", "GB/s"),
        row("../..", 1, "1.0", "null", "/etc"),
    ];
    write(folder.path(), "odd.json", &rows);
    drawn(folder.path(), &["odd.json"]);
    for name in ["odd-zero-GB-s", "odd-large-GB-s", "odd-h2d-x1-GB-s", "odd-h2d-x1-GB-s-2", "odd-x-etc"] {
        chart(&folder.path().join(format!("{name}.svg")));
    }
}

#[test]
fn what_is_no_bench_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("text.json"), "no\njson").unwrap();
    fs::write(folder.path().join("empty.json"), "[]").unwrap();
    fs::write(folder.path().join("other.json"), "[{\"case\": 1}]").unwrap();
    refused(folder.path(), &["text.json"], 2, "text.json");
    refused(folder.path(), &["empty.json"], 2, "no rows");
    refused(folder.path(), &["other.json"], 2, "other.json");
    refused(folder.path(), &["missing.json"], 2, "missing.json");
    refused(folder.path(), &["--colour"], 2, "--colour");
    refused(folder.path(), &["--out", "text.json/charts"], 1, "text.json/charts");
}
