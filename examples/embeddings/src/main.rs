//! The device makes embeddings, step after step, and an `EgressPool` writes them to an Arrow file meanwhile, which
//! pandas, Polars, DuckDB and others read. Then the file is read and every number compared.
//!
//! ```text
//! cargo run --release -p embeddings
//! cargo run --release -p embeddings -- --rows 4096 --dim 1024 --steps 100 --passes 30 --out embeddings
//! python3 -c 'import polars; print(polars.read_ipc("embeddings/embeddings.arrow"))'
//! ```

#[path = "../../common/mod.rs"]
mod common;

use std::collections::VecDeque;
use std::fs::File;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use arrow_array::{Array as _, ArrayRef, FixedSizeListArray, Float32Array, RecordBatch, UInt64Array};
use arrow_buffer::{Buffer, ScalarBuffer};
use arrow_ipc::reader::FileReader;
use arrow_ipc::writer::FileWriter;
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use bytes::Bytes;
use clap::Parser;
use serde_json::json;
use transfer_tensor::{EgressPool, EgressStats, HostTensor, Order, Output, Refused, Tagged, Ticket, TransferTensor};

use common::made::{self, Made};
use common::steps::{self, Gpu, PATIENCE, StepArgs, folder, stats_json};
use common::{Failure, print, size, time};

/// Writes embeddings that the device makes, step after step, to an Arrow file while the device works on
///
/// The file is Arrow's IPC format (Feather, version 2), with the columns `id` (UInt64) and `embedding` (a fixed-size
/// list of Float32). Without a GPU it runs on a simulated H200.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    #[command(flatten)]
    common: StepArgs,
    /// Embeddings of a step
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    rows: u32,
    /// Numbers of an embedding
    #[arg(long, value_name = "N", default_value_t = 384, value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    dim: u32,
}

fn main() -> ExitCode {
    common::run(|arguments: Arguments| {
        let bytes = u64::from(arguments.rows) * u64::from(arguments.dim) * 4;
        if bytes > 4 << 30 {
            return Err(Failure::usage(format!("{bytes} bytes a step: they must not exceed 4 GiB")));
        }
        steps::run(&arguments.common, |gpu| run(&arguments, gpu))
    })
}

fn run(arguments: &Arguments, gpu: &Gpu) -> Result<(), Failure> {
    let StepArgs { steps, passes, .. } = arguments.common;
    let (rows, dim) = (u64::from(arguments.rows), u64::from(arguments.dim));
    let path = folder(arguments.common.out.as_deref())?.join("embeddings.arrow");
    let failed = |error: ArrowError| Failure::other(format!("{}: {error}", path.display()));
    let schema = schema(arguments.dim);
    let writer = File::create(&path).map_err(ArrowError::from).and_then(|file| FileWriter::try_new(file, &schema));
    let file = ArrowFile { writer: Mutex::new(writer.map_err(failed)?), schema };

    let shape = [arguments.rows as usize, arguments.dim as usize];
    let alone = Made::new(gpu, &shape, passes)?.alone(steps)?;
    let mut made = Made::new(gpu, &shape, passes)?;
    let file = Arc::new(file);
    let start = Instant::now();
    let egress = with_egress(arguments, gpu, &mut made, &file, &path)?;
    file.writer().finish().map_err(failed)?;
    let seconds = start.elapsed().as_secs_f64();
    drop(file);
    let checked = check(arguments, &path)?;

    let bytes = steps * rows * dim * 4;
    let rate = bytes as f64 / seconds / 1e9;
    let file_bytes = std::fs::metadata(&path).map_err(|error| failed(error.into()))?.len();
    if arguments.common.json {
        let report = json!({
            "file": path.display().to_string(), "format": "arrow", "steps": steps, "passes": passes,
            "rows": steps * rows, "dim": dim, "bytes": bytes, "file_bytes": file_bytes, "rows_checked": checked,
            "seconds": seconds, "gb_per_s": rate, "device_alone_seconds": alone, "ratio": alone / seconds,
            "egress": stats_json(&egress),
        });
        print(format_args!("{:#}", gpu.json(report)));
        return Ok(());
    }
    print(format_args!(
        "{}: {} embeddings of {dim} numbers, {steps} steps, to {}\n{bytes} bytes ({}) in {}: {rate:.2} GB/s\n\
         the device alone: {}, {:.2} of that\nread again: {checked} embeddings, all as the device made them\n({})",
        gpu.title(),
        steps * rows,
        path.display(),
        size(bytes),
        time(seconds),
        time(alone),
        alone / seconds,
        gpu.clock(),
    ));
    Ok(())
}

fn schema(dim: u32) -> SchemaRef {
    let embedding = DataType::FixedSizeList(number(), dim.cast_signed());
    Arc::new(Schema::new(vec![Field::new("id", DataType::UInt64, false), Field::new("embedding", embedding, false)]))
}

