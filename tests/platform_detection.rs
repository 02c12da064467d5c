//! The example `platform_detection` as its users see it: its JSON on every machine, its exit codes, its one-line errors.

mod built;

use std::process::{Command, Output};

use serde_json::Value;

fn run_with(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    Command::new(built::example("platform_detection"))
        .args(arguments)
        .env_remove("TRANSFER_TENSOR_STRATEGY")
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs with `--json`, checks what holds for every answer, and returns it.
fn json_with(arguments: &[&str], variables: &[(&str, &str)]) -> Value {
    let output = run_with(&[arguments, &["--json"]].concat(), variables);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    // Exactly one object: `from_str` refuses anything after it.
    let json: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    let word = |key: &str| json[key].as_str().unwrap_or_else(|| panic!("{arguments:?}: {key}"));
    assert!(["cuda", "simulated", "none"].contains(&word("driver")));
    assert!(["unified", "unified-mapped", "coherent", "hmm", "discrete", "host-only"].contains(&word("model")));
    assert!(["zero-copy", "coherent", "streamed", "host"].contains(&word("strategy")));
    assert!(["pinned", "managed", "registered", "device", "pageable"].contains(&word("backing")));
    word("device");
    for key in ["chunk_bytes", "free_bytes", "total_bytes"] {
        assert!(json[key].is_u64(), "{key}");
    }
    assert!(json["free_bytes"].as_u64() <= json["total_bytes"].as_u64());
    assert!(json["capabilities"].as_object().unwrap().values().all(Value::is_boolean));
    assert!(json["reasons"].as_array().unwrap().iter().all(Value::is_string));
    assert!(!json["reasons"].as_array().unwrap().is_empty());
    let estimates = json["estimates"].as_array().unwrap();
    for estimate in estimates {
        assert!(estimate["seconds"].as_f64().unwrap() >= 0.0 && estimate["duplicated_bytes"].is_u64());
        assert!(estimate["allowed"].is_boolean() && !estimate["why"].as_str().unwrap().is_empty());
    }
    let allowed = estimates.iter().filter(|estimate| estimate["allowed"] == true);
    let least = allowed.map(|estimate| estimate["seconds"].as_f64().unwrap()).fold(f64::INFINITY, f64::min);
    let chosen = estimates
        .iter()
        .find(|estimate| estimate["strategy"] == json["strategy"] && estimate["backing"] == json["backing"])
        .unwrap();
    assert_eq!(chosen["allowed"], true);
    assert!(chosen["seconds"].as_f64().unwrap() <= least * 1.15 + f64::EPSILON);
    json
}

fn json(arguments: &[&str]) -> Value {
    json_with(arguments, &[])
}

/// Three requests for each machine: 256 MiB once, 8 MiB eight times, 256 MiB eight times.
fn decisions(profile: &str) -> [(String, String); 3] {
    [("268435456", "streaming"), ("8388608", "reuse=8"), ("268435456", "reuse=8")].map(|(bytes, access)| {
        let json = json(&["--simulate", profile, "--bytes", bytes, "--direction", "h2d", "--access", access]);
        assert_eq!(json["driver"], "simulated");
        let chunked = json["chunk_bytes"].as_u64().unwrap() > 0;
        assert!(!chunked || json["strategy"] == "streamed");
        (json["strategy"].as_str().unwrap().to_owned(), json["backing"].as_str().unwrap().to_owned())
    })
}

#[test]
fn every_row_of_the_table() {
    for profile in cuda_sim::builtin_profiles() {
        let found = decisions(&profile);
        let [first, second, third] = found.each_ref().map(|(strategy, backing)| (strategy.as_str(), backing.as_str()));
        let streamed = ("streamed", "device");
        match profile.as_str() {
            "dgx_spark_gb10" => {
                assert_eq!([first, second, third], [("zero-copy", "pinned"), ("zero-copy", "managed"), first]);
            }
            "jetson_agx_thor" => {
                assert_eq!([first, second], [("zero-copy", "pinned"), ("zero-copy", "registered")]);
                assert!(third.0 == "zero-copy" && ["pinned", "registered"].contains(&third.1));
            }
            "jetson_agx_orin_64gb" | "jetson_agx_xavier_16gb" => {
                assert_eq!([first, second, third], [("zero-copy", "pinned"); 3]);
                let small = json(&["--simulate", &profile, "--bytes", "256KiB", "--access", "reuse=64"]);
                assert_eq!((&small["strategy"], &small["backing"]), (&"streamed".into(), &"device".into()));
            }
            "rtx_spark_n1x_windows" => assert_eq!(json(&["--simulate", &profile])["model"], "unified-mapped"),
            grace if grace.starts_with("gh200_") || grace.starts_with("gb") => {
                assert_eq!(first.0, "coherent", "{profile}");
                assert_eq!([second, third], [streamed; 2], "{profile}");
                let free = json(&["--simulate", &profile])["free_bytes"].as_u64().unwrap();
                let more = (free + 1).to_string();
                let big = json(&["--simulate", &profile, "--bytes", &more, "--access", "reuse=8"]);
                assert_eq!(big["strategy"], "coherent", "{profile}");
            }
            _ => assert_eq!([first, second, third], [streamed; 3], "{profile}"),
        }
    }
}

#[test]
fn a_profile_of_ones_own() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.toml");
    let toml = "
        [platform.odd]
        name = 'Something New'
        colour = 'unknown keys are ignored'
        [platform.odd.attributes]
        integrated = 1
        can_map_host_memory = 1
        managed_memory = 1
        concurrent_managed_access = 1
        pageable_memory_access = 1
        pageable_memory_access_uses_host_page_tables = 1
        host_register_supported = 1
        cc_major = 77
        cc_minor = 3
        l2_cache_bytes = 16777216
        [platform.bare.attributes]
        integrated = 0
        [platform.refusing.attributes]
        integrated = 1
        pageable_memory_access = 1
        pageable_memory_access_uses_host_page_tables = 1
        [platform.refusing.behaviour]
        host_register_error = 801
        host_alloc_works = false
        uvm_supported = false
        [platform.small.attributes]
        integrated = 1
        can_map_host_memory = 1
        total_mem_bytes = 8589934592
        [platform.small.host]
        total = 8589934592
        available = 4294967296
        cgroup_limit = 1073741824";
    std::fs::write(&file, toml).unwrap();
    let of = |name: &str, more: &[&str]| {
        let profile = format!("{}:{name}", file.display());
        json(&[&["--profile", &profile], more].concat())
    };
    let odd = of("odd", &[]);
    assert_eq!((&odd["device"], &odd["model"]), (&"Something New".into(), &"unified".into()));
    assert_eq!((&odd["strategy"], &odd["backing"]), (&"zero-copy".into(), &"pinned".into()));
    assert_eq!(of("odd", &["--bytes", "8MiB", "--access", "reuse=8"])["strategy"], "zero-copy");
    assert_eq!(of("bare", &[])["strategy"], "streamed");
    // Every call refuses: what the page table reaches is left.
    let refusing = of("refusing", &["--access", "reuse=8"]);
    assert_eq!((&refusing["strategy"], &refusing["backing"]), (&"zero-copy".into(), &"pageable".into()));
    for call in ["cuMemHostRegister", "cuMemHostAlloc"] {
        assert!(refusing["reasons"].to_string().contains(call), "{refusing}");
    }
    assert_eq!(of("small", &[])["free_bytes"], 1 << 30);
}

