//! The C interface of `examples/torch_egress`, called as C would, on the simulated driver.

// Its functions are exported from a library of their own; here they are a module.
#[allow(unreachable_pub)]
#[path = "../examples/torch_egress/lib.rs"]
mod abi;
#[path = "it/forked.rs"]
mod forked;

use std::collections::BTreeSet;
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use abi::*;
use cuda_sim::Device;
use forked::in_a_forked_child;
use transfer_tensor::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, sys};

const LEN: usize = 100_000;
/// No call takes this long: what does, hangs.
const HANG: u32 = 60_000;

/// A simulated device, a producer on it, and a pool.
struct Machine {
    sim: Device,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    pool: u64,
}

impl Machine {
    fn new(change: impl FnOnce(&mut TtOptions)) -> Self {
        let sim = cuda_sim::device("x86_h200_sxm_gen5").expect("the simulated driver is built beside the tests");
        let context = CudaContext::new(sim.ordinal()).unwrap();
        let stream = context.new_stream().unwrap();
        let mut options =
            TtOptions { device: sim.ordinal() as u32, capacity: 4, budget: 1 << 20, ..TtOptions::default() };
        change(&mut options);
        let mut pool = 0;
        // SAFETY: both are valid.
        assert_eq!(unsafe { tt_egress_create(&raw const options, &raw mut pool) }, Code::Ok as i32, "{}", last_error());
        Self { sim, context, stream, pool }
    }

    fn memory(&self, value: u8) -> Memory {
        Memory::of(self.stream.clone_htod(&vec![value; LEN]).unwrap())
    }

    fn submit(&self, memory: &Memory, tag: u64) -> i32 {
        self.submit_on(memory, self.stream.cu_stream() as u64, memory.slice.len(), tag)
    }

    fn submit_on(&self, memory: &Memory, stream: u64, bytes: usize, tag: u64) -> i32 {
        // SAFETY: the tests keep `memory` until its callback was called.
        unsafe { tt_egress_submit(self.pool, memory.address, bytes as u64, stream, tag, Some(count), memory.user()) }
    }

    fn next(&self, timeout_ms: u32) -> Result<TtOutput, i32> {
        let mut output = TtOutput::default();
        // SAFETY: it is valid.
        match unsafe { tt_egress_next(self.pool, timeout_ms, &raw mut output) } {
            0 => Ok(output),
            code => Err(code),
        }
    }

    fn stats(&self) -> TtStats {
        let mut stats = TtStats::default();
        // SAFETY: it is valid.
        assert_eq!(unsafe { tt_egress_stats(self.pool, &raw mut stats) }, 0);
        stats
    }

    fn shutdown(&self, timeout_ms: u32) -> (i32, TtShutdown) {
        let mut report = TtShutdown::default();
        // SAFETY: it is valid.
        (unsafe { tt_egress_shutdown(self.pool, timeout_ms, &raw mut report) }, report)
    }

    /// Destroys the pool and looks at what the driver saw.
    #[track_caller]
    fn finish(self, memory: Vec<Memory>) {
        assert_eq!(tt_egress_destroy(self.pool, HANG), 0, "{}", last_error());
        assert_eq!(tt_egress_destroy(self.pool, HANG), Code::Invalid as i32);
        for memory in &memory {
            assert_eq!(memory.released(), 1);
        }
        drop((memory, self.stream, self.context));
        self.sim.idle();
        assert_eq!(self.sim.violations(), Vec::<String>::new());
        until(|| self.sim.leaks().is_empty());
    }
}

/// What a submit lends, and how often that was given back.
struct Memory {
    slice: CudaSlice<u8>,
    address: u64,
    released: Box<AtomicU32>,
}

impl Memory {
    fn of(slice: CudaSlice<u8>) -> Self {
        let address = slice.device_ptr(slice.stream()).0;
        Self { slice, address, released: Box::default() }
    }

    fn user(&self) -> *mut c_void {
        (&raw const *self.released).cast_mut().cast()
    }

    fn released(&self) -> u32 {
        self.released.load(Ordering::SeqCst)
    }
}

