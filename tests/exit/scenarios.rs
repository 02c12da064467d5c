//! What the children do.

use std::cell::RefCell;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use cuda_sim::{DeviceBuilder, Driver};
use transfer_tensor::cudarc::driver::{CudaContext, CudaSlice, CudaStream, LaunchConfig, PushKernelArg};
use transfer_tensor::cudarc::nvrtc::Ptx;
use transfer_tensor::{
    Detector, Device, EgressPool, Error, HostTensor, MemoryModel, Order, Output, SharedTensor, Strategy, TensorOptions,
    Transfer, TransferTensor,
};

const H200: &str = "x86_h200_sxm_gen5";
const LEN: usize = 1 << 20;

pub(crate) fn play(scenario: &str) -> ExitCode {
    match scenario {
        "panic_after_fault" => panic_after_fault(),
        "panic_after_fault_in_a_thread" => {
            let thread = std::thread::spawn(panic_after_fault);
            // The thread's panic has been reported; this one's exit code is that of a program that noticed.
            if thread.join().is_err() {
                return ExitCode::from(101);
            }
        }
        "egress_fault" => egress_fault(),
        "egress_static" => egress_static(),
        "statics" => statics(),
        "leaked" => leaked(),
        "exit_mid_copy" => {
            copies_on_threads();
            println!("played");
            std::process::exit(0);
        }
        "return_mid_copy" => copies_on_threads(),
        "driver_gone" => driver_gone(),
        "fork" => fork::after_the_first_use(),
        "fork_before" => fork::before_the_first_use(),
        "detect_mig" => detect_mig(),
        other => panic!("there is no scenario {other}"),
    }
    println!("played");
    ExitCode::SUCCESS
}

struct Gpu {
    sim: Option<cuda_sim::Device>,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    device: Device,
}

