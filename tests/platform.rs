//! Detection on simulated machines: what the driver says, what it does, and what is concluded.

use std::fs;
use std::sync::Arc;

use cuda_sim::host::{CgroupVersion, HostFigures};
use cuda_sim::{Device, DeviceBuilder};
use transfer_tensor::cudarc::driver::CudaContext;
use transfer_tensor::{
    Access, Backing, Decision, Detector, HostMemory, MemoryModel, Platform, Request, Strategy, plan,
};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const INTEGRATED: i32 = 18;
const CONCURRENT_MANAGED: i32 = 89;
const MEMORY_POOLS: i32 = 115;
const NOT_SUPPORTED: u32 = 801;

fn device(key: &str) -> Device {
    cuda_sim::device(key).unwrap()
}

fn detector(device: &Device) -> Detector {
    Detector::new().environment(false).fs_root(device.host_root())
}

fn detect(device: &Device) -> Platform {
    let platform = detector(device).detect(device.ordinal());
    assert_eq!(platform.ordinal(), Some(device.ordinal()), "{platform}");
    platform
}

fn decide(platform: &Platform, request: &Request) -> Decision {
    plan(platform, &platform.memory(), request).unwrap_or_else(|error| panic!("{error}\n{platform}"))
}

fn reused(bytes: u64, touches: u32) -> Request {
    Request::new(bytes).access(Access::reuse(touches).unwrap())
}

#[test]
fn every_machine_is_told_by_its_attributes_and_leaves_nothing_behind() {
    for key in cuda_sim::builtin_profiles() {
        let device = device(&key);
        let platform = detect(&device);
        let model = match key.as_str() {
            "dgx_spark_gb10" | "jetson_agx_thor" => MemoryModel::Unified,
            key if key.starts_with("jetson") || key == "rtx_spark_n1x_windows" => MemoryModel::UnifiedMapped,
            key if key.starts_with("gh200") || key.starts_with("gb") => MemoryModel::Coherent,
            "x86_h100_sxm_hmm" | "x86_b200_hgx" | "x86_b300_sxm6_hmm" => MemoryModel::Hmm,
            _ => MemoryModel::Discrete,
        };
        assert_eq!(platform.model(), model, "{key}");
        assert_eq!(platform.name(), device.profile().name, "{key}");
        assert_eq!(platform.total_bytes(), device.profile().total_mem, "{key}");
        let decision = decide(&platform, &Request::new(256 * MIB));
        let strategy = match model {
            MemoryModel::Unified | MemoryModel::UnifiedMapped => Strategy::ZeroCopy,
            MemoryModel::Coherent => Strategy::Coherent,
            _ => Strategy::Streamed,
        };
        assert_eq!(decision.strategy, strategy, "{key}: {decision}");
        // The probe allocates no device memory, copies nothing, and gives everything back.
        let evidence = device.evidence();
        assert_eq!(evidence.device_bytes_peak, 0, "{key}");
        assert_eq!(evidence.copied_h2d_pinned + evidence.copied_h2d_pageable + evidence.copied_d2d, 0, "{key}");
        assert_eq!(evidence.copied_d2h_pinned + evidence.copied_d2h_pageable, 0, "{key}");
        assert!(evidence.violations.is_empty(), "{key}: {:?}", evidence.violations);
        assert!(device.leaks().is_empty(), "{key}: {:?}", device.leaks());
        // A few milliseconds are a few dozen calls.
        assert!(device.calls().len() < 100, "{key}: {}", device.calls().len());
    }
}

#[test]
fn each_device_has_a_platform_of_its_own() {
    let (spark, h200) = (device("dgx_spark_gb10"), device("x86_h200_sxm_gen5"));
    let (first, second) = (detect(&spark), detect(&h200));
    assert_eq!((first.model(), second.model()), (MemoryModel::Unified, MemoryModel::Discrete));
    assert_ne!(first.uuid(), second.uuid());
    assert_eq!(detect(&spark).model(), MemoryModel::Unified);
}

