//! How a process ends that has used tensors: by a panic after a fault, with tensors in statics, in the middle of copies, with results on
//! their way out, after a fork, after the driver is gone (field reports R64, R65, R70, R78, R89). Runs on the simulated driver and, with
//! `TRANSFER_TENSOR_DRIVER=real`, on a GPU.
//!
//! Every test starts this program again as a child that plays a scenario, and looks at its exit code and what it wrote.

mod scenarios;

use std::io::Read;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Tells the child what to play.
const SCENARIO: &str = "TRANSFER_TENSOR_SCENARIO";

/// Nothing here takes this long: who is not done by then hangs.
const HANG: Duration = Duration::from_secs(60);

type Test = (&'static str, fn());

const TESTS: &[Test] = &[
    ("a_panic_after_a_fault_ends_with_our_error", a_panic_after_a_fault_ends_with_our_error),
    ("a_fault_ends_all_who_wait_for_results", || ends_in_silence_often("egress_fault", 10)),
    ("a_pool_in_a_static_ends_in_silence", || ends_in_silence_often("egress_static", 20)),
    ("tensors_in_statics_end_in_silence", || ends_in_silence("statics")),
    ("leaked_tensors_end_in_silence", || ends_in_silence("leaked")),
    ("an_exit_in_the_middle_of_copies_is_silent", || ends_in_silence("exit_mid_copy")),
    ("a_main_that_returns_in_the_middle_of_copies_is_silent", || ends_in_silence("return_mid_copy")),
    ("a_driver_that_is_gone_is_silent", || ends_in_silence("driver_gone")),
    ("a_forked_child_gets_an_error_and_its_parent_goes_on", || ends_in_silence_often("fork", 10)),
    ("a_fork_before_the_first_use_is_no_fork", || ends_in_silence_often("fork_before", 5)),
    ("visible_devices_may_name_a_mig_slice", visible_devices_may_name_a_mig_slice),
];

fn main() -> ExitCode {
    if let Some(scenario) = std::env::var_os(SCENARIO) {
        return scenarios::play(&scenario.to_string_lossy());
    }
    run(std::env::args().skip(1))
}

/// What cargo and nextest want of a test program, as far as they use it.
fn run(arguments: impl Iterator<Item = String>) -> ExitCode {
    let (mut filters, mut skipped, mut list, mut ignored, mut exact) = (vec![], vec![], false, false, false);
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--list" => list = true,
            "--ignored" => ignored = true,
            "--exact" => exact = true,
            "--skip" => skipped.extend(arguments.next()),
            "--test-threads" | "--format" | "--color" | "--logfile" => drop(arguments.next()),
            other if other.starts_with('-') => {}
            _ => filters.push(argument),
        }
    }
    let meant = |word: &String, name: &str| if exact { name == word } else { name.contains(word.as_str()) };
    let chosen = TESTS.iter().filter(|(name, _)| {
        !ignored
            && (filters.is_empty() || filters.iter().any(|word| meant(word, name)))
            && !skipped.iter().any(|word| meant(word, name))
    });
    if list {
        chosen.for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let failed: Vec<_> = chosen
        .filter(|(name, test)| {
            let passed = std::panic::catch_unwind(test).is_ok();
            println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
            !passed
        })
        .collect();
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(101) }
}

fn is_real() -> bool {
    std::env::var_os("TRANSFER_TENSOR_DRIVER").is_some_and(|driver| driver == "real")
}

/// A child that has ended.
struct Ended {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

/// Plays a scenario in a process of its own.
fn child(scenario: &str, change: impl FnOnce(&mut Command)) -> Ended {
    // What a child that ends abruptly leaves behind goes with this.
    let scratch = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.env("TMPDIR", scratch.path());
    command.env(SCENARIO, scenario).env("RUST_BACKTRACE", "0");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    change(&mut command);
    let mut child = command.spawn().expect("a child");
    let (out, err) = (child.stdout.take().expect("a pipe"), child.stderr.take().expect("a pipe"));
    let read = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut text = String::new();
            let _ = pipe.read_to_string(&mut text);
            text
        })
    };
    let (out, err) = (read(Box::new(out)), read(Box::new(err)));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("its status") {
            break status;
        }
        if start.elapsed() > HANG {
            let _ = child.kill();
            panic!("{scenario} hangs");
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let text = |thread: std::thread::JoinHandle<String>| thread.join().expect("a reader");
    Ended { status, stdout: text(out), stderr: text(err) }
}

/// R65: 50 times, for the races between a process that ends and its threads.
fn ends_in_silence(scenario: &str) {
    ends_in_silence_often(scenario, 50);
}

fn ends_in_silence_often(scenario: &str, times: u32) {
    // A real driver takes a good part of a second to begin.
    let times = if is_real() { 2 } else { times };
    for time in 0..times {
        let ended = child(scenario, |command| {
            command.env("CUDA_SIM_SEED", time.to_string());
        });
        let Ended { status, stdout, stderr } = ended;
        assert!(status.code() == Some(0) && stderr.is_empty(), "{scenario}, time {time}: {status}\n{stdout}\n{stderr}");
        assert_eq!(stdout, "played\n", "{scenario}");
    }
}

/// R64: everything is dropped while the panic unwinds, and nothing panics again, which would abort (134, SIGABRT).
fn a_panic_after_a_fault_ends_with_our_error() {
    let times = if is_real() { 1 } else { 10 };
    for scenario in ["panic_after_fault", "panic_after_fault_in_a_thread"] {
        for _ in 0..times {
            let Ended { status, stdout, stderr } = child(scenario, |_| ());
            assert_eq!(status.code(), Some(101), "{status}\n{stdout}\n{stderr}");
            // The first fault is named, and there is one panic.
            assert!(stderr.contains("CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{stderr}");
            assert_eq!(stderr.matches("panicked at").count(), 1, "{stderr}");
        }
    }
}

/// R89: nobody here reads the variable, or takes a UUID for a number.
fn visible_devices_may_name_a_mig_slice() {
    if is_real() {
        return;
    }
    let slice = "MIG-3b5c1f8e-0a1b-5c2d-9e3f-112233445566";
    let Ended { status, stdout, stderr } = child("detect_mig", |command| {
        command.env("CUDA_VISIBLE_DEVICES", slice).env("NVIDIA_VISIBLE_DEVICES", slice);
    });
    assert!(status.code() == Some(0) && stderr.is_empty(), "{status}\n{stdout}\n{stderr}");
    assert_eq!(stdout, "played\n");
}
