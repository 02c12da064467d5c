//! Batches come to the device through an `IngressPrefetcher`, a kernel changes them, and an `EgressPool` has the
//! results compared and written to a file: loading, copying, computing and writing at the same time. It says how busy
//! each stage was.
//!
//! ```text
//! cargo run --release --example pipeline
//! cargo run --release --example pipeline -- --rows 4096 --steps 200 --passes 30 --loaders 4 --workers 4
//! ```
//!
//! A timeline with the crate's own ranges:
//!
//! ```text
//! cargo build --release --features nvtx --example pipeline
//! nsys profile --trace cuda,nvtx target/release/examples/pipeline
//! ```

mod common;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use transfer_tensor::{
    EgressPool, EgressStats, HostTensor, IngressPrefetcher, Order, Output, Refused, Tagged, Ticket, TransferTensor,
};

use common::rows_file::{Format, RowsFile, check};
use common::steps::{self, Gpu, PATIENCE, StepArgs, folder, pattern, stats_json};
use common::{Failure, print, size, time};

/// Loads batches, works on them on the device and writes the results, all at the same time, and says how busy each
/// stage was
///
/// Without a GPU it runs on a simulated H200. Built with `--features nvtx` and run under `nsys profile --trace
/// cuda,nvtx`, it gives a timeline.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    #[command(flatten)]
    common: StepArgs,
    /// Rows of a batch; the last one has half of them
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    rows: u32,
    /// Numbers of a row
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    dim: u32,
    /// How many batches are loaded ahead
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    depth: u16,
    /// Threads that load batches
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    loaders: u16,
    /// Threads that compare and write results
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,
}

impl Arguments {
    fn row(&self) -> u64 {
        self.dim.into()
    }

    fn total_rows(&self) -> u64 {
        u64::from(self.rows) * self.common.steps - u64::from(self.rows / 2)
    }

    fn total_bytes(&self) -> u64 {
        self.total_rows() * self.row() * 4
    }

    /// Rows of a batch; none behind the last.
    fn rows_of(&self, batch: u64) -> usize {
        let before = batch.saturating_mul(self.rows.into());
        self.total_rows().saturating_sub(before).min(self.rows.into()) as usize
    }
}

fn main() -> ExitCode {
    common::run(|arguments: Arguments| {
        let bytes = u64::from(arguments.rows) * arguments.row() * 4;
        if bytes > 4 << 30 {
            return Err(Failure::usage(format!("{bytes} bytes a batch: they must not exceed 4 GiB")));
        }
        let arguments = Arc::new(arguments);
        steps::run(&arguments.common, |gpu| run(&arguments, gpu))
    })
}

/// What the stages did.
struct Outcome {
    seconds: f64,
    /// The kernels of all steps, without anything beside them.
    alone: f64,
    /// All loader threads together.
    loading: f64,
    /// How long this thread waited for the next batch, ...
    starved: f64,
    /// ... and in `submit`, where it waits for room.
    held_up: f64,
    egress: EgressStats,
}

/// Which rows a batch has.
#[derive(Debug, Clone, Copy)]
struct Rows {
    first: u64,
    count: usize,
}

/// A batch that was worked on, and the same on the host.
type Worked = Tagged<TransferTensor<f32>, Rows>;
type Landed = Tagged<HostTensor<f32>, Rows>;

