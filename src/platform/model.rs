//! From device attributes and probed routes to a memory model and capability flags. Plain data, no driver.
#![deny(unsafe_code)]

use crate::plan::kinds::spelled;

/// How the memories of CPU and GPU relate.
///
/// Decided per device from INTEGRATED, PAGEABLE_MEMORY_ACCESS and PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES alone:
/// never from a name, a compute capability or a PCI id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum MemoryModel {
    /// One memory, one page table, coherent caches: DGX Spark, Jetson Thor.
    Unified,
    /// One memory, but the GPU needs memory that was mapped for it: Jetson Orin and Xavier.
    UnifiedMapped,
    /// Two memories and a coherent link between them: Grace Hopper, Grace Blackwell.
    Coherent,
    /// Two memories; the kernel migrates ordinary pages on a GPU fault. Planned like `Discrete`.
    Hmm,
    /// Two memories with PCIe between them.
    Discrete,
    /// No usable device.
    HostOnly,
}
spelled!(MemoryModel, "memory model", {
    Unified = "unified", UnifiedMapped = "unified-mapped", Coherent = "coherent", Hmm = "hmm", Discrete = "discrete",
    HostOnly = "host-only",
});

impl MemoryModel {
    /// CPU and GPU share one physical memory, so that a copy between them only duplicates bytes.
    pub const fn is_one_memory(self) -> bool {
        matches!(self, MemoryModel::Unified | MemoryModel::UnifiedMapped)
    }
}

/// The device attributes that the crate looks at; `None` where the driver does not know the attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[allow(missing_docs, reason = "the names are CUDA's")]
#[non_exhaustive]
pub struct Attributes {
    pub integrated: Option<i32>,
    pub can_map_host_memory: Option<i32>,
    pub managed_memory: Option<i32>,
    pub concurrent_managed_access: Option<i32>,
    pub pageable_memory_access: Option<i32>,
    pub pageable_memory_access_uses_host_page_tables: Option<i32>,
    pub direct_managed_mem_access_from_host: Option<i32>,
    pub can_use_host_pointer_for_registered_mem: Option<i32>,
    pub host_register_supported: Option<i32>,
    pub read_only_host_register_supported: Option<i32>,
    pub memory_pools_supported: Option<i32>,
    pub async_engine_count: Option<i32>,
    pub multiprocessor_count: Option<i32>,
    pub l2_cache_bytes: Option<i32>,
    pub compute_capability_major: Option<i32>,
    pub compute_capability_minor: Option<i32>,
    pub numa_config: Option<i32>,
    pub numa_id: Option<i32>,
    pub host_numa_id: Option<i32>,
}

impl Attributes {
    /// Reads every attribute through `get`, which is given CUDA's number of it (`CUdevice_attribute` in cuda.h, fixed
    /// across versions) and answers `None` where it is not known.
    pub fn read(get: impl Fn(i32) -> Option<i32>) -> Self {
        Self {
            multiprocessor_count: get(16),
            integrated: get(18),
            can_map_host_memory: get(19),
            l2_cache_bytes: get(38),
            async_engine_count: get(40),
            compute_capability_major: get(75),
            compute_capability_minor: get(76),
            managed_memory: get(83),
            pageable_memory_access: get(88),
            concurrent_managed_access: get(89),
            can_use_host_pointer_for_registered_mem: get(91),
            host_register_supported: get(99),
            pageable_memory_access_uses_host_page_tables: get(100),
            direct_managed_mem_access_from_host: get(101),
            read_only_host_register_supported: get(113),
            memory_pools_supported: get(115),
            numa_config: get(130),
            numa_id: get(131),
            host_numa_id: get(134),
        }
    }

    /// The memory model these attributes describe.
    pub fn model(&self) -> MemoryModel {
        let host_page_tables = is_set(self.pageable_memory_access_uses_host_page_tables);
        match (is_set(self.integrated), host_page_tables) {
            (true, true) => MemoryModel::Unified,
            (true, false) => MemoryModel::UnifiedMapped,
            (false, true) => MemoryModel::Coherent,
            (false, false) if is_set(self.pageable_memory_access) => MemoryModel::Hmm,
            (false, false) => MemoryModel::Discrete,
        }
    }

