//! The built-in profiles, the rules for what is missing, and hostile files.

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn from(body: &str) -> Result<Profile, ProfileError> {
    Profile::from_toml(body, "x")
}

fn refusal(body: &str) -> String {
    let text = from(body).expect_err(body).to_string();
    assert!(!text.contains('\n'), "more than one line: {text:?}");
    assert!(text.len() < 400, "too long: {text}");
    text
}

#[test]
fn all_twenty_six_are_there_and_load() {
    let keys = Profile::builtin_keys();
    assert_eq!(keys.len(), 26);
    for key in keys {
        let profile = Profile::builtin(key).unwrap();
        assert_eq!(profile.key, key);
        assert!(profile.attribute(attribute::INTEGRATED).is_some(), "{key}");
        // cudarc opens no context without an answer to this one.
        assert!(profile.attribute(attribute::MEMORY_POOLS_SUPPORTED).is_some(), "{key}");
        assert!(profile.total_mem >= GIB && profile.copy_engines() >= 1, "{key}");
        let speeds = profile.bandwidth;
        for rate in [
            speeds.h2d_pinned,
            speeds.d2h_pinned,
            speeds.h2d_pageable,
            speeds.d2h_pageable,
            speeds.dram,
            speeds.kernel_read_host,
            speeds.latency_us,
            speeds.cpu_memcpy,
        ] {
            assert!(rate.is_finite() && rate > 0.0, "{key}: {speeds:?}");
        }
        assert!(profile.host.available <= profile.host.total, "{key}");
    }
}

#[test]
fn the_measured_machine_reads_as_measured() {
    let h200 = Profile::builtin("x86_h200_sxm_gen5").unwrap();
    assert_eq!(h200.name, "NVIDIA H200");
    assert_eq!(h200.total_mem, 150_108_897_280);
    assert_eq!(h200.copy_engines(), 3);
    assert!(h200.has(attribute::READ_ONLY_HOST_REGISTER));
    assert_eq!(h200.attribute(attribute::NUMA_ID), Some(-1));
    assert_eq!(h200.attribute(10), Some(32), "the warp is 32 wide everywhere");
    assert_eq!(h200.attribute(86), Some(0));
    assert_eq!(h200.attribute(133), None, "not stated, so not known");
    assert_eq!(h200.bandwidth.bidirectional_total, Some(95.0));
    assert_eq!(h200.host.total, 512 * GIB);
    assert_eq!(h200.driver_version, 13_000);
}

#[test]
fn behaviour_follows_the_file_and_the_attributes() {
    let get = |key| Profile::builtin(key).unwrap().behaviour;
    let spark = get("dgx_spark_gb10");
    assert!(spark.gpu_l2_caches_managed && !spark.gpu_l2_caches_pinned);
    assert!(!spark.host_register_page_locks && !spark.host_reads_device_memory);
    assert!(spark.meminfo_free_is_memfree && spark.managed_concurrent && spark.io_coherent);
    let thor = get("jetson_agx_thor");
    assert!(thor.gpu_l2_caches_registered && !thor.gpu_l2_caches_managed);
    let xavier = get("jetson_agx_xavier_16gb");
    assert!(xavier.io_coherent && !xavier.managed_concurrent && xavier.host_register_page_locks);
    assert!(get("gh200_480gb_numa").host_reads_device_memory);
    assert!(!get("gh200_480gb_cdmm").host_reads_device_memory);
    let confidential = get("h100_h200_confidential");
    assert_eq!(confidential.host_register_error, Some(801));
    assert_eq!(confidential.host_alloc_error, None);
    assert!(!confidential.gpu_can_access_sysmem);
    assert_eq!(get("wsl2_rtx").pinned_limit_bytes, Some(768 * MIB));
    assert_eq!(get("vgpu_timesliced_fractional").managed_error, Some(801));
    assert_eq!(get("vgpu_full_1to1_uvm").managed_error, None);
}

#[test]
fn only_attributes_are_required() {
    let profile = from("[platform.x.attributes]\n").unwrap();
    assert_eq!(profile.name, "x");
    assert_eq!(profile.total_mem, 16 * GIB);
    assert_eq!(profile.host.total, 512 * GIB);
    assert_eq!(profile.attribute(attribute::INTEGRATED), None);
    let behaviour = profile.behaviour;
    assert!(!behaviour.gpu_l2_caches_pageable && behaviour.io_coherent);
    let integrated = from("[platform.x.attributes]\nintegrated = 1\ntotal_mem_bytes = 1073741824\n");
    assert_eq!(integrated.unwrap().host.total, GIB);
}

#[test]
fn attributes_go_by_name_or_number_and_unknown_keys_are_ignored() {
    let text = "future = 1\n[platform.x]\ncolour = 'blue'\n[platform.x.attributes]\n\
        id_113 = 1\nl2_cache_size = 7\ntastes_of = 'strawberry'\nid_ = 3\nid_0 = 4\nid_-5 = 1\n\
        [platform.x.bandwidth]\nwarp_speed = 'nine'\n[platform.x.sauce]\n";
    let profile = from(text).unwrap();
    assert_eq!(profile.attribute(113), Some(1));
    assert_eq!(profile.attribute(38), Some(7));
    assert_eq!(profile.attribute(0), None);
}

#[test]
fn an_old_driver_does_not_know_new_attributes() {
    let text =
        |version: &str| format!("[platform.x]\n{version}\n[platform.x.attributes]\nhost_numa_id = 0\nid_113 = 1\n");
    let old = from(&text("driver_version = 11040")).unwrap();
    assert_eq!((old.attribute(134), old.attribute(113)), (None, Some(1)));
    assert_eq!(old.driver_version, 11_040);
    assert_eq!(from(&text("")).unwrap().attribute(134), Some(0));
}

