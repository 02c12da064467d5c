//! Measuring a device, so that plans and copies fit the machine at hand instead of its kind.
//!
//! [`Device::calibrate`] copies for a while (nothing new begins after 420 ms), works out figures ([`evaluate`](self::evaluate), pure) and keeps
//! them on disk. No kernel runs: how fast the GPU reads memory in place is not measured.
#![deny(unsafe_code)]

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime};

use parking_lot::Mutex;

use crate::device::Device;
use crate::driver::{Driver, Stream};
use crate::error::{Error, Result};
use crate::plan::{Figures, Rate, Tuning};
use crate::platform::{MemoryModel, Platform, Topology};

#[cfg_attr(not(feature = "serde"), allow(dead_code, reason = "nothing is kept without it"))]
mod cache;
mod evaluate;
mod sampling;
#[cfg(test)]
mod tests;

pub(crate) use cache::{Key, default_folder};

/// What was measured on a device. Rates are in GB/s (10⁹ bytes a second), times in seconds.
///
/// Every figure is finite and positive, and none is more than the device's link can carry: one that was is cut, and the
/// [`notes`](Calibration::notes) say so.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Calibration {
    /// The device's name. For people.
    pub device: String,
    /// The GPU's UUID (of the slice, under MIG), as 32 hexadecimal digits; empty where the driver tells none.
    pub gpu_uuid: String,
    /// The kernel driver's version and the CUDA version that the driver supports.
    pub driver: String,
    /// This crate's version.
    pub crate_version: String,
    /// When, in seconds since 1970.
    pub unix_time: u64,
    /// How long measuring took.
    pub took_seconds: f64,
    /// Where the device sits, with its link as it was under load.
    pub topology: Topology,
    /// Copy from page-locked host memory to the device, alone.
    pub host_to_device: f64,
    /// Copy from the device to page-locked host memory, alone.
    pub device_to_host: f64,
    /// Both directions at once, together.
    pub both_ways: Option<f64>,
    /// How long a copy of 4 KiB, either way, takes the device: what a copy costs however small it is.
    pub small_copy: Option<f64>,
    /// How long the caller waits for a copy of 4 KiB to the device.
    pub latency_to_device: Option<f64>,
    /// How long the caller waits for a copy of 4 KiB from the device.
    pub latency_to_host: Option<f64>,
    /// Copy from ordinary memory to the device, through page-locked memory.
    pub pageable_to_device: Option<f64>,
    /// Copy from the device to ordinary memory that was touched before, through page-locked memory.
    pub device_to_pageable: Option<f64>,
    /// Copy from ordinary memory to the device, the driver's own way.
    pub driver_pageable_to_device: Option<f64>,
    /// Copy from the device to ordinary memory, the driver's own way.
    pub driver_device_to_pageable: Option<f64>,
    /// Copying on the host, by the number of threads.
    pub memcpy: Vec<Scaling>,
    /// The settings that were best.
    pub tuning: Tuning,
    /// What was cut, left out or could not be kept, and why.
    pub notes: Vec<String>,
    /// The file it was read from; `None` if it was measured just now.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub cached_in: Option<PathBuf>,
}

/// How fast so many threads copy on the host.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Scaling {
    /// How many.
    pub threads: usize,
    /// Together, in GB/s.
    pub gbs: f64,
}

