//! Turns the JSON of the benches into SVG charts.
//!
//! ```text
//! cargo bench --bench bandwidth -- --json bandwidth.json
//! cargo run --release --example plot -- bandwidth.json --out charts
//! ```
//!
//! Without files it draws a small sample, so that one sees what comes out.

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use plotters::prelude::*;
use serde::Deserialize;

use common::{Failure, print, size};

/// Draws bench results: one chart for each case and unit, by size; ours, the raw driver call, and the peer
#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    /// What benches wrote with --json; without any, a small sample is drawn
    #[arg(value_name = "FILE.json")]
    files: Vec<PathBuf>,
    /// Folder for the charts; it is made if there is none
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
}

/// A line of a bench. What else is in it does not matter here.
#[derive(Debug, Clone, Deserialize)]
struct Row {
    case: String,
    bytes: u64,
    ours: f64,
    raw: Option<f64>,
    peer: Option<f64>,
    unit: String,
    clock: String,
}

/// Medians of one run of pinned copies on an H200 (docs/benchmarks.md, "One transfer").
const SAMPLE: &str = r#"[
    {"case": "h2d", "bytes": 4096, "ours": 9.74, "raw": 8.76, "peer": null, "ratio": 0.899, "unit": "us", "clock": "wall"},
    {"case": "h2d", "bytes": 65536, "ours": 10.73, "raw": 9.73, "peer": null, "ratio": 0.906, "unit": "us", "clock": "wall"},
    {"case": "h2d", "bytes": 1048576, "ours": 36.47, "raw": 37.71, "peer": null, "ratio": 0.967, "unit": "GB/s", "clock": "wall"},
    {"case": "h2d", "bytes": 16777216, "ours": 53.01, "raw": 53.17, "peer": null, "ratio": 0.997, "unit": "GB/s", "clock": "wall"},
    {"case": "h2d", "bytes": 1073741824, "ours": 54.95, "raw": 54.94, "peer": null, "ratio": 1.0, "unit": "GB/s", "clock": "wall"}
]"#;

fn main() -> ExitCode {
    common::run(|arguments: Arguments| {
        std::fs::create_dir_all(&arguments.out)
            .map_err(|error| Failure::other(format!("{}: {error}", arguments.out.display())))?;
        if arguments.files.is_empty() {
            print("no FILE.json was given: this is a sample. Benches write such files with --json; --help says more");
            return draw_all("sample", rows(SAMPLE, Path::new("the sample"))?, &arguments.out);
        }
        for file in &arguments.files {
            let text = std::fs::read_to_string(file)
                .map_err(|error| Failure::usage(format!("{}: {error}", file.display())))?;
            let stem = file.file_stem().map_or_else(|| "bench".into(), |stem| stem.to_string_lossy().into_owned());
            draw_all(&stem, rows(&text, file)?, &arguments.out)?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn rows(text: &str, file: &Path) -> Result<Vec<Row>, Failure> {
    let rows: Vec<Row> =
        serde_json::from_str(text).map_err(|error| Failure::usage(format!("{}: {error}", file.display())))?;
    if rows.is_empty() {
        return Err(Failure::usage(format!("{}: it has no rows", file.display())));
    }
    Ok(rows)
}

/// One chart for each case, unit and clock of a file.
fn draw_all(stem: &str, rows: Vec<Row>, out: &Path) -> Result<ExitCode, Failure> {
    let mut charts: BTreeMap<(String, String, String), Vec<Row>> = BTreeMap::new();
    for row in rows {
        charts.entry((row.case.clone(), row.unit.clone(), row.clock.clone())).or_default().push(row);
    }
    let mut names = BTreeMap::new();
    for ((case, unit, clock), mut rows) in charts {
        rows.sort_by_key(|row| row.bytes);
        let name = format!("{}-{}-{}", plain(stem), plain(&case), plain(&unit));
        // Cases that differ in what no file name has, or in the clock alone.
        let number: &mut usize = names.entry(name.clone()).or_default();
        *number += 1;
        let name = if *number == 1 { name } else { format!("{name}-{number}") };
        let path = out.join(name + ".svg");
        let (case, unit, clock) = (drawable(&case), drawable(&unit), drawable(&clock));
        let what = format!("{case}, {clock} clock");
        draw(&path, &what, if unit == "us" { "µs" } else { &unit }, &rows)
            .map_err(|error| Failure::other(format!("{}: {error}", path.display())))?;
        print(path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// A part of a file name.
fn plain(text: &str) -> String {
    let word = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let name: String = text.chars().map(word).take(80).collect();
    let name = name.split('-').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-");
    if name.is_empty() { "x".into() } else { name }
}

/// Text that a chart can show: control characters are no XML.
fn drawable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(80).collect()
}

/// A line's name, and what it shows of a row.
type Line = (&'static str, fn(&Row) -> Option<f64>, RGBColor);

const LINES: [Line; 3] = [
    ("ours", |row| Some(row.ours), RGBColor(0x1b, 0x6c, 0xa8)),
    ("raw", |row| row.raw, RGBColor(0x55, 0x55, 0x55)),
    ("peer", |row| row.peer, RGBColor(0xc8, 0x55, 0x1b)),
];

fn draw(path: &Path, title: &str, unit: &str, rows: &[Row]) -> Result<(), Box<dyn std::error::Error>> {
    let good = |value: &f64| value.is_finite() && *value >= 0.0;
    let values = rows.iter().flat_map(|row| LINES.map(|(_, value, _)| value(row))).flatten().filter(good);
    let most = values.fold(0.0, f64::max).max(f64::MIN_POSITIVE) * 1.1;
    let bytes = |row: &Row| row.bytes.max(1) as f64;
    let least_bytes = rows.iter().map(bytes).fold(f64::INFINITY, f64::min);
    let most_bytes = rows.iter().map(bytes).fold(1.0, f64::max);
    // One size alone still needs a width.
    let (from, to) = (least_bytes / 1.5, most_bytes * 1.5);

    let area = SVGBackend::new(path, (800, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d((from..to).log_scale().base(2.0), 0.0..most)?;
    chart
        .configure_mesh()
        .x_labels(12)
        .x_label_formatter(&|bytes| size(bytes.round() as u64))
        .x_desc("bytes")
        .y_desc(unit)
        .max_light_lines(0)
        .draw()?;
    for (name, value, colour) in LINES {
        let points: Vec<_> = rows.iter().filter_map(|row| Some((bytes(row), value(row).filter(good)?))).collect();
        if points.is_empty() {
            continue;
        }
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE)
        .border_style(RGBColor(0xaa, 0xaa, 0xaa))
        .label_font(("sans-serif", 14))
        .draw()?;
    area.present()?;
    Ok(())
}
