//! Waiting for a pool's room, and where buffers end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use transfer_tensor::{PoolOptions, Strategy, WhenFull};

use crate::machines::drain;
use crate::pool::{
    calls, check_mark, end, mark, page_locked, transfers_are_right, transfers_of_a_strict_device, until, with_pool,
};
use crate::support::{Gpu, H200, HANG, within};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// One block for four threads: each gets it in the end, and no two have it at once.
#[test]
fn who_waits_gets_what_others_give_back() {
    let gpu = Gpu::any(H200);
    let options = PoolOptions::new().budget(MIB as u64).when_full(WhenFull::Block);
    let device = with_pool(&gpu, options);
    let pool = device.pool().clone();
    within(HANG, move || {
        let taken = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let (pool, taken) = (&pool, &taken);
                scope.spawn(move || {
                    for round in 0..500 {
                        let mut buffer = match round % 2 {
                            0 => pool.acquire(MIB).unwrap(),
                            _ => pool.acquire_or(MIB - 5, WhenFull::Wait(Duration::from_secs(50))).unwrap(),
                        };
                        assert!(!taken.swap(true, Ordering::SeqCst), "two have it");
                        buffer.fill(thread);
                        std::thread::yield_now();
                        assert!(buffer.iter().all(|&byte| byte == thread));
                        taken.store(false, Ordering::SeqCst);
                    }
                });
            }
        });
    });
    let stats = device.pool().stats();
    assert_eq!((stats.acquired, stats.made, stats.refused, stats.reserved), (2000, 1, 0, MIB as u64));
    end(gpu, device);
}

/// As many blocks as threads, and each has one at most: there always is one, wherever others have put it.
#[test]
fn threads_that_lease_what_lies_ready_leave_the_driver_alone() {
    const THREADS: usize = 8;
    const ROUNDS: usize = 500;
    let gpu = Gpu::any(H200);
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30));
    let before = page_locked(&gpu);
    device.pool().reserve(MIB, THREADS).unwrap();
    let made = calls(&gpu);
    let pool = device.pool().clone();
    within(HANG, move || {
        std::thread::scope(|scope| {
            for thread in 0..THREADS as u8 {
                let pool = &pool;
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        let mut buffer = pool.acquire(MIB).unwrap();
                        mark(&mut buffer, thread);
                        check_mark(&buffer, thread);
                    }
                });
            }
        });
    });
    assert_eq!(calls(&gpu), made);
    let (stats, bytes) = (device.pool().stats(), (THREADS * MIB) as u64);
    assert_eq!((stats.made, stats.acquired), (THREADS as u64, (THREADS + THREADS * ROUNDS) as u64));
    assert_eq!((stats.reserved, stats.idle, stats.peak), (bytes, bytes, bytes));
    assert_eq!(device.pool().trim(0), bytes);
    assert_eq!(page_locked(&gpu), before);
    end(gpu, device);
}

/// A wait for a block of another size: idle ones go for it.
#[test]
fn who_waits_gets_room_that_others_give_back() {
    let gpu = Gpu::any(H200);
    let device = with_pool(&gpu, PoolOptions::new().budget(4 << 20));
    let small: Vec<_> = (0..4).map(|_| device.pool().acquire(MIB).unwrap()).collect();
    let pool = device.pool().clone();
    let large = std::thread::spawn(move || pool.acquire_or(4 * MIB, WhenFull::Block).unwrap().capacity());
    for buffer in small {
        std::thread::yield_now();
        drop(buffer);
    }
    assert_eq!(within(HANG, move || large.join().unwrap()), 4 * MIB);
    let stats = device.pool().stats();
    assert_eq!((stats.reserved, stats.freed), (4 << 20, 4));
    end(gpu, device);
}

#[test]
fn refusals_and_time_outs_name_what_there_is() {
    let gpu = Gpu::any(H200);
    let device = with_pool(&gpu, PoolOptions::new().budget(3 << 20).when_full(WhenFull::Block));
    let lent = device.pool().acquire(2 * MIB).unwrap();
    let said = |error: transfer_tensor::Error| {
        assert!(error.is_out_of_memory(), "{error}");
        let text = error.to_string();
        for number in [2 * MIB - 7, 3 * MIB, 2 * MIB] {
            assert!(text.contains(&number.to_string()), "{number}: {text}");
        }
    };
    said(device.pool().try_acquire(2 * MIB - 7).unwrap_err());
    let start = Instant::now();
    said(device.pool().acquire_or(2 * MIB - 7, WhenFull::Wait(Duration::from_millis(30))).unwrap_err());
    assert!(start.elapsed() >= Duration::from_millis(30));
    assert_eq!(device.pool().stats().refused, 2);
    // There is room for what is smaller.
    drop(device.pool().acquire(MIB).unwrap());
    drop(lent);
    end(gpu, device);
}

