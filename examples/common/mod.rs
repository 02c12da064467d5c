//! What the examples share: which machine to run on, and how to say what went wrong.
#![allow(dead_code, unreachable_pub, reason = "each example uses a part, as a module of its own")]

pub mod gpu;
pub mod made;
#[cfg(feature = "safetensors")]
pub mod rows_file;
#[cfg(feature = "safetensors")]
pub mod sample;
pub mod steps;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser};
use cuda_sim::profile::{BUILTIN_TOML, Profile};
use cuda_sim::{Device, DeviceBuilder};
use indicatif::{ProgressBar, ProgressStyle};
use transfer_tensor::{Detector, Platform};

/// A bad argument.
pub const USAGE: u8 = 2;
/// Any other failure.
pub const FAILURE: u8 = 1;

/// What went wrong, in one line, and the exit code that says so.
#[derive(Debug)]
pub struct Failure {
    pub code: u8,
    pub line: String,
}

impl Failure {
    pub fn usage(line: impl ToString) -> Self {
        Self { code: USAGE, line: one_line(&line.to_string()) }
    }

    pub fn other(line: impl ToString) -> Self {
        Self { code: FAILURE, line: one_line(&line.to_string()) }
    }
}

impl From<transfer_tensor::Error> for Failure {
    fn from(error: transfer_tensor::Error) -> Self {
        if error.is_invalid_input() { Self::usage(error) } else { Self::other(error) }
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Parses the arguments, runs, and turns a failure into one line on stderr.
pub fn run<P: Parser>(main: impl FnOnce(P) -> Result<ExitCode, Failure>) -> ExitCode {
    let arguments = match P::try_parse() {
        Ok(arguments) => arguments,
        Err(error) if error.use_stderr() => {
            // clap's text goes on with tips and usage; its first paragraph names what is wrong.
            let text = error.to_string();
            let line = text.split("\n\n").next().unwrap_or(&text);
            return report(&Failure::usage(line.strip_prefix("error: ").unwrap_or(line)));
        }
        Err(help) => {
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
    };
    main(arguments).unwrap_or_else(|failure| report(&failure))
}

fn report(failure: &Failure) -> ExitCode {
    eprintln!("error: {}", failure.line);
    ExitCode::from(failure.code)
}

/// Which machine to run on.
#[derive(Debug, Clone, Default, Args)]
pub struct MachineArgs {
    /// Number of the device, as CUDA counts
    #[arg(long, value_name = "N", default_value_t = 0, allow_hyphen_values = true)]
    pub device: usize,
    /// Run on a simulated machine: the name of a built-in profile
    #[arg(long, value_name = "PROFILE", conflicts_with = "profile")]
    pub simulate: Option<String>,
    /// Run on a simulated machine described in a file
    #[arg(long, value_name = "FILE.toml:NAME", value_parser = file_and_name)]
    pub profile: Option<(PathBuf, String)>,
}

fn file_and_name(text: &str) -> Result<(PathBuf, String), String> {
    match text.rsplit_once(':') {
        Some((file, name)) if !file.is_empty() && !name.is_empty() => Ok((file.into(), name.into())),
        _ => Err("it must be FILE.toml:NAME".into()),
    }
}

/// The machine an example runs on.
#[derive(Debug)]
pub struct Machine {
    /// Detects its platform; a simulated machine has its own `/proc` and `/sys`.
    pub detector: Detector,
    /// CUDA's number of the device.
    pub ordinal: usize,
    /// The simulated device; kept alive with its files and its evidence.
    pub simulated: Option<Device>,
}

impl Machine {
    /// The machine that the arguments name.
    pub fn open(args: &MachineArgs) -> Result<Self, Failure> {
        let (text, key, file) = match (&args.simulate, &args.profile) {
            (Some(key), _) => (BUILTIN_TOML.to_owned(), key.as_str(), None),
            (None, Some((file, key))) => {
                let text = std::fs::read_to_string(file)
                    .map_err(|error| Failure::usage(format!("{}: {error}", file.display())))?;
                (text, key.as_str(), Some(file))
            }
            (None, None) => return Self::real(args.device),
        };
        if args.device != 0 {
            return Err(Failure::usage(format!("device {}: a simulated machine has only device 0", args.device)));
        }
        match file {
            None => Profile::builtin(key),
            Some(file) => Profile::from_file(file, key),
        }
        .map_err(Failure::usage)?;
        Self::simulated(DeviceBuilder::from_toml(&text, key))
    }

    /// A built-in simulated machine.
    pub fn built_in(key: &str) -> Result<Self, Failure> {
        Self::simulated(DeviceBuilder::new(key))
    }

    fn simulated(builder: DeviceBuilder) -> Result<Self, Failure> {
        let device = builder.build().map_err(Failure::other)?;
        Ok(Self {
            detector: Detector::new().fs_root(device.host_root()),
            ordinal: device.ordinal(),
            simulated: Some(device),
        })
    }

    fn real(device: usize) -> Result<Self, Failure> {
        // Without a driver any device number is as good as another: the answer is host-only.
        if let Ok(count) = Detector::device_count()
            && device != 0
            && device >= count
        {
            return Err(Failure::usage(format!("device {device}: the driver sees {count} device(s), from 0")));
        }
        Ok(Self { detector: Detector::new(), ordinal: device, simulated: None })
    }

    /// `cuda`, `simulated` or `none`.
    pub fn driver(&self, platform: &Platform) -> &'static str {
        match (&self.simulated, platform.ordinal()) {
            (Some(_), _) => "simulated",
            (None, Some(_)) => "cuda",
            (None, None) => "none",
        }
    }
}

/// Opens a model: a path at which there is none is a bad argument, one that does not hold together is not.
#[cfg(feature = "safetensors")]
pub fn open(path: &std::path::Path) -> Result<transfer_tensor::Checkpoint, Failure> {
    transfer_tensor::Checkpoint::open(path)
        .map_err(|error| if error.is_file() { Failure::usage(error) } else { Failure::other(error) })
}

/// A bar on a terminal, nothing elsewhere.
pub fn progress(bytes: u64, wanted: bool) -> ProgressBar {
    // On stderr; it stays hidden where that is no terminal.
    if !wanted {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {elapsed} {msg}");
    ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// A text from a file as it may go to a terminal: control and formatting characters are escaped.
pub fn printable(text: &str) -> String {
    let mut shown = String::new();
    for c in text.chars() {
        match c {
            '"' | '\'' | '\\' => shown.push(c),
            c => shown.extend(c.escape_debug()),
        }
    }
    shown
}

/// A number of bytes: plain, or with a unit (`256MiB`, `4k`, `1GB`). `k`, `M`, `G`, `T` alone count in 1024.
pub fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| format!("it must be a whole number from 0 to {}", u64::MAX))?;
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err("known units are k, M, G, T, KiB, MiB, GiB, TiB, kB, MB, GB, TB".into()),
    };
    number.checked_mul(factor).ok_or_else(|| format!("it must not exceed {}", u64::MAX))
}

/// Bytes for people.
pub fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 => format!("{:.1} GiB", b as f64 / f64::from(1 << 30)),
        b if b >= 1 << 20 => format!("{:.1} MiB", b as f64 / f64::from(1 << 20)),
        b if b >= 1 << 10 => format!("{:.1} KiB", b as f64 / 1024.0),
        b => format!("{b} B"),
    }
}

/// A time for people.
pub fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}

/// Writes to stdout; a closed pipe ends the writing, not the program.
pub fn print(text: impl std::fmt::Display) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}