fn run(arguments: &Arc<Arguments>, gpu: &Gpu<'_>) -> Result<(), Failure> {
    let StepArgs { steps, passes, ref out, json, .. } = arguments.common;
    let path = folder(out.as_deref())?.join("results.npy");
    let failed = |error: io::Error| Failure::other(format!("{}: {error}", path.display()));
    let file = Arc::new(RowsFile::create(&path, Format::Npy, arguments.row()).map_err(failed)?);

    let shape = [arguments.rows as usize, arguments.dim as usize];
    let mut ring = vec![gpu.device.tensor().zeros::<f32>(shape)?];
    let alone = gpu.alone(steps, &mut ring, |batch| gpu.add_ones(batch, passes))?;
    drop(ring);
    let progress = common::progress(arguments.total_bytes(), !json);
    // One line of a narrow terminal.
    if let Ok(style) = ProgressStyle::with_template("{bar:16} {percent:>3} % {msg}") {
        progress.set_style(style);
    }
    let mut outcome = stream(arguments, gpu, &file, &progress, &failed)?;
    progress.finish_and_clear();
    outcome.alone = alone;
    file.finish(arguments.total_rows()).map_err(failed)?;
    drop(file);
    let (rows, row) = (arguments.total_rows(), arguments.row());
    let checked = check(&path, Format::Npy, rows, row, |at, column| pattern(at * row + column) + passes as f32)?;

    let stages = stages(arguments, &outcome);
    let (bytes, seconds) = (arguments.total_bytes(), outcome.seconds);
    let rate = bytes as f64 / seconds / 1e9;
    if json {
        let stages: Vec<Value> = stages.iter().map(Stage::json).collect();
        let report = json!({
            "file": path.display().to_string(), "steps": steps, "passes": passes, "rows": rows, "dim": row,
            "bytes": bytes, "elements_checked": checked, "seconds": seconds, "gb_per_s": rate,
            "stages": stages, "overlap": overlap(&outcome), "starved_seconds": outcome.starved,
            "held_up_seconds": outcome.held_up, "nvtx": cfg!(feature = "nvtx"), "egress": stats_json(&outcome.egress),
        });
        print(format_args!("{:#}", gpu.json(report)));
        return Ok(());
    }
    print(format_args!(
        "{}: {rows} rows of {row} numbers in {steps} batches, {passes} kernels each, to {}\n\
         {bytes} bytes ({}) in {}: {rate:.2} GB/s each way\n{}\n\
         overlap {:.2}: load, kernels and writing together, as part of the time; above 1 they ran beside each other\n\
         the thread that launches kernels waited {} for batches, {} to hand results over\n\
         read again: {checked} numbers, all as they must be\n({})\n{}",
        gpu.title(),
        path.display(),
        size(bytes),
        time(seconds),
        table(&stages),
        overlap(&outcome),
        time(outcome.starved),
        time(outcome.held_up),
        gpu.clock(),
        match cfg!(feature = "nvtx") {
            true => "NVTX ranges are on: `nsys profile --trace cuda,nvtx` before this command records a timeline",
            false => "for a timeline: --features nvtx, under `nsys profile --trace cuda,nvtx`",
        },
    ));
    Ok(())
}

