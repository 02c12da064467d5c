//! Hands every tensor of a safetensors file from the host to the device, through a kernel that changes every byte, and
//! back, and proves that nothing was lost.
//!
//! ```text
//! cargo run --release --example handoff
//! cargo run --release --example handoff -- model.safetensors --simulate dgx_spark_gb10
//! cargo run --release --example handoff -- model.safetensors --strategy zero-copy --json
//! ```

#[path = "../common/mod.rs"]
mod common;
mod file;
mod handover;
mod kernel;
mod meter;
mod report;
mod sample;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use serde_json::{Value, json};
use transfer_tensor::{Detector, Strategy};

use common::{FAILURE, Failure, Machine, MachineArgs, print};
use file::ModelFile;
use handover::Outcome;
use sample::Sample;

/// Where there is no GPU: one machine of each kind.
const SIMULATED: [&str; 3] = ["dgx_spark_gb10", "gh200_480gb_numa", "x86_h200_sxm_gen5"];

/// Hands the tensors of a safetensors file to the GPU and back and compares them bit by bit
///
/// Without FILE a sample is made. Without a GPU it runs on three simulated machines. GB/s counts a tensor's bytes once,
/// over the time to the device, through the kernel and back.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    /// Model file
    #[arg(value_name = "FILE.safetensors")]
    file: Option<PathBuf>,
    #[command(flatten)]
    machine: MachineArgs,
    /// Force zero-copy, coherent or streamed
    #[arg(long, value_name = "S", value_parser = strategy)]
    strategy: Option<Strategy>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn strategy(text: &str) -> Result<Strategy, String> {
    match text.parse() {
        Ok(Strategy::Host) => Err("nothing is handed over where no device takes part".into()),
        Ok(strategy) => Ok(strategy),
        Err(error) => Err(transfer_tensor::Error::to_string(&error)),
    }
}

fn main() -> ExitCode {
    common::run(run)
}

fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    let sample = arguments.file.is_none().then(Sample::make).transpose()?;
    let path = arguments.file.as_deref().or(sample.as_ref().map(Sample::path));
    let file = ModelFile::open(path.ok_or_else(|| Failure::usage("no file"))?)?;

    let simulated = arguments.machine.simulate.is_some() || arguments.machine.profile.is_some();
    if !simulated && let Err(error) = Detector::device_count() {
        return on_simulated_machines(&arguments, &file, &error);
    }
    let machine = Machine::open(&arguments.machine)?;
    let outcome = on_machine(&arguments, &file, &machine)?;
    if arguments.json {
        print(format_args!("{:#}", report::json(&file, &outcome)));
    } else {
        print(report::text(&outcome));
    }
    verdict(&outcome)
}

fn on_machine(arguments: &Arguments, file: &ModelFile, machine: &Machine) -> Result<Outcome, Failure> {
    if machine.simulated.is_some() {
        cuda_sim::register_kernel(kernel::NAME, kernel::change_every_byte).map_err(Failure::other)?;
    }
    let progress = handover::progress(file.bytes(), !arguments.json);
    handover::hand_over(machine, file, arguments.strategy, &progress)
}

fn verdict(outcome: &Outcome) -> Result<ExitCode, Failure> {
    if outcome.mismatches() > 0 {
        let all = outcome.rows.len();
        return Err(Failure::other(format!("{} of {all} tensors came back different", outcome.mismatches())));
    }
    match outcome.violations.first() {
        Some(violation) => Err(Failure::other(format!("the simulated driver objects: {violation}"))),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// There is no GPU: shows what would happen on three machines. A failure on one is part of the answer, and of the exit
/// code.
fn on_simulated_machines(
    arguments: &Arguments,
    file: &ModelFile,
    why: &transfer_tensor::Error,
) -> Result<ExitCode, Failure> {
    let note = format!("no GPU here ({why}); these are simulated machines");
    if !arguments.json {
        print(&note);
    }
    let mut machines: Vec<Value> = Vec::new();
    let mut failures = Vec::new();
    for key in SIMULATED {
        let outcome = Machine::built_in(key).and_then(|machine| on_machine(arguments, file, &machine));
        let failed = match outcome {
            Ok(outcome) => {
                if arguments.json {
                    machines.push(report::json(file, &outcome));
                } else {
                    print(format_args!("\n{}", report::text(&outcome)));
                }
                verdict(&outcome).err()
            }
            Err(failure) => {
                machines.push(json!({ "profile": key, "error": failure.line }));
                Some(failure)
            }
        };
        failures.extend(failed.map(|failure| format!("{key}: {}", failure.line)));
    }
    if arguments.json {
        print(format_args!("{:#}", json!({ "note": note, "machines": machines })));
    }
    if failures.is_empty() { Ok(ExitCode::SUCCESS) } else { Err(Failure { code: FAILURE, line: failures.join("; ") }) }
}
