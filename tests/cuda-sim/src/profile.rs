//! What a simulated machine is: attributes, memory, speeds, and which calls fail and how.
//!
//! A profile is plain data read from a TOML file. This half is pure: it opens nothing (but
//! [`Profile::from_file`]), starts nothing and knows no driver state.

mod attributes;
mod build;
mod error;
mod section;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use toml::{Table, Value};

use crate::host::HostFigures;

pub use attributes::id as attribute_id;
/// Numbers of the attributes that this crate's own rules read.
pub mod attribute {
    pub use super::attributes::{
        ASYNC_ENGINE_COUNT, CAN_USE_HOST_POINTER, CC_MAJOR, CC_MINOR, CONCURRENT_MANAGED_ACCESS, DIRECT_MANAGED_ACCESS,
        HOST_NUMA_ID, HOST_REGISTER_SUPPORTED, INTEGRATED, MANAGED_MEMORY, MEMORY_POOLS_SUPPORTED, NUMA_CONFIG,
        NUMA_ID, PAGEABLE_MEMORY_ACCESS, READ_ONLY_HOST_REGISTER, USES_HOST_PAGE_TABLES,
    };
}
pub use error::ProfileError;

use error::shown;

/// The built-in profiles, as text: a starting point for one's own file.
pub const BUILTIN_TOML: &str = include_str!("../profiles.toml");

/// `CUDA_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: u32 = 801;

/// One simulated machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// The name it is asked for by.
    pub key: String,
    /// What `cuDeviceGetName` answers.
    pub name: String,
    /// Where it runs, in words; only the host tree reads it.
    pub os: String,
    /// What `cuDriverGetVersion` answers, e.g. 13000.
    pub driver_version: i32,
    /// Attribute number → value; a number that is not here is `CUDA_ERROR_INVALID_VALUE`.
    pub attributes: BTreeMap<i32, i32>,
    /// Device memory in bytes.
    pub total_mem: u64,
    /// Speeds that drive the virtual clock.
    pub bandwidth: Bandwidth,
    /// What fails, and how memory behaves.
    pub behaviour: Behaviour,
    /// The host beside the device.
    pub host: HostFigures,
}

/// Speeds in GB/s (10⁹ bytes), filled in where the file is silent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bandwidth {
    /// Copy engine, pinned host memory to device.
    pub h2d_pinned: f64,
    /// Copy engine, device to pinned host memory.
    pub d2h_pinned: f64,
    /// The driver's own path for pageable memory, to the device.
    pub h2d_pageable: f64,
    /// The driver's own path for pageable memory, from the device.
    pub d2h_pageable: f64,
    /// Cap on both directions together, where there is one.
    pub bidirectional_total: Option<f64>,
    /// The device's own memory.
    pub dram: f64,
    /// A kernel reading mapped host memory.
    pub kernel_read_host: f64,
    /// What one copy costs before its first byte, in microseconds.
    pub latency_us: f64,
    /// One CPU thread's `memcpy`.
    pub cpu_memcpy: f64,
}

/// What fails and how memory behaves.
// Independent facts about a machine, each named in the file: an enum would only hide them.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Behaviour {
    /// `cuMemHostRegister` answers this.
    pub host_register_error: Option<u32>,
    /// `cuMemHostAlloc` answers this.
    pub host_alloc_error: Option<u32>,
    /// `cuMemAllocManaged` answers this.
    pub managed_error: Option<u32>,
    /// More pinned memory than this, in all, is `CUDA_ERROR_OUT_OF_MEMORY`.
    pub pinned_limit_bytes: Option<u64>,
    /// The GPU's L2 keeps lines of pinned host memory.
    pub gpu_l2_caches_pinned: bool,
    /// The GPU's L2 keeps lines of managed memory.
    pub gpu_l2_caches_managed: bool,
    /// The GPU's L2 keeps lines of registered memory.
    pub gpu_l2_caches_registered: bool,
    /// The GPU's L2 keeps lines of pageable memory.
    pub gpu_l2_caches_pageable: bool,
    /// `cuMemGetInfo` reports the host's `MemFree` as free.
    pub meminfo_free_is_memfree: bool,
    /// Registration page-locks; where it does not, it only populates, and takes read-only maps.
    pub host_register_page_locks: bool,
    /// Where false, the device pointer of host memory is refused and kernels may not touch it.
    pub gpu_can_access_sysmem: bool,
    /// Where false, the device keeps a stale view of mapped host memory until a fence.
    pub io_coherent: bool,
    /// The host may touch managed memory while the device works.
    pub managed_concurrent: bool,
    /// The host may read and write `cuMemAlloc` memory.
    pub host_reads_device_memory: bool,
}

