//! The examples `egress_to_file` and `pipeline` as their users see them: their JSON, their files, their
//! exit codes and one-line errors.
#![cfg(target_os = "linux")]

mod built;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use transfer_tensor::cudarc::get_lib_name_candidates;

const EXAMPLES: [&str; 2] = ["egress_to_file", "pipeline"];

fn command(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(built::example(name));
    command.args(arguments).env_remove("TRANSFER_TENSOR_STRATEGY");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// What it printed: exactly one JSON object.
fn object(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_str(&text(&output.stdout)).unwrap()
}

/// Runs on a simulated machine; its JSON, in which what holds for each example was checked.
fn json(name: &str, folder: &Path, arguments: &[&str]) -> Value {
    let out = folder.to_str().unwrap();
    let simulate: &[&str] = match arguments.contains(&"--simulate") {
        true => &[],
        false => &["--simulate", "x86_h200_sxm_gen5"],
    };
    let json = object(&command(name, &[&["--json", "--out", out], simulate, arguments].concat()).output().unwrap());
    assert_eq!(json["driver"], "simulated");
    assert!(json["note"].is_null() && json["clock"].as_str().unwrap().contains("simulation"));
    assert!(json["seconds"].as_f64().unwrap() > 0.0 && json["gb_per_s"].as_f64().unwrap() > 0.0);
    assert_eq!(json["egress"]["delivered"], json["steps"]);
    assert_eq!((&json["egress"]["failed"], &json["egress"]["kept"]), (&0.into(), &0.into()));
    json
}

/// As the examples say: what a device begins with.
fn pattern(index: u64) -> f32 {
    (index.wrapping_mul(2_654_435_761) >> 7 & 0xF_FFFF) as f32
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Shape and elements of a `.npy` file of `f32`, by the letter of the format.
fn read_npy(path: &Path) -> ([u64; 2], Vec<f32>) {
    let bytes = fs::read(path).unwrap();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let end = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    assert_eq!((end % 64, bytes[end - 1]), (0, b'\n'), "elements are aligned");
    let header = text(&bytes[10..end]);
    assert!(header.contains("'descr': '<f4'") && header.contains("'fortran_order': False"), "{header}");
    let shape = header.split("'shape': (").nth(1).unwrap().split(')').next().unwrap();
    let shape: Vec<u64> = shape.split(", ").map(|number| number.parse().unwrap()).collect();
    let elements = numbers(&bytes[end..]);
    assert_eq!(elements.len() as u64, shape[0] * shape[1]);
    (shape.try_into().unwrap(), elements)
}

#[test]
fn outputs_are_in_the_file_in_order_in_both_formats() {
    let folder = tempfile::tempdir().unwrap();
    // A size that no piece divides; more workers than outputs at a time.
    let arguments = ["--bytes", "100003", "--steps", "21", "--passes", "3", "--workers", "5", "--capacity", "4"];
    for format in ["npy", "safetensors"] {
        let json = json("egress_to_file", folder.path(), &[&arguments[..], &["--format", format]].concat());
        let path = folder.path().join(format!("outputs.{format}"));
        assert_eq!(json["file"], path.to_str().unwrap());
        let (shape, elements) = match format {
            "npy" => read_npy(&path),
            _ => {
                let bytes = fs::read(&path).unwrap();
                let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
                let tensor = file.tensor("outputs").unwrap();
                assert_eq!((file.len(), tensor.dtype()), (1, safetensors::Dtype::F32));
                ([tensor.shape()[0] as u64, tensor.shape()[1] as u64], numbers(tensor.data()))
            }
        };
        assert_eq!(shape, [21, 25001]);
        assert_eq!((&json["bytes"], &json["elements_checked"]), (&(21 * 25001 * 4).into(), &(21 * 25001).into()));
        assert_eq!(json["file_bytes"], fs::metadata(&path).unwrap().len());
        assert!(json["ratio"].as_f64().unwrap() > 0.0 && json["device_alone_seconds"].as_f64().unwrap() > 0.0);
        for (index, element) in (0..).zip(elements) {
            let (step, i) = (index / 25001, index % 25001);
            assert_eq!(element, pattern(i) + ((step + 1) * 3) as f32, "{format}, step {step}, element {i}");
        }
    }
}

#[test]
fn every_kind_of_machine_writes_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    for machine in ["dgx_spark_gb10", "gh200_480gb_numa", "jetson_agx_orin_64gb", "x86_h200_sxm_gen5"] {
        json("egress_to_file", folder.path(), &["--simulate", machine, "--bytes", "64KiB", "--steps", "9"]);
        files.push(fs::read(folder.path().join("outputs.npy")).unwrap());
        json("pipeline", folder.path(), &["--simulate", machine, "--rows", "16", "--steps", "9"]);
    }
    assert!(files.iter().all(|file| *file == files[0]));
}

#[test]
fn to_nowhere_nothing_is_written() {
    let json = json("egress_to_file", Path::new("/dev/null"), &["--bytes", "64KiB", "--steps", "5"]);
    assert_eq!((&json["file"], &json["format"]), (&"/dev/null".into(), &Value::Null));
    assert_eq!((&json["file_bytes"], &json["elements_checked"]), (&0.into(), &0.into()));
    assert_eq!(json["egress"]["bytes"], 5 * 65536);
}

#[test]
fn the_pipeline_writes_all_rows_and_says_how_busy_its_stages_were() {
    let folder = tempfile::tempdir().unwrap();
    // The last batch has 7 rows.
    let size = ["--rows", "13", "--dim", "101", "--steps", "17", "--passes", "5"];
    for threads in [["1", "1", "1", "1"], ["5", "3", "4", "2"]] {
        let [depth, loaders, workers, capacity] = threads;
        let threads = ["--depth", depth, "--loaders", loaders, "--workers", workers, "--capacity", capacity];
        let json = json("pipeline", folder.path(), &[&size[..], &threads].concat());
        let rows = 13 * 16 + 7;
        let (shape, elements) = read_npy(&folder.path().join("results.npy"));
        assert_eq!(shape, [rows, 101]);
        assert!((0..).zip(elements).all(|(index, element)| element == pattern(index) + 5.0));
        assert_eq!((&json["rows"], &json["elements_checked"]), (&rows.into(), &(rows * 101).into()));
        let stages = json["stages"].as_array().unwrap();
        assert_eq!(stages.len(), 5);
        for stage in stages {
            assert!(stage["stage"].is_string() && stage["seconds"].as_f64().unwrap() >= 0.0, "{stage}");
            // Threads that are at work all the time are busy, and no more than that.
            let most = if stage["threads"].is_null() { f64::INFINITY } else { 1.0 };
            assert!(stage["busy"].is_null() || (0.0..=most).contains(&stage["busy"].as_f64().unwrap()), "{stage}");
        }
        assert!(json["overlap"].as_f64().unwrap() > 0.0 && json["nvtx"].is_boolean());
    }
}

/// As anybody runs them first: without arguments, and without a GPU.
#[test]
fn without_a_gpu_they_say_so_and_run_on_a_simulated_one() {
    let hidden = tempfile::tempdir().unwrap();
    // What can not be loaded comes before the real driver.
    for name in ["cuda", "nvcuda"].into_iter().flat_map(get_lib_name_candidates) {
        if !name.contains('/') {
            fs::write(hidden.path().join(name), "this is no library").unwrap();
        }
    }
    let temporary = tempfile::tempdir().unwrap();
    for name in EXAMPLES {
        let run = |arguments: &[&str]| {
            let mut command = command(name, arguments);
            command.env("LD_LIBRARY_PATH", hidden.path()).env("TMPDIR", temporary.path()).output().unwrap()
        };
        let output = run(&[]);
        assert!(output.status.success(), "{name}: {}", text(&output.stderr));
        // No line of progress where nobody watches.
        assert_eq!(text(&output.stderr), "", "{name}");
        let said = text(&output.stdout);
        assert!(said.starts_with("no GPU here (") && said.contains("NVIDIA H200 (simulated)"), "{name}: {said}");
        let file = said.split_once(temporary.path().to_str().unwrap()).unwrap().1.lines().next().unwrap();
        let file = temporary.path().join(file.trim_start_matches('/'));
        assert!(fs::metadata(&file).unwrap().len() > 1 << 20, "{name}: {}", file.display());

        let json = object(&run(&["--json", "--steps", "2"]));
        assert!(json["note"].as_str().unwrap().contains("no GPU"), "{name}");
        assert_eq!((&json["driver"], &json["profile"]), (&"simulated".into(), &"x86_h200_sxm_gen5".into()), "{name}");
        let line = refused(&run(&["--device", "3"]), 2);
        assert!(line.contains("device 3"), "{name}: {line}");
    }
}

/// Checks that it failed with this code, said why in one line on stderr, and printed no result; the line.
fn refused(output: &Output, code: i32) -> String {
    let line = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{line}");
    assert!(line.starts_with("error: ") && line.ends_with('\n') && line.lines().count() == 1, "{line:?}");
    assert_eq!(text(&output.stdout), "", "{line}");
    line
}

#[test]
fn bad_arguments_exit_2_and_other_failures_1_with_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "in the way").unwrap();
    let file = path.to_str().unwrap();
    for name in EXAMPLES {
        let run = |arguments: &[&str]| {
            command(name, &[&["--simulate", "x86_h200_sxm_gen5"], arguments].concat()).output().unwrap()
        };
        for arguments in [
            &["--steps", "0"][..],
            &["--steps", "many"],
            &["--passes", "0"],
            &["--capacity", "0"],
            &["--steps", "18446744073709551615", "--passes", "2"],
            &["--steps", "8388609", "--passes", "1"],
            &["--device", "1"],
            &["--device", "-1"],
            &["--nonsense"],
            &["one.too.many"],
            &["--out"],
            &["--out", file],
            &["--profile", "no/such/file.toml:x"],
        ] {
            refused(&run(arguments), 2);
        }
        assert!(refused(&command(name, &["--simulate", "zx81"]).output().unwrap(), 2).contains("zx81"));
        // A folder that can not be made is no bad argument.
        let line = refused(&run(&["--out", &format!("{file}/folder")]), 1);
        assert!(line.contains("in the way") || line.contains("folder"), "{name}: {line}");
        let help = run(&["--help"]);
        assert!(help.status.success() && text(&help.stdout).contains("simulated H200"), "{name}");
    }
    let own: [(&str, &[&str]); 6] = [
        ("egress_to_file", &["--bytes", "0"]),
        ("egress_to_file", &["--bytes", "5GiB"]),
        ("egress_to_file", &["--format", "csv"]),
        ("egress_to_file", &["--workers", "0"]),
        ("pipeline", &["--depth", "0"]),
        ("pipeline", &["--loaders", "257"]),
    ];
    for (name, arguments) in own {
        refused(&command(name, arguments).output().unwrap(), 2);
    }
    // A full disk, where Linux has one to offer.
    if Path::new("/dev/full").exists() {
        for (name, file) in [("egress_to_file", "outputs.npy"), ("pipeline", "results.npy")] {
            let full = tempfile::tempdir().unwrap();
            std::os::unix::fs::symlink("/dev/full", full.path().join(file)).unwrap();
            let out = full.path().to_str().unwrap();
            let output = command(name, &["--simulate", "x86_h200_sxm_gen5", "--out", out, "--json"]).output().unwrap();
            assert!(refused(&output, 1).contains(file), "{name}");
        }
    }
}
