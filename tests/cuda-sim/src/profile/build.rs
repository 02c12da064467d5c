//! From a platform's table to a [`Profile`]: what is stated, and what stands in where it is not.

use std::collections::BTreeMap;

use toml::Table;

use super::attributes::{self, end_for_driver};
use super::error::ProfileError;
use super::section::Section;
use super::{Bandwidth, Behaviour, NOT_SUPPORTED, Profile, attribute};
use crate::host::{CgroupVersion, HostFigures};

const GIB: u64 = 1 << 30;
/// What a device has that does not say.
const DEFAULT_TOTAL: u64 = 16 * GIB;
/// What the host beside a discrete device has that does not say.
const DEFAULT_HOST: u64 = 512 * GIB;
/// 256 TiB: more than any address space the simulator could lay out.
const LARGEST_MEMORY: i64 = 1 << 48;
const DEFAULT_DRIVER: i32 = 13_000;
/// Larger than any result code the driver has.
const LARGEST_ERROR: i64 = 9_999;

pub(super) fn profile(key: &str, table: &Table) -> Result<Profile, ProfileError> {
    let root = Section::root(key, table);
    let stated_version = root.integer(&["driver_version"], 1_000..=1_000_000)?.map(narrow);
    let name = root.string("name")?.unwrap_or(key).to_owned();
    let os = root.string("os")?.unwrap_or("Linux").to_owned();

    let stated = Section::of(key, table, "attributes")?;
    if !stated.is_present() {
        return Err(root.error("attributes", "is missing: it is the one table that is required"));
    }
    let attributes = read_attributes(&stated, stated_version)?;
    let total_mem = stated.integer(&["total_mem_bytes"], 1..=LARGEST_MEMORY)?.map_or(DEFAULT_TOTAL, i64::unsigned_abs);

    let facts = Facts::of(&attributes);
    let bandwidth = bandwidth(&Section::of(key, table, "bandwidth")?, facts)?;
    let behaviour = behaviour(&Section::of(key, table, "behaviour")?, &attributes, facts)?;
    let host = host(&Section::of(key, table, "host")?, facts, total_mem)?;
    Ok(Profile {
        key: key.to_owned(),
        name,
        os,
        driver_version: stated_version.unwrap_or(DEFAULT_DRIVER),
        attributes,
        total_mem,
        bandwidth,
        behaviour,
        host,
    })
}

/// The few attributes that choose defaults.
#[derive(Clone, Copy)]
struct Facts {
    integrated: bool,
    host_page_tables: bool,
    /// Compute capability, where stated.
    capability: Option<(i32, i32)>,
}

impl Facts {
    fn of(attributes: &BTreeMap<i32, i32>) -> Self {
        let get = |number| attributes.get(&number).copied();
        Self {
            integrated: get(attribute::INTEGRATED).unwrap_or(0) != 0,
            host_page_tables: get(attribute::USES_HOST_PAGE_TABLES).unwrap_or(0) != 0,
            capability: get(attribute::CC_MAJOR).map(|major| (major, get(attribute::CC_MINOR).unwrap_or(0))),
        }
    }

    fn coherent_link(self) -> bool {
        self.host_page_tables && !self.integrated
    }
}

fn read_attributes(section: &Section<'_>, stated_version: Option<i32>) -> Result<BTreeMap<i32, i32>, ProfileError> {
    let mut found: BTreeMap<i32, i32> = attributes::UNIVERSAL.iter().copied().collect();
    // A real driver always answers this one, and cudarc opens no context without an answer.
    found.insert(attribute::MEMORY_POOLS_SUPPORTED, 0);
    for (key, value) in section.entries() {
        let Some(number) = attributes::id(key) else {
            continue;
        };
        let value = section.as_integer(key, value, i64::from(i32::MIN)..=i64::from(i32::MAX))?;
        found.insert(number, narrow(value));
    }
    if let Some(version) = stated_version {
        // An older driver has never heard of the newer attributes.
        found.retain(|number, _| *number < end_for_driver(version));
    }
    Ok(found)
}