fn number() -> Arc<Field> {
    Arc::new(Field::new("item", DataType::Float32, false))
}

/// One step's output: its embeddings, and the id of the first.
type Step = Tagged<HostTensor<f32>, u64>;

struct ArrowFile {
    writer: Mutex<FileWriter<File>>,
    schema: SchemaRef,
}

impl ArrowFile {
    fn writer(&self) -> std::sync::MutexGuard<'_, FileWriter<File>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a step's embeddings as a record batch.
    fn put(&self, step: Output<Step>) -> Result<(), ArrowError> {
        let &[rows, dim] = step.value.shape().dims() else {
            return Err(ArrowError::SchemaError("embeddings have two dimensions".into()));
        };
        let ids: UInt64Array = (step.tag..step.tag + rows as u64).collect::<Vec<_>>().into();
        // The array is the page-locked memory that the output lies in: nothing is copied before the file is written.
        let values = ScalarBuffer::<f32>::from(Buffer::from(Bytes::from_owner(Landed(step))));
        let values = Arc::new(Float32Array::new(values, None));
        let dim = i32::try_from(dim).map_err(|error| ArrowError::SchemaError(error.to_string()))?;
        let embeddings = FixedSizeListArray::try_new(number(), dim, values, None)?;
        let columns: Vec<ArrayRef> = vec![Arc::new(ids), Arc::new(embeddings)];
        self.writer().write(&RecordBatch::try_new(self.schema.clone(), columns)?)
    }
}

/// Owns an output for Arrow, as bytes.
struct Landed(Output<Step>);

impl AsRef<[u8]> for Landed {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0.value)
    }
}

fn with_egress(
    arguments: &Arguments,
    gpu: &Gpu,
    made: &mut Made<'_>,
    file: &Arc<ArrowFile>,
    path: &Path,
) -> Result<EgressStats, Failure> {
    let failed = |error: ArrowError| Failure::other(format!("{}: {error}", path.display()));
    let StepArgs { steps, capacity, .. } = arguments.common;
    // One worker: record batches come one after another in the file.
    let to = file.clone();
    let pool: EgressPool<Tagged<TransferTensor<f32>, u64>, Result<(), ArrowError>> = EgressPool::builder(&gpu.device)
        .workers(1)
        .capacity(capacity.into())
        .order(Order::Submission)
        .consumer(move |step: Output<Step>| to.put(step))?;
    let mut tickets: VecDeque<Ticket<Result<(), ArrowError>>> = VecDeque::new();
    for step in 0..steps {
        let mut output = made.output()?;
        made.step(&mut output)?;
        let output = Tagged::new(output, step * u64::from(arguments.rows));
        tickets.push_back(pool.submit(output).map_err(|Refused { error, .. }| error)?);
        // An error ends the run soon, and not a full disk's worth of steps later.
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
    Ok(pool.stats())
}

/// Reads the file as others would, and compares every number; how many embeddings there are.
fn check(arguments: &Arguments, path: &Path) -> Result<u64, Failure> {
    let wrong = |what: String| Failure::other(format!("{}: {what}", path.display()));
    let failed = |error: ArrowError| wrong(error.to_string());
    let file = File::open(path).map_err(|error| failed(error.into()))?;
    let reader = FileReader::try_new_buffered(file, None).map_err(failed)?;
    let (rows, dim) = (u64::from(arguments.rows), u64::from(arguments.dim));
    let mut id = 0;
    for (step, batch) in (0..).zip(reader) {
        let batch = batch.map_err(failed)?;
        let column = |name| batch.column_by_name(name);
        let ids = column("id").and_then(|ids| ids.as_any().downcast_ref::<UInt64Array>());
        let embeddings = column("embedding").and_then(|lists| lists.as_any().downcast_ref::<FixedSizeListArray>());
        let values = embeddings.and_then(|lists| lists.values().as_any().downcast_ref::<Float32Array>());
        let (Some(ids), Some(values)) = (ids, values) else {
            return Err(wrong(format!("step {step} has other columns than were written")));
        };
        if ids.len() as u64 != rows || values.len() as u64 != rows * dim {
            return Err(wrong(format!("step {step} has {} ids and {} numbers", ids.len(), values.len())));
        }
        if !ids.values().iter().copied().eq(id..id + rows) {
            return Err(wrong(format!("the ids of step {step} are not those from {id} on")));
        }
        for (index, value) in (0..).zip(values.values().iter()) {
            let expected = made::element(index, arguments.common.passes, step);
            if value.to_bits() != expected.to_bits() {
                let (row, column) = (id + index / dim, index % dim);
                return Err(wrong(format!("embedding {row}, number {column} is {value}, not {expected}")));
            }
        }
        id += rows;
    }
    if id != rows * arguments.common.steps {
        return Err(wrong(format!("it has {id} embeddings, not {}", rows * arguments.common.steps)));
    }
    Ok(id)
}
