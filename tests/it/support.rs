//! One device a test: simulated, unless `TRANSFER_TENSOR_DRIVER=real`.
//!
//! `CUDA_SIM_SEED` seeds the simulator's scheduler (and lets it take unordered steps in any order), `CUDA_SIM_FREE_WAITS=0`
//! makes its frees return at once; `tests/seeds` runs the suite under many of both. `CUDA_SIM_PROFILE` names the machine that
//! stands in for an H200: for tests of what holds on any.

// Each file of tests uses its part.
#![allow(dead_code)]

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

use cuda_sim::{DeviceBuilder, Driver};
use transfer_tensor::cudarc::driver::sys;
use transfer_tensor::cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, LaunchConfig, PushKernelArg};
use transfer_tensor::cudarc::nvrtc::Ptx;
use transfer_tensor::{
    Backing, Detector, Device, DeviceMut, DeviceRef, Element, PoolOptions, Strategy, TransferTensor,
};

/// A device, its context and a stream of the test's own.
pub(crate) struct Gpu {
    /// The simulated device; `None` on a real one.
    pub(crate) sim: Option<cuda_sim::Device>,
    pub(crate) context: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) device: Device,
}

pub(crate) const H200: &str = "x86_h200_sxm_gen5";
pub(crate) const SPARK: &str = "dgx_spark_gb10";
pub(crate) const ORIN: &str = "jetson_agx_orin_64gb";
pub(crate) const THOR: &str = "jetson_agx_thor";
pub(crate) const GH200: &str = "gh200_480gb_numa";

/// No promise of these tests takes this long: who is not done by then hangs.
pub(crate) const HANG: Duration = Duration::from_secs(60);

/// Which driver this process uses.
pub(crate) fn driver() -> Driver {
    cuda_sim::install_from_env().expect("the simulated driver is built beside the tests")
}

/// A builder of `profile` with what the environment asks for.
pub(crate) fn builder(profile: &str) -> DeviceBuilder {
    match std::env::var("CUDA_SIM_PROFILE") {
        Ok(other) if profile == H200 => from_env(DeviceBuilder::new(&other)),
        _ => from_env(DeviceBuilder::new(profile)),
    }
}

/// Adds to a builder what the environment asks for.
pub(crate) fn from_env(mut builder: DeviceBuilder) -> DeviceBuilder {
    fn number(name: &str) -> Option<u64> {
        std::env::var(name).ok()?.parse().ok()
    }
    if let Some(seed) = number("CUDA_SIM_SEED") {
        builder = builder.seed(seed).reorder(true);
    }
    if let Some(waits) = number("CUDA_SIM_FREE_WAITS") {
        builder = builder.free_waits(waits != 0);
    }
    builder
}

impl Gpu {
    /// A fresh simulated device of `profile`; the real one, if tests run on that.
    pub(crate) fn any(profile: &str) -> Gpu {
        Gpu::on_stream(profile, own_stream)
    }

    /// As [`any`](Gpu::any), with another stream of the context than a fresh one; the context stays in single-stream mode
    /// where that stream is a default one.
    pub(crate) fn on_stream(profile: &str, stream: impl FnOnce(&Arc<CudaContext>) -> Arc<CudaStream>) -> Gpu {
        match driver() {
            Driver::Real => Gpu::on(None, 0, stream),
            Driver::Simulated => Gpu::build(builder(profile), stream),
        }
    }

    /// A fresh simulated device of `profile`; `None` where tests run on a real one.
    pub(crate) fn simulated(profile: &str) -> Option<Gpu> {
        Gpu::built(builder(profile))
    }

    /// A simulated device as built (see [`builder`]); `None` where tests run on a real one.
    pub(crate) fn built(builder: DeviceBuilder) -> Option<Gpu> {
        match driver() {
            Driver::Real => None,
            Driver::Simulated => Some(Gpu::build(builder, own_stream)),
        }
    }

    fn build(builder: DeviceBuilder, stream: impl FnOnce(&Arc<CudaContext>) -> Arc<CudaStream>) -> Gpu {
        let sim = builder.build().expect("a built-in profile");
        let ordinal = sim.ordinal();
        Gpu::on(Some(sim), ordinal, stream)
    }