unsafe extern "C" fn count(user: *mut c_void) {
    // SAFETY: the counter of a `Memory`, which the tests keep.
    unsafe { &*user.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
}

fn last_error() -> String {
    // SAFETY: it ends with 0, and stays until the next call.
    unsafe { CStr::from_ptr(tt_egress_last_error()) }.to_str().unwrap().to_owned()
}

fn bytes(output: &TtOutput) -> &[u8] {
    // SAFETY: the tests look before they release it.
    unsafe { std::slice::from_raw_parts(output.data, output.bytes as usize) }
}

#[track_caller]
fn until(done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "hangs");
        std::thread::yield_now();
    }
}

#[test]
fn bytes_and_tags_arrive_and_every_loan_ends_once() {
    assert_eq!(tt_egress_abi(), TT_EGRESS_ABI);
    for (workers, order) in [(0, TT_ORDER_SUBMISSION), (3, TT_ORDER_SUBMISSION), (3, TT_ORDER_COMPLETION)] {
        let machine = Machine::new(|options| {
            (options.workers, options.order, options.room_timeout_ms) = (workers, order, TT_FOREVER);
        });
        let memory: Vec<Memory> = (0..20).map(|value| machine.memory(value)).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for (memory, tag) in memory.iter().zip(1000..) {
                    assert_eq!(machine.submit(memory, tag), 0, "{}", last_error());
                }
            });
            let mut tags = Vec::new();
            for _ in 0..20 {
                let output = machine.next(HANG).unwrap();
                assert_eq!((output.error, output.bytes, output.reserved), (0, LEN as u64, 0));
                assert!(bytes(&output).iter().all(|&byte| u64::from(byte) + 1000 == output.tag));
                tags.push(output.tag);
                assert_eq!(tt_egress_release(output.output), 0);
                assert_eq!(tt_egress_release(output.output), Code::Invalid as i32);
            }
            if order == TT_ORDER_COMPLETION {
                tags.sort_unstable();
            }
            assert!(tags.into_iter().eq(1000..1020));
        });
        assert_eq!(tt_egress_drain(machine.pool, HANG), 0);
        until(|| machine.stats().released == 20);
        let stats = machine.stats();
        assert_eq!((stats.submitted, stats.delivered, stats.failed, stats.in_flight), (20, 20, 0, 0));
        assert_eq!((stats.bytes, stats.kept, stats.kept_bytes, stats.lent), (20 * LEN as u64, 0, 0, 0));
        assert_eq!((stats.faulted, stats.closed), (0, 0));
        machine.finish(memory);
    }
}

/// The copy comes after what the stream was given before; the memory is not given back before the copy has passed.
#[test]
fn a_copy_comes_after_the_stream_that_it_was_submitted_with() {
    let machine = Machine::new(|_| ());
    let mut memory = machine.memory(1);
    let gate = machine.sim.gate(machine.stream.cu_stream() as u64);
    machine.stream.memset_zeros(&mut memory.slice).unwrap();
    assert_eq!(machine.submit(&memory, 7), 0, "{}", last_error());
    assert_eq!(machine.next(20).unwrap_err(), Code::Timeout as i32);
    assert_eq!(tt_egress_drain(machine.pool, 20), Code::Timeout as i32);
    assert_eq!((memory.released(), machine.stats().lent), (0, 1));
    drop(gate);
    let output = machine.next(HANG).unwrap();
    assert!(bytes(&output).iter().all(|&byte| byte == 0));
    assert_eq!(tt_egress_release(output.output), 0);
    machine.finish(vec![memory]);
}

#[test]
fn the_default_streams_are_known_by_their_numbers() {
    let machine = Machine::new(|_| ());
    let memory: Vec<Memory> = (0..3).map(|value| machine.memory(value)).collect();
    machine.stream.synchronize().unwrap();
    for (memory, stream) in memory.iter().zip(0..) {
        assert_eq!(machine.submit_on(memory, stream, LEN, stream), 0, "{}", last_error());
        let output = machine.next(HANG).unwrap();
        assert!(output.tag == stream && bytes(&output).iter().all(|&byte| u64::from(byte) == stream));
        assert_eq!(tt_egress_release(output.output), 0);
    }
    machine.finish(memory);
}