impl Calibration {
    /// `base` with what was measured in place of what was built in. Rates in place over a link, which are not measured, are
    /// scaled as the link's.
    pub(crate) fn figures(&self, base: &Figures, model: MemoryModel) -> Figures {
        let mut figures = base.clone();
        figures.source = format!("measured on this device; what was not, {}", base.source);
        let known = |figure: Option<f64>, base: Rate| figure.map_or(base, Rate::known);
        figures.host_to_device = Rate::known(self.host_to_device);
        figures.device_to_host = Rate::known(self.device_to_host);
        figures.pageable_to_device = known(self.pageable_to_device, base.pageable_to_device);
        figures.device_to_pageable = known(self.device_to_pageable, base.device_to_pageable);
        figures.driver_pageable_to_device = known(self.driver_pageable_to_device, base.driver_pageable_to_device);
        figures.driver_device_to_pageable = known(self.driver_device_to_pageable, base.driver_device_to_pageable);
        if model == MemoryModel::Coherent {
            // Nothing is staged there.
            figures.pageable_to_device = figures.driver_pageable_to_device;
            figures.device_to_pageable = figures.driver_device_to_pageable;
        }
        figures.copy_latency = self.small_copy.unwrap_or(base.copy_latency);
        let alone = self.memcpy.iter().find(|scaling| scaling.threads == 1).map(|scaling| scaling.gbs);
        figures.host_copy = known(alone, base.host_copy);
        if matches!(model, MemoryModel::Coherent | MemoryModel::Hmm | MemoryModel::Discrete) {
            let scaled = |rate: Rate, now: f64, then: f64| {
                let ratio = now / then;
                // Published figures stand where the link is as published.
                if (0.95..=1.05).contains(&ratio) { rate } else { rate.times(ratio) }
            };
            let (up, down) = (self.host_to_device, self.device_to_host);
            figures.read_in_place = base.read_in_place.map(|rate| scaled(rate, up, base.host_to_device.gbs));
            figures.write_in_place = base.write_in_place.map(|rate| scaled(rate, down, base.device_to_host.gbs));
        }
        figures
    }

    /// Whether it is of this device and one that a machine can have: for what comes from outside.
    #[cfg(feature = "serde")]
    pub(crate) fn is_sound(&self, key: &Key, ceiling: &crate::platform::Ceiling) -> bool {
        let same = self.gpu_uuid == key.uuid && self.driver == key.driver && self.crate_version == key.version;
        let within = |most: f64| move |number: &f64| number.is_finite() && *number > 0.0 && *number <= most * 1.000_001;
        let one_way = [Some(self.host_to_device), Some(self.device_to_host)].into_iter().chain([
            self.pageable_to_device,
            self.device_to_pageable,
            self.driver_pageable_to_device,
            self.driver_device_to_pageable,
        ]);
        let times = [self.small_copy, self.latency_to_device, self.latency_to_host, Some(self.took_seconds)];
        same && one_way.flatten().all(|rate| within(ceiling.gbs)(&rate))
            && self.both_ways.iter().all(within(2.0 * ceiling.gbs))
            && times.iter().flatten().all(within(60.0))
            && self.memcpy.iter().all(|scaling| within(evaluate::FASTEST_MEMCPY)(&scaling.gbs) && scaling.threads > 0)
            && evaluate::CHUNKS.contains(&self.tuning.chunk)
            && [self.tuning.threads, self.tuning.busy_threads].iter().all(|threads| evaluate::THREADS.contains(threads))
            && self.memcpy.len() <= 64
            && self.notes.len() <= 256
    }
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "link {:.1} GB/s to the device, {:.1} back", self.host_to_device, self.device_to_host)?;
        if let Some(both) = self.both_ways {
            write!(f, ", {both:.1} both ways at once")?;
        }
        if let (Some(up), Some(down)) = (self.latency_to_device, self.latency_to_host) {
            write!(f, "; 4 KiB in {:.1} µs, {:.1} back", up * 1e6, down * 1e6)?;
        }
        if let Some(small) = self.small_copy {
            write!(f, ", of which the device takes {:.1}", small * 1e6)?;
        }
        for (what, up, down) in [
            ("pageable, staged", self.pageable_to_device, self.device_to_pageable),
            ("pageable, by the driver", self.driver_pageable_to_device, self.driver_device_to_pageable),
        ] {
            if let (Some(up), Some(down)) = (up, down) {
                write!(f, "; {what}: {up:.1} GB/s, {down:.1} back")?;
            }
        }
        if !self.memcpy.is_empty() {
            f.write_str("; on the host:")?;
            for scaling in &self.memcpy {
                write!(f, " {:.1} GB/s by {}", scaling.gbs, scaling.threads)?;
            }
        }
        let Tuning { chunk, threads, crossover_up, crossover_down, .. } = self.tuning;
        write!(f, "; staged by {threads} in pieces of {} KiB, from ", chunk >> 10)?;
        let size = |bytes: usize| match bytes {
            usize::MAX => "no size".to_owned(),
            bytes => format!("{} KiB", bytes >> 10),
        };
        write!(f, "{} up, {} down", size(crossover_up), size(crossover_down))
    }
}

