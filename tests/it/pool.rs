//! The pool of page-locked memory: sizes, the budget, waiting, refusals, and that the driver is left alone
//! (field reports R08, R16, R17, R23, R25, R27, R28, R30, R31, R32, R35).

use std::time::Instant;

use cuda_sim::DeviceBuilder;
use transfer_tensor::cudarc::driver::CudaSlice;
use transfer_tensor::{Backing, Detector, Device, DeviceBuilder as Handle, PinnedBuffer, PoolOptions, Strategy};

use crate::machines::{drain, pattern};
use crate::support::{Gpu, H200, HANG, from_env};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;
/// On it nothing can be registered: every block is from `cuMemHostAlloc`, whatever its size.
pub(crate) const CONFIDENTIAL: &str = "h100_h200_confidential";
/// How all page-locked memory comes and goes.
pub(crate) const CALLS: [&str; 4] = ["cuMemHostAlloc", "cuMemHostRegister", "cuMemFreeHost", "cuMemHostUnregister"];

pub(crate) fn handle<'a>(gpu: &'a Gpu, pool: PoolOptions) -> Handle<'a> {
    let detector = gpu.sim.as_ref().map_or_else(Detector::new, |sim| Detector::new().fs_root(sim.host_root()));
    Device::builder(&gpu.stream).detector(detector).pool(pool)
}

/// Another handle of the device, with a pool of its own.
pub(crate) fn with_pool(gpu: &Gpu, pool: PoolOptions) -> Device {
    handle(gpu, pool).build().unwrap()
}

/// Ends a test in which everything came back: the pool can be emptied, and no error is left for anybody.
#[track_caller]
pub(crate) fn end(gpu: Gpu, device: Device) {
    drain(&device);
    device.pool().trim(0);
    assert_eq!(device.pool().stats().idle, 0);
    assert_eq!((device.stats().leaked, device.stats().free_errors), (0, 0));
    gpu.context.check_err().unwrap();
    if gpu.sim.is_none() {
        // What staging keeps would be freed under the next test's gate, for which a real driver waits.
        std::mem::forget(device.clone());
    }
    drop(device);
    gpu.finish();
}

/// Page-locked bytes by the driver's own account.
pub(crate) fn page_locked(gpu: &Gpu) -> Option<u64> {
    gpu.sim.as_ref().map(|sim| sim.evidence().pinned_bytes + sim.evidence().registered_bytes)
}

/// How often memory was page-locked or freed.
pub(crate) fn calls(gpu: &Gpu) -> [usize; 4] {
    CALLS.map(|call| gpu.sim.as_ref().map_or(0, |sim| sim.count(call)))
}

/// Waits for what another thread does.
#[track_caller]
pub(crate) fn until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < HANG, "never happens");
        std::thread::yield_now();
    }
}

fn next(seed: &mut u64) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as usize
}

/// Mostly small ones, as programs have.
fn random_size(seed: &mut u64, most: usize) -> usize {
    let power = next(seed) % (most.ilog2() - 9) as usize;
    (KIB + next(seed) % (KIB << power)).min(most)
}

/// Marks a buffer's ends (and what lies between, at every page) as its own.
pub(crate) fn mark(buffer: &mut PinnedBuffer, tag: u8) {
    buffer.iter_mut().step_by(4096).for_each(|byte| *byte = tag);
    *buffer.last_mut().unwrap() = tag;
}

#[track_caller]
pub(crate) fn check_mark(buffer: &PinnedBuffer, tag: u8) {
    assert!(buffer.iter().step_by(4096).all(|&byte| byte == tag));
    assert_eq!(*buffer.last().unwrap(), tag);
}

/// R08: what was freed is only handed out again for what fits into it.
#[test]
fn a_block_is_never_smaller_than_the_request() {
    // There memory that nobody touches is never made.
    let simulated = Gpu::built(from_env(DeviceBuilder::new(CONFIDENTIAL).poison(false)));
    let gpu = simulated.unwrap_or_else(|| Gpu::any(H200));
    let device = with_pool(&gpu, PoolOptions::new().budget(4 << 30));
    let small = device.pool().acquire(150 * MIB + 1).unwrap();
    assert!(small.capacity() > 150 * MIB);
    let address = small.as_ptr();
    drop(small);
    let large = device.pool().acquire(200 * MIB).unwrap();
    assert_eq!(large.len(), 200 * MIB);
    assert!(large.capacity() >= 200 * MIB);
    assert_ne!(large.as_ptr(), address);
    assert_eq!(device.pool().stats().made, 2);
    // The first one serves who has room in it.
    let again = device.pool().acquire(151 * MIB).unwrap();
    assert_eq!((again.as_ptr(), device.pool().stats().made), (address, 2));
    drop((large, again));
    end(gpu, device);
}

