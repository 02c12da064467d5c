//! One memory, coherent links, and what their drivers say about free memory and about registering
//! (field reports R39, R41, R42, R43, R49, R50).

use std::fs;

use cuda_sim::DeviceBuilder;
use cuda_sim::host::HostFigures;
use transfer_tensor::{Access, Backing, Direction, HostMemory, MemoryModel, Request, Strategy};

use crate::machines::{built, drain, on, pattern, unseen, xor_on_device, xor_on_host};
use crate::support::{Gpu, H200, SPARK};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
const INTEGRATED: i32 = 18;
const PAGEABLE: i32 = 88;
const CONCURRENT_MANAGED: i32 = 89;
const HOST_PAGE_TABLES: i32 = 100;

fn gib(value: f64) -> u64 {
    (value * GIB as f64) as u64
}

fn near(left: u64, right: u64) -> bool {
    left.abs_diff(right) < MIB
}

/// R39: a Spark after somebody wrote a 60 GiB file: the driver calls the page cache used, the kernel calls it available.
fn full_of_page_cache() -> HostFigures {
    HostFigures { free: gib(41.52), available: gib(115.65), ..HostFigures::new(gib(121.69)) }
}

#[test]
fn page_cache_is_free_memory_on_an_integrated_gpu_and_only_there() {
    for (integrated, expected) in [(1, 115.65), (0, 41.52)] {
        let builder = DeviceBuilder::new(SPARK)
            .host(full_of_page_cache())
            .attribute(INTEGRATED, integrated)
            .attribute(PAGEABLE, integrated)
            .attribute(HOST_PAGE_TABLES, integrated);
        let Some(gpu) = built(builder) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        sim.set_mem_info(gib(41.52), gib(121.69));
        let memory = gpu.device.memory();
        assert!(near(memory.free_bytes, gib(expected)), "{integrated}: {memory}");
        assert_eq!(memory.driver_free, Some((gib(41.52), gib(41.52))));
        // And a tensor of that size is planned, or not.
        let plan = gpu.device.plan(&Request::new(gib(100.0)).strategy(Strategy::ZeroCopy)).unwrap();
        let copied = plan.estimates.iter().find(|estimate| estimate.strategy == Strategy::Streamed).unwrap();
        assert!(!copied.allowed && copied.why.contains("free"), "{}", copied.why);
        let copy = Request::new(gib(50.0)).host(HostMemory::Pageable).strategy(Strategy::Streamed);
        assert_eq!(gpu.device.plan(&copy).is_ok(), integrated == 1);
        gpu.finish();
    }
}

#[test]
fn a_container_binds_an_integrated_gpu() {
    let mut host = full_of_page_cache();
    (host.cgroup_limit, host.cgroup_used) = (Some(16 * GIB), 4 * GIB);
    let Some(gpu) = built(DeviceBuilder::new(SPARK).host(host)) else { return };
    let memory = gpu.device.memory();
    assert_eq!((memory.free_bytes, memory.container_limit), (12 * GIB, Some(16 * GIB)));
    let error = gpu.device.tensor().zeros::<u8>([usize::try_from(13 * GIB).unwrap()]).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    gpu.finish();
}

#[test]
fn a_meminfo_that_is_missing_or_garbled_is_a_note() {
    for text in
        [None, Some(""), Some("MemAvailable: plenty kB\n"), Some("\u{0}\u{1}\n:::"), Some("MemAvailable: -5 kB")]
    {
        let Some(sim) = unseen(SPARK) else { return };
        sim.set_mem_info(gib(41.52), gib(121.69));
        let meminfo = sim.host_root().join("proc/meminfo");
        match text {
            Some(text) => fs::write(meminfo, text).unwrap(),
            None => fs::remove_file(meminfo).unwrap(),
        }
        let gpu = on(sim);
        let memory = gpu.device.memory();
        assert!(near(memory.free_bytes, gib(41.52)), "{text:?}: {memory}");
        assert!(memory.notes.iter().any(|note| note.contains("MemAvailable")), "{text:?}: {:?}", memory.notes);
        gpu.device.tensor().zeros::<u8>([1000]).unwrap();
        drain(&gpu.device);
        gpu.finish();
    }
}

