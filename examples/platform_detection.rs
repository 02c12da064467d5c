//! What machine this is, and what would be done with a request on it.
//!
//! ```text
//! cargo run --release --example platform_detection
//! cargo run --release --example platform_detection -- --simulate dgx_spark_gb10 --bytes 8MiB --access reuse=8
//! cargo run --release --example platform_detection -- --all
//! ```

mod common;

use std::process::ExitCode;

use clap::Parser;
use comfy_table::{Table, presets};
use cuda_sim::profile::Profile;
use serde_json::{Map, Value, json};
use transfer_tensor::cudarc::driver::CudaContext;
use transfer_tensor::{Access, Decision, Detector, Device, Direction, MemoryFigures, Platform, Request, plan};

use common::{Failure, Machine, MachineArgs, print, size, time};

/// Shows the platform, its memory, and what is decided for one request, with reasons and estimates
#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    #[command(flatten)]
    machine: MachineArgs,
    /// Size of the request; units such as KiB, MiB, GiB are understood
    #[arg(long, value_name = "N", default_value = "256MiB", value_parser = common::bytes, allow_hyphen_values = true)]
    bytes: u64,
    /// Way of the data: h2d or d2h
    #[arg(long, value_name = "h2d|d2h", default_value_t = Direction::HostToDevice)]
    direction: Direction,
    /// How the GPU touches it: streaming (once) or reuse=K (K times)
    #[arg(long, value_name = "streaming|reuse=K", default_value_t = Access::Streaming)]
    access: Access,
    /// One line for each built-in simulated machine
    #[arg(long, conflicts_with_all = ["simulate", "profile", "device"])]
    all: bool,
    /// Measure the device first, or read what was measured earlier from the cache
    #[arg(long, conflicts_with = "all")]
    calibrate: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    common::run(|arguments: Arguments| {
        let request = Request::new(arguments.bytes).direction(arguments.direction).access(arguments.access);
        if arguments.all { all(&request, arguments.json) } else { one(&arguments, &request) }
    })
}

fn one(arguments: &Arguments, request: &Request) -> Result<ExitCode, Failure> {
    let machine = Machine::open(&arguments.machine)?;
    let report =
        if arguments.calibrate { Report::calibrated(&machine, request) } else { Report::of(&machine, request) }?;
    if arguments.json {
        print(report.json())
    } else {
        report.print(request)
    }
    Ok(ExitCode::SUCCESS)
}

struct Report {
    driver: &'static str,
    platform: Platform,
    memory: MemoryFigures,
    decision: Decision,
}

impl Report {
    fn of(machine: &Machine, request: &Request) -> Result<Self, Failure> {
        Self::on(machine, machine.detector.detect(machine.ordinal), request)
    }

    fn calibrated(machine: &Machine, request: &Request) -> Result<Self, Failure> {
        // What is measured of a simulated device is nothing to keep.
        let detector = match &machine.simulated {
            Some(device) => machine.detector.clone().cache_folder(device.host_root().join("cache")),
            None => machine.detector.clone(),
        };
        // Says that there is no driver, where cudarc would panic.
        Detector::device_count()?;
        let context = CudaContext::new(machine.ordinal)
            .map_err(|error| Failure::other(format!("device {} has no context: {:?}", machine.ordinal, error.0)))?;
        let device = Device::with_detector(&context.default_stream(), &detector)?;
        device.calibrate()?;
        Self::on(machine, device.platform().clone(), request)
    }

    fn on(machine: &Machine, platform: Platform, request: &Request) -> Result<Self, Failure> {
        let memory = platform.memory();
        let decision = plan(&platform, &memory, request)?;
        Ok(Self { driver: machine.driver(&platform), platform, memory, decision })
    }

    fn json(&self) -> Value {
        let Self { driver, platform, memory, decision } = self;
        let capabilities: Map<_, _> =
            platform.capabilities().flags().into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        json!({
            "driver": driver,
            "driver_version": platform.driver_version(),
            "device": platform.name(),
            "ordinal": platform.ordinal(),
            "uuid": platform.uuid(),
            "compute_capability": platform.compute_capability().map(|(major, minor)| format!("{major}.{minor}")),
            "model": platform.model(),
            "strategy": decision.strategy,
            "backing": decision.backing,
            "chunk_bytes": decision.chunk_bytes,
            "free_bytes": memory.free_bytes,
            "total_bytes": memory.total_bytes,
            "l2_bytes": platform.l2_bytes(),
            "copy_engines": platform.copy_engines(),
            "host": {
                "available_bytes": memory.host_available,
                "total_bytes": memory.host_total,
                "container_limit": memory.container_limit,
                "wsl": platform.is_wsl(),
            },
            "topology": platform.topology(),
            "capabilities": capabilities,
            "reasons": decision.reasons,
            "estimates": decision.estimates,
            "figures": platform.figures(),
            "calibration": platform.calibration(),
            "notes": notes(platform, memory),
        })
    }

    fn print(&self, request: &Request) {
        let Self { driver, platform, memory, decision } = self;
        print(format_args!("driver: {driver}\n{platform}"));
        print(format_args!("  free          {memory}"));
        for note in &memory.notes {
            print(format_args!("  note: {note}"));
        }
        print(format_args!("\n{} {} {}: {decision}\n", size(request.bytes), request.direction, request.access));
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED);
        table.set_header(["", "strategy", "backing", "time", "duplicated", "why"]);
        for estimate in &decision.estimates {
            let chosen = (estimate.strategy, estimate.backing) == (decision.strategy, decision.backing);
            table.add_row([
                if chosen {
                    "→"
                } else if estimate.allowed {
                    "✓"
                } else {
                    ""
                }
                .to_owned(),
                estimate.strategy.to_string(),
                estimate.backing.to_string(),
                time(estimate.seconds),
                size(estimate.duplicated_bytes),
                estimate.why.clone(),
            ]);
        }
        print(table);
    }
}

fn notes<'a>(platform: &'a Platform, memory: &'a MemoryFigures) -> Vec<&'a str> {
    platform.notes().iter().chain(&memory.notes).map(String::as_str).collect()
}

fn all(request: &Request, json: bool) -> Result<ExitCode, Failure> {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header(["profile", "model", "strategy", "backing", "chunk", "time", "free", "total"]);
    let mut objects = Vec::new();
    for key in Profile::builtin_keys() {
        let machine = Machine::built_in(key)?;
        let report = match Report::of(&machine, request) {
            Ok(report) => report,
            // One machine without room is a line of the table, not the end of it.
            Err(failure) => {
                table.add_row([key.to_owned(), failure.line.clone()]);
                objects.push(json!({ "profile": key, "error": failure.line }));
                continue;
            }
        };
        let Report { platform, memory, decision, .. } = &report;
        table.add_row([
            key.to_owned(),
            platform.model().to_string(),
            decision.strategy.to_string(),
            decision.backing.to_string(),
            if decision.chunk_bytes == 0 { "-".into() } else { size(decision.chunk_bytes) },
            decision.chosen().map_or_else(|| "-".into(), |chosen| time(chosen.seconds)),
            size(memory.free_bytes),
            size(memory.total_bytes),
        ]);
        let mut object = report.json();
        object["profile"] = key.into();
        objects.push(object);
    }
    if json {
        print(json!({ "profiles": objects }));
    } else {
        print(format_args!("{} {} {}\n{table}", size(request.bytes), request.direction, request.access));
    }
    Ok(ExitCode::SUCCESS)
}
