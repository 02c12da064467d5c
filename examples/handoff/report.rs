//! What is printed.

use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Value, json};
use transfer_tensor::Checkpoint;

use crate::common::{printable, size, time};
use crate::handover::{Outcome, Row};

/// One machine's outcome as JSON.
pub(crate) fn json(file: &Checkpoint, outcome: &Outcome) -> Value {
    let Outcome { driver, profile, platform, bytes, .. } = outcome;
    json!({
        "file": file.path().display().to_string(),
        "driver": driver,
        "profile": profile,
        "device": platform.name(),
        "model": platform.model().as_str(),
        "tensors": outcome.rows.iter().map(row).collect::<Vec<_>>(),
        "totals": {
            "tensors": outcome.rows.len(),
            "bytes": bytes,
            "bytes_copied": outcome.copied,
            "device_bytes_peak": outcome.device_peak,
            "host_bytes_peak": outcome.host_peak,
            "host_bytes_pageable": outcome.pageable_peak,
            "mismatches": outcome.mismatches(),
            "seconds": outcome.time.as_secs_f64(),
            "gb_per_s": rate(*bytes, outcome.time),
            "kernels": outcome.kernels,
        },
        "resident": outcome.resident,
        "source": source(outcome),
        "clock": clock(outcome),
        "notes": outcome.notes,
        "violations": outcome.violations,
    })
}

fn row(row: &Row) -> Value {
    json!({
        "name": row.entry.name(),
        "dtype": row.entry.file_dtype().to_owned(),
        "shape": row.entry.shape(),
        "bytes": row.entry.bytes(),
        "strategy": row.strategy.as_str(),
        "backing": row.backing.as_str(),
        "bytes_copied": row.copied,
        "seconds": row.time.as_secs_f64(),
        "gb_per_s": rate(row.entry.bytes(), row.time),
        "first_mismatch": row.mismatch,
    })
}

/// One machine's outcome for people.
pub(crate) fn text(outcome: &Outcome) -> String {
    let Outcome { driver, platform, bytes, .. } = outcome;
    let profile = outcome.profile.as_ref().map(|key| format!(" ({key})")).unwrap_or_default();
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["name", "dtype", "shape", "bytes", "strategy", "backing", "copied", "GB/s", ""]);
    for number in [3, 6, 7] {
        if let Some(column) = table.column_mut(number) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for row in &outcome.rows {
        table.add_row([
            printable(row.entry.name()),
            row.entry.file_dtype().to_owned(),
            format!("{:?}", row.entry.shape()),
            row.entry.bytes().to_string(),
            row.strategy.to_string(),
            row.backing.to_string(),
            row.copied.to_string(),
            rate(row.entry.bytes(), row.time).map_or_else(|| "-".into(), |rate| format!("{rate:.2}")),
            row.mismatch.map_or_else(|| "equal".into(), |byte| format!("DIFFERS from byte {byte}")),
        ]);
    }
    let mut text = format!("{}{profile}, {}, driver: {driver}\n{table}\n", platform.name(), platform.model());
    let copied = outcome.copied;
    let mut line = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    let rate = rate(*bytes, outcome.time).map_or_else(String::new, |rate| format!(", {rate:.2} GB/s"));
    line(format!(
        "{} tensors, {bytes} bytes ({}), {} mismatches",
        outcome.rows.len(),
        size(*bytes),
        outcome.mismatches()
    ));
    line(format!("copied {copied} bytes ({}) in all, both ways", size(copied)));
    line(format!(
        "at peak {} bytes of device memory, {} of host memory{}",
        outcome.device_peak,
        outcome.host_peak,
        if outcome.pageable_peak > 0 { format!(", {} of them pageable", outcome.pageable_peak) } else { String::new() }
    ));
    line(format!("to the device, kernel and back: {}{rate} ({})", time(outcome.time.as_secs_f64()), clock(outcome)));
    line(format!("byte counts: {}", source(outcome)));
    if !outcome.resident {
        line("not all tensors were kept until the end: together they take too much of the free memory".into());
    }
    for note in &outcome.notes {
        line(format!("note: {note}"));
    }
    for violation in &outcome.violations {
        line(format!("VIOLATION: {violation}"));
    }
    text
}

/// GB/s, where there were bytes and time passed.
fn rate(bytes: u64, time: Duration) -> Option<f64> {
    (bytes > 0 && !time.is_zero()).then(|| bytes as f64 / time.as_secs_f64() / 1e9)
}

fn source(outcome: &Outcome) -> &'static str {
    if outcome.driver == "simulated" {
        "the simulated driver's evidence; pageable memory, which it does not see, as this program holds it"
    } else {
        "counted by this program"
    }
}

fn clock(outcome: &Outcome) -> &'static str {
    if outcome.driver == "simulated" { "simulated: the modelled machine's time" } else { "measured" }
}
