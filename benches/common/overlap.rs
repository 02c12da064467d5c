//! What the overlap benches share: a kernel that only takes time, steps of it beside copies, and the same steps by
//! hand.

use std::sync::Arc;
use std::time::{Duration, Instant};

use transfer_tensor::cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg as _, sys};
use transfer_tensor::cudarc::nvrtc::Ptx;

use super::{Bench, Failure, Raw, Row, check, human, median};

/// Compute to copy, by time.
pub(crate) const RATIOS: [(&str, f64); 3] = [("4:1", 4.0), ("1:1", 1.0), ("1:4", 0.25)];

/// Nothing takes that long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

/// One thread that asks its multiprocessor's clock: the memory and the link are the copies' alone. `%globaltimer` would
/// need no calibration, but on some devices it moves once in a millisecond.
const PTX: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 ticks)
{
    .reg .pred %more;
    .reg .b64 %n, %s, %t;
    ld.param.u64 %n, [ticks];
    mov.u64 %s, %clock64;
spin_more:
    mov.u64 %t, %clock64;
    sub.u64 %t, %t, %s;
    setp.lt.u64 %more, %t, %n;
    @%more bra spin_more;
    ret;
}
";

cuda_sim::kernel! {
    /// For the simulated driver, whose ticks are nanoseconds. It sleeps, since the copies need this CPU's cores.
    fn spin(launch) {
        std::thread::sleep(Duration::from_nanos(launch.arg(0)?));
        Ok(())
    }
}

/// Keeps the bench's stream busy for a given time.
pub(crate) struct Spin {
    kernel: CudaFunction,
    stream: Arc<CudaStream>,
    ticks_per_second: f64,
}

impl Spin {
    /// Loads the kernel, and measures how many of its ticks are a second.
    pub(crate) fn new(bench: &Bench) -> Result<Self, Failure> {
        if bench.sim.is_some() {
            cuda_sim::register_kernel("spin", spin)?;
        }
        let kernel = bench.stream.context().load_module(Ptx::from_src(PTX))?.load_function("spin")?;
        let mut this = Self { kernel, stream: bench.stream.clone(), ticks_per_second: 0.0 };
        // A fifth of a second on hardware: what a launch costs is nothing beside it. The first brings the clock up to
        // its speed.
        let ticks = if bench.sim.is_some() { 20_000_000 } else { 400_000_000 };
        for _ in 0..2 {
            let seconds = wall(|| {
                this.launch(ticks);
                bench.sync();
            });
            this.ticks_per_second = ticks as f64 / seconds;
        }
        println!("calibrated: {:.1} million ticks a second", this.ticks_per_second * 1e-6);
        Ok(this)
    }

    pub(crate) fn ticks(&self, seconds: f64) -> u64 {
        (seconds * self.ticks_per_second) as u64
    }

    pub(crate) fn launch(&self, ticks: u64) {
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        let mut launch = self.stream.launch_builder(&self.kernel);
        launch.arg(&ticks);
        // SAFETY: the argument is the entry's; the kernel touches no memory.
        unsafe { launch.launch(config) }.expect("a launch");
    }
}

/// So many steps, each with a kernel of the given ticks beside copies of the given bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) bytes: usize,
    pub(crate) steps: usize,
    pub(crate) ticks: u64,
    pub(crate) rounds: usize,
    /// The best ratio that so many steps can have, where there are enough of them to judge one.
    bound: Option<f64>,
}

impl Case {
    /// Says what will run. `compute` and `copies` are the seconds of a step that its kernel and its ways over the link
    /// take.
    pub(crate) fn new(bench: &Bench, spin: &Spin, quick: bool, bytes: usize, compute: f64, copies: &[f64]) -> Self {
        let longest = copies.iter().copied().fold(compute, f64::max);
        let short = quick || bench.sim.is_some();
        let steps = if short { 25 } else { ((0.5 / longest) as usize).clamp(100, 10_000) };
        let all = steps as f64 * longest;
        let rounds = match all {
            _ if short => 1,
            ..1.0 => 5,
            _ => 3,
        };
        // What comes before the longest of the first step, and after that of the last, has nothing beside it.
        let bound = all / (all + compute + copies.iter().sum::<f64>() - longest);
        let copies: Vec<_> = copies.iter().map(|copy| format!("{:.1}", copy * 1e6)).collect();
        println!(
            "  {steps} steps of {}: compute {:.1} us, copy {} us; no ratio can be above {bound:.4}",
            human(bytes),
            compute * 1e6,
            copies.join(" and "),
        );
        Self { bytes, steps, ticks: spin.ticks(compute), rounds, bound: (!short).then_some(bound) }
    }

    /// Microseconds of a step, from seconds of all.
    pub(crate) fn row(&self, case: impl Into<String>, ours: f64, raw: Option<f64>, peer: Option<f64>) -> Row {
        let show = |seconds: f64| seconds / self.steps as f64 * 1e6;
        Row {
            case: case.into(),
            bytes: self.bytes,
            ours: show(ours),
            raw: raw.map(show),
            peer: peer.map(show),
            ratio: raw.map(|raw| raw / ours),
            unit: "us",
            clock: "wall",
        }
    }

    /// As `row`; says so where the ratio is below `least`, which it must reach.
    pub(crate) fn judged(&self, case: impl Into<String>, ours: f64, raw: f64, peer: Option<f64>, least: f64) -> Row {
        let row = self.row(case, ours, Some(raw), peer);
        let ratio = raw / ours;
        if let Some(bound) = self.bound
            && ratio < least
        {
            println!("  below {least}: {ratio:.4}, where {bound:.4} is the most");
        }
        row
    }

