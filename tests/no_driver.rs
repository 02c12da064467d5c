//! No driver, the toolkit's stub library, a driver that lacks a function: typed errors, no panic, a clean exit.
//!
//! Which library a process gets is decided once. So each case runs in a child process (this binary again), with a folder of
//! its own in front of the library path.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use transfer_tensor::cudarc::get_lib_name_candidates;
use transfer_tensor::{Detector, Device, MemoryModel, Platform, Request, Strategy, plan};

/// What a child is to expect in the text of every error.
const EXPECT: &str = "TRANSFER_TENSOR_TEST_EXPECT";

/// The functions that the loader looks up, as its own source lists them.
fn required() -> Vec<&'static str> {
    let source = include_str!("../src/driver/load.rs");
    let list = source.split("const REQUIRED: &[&str] = &[").nth(1).and_then(|rest| rest.split("];").next());
    let names: Vec<_> = list.unwrap_or("").split('"').skip(1).step_by(2).collect();
    assert!(names.len() > 30 && names.contains(&"cuInit"), "{names:?}");
    names
}

/// Builds `libcuda.so` with these functions, each answering `code`.
fn library(folder: &Path, functions: &[&str], code: u32) {
    let functions: String = functions
        .iter()
        .map(|name| format!("#[unsafe(no_mangle)] extern \"C\" fn {name}() -> u32 {{ {code} }}\n"))
        .collect();
    let source = folder.join("stub.rs");
    fs::write(&source, functions).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let built = Command::new(&rustc)
        .args(["--edition=2024", "--crate-type=cdylib", "--crate-name=stub", "-Anon_snake_case", "-o"])
        .arg(folder.join("libcuda.so"))
        .arg(&source)
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

/// Files that are no libraries, under every name the loader tries: they hide a real driver too.
fn nothing(folder: &Path) {
    for name in ["cuda", "nvcuda"].into_iter().flat_map(get_lib_name_candidates) {
        if !name.contains('/') {
            fs::write(folder.join(name), "this is no library").unwrap();
        }
    }
}

fn child(folder: &Path, expect: &str) {
    let Output { status, stdout, stderr } = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "in_a_child", "--nocapture", "--test-threads=1"])
        .env("LD_LIBRARY_PATH", folder)
        .env(EXPECT, expect)
        .env("TRANSFER_TENSOR_CALIBRATE", "force")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{status}: {text}");
    assert!(text.contains("the child ran") && !text.contains("panicked"), "{text}");
}

#[test]
fn no_library() {
    let folder = tempfile::tempdir().unwrap();
    nothing(folder.path());
    child(folder.path(), "no CUDA driver");
}

/// The example says so too, and that is no failure.
#[test]
fn the_example_reports_host_only() {
    let folder = tempfile::tempdir().unwrap();
    nothing(folder.path());
    let test = std::env::current_exe().unwrap();
    let example = test.parent().unwrap().parent().unwrap().join("examples").join("platform_detection");
    if !example.exists() {
        // A run of this test alone builds no examples; `platform_detection.rs` sees to them.
        return;
    }
    for device in ["0", "5"] {
        let output = Command::new(&example)
            .args(["--json", "--device", device])
            .env("LD_LIBRARY_PATH", folder.path())
            .env_remove("TRANSFER_TENSOR_STRATEGY")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let words = ["driver", "model", "strategy", "backing"].map(|key| json[key].as_str().unwrap());
        assert_eq!(words, ["none", "host-only", "host", "pageable"]);
        assert!(json["reasons"].to_string().contains("no CUDA driver"));
    }
}

#[test]
fn the_toolkits_stub_answers_34() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), &required(), 34);
    child(folder.path(), "stub library");
}

#[test]
fn a_driver_without_devices_answers_100() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), &required(), 100);
    child(folder.path(), "sees no device");
}

#[test]
fn a_driver_lacks_a_function() {
    let folder = tempfile::tempdir().unwrap();
    let all = required();
    let most: Vec<_> = all.iter().copied().filter(|name| *name != "cuThreadExchangeStreamCaptureMode").collect();
    library(folder.path(), &most, 0);
    child(folder.path(), "cuThreadExchangeStreamCaptureMode");
}

#[test]
fn a_library_without_any_function() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), &[], 0);
    child(folder.path(), "cuInit");
}

/// The part that runs in the children; alone it does nothing.
#[test]
fn in_a_child() {
    let Ok(expect) = std::env::var(EXPECT) else { return };
    for _ in 0..2 {
        let error = Detector::device_count().unwrap_err();
        assert!(error.is_no_driver(), "{error:?}");
        for text in [error.to_string(), format!("{error:?}")] {
            assert!(!text.is_empty());
        }
        assert!(error.to_string().contains(&expect), "{error}");

        let error = Device::open(0).unwrap_err();
        assert!(error.is_no_driver() && error.to_string().contains(&expect), "{error:?}");

        let platforms = [Platform::detect(0), Platform::detect(usize::MAX), Detector::new().probe(false).detect(3)];
        for platform in platforms.into_iter().chain(Detector::new().detect_all()) {
            assert_eq!(platform.model(), MemoryModel::HostOnly);
            assert!(platform.notes().iter().any(|note| note.contains(&expect)), "{platform}");
            let memory = platform.memory();
            assert_eq!(memory.total_bytes, memory.host_total.unwrap_or(0));
            let request = Request::new(4096);
            assert_eq!(plan(&platform, &memory, &request).unwrap().strategy, Strategy::Host);
            for strategy in [Strategy::ZeroCopy, Strategy::Coherent, Strategy::Streamed] {
                let error = plan(&platform, &memory, &request.clone().strategy(strategy)).unwrap_err();
                assert!(error.is_unsupported() && error.to_string().contains("no device"), "{error}");
            }
        }
    }
    // From several threads at once, and once more while the process ends.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_eq!(Platform::detect(0).model(), MemoryModel::HostOnly));
        }
    });
    println!("the child ran");
}