/// When a device is calibrated without being asked to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Wish {
    #[default]
    No,
    /// Use what the cache has, else measure.
    Yes,
    /// Measure, whatever the cache has.
    Force,
    /// A word that is none of those.
    Unknown(String),
}

impl Wish {
    /// From the text of `TRANSFER_TENSOR_CALIBRATE`.
    pub(crate) fn parse(text: Option<&str>) -> Self {
        match text.map(|text| text.trim().to_ascii_lowercase()).as_deref() {
            None | Some("" | "0" | "off" | "no" | "false") => Self::No,
            Some("1" | "on" | "yes" | "true") => Self::Yes,
            Some("force") => Self::Force,
            Some(other) => Self::Unknown(other.chars().take(64).collect()),
        }
    }
}

/// What a [`Device`] holds of its calibration.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// Set once, so that what was read from it stays true.
    adopted: OnceLock<Adopted>,
    /// Held while one thread measures.
    measuring: Mutex<()>,
    #[cfg_attr(not(feature = "serde"), allow(dead_code, reason = "nothing is kept without it"))]
    folder: Option<PathBuf>,
}

#[derive(Debug)]
struct Adopted {
    calibration: Arc<Calibration>,
    platform: Platform,
}

impl State {
    /// `folder`: where calibrations are kept; `None`: nowhere.
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, ..Self::default() }
    }

    pub(crate) fn platform(&self) -> Option<&Platform> {
        self.adopted.get().map(|adopted| &adopted.platform)
    }

    pub(crate) fn tuning(&self) -> Option<Tuning> {
        self.adopted.get().map(|adopted| adopted.calibration.tuning)
    }
}

