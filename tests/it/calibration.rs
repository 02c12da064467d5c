//! Measuring a device: right figures, used from then on, kept on disk, and no harm whatever goes wrong.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cuda_sim::Driver;
use cuda_sim::host::HostFigures;
use transfer_tensor::cudarc::driver::{CudaContext, sys};
use transfer_tensor::{Detector, Device, Error, HostMemory, Request};

use crate::machines::{code, unseen};
use crate::support::{GH200, Gpu, H200, SPARK, builder, driver};

const GIB: u64 = 1 << 30;

/// A device whose calibrations are kept in `folder`.
fn gpu(profile: &str, folder: &Path) -> Gpu {
    match driver() {
        Driver::Real => on(None, folder),
        Driver::Simulated => on(unseen(profile), folder),
    }
}

/// A simulated device on a host with little memory: then less is copied, and it is soon over.
fn small(folder: &Path) -> Option<Gpu> {
    match driver() {
        Driver::Real => None,
        Driver::Simulated => {
            let sim = builder(H200).host(HostFigures::new(4 * GIB)).build().expect("a built-in profile");
            Some(on(Some(sim), folder))
        }
    }
}

fn on(sim: Option<cuda_sim::Device>, folder: &Path) -> Gpu {
    let context = CudaContext::new(sim.as_ref().map_or(0, cuda_sim::Device::ordinal)).expect("a context");
    let stream = context.new_stream().expect("a stream");
    let detector = detector(sim.as_ref(), folder);
    let device = Device::with_detector(&stream, &detector).expect("a device");
    Gpu { sim, context, stream, device }
}

fn detector(sim: Option<&cuda_sim::Device>, folder: &Path) -> Detector {
    let detector = Detector::new().environment(false).cache_folder(folder);
    match sim {
        Some(sim) => detector.fs_root(sim.host_root()),
        None => detector,
    }
}

