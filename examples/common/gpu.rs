//! What the examples run on that need a GPU: one, or a simulated one where there is none.

use std::process::{Command, ExitCode};
use std::sync::Arc;

use serde_json::{Value, json};
use transfer_tensor::cudarc::driver::{CudaContext, CudaStream, result::DriverError};
use transfer_tensor::{Detector, Device};

use super::{Failure, Machine, MachineArgs, print};

/// Where there is no GPU.
const SIMULATED: &str = "x86_h200_sxm_gen5";

/// A device to work on.
#[derive(Debug)]
pub struct Gpu {
    pub device: Device,
    pub stream: Arc<CudaStream>,
    machine: Machine,
    note: Option<String>,
}

/// Runs `main` with the GPU that the arguments name. Where there is none, that is with a simulated H200 in a process of
/// its own, which is told why with `--no-gpu`: a process has one driver, and here that may be a library which is loaded
/// already and sees no device.
pub fn run(
    args: &MachineArgs,
    no_gpu: Option<&str>,
    json: bool,
    main: impl FnOnce(&Gpu) -> Result<(), Failure>,
) -> Result<ExitCode, Failure> {
    if args.simulate.is_none() && args.profile.is_none() {
        match Detector::device_count() {
            Ok(0) => return simulated("the driver sees no device"),
            Ok(_) => {}
            Err(error) => return simulated(&error.to_string()),
        }
    }
    let gpu = Gpu::open(args, no_gpu)?;
    if let (Some(note), false) = (&gpu.note, json) {
        print(note);
    }
    main(&gpu)?;
    match gpu.machine.simulated.as_ref().and_then(|device| device.violations().into_iter().next()) {
        Some(violation) => Err(Failure::other(format!("the simulated driver objects: {violation}"))),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn simulated(why: &str) -> Result<ExitCode, Failure> {
    let failed = |error| Failure::other(format!("{SIMULATED}: no process for it: {error}"));
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(std::env::args_os().skip(1)).args(["--simulate", SIMULATED, "--no-gpu", why]);
    let code = command.status().map_err(failed)?.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(super::FAILURE)))
}

impl Gpu {
    fn open(args: &MachineArgs, no_gpu: Option<&str>) -> Result<Self, Failure> {
        let machine = Machine::open(args)?;
        let context = CudaContext::new(machine.ordinal).map_err(|error| refused("making a context", error))?;
        // Not the legacy default stream, which copies on other streams would wait for.
        let stream = context.new_stream().map_err(|error| refused("making a stream", error))?;
        let device = Device::with_detector(&stream, &machine.detector)?;
        let note = no_gpu.map(|why| format!("no GPU here ({why}); this is a simulated machine"));
        Ok(Self { device, stream, machine, note })
    }

    /// Waits for the stream.
    pub fn wait(&self) -> Result<(), Failure> {
        self.stream.synchronize().map_err(|error| refused("waiting for the device", error))
    }

    pub fn is_simulated(&self) -> bool {
        self.machine.simulated.is_some()
    }

    /// The machine, for people.
    pub fn title(&self) -> String {
        format!("{}{}", self.device.platform().name(), if self.is_simulated() { " (simulated)" } else { "" })
    }

    /// What the times are of.
    pub fn clock(&self) -> &'static str {
        if self.is_simulated() {
            "wall clock of the simulation: the CPU does the device's work, these are no figures of a GPU"
        } else {
            "wall clock"
        }
    }

    /// `more` with what is said of every run.
    pub fn json(&self, more: Value) -> Value {
        let mut all = json!({
            "driver": self.machine.driver(self.device.platform()),
            "profile": self.machine.simulated.as_ref().map(|device| device.profile_key().to_owned()),
            "device": self.device.platform().name(),
            "note": self.note,
            "clock": self.clock(),
        });
        if let (Value::Object(all), Value::Object(more)) = (&mut all, more) {
            all.extend(more);
        }
        all
    }
}

/// By number: cudarc's text of an error is another driver call.
pub fn refused(what: &str, error: DriverError) -> Failure {
    Failure::other(format!("{what} failed: {:?}", error.0))
}
