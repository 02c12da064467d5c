//! What it costs to learn that a copy is over, and what the calls of the driver cost that every way of learning it is made of.
//!
//!     cargo bench --bench completion_latency -- [--quick] [--json FILE]
//!
//! The copies are of 4 KiB, one at a time, with the caller awake between two, and nothing else under way. *raw* of a wait is a copy with
//! an event behind it, for which the caller asks until it has passed; *raw* of a submit: cudarc told that the slice is read, an event on its
//! stream, the copy on another one with an event behind it, and a sleeping thread woken, where the pool has to. Without a GPU the simulated
//! H200 runs, by the wall.

mod common;

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use common::{Args, Bench, Failure, Raw, Row, check, median, print, write};
use transfer_tensor::cudarc::driver::{CudaSlice, DevicePtr, sys};
use transfer_tensor::{EgressPool, HostTensor, Output, TransferTensor};

const BYTES: usize = 4 << 10;

/// So long the caller computes between two copies: a pool falls asleep meanwhile.
const BETWEEN: Duration = Duration::from_micros(300);

fn main() -> Result<(), Failure> {
    let args = Args::read(&[], &[])?;
    let bench = Bench::open("x86_h200_sxm_gen5")?;
    bench.announce_wall();
    let rounds = if args.quick || bench.sim.is_some() { 10 } else { 1001 };
    let mut rows = Vec::new();
    calls(&bench, rounds, &mut rows);
    let (submits, raw) = waits(&bench, rounds, &mut rows)?;
    for awake in [false, true] {
        pools(&bench, rounds, awake, (submits, raw), &mut rows)?;
    }
    write(&args, &rows)
}

fn add(bench: &Bench, rows: &mut Vec<Row>, case: &str, seconds: Vec<f64>, raw: Option<f64>) -> f64 {
    let ours = median(seconds);
    let row = Row::of_wall(bench, case, BYTES, ours, raw);
    print(&row);
    rows.push(row);
    ours
}

/// Keeps the caller's core awake.
fn compute(how_long: Duration) {
    let start = Instant::now();
    while start.elapsed() < how_long {
        std::hint::spin_loop();
    }
}

fn each(rounds: usize, mut run: impl FnMut() -> f64) -> Vec<f64> {
    let all = (0..=rounds).map(|_| {
        compute(BETWEEN);
        run()
    });
    all.skip(1).collect()
}

/// The calls, one after another, 64 of each at a time.
fn calls(bench: &Bench, rounds: usize, rows: &mut Vec<Row>) {
    const MANY: usize = 64;
    let (raw, stream) = (Raw::new(BYTES), bench.stream.cu_stream());
    let other = bench.stream.context().new_stream().expect("a stream");
    let mut event = std::ptr::null_mut();
    // SAFETY: the bench's context is current, and the call writes one handle.
    unsafe { check(sys::cuEventCreate(&mut event, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)) };
    let mut time = |case: &str, call: &mut dyn FnMut()| {
        let seconds = each(rounds / 10 + 7, || {
            let start = Instant::now();
            (0..MANY).for_each(|_| call());
            let taken = start.elapsed().as_secs_f64() / MANY as f64;
            bench.sync();
            taken
        });
        add(bench, rows, case, seconds, None);
    };
    let (second, mut current) = (other.cu_stream(), std::ptr::null_mut());
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the handles are alive, and the context is current.
    let record = || unsafe { check(sys::cuEventRecord(event, stream)) };
    // SAFETY: as above.
    let wait = || unsafe { check(sys::cuStreamWaitEvent(second, event, 0)) };
    // SAFETY: as above; both ends are `BYTES` long and stay.
    let copy = || unsafe { check(sys::cuMemcpyDtoHAsync_v2(raw.host, raw.device, BYTES, second)) };
    // SAFETY: as above.
    let query = || unsafe { check(sys::cuEventQuery(event)) };
    time("call: clock", &mut || {
        std::hint::black_box(Instant::now());
    });
    // SAFETY: as above.
    time("call: cuCtxGetCurrent", &mut || unsafe { check(sys::cuCtxGetCurrent(&mut current)) });
    // SAFETY: as above; what is put in last is what was there.
    time("call: two of cuThreadExchangeStreamCaptureMode", &mut || unsafe {
        check(sys::cuThreadExchangeStreamCaptureMode(&mut mode));
        check(sys::cuThreadExchangeStreamCaptureMode(&mut mode));
    });
    // SAFETY: as above.
    time("call: cuStreamIsCapturing", &mut || unsafe { check(sys::cuStreamIsCapturing(stream, &mut status)) });
    time("call: cuMemcpyDtoHAsync", &mut || raw.down(bench));
    time("call: cuEventRecord", &mut || record());
    time("call: cuStreamWaitEvent, passed", &mut || wait());
    time("call: cuEventRecord, cuStreamWaitEvent", &mut || {
        record();
        wait();
    });
    time("call: cuEventQuery, passed", &mut || query());
    time("call: all of a pool's copy", &mut || {
        record();
        wait();
        copy();
    });
    let _ = other.synchronize();
    // SAFETY: nothing uses it any more.
    unsafe { check(sys::cuEventDestroy_v2(event)) };
}

