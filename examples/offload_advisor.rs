//! Whether keeping part of a model in host memory pays on a machine, and how much of it.
//!
//! ```text
//! cargo run --release --example offload_advisor
//! cargo run --release --example offload_advisor -- examples/workloads/llama2_70b_gh200.toml --simulate gh200_480gb_numa --svg gain.svg
//! ```
//!
//! The workload is a TOML file with the fields of `Workload`; without one, that of a talk about Grace Hopper is taken.

mod common;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use plotters::prelude::*;
use transfer_tensor::{MemoryModel, OffloadAdvice, Workload};

use common::{Failure, Machine, MachineArgs, print};

/// Weighs moving weights, activations and more into host memory: the verdict, and the arithmetic behind it
#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    /// The workload, a TOML file; without one, fine-tuning of Llama 2 70B
    #[arg(value_name = "WORKLOAD.toml")]
    workload: Option<PathBuf>,
    #[command(flatten)]
    machine: MachineArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Draw throughput against the fraction of the weights in host memory
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// What is asked about where there is no GPU.
const STAND_IN: &str = "gh200_480gb_numa";

const TALK: &str = include_str!("workloads/llama2_70b_gh200.toml");

fn main() -> ExitCode {
    common::run(|arguments: Arguments| {
        let (file, text) = match &arguments.workload {
            Some(path) => {
                let text = std::fs::read_to_string(path);
                (
                    path.display().to_string(),
                    text.map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?,
                )
            }
            None => ("the built-in workload".to_owned(), TALK.to_owned()),
        };
        let workload: Workload = toml::from_str(&text).map_err(|error| {
            let place = error.span().map_or(1, |span| text[..span.start].lines().count().max(1));
            Failure::usage(format!("{file}, line {place}: {}", error.message().lines().next().unwrap_or_default()))
        })?;
        let mut machine = Machine::open(&arguments.machine)?;
        let mut platform = machine.detector.detect(machine.ordinal);
        let none = platform.model() == MemoryModel::HostOnly && machine.simulated.is_none();
        if none {
            machine = Machine::built_in(STAND_IN)?;
            platform = machine.detector.detect(machine.ordinal);
        }
        let advice = workload.advise(&platform).map_err(|error| Failure::usage(format!("{file}: {error}")))?;
        if let Some(svg) = &arguments.svg {
            draw(&advice, &workload.name, svg)
                .map_err(|error| Failure::other(format!("{}: {error}", svg.display())))?;
        }
        if arguments.json {
            let mut json = serde_json::to_value(&advice).map_err(|error| Failure::other(error.to_string()))?;
            json["workload"] = workload.name.into();
            json["device"] = platform.name().into();
            json["driver"] = machine.driver(&platform).into();
            print(json);
        } else {
            if none {
                print("there is no GPU here: this is for a simulated one; --simulate names another");
            }
            print(format_args!("{} on {} ({})", workload.name, platform.name(), platform.model()));
            print(advice.to_string().trim_end());
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// The curve, and the chosen point.
fn draw(advice: &OffloadAdvice, name: &str, path: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(path, (720, 420)).into_drawing_area();
    root.fill(&WHITE)?;
    let most = advice.curve.iter().map(|point| point.gain).fold(advice.gain, f64::max).max(1.0) * 1.1;
    let mut chart = ChartBuilder::on(&root)
        .caption(format!("{name}: {}", advice.verdict), ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d(0.0..1.0f64, 0.0..most)?;
    chart.configure_mesh().x_desc("fraction of the weights in host memory").y_desc("throughput").draw()?;
    // Where nothing fits there is no throughput.
    let points = advice.curve.iter().filter(|point| point.gain > 0.0).map(|point| (point.fraction, point.gain));
    chart.draw_series(LineSeries::new(points, &BLUE))?;
    if let Some(choice) = &advice.choice {
        chart.draw_series([Circle::new((choice.fractions.weights, choice.gain), 5, RED.filled())])?;
    }
    root.present()?;
    Ok(())
}