/// Another handle of the same device, not calibrated.
fn again(gpu: &Gpu, folder: &Path) -> Device {
    Device::with_detector(&gpu.stream, &detector(gpu.sim.as_ref(), folder)).expect("a device")
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// The one file in it.
fn file(folder: &Path) -> PathBuf {
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

fn near(measured: f64, is: f64) -> bool {
    (0.85..=1.15).contains(&(measured / is))
}

#[test]
fn it_finds_what_the_link_carries() {
    for profile in [H200, GH200, SPARK] {
        let folder = folder();
        let gpu = gpu(profile, folder.path());
        let built_in = gpu.device.tuning();
        let found = gpu.device.calibrate().unwrap();
        if let Some(sim) = &gpu.sim {
            let is = &sim.profile().bandwidth;
            assert!(near(found.host_to_device, is.h2d_pinned), "{profile}: {found}");
            assert!(near(found.device_to_host, is.d2h_pinned), "{profile}: {found}");
            // What a slow host had no time for is not there; and of the one size that it is measured at a fast link takes no longer than ten
            // times its latency.
            let near_if_there =
                |rate: Option<f64>, is: f64| rate.is_none_or(|rate| (0.7..=1.15).contains(&(rate / is)));
            assert!(near_if_there(found.driver_pageable_to_device, is.h2d_pageable), "{profile}: {found}");
            assert!(near_if_there(found.driver_device_to_pageable, is.d2h_pageable), "{profile}: {found}");
            // What a copy takes its engine before its first byte, which the simulator has at 0.3 of the whole latency.
            let small = found.small_copy.unwrap() - 4096.0 / (is.h2d_pinned * 1e9);
            assert!((0.8..=1.25).contains(&(small / (0.3e-6 * is.latency_us))), "{profile}: {found}");
            let alone =
                if gpu.device.platform().copy_engines() < 2 { is.h2d_pinned } else { is.h2d_pinned + is.d2h_pinned };
            let both = is.bidirectional_total.unwrap_or(alone);
            assert!(near(found.both_ways.unwrap(), both), "{profile}: {found}, not {both}");
        }
        assert!(found.host_to_device > 0.1 && found.device_to_host > 0.1, "{found}");
        for latency in [found.latency_to_device, found.latency_to_host] {
            assert!(latency.is_some_and(|seconds| seconds > 1e-7 && seconds < 0.1), "{found}");
        }
        assert!(found.memcpy.is_sorted_by_key(|scaling| scaling.threads), "{found}");
        assert!(found.tuning.threads >= 1 && found.tuning.chunk >= 64 << 10, "{found}");
        if profile == GH200 && gpu.sim.is_some() {
            assert_eq!(found.tuning, built_in, "nothing is staged over a coherent link");
        }
        gpu.finish();
    }
}

#[test]
fn what_the_caller_said_is_not_measured_away() {
    let folder = folder();
    let Some(gpu) = small(folder.path()) else { return };
    let mut said = gpu.device.tuning();
    said.chunk = 123 << 10;
    said.crossover_up += 1;
    let device = Device::builder(&gpu.stream)
        .detector(Detector::new().fs_root(gpu.sim.as_ref().unwrap().host_root()).cache_folder(folder.path()))
        .tuning(said)
        .build()
        .unwrap();
    // It would be a strange machine where just that is best.
    drop(device.calibrate().unwrap());
    assert_eq!(device.tuning(), said);
    drop(device);
    gpu.finish();
}

#[test]
fn plans_and_reports_use_it_from_then_on() {
    let folder = folder();
    let gpu = gpu(H200, folder.path());
    let request = Request::new(256 << 20).host(HostMemory::Pinned);
    let handle = gpu.device.clone();
    assert!(handle.calibration().is_none() && handle.platform().calibration().is_none());
    let before = handle.plan(&request).unwrap();
    assert!(!before.reasons.iter().any(|reason| reason.contains("measured on this device")), "{before}");

    let found = gpu.device.calibrate().unwrap();
    assert_eq!(found.cached_in, None);
    let after = handle.plan(&request).unwrap();
    assert!(after.reasons.iter().any(|reason| reason.contains("measured on this device")), "{after}");
    assert_eq!(handle.platform().figures().host_to_device.gbs, found.host_to_device);
    assert_eq!(handle.platform().figures().copy_latency, found.small_copy.unwrap());
    assert_eq!(handle.tuning(), found.tuning);
    assert_eq!(handle.calibration(), Some(&found));
    let text = handle.platform().to_string();
    assert!(text.contains("measured") && text.contains(&format!("{:.1} GB/s to the device", found.host_to_device)));
    let json = serde_json::to_value(handle.platform()).unwrap();
    assert_eq!(json["calibration"]["host_to_device"], found.host_to_device);
    // Once is enough.
    assert_eq!(handle.calibrate().unwrap(), found);
    drop(handle);
    gpu.finish();
}

#[test]
fn it_is_read_back_from_disk_without_a_copy() {
    let folder = folder();
    let gpu = gpu(H200, folder.path());
    let found = gpu.device.calibrate().unwrap();
    let path = file(folder.path());
    let name = path.file_name().unwrap().to_str().unwrap().to_owned();
    assert!(name.starts_with(gpu.device.platform().uuid().unwrap()), "{name}");
    assert!(name.ends_with(concat!("-", env!("CARGO_PKG_VERSION"), ".json")), "{name}");

    let device = again(&gpu, folder.path());
    if let Some(sim) = &gpu.sim {
        sim.clear_calls();
    }
    let read = device.calibrate().unwrap();
    if let Some(sim) = &gpu.sim {
        assert_eq!(sim.count("cuMemcpyHtoDAsync") + sim.count("cuMemAlloc") + sim.count("cuStreamCreate"), 0);
    }
    assert_eq!(read.cached_in.as_deref(), Some(&*path));
    let mut expected = found;
    expected.cached_in = read.cached_in.clone();
    assert_eq!(read, expected);
    assert_eq!(device.tuning(), expected.tuning);
    drop(device);
    gpu.finish();
}

#[test]
fn what_lies_in_the_cache_is_used_only_if_it_is_sound() {
    let folder = folder();
    let Some(gpu) = small(folder.path()) else { return };
    gpu.device.calibrate().unwrap();
    let path = file(folder.path());
    let good = fs::read_to_string(&path).unwrap();
    // (What makes a file sound is tested where that is decided.)
    let foreign = good.replace(gpu.device.platform().uuid().unwrap(), "00000000000000000000000000000000");
    assert!(foreign != good);
    let bad = [String::new(), good[..good.len() / 2].into(), foreign];
    for bad in bad {
        fs::write(&path, &bad).unwrap();
        let device = again(&gpu, folder.path());
        let found = device.calibrate().unwrap();
        let what: String = bad.chars().take(300).collect();
        assert_eq!(found.cached_in, None, "{what}");
        assert!(near(found.host_to_device, 55.3), "{found} {what}");
        // It was replaced by a sound one.
        assert!(again(&gpu, folder.path()).calibrate().unwrap().cached_in.is_some(), "{what}");
    }
    assert_eq!(file(folder.path()), path, "nothing else was left in the folder");
    gpu.finish();
}

#[test]
fn a_cache_that_can_not_be_written_is_only_a_note() {
    let folder = folder();
    let blocked = folder.path().join("file");
    fs::write(&blocked, "not a folder").unwrap();
    let below = blocked.join("below");
    let Some(gpu) = small(&below) else { return };
    let found = gpu.device.calibrate().unwrap();
    assert!(found.notes.iter().any(|note| note.contains("not kept on disk") && note.contains("below")), "{found:?}");
    assert!(gpu.device.platform().to_string().contains("not kept on disk"));
    // A folder where the file should be.
    let inside = folder.path().join("cache");
    let device = again(&gpu, &inside);
    device.calibrate().unwrap();
    let path = file(&inside);
    fs::remove_file(&path).unwrap();
    fs::create_dir_all(path.join("full")).unwrap();
    let found = again(&gpu, &inside).calibrate().unwrap();
    assert!(found.notes.iter().any(|note| note.contains("not kept on disk")), "{found:?}");
    assert_eq!(file(&inside), path, "no temporary file was left");
    drop(device);
    gpu.finish();
}

#[test]
fn a_refused_call_leaves_the_built_in_figures_and_nothing_else() {
    let folder = folder();
    let Some(gpu) = small(folder.path()) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    sim.clear_calls();
    drop(again(&gpu, &folder.path().join("first")).calibrate().unwrap());
    let mut calls: Vec<String> = sim.calls().into_iter().map(|call| call.name).collect();
    // Those that make a context current belong to no device: they would fail for the tests beside this one.
    calls.retain(|call| !call.starts_with("cuCtx"));
    calls.sort();
    calls.dedup();
    assert!(calls.len() > 12, "{calls:?}");
    gpu.finish();
    for (index, call) in calls.iter().enumerate() {
        let Some(gpu) = small(folder.path()) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        // So that memory which is freed too early is seen to be.
        sim.set_free_waits(false);
        for nth in [1, 2] {
            let cache = folder.path().join(format!("{index}-{nth}"));
            let device = again(&gpu, &cache);
            let built_in = (device.tuning(), device.platform().figures().clone());
            sim.fail_nth(call, nth, 999);
            let result = device.calibrate();
            sim.clear_failures();
            if let Err(error) = &result {
                assert!(error.driver_code() == Some(999) || error.is_unsupported(), "{call} {nth}: {error}");
                assert_eq!((device.tuning(), device.platform().figures().clone()), built_in, "{call} {nth}");
                assert!(device.calibration().is_none() && !cache.exists(), "{call} {nth}");
            }
        }
        // It works the next time.
        gpu.device.calibrate().unwrap_or_else(|error| panic!("after {call}: {error}"));
        assert_eq!(sim.violations(), Vec::<String>::new(), "{call}");
        gpu.context.check_err().unwrap();
        // What can not be freed or destroyed is left over.
        if !["Free", "Unregister", "Destroy", "Release"].iter().any(|word| call.contains(word)) {
            println!("{call}");
            gpu.finish();
        }
        fs::remove_dir_all(folder.path()).unwrap();
    }
}

/// A capture of the device's own stream refuses; one of another stream is not disturbed.
#[test]
fn a_capture_is_left_alone() {
    let folder = folder();
    let Some(gpu) = small(folder.path()) else { return };
    let other = gpu.another_stream();
    let capture = |stream: sys::CUstream, work: &dyn Fn()| {
        let (mut graph, mode) = (std::ptr::null_mut(), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        gpu.context.bind_to_thread().unwrap();
        // SAFETY: a live stream, a place for the graph.
        unsafe {
            assert_eq!(code(sys::cuStreamBeginCapture_v2(stream, mode)), 0);
            work();
            assert_eq!(code(sys::cuStreamEndCapture(stream, &raw mut graph)), 0, "something broke the capture");
            assert_eq!(code(sys::cuGraphDestroy(graph)), 0);
        }
    };
    capture(gpu.stream.cu_stream(), &|| {
        let error: Error = gpu.device.calibrate().unwrap_err();
        assert!(error.is_capturing(), "{error}");
    });
    capture(other.cu_stream(), &|| drop(gpu.device.calibrate().unwrap()));
    drop(other);
    gpu.finish();
}

/// Runs [`in_a_child`] with these variables.
fn child(folder: &Path, wish: &str, task: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "calibration::in_a_child", "--nocapture", "--test-threads=1"])
        .env("XDG_CACHE_HOME", folder)
        .env("TRANSFER_TENSOR_CALIBRATE", wish)
        .env("CALIBRATION_TASK", task);
    command
}

#[track_caller]
fn succeeds(mut command: Command) {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("the child ran"), "{text}");
}