    fn on(
        sim: Option<cuda_sim::Device>,
        ordinal: usize,
        stream: impl FnOnce(&Arc<CudaContext>) -> Arc<CudaStream>,
    ) -> Gpu {
        /// Making a primary context takes a real driver a good part of a second: this one stays.
        static REAL: OnceLock<Arc<CudaContext>> = OnceLock::new();
        let context = CudaContext::new(ordinal).expect("a context");
        if sim.is_none() {
            REAL.get_or_init(|| context.clone());
        }
        let stream = stream(&context);
        let detector = match &sim {
            Some(sim) => Detector::new().fs_root(sim.host_root()),
            None => Detector::new(),
        };
        // The simulator sees a use of memory that was given back too early once that is freed; a real driver may wait for the
        // device when it frees page-locked memory, with itself locked: under a gate it would never end.
        let pool = PoolOptions::new().keep_idle(if sim.is_some() { 0 } else { u64::MAX });
        let device = Device::builder(&stream).detector(detector).pool(pool).build().expect("a device");
        if sim.is_none() {
            let_earlier_tests_end();
            MADE.lock().expect("no panic under it").push(device.clone());
        }
        Gpu { sim, context, stream, device }
    }

    /// With a pool that frees nothing before the end, where others of these tests keep nothing: for tests that need the device's waiter
    /// behind a gate, where freeing would hold it up.
    pub(crate) fn keeping(mut self) -> Gpu {
        // A real device's keeps it anyway.
        if self.sim.is_some() {
            self.device = crate::pool::with_pool(&self, PoolOptions::new().keep_idle(u64::MAX));
        }
        self
    }

    /// With copies by two threads, however many CPUs there are.
    pub(crate) fn with_two_threads(mut self) -> Gpu {
        let mut tuning = self.device.tuning();
        (tuning.threads, tuning.busy_threads) = (2, 2);
        let pool = PoolOptions::new().keep_idle(0);
        self.device = crate::pool::handle(&self, pool).tuning(tuning).build().expect("a device");
        self
    }

    /// Another stream of the context.
    pub(crate) fn another_stream(&self) -> Arc<CudaStream> {
        own_stream(&self.context)
    }

    /// Another `CudaContext` object of the same primary context: cudarc knows nothing of one in the other.
    pub(crate) fn another_context(&self) -> Arc<CudaContext> {
        CudaContext::new(self.context.ordinal()).expect("a context")
    }

    /// Holds a stream (the calling thread's, for the per-thread default stream) from here on. Warm up before: what
    /// allocates, frees or loads a module may wait for the device.
    pub(crate) fn gate(&self, stream: &CudaStream) -> Gate {
        Gate(match &self.sim {
            Some(sim) => Hold::Simulated { _gate: sim.gate(stream.cu_stream() as u64) },
            None => Hold::Real(Flag::wait_on(stream)),
        })
    }

    /// Loads the kernels of the simulator's `kernels.cu`.
    pub(crate) fn kernels(&self) -> Kernels {
        let ptx = Ptx::from_src(include_str!("../cuda-sim/kernels/kernels.ptx"));
        let kernels =
            Kernels { module: self.context.load_module(ptx).expect("the kernels"), context: self.context.clone() };
        if self.sim.is_none() {
            // A real driver loads a function when it is first launched, and may wait for the device to do so.
            let mut warm = self.device.tensor().zeros::<u8>([1]).expect("a tensor");
            kernels.fill(&self.stream, &mut warm.device_mut(&self.stream).expect("a guard"), 0);
            kernels.xor(&self.stream, &mut warm.device_mut(&self.stream).expect("a guard"));
            let copy = self.device.tensor().zeros::<u8>([1]).expect("a tensor");
            let from = copy.device(&self.stream).expect("a guard");
            kernels.copy(&self.stream, &mut warm.device_mut(&self.stream).expect("a guard"), &from);
            self.context.synchronize().expect("warm");
        }
        kernels
    }

    /// Ends a test on a device that works: all that was dropped gets freed, nothing was leaked, and a simulated driver saw no
    /// use of freed memory, no unordered uses and nothing left over. The test's own handles are dropped before.
    #[track_caller]
    pub(crate) fn finish(self) {
        let Gpu { sim, context, stream, device } = self;
        device.drain(HANG).expect("all is freed");
        assert_eq!(device.stats().leaked, 0, "leaked");
        if sim.is_none() {
            context.synchronize().expect("idle");
            device.pool().trim(0);
        }
        drop((device, stream, context));
        if let Some(sim) = sim {
            sim.idle();
            assert_eq!(sim.violations(), Vec::<String>::new());
            let start = std::time::Instant::now();
            while !sim.leaks().is_empty() && start.elapsed() < HANG {
                std::thread::yield_now();
            }
            assert_eq!(sim.leaks(), Vec::<String>::new());
        }
    }