#[test]
fn the_callers_context_is_used_and_left_as_found() {
    let device = device("x86_h200_sxm_gen5");
    let context = CudaContext::new(device.ordinal()).unwrap();
    let retained = device.count("cuDevicePrimaryCtxRetain");
    let platform = std::thread::spawn({
        let (context, detector) = (Arc::clone(&context), detector(&device));
        // A thread with no context current.
        move || {
            let platform = detector.detect_in(&context);
            let memory = platform.memory_in(&context);
            assert_eq!(memory.total_bytes, platform.total_bytes());
            platform
        }
    })
    .join()
    .unwrap();
    assert_eq!(device.count("cuDevicePrimaryCtxRetain"), retained);
    assert_eq!(platform.model(), MemoryModel::Discrete);
    assert_eq!(platform.ordinal(), Some(device.ordinal()));
    // Detection of another device leaves this thread's context current.
    context.bind_to_thread().unwrap();
    let other = self::device("dgx_spark_gb10");
    detect(&other);
    let mut current = std::ptr::null_mut();
    // SAFETY: the driver is loaded; the call writes one pointer.
    let code = unsafe { transfer_tensor::cudarc::driver::sys::cuCtxGetCurrent(&mut current) };
    assert_eq!(code as u32, 0);
    assert_eq!(current, context.cu_ctx());
}

/// A capture of the caller's, in the strictest mode, survives a detection in the midst of it.
#[test]
fn detection_breaks_no_capture() {
    use transfer_tensor::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
    let device = device("x86_h200_sxm_gen5");
    let context = CudaContext::new(device.ordinal()).unwrap();
    let stream = context.new_stream().unwrap();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL).unwrap();
    let platform = detector(&device).detect_in(&context);
    let memory = platform.memory_in(&context);
    let elsewhere = detector(&device).detect(device.ordinal());
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    stream.end_capture(flags).expect("the capture goes on");
    assert!(platform.notes().is_empty() && platform.capabilities().device_reads_pinned, "{platform}");
    assert!(elsewhere.notes().is_empty() && memory.notes.is_empty(), "{elsewhere}");
}

/// R24, R43: registration is refused. Everything has another way, none of them duplicates the one memory, and the report
/// says which call refused with which code.
#[test]
fn refused_registration_has_a_named_fallback() {
    for key in ["dgx_spark_gb10", "jetson_agx_thor", "gh200_480gb_numa", "x86_h200_sxm_gen5"] {
        let device = device(key);
        device.fail_always("cuMemHostRegister", NOT_SUPPORTED);
        let platform = detect(&device);
        let capabilities = platform.capabilities();
        assert!(!capabilities.can_register && !capabilities.device_reads_registered, "{key}");
        assert!(!capabilities.can_register_read_only, "{key}");
        assert!(capabilities.can_pin && capabilities.device_reads_pinned, "{key}");
        let named = |text: &String| text.contains("cuMemHostRegister") && text.contains("801");
        assert!(platform.notes().iter().any(named), "{key}: {:?}", platform.notes());
        for host in [HostMemory::Any, HostMemory::Pageable, HostMemory::ReadOnly] {
            let decision = decide(&platform, &reused(8 * MIB, 8).host(host));
            assert_ne!(decision.backing, Backing::Registered, "{key} {host}");
            assert!(decision.reasons.iter().any(named), "{key} {host}: {:?}", decision.reasons);
            if platform.model() == MemoryModel::Unified {
                assert_eq!(decision.strategy, Strategy::ZeroCopy, "{key} {host}");
            }
            if key == "dgx_spark_gb10" {
                assert_eq!(decision.chosen().unwrap().duplicated_bytes, 0, "{key} {host}");
            }
        }
        let error = plan(&platform, &platform.memory(), &Request::new(1).backing(Backing::Registered)).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("registered"), "{error}");
    }
    let confidential = detect(&device("h100_h200_confidential"));
    assert!(!confidential.capabilities().can_register && !confidential.capabilities().device_reads_pinned);
    assert!(confidential.capabilities().can_pin);
    assert_eq!(decide(&confidential, &Request::new(GIB)).strategy, Strategy::Streamed);
}

#[test]
fn refused_pinned_memory_has_a_named_fallback() {
    for (key, strategy, backing) in [
        ("dgx_spark_gb10", Strategy::ZeroCopy, Backing::Managed),
        ("jetson_agx_orin_64gb", Strategy::ZeroCopy, Backing::Registered),
        ("gh200_480gb_numa", Strategy::Coherent, Backing::Registered),
        ("x86_h200_sxm_gen5", Strategy::Streamed, Backing::Device),
    ] {
        let device = device(key);
        device.fail_always("cuMemHostAlloc", 2);
        let platform = detect(&device);
        assert!(!platform.capabilities().can_pin && !platform.capabilities().device_reads_pinned, "{key}");
        let decision = decide(&platform, &Request::new(256 * MIB));
        assert_eq!((decision.strategy, decision.backing), (strategy, backing), "{key}: {decision}");
        assert!(decision.reasons.iter().any(|reason| reason.contains("cuMemHostAlloc")), "{key}: {decision}");
    }
}