    /// Major and minor compute capability, where the driver tells both.
    pub fn compute_capability(&self) -> Option<(i32, i32)> {
        Some((self.compute_capability_major?, self.compute_capability_minor?))
    }

    /// What the attributes promise, before any route was tried. An absent attribute promises nothing.
    pub fn promised(&self) -> Capabilities {
        let model = self.model();
        let pinned = is_set(self.can_map_host_memory);
        let register = is_set(self.host_register_supported);
        let managed = is_set(self.managed_memory);
        let coherent = model != MemoryModel::UnifiedMapped || self.compute_capability().is_none_or(|cc| cc >= (7, 2));
        Capabilities {
            // A device that walks the host's page tables reads what they map, whatever the other attribute says.
            device_reads_pageable: is_set(self.pageable_memory_access)
                || is_set(self.pageable_memory_access_uses_host_page_tables),
            device_reads_pinned: pinned,
            device_reads_registered: register && pinned,
            host_reads_device: is_set(self.direct_managed_mem_access_from_host),
            managed,
            concurrent_managed: managed && is_set(self.concurrent_managed_access),
            // Every driver can page-lock; where one refuses, the probe says so.
            can_pin: true,
            can_register: register,
            can_register_read_only: register && is_set(self.read_only_host_register_supported),
            memory_pools: is_set(self.memory_pools_supported),
            io_coherent: coherent,
            copy_engines: self.async_engine_count.and_then(|count| u32::try_from(count).ok()).unwrap_or(0),
        }
    }
}

pub(crate) fn is_set(attribute: Option<i32>) -> bool {
    attribute.is_some_and(|value| value != 0)
}

/// What the machine can do, flag by flag: no single word covers GB10, driver-managed Grace and confidential computing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Capabilities {
    /// The GPU reads ordinary host memory in place.
    pub device_reads_pageable: bool,
    /// The GPU reads page-locked host memory in place.
    pub device_reads_pinned: bool,
    /// The GPU reads registered host memory in place.
    pub device_reads_registered: bool,
    /// The CPU reads device memory in place.
    pub host_reads_device: bool,
    /// Managed memory can be allocated.
    pub managed: bool,
    /// The CPU may touch managed memory while the GPU works.
    pub concurrent_managed: bool,
    /// Page-locked memory can be allocated, be it only as the end of a copy.
    pub can_pin: bool,
    /// Existing host memory can be registered.
    pub can_register: bool,
    /// Existing host memory that may only be read can be registered.
    pub can_register_read_only: bool,
    /// Stream-ordered allocation works.
    pub memory_pools: bool,
    /// The GPU sees the CPU's writes to mapped memory, and they are cached on the CPU. False on integrated GPUs before
    /// compute capability 7.2: mapped memory needs a fence there.
    pub io_coherent: bool,
    /// Copy engines that the driver counts; 0 where it does not tell.
    pub copy_engines: u32,
}

impl Capabilities {
    /// The flags by name, for reports.
    pub fn flags(&self) -> [(&'static str, bool); 11] {
        [
            ("device_reads_pageable", self.device_reads_pageable),
            ("device_reads_pinned", self.device_reads_pinned),
            ("device_reads_registered", self.device_reads_registered),
            ("host_reads_device", self.host_reads_device),
            ("managed", self.managed),
            ("concurrent_managed", self.concurrent_managed),
            ("can_pin", self.can_pin),
            ("can_register", self.can_register),
            ("can_register_read_only", self.can_register_read_only),
            ("memory_pools", self.memory_pools),
            ("io_coherent", self.io_coherent),
        ]
    }
}

/// The outcome of trying one zero-copy route.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Route {
    /// Not tried: the attributes rule it out, or probing is off.
    #[default]
    Untried,
    /// Tried, works.
    Works,
    /// Tried; this call refused, or the bytes were wrong.
    Refused(String),
}

/// What the probe found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Routes {
    /// Allocating page-locked memory.
    pub(crate) pin: Route,
    /// The device using it in place.
    pub(crate) pinned: Route,
    /// Registering ordinary memory.
    pub(crate) register: Route,
    /// The device using it in place.
    pub(crate) registered: Route,
    /// Registering with the read-only flag.
    pub(crate) read_only: Route,
    /// Allocating managed memory, and the device using it where the host may look meanwhile.
    pub(crate) managed: Route,
}