impl Profile {
    /// A built-in profile.
    ///
    /// # Errors
    /// No such name: the error carries the nearest ones.
    pub fn builtin(key: &str) -> Result<Self, ProfileError> {
        from_platforms(builtin_platforms()?, key)
    }

    /// The names of the built-in profiles, in alphabetical order.
    #[must_use]
    pub fn builtin_keys() -> Vec<&'static str> {
        builtin_platforms().map_or_else(|_| Vec::new(), |all| all.keys().map(String::as_str).collect())
    }

    /// The profile `key` of a TOML text.
    ///
    /// # Errors
    /// The text does not parse, has no such platform, or a field has the wrong type or range.
    pub fn from_toml(text: &str, key: &str) -> Result<Self, ProfileError> {
        from_platforms(&parse(text)?, key)
    }

    /// The profile `key` of a TOML file.
    ///
    /// # Errors
    /// The file cannot be read, or as [`Profile::from_toml`]; the error names the file.
    pub fn from_file(path: &Path, key: &str) -> Result<Self, ProfileError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| ProfileError::new(error.to_string()).in_file(name.clone()))?;
        Self::from_toml(&text, key).map_err(|error| error.in_file(name))
    }

    /// The names of all platforms in a TOML text.
    ///
    /// # Errors
    /// The text does not parse, or has no platforms.
    pub fn keys(text: &str) -> Result<Vec<String>, ProfileError> {
        Ok(parse(text)?.keys().cloned().collect())
    }

    /// The value of an attribute, if the profile states it.
    #[must_use]
    pub fn attribute(&self, number: i32) -> Option<i32> {
        self.attributes.get(&number).copied()
    }

    /// Whether an attribute is stated and not zero.
    #[must_use]
    pub fn has(&self, number: i32) -> bool {
        self.attribute(number).is_some_and(|value| value != 0)
    }

    /// How many copy engines the device has: what it says, else one if integrated, else two.
    #[must_use]
    pub fn copy_engines(&self) -> usize {
        let stated = self.attribute(attribute::ASYNC_ENGINE_COUNT);
        stated
            .and_then(|count| usize::try_from(count).ok())
            .filter(|count| *count > 0)
            .unwrap_or(if self.has(attribute::INTEGRATED) { 1 } else { 2 })
    }
}

fn builtin_platforms() -> Result<&'static Table, ProfileError> {
    static PARSED: OnceLock<Result<Table, ProfileError>> = OnceLock::new();
    PARSED
        .get_or_init(|| parse(BUILTIN_TOML).map_err(|error| error.in_file("profiles.toml")))
        .as_ref()
        .map_err(Clone::clone)
}

/// The `platform` table of a text.
fn parse(text: &str) -> Result<Table, ProfileError> {
    let mut whole: Table = toml::from_str(text).map_err(|error| {
        let line = error
            .span()
            .and_then(|span| text.get(..span.start))
            .map_or(0, |before| before.bytes().filter(|byte| *byte == b'\n').count() + 1);
        ProfileError::new(match line {
            0 => error.message().to_owned(),
            line => format!("line {line}: {}", error.message()),
        })
    })?;
    match whole.get("schema") {
        None | Some(Value::Integer(1)) => {}
        Some(other) => {
            let found = shown(&other.to_string());
            return Err(ProfileError::new(format!("schema must be 1, found {found}")));
        }
    }
    match whole.remove("platform") {
        Some(Value::Table(platforms)) => Ok(platforms),
        Some(other) => Err(ProfileError::new(format!("platform must be a table, found {}", section::kind(&other)))),
        None => Err(ProfileError::new("no [platform.NAME.attributes] table")),
    }
}

fn from_platforms(platforms: &Table, key: &str) -> Result<Profile, ProfileError> {
    match platforms.get(key) {
        Some(Value::Table(table)) => build::profile(key, table),
        Some(other) => {
            Err(ProfileError::new(format!("platform `{}` must be a table, found {}", shown(key), section::kind(other))))
        }
        None => Err(ProfileError::unknown_platform(key, platforms.keys().map(String::as_str))),
    }
}

#[cfg(test)]
mod tests;