/// R46: no managed memory where the CPU must not touch it beside a kernel. R91: none where the driver refuses it.
#[test]
fn managed_memory_only_where_it_is_safe_and_there() {
    let orin = detect(&device("jetson_agx_orin_64gb"));
    assert!(orin.capabilities().managed && !orin.capabilities().concurrent_managed);
    for host in [HostMemory::Any, HostMemory::Pageable] {
        assert_ne!(decide(&orin, &Request::new(MIB).host(host)).backing, Backing::Managed);
    }
    let error = plan(&orin, &orin.memory(), &Request::new(1).backing(Backing::Managed)).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("CONCURRENT_MANAGED_ACCESS"), "{error}");

    let refusing = device("dgx_spark_gb10");
    refusing.fail_always("cuMemAllocManaged", NOT_SUPPORTED);
    let spark = detect(&refusing);
    assert!(!spark.capabilities().managed);
    assert!(spark.notes().iter().any(|note| note.contains("cuMemAllocManaged") && note.contains("801")));
    let decision = decide(&spark, &reused(8 * MIB, 8));
    assert_eq!(decision.strategy, Strategy::ZeroCopy);
    assert_ne!(decision.backing, Backing::Managed);

    let vgpu = detect(&device("vgpu_timesliced_fractional"));
    assert!(!vgpu.capabilities().managed);
    assert!(plan(&vgpu, &vgpu.memory(), &Request::new(1).backing(Backing::Managed)).unwrap_err().is_unsupported());
    assert_eq!(decide(&vgpu, &Request::new(MIB)).strategy, Strategy::Streamed);
    // With concurrent access taken away, Spark falls back to memory that is safe.
    let device = DeviceBuilder::new("dgx_spark_gb10").attribute(CONCURRENT_MANAGED, 0).build().unwrap();
    assert_ne!(decide(&detect(&device), &reused(8 * MIB, 8)).backing, Backing::Managed);
}

/// R90.
#[test]
fn missing_memory_pools_are_a_capability_not_an_error() {
    let device = DeviceBuilder::new("x86_h200_sxm_gen5").attribute(MEMORY_POOLS, 0).build().unwrap();
    let platform = detect(&device);
    assert!(!platform.capabilities().memory_pools);
    assert_eq!(decide(&platform, &Request::new(MIB)).strategy, Strategy::Streamed);
    assert!(!detect(&self::device("jetson_agx_orin_64gb")).capabilities().memory_pools);
}

/// R39: on one memory the driver's figure follows MemFree, which page cache eats.
#[test]
fn free_memory_of_one_memory_is_what_is_available() {
    let gib = |value: f64| (value * GIB as f64) as u64;
    let mut host = HostFigures::new(gib(121.69));
    (host.available, host.free) = (gib(115.65), gib(41.52));
    let near = |left: u64, right: f64| left.abs_diff(gib(right)) < 8192;

    let spark = DeviceBuilder::new("dgx_spark_gb10").host(host.clone()).build().unwrap();
    spark.set_mem_info(gib(41.52), spark.profile().total_mem);
    let memory = detect(&spark).memory();
    assert!(near(memory.free_bytes, 115.65), "{memory}");
    assert!(memory.driver_free.is_some_and(|(low, _)| near(low, 41.52)));
    // The same numbers on a discrete device.
    let discrete = DeviceBuilder::new("dgx_spark_gb10").attribute(INTEGRATED, 0).host(host.clone()).build().unwrap();
    discrete.set_mem_info(gib(41.52), discrete.profile().total_mem);
    let platform = detect(&discrete);
    assert_eq!(platform.model(), MemoryModel::Coherent);
    assert!(near(platform.memory().free_bytes, 41.52));
    // The call itself may fail there.
    spark.fail_always("cuMemGetInfo", 2);
    assert!(near(detect(&spark).memory().free_bytes, 115.65));
    spark.clear_failures();
    // Garbled and missing files.
    for text in [Some("MemAvailable: plenty\n"), None] {
        let path = spark.host_root().join("proc/meminfo");
        match text {
            Some(text) => fs::write(path, text).unwrap(),
            None => fs::remove_file(path).unwrap(),
        }
        let memory = detect(&spark).memory();
        assert!(near(memory.free_bytes, 41.52), "{memory}");
        assert!(memory.notes.iter().any(|note| note.contains("MemAvailable")), "{:?}", memory.notes);
    }
}