#[test]
fn wrong_arguments_are_errors() {
    let machine = Machine::new(|_| ());
    let memory = machine.memory(1);
    let invalid = Code::Invalid as i32;
    let options = TtOptions { device: machine.sim.ordinal() as u32, ..TtOptions::default() };
    let mut pool = 0;
    // SAFETY: what is not valid here is null.
    unsafe {
        assert_eq!(tt_egress_create(std::ptr::null(), &raw mut pool), invalid);
        assert_eq!(last_error(), "options is null");
        assert_eq!(tt_egress_create(&raw const options, null_mut()), invalid);
        let options = TtOptions { order: 2, ..options };
        assert_eq!(tt_egress_create(&raw const options, &raw mut pool), invalid);
        let options = TtOptions { device: 100_000, order: 0, ..options };
        assert_eq!(tt_egress_create(&raw const options, &raw mut pool), Code::NoDevice as i32);
        assert!(last_error().starts_with("there is no device 100000"), "{}", last_error());
        assert_eq!(pool, 0);
        assert_eq!(tt_egress_next(machine.pool, 0, null_mut()), invalid);
        assert_eq!(tt_egress_stats(machine.pool, null_mut()), invalid);
        assert_eq!(tt_egress_submit(machine.pool, 0, 1, 0, 0, Some(count), memory.user()), invalid);
        let nobody = u64::MAX;
        assert_eq!(tt_egress_submit(nobody, memory.address, 1, 0, 0, Some(count), memory.user()), invalid);
        assert_eq!(tt_egress_next(nobody, 0, null_mut()), invalid);
        assert_eq!(tt_egress_shutdown(nobody, 0, null_mut()), invalid);
        for code in [tt_egress_drain(nobody, 0), tt_egress_destroy(nobody, 0), tt_egress_release(0)] {
            assert_eq!(code, invalid);
        }
    }
    let own = machine.stream.cu_stream() as u64;
    assert_eq!(machine.submit_on(&memory, own, 0, 0), invalid);
    let other = Machine::new(|_| ());
    assert_eq!(machine.submit_on(&memory, other.stream.cu_stream() as u64, LEN, 0), invalid);
    assert!(last_error().contains("another context"), "{}", last_error());
    assert_eq!((memory.released(), machine.stats().submitted), (0, 0));
    drop(memory);
    other.finish(Vec::new());
    machine.finish(Vec::new());
}

#[test]
fn what_has_no_room_is_refused_and_stays_the_callers() {
    let machine = Machine::new(|options| options.capacity = 1);
    let (large, one, two) = (machine.stream.alloc_zeros::<u8>(2 << 20).unwrap(), machine.memory(1), machine.memory(2));
    let large = Memory::of(large);
    assert_eq!(machine.submit(&large, 0), Code::TooLarge as i32);
    assert!(last_error().contains("never fits"), "{}", last_error());
    assert_eq!(machine.submit(&one, 1), 0);
    assert_eq!(machine.submit(&two, 2), Code::Full as i32);
    let output = machine.next(HANG).unwrap();
    // It was given, and takes room until it is given back.
    assert_eq!(machine.submit(&two, 2), Code::Full as i32);
    assert_eq!(tt_egress_release(output.output), 0);
    assert_eq!(machine.submit(&two, 2), 0);
    let output = machine.next(HANG).unwrap();
    assert_eq!((output.tag, machine.next(1).unwrap_err()), (2, Code::Timeout as i32));
    until(|| two.released() == 1);
    assert_eq!((large.released(), machine.stats().submitted), (0, 2));
    drop(large);
    // An output may outlive its pool.
    let pool = machine.pool;
    assert_eq!(tt_egress_destroy(pool, HANG), 0);
    assert_eq!(bytes(&output), [2; LEN]);
    assert_eq!(tt_egress_release(output.output), 0);
    assert_eq!((one.released(), two.released()), (1, 1));
}

#[test]
fn a_stream_that_is_captured_is_refused_and_goes_on() {
    let machine = Machine::new(|_| ());
    let memory = machine.memory(1);
    machine.stream.synchronize().unwrap();
    machine.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    assert_eq!(machine.submit_on(&memory, machine.stream.cu_stream() as u64, LEN, 0), Code::Capturing as i32);
    let none = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    machine.stream.end_capture(none).unwrap();
    assert_eq!(memory.released(), 0);
    drop(memory);
    machine.finish(Vec::new());
}