#[test]
fn the_other_direction_and_the_table() {
    for profile in ["dgx_spark_gb10", "gh200_480gb_numa", "x86_h200_sxm_gen5"] {
        let down = json(&["--simulate", profile, "--direction", "d2h"]);
        assert_eq!(down["strategy"], json(&["--simulate", profile])["strategy"], "{profile}");
    }
    let output = run_with(&["--all"], &[]);
    assert!(output.status.success());
    for profile in cuda_sim::builtin_profiles() {
        assert!(text(&output.stdout).contains(&profile), "{profile}");
    }
    let output = run_with(&["--all", "--json"], &[]);
    let json: Value = serde_json::from_str(&text(&output.stdout)).unwrap();
    assert_eq!(json["profiles"].as_array().unwrap().len(), 26);
}

#[test]
fn a_person_can_read_it() {
    let output = run_with(&["--simulate", "x86_h200_sxm_gen5", "--device", "0"], &[]);
    let text = text(&output.stdout);
    for word in ["NVIDIA H200", "discrete", "streamed", "PCIe", "coherent link", "free"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(run_with(&["--help"], &[]).status.success());
}

#[test]
fn bad_arguments_are_one_line_and_exit_2() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad.toml");
    std::fs::write(&file, "[platform.x.attributes]\nintegrated = 'yes'\n[platform.other.attributes]\nintegrated = 1\n")
        .unwrap();
    let of = |name: &str| format!("{}:{name}", file.display());
    let spark = ["--simulate", "dgx_spark_gb10"];
    let cases: &[(&[&str], &[&str])] = &[
        (&["--simulate", "dgx_spark"], &["dgx_spark", "dgx_spark_gb10"]),
        (&["--simulate", ""], &[]),
        (&["--profile", "nowhere.toml:x"], &["nowhere.toml"]),
        (&["--profile", "nowhere.toml"], &["FILE.toml:NAME"]),
        (&["--profile", &of("x")], &["bad.toml", "integrated"]),
        (&["--profile", &of("othr")], &["othr", "other"]),
        (&[spark[0], spark[1], "--bytes", "-5"], &["-5", "--bytes"]),
        (&[spark[0], spark[1], "--bytes", "many"], &["many", "--bytes"]),
        (&[spark[0], spark[1], "--bytes", "18446744073709551616"], &["18446744073709551616"]),
        (&[spark[0], spark[1], "--bytes", "17179869184GiB"], &["17179869184GiB"]),
        (&[spark[0], spark[1], "--access", "reuse=0"], &["reuse=0", "--access"]),
        (&[spark[0], spark[1], "--access", "reuse=-1"], &["reuse=-1"]),
        (&[spark[0], spark[1], "--access", "sometimes"], &["sometimes"]),
        (&[spark[0], spark[1], "--direction", "up"], &["up", "h2d"]),
        (&["--device", "first"], &["first", "--device"]),
        (&["--device", "-1"], &["-1", "--device"]),
        (&["--frobnicate"], &["--frobnicate"]),
        (&["--simulate", "dgx_spark_gb10", "--profile", "a.toml:b"], &["--simulate", "--profile"]),
    ];
    for (arguments, named) in cases {
        for json in [&[][..], &["--json"]] {
            let output = run_with(&[arguments, json].concat(), &[]);
            let line = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{arguments:?}: {line}");
            assert!(line.trim_end().lines().count() == 1, "{arguments:?}: {line}");
            assert!(output.stdout.is_empty(), "{arguments:?}");
            for word in *named {
                assert!(line.contains(word), "{arguments:?} should name {word}: {line}");
            }
        }
    }
}

