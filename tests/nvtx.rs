//! What a profiler is told: ranges with byte counts around transfers, waits and deliveries, and the names of threads and streams.
//!
//! The test starts this program again, with a tool of ours in the profiler's place (`tests/nvtx-injection`), and looks at what that wrote.
//! Each case has a size of its own, so that a range is known by its bytes. No case waits for a time: who is to be seen waiting is let
//! go once he was.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::Command;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use nvtx_injection::OUT;
use transfer_tensor::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use transfer_tensor::{
    Backing, Device, EgressPool, HostTensor, IngressPrefetcher, Location, Output, PoolOptions, Rows, Strategy,
    TransferTensor, WhenFull,
};

/// Nothing here takes this long: who is not done by then hangs.
const HANG: Duration = Duration::from_secs(60);

/// Large enough for several threads.
const LARGE: usize = 16 << 20;
const HELPED: usize = LARGE + 1;

/// The simulated machine of the scenario.
struct Machine {
    sim: cuda_sim::Device,
    stream: Arc<CudaStream>,
    device: Device,
}

impl Machine {
    fn slice(&self, bytes: usize) -> CudaSlice<u8> {
        self.stream.clone_htod(&vec![1u8; bytes]).unwrap()
    }

    /// A tensor whose newest bytes the device has, but only once the gate that comes back is open.
    fn gated(&self, bytes: usize) -> (cuda_sim::Gate, TransferTensor<u8>) {
        let mut tensor = self.device.tensor().strategy(Strategy::Streamed).zeros::<u8>([bytes]).unwrap();
        drop(tensor.host_mut().unwrap());
        drop(tensor.device_mut(&self.stream).unwrap());
        self.stream.context().synchronize().unwrap();
        let gate = self.sim.gate(self.stream.cu_stream() as u64);
        self.stream.memset_zeros(&mut tensor.device_mut(&self.stream).unwrap()).unwrap();
        (gate, tensor)
    }
}

/// What the tool has written so far.
fn told(out: &Path) -> String {
    std::fs::read_to_string(out).unwrap_or_default()
}

/// Blocks until the tool was told of a range.
fn until_told(out: &Path, range: &str) {
    let start = Instant::now();
    while !told(out).contains(&format!("\ttransfer-tensor\t{range}\n")) {
        assert!(start.elapsed() < HANG, "never told of {range}");
        thread::yield_now();
    }
}

/// How many threads have had a range.
fn threads_of(told: &str, range: &str) -> usize {
    let end = format!("\ttransfer-tensor\t{range}");
    told.lines().filter_map(|line| line.strip_suffix(&end)).collect::<BTreeSet<_>>().len()
}

/// Whether a copy may have more threads than its caller's.
fn has_helpers() -> bool {
    thread::available_parallelism().is_ok_and(|count| count.get() > 1)
}

#[test]
#[ignore = "is played by another test, in a process of its own"]
fn scenario() {
    let Some(out) = std::env::var_os(OUT).map(PathBuf::from) else { return };
    let sim = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
    let stream = CudaContext::new(sim.ordinal()).unwrap().new_stream().unwrap();
    // Nothing is freed while a gate is closed.
    let pool = PoolOptions::new().keep_idle(u64::MAX);
    let device = Device::builder(&stream).pool(pool).build().unwrap();
    let machine = Machine { sim, stream, device };
    tensors(&machine, &out);
    slices(&machine, &out);
    egress(&machine, &out);
    ingress(&machine, &out);
    machine.device.drain(HANG).unwrap();
}

fn tensors(machine: &Machine, out: &Path) {
    let Machine { device, stream, .. } = machine;
    let tensor = device.tensor().strategy(Strategy::Streamed).from_slice(&[1u8; 4000], [4000]).unwrap();
    drop(tensor.device(stream).unwrap());

    let opened_once_told = |gate: cuda_sim::Gate, range: &'static str| {
        let out = out.to_owned();
        thread::spawn(move || {
            until_told(&out, range);
            gate.open();
        })
    };
    let (gate, tensor) = machine.gated(4100);
    let opener = opened_once_told(gate, "wait\t4100");
    assert_eq!(tensor.host().unwrap()[0], 0);
    opener.join().unwrap();
    let (gate, tensor) = machine.gated(4200);
    let opener = opened_once_told(gate, "wait\t4200");
    tensor.to_host().unwrap().wait().unwrap();
    opener.join().unwrap();
    let (gate, tensor) = machine.gated(4300);
    let opener = opened_once_told(gate, "wait\t4300");
    tensor.to_host().unwrap().wait_timeout(HANG).unwrap();
    opener.join().unwrap();
    let (gate, tensor) = machine.gated(4400);
    let mut transfer = tensor.to_host().unwrap();
    let mut context = Context::from_waker(Waker::noop());
    assert!(Pin::new(&mut transfer).poll(&mut context).is_pending());
    gate.open();
    until_told(out, "deliver\t4400");
    device.drain(HANG).unwrap();
    assert!(matches!(Pin::new(&mut transfer).poll(&mut context), Poll::Ready(Ok(_))));

    let managed = device.tensor().strategy(Strategy::ZeroCopy).backing(Backing::Managed).zeros::<u8>([4500]).unwrap();
    managed.prefetch(Location::Device, stream).unwrap();
    let small = Device::builder(stream).pool(PoolOptions::new().budget(1 << 20)).build().unwrap();
    let lent = small.pool().acquire(1 << 20).unwrap();
    let pool = small.pool().clone();
    let other = thread::spawn(move || drop(pool.acquire_or(1 << 20, WhenFull::Block).unwrap()));
    until_told(out, "wait for room\t1048576");
    drop(lent);
    other.join().unwrap();
}