#[test]
fn after_a_shutdown_what_is_there_is_given_and_nothing_is_taken() {
    let machine = Machine::new(|options| options.order = TT_ORDER_SUBMISSION);
    let memory: Vec<Memory> = (0..3).map(|value| machine.memory(value)).collect();
    for (memory, tag) in memory[..2].iter().zip(0..) {
        assert_eq!(machine.submit(memory, tag), 0);
    }
    let (code, report) = machine.shutdown(HANG);
    assert_eq!((code, report.failed, report.abandoned), (0, 0, 0));
    assert_eq!(machine.submit(&memory[2], 2), Code::Closed as i32);
    assert_eq!((memory[2].released(), machine.stats().closed), (0, 1));
    for tag in 0..2 {
        let output = machine.next(HANG).unwrap();
        assert_eq!((output.error, output.tag), (0, tag));
        assert_eq!(tt_egress_release(output.output), 0);
    }
    assert_eq!(machine.next(HANG).unwrap_err(), Code::End as i32);
    machine.finish(memory.into_iter().take(2).collect());
}

/// Items that a shutdown gives up are said to be; their memory comes back when the device is done with it.
#[test]
fn what_a_shutdown_gives_up_still_gives_its_memory_back() {
    let machine = Machine::new(|_| ());
    let memory = machine.memory(1);
    let gate = machine.sim.gate(machine.stream.cu_stream() as u64);
    assert_eq!(machine.submit(&memory, 5), 0);
    let (code, report) = machine.shutdown(20);
    assert_eq!((code, report.abandoned), (Code::Timeout as i32, 1));
    let output = machine.next(HANG).unwrap();
    assert_eq!((output.tag, output.output, output.error), (5, 0, Code::Closed as i32));
    assert!(!last_error().is_empty());
    assert_eq!((tt_egress_destroy(machine.pool, 20), memory.released()), (Code::Timeout as i32, 0));
    drop(gate);
    machine.finish(vec![memory]);
}

#[test]
fn after_a_fault_items_fail_and_loans_end_all_the_same() {
    let machine = Machine::new(|_| ());
    let memory: Vec<Memory> = (0..2).map(|value| machine.memory(value)).collect();
    let gate = machine.sim.gate(machine.stream.cu_stream() as u64);
    let fault = sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS as u32;
    machine.sim.fault_on_stream(machine.stream.cu_stream() as u64, fault);
    for (memory, tag) in memory.iter().zip(0..) {
        assert_eq!(machine.submit(memory, tag), 0);
    }
    drop(gate);
    for _ in 0..2 {
        let output = machine.next(HANG).unwrap();
        assert_eq!((output.error, output.output), (Code::Fault as i32, 0), "{}", last_error());
    }
    assert_eq!(machine.submit(&memory[0], 2), Code::Fault as i32, "{}", last_error());
    assert_eq!(machine.stats().faulted, 1);
    assert_eq!(tt_egress_destroy(machine.pool, HANG), 0, "{}", last_error());
    assert!(memory.iter().all(|memory| memory.released() == 1));
}

#[test]
fn calls_leave_the_current_context_as_it_was() {
    let current = || {
        let mut context = null_mut();
        // SAFETY: it is valid.
        unsafe { sys::cuCtxGetCurrent(&raw mut context) }.result().unwrap();
        context
    };
    let machine = Machine::new(|_| ());
    let memory = machine.memory(1);
    let ordinal = machine.sim.ordinal() as u32;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let options = TtOptions { device: ordinal, capacity: 1, ..TtOptions::default() };
            let mut pool = 0;
            // SAFETY: both are valid.
            assert_eq!(unsafe { tt_egress_create(&raw const options, &raw mut pool) }, 0);
            assert!(current().is_null());
            assert_eq!((tt_egress_destroy(pool, HANG), current().is_null()), (0, true));
            assert_eq!((machine.submit(&memory, 1), current().is_null()), (0, true));
            let output = machine.next(HANG).unwrap();
            assert_eq!((tt_egress_release(output.output), current().is_null()), (0, true));
        });
    });
    machine.finish(vec![memory]);
}