fn gpu(profile: &str) -> Gpu {
    let sim = match cuda_sim::install_from_env().expect("the simulated driver is built beside the tests") {
        Driver::Real => None,
        Driver::Simulated => {
            let seed = std::env::var("CUDA_SIM_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
            Some(DeviceBuilder::new(profile).seed(seed).reorder(true).build().expect("a built-in profile"))
        }
    };
    let context = CudaContext::new(sim.as_ref().map_or(0, cuda_sim::Device::ordinal)).expect("a context");
    let stream = context.new_stream().expect("a stream");
    let detector = match &sim {
        Some(sim) => Detector::new().fs_root(sim.host_root()),
        None => Detector::new(),
    };
    let device = Device::with_detector(&stream, &detector).expect("a device");
    Gpu { sim, context, stream, device }
}

/// One of everything that can be held.
struct Everything {
    tensors: Vec<TransferTensor<u8>>,
    shared: SharedTensor<u8>,
    tickets: Vec<Transfer<u8>>,
    slice: transfer_tensor::cudarc::driver::CudaSlice<u8>,
}

fn everything(gpu: &Gpu) -> Everything {
    let values = || vec![7u8; LEN];
    let of = |strategy| gpu.device.tensor().strategy(strategy);
    let mut tensors = vec![
        of(Strategy::Streamed).from_slice(&values(), [LEN]).unwrap(),
        of(Strategy::ZeroCopy).from_slice(&values(), [LEN]).unwrap(),
        of(Strategy::Streamed).pin(true).from_vec(values(), [LEN]).unwrap(),
        of(Strategy::Streamed).zeros([LEN]).unwrap(),
    ];
    for tensor in &mut tensors {
        drop(tensor.device_mut(&gpu.stream).unwrap());
        // A forgotten guard too.
        std::mem::forget(tensor.device(&gpu.stream).unwrap());
    }
    let shared = of(Strategy::Streamed).from_slice(&values(), [LEN]).unwrap().into_shared();
    drop(shared.device(&gpu.stream).unwrap());
    let tickets = vec![
        of(Strategy::Streamed).from_slice(&values(), [LEN]).unwrap().to_device().unwrap(),
        of(Strategy::Streamed)
            .from_vec(values(), [LEN])
            .unwrap()
            .to_device()
            .unwrap()
            .wait()
            .unwrap()
            .to_host()
            .unwrap(),
    ];
    let slice = of(Strategy::Streamed).from_slice(&values(), [LEN]).unwrap().into_cuda_slice().unwrap();
    Everything { tensors, shared, tickets, slice }
}

fn panic_after_fault() {
    let gpu = gpu(H200);
    let module = gpu.context.load_module(Ptx::from_src(cuda_sim::kernels::BUILTIN_PTX)).unwrap();
    let oob = module.load_function("oob").unwrap();
    let mut held = everything(&gpu);
    let mut written = gpu.device.tensor().strategy(Strategy::Streamed).zeros::<u8>([LEN]).unwrap();
    let host = gpu.device.tensor().zeros::<u8>([10]).unwrap();
    let host_guard = host.host().unwrap();
    {
        let guard = written.device_mut(&gpu.stream).unwrap();
        let mut launch = gpu.stream.launch_builder(&oob);
        launch.arg(&guard);
        // SAFETY: none: the kernel writes where nothing is, which the driver answers with a fault.
        unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.unwrap();
    }
    let guards = (written.device_mut(&gpu.stream), held.tensors[1].device(&gpu.stream));
    drop(guards);
    // A ticket that was given before, one that is given after, a view, a future, all at once on the way out.
    let late = held.tensors.pop().map(TransferTensor::to_host);
    let start = Instant::now();
    let fault: Error = written.host().map(|_| ()).expect_err("the device has faulted");
    assert!(fault.is_fault() && start.elapsed() < Duration::from_secs(10), "{fault}");
    let ticket = written.to_device();
    let _alive = (&gpu, &held, &late, &ticket, &host_guard, &module);
    panic!("our own end: {fault}");
}

/// R78: a kernel writes where nothing is. Whoever waits for a result that comes after it is told within a second, however he waits, and
/// so is who submits later, at once; all is dropped then, and the process ends as if nothing had been.
fn egress_fault() {
    const LIMIT: Duration = Duration::from_secs(1);
    let gpu = gpu(H200);
    let module = gpu.context.load_module(Ptx::from_src(cuda_sim::kernels::BUILTIN_PTX)).unwrap();
    let oob = module.load_function("oob").unwrap();
    let slices: Vec<_> = (0..8).map(|value| gpu.stream.clone_htod(&[value; LEN]).unwrap()).collect();
    let late = gpu.stream.clone_htod(&[9u8; LEN]).unwrap();
    let consumed = Arc::new(AtomicUsize::new(0));
    let count = consumed.clone();
    let consumer = move |_: Output<HostTensor<u8>>| count.fetch_add(1, Ordering::SeqCst);
    let pool: EgressPool<CudaSlice<u8>, usize> =
        EgressPool::builder(&gpu.device).workers(2).capacity(7).consumer(consumer).unwrap();
    // Another stream's result was there before.
    let fine = gpu.device.stream().context().new_stream().unwrap();
    let before = pool.submit(fine.clone_htod(&[1u8; LEN]).unwrap()).unwrap();
    assert_eq!(before.wait().unwrap(), 0);
    gpu.context.synchronize().unwrap();
    let gate = gpu.sim.as_ref().map(|sim| sim.gate(gpu.stream.cu_stream() as u64));
    // SAFETY: none: the kernel writes where nothing is, which the driver answers with a fault.
    unsafe { gpu.stream.launch_builder(&oob).arg(&late).launch(LaunchConfig::for_num_elems(1)) }.unwrap();
    let start = Instant::now();
    let (sender, outputs) = pool.channel(Order::Submission);
    let (mut tickets, mut refused) = (Vec::new(), 0);
    for (at, slice) in slices.into_iter().enumerate() {
        // On a real device the fault may be known by now.
        match at % 2 {
            0 => pool.submit(slice).map(|ticket| tickets.push(ticket)).unwrap_or_else(|error| {
                assert!(error.error.is_fault() || error.error.is_full(), "{}", error.error);
                refused += 1;
            }),
            _ => drop(sender.submit(slice)),
        }
        if at == 6 {
            break;
        }
    }
    drop((sender, gate));
    assert_eq!(tickets.len() + refused, 4);
    let mut waits: Vec<Box<dyn FnOnce() -> Option<Error> + Send>> = Vec::new();
    for (at, ticket) in tickets.into_iter().enumerate() {
        waits.push(match at {
            0 => Box::new(|| ticket.wait_timeout(Duration::from_secs(20)).map_err(|refused| refused.error).err()),
            1 => Box::new(|| block_on(ticket).err()),
            _ => Box::new(|| ticket.wait().err()),
        });
    }
    std::thread::scope(|scope| {
        for wait in waits {
            scope.spawn(move || {
                let error = wait().expect("the device has faulted");
                assert!(error.is_fault() && start.elapsed() < LIMIT, "{error}, after {:?}", start.elapsed());
            });
        }
        scope.spawn(move || {
            for out in outputs {
                assert!(out.result.is_err_and(|error| error.is_fault()) && start.elapsed() < LIMIT);
            }
        });
        scope.spawn(|| assert!(pool.drain(LIMIT).is_ok()));
    });
    let start = Instant::now();
    let error = pool.submit(late).expect_err("the device has faulted").error;
    assert!(error.is_fault() && start.elapsed() < Duration::from_millis(100), "{error}");
    assert_eq!(consumed.load(Ordering::SeqCst), 1, "what was never there was consumed");
    let start = Instant::now();
    drop(pool);
    assert!(start.elapsed() < LIMIT);
    std::mem::forget(module);
}

/// Results are on their way when the process ends, and their pool is never dropped.
fn egress_static() {
    static POOL: OnceLock<EgressPool<CudaSlice<u8>, u8>> = OnceLock::new();
    let gpu = gpu(H200);
    let pool = EgressPool::builder(&gpu.device).workers(2).consumer(|out: Output<HostTensor<u8>>| out[0]).unwrap();
    let pool = POOL.get_or_init(|| pool);
    let slices: Vec<_> = (0..4).map(|value| gpu.stream.clone_htod(&[value; LEN]).unwrap()).collect();
    assert_eq!(pool.submit(gpu.stream.clone_htod(&[5u8; LEN]).unwrap()).unwrap().wait().unwrap(), 5);
    let gate = hold(&gpu);
    for slice in slices {
        drop(pool.submit(slice).unwrap());
    }
    std::mem::forget((gate, gpu));
}

fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::task::Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = std::pin::pin!(future);
    loop {
        if let std::task::Poll::Ready(output) = future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            return output;
        }
        std::thread::park();
    }
}