fn bandwidth(section: &Section<'_>, facts: Facts) -> Result<Bandwidth, ProfileError> {
    let rate = |keys: &[&str]| section.positive(keys);
    let dram = rate(&[
        "gpu_dram_read_gbs",
        "gpu_dram_triad_gbs",
        "gpu_triad_mapped_gbs",
        "gpu_dram_peak_gbs",
        "gpu_dram_write_gbs",
    ])?
    .unwrap_or(if facts.integrated {
        200.0
    } else if facts.coherent_link() {
        4000.0
    } else {
        1000.0
    });
    let cpu_memcpy = rate(&["cpu_memcpy_gbs"])?.unwrap_or(10.0);
    let h2d_pinned = rate(&["h2d_pinned_gbs"])?.unwrap_or(if facts.integrated {
        // A copy inside one memory reads and writes it.
        dram / 2.0
    } else if facts.coherent_link() {
        350.0
    } else {
        25.0
    });
    let d2h_pinned = rate(&["d2h_pinned_gbs"])?.unwrap_or(h2d_pinned);
    let pageable = |pinned: f64| {
        if facts.coherent_link() {
            // The GPU walks the host's page tables: pinning makes no difference.
            pinned
        } else {
            // The driver stages through its own buffers with one thread.
            pinned.min(cpu_memcpy)
        }
    };
    let kernel_read_host = rate(&["kernel_read_pinned_gbs", "kernel_rw_pinned_gbs", "gpu_triad_mapped_gbs"])?
        .unwrap_or(if facts.integrated { dram * 0.8 } else { h2d_pinned * 0.89 });
    let both_ways = match rate(&["bidirectional_total_gbs", "bidir_total_gbs"])? {
        Some(total) => Some(total),
        None => rate(&["h2d_bidir_per_dir_gbs"])?.zip(rate(&["d2h_bidir_per_dir_gbs"])?).map(|(up, down)| up + down),
    };
    Ok(Bandwidth {
        h2d_pinned,
        d2h_pinned,
        h2d_pageable: rate(&["h2d_pageable_gbs"])?.unwrap_or_else(|| pageable(h2d_pinned)),
        d2h_pageable: rate(&["d2h_pageable_gbs"])?.unwrap_or_else(|| pageable(d2h_pinned)),
        bidirectional_total: both_ways,
        dram,
        kernel_read_host,
        latency_us: rate(&["copy_latency_us", "memcpy_4k_h2d_us"])?.unwrap_or(8.0),
        cpu_memcpy,
    })
}