impl Device {
    /// Measures this device's link and this host's memory, or reads what was measured earlier from the cache on disk; from
    /// then on all plans and copies of this device, whichever handle they are made through, use it. A device is calibrated once:
    /// further calls return the same.
    ///
    /// Measuring blocks; it is to take no more than half a second, and begins nothing new after 420 ms. It copies on streams of its own, with up to 320 MiB of host memory
    /// (64 of them page-locked) and 256 MiB of device memory, which it frees; freeing may wait for all work of the context.
    /// Work that runs meanwhile, here or in another process, makes the figures worse: calibrate at the start.
    ///
    /// The cache is `$XDG_CACHE_HOME` or `~/.cache`, folder `transfer-tensor` (or
    /// [`Detector::cache_folder`](crate::Detector::cache_folder)), one file for each GPU, driver and version of this crate. A file
    /// that is not sound is passed over and replaced; where none can be written, the [`notes`](Calibration::notes) say so. Without the
    /// feature `serde` nothing is kept.
    ///
    /// With `TRANSFER_TENSOR_CALIBRATE=1` in the environment every device is calibrated when it is made, with `force` whatever
    /// the cache has; errors then become a note of the platform.
    ///
    /// # Errors
    /// No driver, a forked child, the device's stream is being captured, no room, or a driver call that was refused. The
    /// device goes on with what it had.
    ///
    /// ```
    /// # cuda_sim::install().unwrap();
    /// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
    /// # let ordinal = gpu.ordinal();
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path();
    /// use transfer_tensor::{Detector, Device, cudarc::driver::CudaContext};
    ///
    /// let stream = CudaContext::new(ordinal)?.default_stream();
    /// let device = Device::with_detector(&stream, &Detector::new().cache_folder(folder))?;
    /// let measured = device.calibrate()?;
    /// println!("{measured}");
    /// assert!(measured.host_to_device > 0.0);
    /// assert_eq!(device.tuning(), measured.tuning);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn calibrate(&self) -> Result<Calibration> {
        self.calibrated(false).map(|calibration| (*calibration).clone())
    }

    /// What this device was calibrated with, if it was.
    pub fn calibration(&self) -> Option<&Calibration> {
        self.calibration_state().adopted.get().map(|adopted| &*adopted.calibration)
    }

    /// `force`: whatever the cache has.
    pub(crate) fn calibrated(&self, force: bool) -> Result<Arc<Calibration>> {
        Driver::get()?;
        let state = self.calibration_state();
        let _measuring = state.measuring.lock();
        if let Some(adopted) = state.adopted.get() {
            return Ok(adopted.calibration.clone());
        }
        let platform = self.platform();
        let cuda = platform.driver_version().unwrap_or(0);
        let driver = match platform.kernel_driver() {
            Some(kernel) => format!("{kernel}_{cuda}"),
            None => cuda.to_string(),
        };
        let key = Key::new(platform.uuid(), driver.clone());
        let calibration = match self.cached(key.as_ref()).filter(|_| !force) {
            Some(calibration) => calibration,
            None => {
                let mut fresh = self.measured(driver)?;
                self.keep(key.as_ref(), &mut fresh);
                fresh
            }
        };
        let calibration = Arc::new(calibration);
        let platform = platform.clone().with_calibration(calibration.clone());
        let adopted = state.adopted.get_or_init(|| Adopted { calibration, platform });
        Ok(adopted.calibration.clone())
    }

    fn measured(&self, driver: String) -> Result<Calibration> {
        {
            let _bound = self.context().to_submit()?;
            Stream::of_caller(self.stream()).check_not_capturing("calibrating")?;
        }
        let begun = Instant::now();
        let samples = sampling::measure(self)?;
        let platform = self.platform();
        let found = evaluate::evaluate(&samples, &platform.ceiling(), self.tuning());
        let unusable = || Error::unsupported("calibration", "the driver's clock gives no times");
        let topology = platform.topology_now();
        let mut notes = found.notes;
        if topology.link_is_at_maximum() == Some(false) {
            notes.push(format!("the PCIe link is below its maximum: {}", topology.link().unwrap_or_default()));
        }
        Ok(Calibration {
            device: platform.name().to_owned(),
            gpu_uuid: platform.uuid().unwrap_or_default().to_owned(),
            driver,
            crate_version: env!("CARGO_PKG_VERSION").into(),
            unix_time: SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            took_seconds: begun.elapsed().as_secs_f64(),
            topology,
            host_to_device: found.up.ok_or_else(unusable)?,
            device_to_host: found.down.ok_or_else(unusable)?,
            both_ways: found.both,
            small_copy: found.small,
            latency_to_device: found.latency_up,
            latency_to_host: found.latency_down,
            pageable_to_device: found.staged_up,
            device_to_pageable: found.staged_down,
            driver_pageable_to_device: found.driver_up,
            driver_device_to_pageable: found.driver_down,
            memcpy: found.memcpy,
            tuning: found.tuning,
            notes,
            cached_in: None,
        })
    }

    #[cfg(feature = "serde")]
    fn cached(&self, key: Option<&Key>) -> Option<Calibration> {
        let folder = self.calibration_state().folder.as_deref()?;
        cache::load(folder, key?, &self.platform().ceiling())
    }

    /// Keeps it on disk, or notes why not.
    #[cfg(feature = "serde")]
    fn keep(&self, key: Option<&Key>, calibration: &mut Calibration) {
        let why = match (self.calibration_state().folder.as_deref(), key) {
            (_, None) => "the GPU has no UUID".to_owned(),
            (None, _) => "there is no cache folder: neither XDG_CACHE_HOME nor HOME is an absolute path".to_owned(),
            (Some(folder), Some(key)) => match cache::store(folder, key, calibration) {
                Ok(()) => return,
                Err(error) => format!("{}: {error}", cache::path(folder, key).display()),
            },
        };
        calibration.notes.push(format!("not kept on disk: {why}"));
    }

    #[cfg(not(feature = "serde"))]
    fn cached(&self, _key: Option<&Key>) -> Option<Calibration> {
        None
    }

    #[cfg(not(feature = "serde"))]
    fn keep(&self, _key: Option<&Key>, calibration: &mut Calibration) {
        calibration.notes.push("not kept on disk: built without the feature `serde`".into());
    }
}