fn slices(machine: &Machine, out: &Path) {
    let Machine { device, stream, .. } = machine;
    let values = vec![3u8; LARGE];
    let mut slice = device.upload_new(stream, &values).unwrap();
    assert!(device.download_vec(stream, &slice).unwrap() == values);
    // Who helps may come too late for one copy.
    let start = Instant::now();
    while has_helpers() && threads_of(&told(out), &format!("stage\t{HELPED}")) < 2 {
        assert!(start.elapsed() < HANG, "nobody helps");
        device.upload_new(stream, &vec![3u8; HELPED]).unwrap();
    }
    device.upload(stream, &[1u8; 5000], &mut slice).unwrap();
    device.download(stream, &machine.slice(5100), &mut [0; 5100]).unwrap();
    let (_, slice) = device.upload_owned(stream, vec![1u8; 5200]).unwrap().wait().unwrap();
    device.download_owned(stream, slice).unwrap().wait().unwrap();
    let (mut target, mut back) = (machine.slice(5300), vec![0u8; 5300]);
    device.upload_rows(stream, &[1u8; 5300], &Rows::new(53, 100), &mut target).unwrap();
    device.download_rows(stream, &target, &Rows::new(53, 100), &mut back).unwrap();
    let (source, mut target) = ([1u8; 5400], machine.slice(5400));
    let mut batch = device.batch(stream);
    batch.upload(&source, &mut target).unwrap();
    batch.run().unwrap();
}

fn egress(machine: &Machine, out: &Path) {
    let written = out.to_owned();
    let consumer = move |output: Output<HostTensor<u8>>| {
        if output.len() == 6000 {
            until_told(&written, "egress wait\t6000");
        }
        output
    };
    let pool: EgressPool<CudaSlice<u8>, Output<HostTensor<u8>>> =
        EgressPool::builder(&machine.device).workers(1).capacity(1).consumer(consumer).unwrap();
    let kept = pool.submit(machine.slice(6000)).unwrap().wait().unwrap();
    let second = machine.slice(6100);
    thread::scope(|scope| {
        let submit = scope.spawn(|| pool.submit(second).unwrap());
        until_told(out, "egress room\t6100");
        drop(kept);
        drop(submit.join().unwrap().wait().unwrap());
    });
    drop(pool);
    let pool: EgressPool<TransferTensor<u8>> =
        EgressPool::builder(&machine.device).name("tensors-out").tickets().unwrap();
    let mut tensor = machine.device.tensor().strategy(Strategy::Streamed).zeros::<u8>([6200]).unwrap();
    machine.stream.memset_zeros(&mut tensor.device_mut(&machine.stream).unwrap()).unwrap();
    drop(pool.submit(tensor).unwrap().wait().unwrap());
}

fn ingress(machine: &Machine, out: &Path) {
    let written = out.to_owned();
    let fill = move |number: u64, rows: &mut [u8]| {
        until_told(&written, "ingress wait\t-");
        rows.fill(number as u8);
        Ok::<_, ()>(if number < 2 { 7 } else { 0 })
    };
    let batches = IngressPrefetcher::builder(&machine.device, [7, 1000]).depth(1).fill(fill).unwrap();
    assert_eq!(batches.map(|batch| batch.unwrap().rows()).sum::<usize>(), 14);
}

/// The tool's library, which lies beside this program: the newest one, as others may be left from before.
fn library() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let ours = files.filter(|file| {
        let name = file.file_name().to_string_lossy().into_owned();
        name.starts_with("libnvtx_injection") && name.ends_with(".so")
    });
    ours.max_by_key(|file| file.metadata().unwrap().modified().unwrap()).expect("built with this program").path()
}

/// What a profiler's user sees.
#[derive(Default)]
struct Seen {
    /// How often there was each range, as `thread: message bytes`, behind those that it lies in.
    ranges: BTreeMap<String, usize>,
    threads: BTreeMap<String, String>,
    streams: BTreeMap<String, String>,
}

