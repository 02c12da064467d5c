//! Loads the tensors of a safetensors model, one file or sharded, to where the GPU uses them, and says how fast.
//!
//! ```text
//! cargo run --release --example load
//! cargo run --release --example load -- model.safetensors
//! cargo run --release --example load -- models/sharded --only model.embed_tokens.weight --simulate dgx_spark_gb10
//! ```

mod common;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use transfer_tensor::cudarc::driver::CudaContext;
use transfer_tensor::{Checkpoint, Device, DynTensor, Reading, Strategy};

use common::sample::Sample;
use common::{Failure, Machine, MachineArgs, print, printable, size, time};

/// Where there is nothing to load and no machine was named.
const SIMULATED: &str = "x86_h200_sxm_gen5";

/// Loads a safetensors model to the GPU and says how fast
///
/// Without FILE a small sharded model is made; then, if no machine is named, it is loaded on a simulated H200.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    /// Model file, index of a sharded model, or folder with one
    #[arg(value_name = "FILE|DIR")]
    model: Option<PathBuf>,
    #[command(flatten)]
    machine: MachineArgs,
    /// Load only the tensors of these names
    #[arg(long, value_name = "NAME", num_args = 1..)]
    only: Vec<String>,
    /// How the file is taken: auto, map or read
    #[arg(long, value_name = "R", default_value = "auto", value_parser = reading)]
    reading: Reading,
    /// Force zero-copy, coherent or streamed
    #[arg(long, value_name = "S")]
    strategy: Option<Strategy>,
    /// Load this many times; the first load also sets the device up
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
}

fn reading(text: &str) -> Result<Reading, String> {
    match text.to_ascii_lowercase().as_str() {
        "auto" => Ok(Reading::Auto),
        "map" => Ok(Reading::Map),
        "read" => Ok(Reading::Read),
        _ => Err("it is auto, map or read".into()),
    }
}

fn main() -> ExitCode {
    common::run(run)
}

fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    let sample = arguments.model.is_none().then(Sample::sharded).transpose()?;
    let path = arguments.model.as_deref().or(sample.as_ref().map(Sample::path));
    let checkpoint = common::open(path.ok_or_else(|| Failure::usage("no model"))?)?;
    let named = arguments.machine.simulate.is_some() || arguments.machine.profile.is_some();
    let machine = if sample.is_some() && !named && arguments.machine.device == 0 {
        Machine::built_in(SIMULATED)?
    } else {
        Machine::open(&arguments.machine)?
    };
    let context = CudaContext::new(machine.ordinal)
        .map_err(|error| Failure::other(format!("device {}: no context: {:?}", machine.ordinal, error.0)))?;
    let device = Device::with_detector(&context.default_stream(), &machine.detector)?;
    print(format_args!(
        "{}{}: {} tensors in {} file(s), {}",
        device.platform().name(),
        if machine.simulated.is_some() { " (simulated)" } else { "" },
        checkpoint.tensors().len(),
        checkpoint.files().len(),
        size(checkpoint.bytes()),
    ));
    for _ in 0..arguments.repeat {
        let (tensors, taken) = load(&arguments, &checkpoint, &machine, &device)?;
        report(&machine, &tensors, taken);
    }
    if let Some(violation) = machine.simulated.as_ref().and_then(|device| device.violations().into_iter().next()) {
        return Err(Failure::other(format!("the simulated driver objects: {violation}")));
    }
    Ok(ExitCode::SUCCESS)
}

type Tensors = BTreeMap<String, DynTensor>;

/// Loads, and waits until the device has all bytes.
fn load(
    arguments: &Arguments,
    checkpoint: &Checkpoint,
    machine: &Machine,
    device: &Device,
) -> Result<(Tensors, Duration), Failure> {
    let bar = common::progress(0, true);
    let now = || machine.simulated.as_ref().map_or(0, |simulated| simulated.clock(0).now_ns);
    let (start, simulated) = (Instant::now(), now());
    let mut load = checkpoint.load(device, device.stream()).reading(arguments.reading).progress(|progress| {
        bar.set_length(progress.total);
        bar.set_position(progress.done);
        bar.set_message(printable(progress.tensor));
        ControlFlow::Continue(())
    });
    if let Some(strategy) = arguments.strategy {
        load = load.strategy(strategy);
    }
    if !arguments.only.is_empty() {
        load = load.only(arguments.only.iter().cloned());
    }
    let tensors = load.run()?;
    device.stream().synchronize().map_err(|error| Failure::other(format!("waiting for the copies: {:?}", error.0)))?;
    let taken = match machine.simulated {
        Some(_) => Duration::from_nanos(now() - simulated),
        None => start.elapsed(),
    };
    bar.finish_and_clear();
    Ok((tensors, taken))
}

fn report(machine: &Machine, tensors: &Tensors, taken: Duration) {
    let bytes: u64 = tensors.values().map(|tensor| tensor.bytes().bytes() as u64).sum();
    let copied: u64 = tensors.values().map(|tensor| tensor.bytes().copied_bytes().0).sum();
    let rate = match taken.is_zero() {
        true => String::new(),
        false => format!(", {:.2} GB/s", bytes as f64 / taken.as_secs_f64() / 1e9),
    };
    let clock = if machine.simulated.is_some() { "simulated clock" } else { "measured" };
    print(format_args!(
        "loaded {} tensors, {}; copied {} to the device; {}{rate} ({clock})",
        tensors.len(),
        size(bytes),
        size(copied),
        time(taken.as_secs_f64()),
    ));
    if let Some(tensor) = tensors.values().find(|tensor| !tensor.bytes().is_empty()) {
        print(format_args!("{}", tensor.bytes().decision()));
    }
}