/// R41: what a machine is follows from its attributes, never from its name or capability.
#[test]
fn the_attributes_alone_make_the_model() {
    use MemoryModel::{Coherent, Discrete, Hmm, Unified, UnifiedMapped};
    // (capability, integrated, pageable, host page tables, concurrent managed)
    let machines = [
        ("H100 PCIe", (9, 0), [0, 0, 0, 1], Discrete),
        ("H100 with HMM", (9, 0), [0, 1, 0, 1], Hmm),
        ("GH200", (9, 0), [0, 1, 1, 1], Coherent),
        ("a GH200 that calls itself integrated", (9, 0), [1, 1, 1, 1], Unified),
        ("GB200", (10, 0), [0, 1, 1, 1], Coherent),
        ("B200", (10, 0), [0, 1, 0, 1], Hmm),
        ("Spark", (12, 1), [1, 1, 1, 1], Unified),
        ("RTX 5090", (12, 0), [0, 0, 0, 1], Discrete),
        ("Orin", (8, 7), [1, 0, 0, 0], UnifiedMapped),
        ("a capability of the future", (42, 0), [0, 1, 1, 1], Coherent),
    ];
    for base in [H200, SPARK] {
        for (name, (major, minor), [integrated, pageable, tables, concurrent], model) in machines {
            let builder = DeviceBuilder::new(base)
                .attribute(75, major)
                .attribute(76, minor)
                .attribute(INTEGRATED, integrated)
                .attribute(PAGEABLE, pageable)
                .attribute(HOST_PAGE_TABLES, tables)
                .attribute(CONCURRENT_MANAGED, concurrent);
            let Some(gpu) = built(builder) else { return };
            let platform = gpu.device.platform();
            assert_eq!(platform.model(), model, "{name} on {base}");
            assert_eq!(platform.compute_capability(), Some((major, minor)));
            // Whatever it is, it has no duplicate where there is one memory, and its values arrive.
            let mut tensor = gpu.device.tensor().from_slice(&pattern(1000, 1), [1000]).unwrap();
            let zero_copy = matches!(model, Unified | UnifiedMapped | Coherent);
            assert_eq!(tensor.is_zero_copy(), zero_copy, "{name} on {base}: {}", tensor.decision());
            xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
            let mut expected = pattern(1000, 1);
            xor_on_host(&mut expected);
            assert_eq!(*tensor.host().unwrap(), *expected, "{name} on {base}");
            drop(tensor);
            drain(&gpu.device);
            gpu.finish();
        }
    }
}

/// A machine with an H200 on PCIe, as it was found to be.
#[test]
fn an_h200_is_a_discrete_gpu() {
    let gpu = Gpu::any(H200);
    let platform = gpu.device.platform();
    assert_eq!(platform.model(), MemoryModel::Discrete, "{platform}");
    let attributes = platform.attributes();
    assert_eq!(attributes.integrated, Some(0));
    assert_eq!(attributes.pageable_memory_access_uses_host_page_tables, Some(0));
    assert_eq!(platform.compute_capability(), Some((9, 0)));
    assert!(platform.capabilities().concurrent_managed && platform.capabilities().can_register_read_only);
    assert!(platform.total_bytes() > 130 * GIB);
    gpu.finish();
}

/// R42: tools that ask NVML get a total, an error, or the carve-out. We ask the driver, and whatever `cuMemGetInfo` says of
/// a total, the device's own counts.
#[test]
fn the_total_is_the_drivers_whatever_else_is_said() {
    let mut totals = Vec::new();
    let answers =
        [None, Some((0, 0)), Some((gib(41.0), gib(121.69))), Some((8128 * MIB, 8128 * MIB)), Some((u64::MAX, 1))];
    for answer in answers {
        let Some(gpu) = built(DeviceBuilder::new(SPARK).host(full_of_page_cache())) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        match answer {
            Some((free, total)) => sim.set_mem_info(free, total),
            None => sim.fail_always("cuMemGetInfo", 801),
        }
        let memory = gpu.device.memory();
        assert!(near(memory.free_bytes, gib(115.65)), "{answer:?}: {memory}");
        assert!(memory.used_bytes() <= memory.total_bytes);
        assert_eq!(memory.driver_free.is_none(), answer.is_none());
        totals.push(memory.total_bytes);
        sim.clear_failures();
        gpu.finish();
    }
    assert!(totals.iter().all(|total| *total == totals[0] && *total > 100 * GIB), "{totals:?}");
}

