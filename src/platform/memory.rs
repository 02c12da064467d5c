//! How much memory there is, from what the driver and the system say. Pure: texts in, numbers out.
//!
//! On an integrated GPU `cuMemGetInfo` follows the kernel's MemFree, which page cache brings near zero; what can really be
//! allocated is MemAvailable. And a container's limit counts everywhere.
#![deny(unsafe_code)]

use std::fmt;

/// What the system's files said; `None` where a file is missing or unreadable.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct HostTexts {
    /// `/proc/meminfo`.
    pub(crate) meminfo: Option<String>,
    /// The limits that apply to this process, own group first, then its parents.
    pub(crate) cgroups: Vec<CgroupTexts>,
    /// `meminfo` of the NUMA node that the GPU's memory forms, where it forms one.
    pub(crate) gpu_node_meminfo: Option<String>,
}

/// The memory files of one control group; v1 and v2 name them differently, their contents are alike.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct CgroupTexts {
    /// `memory.max` or `memory.limit_in_bytes`.
    pub(crate) limit: Option<String>,
    /// `memory.current` or `memory.usage_in_bytes`.
    pub(crate) usage: Option<String>,
    /// `memory.stat`.
    pub(crate) stat: Option<String>,
}

/// What the driver said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DriverMemory {
    /// `cuDeviceTotalMem`, or `cuMemGetInfo`'s total; 0 where both failed.
    pub(crate) total: u64,
    /// `cuMemGetInfo`, sampled more than once, or why it failed.
    pub(crate) free: Result<Vec<u64>, String>,
}

/// How much memory there is right now. A sample, not a promise: other processes allocate too.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct MemoryFigures {
    /// What a device (or, on an integrated GPU, any) allocation can have now.
    pub free_bytes: u64,
    /// What the device has in all; the host's memory where there is no device.
    pub total_bytes: u64,
    /// The driver's own free figure, lowest and highest of the samples: on Grace it moves with the page cache.
    pub driver_free: Option<(u64, u64)>,
    /// What the host can still allocate: MemAvailable, or less under a container's limit.
    pub host_available: Option<u64>,
    /// The host's memory.
    pub host_total: Option<u64>,
    /// The tightest container limit on this process.
    pub container_limit: Option<u64>,
    /// What that container uses, page cache that can be dropped aside.
    pub container_used: Option<u64>,
    /// File pages that the system keeps in GPU memory: counted as used by the driver, dropped when needed.
    pub reclaimable_bytes: Option<u64>,
    /// What could not be read, and what that means.
    pub notes: Vec<String>,
}

impl MemoryFigures {
    /// Figures with a free and a total amount of device memory and nothing known about the host.
    pub fn new(free_bytes: u64, total_bytes: u64) -> Self {
        Self { free_bytes, total_bytes, ..Self::default() }
    }

    /// Sets what the host can still allocate.
    #[must_use]
    pub fn with_host_available(mut self, bytes: u64) -> Self {
        self.host_available = Some(bytes);
        self
    }

    /// Device memory in use; never less than nothing, whatever the driver says.
    pub fn used_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.free_bytes)
    }
}

impl fmt::Display for MemoryFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} free", size(self.free_bytes), size(self.total_bytes))?;
        if let Some(available) = self.host_available {
            write!(f, "; host {} available", size(available))?;
        }
        if let Some(limit) = self.container_limit {
            write!(f, "; container limit {}", size(limit))?;
        }
        if let Some(reclaimable) = self.reclaimable_bytes {
            write!(f, "; {} of file pages in GPU memory can be dropped", size(reclaimable))?;
        }
        Ok(())
    }
}

/// Bytes for people.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 => format!("{:.1} GiB", b as f64 / (1u64 << 30) as f64),
        b if b >= 1 << 20 => format!("{:.1} MiB", b as f64 / (1u64 << 20) as f64),
        b => format!("{b} B"),
    }
}