fn statics() {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    static TENSORS: OnceLock<Mutex<Everything>> = OnceLock::new();
    static OTHERS: OnceLock<(Arc<CudaContext>, Arc<CudaStream>)> = OnceLock::new();
    thread_local! {
        static MINE: RefCell<Vec<Everything>> = const { RefCell::new(Vec::new()) };
        static DEVICE_OF_THIS_THREAD: RefCell<Option<Device>> = const { RefCell::new(None) };
    }
    let gpu = gpu(H200);
    let gate = hold(&gpu);
    assert!(TENSORS.set(Mutex::new(everything_unwaited(&gpu))).is_ok());
    // On this thread, whose locals go when main has returned, and on one that ends before.
    MINE.with_borrow_mut(|mine| mine.push(everything_unwaited(&gpu)));
    DEVICE_OF_THIS_THREAD.with_borrow_mut(|mine| *mine = Some(gpu.device.clone()));
    std::thread::scope(|scope| {
        scope.spawn(|| MINE.with_borrow_mut(|mine| mine.push(everything_unwaited(&gpu))));
    });
    assert!(DEVICE.set(gpu.device.clone()).is_ok());
    assert!(OTHERS.set((gpu.context.clone(), gpu.stream.clone())).is_ok());
    std::mem::forget(gate);
    std::mem::forget(gpu.sim);
}

/// Holds the simulated device's stream, for ever if forgotten: whatever is on it is in flight when the process ends.
fn hold(gpu: &Gpu) -> Option<cuda_sim::Gate> {
    gpu.sim.as_ref().map(|sim| sim.gate(gpu.stream.cu_stream() as u64))
}

/// As [`everything`], with nothing that would wait for the stream.
fn everything_unwaited(gpu: &Gpu) -> Everything {
    let values = || vec![7u8; LEN];
    let of = |strategy| gpu.device.tensor().strategy(strategy);
    let mut tensors = vec![
        of(Strategy::Streamed).from_slice(&values(), [LEN]).unwrap(),
        of(Strategy::ZeroCopy).from_slice(&values(), [LEN]).unwrap(),
        of(Strategy::Streamed).pin(true).from_vec(values(), [LEN]).unwrap(),
    ];
    for tensor in &mut tensors {
        drop(tensor.device_mut(&gpu.stream).unwrap());
        std::mem::forget(tensor.device(&gpu.stream).unwrap());
    }
    let shared = of(Strategy::Streamed).from_slice(&values(), [LEN]).unwrap().into_shared();
    drop(shared.device(&gpu.stream).unwrap());
    let mut on_the_way = of(Strategy::Streamed).from_slice(&values(), [LEN]).unwrap();
    drop(on_the_way.device_mut(&gpu.stream).unwrap());
    let tickets = vec![on_the_way.to_host().unwrap()];
    let mut last = of(Strategy::Streamed).from_slice(&values(), [LEN]).unwrap();
    drop(last.device_mut(&gpu.stream).unwrap());
    let slice = last.into_cuda_slice().unwrap();
    Everything { tensors, shared, tickets, slice }
}

