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
mod handover;
mod kernel;
mod meter;
mod report;

use std::path::PathBuf;
use std::process::{Command, ExitCode, Output};

use clap::Parser;
use serde_json::{Value, json};
use transfer_tensor::{Checkpoint, Detector, Strategy};

use common::sample::Sample;
use common::{Failure, Machine, MachineArgs, print};
use handover::Outcome;

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
    match text.parse::<Strategy>() {
        Ok(Strategy::Host) => Err("no device takes part in it; it is zero-copy, coherent or streamed".into()),
        Ok(strategy) => Ok(strategy),
        Err(error) => Err(error.to_string()),
    }
}

fn main() -> ExitCode {
    common::run(run)
}

fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    let sample = arguments.file.is_none().then(Sample::make).transpose()?;
    let path = arguments.file.as_deref().or(sample.as_ref().map(Sample::path));
    let file = common::open(path.ok_or_else(|| Failure::usage("no file"))?)?;

    let simulated = arguments.machine.simulate.is_some() || arguments.machine.profile.is_some();
    if !simulated {
        match Detector::device_count() {
            Ok(0) => return on_simulated_machines(&arguments, &file, "the driver sees no device"),
            Ok(_) => {}
            Err(error) => return on_simulated_machines(&arguments, &file, &error.to_string()),
        }
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

fn on_machine(arguments: &Arguments, file: &Checkpoint, machine: &Machine) -> Result<Outcome, Failure> {
    if machine.simulated.is_some() {
        cuda_sim::register_kernel(kernel::NAME, kernel::change_every_byte).map_err(Failure::other)?;
    }
    let progress = common::progress(file.bytes(), !arguments.json);
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
fn on_simulated_machines(arguments: &Arguments, file: &Checkpoint, why: &str) -> Result<ExitCode, Failure> {
    let note = format!("no GPU here ({why}); these are simulated machines");
    if !arguments.json {
        print(&note);
    }
    let mut machines: Vec<Value> = Vec::new();
    let mut failures = Vec::new();
    for key in SIMULATED {
        let output = in_a_process(arguments, file, key)?;
        let failure = (!output.status.success()).then(|| {
            let line = String::from_utf8_lossy(&output.stderr);
            line.strip_prefix("error: ").unwrap_or(&line).trim().to_owned()
        });
        if arguments.json {
            let error = || json!({ "profile": key, "error": failure });
            machines.push(serde_json::from_slice(&output.stdout).unwrap_or_else(|_| error()));
        } else {
            print(format_args!("\n{}", String::from_utf8_lossy(&output.stdout).trim_end()));
        }
        failures.extend(failure.map(|failure| format!("{key}: {failure}")));
    }
    if arguments.json {
        print(format_args!("{:#}", json!({ "note": note, "machines": machines })));
    }
    if failures.is_empty() { Ok(ExitCode::SUCCESS) } else { Err(Failure::other(failures.join("; "))) }
}

/// One simulated machine in a process of its own: a process has one driver, and here that may be a library which is
/// loaded already and sees no device.
fn in_a_process(arguments: &Arguments, file: &Checkpoint, key: &str) -> Result<Output, Failure> {
    let failed = |error| Failure::other(format!("{key}: no process for it: {error}"));
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.arg(file.path()).args(["--simulate", key]);
    if let Some(strategy) = arguments.strategy {
        command.args(["--strategy", strategy.as_str()]);
    }
    if arguments.json {
        command.arg("--json");
    }
    command.output().map_err(failed)
}