fn behaviour(section: &Section<'_>, attributes: &BTreeMap<i32, i32>, facts: Facts) -> Result<Behaviour, ProfileError> {
    let flag = |key: &str| section.boolean(&[key]);
    let code = |key: &str| -> Result<Option<u32>, ProfileError> {
        let code = section.integer(&[key], 1..=LARGEST_ERROR)?;
        Ok(code.and_then(|code| u32::try_from(code).ok()))
    };
    let refused = |refused: bool| refused.then_some(NOT_SUPPORTED);
    let stated_zero = |number: i32| attributes.get(&number) == Some(&0);
    let stated_one = |number: i32| attributes.get(&number).is_some_and(|value| *value != 0);

    let register = code("host_register_error")?.or_else(|| refused(stated_zero(attribute::HOST_REGISTER_SUPPORTED)));
    let alloc = code("host_alloc_error")?.or(refused(flag("host_alloc_works")? == Some(false)));
    let managed = code("managed_error")?
        .or(refused(flag("uvm_supported")? == Some(false)))
        .or_else(|| refused(stated_zero(attribute::MANAGED_MEMORY)));
    let limit_bytes = section.integer(&["pinned_limit_bytes"], 0..=LARGEST_MEMORY)?;
    let limit_mib = section.integer(&["pinned_limit_mib"], 0..=LARGEST_MEMORY >> 20)?;
    let pinned_limit = limit_bytes.or(limit_mib.map(|mib| mib << 20)).map(i64::unsigned_abs);
    let managed_concurrent =
        stated_one(attribute::CONCURRENT_MANAGED_ACCESS) && flag("managed_concurrent_cpu_gpu")? != Some(false);
    let host_reads_device = match section.boolean(&["cpu_can_read_cumemalloc", "host_threads_can_touch_gpu_memory"])? {
        Some(stated) => stated,
        None => facts.host_page_tables && stated_one(attribute::DIRECT_MANAGED_ACCESS),
    };
    // One-way I/O coherency came with capability 7.2; a capability nobody stated is a new one.
    let coherent = !(facts.integrated && facts.capability.is_some_and(|cc| cc < (7, 2)));
    Ok(Behaviour {
        host_register_error: register,
        host_alloc_error: alloc,
        managed_error: managed,
        pinned_limit_bytes: pinned_limit,
        gpu_l2_caches_pinned: flag("gpu_l2_caches_pinned")?.unwrap_or(false),
        gpu_l2_caches_managed: flag("gpu_l2_caches_managed")?.unwrap_or(false),
        gpu_l2_caches_registered: flag("gpu_l2_caches_registered")?.unwrap_or(false),
        gpu_l2_caches_pageable: flag("gpu_l2_caches_pageable")?.unwrap_or(false),
        meminfo_free_is_memfree: flag("meminfo_free_is_memfree")?.unwrap_or(facts.integrated),
        host_register_page_locks: flag("host_register_page_locks")?.unwrap_or(!facts.host_page_tables),
        gpu_can_access_sysmem: flag("gpu_can_access_sysmem")?.unwrap_or(true),
        io_coherent: flag("io_coherent")?.unwrap_or(coherent),
        managed_concurrent,
        host_reads_device_memory: host_reads_device,
    })
}

fn host(section: &Section<'_>, facts: Facts, total_mem: u64) -> Result<HostFigures, ProfileError> {
    let bytes = |keys: &[&str]| -> Result<Option<u64>, ProfileError> {
        Ok(section.integer(keys, 0..=LARGEST_MEMORY)?.map(i64::unsigned_abs))
    };
    let total = bytes(&["total_bytes", "total"])?.unwrap_or(if facts.integrated { total_mem } else { DEFAULT_HOST });
    let mut host = HostFigures::new(total);
    if let Some(available) = bytes(&["available_bytes", "available"])? {
        host.available = available;
        host.free = available;
    }
    if let Some(free) = bytes(&["free_bytes", "free"])? {
        host.free = free;
    }
    for (what, figure) in [("available_bytes", host.available), ("free_bytes", host.free)] {
        if figure > total {
            return Err(section.error(what, format_args!("is {figure}, more than the total {total}")));
        }
    }
    host.swap_free = bytes(&["swap_free_bytes", "swap_free"])?.unwrap_or(0);
    host.cgroup_limit = bytes(&["cgroup_limit_bytes", "cgroup_limit"])?;
    host.cgroup_used = bytes(&["cgroup_used_bytes", "cgroup_used"])?.unwrap_or(0);
    if let Some(version) = section.integer(&["cgroup_version"], 1..=2)? {
        host.cgroup_version = if version == 1 { CgroupVersion::V1 } else { CgroupVersion::V2 };
    }
    if let Some(nodes) = section.integer(&["numa_nodes"], 1..=1_024)? {
        host.numa_nodes = u32::try_from(nodes).unwrap_or(1);
    }
    if let Some(size) = section.integer(&["page_size_bytes", "page_size"], 1..=1 << 30)? {
        if size.count_ones() != 1 {
            return Err(section.error("page_size_bytes", format_args!("is {size}, not a power of two")));
        }
        host.page_size = size.unsigned_abs();
    }
    Ok(host)
}

/// For numbers already checked to fit.
fn narrow(value: i64) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}