#[test]
fn what_fits_nowhere_is_a_failure_not_a_bad_argument() {
    let output = run_with(&["--simulate", "dgx_spark_gb10", "--bytes", "18446744073709551615", "--json"], &[]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr).trim_end().lines().count(), 1);
    assert!(output.stdout.is_empty());
}

#[test]
fn the_environment_forces_a_strategy() {
    let variable = |value| [("TRANSFER_TENSOR_STRATEGY", value)];
    let h200 = ["--simulate", "x86_h200_sxm_gen5"];
    assert_eq!(json_with(&h200, &variable("zero-copy"))["strategy"], "zero-copy");
    assert_eq!(json_with(&h200, &variable("auto"))["strategy"], "streamed");
    let refused = run_with(&h200, &variable("coherent"));
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("no coherent link"), "{}", text(&refused.stderr));
    let bad = run_with(&h200, &variable("zerocopy"));
    assert_eq!(bad.status.code(), Some(2));
    for word in ["TRANSFER_TENSOR_STRATEGY", "zerocopy", "zero-copy"] {
        assert!(text(&bad.stderr).contains(word), "{}", text(&bad.stderr));
    }
}

/// Whatever says which devices are visible is the driver's business; a MIG slice's name is no number.
#[test]
fn visible_devices_are_not_parsed() {
    let variables = [("CUDA_VISIBLE_DEVICES", "MIG-41b04a5c-96d3-5b8a-8ac5-3b6f2a2c8a77")];
    assert_eq!(json_with(&["--simulate", "mig_1g_h100"], &variables)["model"], "discrete");
}

#[test]
fn it_measures_where_it_is_asked_to() {
    let json = json(&["--simulate", "x86_h200_sxm_gen5", "--calibrate"]);
    let rate = json["calibration"]["host_to_device"].as_f64().unwrap();
    assert!((0.85..=1.15).contains(&(rate / 55.3)), "{}", json["calibration"]);
    assert_eq!(json["figures"]["host_to_device"]["gbs"], rate);
    assert!(json["figures"]["source"].as_str().unwrap().starts_with("measured on this device"));
    let shown = run_with(&["--simulate", "dgx_spark_gb10", "--calibrate"], &[]);
    let shown = text(&shown.stdout);
    assert!(shown.contains("measured      link 1") && shown.contains("both ways at once"), "{shown}");
    assert!(!run_with(&["--all", "--calibrate"], &[]).status.success());
}