/// R16: no rounding up to powers of two.
#[test]
fn large_blocks_are_as_large_as_asked() {
    // A refusal is as good for the question, and 5 GiB are never made.
    if let Some(gpu) = Gpu::simulated(CONFIDENTIAL) {
        let sim = gpu.sim.as_ref().unwrap();
        let device = with_pool(&gpu, PoolOptions::new().budget(64 << 30));
        for (request, most) in [(5 * GIB + 1, 5 * GIB + 1 + 2 * MIB), (80 * MIB + 1, (80 * MIB + 1) * 11 / 10)] {
            sim.clear_calls();
            sim.fail_always("cuMemHostAlloc", 2);
            let error = device.pool().acquire(request).unwrap_err();
            assert!(error.is_out_of_memory() && error.to_string().contains(&request.to_string()), "{error}");
            let asked: Vec<u64> = sim.calls().iter().filter(|call| call.name == CALLS[0]).map(|c| c.bytes).collect();
            assert_eq!(asked.len(), 1, "{asked:?}");
            assert!((request as u64..=most as u64).contains(&asked[0]), "{request}: {asked:?}");
        }
        sim.clear_failures();
        assert_eq!(device.pool().stats().reserved, 0);
        end(gpu, device);
    }
    let gpu = Gpu::any(H200);
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30));
    let request = 80 * MIB + 1;
    let buffer = device.pool().acquire(request).unwrap();
    let reserved = device.pool().stats().reserved;
    assert!((request as u64..=request as u64 * 11 / 10).contains(&reserved), "{reserved}");
    assert_eq!(reserved, buffer.capacity() as u64);
    drop(buffer);
    end(gpu, device);
}

/// R16: the statistics are what the driver was asked for, of either kind of block.
#[test]
fn what_is_reserved_is_what_the_driver_gave() {
    let gpu = Gpu::any(H200);
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30));
    let before = page_locked(&gpu);
    let mut seed = 5;
    let mut lent = Vec::new();
    for round in 0..60 {
        if round % 3 == 2 {
            lent.swap_remove(next(&mut seed) % lent.len());
        } else {
            let bytes = if round % 10 == 0 { 9 * MIB + round } else { random_size(&mut seed, 3 * MIB) };
            lent.push(device.pool().acquire(bytes).unwrap());
        }
        let stats = device.pool().stats();
        let capacities: u64 = lent.iter().map(|buffer| buffer.capacity() as u64).sum();
        assert_eq!(stats.reserved, capacities + stats.idle);
        assert!(stats.peak >= stats.reserved);
        if let Some(now) = page_locked(&gpu) {
            assert_eq!(now - before.unwrap(), stats.reserved);
        }
    }
    drop(lent);
    let stats = device.pool().stats();
    assert_eq!(stats.idle, stats.reserved);
    assert_eq!(device.pool().trim(stats.reserved), 0);
    assert_eq!(device.pool().trim(0), stats.reserved);
    assert_eq!(device.pool().stats().freed, stats.made);
    assert_eq!(page_locked(&gpu), before);
    end(gpu, device);
}