/// Figures from texts. `driver` is `None` where there is no device.
pub(crate) fn figures(one_memory: bool, driver: Option<&DriverMemory>, host: &HostTexts) -> MemoryFigures {
    let mut notes = Vec::new();
    let meminfo = |key| host.meminfo.as_deref().and_then(|text| meminfo_bytes(text, key));
    let (host_total, available) = (meminfo("MemTotal"), meminfo("MemAvailable"));
    let container = tightest(&host.cgroups);
    let room = container.map(|(limit, used)| limit.saturating_sub(used));
    let host_available = match (available, room) {
        (Some(available), Some(room)) => Some(available.min(room)),
        (available, room) => available.or(room),
    };
    let samples = driver.and_then(|driver| driver.free.as_ref().ok());
    let driver_free = samples.and_then(|free| Some((*free.iter().min()?, *free.iter().max()?)));
    if let Some(DriverMemory { free: Err(why), .. }) = driver {
        notes.push(format!("free device memory is unknown: {why}"));
    }

    let total = driver.map(|driver| driver.total).filter(|total| *total > 0);
    let cap = total.unwrap_or(u64::MAX);
    let (free_bytes, total_bytes) = match driver {
        None => (host_available.unwrap_or(0), host_total.unwrap_or(0)),
        Some(_) if one_memory => {
            let total = total.or(host_total).unwrap_or(0);
            let free = match (available, driver_free) {
                (Some(available), _) => available,
                (None, Some((free, _))) => {
                    notes.push("MemAvailable could not be read; the driver's figure counts page cache as used".into());
                    free
                }
                (None, None) => {
                    notes
                        .push("neither MemAvailable nor the driver's figure could be read; the total stands in".into());
                    total
                }
            };
            (free.min(cap).min(room.unwrap_or(u64::MAX)), total)
        }
        // Where the driver's figure is missing nothing better is known; the allocation itself will say.
        Some(_) => {
            let total = total.unwrap_or(0);
            (driver_free.map_or(total, |(free, _)| free.min(cap)), total)
        }
    };
    MemoryFigures {
        free_bytes,
        total_bytes,
        driver_free,
        host_available,
        host_total,
        container_limit: container.map(|(limit, _)| limit),
        container_used: container.map(|(_, used)| used),
        reclaimable_bytes: host.gpu_node_meminfo.as_deref().and_then(|text| meminfo_bytes(text, "FilePages")),
        notes,
    }
}

/// The value of `key` in a text of `/proc/meminfo`, or of a NUMA node's `meminfo` (whose lines begin with `Node N`).
fn meminfo_bytes(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        if name.split_whitespace().last()? != key {
            return None;
        }
        let mut words = value.split_whitespace();
        let number: u64 = words.next()?.parse().ok()?;
        match words.next() {
            Some("kB") => number.checked_mul(1024),
            None => Some(number),
            Some(_) => None,
        }
    })
}

/// Limit and use of the group with the least room. Groups without a limit do not count.
fn tightest(groups: &[CgroupTexts]) -> Option<(u64, u64)> {
    /// cgroup v1 writes "no limit" as the largest multiple of the page size; nothing real comes near it.
    const UNLIMITED: u64 = 1 << 60;
    groups
        .iter()
        .filter_map(|group| {
            let limit: u64 = group.limit.as_deref()?.trim().parse().ok().filter(|limit| *limit < UNLIMITED)?;
            let usage: u64 = group.usage.as_deref().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
            // The kernel drops these before it kills anybody, as with MemAvailable.
            let cache = group.stat.as_deref().and_then(|text| stat_bytes(text, "inactive_file")).unwrap_or(0);
            Some((limit, usage.saturating_sub(cache)))
        })
        .min_by_key(|(limit, used)| limit.saturating_sub(*used))
}

