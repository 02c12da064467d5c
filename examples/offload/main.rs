//! Layers with work on each, once with all weights on the device and once with a part of them on the host: the time of a step against what
//! `Workload::weigh` predicts, the device's memory, and whether the results are the same to the bit.
//!
//! ```text
//! cargo run --release --example offload
//! cargo run --release --example offload -- --layers 32 --layer-bytes 256MiB --compute-ms 5 --fraction 0.5
//! ```

#[path = "../common/mod.rs"]
mod common;
mod kernel;

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use serde_json::json;
use transfer_tensor::{Access, Fractions, OffloadBatch, OffloadLayer, Offloader, Strategy, TransferTensor, Workload};

use common::gpu::{self, Gpu};
use common::{Failure, MachineArgs, bytes, print, size, time};
use kernel::Kernels;

/// Runs transformer-like layers with all weights on the device, and with a part of them on the host: time, memory, and
/// whether the results are the same
///
/// Without a GPU it runs on a simulated H200.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    #[command(flatten)]
    machine: MachineArgs,
    /// How many layers
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    layers: u16,
    /// Bytes of a layer's weights; whole words of 4
    #[arg(long, value_name = "B", default_value = "1MiB", value_parser = bytes)]
    layer_bytes: u64,
    /// Milliseconds that the device works on a layer
    #[arg(long, value_name = "T", default_value_t = 0.5, value_parser = positive)]
    compute_ms: f64,
    /// How much of the weights is kept on the host, from 0 to 1
    #[arg(long, value_name = "F", default_value_t = 0.5, value_parser = share, allow_negative_numbers = true)]
    fraction: f64,
    /// How many layers of those on the host are on the device at once; as many as the link needs, if not said
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    depth: Option<u16>,
    /// How many steps are timed
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Why this process was started for a simulated machine
    #[arg(long, hide = true)]
    no_gpu: Option<String>,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if number > 0.0 && number < 1e6 => Ok(number),
        _ => Err("it must be a number above 0 and below 1000000".into()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        _ => Err("it must be a number from 0 to 1".into()),
    }
}

fn main() -> ExitCode {
    common::run(|arguments: Arguments| {
        gpu::run(&arguments.machine, arguments.no_gpu.as_deref(), arguments.json, |gpu| run(&arguments, gpu))
    })
}

/// What a run with a part of the weights on the host came to.
struct Ran {
    seconds: f64,
    /// The state, which each layer of each step changed.
    state: Vec<u32>,
    saved: u64,
    report: String,
    stats: transfer_tensor::OffloadStats,
    host: u64,
}

