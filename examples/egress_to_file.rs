//! The device makes outputs, step after step, and the workers of an `EgressPool` add them to a file meanwhile. Then the
//! file is read and every element compared.
//!
//! ```text
//! cargo run --release --example egress_to_file
//! cargo run --release --example egress_to_file -- --bytes 16MiB --steps 200 --passes 30 --format safetensors
//! cargo run --release --example egress_to_file -- --bytes 16MiB --steps 200 --passes 30 --out /dev/null
//! ```

mod common;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use serde_json::json;
use transfer_tensor::{EgressPool, EgressStats, HostTensor, Order, Output, Refused, Tagged, Ticket, TransferTensor};

use common::made::{self, Made};
use common::rows_file::{Format, RowsFile, check};
use common::steps::{self, Gpu, PATIENCE, StepArgs, folder, stats_json};
use common::{Failure, bytes, print, size, time};

/// Adds what the device makes, step after step, to a file while the device works on
///
/// Without a GPU it runs on a simulated H200. `--out /dev/null` keeps nothing: what is possible without a disk.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    #[command(flatten)]
    common: StepArgs,
    /// Bytes of one output, rounded up to whole numbers of 4 bytes
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = output_bytes)]
    bytes: u64,
    /// Threads that write
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    workers: u16,
    /// The file's format
    #[arg(long, value_name = "F", default_value = "npy")]
    format: Format,
}

fn output_bytes(text: &str) -> Result<u64, String> {
    match bytes(text)? {
        0 => Err("an output has at least one byte".into()),
        bytes if bytes > 4 << 30 => Err("it must not exceed 4 GiB".into()),
        bytes => Ok(bytes),
    }
}

fn main() -> ExitCode {
    common::run(|arguments: Arguments| steps::run(&arguments.common, |gpu| run(&arguments, gpu)))
}

/// Where outputs go.
enum Sink {
    Rows(RowsFile),
    Nowhere(File),
}

impl Sink {
    fn put(&self, step: u64, values: &[f32]) -> io::Result<()> {
        match self {
            Sink::Rows(file) => file.put(step, values),
            Sink::Nowhere(file) => (&*file).write_all(bytemuck::cast_slice(values)),
        }
    }

    fn finish(&self, steps: u64) -> io::Result<u64> {
        match self {
            Sink::Rows(file) => file.finish(steps),
            Sink::Nowhere(_) => Ok(0),
        }
    }
}

fn run(arguments: &Arguments, gpu: &Gpu<'_>) -> Result<(), Failure> {
    let Arguments { common: StepArgs { steps, passes, .. }, format, .. } = *arguments;
    let elements = arguments.bytes.div_ceil(4);
    let (path, sink) = sink(arguments, elements)?;
    let failed = |error: io::Error| Failure::other(format!("{}: {error}", path.display()));
    let sink = sink.map_err(failed)?;

    let shape = [usize::try_from(elements).map_err(Failure::usage)?];
    let alone = Made::new(gpu, &shape, passes)?.alone(steps)?;
    let mut made = Made::new(gpu, &shape, passes)?;
    let sink = Arc::new(sink);
    let (seconds, file_bytes, stats) = with_egress(arguments, gpu, &mut made, &sink, &path)?;
    let kept = matches!(*sink, Sink::Rows(_));
    drop(sink);
    let checked = match kept {
        true => check(&path, format, steps, elements, |step, i| made::element(i, passes, step))?,
        false => 0,
    };
    let bytes = steps * elements * 4;
    let rate = bytes as f64 / seconds / 1e9;
    if arguments.common.json {
        let format = kept.then(|| format.extension());
        let report = json!({
            "file": path.display().to_string(), "format": format, "steps": steps, "passes": passes,
            "bytes": bytes, "file_bytes": file_bytes, "elements_checked": checked, "seconds": seconds, "gb_per_s": rate,
            "device_alone_seconds": alone, "ratio": alone / seconds, "egress": stats_json(&stats),
        });
        print(format_args!("{:#}", gpu.json(report)));
        return Ok(());
    }
    print(format_args!(
        "{}: {steps} outputs of {} to {}\n{bytes} bytes ({}) in {}: {rate:.2} GB/s\n\
         the device alone: {}, {:.2} of that\n{}\n({})",
        gpu.title(),
        size(elements * 4),
        path.display(),
        size(bytes),
        time(seconds),
        time(alone),
        alone / seconds,
        match kept {
            true => format!("read again: {checked} numbers, all as the device made them"),
            false => "nothing was kept, nothing compared".into(),
        },
        gpu.clock(),
    ));
    Ok(())
}

fn sink(arguments: &Arguments, elements: u64) -> Result<(PathBuf, io::Result<Sink>), Failure> {
    if let Some(nowhere) = arguments.common.out.as_deref().filter(|out| *out == Path::new("/dev/null")) {
        return Ok((nowhere.to_owned(), File::options().write(true).open(nowhere).map(Sink::Nowhere)));
    }
    let path = folder(arguments.common.out.as_deref())?.join(format!("outputs.{}", arguments.format.extension()));
    let file = RowsFile::create(&path, arguments.format, elements).map(Sink::Rows);
    Ok((path, file))
}

/// All steps, their outputs to the sink: seconds until the last is written, the file's bytes, the pool's numbers.
fn with_egress(
    arguments: &Arguments,
    gpu: &Gpu<'_>,
    made: &mut Made<'_>,
    sink: &Arc<Sink>,
    path: &Path,
) -> Result<(f64, u64, EgressStats), Failure> {
    let StepArgs { steps, capacity, .. } = arguments.common;
    let failed = |error: io::Error| Failure::other(format!("{}: {error}", path.display()));
    // Each output has its place in the file, so that several workers write at once.
    let to = sink.clone();
    let pool: EgressPool<Tagged<TransferTensor<f32>, u64>, io::Result<()>> = EgressPool::builder(&gpu.device)
        .workers(arguments.workers.into())
        .capacity(capacity.into())
        .order(Order::Submission)
        .consumer(move |out: Output<Tagged<HostTensor<f32>, u64>>| to.put(out.tag, &out.value))?;
    let mut tickets: VecDeque<Ticket<io::Result<()>>> = VecDeque::new();
    let start = Instant::now();
    for step in 0..steps {
        let mut output = made.output()?;
        made.step(&mut output)?;
        tickets.push_back(pool.submit(Tagged::new(output, step)).map_err(|Refused { error, .. }| error)?);
        // Those before the last so many are written, or nearly: an error ends the run, not a full disk's worth of steps
        // later.
        if tickets.len() > usize::from(capacity)
            && let Some(oldest) = tickets.pop_front()
        {
            oldest.wait()?.map_err(failed)?;
        }
    }
    for ticket in tickets {
        ticket.wait()?.map_err(failed)?;
    }
    pool.drain(PATIENCE)?;
    let file_bytes = sink.finish(steps).map_err(failed)?;
    Ok((start.elapsed().as_secs_f64(), file_bytes, pool.stats()))
}