impl Seen {
    /// Fails where a range ends that has not begun, or has not ended.
    fn of(lines: &str) -> Seen {
        let mut seen = Seen::default();
        let mut open: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        let mut closed = Vec::new();
        for line in lines.lines() {
            match *line.split('\t').collect::<Vec<_>>() {
                ["push", thread, "transfer-tensor", message, bytes] => {
                    open.entry(thread).or_default().push(format!("{message} {bytes}"));
                }
                ["pop", thread, "transfer-tensor"] => {
                    let stack = open.entry(thread).or_default();
                    closed.push((thread, stack.join(" / ")));
                    assert!(stack.pop().is_some(), "a range ends that has not begun");
                }
                ["thread", thread, name] => drop(seen.threads.insert(thread.to_owned(), name.to_owned())),
                ["stream", handle, name] => {
                    let before = seen.streams.insert(handle.to_owned(), name.to_owned());
                    assert!(before.is_none() && handle != "0", "{line}");
                }
                _ => panic!("{line}"),
            }
        }
        assert!(open.values().all(Vec::is_empty), "not all ranges have ended: {open:?}");
        for (thread, range) in closed {
            let thread = seen.threads.get(thread).map_or("caller", String::as_str);
            *seen.ranges.entry(format!("{thread}: {range}")).or_default() += 1;
        }
        seen
    }

    fn count(&self, range: &str) -> usize {
        self.ranges.get(range).copied().unwrap_or_default()
    }

    #[track_caller]
    fn once(&self, ranges: &[&str]) {
        for range in ranges {
            assert_eq!(self.count(range), 1, "{range}, of {:#?}", self.ranges);
        }
    }

    #[track_caller]
    fn some(&self, ranges: &[&str]) {
        for range in ranges {
            assert!(self.count(range) > 0, "{range}, of {:#?}", self.ranges);
        }
    }
}

#[test]
fn a_profiler_is_told_of_transfers_waits_and_deliveries() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("told");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "scenario", "--ignored"]).env("NVTX_INJECTION64_PATH", library()).env(OUT, &out);
    let ended = command.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout).into_owned() + &String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success() && said.contains("1 passed"), "{said}");
    let seen = Seen::of(&told(&out));

    seen.once(&["caller: upload 4000", "caller: download 4100", "caller: wait 4100"]);
    seen.once(&["caller: wait 4200", "caller: wait 4300", "transfer-wait: deliver 4400", "caller: prefetch 4500"]);
    seen.some(&["caller: wait for room 1048576", "caller: drain -"]);

    let large = [("upload", "stage up"), ("download", "stage down")].map(|(copy, stage)| {
        let [copy, stage] = [copy, stage].map(|name| format!("{name} {LARGE}"));
        [
            format!("caller: {copy}"),
            format!("caller: {copy} / {stage}"),
            format!("caller: {copy} / {stage} / stage {LARGE}"),
        ]
    });
    large.iter().flatten().for_each(|range| seen.once(&[range]));
    if has_helpers() {
        seen.some(&[&format!("transfer-copy: stage {HELPED}")]);
    }
    seen.once(&["caller: upload 5000 / stage up 5000", "caller: download 5100 / stage down 5100"]);
    seen.once(&["transfer-stage: upload 5200 / stage up 5200", "transfer-stage: download 5200 / stage down 5200"]);
    seen.once(&["caller: upload rows 5300", "caller: download rows 5300", "caller: batch 5400"]);

    seen.once(&["caller: egress submit 6000 / download 6000", "caller: egress wait 6000"]);
    seen.once(&["caller: egress submit 6100 / egress room 6100", "caller: egress submit 6200 / download 6200"]);
    let workers =
        |range: &str| (0..2).map(|number| seen.count(&format!("transfer-out-{number}: {range}"))).sum::<usize>();
    for range in ["egress landing 6000", "egress deliver 6000", "egress landing 6100", "egress deliver 6100"] {
        assert_eq!(workers(range), 1, "{range}, of {:#?}", seen.ranges);
    }
    seen.once(&["transfer-wait: egress landing 6200", "tensors-out-0: egress deliver 6200"]);

    let loads = ["", " / ingress source 7000", " / upload 7000"];
    assert_eq!(loads.map(|inner| seen.count(&format!("transfer-in-0: ingress load 7000{inner}"))), [3, 3, 2]);
    assert_eq!(seen.count("caller: ingress batch 7000"), 2);
    seen.some(&["caller: ingress wait -"]);

    for name in ["transfer-wait", "transfer-stage", "transfer-out-0", "transfer-out-1", "transfer-in-0"] {
        assert!(seen.threads.values().any(|told| told == name), "{name}, of {:?}", seen.threads);
    }
    let streams: BTreeSet<_> = seen.streams.values().map(String::as_str).collect();
    assert_eq!(streams, ["transfer-down", "transfer-out", "transfer-up"].into());
}
