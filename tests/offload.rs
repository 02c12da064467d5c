//! The examples `offload_advisor` and `offload` as their users see them: verdicts and results on simulated machines, JSON, charts, one-line errors.

mod built;

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const TALK: &str = "examples/workloads/llama2_70b_gh200.toml";

fn run(arguments: &[&str]) -> Output {
    Command::new(built::example("offload_advisor"))
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap()
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
    // R100: such a link does not carry as much back as there.
    let (up, down) = (grace["link"]["up_gbs"].as_f64().unwrap(), grace["link"]["down_gbs"].as_f64().unwrap());
    assert!(up > down * 1.1 && up < 450.0, "{up} {down}");
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

/// The example `offload` on a simulated machine.
fn offload(arguments: &[&str]) -> Output {
    let quick = ["--layers", "8", "--layer-bytes", "64KiB", "--compute-ms", "0.1", "--steps", "2"];
    Command::new(built::example("offload")).args(quick).args(arguments).output().unwrap()
}

#[test]
fn layers_on_the_host_give_the_same_results() {
    for (machine, fraction, moved) in
        [("x86_h200_sxm_gen5", "0.5", true), ("x86_l40s_gen4", "1", true), ("dgx_spark_gb10", "1", false)]
    {
        let output = offload(&["--simulate", machine, "--fraction", fraction, "--json"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["same"], true, "{json:#}");
        assert_eq!(json["up_bytes"].as_u64().unwrap() > 0, moved, "{json:#}");
        assert_eq!(json["saved_bytes"].as_u64().unwrap() > 0, moved, "{json:#}");
        assert!(json["predicted_seconds"].as_f64().unwrap() > 0.0 && json["hit_rate"] == 1.0, "{json:#}");
    }
}

#[test]
fn what_offload_can_not_do_is_one_line() {
    for (arguments, what) in [
        (["--fraction", "1.5"], "1.5"),
        (["--layer-bytes", "7"], "7"),
        (["--layers", "0"], "0"),
        (["--compute-ms", "-1"], "-1"),
        (["--simulate", "nothing"], "nothing"),
    ] {
        let output = Command::new(built::example("offload")).args(arguments).output().unwrap();
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert!(line.starts_with("error: ") && line.lines().count() == 1 && line.contains(what), "{line}");
    }
}