#[test]
fn a_budget_that_no_block_fits_into_ends_no_transfer() {
    let gpu = Gpu::any(H200);
    // A request within the budget whose block is not, and none at all.
    for budget in [700 * KIB as u64, 0] {
        let device = with_pool(&gpu, PoolOptions::new().budget(budget).when_full(WhenFull::Block));
        let pool = device.pool().clone();
        // It would wait for ever.
        let error = within(HANG, move || pool.acquire(600 * KIB).unwrap_err());
        assert!(error.is_out_of_memory() && error.to_string().contains(&budget.to_string()), "{error}");
        assert_eq!(device.pool().reserve(MIB, 3).unwrap(), 0);
        transfers_are_right(&gpu, &device);
        let tensor = device.tensor().strategy(Strategy::Streamed).from_slice(&vec![1u8; MIB], [MIB]).unwrap();
        assert!(!tensor.is_pinned());
        drop(tensor);
        drain(&device);
        assert!(device.pool().stats().peak <= budget);
    }
    let device = with_pool(&gpu, PoolOptions::new().budget(0).strict(true));
    let error = device.tensor().strategy(Strategy::Streamed).from_slice(&[1u8, 2], [2]).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    transfers_of_a_strict_device(&gpu, &device);
    end(gpu, device);
}

#[test]
fn sizes_at_the_ends() {
    let gpu = Gpu::any(H200);
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 20));
    let before = calls(&gpu);
    let mut nothing = device.pool().acquire(0).unwrap();
    assert_eq!((nothing.len(), nothing.capacity(), nothing.device_address()), (0, 0, None));
    nothing.fill(1);
    assert!(nothing.is_empty());
    drop(nothing);
    assert_eq!(device.pool().reserve(0, 10).unwrap(), 0);
    let most = isize::MAX as usize;
    for bytes in [usize::MAX, most + 1, most, most - (2 << 20), 1 << 47] {
        for when_full in [WhenFull::Refuse, WhenFull::Block] {
            let pool = device.pool().clone();
            let error = within(HANG, move || pool.acquire_or(bytes, when_full).unwrap_err());
            assert!(error.is_invalid_input() || error.is_out_of_memory(), "{error}");
            assert!(error.to_string().contains(&bytes.to_string()), "{error}");
        }
    }
    assert_eq!(calls(&gpu), before);
    // Without a limit of ours there are the system's.
    let free = with_pool(&gpu, PoolOptions::new().budget(u64::MAX));
    for bytes in [usize::MAX, most, 1 << 47] {
        let error = free.pool().acquire(bytes).unwrap_err();
        assert!(error.to_string().contains(&bytes.to_string()), "{error}");
    }
    assert_eq!(free.pool().stats().reserved, 0);
    assert_eq!(device.pool().stats().reserved, 0);
    let one = device.pool().acquire(1).unwrap();
    assert_eq!((one.len(), one.capacity()), (1, 4096));
    drop((one, free));
    end(gpu, device);
}

/// Wherever and however a buffer ends, its block comes back.
#[test]
fn buffers_end_anywhere() {
    let gpu = Gpu::any(H200);
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30));
    let buffer = device.pool().acquire(5 * MIB).unwrap();
    let address = buffer.as_ptr() as usize;
    std::thread::spawn(move || drop(buffer)).join().unwrap();
    let same = || {
        let buffer = device.pool().acquire(5 * MIB).unwrap();
        assert_eq!(buffer.as_ptr() as usize, address);
        buffer
    };
    let buffer = same();
    let panicked = catch_unwind(AssertUnwindSafe(move || {
        let mut buffer = buffer;
        buffer[5 * MIB] = 1;
    }));
    assert!(panicked.is_err());
    drop(same());
    assert_eq!(device.pool().stats().made, 1);
    end(gpu, device);
}

/// A buffer keeps what it needs of its device.
#[test]
fn buffers_may_outlive_their_device() {
    let gpu = Gpu::any(H200);
    let before = page_locked(&gpu);
    let device = with_pool(&gpu, PoolOptions::new().budget(1 << 30));
    let mut buffers: Vec<_> = [1000, 5 * MIB].map(|bytes| device.pool().acquire(bytes).unwrap()).into();
    let pool = device.pool().clone();
    drop(device);
    for buffer in &mut buffers {
        buffer.fill(3);
        assert!(buffer.iter().all(|&byte| byte == 3));
    }
    // The pool is a handle of its own.
    drop(pool.acquire(2000).unwrap());
    // So is what each thread has of it; blocks lie ready in all of them.
    for thread in 0..3 {
        let pool = pool.clone();
        let both = move || (pool.acquire(7 * MIB).unwrap(), pool.acquire(3000 << thread).unwrap());
        buffers.push(std::thread::spawn(both).join().unwrap().0);
    }
    drop(pool);
    buffers.iter_mut().for_each(|buffer| buffer.fill(4));
    drop(buffers);
    until(|| page_locked(&gpu) == before);
    gpu.finish();
}

/// What is forgotten stays lent: nobody else ever gets it.
#[test]
fn a_forgotten_buffer_is_never_handed_out_again() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let device = with_pool(&gpu, PoolOptions::new().budget(2 << 20));
    let mut buffer = device.pool().acquire(MIB).unwrap();
    buffer.fill(5);
    let kept = buffer.as_ptr();
    std::mem::forget(buffer);
    let other = device.pool().acquire(MIB).unwrap();
    assert_ne!(other.as_ptr(), kept);
    assert!(device.pool().try_acquire(MIB).unwrap_err().is_out_of_memory());
    drop(other);
    assert_eq!(device.pool().trim(0), 1 << 20);
    assert_eq!(device.pool().stats().reserved, 1 << 20);
    // SAFETY: never freed.
    assert!(unsafe { std::slice::from_raw_parts(kept, MIB) }.iter().all(|&byte| byte == 5));
    drop(device);
    gpu.finish_forgotten();
}