/// Eight "weights" of a model, made from memory that exists.
fn eight_tensors(gpu: &Gpu) -> Vec<transfer_tensor::TransferTensor<u8>> {
    let tensors = (0..8).map(|i| {
        let values = pattern(100_000 + i, i as u64);
        let address = values.as_ptr() as u64;
        let len = values.len();
        let tensor = gpu.device.tensor().from_vec(values, [len]).unwrap();
        assert_eq!(tensor.device(&gpu.stream).unwrap().address(), address, "{}", tensor.decision());
        assert!(tensor.is_zero_copy());
        tensor
    });
    tensors.collect()
}

/// R43: zero-copy of what is there duplicates nothing, whether the driver registers it or not.
#[test]
fn a_model_is_held_once_with_and_without_registration() {
    for refuse in [true, false] {
        let Some(sim) = unseen(SPARK) else { return };
        if refuse {
            sim.fail_always("cuMemHostRegister", 801);
        }
        let gpu = on(sim);
        let sim = gpu.sim.as_ref().unwrap();
        assert_eq!(gpu.device.platform().capabilities().can_register, !refuse);
        let before = sim.evidence();
        let mut tensors = eight_tensors(&gpu);
        for (i, tensor) in tensors.iter_mut().enumerate() {
            xor_on_device(&gpu.context, &gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
            let mut expected = pattern(100_000 + i, i as u64);
            xor_on_host(&mut expected);
            assert!(*tensor.host().unwrap() == *expected);
            assert_eq!(tensor.copied_bytes(), (0, 0));
            assert!(matches!(tensor.backing(), Backing::Pageable | Backing::Registered));
        }
        let after = sim.evidence();
        assert_eq!(after.device_bytes_peak, 0);
        assert_eq!(after.pinned_bytes, before.pinned_bytes);
        assert_eq!(after.copied_h2d_pageable + after.copied_h2d_pinned, 0);
        assert_eq!(after.copied_d2h_pageable + after.copied_d2h_pinned, 0);
        // Registered by name, where that is possible.
        let named = gpu.device.tensor().backing(Backing::Registered).from_vec(pattern(5000, 9), [5000]);
        match named {
            Ok(tensor) => {
                assert!(!refuse);
                assert_eq!((tensor.backing(), tensor.copied_bytes()), (Backing::Registered, (0, 0)));
                assert_eq!(sim.evidence().registered_bytes, after.registered_bytes + 5000);
            }
            Err(refused) => {
                assert!(refuse && refused.error.is_unsupported(), "{}", refused.error);
                assert_eq!(refused.value, pattern(5000, 9));
            }
        }
        drop(tensors);
        drain(&gpu.device);
        gpu.finish();
    }
}

/// Registration that begins to fail after the machine was looked at: the tensors are still held once.
#[test]
fn registration_that_fails_late_makes_no_duplicate() {
    let Some(gpu) = Gpu::simulated(SPARK) else { return };
    gpu.sim.as_ref().unwrap().fail_always("cuMemHostRegister", 801);
    let tensors = eight_tensors(&gpu);
    assert!(tensors.iter().all(|tensor| tensor.copied_bytes() == (0, 0)));
    assert_eq!(gpu.sim.as_ref().unwrap().evidence().device_bytes_peak, 0);
    drop(tensors);
    drain(&gpu.device);
    gpu.finish();
}

/// Where the device reads neither ordinary nor registered memory a copy is needed, and the tensor says so.
#[test]
fn a_forced_copy_is_counted() {
    let builder = DeviceBuilder::new("jetson_agx_orin_64gb").attribute(99, 0);
    let Some(gpu) = built(builder) else { return };
    let values = pattern(100_000, 2);
    let tensor = gpu.device.tensor().from_vec(values.clone(), [100_000]).unwrap();
    assert_eq!((tensor.backing(), tensor.is_zero_copy()), (Backing::Pinned, true));
    assert_eq!(tensor.copied_bytes(), (100_000, 0));
    assert_eq!(tensor.decision().chosen().unwrap().duplicated_bytes, 100_000);
    assert_eq!(tensor.into_vec().unwrap(), values);
    drain(&gpu.device);
    gpu.finish();
}

/// R49: file pages that the kernel put into GPU memory are listed apart; odd figures do no harm.
#[test]
fn file_pages_in_gpu_memory_are_listed_apart() {
    let Some(gpu) = Gpu::simulated("gh200_480gb_numa") else { return };
    let sim = gpu.sim.as_ref().unwrap();
    sim.set_mem_info(40 * GIB, 95 * GIB);
    let node = gpu.device.platform().attributes().numa_id.unwrap();
    let text = format!("Node {node} MemTotal: {} kB\nNode {node} FilePages: {} kB\n", 95 * GIB / 1024, 60 * GIB / 1024);
    fs::write(sim.host_root().join(format!("sys/devices/system/node/node{node}/meminfo")), text).unwrap();
    let memory = gpu.device.memory();
    assert_eq!(memory.reclaimable_bytes, Some(60 * GIB));
    assert_eq!(memory.driver_free, Some((40 * GIB, 40 * GIB)));
    assert_eq!(memory.free_bytes, 40 * GIB);
    assert!(memory.to_string().contains("60.0 GiB of file pages"), "{memory}");
    for (free, total) in [(u64::MAX, 1), (200 * GIB, 95 * GIB), (0, 0)] {
        sim.set_mem_info(free, total);
        let memory = gpu.device.memory();
        assert!(memory.free_bytes <= memory.total_bytes && memory.used_bytes() <= memory.total_bytes);
    }
    gpu.finish();
}

/// Two looks at a figure that moves make a range.
#[test]
fn a_driver_figure_that_moves_is_a_range() {
    let Some(gpu) = Gpu::simulated("gh200_480gb_numa") else { return };
    let sim = gpu.sim.as_ref().unwrap();
    // Another thread changes it all the time, as other processes do.
    sim.set_mem_info(40 * GIB, 95 * GIB);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let mover = scope.spawn(|| {
            for i in 0u64.. {
                sim.set_mem_info((40 + i % 2) * GIB, 95 * GIB);
                if stop.load(std::sync::atomic::Ordering::Relaxed) {
                    break;
                }
            }
        });
        let range = (0..100_000).find_map(|_| {
            let (least, most) = gpu.device.memory().driver_free?;
            assert!(least <= most && least >= 40 * GIB && most <= 95 * GIB);
            (least < most).then_some((least, most))
        });
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        mover.join().unwrap();
        range
    });
    assert_eq!(seen, Some((40 * GIB, 41 * GIB)));
    gpu.finish();
}