    /// As [`finish`](Gpu::finish) for a test that forgot a guard, which keeps its memory for ever.
    #[track_caller]
    pub(crate) fn finish_forgotten(self) {
        let Gpu { sim, context, stream, device } = self;
        device.drain(HANG).expect("all is freed");
        drop((device, stream, context));
        if let Some(sim) = sim {
            sim.idle();
            assert_eq!(sim.violations(), Vec::<String>::new());
        }
    }

    /// A tensor of one allocation that both sides see: pinned, so that it is to be had on every machine.
    pub(crate) fn both_sides<T: Element>(&self, values: &[T]) -> TransferTensor<T> {
        let options = self.device.tensor().strategy(Strategy::ZeroCopy).backing(Backing::Pinned);
        options.from_slice(values, values.len()).expect("a tensor")
    }

    /// A tensor with the device's own memory, and the values there.
    pub(crate) fn on_device(&self, values: &[u8]) -> TransferTensor<u8> {
        let options = self.device.tensor().strategy(Strategy::Streamed);
        let tensor = options.from_slice(values, values.len()).expect("a tensor");
        drop(tensor.device(&self.stream).expect("a guard"));
        self.stream.synchronize().expect("idle");
        tensor
    }
}

/// The devices that tests made on a real driver. They stay: with the last handle a device's page-locked memory is freed, for
/// which a real driver waits until nothing runs, itself locked; under the next test's gate that would never end.
static MADE: Mutex<Vec<Device>> = Mutex::new(Vec::new());

/// Blocks until nothing is freed for earlier tests, also those that forgot a guard.
fn let_earlier_tests_end() {
    let made = MADE.lock().expect("no panic under it").clone();
    for device in made {
        device.drain(HANG).expect("hangs: a waiter is not done");
    }
}

fn own_stream(context: &Arc<CudaContext>) -> Arc<CudaStream> {
    context.new_stream().expect("a stream")
}

/// Holds a stream until it is opened or dropped.
#[must_use]
pub(crate) struct Gate(Hold);

enum Hold {
    Simulated { _gate: cuda_sim::Gate },
    Real(Flag),
}

impl Gate {
    /// Lets the stream go on.
    pub(crate) fn open(self) {}

    /// Opens it from another thread in a while; says whether that was done yet. For calls that must block until then:
    /// right ones return after it, wrong ones long before.
    pub(crate) fn open_later(self) -> Opener {
        let opened = Arc::new(AtomicBool::new(false));
        let tell = opened.clone();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(40));
            tell.store(true, Ordering::SeqCst);
            self.open();
        });
        Opener { opened, thread: Some(thread) }
    }
}

