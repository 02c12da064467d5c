//! The example `offload_advisor` as its users see it: its verdicts on simulated machines, its JSON and chart, its one-line errors.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;

const TALK: &str = "examples/workloads/llama2_70b_gh200.toml";

/// The example lies beside the tests; a run of this test alone has to build it first.
fn example() -> &'static PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let profile = test.parent().unwrap().parent().unwrap();
        let path = profile.join("examples").join("offload_advisor");
        if !path.exists() {
            let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
            let mut build = Command::new(cargo);
            build.args(["build", "--example", "offload_advisor", "--target-dir"]).arg(profile.parent().unwrap());
            if profile.ends_with("release") {
                build.arg("--release");
            }
            assert!(build.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
        }
        path
    })
}

fn run(arguments: &[&str]) -> Output {
    Command::new(example()).args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap()
}

fn advice(workload: &str, machine: &str) -> Value {
    let output = run(&[workload, "--simulate", machine, "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // Exactly one object: `from_slice` refuses anything after it.
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    for number in ["fraction", "gain", "needed_gbs", "link_gbs", "headroom_gbs"] {
        assert!(json[number].is_f64(), "{number}");
    }
    assert!(["resident", "offload", "checkpoint", "both", "does-not-fit"].contains(&json["verdict"].as_str().unwrap()));
    assert!(["compute", "link", "memory"].contains(&json["bound"].as_str().unwrap()));
    assert!(json["steps"].as_array().unwrap().iter().all(Value::is_string));
    json
}

#[test]
fn the_talks_workload_gains_on_grace_hopper_and_nowhere_else() {
    let grace = advice(TALK, "gh200_480gb_numa");
    assert_eq!(grace["verdict"], "offload", "{grace:#}");
    assert!((1.2..=1.7).contains(&grace["gain"].as_f64().unwrap()), "{grace:#}");
    for machine in ["x86_h200_sxm_gen5", "dgx_spark_gb10"] {
        let other = advice(TALK, machine);
        assert_eq!((other["verdict"].as_str(), other["fraction"].as_f64()), (Some("resident"), Some(0.0)), "{other:#}");
    }
    // It does not fit there, and what would have to move takes for ever.
    let small = advice(TALK, "x86_l40s_gen4");
    assert!(small["gain"].as_f64().unwrap() < 0.1, "{small:#}");
}

#[test]
fn what_fits_a_card_stays_there_or_is_recomputed() {
    let advice = advice("examples/workloads/segmentation_24gb.toml", "x86_l40s_gen4");
    assert!(["resident", "checkpoint"].contains(&advice["verdict"].as_str().unwrap()), "{advice:#}");
}

#[test]
fn every_workload_that_is_shipped_gets_an_answer_on_every_kind_of_machine() {
    for file in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/workloads")).unwrap() {
        let file = file.unwrap().path();
        for machine in ["gh200_480gb_numa", "x86_h200_sxm_gen5", "jetson_agx_orin_64gb", "x86_l40s_gen4"] {
            advice(file.to_str().unwrap(), machine);
        }
    }
}

#[test]
fn without_arguments_and_without_a_gpu_it_says_what_it_is_about() {
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("gain.svg");
    let output = run(&["--svg", svg.to_str().unwrap()]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("own traffic") && text.contains("assumed:"), "{text}");
    let chart = std::fs::read_to_string(svg).unwrap();
    assert!(chart.starts_with("<svg") && chart.contains("fraction of the weights"));
}

#[test]
fn bad_input_is_a_line_and_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("workload.toml");
    for (text, named) in [
        ("weights = 1\nseconds = 0.0", "seconds"),
        ("weights = 1\nsecond = 1.0", "second"),
        ("weights = \"many\"", "line 1"),
        ("weights = 5\nactivations = 1\nactivations_in_dram = 2\nseconds = 1.0", "activations_in_dram"),
        ("[[", "line 1"),
    ] {
        std::fs::write(&path, text).unwrap();
        let output = run(&[path.to_str().unwrap(), "--simulate", "gh200_480gb_numa"]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}: {error}");
        assert!(error.contains(named) && error.trim_end().lines().count() == 1, "{text}: {error}");
    }
    for arguments in [&["no-such-file.toml"][..], &[TALK, "--simulate", "gh2000"]] {
        let output = run(arguments);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments:?}");
    }
}