/// R17: longer than one registration may be. The bytes are named, and nobody else meets the error.
#[cfg(target_os = "linux")]
#[test]
fn a_registration_that_is_too_long_is_a_typed_error() {
    struct Mapped(*mut libc::c_void);
    // SAFETY: an address of memory that nobody writes to.
    unsafe impl Send for Mapped {}
    // SAFETY: as above.
    unsafe impl Sync for Mapped {}
    const LONG: usize = 1 << 39;
    impl AsRef<[u8]> for Mapped {
        fn as_ref(&self) -> &[u8] {
            // SAFETY: mapped as long as this is there, and readable.
            unsafe { std::slice::from_raw_parts(self.0.cast(), LONG) }
        }
    }
    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: mapped below, unmapped once.
            unsafe { libc::munmap(self.0, LONG) };
        }
    }
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh mapping, of which no page is touched.
    let place = unsafe { libc::mmap(std::ptr::null_mut(), LONG, libc::PROT_READ, flags, -1, 0) };
    assert_ne!(place, libc::MAP_FAILED);
    let bytes = std::sync::Arc::new(Mapped(place));
    let options = gpu.device.tensor().strategy(Strategy::ZeroCopy).backing(Backing::Registered);
    let error = options.from_shared_bytes::<u8, _>(bytes.clone(), 0..LONG, [LONG]).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(error.to_string().contains(&LONG.to_string()), "{error}");
    let asked = |result: u32| {
        let one = |call: &&cuda_sim::Call| call.name.starts_with(CALLS[1]) && call.result == result;
        sim.calls().iter().filter(one).map(|call| call.bytes).max()
    };
    assert_eq!(asked(2), Some(LONG as u64));
    gpu.context.check_err().unwrap();
    drop(bytes);
    // The next call is a call like any other.
    let values = pattern(MIB, 1);
    let options = gpu.device.tensor().strategy(Strategy::Streamed).pin(true);
    let tensor = options.from_vec(values.clone(), [MIB]).unwrap();
    assert!(tensor.is_pinned());
    drop(tensor.device(&gpu.stream).unwrap());
    assert!(*tensor.host().unwrap() == *values);
    drop(tensor);
    gpu.context.check_err().unwrap();
    gpu.finish();
}

/// A machine on which only so much can be page-locked (WSL, containers); nothing can be registered where `alloc` is set.
fn limited(mib: u32, alloc: bool) -> Option<Gpu> {
    let toml = format!(
        "[platform.limited]\nname = \"Limited\"\n[platform.limited.attributes]\n\
         integrated = 0\ncan_map_host_memory = 1\nasync_engine_count = 2\ncc_major = 8\ncc_minor = 9\n\
         host_register_supported = {}\nmemory_pools_supported = 1\nunified_addressing = 1\n\
         [platform.limited.behaviour]\npinned_limit_mib = {mib}\n",
        u8::from(!alloc)
    );
    Gpu::built(from_env(DeviceBuilder::from_toml(&toml, "limited")))
}

/// Both directions, by a tensor and by one-shots.
#[track_caller]
pub(crate) fn transfers_are_right(gpu: &Gpu, device: &Device) {
    let bytes = pattern(16 * MIB + 3, 7);
    let slice: CudaSlice<u8> = device.upload_new(&gpu.stream, &bytes).unwrap();
    assert!(device.download_vec(&gpu.stream, &slice).unwrap() == bytes);
    drop(slice);
    let mut tensor = device.tensor().strategy(Strategy::Streamed).from_slice(&bytes, [bytes.len()]).unwrap();
    drop(tensor.device_mut(&gpu.stream).unwrap());
    assert!(*tensor.host().unwrap() == *bytes);
    drop(tensor);
    drain(device);
    gpu.context.check_err().unwrap();
}

/// R23: less can be page-locked than there is memory.
#[test]
fn beyond_the_systems_limit_the_pool_is_smaller() {
    for alloc in [false, true] {
        let Some(gpu) = limited(24, alloc) else { return };
        let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30));
        let got = device.pool().reserve(4 * MIB, 16).unwrap();
        assert_eq!(got, 24 << 20);
        let stats = device.pool().stats();
        assert_eq!((stats.reserved, stats.idle, stats.pinned_limit), (24 << 20, 24 << 20, Some(24 << 20)));
        transfers_are_right(&gpu, &device);
        assert!(device.pool().stats().reserved <= 24 << 20);
        end(gpu, device);
    }
}

/// R23: the same when the reservation is made behind the program's back.
#[test]
fn a_refused_reservation_in_the_background_leaves_no_error() {
    let Some(gpu) = limited(24, false) else { return };
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30).reserve(4 * MIB, 16));
    transfers_are_right(&gpu, &device);
    until(|| device.pool().stats().pinned_limit.is_some());
    let limit = device.pool().stats().pinned_limit.unwrap();
    assert!(limit <= 24 << 20, "{limit}");
    transfers_are_right(&gpu, &device);
    end(gpu, device);
}

