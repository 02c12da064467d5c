//! Device attribute names and the numbers the driver knows them by.

/// `cc_major` and its driver number, which other modules ask for by name.
pub const CC_MAJOR: i32 = 75;
/// `cc_minor`.
pub const CC_MINOR: i32 = 76;
/// `integrated`.
pub const INTEGRATED: i32 = 18;
/// `async_engine_count`.
pub const ASYNC_ENGINE_COUNT: i32 = 40;
/// `managed_memory`.
pub const MANAGED_MEMORY: i32 = 83;
/// `pageable_memory_access`.
pub const PAGEABLE_MEMORY_ACCESS: i32 = 88;
/// `concurrent_managed_access`.
pub const CONCURRENT_MANAGED_ACCESS: i32 = 89;
/// `can_use_host_pointer_for_registered_mem`.
pub const CAN_USE_HOST_POINTER: i32 = 91;
/// `host_register_supported`.
pub const HOST_REGISTER_SUPPORTED: i32 = 99;
/// `pageable_memory_access_uses_host_page_tables`.
pub const USES_HOST_PAGE_TABLES: i32 = 100;
/// `direct_managed_mem_access_from_host`.
pub const DIRECT_MANAGED_ACCESS: i32 = 101;
/// `read_only_host_register_supported`.
pub const READ_ONLY_HOST_REGISTER: i32 = 113;
/// `memory_pools_supported`.
pub const MEMORY_POOLS_SUPPORTED: i32 = 115;
/// `numa_config`.
pub const NUMA_CONFIG: i32 = 130;
/// `numa_id`.
pub const NUMA_ID: i32 = 131;
/// `host_numa_id`.
pub const HOST_NUMA_ID: i32 = 134;

/// Every name a profile may use, with its number. A number may have several names.
const NAMES: &[(&str, i32)] = &[
    ("max_threads_per_block", 1),
    ("max_block_dim_x", 2),
    ("max_block_dim_y", 3),
    ("max_block_dim_z", 4),
    ("max_grid_dim_x", 5),
    ("max_grid_dim_y", 6),
    ("max_grid_dim_z", 7),
    ("max_shared_memory_per_block", 8),
    ("total_constant_memory", 9),
    ("warp_size", 10),
    ("clock_rate_khz", 13),
    ("multiprocessor_count", 16),
    ("integrated", INTEGRATED),
    ("can_map_host_memory", 19),
    ("compute_mode", 20),
    ("concurrent_kernels", 31),
    ("ecc_enabled", 32),
    ("pci_bus_id", 33),
    ("pci_device_id", 34),
    ("tcc_driver", 35),
    ("memory_clock_khz", 36),
    ("memory_clock_rate", 36),
    ("memory_bus_width_bits", 37),
    ("global_memory_bus_width", 37),
    ("l2_cache_bytes", 38),
    ("l2_cache_size", 38),
    ("max_threads_per_multiprocessor", 39),
    ("async_engine_count", ASYNC_ENGINE_COUNT),
    ("unified_addressing", 41),
    ("pci_domain_id", 50),
    ("cc_major", CC_MAJOR),
    ("compute_capability_major", CC_MAJOR),
    ("cc_minor", CC_MINOR),
    ("compute_capability_minor", CC_MINOR),
    ("stream_priorities_supported", 78),
    ("managed_memory", MANAGED_MEMORY),
    ("multi_gpu_board", 84),
    ("host_native_atomic_supported", 86),
    ("pageable_memory_access", PAGEABLE_MEMORY_ACCESS),
    ("concurrent_managed_access", CONCURRENT_MANAGED_ACCESS),
    ("compute_preemption_supported", 90),
    ("can_use_host_pointer_for_registered_mem", CAN_USE_HOST_POINTER),
    ("cooperative_launch", 95),
    ("can_flush_remote_writes", 98),
    ("host_register_supported", HOST_REGISTER_SUPPORTED),
    ("pageable_memory_access_uses_host_page_tables", USES_HOST_PAGE_TABLES),
    ("direct_managed_mem_access_from_host", DIRECT_MANAGED_ACCESS),
    ("virtual_memory_management_supported", 102),
    ("gpu_direct_rdma_with_cuda_vmm_supported", 110),
    ("read_only_host_register_supported", READ_ONLY_HOST_REGISTER),
    ("memory_pools_supported", MEMORY_POOLS_SUPPORTED),
    ("gpu_direct_rdma_supported", 116),
    ("gpu_direct_rdma_flush_writes_options", 117),
    ("gpu_direct_rdma_writes_ordering", 118),
    ("dma_buf_supported", 124),
    ("numa_config", NUMA_CONFIG),
    ("numa_id", NUMA_ID),
    ("mps_enabled", 133),
    ("host_numa_id", HOST_NUMA_ID),
    ("host_numa_virtual_memory_management_supported", 141),
    ("host_numa_memory_pools_supported", 142),
    ("host_memory_pools_supported", 144),
    ("host_virtual_memory_management_supported", 145),
    ("only_partial_host_native_atomic_supported", 147),
];

/// Limits that have been the same on every GPU since compute capability 3.0. Every profile
/// has them unless it says otherwise; they tell no platform from another.
pub(super) const UNIVERSAL: &[(i32, i32)] = &[
    (1, 1024),
    (2, 1024),
    (3, 1024),
    (4, 64),
    (5, i32::MAX),
    (6, 65_535),
    (7, 65_535),
    (8, 49_152),
    (9, 65_536),
    (10, 32),
];

/// The first attribute number that a driver of this version does not know.
pub(super) fn end_for_driver(version: i32) -> i32 {
    match version {
        i32::MIN..=11_059 => 120,
        11_060..=11_069 => 122,
        11_070..=11_999 => 125,
        12_000..=12_009 => 130,
        12_010..=12_019 => 133,
        12_020..=12_049 => 135,
        12_050..=12_079 => 136,
        12_080..=12_999 => 144,
        13_000..=13_009 => 148,
        13_010..=13_029 => 149,
        13_030..=13_039 => 157,
        _ => 162,
    }
}

/// The number behind a name; `id_113` works for any number.
#[must_use]
pub fn id(name: &str) -> Option<i32> {
    if let Some(digits) = name.strip_prefix("id_") {
        return digits.parse().ok().filter(|number| (1..=100_000).contains(number));
    }
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
}