/// A tensor's own waits, and the driver's. What the calls of a submit take, without and with a thread woken, and a copy until it is seen to have
/// run.
fn waits(bench: &Bench, rounds: usize, rows: &mut Vec<Row>) -> Result<([f64; 2], f64), Failure> {
    let (raw, stream) = (Raw::new(BYTES), bench.stream.cu_stream());
    let mut wait = |case: &str, flags: sys::CUevent_flags, block: bool, base: Option<f64>| {
        let mut event = std::ptr::null_mut();
        // SAFETY: as in `calls`.
        unsafe { check(sys::cuEventCreate(&mut event, flags as u32 | 2)) };
        let seconds = each(rounds, || {
            let start = Instant::now();
            raw.down(bench);
            // SAFETY: as in `calls`.
            unsafe {
                check(sys::cuEventRecord(event, stream));
                match block {
                    true => check(sys::cuEventSynchronize(event)),
                    false => while sys::cuEventQuery(event) == sys::CUresult::CUDA_ERROR_NOT_READY {},
                }
            }
            start.elapsed().as_secs_f64()
        });
        let base = add(bench, rows, case, seconds, base);
        // SAFETY: it has passed.
        unsafe { check(sys::cuEventDestroy_v2(event)) };
        base
    };
    let base = wait("raw: copy, event, asking", sys::CUevent_flags::CU_EVENT_DEFAULT, false, None);
    wait("raw: copy, event, cuEventSynchronize", sys::CUevent_flags::CU_EVENT_DEFAULT, true, Some(base));
    wait("raw: copy, blocking event", sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC, true, Some(base));
    let second = bench.stream.context().new_stream()?;
    let (mut before, mut behind) = (std::ptr::null_mut(), std::ptr::null_mut());
    for event in [&mut before, &mut behind] {
        // SAFETY: as in `calls`.
        unsafe { check(sys::cuEventCreate(event, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32)) };
    }
    let seconds = each(rounds, || {
        let start = Instant::now();
        // SAFETY: as in `calls`.
        unsafe {
            check(sys::cuEventRecord(before, stream));
            check(sys::cuStreamWaitEvent(second.cu_stream(), before, 0));
            check(sys::cuMemcpyDtoHAsync_v2(raw.host, raw.device, BYTES, second.cu_stream()));
            check(sys::cuEventRecord(behind, second.cu_stream()));
            while sys::cuEventQuery(behind) == sys::CUresult::CUDA_ERROR_NOT_READY {}
        }
        start.elapsed().as_secs_f64()
    });
    add(bench, rows, "raw: on a second stream, asking", seconds, Some(base));
    let slice: CudaSlice<u8> = bench.stream.alloc_zeros(BYTES)?;
    let mut submits = |case: &str, wake: &dyn Fn()| {
        let mut submits = Vec::new();
        each(rounds, || {
            let start = Instant::now();
            wake();
            let (source, told) = slice.device_ptr(&bench.stream);
            drop(told);
            // SAFETY: as in `calls`; the slice is as long, and stays.
            unsafe {
                check(sys::cuEventRecord(before, stream));
                check(sys::cuStreamWaitEvent(second.cu_stream(), before, 0));
                check(sys::cuMemcpyDtoHAsync_v2(raw.host, source, BYTES, second.cu_stream()));
                check(sys::cuEventRecord(behind, second.cu_stream()));
                submits.push(start.elapsed().as_secs_f64());
                while sys::cuEventQuery(behind) == sys::CUresult::CUDA_ERROR_NOT_READY {}
            }
            0.0
        });
        add(bench, rows, case, submits, None)
    };
    let awake = submits("raw: the calls of a submit", &|| ());
    let (state, changed) = (Mutex::new(Some(0u64)), Condvar::new());
    let asleep = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut seen = Some(0);
            while seen.is_some() {
                let now = changed.wait_while(state.lock().expect("no panic"), |now| *now == seen);
                seen = *now.expect("no panic");
            }
        });
        let set = |change: fn(u64) -> Option<u64>| {
            let mut state = state.lock().expect("no panic");
            *state = state.and_then(change);
            changed.notify_one();
        };
        let asleep = submits("raw: the calls of a submit, and a thread woken", &|| set(|now| Some(now + 1)));
        set(|_| None);
        asleep
    });
    let mut tensor = Some(bench.device.tensor().zeros::<u8>([BYTES])?);
    for (case, awaited) in [("tensor: to_host().wait()", false), ("tensor: to_host().await", true)] {
        let mut failed = None;
        let seconds = each(rounds, || {
            let Some(mut this) = tensor.take() else { return 0.0 };
            let start = Instant::now();
            let mut run = || -> Result<TransferTensor<u8>, Failure> {
                let mut taken = std::mem::replace(&mut this, TransferTensor::zeros([0])?);
                // Stale on the host, so that there is something to copy.
                drop(taken.device_mut(&bench.stream)?);
                let transfer = taken.to_host().map_err(|refused| refused.error)?;
                Ok(match awaited {
                    true => block_on(transfer).map_err(|refused| refused.error)?,
                    false => transfer.wait().map_err(|refused| refused.error)?,
                })
            };
            match run() {
                Ok(back) => tensor = Some(back),
                Err(error) => failed = Some(error),
            }
            start.elapsed().as_secs_f64()
        });
        failed.map_or(Ok(()), Err)?;
        add(bench, rows, case, seconds, Some(base));
    }
    Ok(([awake, asleep], base))
}