#[test]
fn the_environment_calibrates_every_device() {
    let folder = folder();
    succeeds(child(folder.path(), "0", "built in"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    succeeds(child(folder.path(), "1", "measured"));
    let path = file(&folder.path().join("transfer-tensor"));
    let first = fs::read(&path).unwrap();
    succeeds(child(folder.path(), "1", "cached"));
    assert!(fs::read(&path).unwrap() == first);
    succeeds(child(folder.path(), "force", "measured"));
    assert!(fs::read(&path).unwrap() != first);
    succeeds(child(folder.path(), "often", "unknown"));
    // Only absolute paths are cache folders.
    let mut nowhere = child(Path::new("relative"), "1", "not kept");
    nowhere.env_remove("HOME");
    succeeds(nowhere);
}

#[test]
fn two_processes_may_write_at_once() {
    let folder = folder();
    let mut children: Vec<_> = (0..2).map(|_| child(folder.path(), "force", "often").spawn().unwrap()).collect();
    let cache = folder.path().join("transfer-tensor");
    let mut seen = 0;
    while children.iter_mut().any(|child| child.try_wait().unwrap().is_none()) {
        for entry in fs::read_dir(&cache).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "json")
                && let Ok(text) = fs::read_to_string(entry.path())
            {
                serde_json::from_str::<serde_json::Value>(&text).expect("nobody reads half a file");
                seen += 1;
            }
        }
        std::thread::yield_now();
    }
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    assert!(seen > 0);
    file(&cache);
}