fn leaked() {
    let gpu = gpu(H200);
    let gate = hold(&gpu);
    let held = everything_unwaited(&gpu);
    // Some of it dropped while in flight, which leaves jobs to the waiting thread; the rest leaked.
    let Everything { mut tensors, shared, tickets, slice } = held;
    drop(tensors.pop());
    drop(shared);
    std::mem::forget((tensors, tickets, slice, gate));
    let polled = {
        let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&[1u8; 100], [100]).unwrap();
        drop(tensor.device_mut(&gpu.stream).unwrap());
        let mut ticket = tensor.to_host().unwrap();
        let waker = std::task::Waker::noop();
        let polled =
            std::future::Future::poll(std::pin::Pin::new(&mut ticket), &mut std::task::Context::from_waker(waker));
        assert!(polled.is_pending() || gpu.sim.is_none());
        ticket
    };
    std::mem::forget(polled);
    std::mem::forget(gpu);
}

/// Three threads that never stop copying; returns while they do.
fn copies_on_threads() {
    let gpu: &'static Gpu = Box::leak(Box::new(gpu(H200)));
    let (tell, told) = std::sync::mpsc::channel();
    for thread in 0..3u8 {
        let tell = tell.clone();
        std::thread::spawn(move || {
            for round in 0u64.. {
                let strategy = if round % 3 == 2 { Strategy::ZeroCopy } else { Strategy::Streamed };
                let options = gpu.device.tensor().strategy(strategy).pin(round % 2 == 0);
                // Errors come when the driver ends before this thread does: they are no panic, nor anything printed.
                let Ok(tensor) = options.from_vec(vec![thread; 5 << 20], [5 << 20]) else { return };
                let Ok(ticket) = tensor.to_device() else { return };
                let Ok(mut tensor) = ticket.wait() else { return };
                if tensor.device_mut(&gpu.stream).is_err() || tensor.to_host().is_err() {
                    return;
                }
                let _ = tell.send(());
            }
        });
    }
    // So many that everything has been set up, and a different moment each time.
    let seed: usize = std::env::var("CUDA_SIM_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    for _ in 0..3 + seed % 4 {
        told.recv().expect("the threads copy");
    }
}

/// As in a process that is being taken down: every call answers CUDA_ERROR_DEINITIALIZED.
fn driver_gone() {
    let gpu = gpu(H200);
    let Some(sim) = &gpu.sim else { return };
    let held = everything(&gpu);
    sim.driver_gone(true);
    let Everything { tensors, shared, tickets, slice } = held;
    for mut tensor in tensors {
        let error = tensor.device_mut(&gpu.stream).map(|_| ()).expect_err("the driver is gone");
        assert_eq!(error.driver_code(), Some(4), "{error}");
        let _ = tensor.host().map(|_| ());
        let _ = tensor.into_vec().map(|_| ());
    }
    for ticket in tickets {
        // One has nothing more to wait for.
        if let Err(refused) = ticket.wait() {
            assert_eq!(refused.error.driver_code(), Some(4), "{}", refused.error);
        }
    }
    assert!(gpu.device.tensor().strategy(Strategy::ZeroCopy).zeros::<u8>([10]).is_err());
    drop((shared, slice));
    let _ = gpu.device.memory();
    let _ = gpu.device.drain(Duration::from_secs(10));
    let Gpu { sim, context, stream, device } = gpu;
    drop((device, stream, context));
    std::mem::forget(sim);
}

fn detect_mig() {
    let gpu = gpu("mig_1g_h100");
    let platform = gpu.device.platform();
    assert_eq!(platform.model(), MemoryModel::Discrete);
    assert_eq!(Some(platform.total_bytes()), gpu.sim.as_ref().map(|sim| sim.profile().total_mem));
    assert!(platform.uuid().is_some_and(|uuid| uuid.len() == 32));
    assert!(!platform.to_string().is_empty());
}