    /// All kernels, with nothing beside them.
    pub(crate) fn compute_alone(&self, bench: &Bench, spin: &Spin) -> f64 {
        wall(|| {
            (0..self.steps).for_each(|_| spin.launch(self.ticks));
            bench.sync();
        })
    }

    /// All copies, back to back, with nothing beside them.
    pub(crate) fn copies_alone(&self, bench: &Bench, copy: impl Fn()) -> f64 {
        wall(|| {
            (0..self.steps).for_each(|_| copy());
            bench.sync();
        })
    }
}

/// Seconds of one of the copies that are submitted back to back: for a tenth of a second at least.
pub(crate) fn one_copy(bench: &Bench, copy: impl Fn()) -> f64 {
    let many = |count: usize| {
        wall(|| {
            (0..count).for_each(|_| copy());
            bench.sync();
        }) / count as f64
    };
    many(1);
    let count = (0.1 / many(2)) as usize;
    many(count.clamp(2, 10_000))
}

pub(crate) fn wall(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

/// What one round of a run takes, in seconds.
pub(crate) type Run<'a> = &'a mut dyn FnMut() -> Result<f64, Failure>;

/// The median of `rounds` times of each, interleaved, after one of each that does not count.
pub(crate) fn medians<const N: usize>(rounds: usize, mut runs: [Run<'_>; N]) -> Result<[f64; N], Failure> {
    let mut times = [const { Vec::new() }; N];
    for round in 0..=rounds {
        for (run, times) in runs.iter_mut().zip(&mut times) {
            let seconds = run()?;
            if round > 0 {
                times.push(seconds);
            }
        }
    }
    Ok(times.map(median))
}

struct Event(sys::CUevent);

impl Event {
    fn new() -> Self {
        let mut event = std::ptr::null_mut();
        // SAFETY: the bench's context is current, and the call writes one handle.
        unsafe { check(sys::cuEventCreate(&mut event, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)) };
        Self(event)
    }

    fn record(&self, stream: &CudaStream) {
        // SAFETY: both handles are alive.
        unsafe { check(sys::cuEventRecord(self.0, stream.cu_stream())) };
    }

    /// What `stream` is given from now on comes after the event.
    fn hold(&self, stream: &CudaStream) {
        // SAFETY: as above.
        unsafe { check(sys::cuStreamWaitEvent(stream.cu_stream(), self.0, 0)) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by `new`; the driver keeps it for what still waits.
        unsafe { check(sys::cuEventDestroy_v2(self.0)) };
    }
}

/// The same steps by raw calls alone, as somebody would write them who need not care for errors, memory or consumers: a
/// stream for each way, events between them, and no wait on the host before the end. It shows what the hardware can
/// overlap.
pub(crate) struct ByHand<'a> {
    bench: &'a Bench,
    spin: &'a Spin,
    up: Option<(Arc<CudaStream>, Vec<Slot>, Event)>,
    down: Option<(Arc<CudaStream>, Raw, Event)>,
}

/// Where a batch is copied to; the event says that the work on the batch before is over.
struct Slot(Raw, Event);

impl<'a> ByHand<'a> {
    /// `slots` batches under way to the device, or none; results that come back, or none.
    pub(crate) fn new(
        bench: &'a Bench,
        spin: &'a Spin,
        bytes: usize,
        slots: usize,
        down: bool,
    ) -> Result<Self, Failure> {
        let stream = || bench.stream.context().new_stream();
        let up: Vec<_> = (0..slots).map(|_| Slot(Raw::new(bytes), Event::new())).collect();
        let up = if up.is_empty() { None } else { Some((stream()?, up, Event::new())) };
        let down = if down { Some((stream()?, Raw::new(bytes), Event::new())) } else { None };
        Ok(Self { bench, spin, up, down })
    }

    /// All steps.
    pub(crate) fn run(&self, case: &Case) -> f64 {
        let compute = &self.bench.stream;
        wall(|| {
            for step in 0..case.steps {
                let batch = self.up.as_ref().map(|(stream, slots, there)| {
                    let Slot(memory, worked) = &slots[step % slots.len()];
                    worked.hold(stream);
                    memory.up_on(stream);
                    there.record(stream);
                    there.hold(compute);
                    worked
                });
                self.spin.launch(case.ticks);
                if let Some(worked) = batch {
                    worked.record(compute);
                }
                if let Some((stream, memory, made)) = &self.down {
                    made.record(compute);
                    made.hold(stream);
                    memory.down_on(stream);
                }
            }
            self.sync();
        })
    }

    /// The copies of all steps, both ways at once, with no kernel and no order between the two.
    pub(crate) fn copies(&self, steps: usize) -> f64 {
        wall(|| {
            for step in 0..steps {
                if let Some((stream, slots, _)) = &self.up {
                    slots[step % slots.len()].0.up_on(stream);
                }
                if let Some((stream, memory, _)) = &self.down {
                    memory.down_on(stream);
                }
            }
            self.sync();
        })
    }

    fn sync(&self) {
        let streams = self.up.iter().map(|up| &up.0).chain(self.down.iter().map(|down| &down.0));
        for stream in streams.chain([&self.bench.stream]) {
            // SAFETY: the stream is alive.
            unsafe { check(sys::cuStreamSynchronize(stream.cu_stream())) };
        }
    }
}