/// R23: who wants all or nothing is told.
#[test]
fn a_strict_pool_says_that_there_is_no_room() {
    let Some(gpu) = limited(24, false) else { return };
    let before = page_locked(&gpu);
    let strict = || PoolOptions::new().budget(1 << 30).strict(true);
    let error = handle(&gpu, strict().reserve(4 * MIB, 16)).build().unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(error.to_string().contains(&(4 * MIB).to_string()), "{error}");
    gpu.context.check_err().unwrap();
    // What it had until then goes.
    until(|| page_locked(&gpu) == before);
    // What fits is there when the device is.
    let device = with_pool(&gpu, strict().reserve(4 * MIB, 5));
    assert_eq!(device.pool().stats().idle, 20 << 20);
    let error = device.pool().reserve(4 * MIB, 7).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(device.pool().stats().reserved <= 24 << 20);
    // A tensor is pinned or is not made; the next one is.
    let options = || device.tensor().strategy(Strategy::Streamed);
    let error = options().from_slice(&vec![1u8; 32 * MIB], [32 * MIB]).unwrap_err();
    assert!(error.is_out_of_memory() && error.to_string().contains(&(32 * MIB).to_string()), "{error}");
    gpu.context.check_err().unwrap();
    let small = options().from_slice(&[1u8; 1000], [1000]).unwrap();
    assert!(small.is_pinned());
    drop(small);
    // A host side that is only wanted later.
    let mut later = options().zeros::<u8>([32 * MIB]).unwrap();
    let error = later.host_mut().unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    drop(later);
    transfers_of_a_strict_device(&gpu, &device);
    end(gpu, device);
}

/// One-shots need no memory that lies ready.
pub(crate) fn transfers_of_a_strict_device(gpu: &Gpu, device: &Device) {
    let bytes = pattern(9 * MIB, 3);
    let slice: CudaSlice<u8> = device.upload_new(&gpu.stream, &bytes).unwrap();
    assert!(device.download_vec(&gpu.stream, &slice).unwrap() == bytes);
}

/// R25: many sizes do not add up.
#[test]
fn random_sizes_stay_within_the_budget() {
    const BUDGET: u64 = 40 << 20;
    let gpu = Gpu::any(H200);
    let device = with_pool(&gpu, PoolOptions::new().budget(BUDGET));
    let before = page_locked(&gpu);
    let (mut lent, mut seed, mut refused) = (Vec::<(PinnedBuffer, u8)>::new(), 1, 0u64);
    for round in 0..2000 {
        let bytes = random_size(&mut seed, 4 * MIB);
        let mut buffer = loop {
            match device.pool().acquire(bytes) {
                Ok(buffer) => break buffer,
                Err(error) => {
                    assert!(error.is_out_of_memory(), "{error}");
                    refused += 1;
                    let (buffer, tag) = lent.swap_remove(next(&mut seed) % lent.len());
                    check_mark(&buffer, tag);
                }
            }
        };
        assert_eq!(buffer.len(), bytes);
        assert!(buffer.capacity() >= bytes);
        let tag = round as u8;
        mark(&mut buffer, tag);
        lent.push((buffer, tag));
        if lent.len() > 16 {
            let (buffer, tag) = lent.swap_remove(next(&mut seed) % lent.len());
            check_mark(&buffer, tag);
        }
        let stats = device.pool().stats();
        assert!(stats.reserved <= BUDGET && stats.peak <= BUDGET, "{stats:?}");
    }
    let stats = device.pool().stats();
    assert_eq!((stats.acquired, stats.refused, stats.pinned_limit), (2000, refused, None));
    if let Some(sim) = &gpu.sim {
        assert!(sim.evidence().pinned_bytes_peak + sim.evidence().registered_bytes_peak >= stats.peak);
        assert_eq!(page_locked(&gpu).unwrap() - before.unwrap(), stats.reserved);
    }
    lent.clear();
    assert_eq!(device.pool().trim(0), device.pool().stats().peak.min(stats.reserved));
    let stats = device.pool().stats();
    assert_eq!((stats.reserved, stats.idle), (0, 0));
    assert_eq!(stats.made, stats.freed);
    assert_eq!(page_locked(&gpu), before);
    end(gpu, device);
}