mod fork {
    use super::*;

    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn exit(code: i32) -> !;
        fn alarm(seconds: u32) -> u32;
    }

    /// Runs `body` in a forked child, which then ends as a process does; its exit code.
    fn in_a_child(body: impl FnOnce()) -> Option<i32> {
        // SAFETY: the child runs what this test gives it, and ends in `exit`.
        match unsafe { fork() } {
            0 => {
                // A hang ends with a signal, not with a good code.
                // SAFETY: no preconditions.
                unsafe { alarm(20) };
                let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_ok();
                // SAFETY: runs the handlers of a process that ends, as a real one would.
                unsafe { exit(if passed { 0 } else { 1 }) }
            }
            pid => {
                assert!(pid > 0);
                let mut status = 0;
                // SAFETY: a child of ours and a place for its status.
                assert_eq!(unsafe { waitpid(pid, &raw mut status, 0) }, pid);
                // Ended by itself, with a code.
                (status & 0x7F == 0).then_some(status >> 8 & 0xFF)
            }
        }
    }

    fn forked(result: Result<(), Error>) {
        match result {
            Ok(()) => panic!("it has worked in a forked child"),
            Err(error) => assert!(error.is_forked(), "{error}"),
        }
    }

    /// R70: the child can not use the device, is told so at once, and may drop what it inherited.
    pub(super) fn after_the_first_use() {
        let gpu = gpu(H200);
        let mut held = everything(&gpu);
        // The locks of the driver are as the fork finds them: let it come to rest.
        gpu.context.synchronize().unwrap();
        let _ = gpu.device.drain(Duration::from_secs(20));
        let code = in_a_child(|| {
            let start = Instant::now();
            forked(Device::open(0).map(|_| ()));
            forked(Device::new(&gpu.stream).map(|_| ()));
            forked(gpu.device.calibrate().map(|_| ()));
            let platform = transfer_tensor::Platform::detect(0);
            assert_eq!(platform.model(), MemoryModel::HostOnly);
            assert!(platform.notes().join(" ").contains("forked"));
            for tensor in &mut held.tensors {
                forked(tensor.device(&gpu.stream).map(|_| ()));
                forked(tensor.device_mut(&gpu.stream).map(|_| ()));
                forked(tensor.host_mut().map(|_| ()));
            }
            forked(gpu.device.tensor().strategy(Strategy::ZeroCopy).zeros::<u8>([10]).map(|_| ()));
            for ticket in std::mem::take(&mut held.tickets) {
                // One has nothing more to wait for.
                if let Err(refused) = ticket.wait() {
                    assert!(refused.error.is_forked(), "{}", refused.error);
                }
            }
            // What needs no device works.
            let tensor = TensorOptions::host_only().from_slice(&[1u8, 2, 3], [3]).unwrap();
            assert_eq!(tensor.into_vec().unwrap(), [1, 2, 3]);
            held.tensors.clear();
            let _ = gpu.device.drain(Duration::from_millis(1));
            assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
            // The rest ends with the process.
        });
        assert_eq!(code, Some(0), "the child");
        // The parent's transfers are still right.
        for ticket in held.tickets {
            assert_eq!(*ticket.wait().unwrap().host().unwrap(), *vec![7u8; LEN]);
        }
        let tensor = gpu.device.tensor().from_vec(vec![5u8; LEN], [LEN]).unwrap();
        let mut tensor = tensor.to_device().unwrap().wait().unwrap();
        drop(tensor.device_mut(&gpu.stream).unwrap());
        assert_eq!(*tensor.host().unwrap(), *vec![5u8; LEN]);
        assert_eq!(held.tensors.len(), 4);
        for tensor in held.tensors {
            let _ = tensor.into_vec().unwrap();
        }
        drop((held.shared, held.slice));
        gpu.device.drain(Duration::from_secs(20)).unwrap();
        assert_eq!(gpu.device.stats().leaked, 0);
    }

    /// Looking at machines from their attributes, planning, and host-only tensors leave CUDA alone: a child can still
    /// begin with it.
    pub(super) fn before_the_first_use() {
        cuda_sim::install_from_env().expect("the simulated driver is built beside the tests");
        let platform = transfer_tensor::Platform::from_attributes("somewhere else", 1 << 30, Default::default());
        let plan = transfer_tensor::plan(&platform, &platform.memory(), &transfer_tensor::Request::new(100)).unwrap();
        assert_eq!(plan.strategy, Strategy::Streamed);
        let tensor = TransferTensor::from_vec(vec![1u8], [1]).unwrap();
        let code = in_a_child(|| {
            let gpu = gpu(H200);
            let tensor = gpu.device.tensor().from_vec(vec![5u8; 1000], [1000]).unwrap();
            assert_eq!(tensor.to_device().unwrap().wait().unwrap().into_vec().unwrap(), [5u8; 1000]);
        });
        assert_eq!(code, Some(0), "the child");
        assert_eq!(*tensor.host().unwrap(), [1]);
    }
}