#[test]
fn stale_views_need_an_old_integrated_gpu() {
    let coherent = |body: &str| from(&format!("[platform.x.attributes]\n{body}")).unwrap().behaviour.io_coherent;
    assert!(!coherent("integrated = 1\ncc_major = 5\ncc_minor = 3\n"));
    assert!(!coherent("integrated = 1\ncc_major = 7\ncc_minor = 0\n"));
    assert!(coherent("integrated = 1\ncc_major = 7\ncc_minor = 2\n"));
    assert!(coherent("integrated = 0\ncc_major = 5\n"));
    assert!(!coherent("integrated = 1\n[platform.x.behaviour]\nio_coherent = false\n"));
}

#[test]
fn a_host_table_stands_in_for_proc() {
    let text = "[platform.x.attributes]\n[platform.x.host]\ntotal = 1000\navailable = 800\n\
        free_bytes = 10\ncgroup_limit_bytes = 500\ncgroup_used = 20\ncgroup_version = 1\n\
        numa_nodes = 2\npage_size = 65536\nswap_free = 3\n";
    let host = from(text).unwrap().host;
    assert_eq!((host.total, host.available, host.free), (1000, 800, 10));
    assert_eq!((host.cgroup_limit, host.cgroup_used), (Some(500), 20));
    assert_eq!((host.numa_nodes, host.page_size, host.swap_free), (2, 65_536, 3));
    assert_eq!(host.cgroup_version, crate::host::CgroupVersion::V1);
}

#[test]
fn refusals_name_the_field() {
    let field = |section: &str, line: &str| {
        let attributes = if section == "attributes" { "" } else { "[platform.x.attributes]\n" };
        refusal(&format!("{attributes}[platform.x.{section}]\n{line}\n"))
    };
    for (section, line) in [
        ("attributes", "integrated = 'yes'"),
        ("attributes", "integrated = true"),
        ("attributes", "cc_major = 9.5"),
        ("attributes", "numa_id = 99999999999"),
        ("attributes", "id_113 = []"),
        ("attributes", "total_mem_bytes = -1"),
        ("attributes", "total_mem_bytes = 0"),
        ("attributes", "total_mem_bytes = 9223372036854775807"),
        ("bandwidth", "h2d_pinned_gbs = -3"),
        ("bandwidth", "h2d_pinned_gbs = 0"),
        ("bandwidth", "d2h_pinned_gbs = nan"),
        ("bandwidth", "cpu_memcpy_gbs = inf"),
        ("bandwidth", "copy_latency_us = '7'"),
        ("behaviour", "host_register_error = 0"),
        ("behaviour", "host_register_error = 4294967297"),
        ("behaviour", "gpu_l2_caches_pinned = 1"),
        ("behaviour", "pinned_limit_mib = -1"),
        ("behaviour", "pinned_limit_mib = 9223372036854775807"),
        ("host", "total_bytes = 2026-01-01"),
        ("host", "available_bytes = 562949953421312"),
        ("host", "available_bytes = 562949953421311"),
        ("host", "numa_nodes = 0"),
        ("host", "page_size = 5000"),
        ("host", "cgroup_version = 3"),
    ] {
        let name = line.split(' ').next().unwrap().trim_end_matches("_bytes");
        let text = field(section, line);
        assert!(text.starts_with(&format!("platform `x`: {section}.{name}")), "{text}");
    }
}

#[test]
fn refusals_of_whole_files_are_one_line() {
    for (text, says) in [
        ("", "no [platform.NAME.attributes] table"),
        ("platform = 3", "platform must be a table, found an integer"),
        ("[platform]\nx = 'y'", "platform `x` must be a table, found a string"),
        ("[platform]\n", "no platform named `x` (there are none)"),
        ("[platform.x]\n", "attributes is missing"),
        ("[platform.x]\nattributes = 1\n", "attributes must be a table, found an integer"),
        ("[platform.x]\nname = 1\n[platform.x.attributes]\n", "name must be a string"),
        ("[platform.x]\ndriver_version = -1\n[platform.x.attributes]\n", "driver_version is -1"),
        ("[platform.y.attributes]\n", "nearest: y"),
        ("schema = 2\n[platform.x.attributes]\n", "schema must be 1, found 2"),
        ("schema = \"\"\"a\nb\"\"\"\n", "schema must be 1"),
        ("[platform.x.attributes]\nintegrated = \n", "line 2"),
        ("[platform.x.attributes]\nintegrated = 1\nintegrated = 1\n", "line 3"),
        ("[platform.x.attributes]\ncc_major = 99999999999999999999999\n", "line 2"),
        ("\u{0}\u{1}", "line 1"),
    ] {
        let found = refusal(text);
        assert!(found.contains(says), "{text:?}: {found}");
    }
    let deep = format!("a = {}", "[".repeat(100_000));
    refusal(&deep);
    let long = Profile::from_toml("[platform.y.attributes]\n", &"x\n".repeat(10_000));
    let text = long.unwrap_err().to_string();
    assert!(text.len() < 400 && !text.contains('\n'));
}

#[test]
fn a_misspelt_name_gets_the_nearest() {
    let text = Profile::builtin("dgx_spark").unwrap_err().to_string();
    assert!(text.contains("`dgx_spark`") && text.contains("nearest: dgx_spark_gb10"), "{text}");
    let text = Profile::builtin("x86_h200_sxm_gen4").unwrap_err().to_string();
    assert!(text.contains("nearest: x86_h200_sxm_gen5"), "{text}");
}

#[test]
fn an_unreadable_file_is_named() {
    let text = Profile::from_file(Path::new("/nonexistent/a.toml"), "x").unwrap_err().to_string();
    assert!(text.starts_with("/nonexistent/a.toml: "), "{text}");
}