/// See [`Gate::open_later`].
pub(crate) struct Opener {
    opened: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Opener {
    pub(crate) fn opened(&self) -> bool {
        self.opened.load(Ordering::SeqCst)
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A word of pinned memory that a stream waits for.
struct Flag(&'static AtomicU32);

impl Flag {
    fn wait_on(stream: &CudaStream) -> Flag {
        const WORDS: usize = 4096;
        /// Never freed: freeing pinned memory may wait for the device.
        static FLAGS: OnceLock<&'static [AtomicU32]> = OnceLock::new();
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let context = stream.context();
        context.bind_to_thread().expect("the context");
        let flags = FLAGS.get_or_init(|| {
            let mut memory = std::ptr::null_mut();
            let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
            // SAFETY: the context is current; the memory is set before it is looked at, and stays for ever.
            unsafe {
                sys::cuMemHostAlloc(&mut memory, WORDS * 4, flags).result().expect("pinned memory");
                memory.cast::<u8>().write_bytes(0, WORDS * 4);
                std::slice::from_raw_parts(memory.cast(), WORDS)
            }
        });
        let flag = &flags[NEXT.fetch_add(1, Ordering::Relaxed) % WORDS];
        flag.store(0, Ordering::SeqCst);
        // SAFETY: the stream is alive, its context current, the flag stays for ever. 1: until the word equals the value.
        unsafe {
            let address = flag.as_ptr() as sys::CUdeviceptr;
            sys::cuStreamWaitValue32_v2(stream.cu_stream(), address, 1, 1).result().expect("a wait");
        }
        Flag(flag)
    }
}

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.store(1, Ordering::SeqCst);
    }
}

/// What the kernel `xor_index_u8` applies to byte `index`.
pub(crate) fn index_hash(index: usize) -> u8 {
    cuda_sim::kernels::index_hash(index as u64)
}

/// The kernels of the simulator's `kernels.cu`, on either driver.
pub(crate) struct Kernels {
    pub(crate) module: Arc<CudaModule>,
    context: Arc<CudaContext>,
}

impl Kernels {
    pub(crate) fn function(&self, name: &str) -> CudaFunction {
        // cudarc does not, and the thread may be a fresh one.
        self.context.bind_to_thread().expect("the context");
        self.module.load_function(name).expect("a kernel of kernels.cu")
    }

    fn grid(len: usize) -> LaunchConfig {
        let blocks = u32::try_from(len.div_ceil(256)).unwrap_or(u32::MAX).clamp(1, 1024);
        LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 }
    }

    /// Submits setting every byte.
    pub(crate) fn fill(&self, stream: &Arc<CudaStream>, target: &mut DeviceMut<'_, u8>, value: u8) {
        use transfer_tensor::cudarc::driver::DeviceSlice;
        let (function, len, value) = (self.function("fill_u8"), target.len() as u64, u32::from(value));
        // SAFETY: the parameters are the kernel's; the guard is this stream's.
        unsafe {
            let mut launch = stream.launch_builder(&function);
            launch.arg(target).arg(&len).arg(&value).launch(Self::grid(len as usize)).expect("a launch");
        }
    }

    /// Submits `p[i] ^= index_hash(i)`.
    pub(crate) fn xor(&self, stream: &Arc<CudaStream>, target: &mut DeviceMut<'_, u8>) {
        use transfer_tensor::cudarc::driver::DeviceSlice;
        let (function, len) = (self.function("xor_index_u8"), target.len() as u64);
        // SAFETY: as for `fill`.
        unsafe {
            let mut launch = stream.launch_builder(&function);
            launch.arg(target).arg(&len).launch(Self::grid(len as usize)).expect("a launch");
        }
    }

    /// Submits copying all of `target`'s length.
    pub(crate) fn copy(&self, stream: &Arc<CudaStream>, target: &mut DeviceMut<'_, u8>, source: &DeviceRef<'_, u8>) {
        use transfer_tensor::cudarc::driver::DeviceSlice;
        let (function, len) = (self.function("copy_u8"), target.len() as u64);
        assert!(source.len() >= target.len());
        // SAFETY: as for `fill`.
        unsafe {
            let mut launch = stream.launch_builder(&function);
            launch.arg(target).arg(source).arg(&len).launch(Self::grid(len as usize)).expect("a launch");
        }
    }
}

/// Runs `work` on a thread of its own and hands its result over; fails where it hangs.
#[track_caller]
pub(crate) fn within<R: Send + 'static>(limit: Duration, work: impl FnOnce() -> R + Send + 'static) -> R {
    let (tell, told) = channel();
    let thread = std::thread::spawn(move || {
        let result = work();
        let _ = tell.send(());
        result
    });
    if let Err(RecvTimeoutError::Timeout) = told.recv_timeout(limit) {
        panic!("hangs: not done after {limit:?}");
    }
    match thread.join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Counts how often it woke somebody.
pub(crate) struct CountingWaker {
    wakes: AtomicUsize,
    thread: Thread,
}

impl CountingWaker {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { wakes: AtomicUsize::new(0), thread: std::thread::current() })
    }

    pub(crate) fn wakes(&self) -> usize {
        self.wakes.load(Ordering::SeqCst)
    }
}

impl Wake for CountingWaker {
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, Ordering::SeqCst);
        self.thread.unpark();
    }
}

/// Polls a future once, with a waker that does nothing.
pub(crate) fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    std::pin::Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// The smallest executor: parks until woken; fails where nobody wakes it.
#[track_caller]
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let counter = CountingWaker::new();
    let waker = Waker::from(counter.clone());
    let start = std::time::Instant::now();
    loop {
        let before = counter.wakes();
        if let Poll::Ready(result) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return result;
        }
        while counter.wakes() == before {
            assert!(start.elapsed() < HANG, "hangs: not woken");
            std::thread::park_timeout(Duration::from_secs(1));
        }
    }
}