/// Each driver call of a submit fails once: it was taken, and its callback is called once, or it was not, and it is
/// never called.
#[test]
fn whichever_call_fails_a_loan_ends_once_or_was_none() {
    let machine = Machine::new(|_| ());
    let way = |memory: &Memory, tag| {
        let code = machine.submit(memory, tag);
        if code != 0 {
            assert!(!last_error().is_empty());
            return (code, 0);
        }
        let output = machine.next(HANG).unwrap();
        assert_eq!((output.tag, output.output == 0), (tag, output.error != 0));
        if output.error == 0 {
            assert!(bytes(&output).iter().all(|&byte| u64::from(byte) == tag));
            assert_eq!(tt_egress_release(output.output), 0);
        }
        until(|| memory.released() == 1);
        (output.error, 1)
    };
    let first = machine.memory(0);
    assert_eq!(way(&first, 0), (0, 1));
    let second = machine.memory(1);
    machine.sim.clear_calls();
    assert_eq!(way(&second, 1), (0, 1));
    let names: BTreeSet<String> = machine.sim.calls().into_iter().map(|call| call.name).collect();
    assert!(names.len() > 5, "{names:?}");
    let (mut all, mut failed) = (vec![(first, 1), (second, 1)], 0);
    for (name, tag) in names.iter().zip(2..) {
        let memory = machine.memory(tag as u8);
        machine.stream.synchronize().unwrap();
        machine.sim.fail_nth(name, 1, sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32);
        let (error, released) = way(&memory, tag);
        machine.sim.clear_failures();
        assert_eq!(memory.released(), released, "{name}: {error}");
        failed += u32::from(error != 0);
        all.push((memory, released));
    }
    assert!(failed > 3, "{failed} of {names:?}");
    assert_eq!(tt_egress_destroy(machine.pool, HANG), 0, "{}", last_error());
    all.iter().for_each(|(memory, released)| assert_eq!(memory.released(), *released));
}

/// Several wait at once: each item is given to one of them, and a time-out ends all the others.
#[test]
fn several_consumers_share_the_items() {
    let machine = Machine::new(|options| options.room_timeout_ms = HANG);
    let memory: Vec<Memory> = (0..40).map(|value| machine.memory(value)).collect();
    let given = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Ok(output) = machine.next(HANG) {
                    assert!(bytes(&output).iter().all(|&byte| u64::from(byte) == output.tag));
                    given.fetch_add(1, Ordering::SeqCst);
                    assert_eq!(tt_egress_release(output.output), 0);
                }
            });
        }
        for (memory, tag) in memory.iter().zip(0..) {
            assert_eq!(machine.submit(memory, tag), 0, "{}", last_error());
        }
        assert_eq!(machine.shutdown(HANG).0, 0);
    });
    assert_eq!(given.into_inner(), 40);
    machine.finish(memory);
}

/// Each call in a forked child says that it is one, also while a thread of the parent's waits in one.
#[test]
fn a_forked_child_is_told() {
    let machine = Machine::new(|_| ());
    let memory = machine.memory(1);
    machine.context.synchronize().unwrap();
    let gate = machine.sim.gate(machine.stream.cu_stream() as u64);
    assert_eq!(machine.submit(&memory, 1), 0);
    let pool = machine.pool;
    let told = || {
        let (mut stats, mut done) = (TtStats::default(), TtShutdown::default());
        let codes = [
            tt_egress_drain(pool, TT_FOREVER),
            tt_egress_destroy(pool, TT_FOREVER),
            machine.next(TT_FOREVER).err().unwrap_or(0),
            machine.submit(&memory, 2),
            tt_egress_release(1),
            // SAFETY: both are valid.
            unsafe { tt_egress_stats(pool, &mut stats) },
            // SAFETY: as above.
            unsafe { tt_egress_shutdown(pool, TT_FOREVER, &mut done) },
        ];
        codes == [Code::Forked as i32; 7]
    };
    assert_eq!(in_a_forked_child(&mut || told()), 0);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| machine.next(TT_FOREVER).map(|output| output.output));
        // Whether it is there by then or not, the answer is the same.
        assert_eq!(in_a_forked_child(&mut || told()), 0);
        drop(gate);
        assert_eq!(tt_egress_release(waits.join().unwrap().unwrap()), 0);
    });
    machine.finish(vec![memory]);
}

#[test]
fn no_size_is_too_large_to_be_told_so() {
    let machine = Machine::new(|options| options.budget = 0);
    let memory = machine.memory(1);
    let (too_large, no_memory) = (Code::TooLarge as i32, Code::OutOfMemory as i32);
    for (bytes, right) in [
        (usize::MAX, too_large),
        (usize::MAX - 7, too_large),
        (1 << 63, too_large),
        (isize::MAX as usize, no_memory),
        (1 << 48, no_memory),
    ] {
        let code = machine.submit_on(&memory, machine.stream.cu_stream() as u64, bytes, 1);
        assert_eq!(code, right, "{bytes:#x}: {}", last_error());
    }
    assert_eq!(machine.submit(&memory, 1), 0);
    machine.finish(vec![memory]);
}