/// From `submit` to a function, a ticket, and a task.
fn pools(
    bench: &Bench,
    rounds: usize,
    awake: bool,
    (submits, raw): ([f64; 2], f64),
    rows: &mut Vec<Row>,
) -> Result<(), Failure> {
    let name = |what: &str| format!("pool{}: {what}", if awake { ", low latency" } else { "" });
    let source: Arc<CudaSlice<u8>> = Arc::new(bench.stream.alloc_zeros(BYTES)?);
    bench.sync();
    // The caller stays awake, as one does who has other work to do: he looks until it is there.
    let (begin, told) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let seen = told.clone();
    let pool: EgressPool<Arc<CudaSlice<u8>>, ()> =
        EgressPool::builder(&bench.device).low_latency(awake).consumer(move |_: Output<HostTensor<u8>>| {
            told.store(begin.elapsed().as_nanos() as u64, Ordering::Release);
        })?;
    let (mut times, mut failed) = (Vec::new(), None);
    let seconds = each(rounds, || {
        let start = Instant::now();
        match pool.submit(source.clone()) {
            Ok(ticket) => drop(ticket),
            Err(refused) => failed = Some(refused.error),
        }
        times.push(start.elapsed().as_secs_f64());
        let at = loop {
            match seen.swap(0, Ordering::Acquire) {
                0 if failed.is_none() && start.elapsed() < Duration::from_secs(10) => std::hint::spin_loop(),
                at => break at,
            }
        };
        (begin + Duration::from_nanos(at)).saturating_duration_since(start).as_secs_f64()
    });
    failed.map_or(Ok(()), Err)?;
    add(bench, rows, &name("submit"), times, Some(submits[usize::from(!awake)]));
    add(bench, rows, &name("submit to function"), seconds, Some(raw));
    drop(pool);

    let pool: EgressPool<Arc<CudaSlice<u8>>> = EgressPool::builder(&bench.device).low_latency(awake).tickets()?;
    for (case, awaited) in [("submit, ticket.wait()", false), ("submit, ticket.await", true)] {
        let mut failed = None;
        let seconds = each(rounds, || {
            let start = Instant::now();
            let result = match pool.submit(source.clone()) {
                Ok(ticket) if awaited => block_on(ticket),
                Ok(ticket) => ticket.wait(),
                Err(refused) => Err(refused.error),
            };
            failed = result.err();
            start.elapsed().as_secs_f64()
        });
        failed.map_or(Ok(()), Err)?;
        add(bench, rows, &name(case), seconds, Some(raw));
    }
    Ok(())
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        std::thread::park();
    }
}