/// All batches, from the source to the file.
fn stream(
    arguments: &Arc<Arguments>,
    gpu: &Gpu<'_>,
    file: &Arc<RowsFile>,
    progress: &ProgressBar,
    failed: &dyn Fn(io::Error) -> Failure,
) -> Result<Outcome, Failure> {
    let StepArgs { passes, capacity, .. } = arguments.common;
    let (row, to) = (arguments.row(), file.clone());
    let pool: EgressPool<Worked, io::Result<u64>> = EgressPool::builder(&gpu.device)
        .workers(arguments.workers.into())
        .capacity(capacity.into())
        .order(Order::Submission)
        .consumer(move |landed: Output<Landed>| {
            let Rows { first, count } = landed.tag;
            // Of the last batch, only the rows that were filled.
            let values = &landed.value[..count * row as usize];
            let right = (first * row..).zip(values).all(|(i, value)| *value == pattern(i) + passes as f32);
            if !right {
                return Err(io::Error::other(format!("a result from row {first} on is wrong")));
            }
            to.put(first, values)?;
            Ok(size_of_val(values) as u64)
        })?;

    let (loading, loaded) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let start = Instant::now();
    let fill = {
        let (arguments, loading, loaded) = (arguments.clone(), loading.clone(), loaded.clone());
        move |number, values: &mut [f32]| {
            // A real one reads files and decodes them.
            let (start, rows) = (Instant::now(), arguments.rows_of(number));
            let first = number * u64::from(arguments.rows) * row;
            for (i, value) in (first..).zip(&mut values[..rows * row as usize]) {
                *value = pattern(i);
            }
            loading.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            loaded.fetch_add(u64::from(rows > 0), Ordering::Relaxed);
            Ok::<_, Infallible>(rows)
        }
    };
    let mut batches = IngressPrefetcher::builder(&gpu.device, [arguments.rows as usize, arguments.dim as usize])
        .depth(arguments.depth.into())
        .threads(arguments.loaders.into())
        .fill(fill)?;
    let mut tickets: VecDeque<Ticket<io::Result<u64>>> = VecDeque::new();
    let done = |ticket: Ticket<io::Result<u64>>| -> Result<(), Failure> {
        progress.inc(ticket.wait()?.map_err(failed)?);
        let now = pool.stats();
        let loaded = loaded.load(Ordering::Relaxed).saturating_sub(now.submitted);
        let [on_device, waiting, consuming] = [now.in_flight, now.waiting, now.consuming];
        progress
            .set_message(format!("loaded {loaded}, on the device {on_device}, waiting {waiting}, writing {consuming}"));
        Ok(())
    };
    let (mut starved, mut held_up) = (0.0, 0.0);
    loop {
        let before = Instant::now();
        let Some(batch) = batches.next() else { break };
        starved += before.elapsed().as_secs_f64();
        let batch = batch.map_err(Failure::other)?;
        let rows = Rows { first: batch.number() * u64::from(arguments.rows), count: batch.rows() };
        // Changed in place, and given away: the prefetcher makes another, of memory that a result has given back.
        let mut batch = batch.into_tensor();
        gpu.add_ones(&mut batch, passes)?;
        let before = Instant::now();
        tickets.push_back(pool.submit(Tagged::new(batch, rows)).map_err(|Refused { error, .. }| error)?);
        held_up += before.elapsed().as_secs_f64();
        if tickets.len() > usize::from(capacity)
            && let Some(oldest) = tickets.pop_front()
        {
            done(oldest)?;
        }
    }
    tickets.into_iter().try_for_each(done)?;
    pool.drain(PATIENCE)?;
    let loading = loading.load(Ordering::Relaxed) as f64 * 1e-9;
    Ok(Outcome { seconds: start.elapsed().as_secs_f64(), alone: 0.0, loading, starved, held_up, egress: pool.stats() })
}

/// One stage: what all its threads took, and what part of the time they were at it.
struct Stage {
    name: &'static str,
    threads: Option<u16>,
    seconds: f64,
    busy: Option<f64>,
}

impl Stage {
    fn json(&self) -> Value {
        json!({ "stage": self.name, "threads": self.threads, "seconds": self.seconds, "busy": self.busy })
    }
}

fn stages(arguments: &Arguments, outcome: &Outcome) -> [Stage; 5] {
    let stats = &outcome.egress;
    let worked = |name, threads: u16, seconds: f64| Stage {
        name,
        threads: Some(threads),
        seconds,
        busy: Some(seconds / (outcome.seconds * f64::from(threads))),
    };
    // Results overlap each other there, so that their times say nothing of how busy the copy engine was.
    let latency = |name, seconds| Stage { name, threads: None, seconds, busy: None };
    let kernels =
        Stage { name: "kernels", threads: None, seconds: outcome.alone, busy: Some(outcome.alone / outcome.seconds) };
    let results = (stats.delivered.max(1)) as f64;
    [
        worked("load", arguments.loaders, outcome.loading),
        kernels,
        latency("to the host, each result", stats.copying_time.as_secs_f64() / results),
        latency("waiting for a worker, each", stats.waiting_time.as_secs_f64() / results),
        worked("compare and write", arguments.workers, stats.consuming_time.as_secs_f64()),
    ]
}

/// Load, kernels and writing together, as part of the time; the copies between them are not known by themselves.
/// Above 1, some ran beside others.
fn overlap(outcome: &Outcome) -> f64 {
    (outcome.loading + outcome.alone + outcome.egress.consuming_time.as_secs_f64()) / outcome.seconds
}

fn table(stages: &[Stage]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["stage", "threads", "time", "busy"]);
    for column in 1..4 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for Stage { name, threads, seconds, busy } in stages {
        table.add_row([
            (*name).to_owned(),
            threads.map_or_else(String::new, |threads| threads.to_string()),
            time(*seconds),
            busy.map_or_else(String::new, |busy| format!("{:.0} %", busy * 100.0)),
        ]);
    }
    table
}