#[test]
fn a_containers_limit_binds_in_both_versions() {
    for version in [CgroupVersion::V1, CgroupVersion::V2] {
        let mut host = HostFigures::new(120 * GIB);
        (host.cgroup_limit, host.cgroup_used, host.cgroup_version) = (Some(16 * GIB), 4 * GIB, version);
        let spark = DeviceBuilder::new("dgx_spark_gb10").host(host.clone()).build().unwrap();
        let platform = detect(&spark);
        let memory = platform.memory();
        assert_eq!((memory.free_bytes, memory.container_limit), (12 * GIB, Some(16 * GIB)), "{version:?}");
        assert!(plan(&platform, &memory, &Request::new(12 * GIB)).is_ok());
        assert!(plan(&platform, &memory, &Request::new(12 * GIB + 1)).unwrap_err().is_out_of_memory());
        let h200 = DeviceBuilder::new("x86_h200_sxm_gen5").host(host).build().unwrap();
        let memory = detect(&h200).memory();
        assert!(memory.free_bytes > 100 * GIB, "{memory}");
        assert_eq!(memory.host_available, Some(12 * GIB));
    }
}

/// R49.
#[test]
fn page_cache_in_gpu_memory_is_listed_apart() {
    let device = device("gh200_480gb_numa");
    let node = device.host_root().join("sys/devices/system/node/node1");
    fs::create_dir_all(&node).unwrap();
    fs::write(node.join("meminfo"), "Node 1 FilePages:   62914560 kB\n").unwrap();
    device.set_mem_info(40 * GIB, device.profile().total_mem);
    let memory = detect(&device).memory();
    assert_eq!(memory.reclaimable_bytes, Some(60 * GIB));
    assert_eq!(memory.free_bytes, 40 * GIB);
    assert_eq!(memory.driver_free, Some((40 * GIB, 40 * GIB)));
    assert_eq!(detect(&device).topology().gpu_memory_mode.as_deref(), Some("numa"));
    assert_eq!(detect(&self::device("gh200_480gb_cdmm")).topology().gpu_memory_mode.as_deref(), Some("driver"));
    // More used than there is does no harm.
    device.set_mem_info(0, 1);
    assert_eq!(detect(&device).memory().free_bytes, 0);
}

/// R41: coherent with INTEGRATED 0, and no duplicate with INTEGRATED 1 either.
#[test]
fn a_gh200_is_recognised_whatever_it_says_about_integration() {
    for integrated in [0, 1] {
        let device = DeviceBuilder::new("gh200_480gb_numa").attribute(INTEGRATED, integrated).build().unwrap();
        let decision = decide(&detect(&device), &Request::new(256 * MIB));
        let expected = if integrated == 0 { Strategy::Coherent } else { Strategy::ZeroCopy };
        assert_eq!(decision.strategy, expected);
        assert_eq!(decision.chosen().unwrap().duplicated_bytes, 0);
    }
}

/// R42, R89: a MIG slice's totals come from the driver; no management library is asked.
#[test]
fn a_slice_has_the_memory_that_the_driver_says() {
    let device = device("mig_1g_h100");
    let platform = detect(&device);
    let memory = platform.memory();
    assert_eq!(memory.total_bytes, device.profile().total_mem);
    assert!(memory.free_bytes <= memory.total_bytes && memory.free_bytes > 0);
    assert_eq!(platform.uuid().map(str::len), Some(32));
}

/// R23.
#[test]
fn wsl_is_noted() {
    let platform = detect(&device("wsl2_rtx"));
    assert!(platform.is_wsl() && platform.notes().iter().any(|note| note.contains("WSL")));
    assert!(!detect(&device("x86_h200_sxm_gen5")).is_wsl());
}

/// R45, R50: an old integrated GPU without I/O coherency.
#[test]
fn memory_that_nobody_caches_is_said_to_be_so() {
    let toml = "[platform.tx2]\n[platform.tx2.attributes]\nintegrated = 1\ncan_map_host_memory = 1\n\
                host_register_supported = 0\ncc_major = 6\ncc_minor = 2\n";
    let platform = detect(&DeviceBuilder::from_toml(toml, "tx2").build().unwrap());
    assert_eq!(platform.model(), MemoryModel::UnifiedMapped);
    assert!(!platform.capabilities().io_coherent && !platform.capabilities().can_register);
    assert_eq!(decide(&platform, &Request::new(MIB)).strategy, Strategy::ZeroCopy);
    assert_eq!(decide(&platform, &reused(MIB, 2)).strategy, Strategy::Streamed);
}