impl Capabilities {
    /// Corrects the promises by what was tried; returns a note for each route that broke its promise.
    pub(crate) fn corrected(mut self, attributes: &Attributes, routes: &Routes) -> (Self, Vec<String>) {
        let mut notes = Vec::new();
        let mut settle = |flag: &mut bool, route: &Route, what: &str| match route {
            Route::Untried => {}
            Route::Works => *flag = true,
            Route::Refused(why) => {
                notes.push(format!("{what}: {why}"));
                *flag = false;
            }
        };
        settle(&mut self.can_pin, &routes.pin, "page-locked memory is refused");
        settle(&mut self.device_reads_pinned, &routes.pinned, "the device can not use page-locked memory in place");
        settle(&mut self.can_register, &routes.register, "host memory can not be registered");
        settle(
            &mut self.device_reads_registered,
            &routes.registered,
            "the device can not use registered memory in place",
        );
        settle(&mut self.can_register_read_only, &routes.read_only, "read-only memory can not be registered");
        settle(&mut self.managed, &routes.managed, "managed memory is refused");
        self.device_reads_pinned &= self.can_pin;
        self.device_reads_registered &= self.can_register;
        self.can_register_read_only &= self.can_register;
        // Where the device walks the host's page tables, a read-only mapping needs no flag of its own (cuda.h,
        // cuMemHostRegister: such a platform "will only populate" pages).
        self.can_register_read_only |=
            self.can_register && is_set(attributes.pageable_memory_access_uses_host_page_tables);
        self.concurrent_managed &= self.managed;
        (self, notes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attributes(integrated: i32, pageable: i32, host_page_tables: i32) -> Attributes {
        Attributes {
            integrated: Some(integrated),
            pageable_memory_access: Some(pageable),
            pageable_memory_access_uses_host_page_tables: Some(host_page_tables),
            ..Attributes::default()
        }
    }

    #[test]
    fn the_model_comes_from_the_attributes_and_never_from_the_capability() {
        let cases = [
            ((1, 1, 1), MemoryModel::Unified),
            ((1, 0, 0), MemoryModel::UnifiedMapped),
            ((1, 1, 0), MemoryModel::UnifiedMapped),
            ((0, 1, 1), MemoryModel::Coherent),
            ((0, 1, 0), MemoryModel::Hmm),
            ((0, 0, 0), MemoryModel::Discrete),
        ];
        for ((integrated, pageable, tables), model) in cases {
            for cc in [(9, 0), (12, 1), (8, 7), (99, 9)] {
                let mut given = attributes(integrated, pageable, tables);
                (given.compute_capability_major, given.compute_capability_minor) = (Some(cc.0), Some(cc.1));
                assert_eq!(given.model(), model, "{given:?}");
            }
        }
        assert_eq!(Attributes::default().model(), MemoryModel::Discrete);
    }

    #[test]
    fn only_integrated_devices_before_7_2_lack_io_coherence() {
        let of = |integrated, cc: (i32, i32)| {
            let mut given = attributes(integrated, 0, 0);
            (given.compute_capability_major, given.compute_capability_minor) = (Some(cc.0), Some(cc.1));
            given.promised().io_coherent
        };
        assert!(!of(1, (6, 2)) && !of(1, (5, 3)));
        assert!(of(1, (7, 2)) && of(1, (8, 7)) && of(0, (6, 0)));
    }

    #[test]
    fn a_refused_route_clears_its_flag_and_leaves_a_note() {
        let mut given = attributes(0, 0, 0);
        given.can_map_host_memory = Some(1);
        given.host_register_supported = Some(1);
        let routes = Routes {
            pin: Route::Works,
            pinned: Route::Works,
            register: Route::Refused("cuMemHostRegister failed: CUDA_ERROR_NOT_SUPPORTED (801)".into()),
            ..Routes::default()
        };
        let (found, notes) = given.promised().corrected(&given, &routes);
        assert!(found.device_reads_pinned && !found.can_register && !found.device_reads_registered);
        assert_eq!(notes.len(), 1);
        assert!(notes[0].contains("cuMemHostRegister") && notes[0].contains("801"), "{notes:?}");
    }
}