/// The part that runs in children; alone it does nothing.
#[test]
fn in_a_child() {
    let Ok(task) = std::env::var("CALIBRATION_TASK") else { return };
    let (sim, ordinal) = match driver() {
        Driver::Real => (None, 0),
        Driver::Simulated => {
            let sim = builder(H200).host(HostFigures::new(4 * GIB)).build().unwrap();
            let ordinal = sim.ordinal();
            (Some(sim), ordinal)
        }
    };
    let stream = CudaContext::new(ordinal).unwrap().new_stream().unwrap();
    let detector = match &sim {
        Some(sim) => Detector::new().fs_root(sim.host_root()),
        None => Detector::new(),
    };
    let device = Device::with_detector(&stream, &detector).unwrap();
    let found = device.calibration();
    match task.as_str() {
        "built in" => assert!(found.is_none()),
        "measured" => assert!(found.is_some_and(|found| found.cached_in.is_none())),
        "cached" => assert!(found.is_some_and(|found| found.cached_in.is_some())),
        "not kept" => assert!(found.unwrap().notes.iter().any(|note| note.contains("XDG_CACHE_HOME"))),
        "unknown" => {
            assert!(found.is_none());
            assert!(device.platform().notes().iter().any(|note| note.contains("\"often\"")));
        }
        "often" => {
            for _ in 0..4 {
                let device = Device::with_detector(&stream, &detector).unwrap();
                assert!(device.calibration().is_some());
            }
        }
        other => panic!("{other}"),
    }
    println!("the child ran");
}