/// R50: before compute capability 7.2 neither side caches mapped memory: reused data is copied, streamed data is not.
#[test]
fn uncached_mapped_memory_is_no_choice_for_data_that_is_reused() {
    for (capability, coherent) in [((6, 2), false), ((7, 2), true), ((8, 7), true)] {
        let builder =
            DeviceBuilder::new("jetson_agx_orin_64gb").attribute(75, capability.0).attribute(76, capability.1);
        let Some(gpu) = built(builder) else { return };
        assert_eq!(gpu.device.platform().capabilities().io_coherent, coherent);
        for bytes in [64 << 10, 8 * MIB, 256 * MIB] {
            let once = gpu.device.plan(&Request::new(bytes)).unwrap();
            assert_eq!(once.strategy, Strategy::ZeroCopy, "{capability:?}: {once}");
            for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
                let request = Request::new(bytes).access(Access::reuse(2).unwrap()).direction(direction);
                let again = gpu.device.plan(&request).unwrap();
                if !coherent {
                    assert_eq!(again.strategy, Strategy::Streamed, "{again}");
                    let why = again.estimates.iter().find(|estimate| estimate.backing == Backing::Pinned).unwrap();
                    assert!(!why.allowed && why.why.contains("cache"), "{}", why.why);
                }
            }
        }
        gpu.finish();
    }
}