fn run(arguments: &Arguments, gpu: &Gpu) -> Result<(), Failure> {
    if arguments.layer_bytes == 0 || !arguments.layer_bytes.is_multiple_of(4) {
        return Err(Failure::usage(format!("--layer-bytes {}: it must be whole words of 4", arguments.layer_bytes)));
    }
    let kernels = Kernels::load(gpu)?;
    let resident = steps(arguments, gpu, &kernels, 0.0)?;
    let offloaded = steps(arguments, gpu, &kernels, arguments.fraction)?;
    let same = resident.state == offloaded.state;

    let all = arguments.layer_bytes * u64::from(arguments.layers);
    let mut workload = Workload::new(all, 0, resident.seconds);
    // Each layer is used once in a step.
    workload.weight_passes = Some(1);
    let batch = OffloadBatch { times: 1.0, seconds: resident.seconds };
    let fraction = offloaded.host as f64 / all as f64;
    let choice = workload.weigh(gpu.device.platform(), batch, Fractions::of_weights(fraction), false)?;
    let predicted = choice.step.overlapped();

    if arguments.json {
        print(gpu_json(gpu, arguments, &resident, &offloaded, predicted, same));
    } else {
        print(format_args!("{}, {}", gpu.title(), gpu.clock()));
        print(&offloaded.report);
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header(["weights", "a step", "on the device"]);
        let rows = [
            ("all on the device", time(resident.seconds), size(all)),
            ("a part on the host", time(offloaded.seconds), size(all - offloaded.saved)),
            ("predicted", time(predicted), size(choice.device_bytes)),
        ];
        for (name, seconds, bytes) in rows {
            table.add_row([name.to_owned(), seconds, bytes]);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        print(table);
        print(format_args!(
            "measured / predicted {:.3}; {:.0} % of the layers were there in time; results {}",
            offloaded.seconds / predicted,
            offloaded.stats.hit_rate() * 100.0,
            if same { "are the same to the bit" } else { "DIFFER" },
        ));
    }
    if same { Ok(()) } else { Err(Failure::other("the results differ")) }
}

fn gpu_json(
    gpu: &Gpu,
    arguments: &Arguments,
    resident: &Ran,
    offloaded: &Ran,
    predicted: f64,
    same: bool,
) -> serde_json::Value {
    gpu.json(json!({
        "layers": arguments.layers,
        "layer_bytes": arguments.layer_bytes,
        "fraction": arguments.fraction,
        "resident_seconds": resident.seconds,
        "offloaded_seconds": offloaded.seconds,
        "predicted_seconds": predicted,
        "saved_bytes": offloaded.saved,
        "host_bytes": offloaded.host,
        "up_bytes": offloaded.stats.up_bytes,
        "hit_rate": offloaded.stats.hit_rate(),
        "stalled_seconds": offloaded.stats.stalled.map(|stalled| stalled.as_secs_f64()),
        "same": same,
    }))
}

/// Some steps of all layers, after one that is not timed.
fn steps(arguments: &Arguments, gpu: &Gpu, kernels: &Kernels, fraction: f64) -> Result<Ran, Failure> {
    let words = usize::try_from(arguments.layer_bytes / 4).map_err(Failure::usage)?;
    let weights = |layer: u32| -> Result<OffloadLayer, Failure> {
        // Weights stay: what is not moved is to be in the device's own memory, where it has some.
        let mut weights: TransferTensor<u32> = gpu.device.tensor().access(Access::reuse(1000)?).zeros(words)?;
        for (word, at) in weights.host_mut()?.iter_mut().zip(0u32..) {
            *word = at.wrapping_mul(2_654_435_761).wrapping_add(layer);
        }
        Ok(OffloadLayer::new().tensor(weights))
    };
    let layers = (0..u32::from(arguments.layers)).map(weights).collect::<Result<_, _>>()?;
    let mut builder = Offloader::builder(&gpu.device).fraction(fraction).timed(true).small(0);
    if let Some(depth) = arguments.depth {
        builder = builder.depth(depth.into());
    }
    let mut model = builder.build(layers).map_err(|refused| refused.error)?;
    let mut state: TransferTensor<u32> = gpu.device.tensor().strategy(Strategy::Streamed).zeros(words)?;
    let ticks = kernels.ticks(arguments.compute_ms * 1e-3);
    let mut step = |model: &mut Offloader| -> Result<(), Failure> {
        let mut state = state.device_mut(&gpu.stream)?;
        for number in 0..model.len() {
            let layer = model.layer(number, &gpu.stream)?;
            kernels.layer(&gpu.stream, &mut state, &layer.device(0)?, ticks)?;
        }
        Ok(())
    };
    step(&mut model)?;
    gpu.wait()?;
    let start = Instant::now();
    for _ in 0..arguments.steps {
        step(&mut model)?;
    }
    gpu.wait()?;
    let seconds = start.elapsed().as_secs_f64() / f64::from(arguments.steps);
    let (report, stats) = (model.report().clone(), model.stats());
    let state = state.host()?.to_vec();
    let (saved, host) = (report.saved_bytes, report.host_bytes);
    Ok(Ran { seconds, state, saved, report: report.to_string(), stats, host })
}