/// `memory.stat` of v2, or of v1, where the total over children has the prefix.
fn stat_bytes(text: &str, key: &str) -> Option<u64> {
    let find = |wanted: &str| {
        text.lines().find_map(|line| {
            let (name, value) = line.split_once(' ')?;
            if name == wanted { value.trim().parse().ok() } else { None }
        })
    };
    find(&format!("total_{key}")).or_else(|| find(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn gib(value: f64) -> u64 {
        (value * GIB as f64) as u64
    }

    fn meminfo(total: f64, free: f64, available: f64) -> String {
        let kib = |value: f64| gib(value) / 1024;
        format!(
            "MemTotal:       {} kB\nMemFree:        {} kB\nMemAvailable:   {} kB\nBuffers: 12 kB\n",
            kib(total),
            kib(free),
            kib(available)
        )
    }

    fn driver(free: f64, total: f64) -> DriverMemory {
        DriverMemory { total: gib(total), free: Ok(vec![gib(free)]) }
    }

    fn near(left: u64, right: f64) -> bool {
        left.abs_diff(gib(right)) < 4096
    }

    #[test]
    fn page_cache_counts_as_free_on_one_memory_and_only_there() {
        let host = HostTexts { meminfo: Some(meminfo(121.69, 41.52, 115.65)), ..HostTexts::default() };
        let driver = driver(41.52, 121.69);
        assert!(near(figures(true, Some(&driver), &host).free_bytes, 115.65));
        assert!(near(figures(false, Some(&driver), &host).free_bytes, 41.52));
    }

    #[test]
    fn missing_or_garbled_meminfo_falls_back_with_a_note() {
        let driver = driver(41.5, 121.0);
        for text in [
            None,
            Some(""),
            Some("MemAvailable: lots kB"),
            Some("MemAvailable: 5 furlongs"),
            Some("\u{0}:::\n:"),
            Some("MemAvailable: 99999999999999999999 kB"),
            Some("MemAvailable: 18446744073709551615 kB"),
        ] {
            let host = HostTexts { meminfo: text.map(Into::into), ..HostTexts::default() };
            let found = figures(true, Some(&driver), &host);
            assert!(near(found.free_bytes, 41.5), "{text:?}");
            assert!(found.notes.iter().any(|note| note.contains("MemAvailable")), "{text:?}");
        }
    }

    #[test]
    fn a_container_limit_binds() {
        let group =
            |limit: &str, usage: &str| CgroupTexts { limit: Some(limit.into()), usage: Some(usage.into()), stat: None };
        let host = |cgroups| HostTexts { meminfo: Some(meminfo(121.0, 40.0, 100.0)), cgroups, ..HostTexts::default() };
        let driver = driver(40.0, 121.0);
        let one = |cgroups| figures(true, Some(&driver), &host(cgroups));
        let limited = one(vec![group("34359738368\n", "4294967296\n")]);
        assert_eq!((limited.free_bytes, limited.container_limit), (28 * GIB, Some(32 * GIB)));
        // The parent's limit is tighter.
        assert_eq!(one(vec![group("34359738368", "0"), group("8589934592", "1073741824")]).free_bytes, 7 * GIB);
        // No limit, in both versions' spelling.
        assert!(near(one(vec![group("max", "5"), group("9223372036854771712", "5")]).free_bytes, 100.0));
        // Over the limit.
        assert_eq!(one(vec![group("1024", "4096")]).free_bytes, 0);
        // Page cache inside the container can be dropped.
        let mut cached = group("34359738368", "30064771072");
        cached.stat = Some("anon 1\ninactive_file 25769803776\n".into());
        assert_eq!(one(vec![cached]).free_bytes, 28 * GIB);
        // A discrete device is not bound by it, its host side is.
        let discrete = figures(false, Some(&driver), &host(vec![group("34359738368", "0")]));
        assert!(near(discrete.free_bytes, 40.0));
        assert_eq!(discrete.host_available, Some(32 * GIB));
    }

    #[test]
    fn file_pages_in_gpu_memory_are_listed_apart_and_samples_make_a_range() {
        let host = HostTexts {
            meminfo: Some(meminfo(480.0, 400.0, 450.0)),
            gpu_node_meminfo: Some("Node 1 MemTotal: 99 kB\nNode 1 FilePages:    62914560 kB\n".into()),
            ..HostTexts::default()
        };
        let driver = DriverMemory { total: 95 * GIB, free: Ok(vec![40 * GIB, 38 * GIB]) };
        let found = figures(false, Some(&driver), &host);
        assert_eq!(found.reclaimable_bytes, Some(60 * GIB));
        assert_eq!(found.driver_free, Some((38 * GIB, 40 * GIB)));
        assert_eq!(found.free_bytes, 38 * GIB);
    }

    #[test]
    fn more_free_than_total_and_a_failing_driver_do_no_harm() {
        let found = figures(false, Some(&driver(200.0, 95.0)), &HostTexts::default());
        assert_eq!((found.free_bytes, found.used_bytes()), (95 * GIB, 0));
        let failing = DriverMemory { total: 95 * GIB, free: Err("cuMemGetInfo failed: 2".into()) };
        for one_memory in [false, true] {
            let found = figures(one_memory, Some(&failing), &HostTexts::default());
            assert_eq!(found.free_bytes, 95 * GIB);
            assert!(!found.notes.is_empty());
        }
        let none = figures(false, None, &HostTexts::default());
        assert_eq!((none.free_bytes, none.total_bytes), (0, 0));
    }
}