/// R25: what failed is not counted.
#[test]
fn a_failed_allocation_changes_nothing() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30));
    let lent = device.pool().acquire(MIB).unwrap();
    drop(device.pool().acquire(64 * KIB).unwrap());
    let before = (device.pool().stats(), page_locked(&gpu));
    // Mapped or allocated; for want of memory or not.
    for bytes in [100 * KIB, 20 * MIB] {
        CALLS[..2].iter().for_each(|call| sim.fail_always(call, 999));
        let error = device.pool().acquire(bytes).unwrap_err();
        assert_eq!(error.driver_code(), Some(999), "{error}");
        let after = device.pool().stats();
        assert_eq!((after.reserved, after.idle, after.made), (before.0.reserved, before.0.idle, before.0.made));
        assert_eq!((after.pinned_limit, page_locked(&gpu)), (None, before.1));
        sim.clear_failures();
    }
    // Where the driver has no more, idle blocks go first.
    CALLS[..2].iter().for_each(|call| sim.fail_always(call, 2));
    for bytes in [100 * KIB, 20 * MIB] {
        let error = device.pool().acquire(bytes).unwrap_err();
        assert!(error.is_out_of_memory() && error.to_string().contains(&bytes.to_string()), "{error}");
        let after = device.pool().stats();
        assert_eq!((after.reserved, after.idle), (lent.capacity() as u64, 0));
        assert_eq!(page_locked(&gpu), before.1.map(|bytes| bytes - 64 * KIB as u64));
    }
    sim.clear_failures();
    let after = device.pool().stats();
    assert_eq!(after.refused, 4);
    assert!(after.pinned_limit.is_some_and(|limit| limit <= before.0.reserved), "{after:?}");
    gpu.context.check_err().unwrap();
    drop(device.pool().acquire(20 * MIB).unwrap());
    drop(lent);
    end(gpu, device);
}

/// R27: what was reserved is there, and using it asks the driver for nothing.
#[test]
fn a_reservation_is_made_once() {
    let gpu = Gpu::any(H200);
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30).reserve(6 * MIB, 4).reserve(100 * KIB, 2));
    // At once, whether or not the others are made.
    drop(device.pool().acquire(MIB).unwrap());
    let lying = 4 * (6 << 20) + 2 * (128 << 10) + (1 << 20);
    until(|| device.pool().stats().idle == lying);
    let (made, before) = (device.pool().stats().made, calls(&gpu));
    assert_eq!(made, 7);
    for _ in 0..3 {
        let large: Vec<_> = (0..4).map(|_| device.pool().acquire(6 * MIB).unwrap()).collect();
        let small: Vec<_> = (0..2).map(|_| device.pool().acquire(100 * KIB).unwrap()).collect();
        drop((large, small));
    }
    assert_eq!((device.pool().stats().made, calls(&gpu)), (made, before));
    end(gpu, device);
}

/// R28: a program that goes round does not page-lock anything.
#[test]
fn in_steady_state_the_driver_is_left_alone() {
    let gpu = Gpu::any(H200);
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30));
    let sizes = [1000, 64 * KIB, MIB + 1, 5 * MIB];
    let cycle = |count: usize| {
        for round in 0..count {
            let mut one = device.pool().acquire(sizes[round % 4]).unwrap();
            one[0] = round as u8;
        }
    };
    let values = pattern(MIB + 1, 9);
    let mut target = vec![0u8; values.len()];
    // Pinned tensors of one shape, pageable ones, and one-shots.
    let mut round_trips = |count: usize| {
        for _ in 0..count {
            let mut tensor = device.tensor().strategy(Strategy::Streamed).from_slice(&values, [values.len()]).unwrap();
            assert!(tensor.is_pinned());
            drop(tensor.device_mut(&gpu.stream).unwrap());
            assert!(*tensor.host().unwrap() == *values);
            drop(tensor);
            let slice: CudaSlice<u8> = device.upload_new(&gpu.stream, &values).unwrap();
            // A copy that finds slots still travelling makes others, as often as that is new.
            gpu.stream.synchronize().unwrap();
            device.download(&gpu.stream, &slice, &mut target).unwrap();
            drop(slice);
            drain(&device);
        }
        assert!(target == values);
    };
    cycle(8);
    round_trips(4);
    let before = (device.pool().stats(), calls(&gpu));
    cycle(10_000);
    round_trips(200);
    let after = device.pool().stats();
    assert_eq!((after.made, after.freed), (before.0.made, before.0.freed));
    assert_eq!(calls(&gpu), before.1, "{CALLS:?}");
    assert!(after.acquired >= before.0.acquired + 10_200);
    end(gpu, device);
}