#[test]
fn a_profile_with_no_attribute_but_one_is_still_a_machine() {
    for (attributes, model, strategy) in [
        ("integrated = 0", MemoryModel::Discrete, Strategy::Streamed),
        ("integrated = 1", MemoryModel::UnifiedMapped, Strategy::ZeroCopy),
        ("pageable_memory_access = 1", MemoryModel::Hmm, Strategy::Streamed),
        ("pageable_memory_access_uses_host_page_tables = 1", MemoryModel::Coherent, Strategy::Coherent),
        (
            "integrated = 1\npageable_memory_access_uses_host_page_tables = 1\ncc_major = 42\ncc_minor = 7",
            MemoryModel::Unified,
            Strategy::ZeroCopy,
        ),
    ] {
        let toml = format!("[platform.mine]\n[platform.mine.attributes]\n{attributes}\n");
        let platform = detect(&DeviceBuilder::from_toml(&toml, "mine").build().unwrap());
        assert_eq!(platform.model(), model, "{attributes}");
        let decision = decide(&platform, &Request::new(256 * MIB));
        assert_eq!(decision.strategy, strategy, "{attributes}: {decision}");
    }
}

#[test]
fn a_faulted_or_vanished_device_is_reported_not_fatal() {
    let device = device("x86_h200_sxm_gen5");
    let context = CudaContext::new(device.ordinal()).unwrap();
    device.sticky(700);
    let platform = detector(&device).detect_in(&context);
    assert!(!platform.notes().is_empty(), "{platform}");
    platform.memory_in(&context);
    device.sticky(0);
    device.driver_gone(true);
    let platform = detector(&device).detect_in(&context);
    assert_eq!(platform.model(), MemoryModel::HostOnly);
    assert!(platform.notes().iter().any(|note| note.contains("(4)")), "{:?}", platform.notes());
    assert_eq!(detector(&device).detect(device.ordinal()).model(), MemoryModel::HostOnly);
    device.driver_gone(false);
    assert_eq!(detector(&device).detect_in(&context).model(), MemoryModel::Discrete);
}

/// Each call of a detection fails in turn: always a platform, never a panic, nothing left behind.
#[test]
fn any_call_may_fail() {
    let names: Vec<String> = {
        let device = device("dgx_spark_gb10");
        detect(&device);
        device.calls().into_iter().map(|call| call.name).collect()
    };
    let mut names: Vec<String> = names.into_iter().filter(|name| !name.contains("Init")).collect();
    names.sort();
    names.dedup();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        for nth in 1..3 {
            for code in [2, 801] {
                let device = device("dgx_spark_gb10");
                device.fail_nth(&name, nth, code);
                let platform = detector(&device).detect(device.ordinal());
                let decision = plan(&platform, &platform.memory(), &Request::new(MIB));
                assert!(decision.is_ok(), "{name} {nth} {code}: {decision:?}");
                device.clear_failures();
                let freeing = ["Free", "Unregister", "Destroy", "Release", "Synchronize"];
                if !freeing.iter().any(|word| name.contains(word)) {
                    assert!(device.leaks().is_empty(), "{name} {nth} {code}: {:?}", device.leaks());
                }
            }
        }
    }
}

#[test]
fn without_probing_the_attributes_are_believed() {
    let device = device("h100_h200_confidential");
    let platform = detector(&device).probe(false).detect(device.ordinal());
    assert_eq!(device.count("cuMemHostAlloc") + device.count("cuMemHostRegister"), 0);
    assert_eq!(platform.model(), MemoryModel::Discrete);
    assert_eq!(decide(&platform, &Request::new(MIB)).strategy, Strategy::Streamed);
}

#[cfg(feature = "serde")]
#[test]
fn a_report_can_be_written_by_serde_and_read_by_a_person() {
    let platform = detect(&device("dgx_spark_gb10"));
    let json = serde_json::to_value(&platform).unwrap();
    assert_eq!(json["model"], "unified");
    assert_eq!(json["capabilities"]["managed"], true);
    assert_eq!(json["total_bytes"], platform.total_bytes());
    let json = serde_json::to_value(decide(&platform, &Request::new(MIB))).unwrap();
    assert_eq!(json["strategy"], "zero-copy");
    assert!(json["estimates"].as_array().unwrap().len() > 4);
    let json = serde_json::to_value(platform.memory()).unwrap();
    assert!(json["free_bytes"].is_u64());
    let text = platform.to_string();
    for word in ["NVIDIA GB10", "unified", "12.1", "device_reads_pinned", "L2 24.0 MiB"] {
        assert!(text.contains(word), "{word}: {text}");
    }
}
