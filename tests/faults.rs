//! Field report R36: a file's pages are not faulted in one by one, and do not pile up. Alone in its process: what is
//! counted is the process's.
#![cfg(all(target_os = "linux", feature = "safetensors"))]

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use transfer_tensor::cudarc::driver::CudaContext;
use transfer_tensor::{Checkpoint, Device, Reading, Strategy};

const BYTES: usize = 96 << 20;

/// Page faults of this process so far, with and without reading from a disk (getrusage(2)).
fn faults() -> u64 {
    // `struct rusage`: two `struct timeval`, then 14 longs, of which the 5th and 6th are the faults.
    let mut usage = [0i64; 18];
    unsafe extern "C" {
        fn getrusage(who: std::ffi::c_int, usage: *mut i64) -> std::ffi::c_int;
    }
    const RUSAGE_SELF: std::ffi::c_int = 0;
    // SAFETY: the call writes one `struct rusage`, which has 18 longs on 64-bit Linux.
    assert_eq!(unsafe { getrusage(RUSAGE_SELF, usage.as_mut_ptr()) }, 0);
    (usage[8] + usage[9]) as u64
}

/// What this process has in memory, in bytes.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

fn write(path: &Path) {
    let bytes: Vec<u8> = (0..BYTES).map(|i| (i * 7 % 251) as u8).collect();
    let half = |bytes| safetensors::tensor::TensorView::new(safetensors::Dtype::U8, vec![BYTES / 2], bytes).unwrap();
    let tensors = [("a", half(&bytes[..BYTES / 2])), ("b", half(&bytes[BYTES / 2..]))];
    fs::write(path, safetensors::serialize(tensors, None).unwrap()).unwrap();
}

/// Loads the file; page faults meanwhile, and by how much the process grew at most.
fn load(path: &Path, device: &Device, reading: Reading) -> (u64, u64, Strategy) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let (faults_before, resident_before) = (faults(), resident());
    let mut most = 0;
    let note = |_: transfer_tensor::Progress<'_>| {
        most = most.max(resident());
        ControlFlow::Continue(())
    };
    let tensors = checkpoint.load(device, device.stream()).reading(reading).progress(note).run().unwrap();
    tensors.values().for_each(|tensor| drop(tensor.bytes().device(device.stream()).unwrap()));
    device.stream().synchronize().unwrap();
    let strategy = tensors["a"].bytes().strategy();
    let answer = (faults() - faults_before, most.max(resident()).saturating_sub(resident_before), strategy);
    drop(tensors);
    device.drain(Duration::from_secs(60)).unwrap();
    answer
}

#[test]
fn a_files_pages_are_not_faulted_in_one_by_one_and_do_not_pile_up() {
    let real = cuda_sim::install_from_env().unwrap() == cuda_sim::Driver::Real;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write(&path);
    for (profile, reading) in
        [("x86_h200_sxm_gen5", Reading::Auto), ("x86_h200_sxm_gen5", Reading::Map), ("dgx_spark_gb10", Reading::Auto)]
    {
        let sim = (!real).then(|| cuda_sim::device(profile).unwrap());
        let ordinal = sim.as_ref().map_or(0, cuda_sim::Device::ordinal);
        let device = Device::new(&CudaContext::new(ordinal).unwrap().default_stream()).unwrap();
        // Makes the slots and threads, and touches the simulated device's memory, which the next load gets again.
        load(&path, &device, reading);
        let (faults, grown, strategy) = load(&path, &device, reading);
        let what = format!("{profile}, {reading:?}: {faults} faults, {grown} bytes more");
        println!("{what}");
        assert!(faults <= BYTES as u64 / (64 << 10), "{what}");
        // In place the file's pages are the tensors.
        // Copied from a map, what each thread is at is mapped.
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(32);
        let allowed = match (strategy, reading) {
            (Strategy::Streamed, Reading::Map) => threads * (4 << 20),
            (Strategy::Streamed, _) => 0,
            _ => BYTES,
        } + BYTES / 100;
        assert!(grown <= allowed as u64, "{what}");
    }
}
