//! What the plan's choice costs, against the best that could have been chosen.
//!
//!     cargo bench --bench planner_regret -- [--quick] [--calibrated] [--json FILE]
//!
//! Bytes of 4 KiB to 1 GiB go one way and are touched 1, 2 or 8 times by a kernel that reads (to the device) or writes (from
//! it) all of them. On the host they lie in memory that the crate chose (*own*) or in a `Vec` (*pageable*). *ours* is the
//! planned way, from the first guard until the bytes are where they are wanted; *raw* the best of the other ways that the plan
//! allowed, each forced by name, and of `cuMemcpy…Async` between that memory and the device with the same kernels.
//! Memory is allocated before. Rounds are interleaved, medians are reported.
//!
//! Without a GPU the simulated H200, GH200 and Spark run, and only their virtual clock is reported: wall time would measure
//! this CPU's memcpy. With `--calibrated` the device is measured first (or its calibration read from the cache).

mod common;

use std::ops::Deref;

use common::{Args, Failure, Row, check, median, print};
use transfer_tensor::cudarc::driver::{
    CudaContext, CudaFunction, CudaSlice, DeviceSlice as _, LaunchConfig, PushKernelArg as _, sys,
};
use transfer_tensor::cudarc::nvrtc::Ptx;
use transfer_tensor::{
    Access, Backing, Detector, Device, DeviceMut, DeviceRef, Direction, HostMemory, Request, Strategy, TransferTensor,
};

const SIZES: [usize; 8] = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 256 << 20, 1 << 30];
const MACHINES: [&str; 3] = ["x86_h200_sxm_gen5", "gh200_480gb_numa", "dgx_spark_gb10"];

/// Reads or writes `n` times 16 bytes. The sum of what was read goes to `out` if it is one value of 2³², so that the reads
/// are not for nothing.
const PTX: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry touch_read(.param .u64 p, .param .u64 n, .param .u64 out)
{
    .reg .pred %q;
    .reg .b32 %a, %b, %c, %d, %s, %x, %y, %z;
    .reg .b64 %p, %n, %o, %i, %w, %t;
    ld.param.u64 %p, [p];
    ld.param.u64 %n, [n];
    ld.param.u64 %o, [out];
    mov.u32 %x, %ctaid.x;
    mov.u32 %y, %ntid.x;
    mov.u32 %z, %tid.x;
    mul.wide.u32 %i, %x, %y;
    cvt.u64.u32 %t, %z;
    add.u64 %i, %i, %t;
    mov.u32 %x, %nctaid.x;
    mul.wide.u32 %w, %x, %y;
    mov.u32 %s, 0;
read_next:
    setp.ge.u64 %q, %i, %n;
    @%q bra read_done;
    shl.b64 %t, %i, 4;
    add.u64 %t, %p, %t;
    ld.global.v4.u32 {%a, %b, %c, %d}, [%t];
    xor.b32 %a, %a, %b;
    xor.b32 %c, %c, %d;
    xor.b32 %a, %a, %c;
    add.u32 %s, %s, %a;
    add.u64 %i, %i, %w;
    bra read_next;
read_done:
    setp.ne.u32 %q, %s, 305419896;
    @%q bra read_end;
    st.global.u32 [%o], %s;
read_end:
    ret;
}
.visible .entry touch_write(.param .u64 p, .param .u64 n, .param .u64 out)
{
    .reg .pred %q;
    .reg .b32 %x, %y, %z;
    .reg .b64 %p, %n, %i, %w, %t;
    ld.param.u64 %p, [p];
    ld.param.u64 %n, [n];
    mov.u32 %x, %ctaid.x;
    mov.u32 %y, %ntid.x;
    mov.u32 %z, %tid.x;
    mul.wide.u32 %i, %x, %y;
    cvt.u64.u32 %t, %z;
    add.u64 %i, %i, %t;
    mov.u32 %x, %nctaid.x;
    mul.wide.u32 %w, %x, %y;
write_next:
    setp.ge.u64 %q, %i, %n;
    @%q bra write_done;
    shl.b64 %t, %i, 4;
    add.u64 %t, %p, %t;
    st.global.v4.u32 [%t], {%z, %y, %z, %y};
    add.u64 %i, %i, %w;
    bra write_next;
write_done:
    ret;
}
";

