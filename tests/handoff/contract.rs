//! What comes out, on which machine, with which exit code.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use transfer_tensor::cudarc::get_lib_name_candidates;

use super::{command, refused, run, small_model};

/// Runs with `--json` and checks what holds for every answer.
fn json(arguments: &[&str]) -> Value {
    let output = run(&[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    // Exactly one object: `from_slice` refuses anything after it.
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    check(&answer);
    answer
}

fn check(answer: &Value) {
    let tensors = answer["tensors"].as_array().unwrap();
    for tensor in tensors {
        assert!(tensor["name"].is_string() && tensor["dtype"].is_string());
        assert!(tensor["shape"].as_array().unwrap().iter().all(Value::is_u64));
        assert!(tensor["bytes"].is_u64() && tensor["bytes_copied"].is_u64());
        assert!(["zero-copy", "coherent", "streamed"].contains(&tensor["strategy"].as_str().unwrap()));
        assert!(
            ["pinned", "managed", "registered", "device", "pageable"].contains(&tensor["backing"].as_str().unwrap())
        );
        assert!(tensor["gb_per_s"].is_number() || tensor["gb_per_s"].is_null());
    }
    let sum = |key: &str| tensors.iter().map(|tensor| tensor[key].as_u64().unwrap()).sum::<u64>();
    assert_eq!(total(answer, "tensors"), tensors.len() as u64);
    assert_eq!(total(answer, "bytes"), sum("bytes"));
    assert_eq!(total(answer, "bytes_copied"), sum("bytes_copied"));
    assert_eq!(total(answer, "mismatches"), 0);
    let with_bytes = tensors.iter().filter(|tensor| tensor["bytes"].as_u64() > Some(0)).count();
    assert_eq!(total(answer, "kernels"), with_bytes as u64, "every element went through the kernel");
    assert_eq!(answer["violations"], serde_json::json!([]));
}

fn total(answer: &Value, key: &str) -> u64 {
    answer["totals"][key].as_u64().unwrap_or_else(|| panic!("totals.{key}"))
}

/// The strategy that all tensors have.
fn strategy(answer: &Value) -> &str {
    let tensors = answer["tensors"].as_array().unwrap();
    assert!(tensors.iter().all(|tensor| tensor["strategy"] == tensors[0]["strategy"]));
    tensors[0]["strategy"].as_str().unwrap()
}

/// The host has `bytes` bytes, in blocks of whole pages that are at most an eighth larger.
fn assert_once(answer: &Value, bytes: u64) {
    let blocks = answer["tensors"].as_array().unwrap().len() as u64;
    let peak = total(answer, "host_bytes_peak");
    assert!((bytes..=bytes + bytes / 8 + blocks * 8192).contains(&peak), "{peak} for {bytes} in {blocks} blocks");
}

/// All bytes exist once, in host memory that both sides use.
fn assert_no_duplicate(answer: &Value, bytes: u64) {
    assert_eq!(total(answer, "bytes_copied"), 0);
    assert_eq!(total(answer, "device_bytes_peak"), 0);
    assert_once(answer, bytes);
}

#[test]
fn every_built_in_machine_gives_every_byte_back() {
    let (_folder, file, bytes) = small_model();
    let profiles = cuda_sim::builtin_profiles();
    assert_eq!(profiles.len(), 26);
    for profile in &profiles {
        let answer = json(&[&file, "--simulate", profile]);
        assert_eq!(total(&answer, "bytes"), bytes, "{profile}");
        assert_eq!((&answer["driver"], &answer["profile"]), (&"simulated".into(), &profile.as_str().into()));
        match answer["model"].as_str().unwrap() {
            "unified" | "unified-mapped" => {
                assert_eq!(strategy(&answer), "zero-copy", "{profile}");
                assert_no_duplicate(&answer, bytes);
            }
            "coherent" => {
                assert_eq!(strategy(&answer), "coherent", "{profile}");
                assert_no_duplicate(&answer, bytes);
            }
            "discrete" | "hmm" => {
                assert_eq!(strategy(&answer), "streamed", "{profile}");
                // There and back; the model stays on the device, the host holds one tensor at a time.
                assert_eq!(total(&answer, "bytes_copied"), 2 * bytes, "{profile}");
                assert_eq!(total(&answer, "device_bytes_peak"), bytes, "{profile}");
                // In blocks of powers of two, which are used again.
                let peak = total(&answer, "host_bytes_peak");
                assert!((129 * 33 * 4..=40 << 10).contains(&peak), "{profile}: {peak}");
            }
            other => panic!("{profile}: {other}"),
        }
    }
}

#[test]
fn the_sample_has_every_kind_of_tensor() {
    let answer = json(&["--simulate", "dgx_spark_gb10"]);
    let tensors = answer["tensors"].as_array().unwrap();
    assert!(tensors.iter().any(|tensor| tensor["bytes"] == 0));
    assert!(tensors.iter().any(|tensor| tensor["shape"] == serde_json::json!([])));
    assert!(tensors.iter().any(|tensor| tensor["bytes"].as_u64().unwrap() % 2 == 1));
    for dtype in ["BOOL", "F4", "F6_E2M3", "F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64", "I64", "U16", "C64"] {
        assert!(tensors.iter().any(|tensor| tensor["dtype"] == dtype), "{dtype}");
    }
}

/// A Spark whose driver refuses some kinds of host memory.
const REFUSALS: &str = r#"
[platform.register.attributes]
integrated = 1
pageable_memory_access = 1
pageable_memory_access_uses_host_page_tables = 1
can_map_host_memory = 1
host_register_supported = 1
managed_memory = 1
concurrent_managed_access = 1
unified_addressing = 1
cc_major = 12
cc_minor = 1
[platform.register.behaviour]
host_register_error = 801
"#;

#[test]
fn refused_kinds_of_memory_do_not_lead_to_a_duplicate() {
    let (folder, file, bytes) = small_model();
    let profile = folder.path().join("machines.toml");
    let refused = |more: &str| {
        fs::write(&profile, format!("{REFUSALS}{more}\n")).unwrap();
        let answer = json(&[&file, "--profile", &format!("{}:register", profile.display())]);
        assert_eq!((answer["model"].as_str(), strategy(&answer)), (Some("unified"), "zero-copy"));
        assert_no_duplicate(&answer, bytes);
        answer
    };
    let backing = |answer: &Value| answer["tensors"][0]["backing"].as_str().unwrap().to_owned();

    assert_eq!(backing(&refused("")), "pinned");
    let answer = refused("host_alloc_error = 801");
    assert_eq!(backing(&answer), "managed");
    assert!(answer["notes"].to_string().contains("cuMemHostAlloc"), "{}", answer["notes"]);
    let answer = refused("host_alloc_error = 801\nmanaged_error = 801");
    assert_eq!(backing(&answer), "pageable");
    assert_eq!(total(&answer, "host_bytes_pageable"), bytes, "the driver does not see it, this program counts it");
}

#[test]
fn machines_with_little_memory_do_what_fits() {
    let (folder, file, bytes) = small_model();
    let profile = folder.path().join("machines.toml");
    // The simulated driver takes 512 MiB for itself.
    let text = "[platform.little.attributes]\ntotal_mem_bytes = 536910912\n\
                [platform.unpinned.attributes]\n[platform.unpinned.behaviour]\npinned_limit_bytes = 4096\n";
    fs::write(&profile, text).unwrap();
    let named = |name: &str| format!("{}:{name}", profile.display());
    let answer = json(&[&file, "--profile", &named("little"), "--strategy", "streamed"]);
    assert_eq!(answer["resident"], true);
    assert_eq!(total(&answer, "device_bytes_peak"), bytes);
    // Not all fits in half of it: one tensor at a time.
    fs::write(&profile, text.replace("536910912", "536904912")).unwrap();
    let answer = json(&[&file, "--profile", &named("little"), "--strategy", "streamed"]);
    assert_eq!(answer["resident"], false);
    assert_eq!(total(&answer, "device_bytes_peak"), 129 * 33 * 4);
    // Page-locked memory runs out on the way, which nothing tells beforehand: the sample's largest tensor fits alone.
    let limit = "[platform.limit.attributes]\n[platform.limit.behaviour]\npinned_limit_bytes = 5000000\n";
    fs::write(&profile, text.to_owned() + limit).unwrap();
    let answer = json(&["--profile", &named("limit"), "--strategy", "zero-copy"]);
    assert_eq!(answer["resident"], false);
    assert!(total(&answer, "host_bytes_peak") <= 5_000_000 && total(&answer, "bytes") > 5_000_000);
    // Copies from pageable memory, where nothing more can be pinned.
    let answer = json(&[&file, "--profile", &named("unpinned")]);
    assert_eq!(strategy(&answer), "streamed");
    assert_eq!(total(&answer, "host_bytes_pageable"), 129 * 33 * 4);
}

#[test]
fn a_forced_strategy_is_taken_or_refused_with_its_reason() {
    let (_folder, file, bytes) = small_model();
    for profile in ["dgx_spark_gb10", "jetson_agx_orin_64gb", "gh200_480gb_numa", "x86_h200_sxm_gen5"] {
        let machine = [file.as_str(), "--simulate", profile];
        let answer = json(&[&machine[..], &["--strategy", "zero-copy"]].concat());
        assert_eq!(strategy(&answer), "zero-copy");
        assert_no_duplicate(&answer, bytes);
        let answer = json(&[&machine[..], &["--strategy", "streamed"]].concat());
        assert_eq!(strategy(&answer), "streamed");
        assert_eq!(total(&answer, "bytes_copied"), 2 * bytes);
        let coherent = [&machine[..], &["--strategy", "coherent", "--json"]].concat();
        if profile.starts_with("gh200") {
            assert_eq!(strategy(&json(&coherent[..5])), "coherent");
        } else {
            assert!(refused(&run(&coherent), 1).contains("no coherent link"), "{profile}");
        }
    }
}

#[test]
fn without_json_there_is_a_table_and_the_totals() {
    let (_folder, file, bytes) = small_model();
    let output = run(&[&file, "--simulate", "x86_h200_sxm_gen5"]);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    for word in ["name", "dtype", "shape", "bytes", "strategy", "backing", "copied", "GB/s", "[129, 33]", "simulated"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(text.contains(&format!("7 tensors, {bytes} bytes")) && text.contains("0 mismatches"), "{text}");
    assert!(text.contains(&format!("{bytes} bytes of device memory, ")) && text.contains(" of host memory"), "{text}");
}

#[test]
fn bad_arguments_exit_2_with_one_line() {
    let (folder, file, _) = small_model();
    let toml = folder.path().join("bad.toml");
    fs::write(&toml, "[platform.x.attributes]\nintegrated = \"yes\"\n").unwrap();
    let bad = format!("{}:x", toml.display());
    let unknown = format!("{}:y", toml.display());
    let empty = tempfile::tempdir().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["--strategy", "zerocopy"], "zero-copy"),
        (&["--strategy", "host"], "no device"),
        (&["--strategy"], "--strategy"),
        (&["--simulate", "dgx_spark_gb11"], "dgx_spark_gb10"),
        (&["--profile", "no-colon"], "FILE.toml:NAME"),
        (&["--profile", "/does/not/exist.toml:x"], "/does/not/exist.toml"),
        (&["--profile", &bad], "integrated"),
        (&["--profile", &unknown], "nearest: x"),
        (&["--device", "-1"], "-1"),
        (&["--device", "one"], "one"),
        (&["--device", "7", "--simulate", "dgx_spark_gb10"], "7"),
        (&["--simulate", "dgx_spark_gb10", "--profile", &bad], "--profile"),
        (&["--bogus"], "--bogus"),
        (&[&file, "second"], "second"),
        (&["/does/not/exist.safetensors"], "/does/not/exist.safetensors"),
        (&[empty.path().to_str().unwrap()], "a folder without a .safetensors file"),
        (&["/dev/null"], "not a regular file"),
    ];
    for (arguments, says) in cases {
        for json in [&[][..], &["--json"]] {
            let line = refused(&run(&[arguments, json].concat()), 2);
            assert!(line.contains(says), "{arguments:?}: {line}");
        }
    }
    let help = run(&["--help"]);
    assert!(help.status.success() && String::from_utf8_lossy(&help.stdout).contains("--simulate"));
}

/// Files that are no libraries, under every name the loader tries: they hide a real driver too.
fn hide_the_driver(folder: &Path) {
    for name in ["cuda", "nvcuda"].into_iter().flat_map(get_lib_name_candidates) {
        if !name.contains('/') {
            fs::write(folder.join(name), "this is no library").unwrap();
        }
    }
}

/// The toolkit's stub library: every function is there and answers 34.
fn stub_driver(folder: &Path) {
    let source = include_str!("../../src/driver/load.rs");
    let list = source.split("const REQUIRED: &[&str] = &[").nth(1).and_then(|rest| rest.split("];").next()).unwrap();
    let functions: String = list
        .split('"')
        .skip(1)
        .step_by(2)
        .map(|name| format!("#[unsafe(no_mangle)] extern \"C\" fn {name}() -> u32 {{ 34 }}\n"))
        .collect();
    fs::write(folder.join("stub.rs"), functions).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let arguments = ["--edition=2024", "--crate-type=cdylib", "--crate-name=stub", "-Anon_snake_case", "-o"];
    let built = Command::new(rustc)
        .args(arguments)
        .arg(folder.join("libcuda.so"))
        .arg(folder.join("stub.rs"))
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

#[test]
fn without_a_gpu_it_says_so_and_runs_on_three_simulated_machines() {
    let (_model, file, bytes) = small_model();
    let hide: [fn(&Path); 2] = [hide_the_driver, stub_driver];
    for hide in hide {
        let folder = tempfile::tempdir().unwrap();
        hide(folder.path());
        let run = |arguments: &[&str]| command(arguments).env("LD_LIBRARY_PATH", folder.path()).output().unwrap();

        let output = run(&[&file, "--json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(answer["note"].as_str().unwrap().contains("no GPU"));
        let machines = answer["machines"].as_array().unwrap();
        machines.iter().for_each(check);
        let strategies: Vec<_> = machines.iter().map(strategy).collect();
        assert_eq!(strategies, ["zero-copy", "coherent", "streamed"]);
        assert_no_duplicate(&machines[0], bytes);
        assert_no_duplicate(&machines[1], bytes);

        // Without a file either.
        let output = run(&[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.starts_with("no GPU here"), "{text}");
        for machine in ["dgx_spark_gb10", "gh200_480gb_numa", "x86_h200_sxm_gen5"] {
            assert!(text.contains(machine), "{text}");
        }

        // What one machine refuses does not hide what the others do, nor the failure.
        let output = run(&[&file, "--strategy", "coherent", "--json"]);
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1);
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(answer["machines"][0]["error"].as_str().unwrap().contains("no coherent link"));
        check(&answer["machines"][1]);
    }
}
