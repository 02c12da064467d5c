//! Detection: ask the driver, try the routes, read the system's files.
#![deny(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::CudaContext;

use super::{Forced, MemoryFigures, Platform};
use crate::calibrate::{Wish, default_folder};
use crate::driver::probe::{self, Primary};
use crate::error::Result;
use crate::plan::Strategy;

/// The variable that calibrates every device.
const CALIBRATE_VARIABLE: &str = "TRANSFER_TENSOR_CALIBRATE";

/// The variable that forces a strategy.
const STRATEGY_VARIABLE: &str = "TRANSFER_TENSOR_STRATEGY";

/// Detects platforms.
///
/// ```
/// use transfer_tensor::{Detector, Strategy};
/// let platform = Detector::new().strategy(Strategy::Host).detect(0);
/// println!("{platform}");
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct Detector {
    fs_root: PathBuf,
    strategy: Option<Strategy>,
    environment: bool,
    probe: bool,
    cache: Option<PathBuf>,
}

impl Default for Detector {
    fn default() -> Self {
        Self { fs_root: PathBuf::from("/"), strategy: None, environment: true, probe: true, cache: None }
    }
}

impl Detector {
    /// Reads the real system, tries every route, heeds `TRANSFER_TENSOR_STRATEGY`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads `/proc` and `/sys` below another root: a container's view, or a simulated host.
    pub fn fs_root(mut self, root: impl Into<PathBuf>) -> Self {
        self.fs_root = root.into();
        self
    }

    /// Forces a strategy; beats the environment.
    pub fn strategy(mut self, strategy: impl Into<Option<Strategy>>) -> Self {
        self.strategy = strategy.into();
        self
    }

    /// Heed `TRANSFER_TENSOR_STRATEGY` and `TRANSFER_TENSOR_CALIBRATE` (the default) or not.
    pub fn environment(mut self, heed: bool) -> Self {
        self.environment = heed;
        self
    }

    /// Where [calibrations](crate::Device::calibrate) are kept, instead of `$XDG_CACHE_HOME` or `~/.cache`.
    pub fn cache_folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache = Some(folder.into());
        self
    }

    /// Try each zero-copy route once (the default), or believe the attributes.
    pub fn probe(mut self, probe: bool) -> Self {
        self.probe = probe;
        self
    }

    /// Detects device `ordinal`. Retains its primary context for the time of the call and leaves the calling thread's
    /// current context as it was. Never fails: the answer is host-only, with the reason as a note.
    pub fn detect(&self, ordinal: usize) -> Platform {
        let facts = Primary::retain(ordinal).and_then(|primary| probe::facts(primary.device(), ordinal, self.probe));
        self.platform(facts)
    }

    /// Detects the device of the caller's context, in that context; no other is retained. Never fails, as
    /// [`detect`](Self::detect).
    ///
    /// Freeing what the probe allocated may wait for work that is queued in the context. Detect before the work starts,
    /// keep the platform, or turn [`probe`](Self::probe) off.
    pub fn detect_in(&self, context: &Arc<CudaContext>) -> Platform {
        self.platform(probe::facts_in(context, self.probe))
    }

    /// Detects every device that the process sees; one host-only platform if there is none.
    pub fn detect_all(&self) -> Vec<Platform> {
        match probe::device_count() {
            Ok(0) => vec![self.host_only("the driver sees no device")],
            Ok(count) => (0..count).map(|ordinal| self.detect(ordinal)).collect(),
            Err(error) => vec![self.host_only(error.to_string())],
        }
    }

    /// How many devices the driver sees.
    ///
    /// # Errors
    /// There is no usable driver.
    pub fn device_count() -> Result<usize> {
        probe::device_count()
    }

    fn platform(&self, facts: Result<super::Facts>) -> Platform {
        match facts {
            Ok(facts) => {
                let mut platform = Platform::from_facts(facts, self.fs_root.clone());
                platform.forced = self.forced();
                platform
            }
            Err(error) => self.host_only(error.to_string()),
        }
    }

    fn host_only(&self, reason: impl Into<String>) -> Platform {
        let mut platform = Platform::host_only(reason);
        platform.fs_root.clone_from(&self.fs_root);
        platform.forced = self.forced();
        platform
    }

    fn forced(&self) -> Forced {
        forced(self.strategy, self.variable(STRATEGY_VARIABLE))
    }

    fn variable(&self, name: &str) -> Option<String> {
        let value = || std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        if self.environment { value() } else { None }
    }

    /// Whether the environment wants every device to be calibrated.
    pub(crate) fn calibrate(&self) -> Wish {
        Wish::parse(self.variable(CALIBRATE_VARIABLE).as_deref())
    }

    /// Where calibrations are kept.
    pub(crate) fn cache(&self) -> Option<PathBuf> {
        self.cache.clone().or_else(default_folder)
    }
}

fn forced(builder: Option<Strategy>, environment: Option<String>) -> Forced {
    match (builder, environment.as_deref().map(str::trim)) {
        (Some(strategy), _) => Forced::Builder(strategy),
        (None, None | Some("" | "auto")) => Forced::No,
        (None, Some(word)) => match crate::plan::kinds::strategy_variable(word) {
            Ok(strategy) => Forced::Environment(strategy),
            Err(error) => Forced::Bad(error),
        },
    }
}

impl Platform {
    /// How much memory there is now, asked in the device's primary context (which is created for the call if nobody holds
    /// it). Never fails: what could not be asked becomes a note.
    pub fn memory(&self) -> MemoryFigures {
        let Some(ordinal) = self.ordinal else { return self.figures_without_driver() };
        let driver = Primary::retain(ordinal).map(|_primary| probe::memory(self.total_bytes));
        self.figures_from(Some(&probe::or_failed(driver, self.total_bytes)))
    }

    /// [`memory`](Self::memory), asked in the caller's context.
    pub fn memory_in(&self, context: &Arc<CudaContext>) -> MemoryFigures {
        if self.ordinal.is_none() {
            return self.figures_without_driver();
        }
        self.figures_from(Some(&probe::or_failed(probe::memory_in(context, self.total_bytes), self.total_bytes)))
    }

    fn figures_without_driver(&self) -> MemoryFigures {
        if self.model == super::MemoryModel::HostOnly {
            return self.figures_from(None);
        }
        // A platform from attributes: everything is free, and this host is not its host.
        MemoryFigures::new(self.total_bytes, self.total_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_builder_beats_the_environment_and_a_bad_word_fails_every_plan() {
        let env = |word: &str| Some(word.to_owned());
        assert!(matches!(forced(Some(Strategy::Host), env("streamed")), Forced::Builder(Strategy::Host)));
        assert!(matches!(forced(None, env("streamed")), Forced::Environment(Strategy::Streamed)));
        assert!(matches!(forced(None, env(" auto ")), Forced::No));
        assert!(matches!(forced(None, None), Forced::No));
        let Forced::Bad(error) = forced(None, env("zerocopy")) else { panic!("it is no strategy") };
        let text = error.to_string();
        assert!(text.contains("TRANSFER_TENSOR_STRATEGY") && text.contains("zero-copy"), "{text}");
    }
}