cuda_sim::kernel! {
    /// For the simulated driver, which takes the time from the bytes that a kernel asks for.
    fn touch_read(launch) {
        let (bytes, vectors) = (launch.arg::<u64>(0)?, launch.arg::<u64>(1)?);
        launch.slice::<u8>(bytes, vectors as usize * 16)?;
        Ok(())
    }
}

cuda_sim::kernel! {
    fn touch_write(launch) {
        let (bytes, vectors) = (launch.arg::<u64>(0)?, launch.arg::<u64>(1)?);
        launch.slice_mut::<u8>(bytes, vectors as usize * 16)?.fill(0x77);
        Ok(())
    }
}

struct Bench {
    common: common::Bench,
    read: CudaFunction,
    write: CudaFunction,
    /// Where a sum would go.
    out: CudaSlice<u32>,
}

impl Deref for Bench {
    type Target = common::Bench;

    fn deref(&self) -> &common::Bench {
        &self.common
    }
}

impl Bench {
    fn open(machine: Option<&str>, calibrated: bool) -> Result<Self, Failure> {
        let sim = machine.map(cuda_sim::device).transpose()?;
        let context = CudaContext::new(sim.as_ref().map_or(0, |sim| sim.ordinal()))?;
        let stream = context.new_stream()?;
        let detector = match &sim {
            // What is measured of a simulated device is nothing to keep.
            Some(sim) => Detector::new().fs_root(sim.host_root()).cache_folder(sim.host_root().join("cache")),
            None => Detector::new(),
        };
        let device = Device::with_detector(&stream, &detector)?;
        if calibrated {
            device.calibrate()?;
        }
        let module = context.load_module(Ptx::from_src(PTX))?;
        let (read, write) = (module.load_function("touch_read")?, module.load_function("touch_write")?);
        let out = stream.alloc_zeros(1)?;
        Ok(Self { common: common::Bench { stream, device, sim }, read, write, out })
    }

    fn timed(&self, run: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
        let mut done = Ok(());
        let seconds = self.common.time(|| done = run());
        done.map(|()| seconds)
    }

    fn config(bytes: usize) -> (u64, LaunchConfig) {
        let vectors = bytes as u64 / 16;
        let blocks = vectors.div_ceil(256).clamp(1, 4096) as u32;
        (vectors, LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 })
    }

    fn read(&self, bytes: &DeviceRef<'_, u8>, times: u32) -> Result<(), Failure> {
        let (vectors, config) = Self::config(bytes.len());
        for _ in 0..times {
            let mut launch = self.stream.launch_builder(&self.read);
            // SAFETY: the kernel's arguments; it stays within the guard's bytes, and runs on the guard's stream.
            unsafe { launch.arg(bytes).arg(&vectors).arg(&self.out).launch(config)? };
        }
        Ok(())
    }

    fn write(&self, bytes: &mut DeviceMut<'_, u8>, times: u32) -> Result<(), Failure> {
        let (vectors, config) = Self::config(bytes.len());
        for _ in 0..times {
            let mut launch = self.stream.launch_builder(&self.write);
            // SAFETY: as for `read`.
            unsafe { launch.arg(&mut *bytes).arg(&vectors).arg(&self.out).launch(config)? };
        }
        Ok(())
    }

    fn touch(&self, case: Case, address: u64) -> Result<(), Failure> {
        let (vectors, config) = Self::config(case.bytes);
        let function = if case.direction == Direction::HostToDevice { &self.read } else { &self.write };
        for _ in 0..case.touches {
            let mut launch = self.stream.launch_builder(function);
            // SAFETY: the address is that of `case.bytes` bytes, which the caller keeps until the stream has passed.
            unsafe { launch.arg(&address).arg(&vectors).arg(&self.out).launch(config)? };
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct Case {
    direction: Direction,
    pageable: bool,
    touches: u32,
    bytes: usize,
}

const DRIVER: &str = "driver";

/// One way to hand the bytes over, with its memory.
enum Way {
    /// By a tensor, with a strategy and backing of this name.
    Tensor { name: String, tensor: TransferTensor<u8> },
    /// By the driver's copy.
    Raw(Raw),
}

impl Way {
    fn tensor(bench: &Bench, case: Case, forced: Option<(Strategy, Backing)>) -> Result<Self, Failure> {
        let mut options = bench.device.tensor().direction(case.direction).access(Access::reuse(case.touches)?);
        if let Some((strategy, backing)) = forced {
            options = options.strategy(strategy).backing(backing);
        }
        let mut tensor = if case.pageable {
            options.from_vec(vec![0x5a; case.bytes], case.bytes)?
        } else {
            options.zeros(case.bytes)?
        };
        // Both sides exist before the time begins.
        tensor.host_mut()?.fill(0x5a);
        drop(tensor.device_mut(&bench.stream)?);
        drop(tensor.host()?);
        Ok(Self::Tensor { name: format!("{} {}", tensor.strategy(), tensor.backing()), tensor })
    }

    fn name(&self) -> &str {
        match self {
            Self::Tensor { name, .. } => name,
            Self::Raw(_) => DRIVER,
        }
    }

    fn time(&mut self, bench: &Bench, case: Case) -> Result<f64, Failure> {
        let up = case.direction == Direction::HostToDevice;
        match self {
            Self::Tensor { tensor, .. } if up => {
                drop(tensor.host_mut()?); // the device's copy is stale from here on
                bench.timed(|| {
                    let guard = tensor.device(&bench.stream)?;
                    bench.read(&guard, case.touches)?;
                    drop(guard);
                    bench.sync();
                    Ok(())
                })
            }
            Self::Tensor { tensor, .. } => bench.timed(|| {
                let mut guard = tensor.device_mut(&bench.stream)?;
                bench.write(&mut guard, case.touches)?;
                drop(guard);
                drop(tensor.host()?);
                Ok(())
            }),
            Self::Raw(raw) => bench.timed(|| {
                let handle = bench.stream.cu_stream();
                if up {
                    // SAFETY: both ends are as long and stay until the wait below.
                    check(unsafe { sys::cuMemcpyHtoDAsync_v2(raw.device, raw.host(), case.bytes, handle) });
                    bench.touch(case, raw.device)?;
                } else {
                    bench.touch(case, raw.device)?;
                    // SAFETY: as above.
                    check(unsafe { sys::cuMemcpyDtoHAsync_v2(raw.host(), raw.device, case.bytes, handle) });
                }
                bench.sync();
                Ok(())
            }),
        }
    }
}

/// Memory of the driver's, or a `Vec`, and device memory.
struct Raw {
    device: sys::CUdeviceptr,
    pinned: *mut std::ffi::c_void,
    pageable: Vec<u8>,
}

impl Raw {
    fn new(case: Case) -> Self {
        let mut raw = Self { device: 0, pinned: std::ptr::null_mut(), pageable: Vec::new() };
        // SAFETY: the bench's context is current; the memory is set before it is read.
        unsafe {
            check(sys::cuMemAlloc_v2(&mut raw.device, case.bytes));
            if case.pageable {
                raw.pageable = vec![0x5a; case.bytes];
            } else {
                let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
                check(sys::cuMemHostAlloc(&mut raw.pinned, case.bytes, flags));
                raw.pinned.cast::<u8>().write_bytes(0x5a, case.bytes);
            }
        }
        raw
    }

    fn host(&mut self) -> *mut std::ffi::c_void {
        if self.pinned.is_null() { self.pageable.as_mut_ptr().cast() } else { self.pinned }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`; the bench has synchronised.
        unsafe {
            check(sys::cuMemFree_v2(self.device));
            if !self.pinned.is_null() {
                check(sys::cuMemFreeHost(self.pinned));
            }
        }
    }
}

/// What came of a case: the planned way and the best of the others, each with its seconds.
struct Outcome {
    chosen: (String, f64),
    best: (String, f64),
    /// The best of the ways that the plan allowed, if there are others.
    allowed: Option<f64>,
}

/// Cases in which the planned way is as good as the best of others, and the case where it is farthest off.
#[derive(Default)]
struct Count {
    good: usize,
    all: usize,
    worst: (f64, String),
}

impl Count {
    fn add(&mut self, ours: f64, best: f64, case: &str) {
        self.all += 1;
        if ours <= best * 1.05 || ours <= best + 2e-6 {
            self.good += 1;
        } else if ours / best - 1.0 > self.worst.0 {
            self.worst = (ours / best - 1.0, case.to_owned());
        }
    }

    fn print(&self, others: &str) {
        println!("within 5 % or 2 µs of {others}: {} of {}", self.good, self.all);
        if self.worst.0 > 0.0 {
            println!("    farthest off: {:.1} %, {}", self.worst.0 * 100.0, self.worst.1);
        }
    }
}

fn run(bench: &Bench, case: Case, rounds: usize) -> Result<Outcome, Failure> {
    bench.stream.context().bind_to_thread()?;
    let host = if case.pageable { HostMemory::Pageable } else { HostMemory::Any };
    let request = Request::new(case.bytes as u64).direction(case.direction).access(Access::reuse(case.touches)?);
    let decision = bench.device.plan(&request.host(host))?;
    let mut ways = vec![Way::tensor(bench, case, None)?, Way::Raw(Raw::new(case))];
    for other in decision.estimates.iter().filter(|estimate| estimate.allowed) {
        if (other.strategy, other.backing) != (decision.strategy, decision.backing) {
            ways.push(Way::tensor(bench, case, Some((other.strategy, other.backing)))?);
        }
    }
    let mut times = vec![Vec::new(); ways.len()];
    for _ in 0..rounds {
        for (way, times) in ways.iter_mut().zip(&mut times) {
            times.push(way.time(bench, case)?);
        }
    }
    let mut named = ways.iter().zip(times).map(|(way, times)| (way.name().to_owned(), median(times)));
    let chosen = named.next().ok_or("no way")?;
    let others: Vec<_> = named.collect();
    let allowed = others.iter().filter(|(name, _)| name != DRIVER).map(|(_, time)| *time).min_by(f64::total_cmp);
    let best = others.into_iter().min_by(|a, b| a.1.total_cmp(&b.1)).ok_or("no other way")?;
    bench.device.drain(std::time::Duration::from_secs(60))?;
    Ok(Outcome { chosen, best, allowed })
}

fn main() -> Result<(), Failure> {
    let args = Args::read(&["--calibrated"], &[])?;
    let (quick, calibrated, real) = (args.quick, args.has("--calibrated"), common::is_real());
    if !real {
        cuda_sim::install()?;
        cuda_sim::register_kernel("touch_read", touch_read)?;
        cuda_sim::register_kernel("touch_write", touch_write)?;
    }
    let machines: Vec<_> = if real { vec![None] } else { MACHINES.map(Some).to_vec() };
    let (mut rows, mut by_all, mut by_allowed) = (Vec::new(), Count::default(), Count::default());
    for machine in machines {
        let bench = Bench::open(machine, calibrated)?;
        bench.announce();
        if let Some(calibration) = bench.device.calibration() {
            println!("{calibration}");
        }
        for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
            for (pageable, source) in [(false, "own"), (true, "pageable")] {
                for touches in [1, 2, 8] {
                    // The simulated driver really moves the bytes, at this CPU's speed.
                    let largest = if quick {
                        1 << 20
                    } else if real {
                        1 << 30
                    } else {
                        16 << 20
                    };
                    for bytes in SIZES.into_iter().filter(|bytes| *bytes <= largest) {
                        let case = Case { direction, pageable, touches, bytes };
                        let rounds = match bytes {
                            _ if !real => 3,
                            0..=1_048_576 => 201,
                            1_048_577..=16_777_216 => 51,
                            _ => 7,
                        };
                        let Outcome { chosen, best, allowed } = run(&bench, case, rounds)?;
                        let prefix = machine.map_or(String::new(), |machine| format!("{machine} "));
                        let name = format!("{direction} {source} x{touches}");
                        let (ours, raw) = (chosen.1, best.1);
                        let row = Row::of_seconds(&bench, prefix.clone() + &name, bytes, ours, Some(raw), None);
                        print(&row);
                        println!("    planned {}, best other {}", chosen.0, best.0);
                        let case = format!("{prefix}{name}, {bytes} bytes");
                        by_all.add(ours, raw, &case);
                        // Where there is no other, it is the best.
                        by_allowed.add(ours, allowed.unwrap_or(ours), &case);
                        rows.push(row);
                    }
                }
            }
        }
    }
    by_allowed.print("the best way that the plan allowed");
    by_all.print("the best of these and the driver's own copy");
    common::write(&args, &rows)
}
