//! Batches on their way in: each once, in order, no further ahead than asked, errors at their position, from the beginning again,
//! dropped early (field reports R12, R28, R85).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use transfer_tensor::{IngressError, IngressPrefetcher, Strategy};

use crate::pool::until;
use crate::support::{CountingWaker, Gpu, H200, HANG, SPARK, block_on, within};

const ROW: usize = 1000;

/// `batches` batches of four rows, each byte of which says which batch it is.
fn numbered(gpu: &Gpu, batches: u64, depth: usize, threads: usize) -> IngressPrefetcher<u8, String> {
    let fill = move |number: u64, rows: &mut [u8]| {
        rows.fill(number as u8);
        Ok(if number < batches { 4 } else { 0 })
    };
    IngressPrefetcher::builder(&gpu.device, [4, ROW]).depth(depth).threads(threads).fill(fill).unwrap()
}

/// R85: whatever the depth, the threads and the number of batches.
#[test]
fn every_batch_comes_once_in_order() {
    let gpu = Gpu::any(H200);
    for (depth, threads) in [(1, 1), (3, 1), (3, 3), (2, 5)] {
        for batches in [0, 1, 2, 3, 4, 30] {
            let mut seen = 0;
            for batch in numbered(&gpu, batches, depth, threads) {
                let batch = batch.unwrap();
                assert_eq!((batch.number(), batch.rows()), (seen, 4));
                let on_device = gpu.stream.clone_dtoh(&batch.device(&gpu.stream).unwrap()).unwrap();
                assert!(on_device == [seen as u8; 4 * ROW], "batch {seen}, depth {depth}, {threads} threads");
                seen += 1;
            }
            assert_eq!(seen, batches);
        }
    }
    gpu.finish();
}

/// The source is asked for no more than the depth beyond what was taken.
#[test]
fn no_more_is_loaded_than_was_asked_for() {
    let gpu = Gpu::any(H200);
    let (asked, taken) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (most, seen) = (asked.clone(), taken.clone());
    let fill = move |number: u64, rows: &mut [u8]| {
        most.fetch_max(number + 1, Ordering::SeqCst);
        assert!(number < seen.load(Ordering::SeqCst) + 3, "asked for {number}");
        rows.fill(1);
        Ok::<_, ()>(1)
    };
    let mut batches = IngressPrefetcher::builder(&gpu.device, [1, 10]).depth(3).threads(2).fill(fill).unwrap();
    until(|| asked.load(Ordering::SeqCst) >= 3);
    // Time enough for one more.
    (0..10_000).for_each(|_| std::thread::yield_now());
    assert_eq!(asked.load(Ordering::SeqCst), 3);
    for number in 0..50 {
        // Before, since loading goes on at once.
        taken.store(number + 1, Ordering::SeqCst);
        assert!(batches.next().unwrap().is_ok());
    }
    until(|| asked.load(Ordering::SeqCst) == 53);
    drop(batches);
    gpu.finish();
}

/// What is loaded is on its way before anybody asks for it.
#[test]
fn copies_begin_before_their_batches_are_taken() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let batches = numbered(&gpu, 10, 3, 1);
    until(|| sim.count("cuMemcpyHtoDAsync") == 3);
    drop(batches);
    gpu.finish();
}

/// R12: memory is filled again only when its copy has run and the work on it is over.
#[test]
fn a_batch_is_not_written_while_it_is_used() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let batches = numbered(&gpu, 40, 1, 1);
    let mut sums = gpu.both_sides(&[0u8; 40 * 4 * ROW]);
    let mut gate = None;
    for (at, batch) in batches.enumerate() {
        let batch = batch.unwrap();
        if at == 3 {
            // Kept from running for a while: the copies that follow must come after.
            gate = Some(gpu.gate(&gpu.stream).open_later());
        }
        let mut place = sums.view_mut(at * 4 * ROW..(at + 1) * 4 * ROW).unwrap();
        kernels.copy(&gpu.stream, &mut place.device_mut(&gpu.stream).unwrap(), &batch.device(&gpu.stream).unwrap());
    }
    drop(gate);
    let sums_seen = sums.host().unwrap();
    for (at, batch) in sums_seen.chunks(4 * ROW).enumerate() {
        assert!(batch.iter().all(|&byte| byte == at as u8), "batch {at}");
    }
    drop(sums_seen);
    drop((sums, kernels));
    gpu.finish();
}

/// Errors and panics come at their position, and those behind come all the same.
#[test]
fn what_fails_is_told_at_its_position() {
    let gpu = Gpu::any(H200);
    for threads in [1, 3] {
        let fill = |number: u64, rows: &mut [u8]| {
            rows.fill(number as u8);
            match number {
                3 => Err("three".to_string()),
                5 => panic!("five"),
                7 => Ok(99),
                9 => Ok(2),
                10.. => Ok(0),
                _ => Ok(4),
            }
        };
        let builder = IngressPrefetcher::builder(&gpu.device, [4, ROW]).depth(4).threads(threads);
        let all: Vec<_> = builder.fill(fill).unwrap().collect();
        assert_eq!(all.len(), 10);
        for (number, batch) in all.into_iter().enumerate() {
            match (number, batch) {
                (3, Err(IngressError::Source(error))) => assert_eq!(error, "three"),
                (5, Err(IngressError::Transfer(error))) => {
                    assert!(error.is_panic() && error.to_string().contains("five"))
                }
                (7, Err(IngressError::Transfer(error))) => {
                    assert!(error.is_invalid_input() && error.to_string().contains("99"))
                }
                (9, Ok(batch)) => assert_eq!((batch.rows(), batch.view().unwrap().len()), (2, 2 * ROW)),
                (_, Ok(batch)) => assert_eq!(batch.number(), number as u64),
                (_, Err(error)) => panic!("{number}: {error}"),
            }
        }
    }
    gpu.finish();
}

#[test]
fn items_of_an_iterator_are_batches() {
    let gpu = Gpu::any(H200);
    let made = Arc::new(AtomicUsize::new(0));
    let count = made.clone();
    let make = move || {
        count.fetch_add(1, Ordering::SeqCst);
        let lengths = [4 * ROW, ROW, ROW + 1, 5 * ROW, 0, 2 * ROW];
        lengths.into_iter().zip(1u8..).map(|(len, value)| if value == 6 { Err("six") } else { Ok(vec![value; len]) })
    };
    let mut batches = IngressPrefetcher::builder(&gpu.device, [4, ROW]).items(make).unwrap();
    for _ in 0..2 {
        for (number, rows) in [(0, 4), (1, 1)] {
            let batch = batches.next().unwrap().unwrap();
            assert_eq!((batch.number(), batch.rows()), (number, rows));
            let values = gpu.stream.clone_dtoh(&batch.view().unwrap().device(&gpu.stream).unwrap()).unwrap();
            assert!(values == vec![number as u8 + 1; rows * ROW]);
        }
        for len in [ROW + 1, 5 * ROW, 0] {
            let Some(Err(IngressError::Transfer(error))) = batches.next() else { panic!("{len} were taken") };
            assert!(error.is_unsupported() && error.to_string().contains(&format!("{len} elements")), "{error}");
        }
        assert!(matches!(batches.next(), Some(Err(IngressError::Source("six")))));
        assert!(batches.next().is_none() && batches.next().is_none());
        batches.reset();
    }
    drop(batches);
    assert!(made.load(Ordering::SeqCst) >= 2);
    gpu.finish();
}

/// Nothing of before comes out after a reset, at whatever point that is; batches that are out stay.
#[test]
fn a_reset_begins_with_the_first() {
    let gpu = Gpu::any(H200);
    let round = Arc::new(AtomicU64::new(0));
    let seen = round.clone();
    let fill = move |number: u64, rows: &mut [u8]| {
        rows.fill(seen.load(Ordering::SeqCst) as u8);
        Ok::<_, ()>(if number < 6 { 1 } else { 0 })
    };
    let mut batches = IngressPrefetcher::builder(&gpu.device, [1, ROW]).depth(3).threads(2).fill(fill).unwrap();
    let kept = batches.next().unwrap().unwrap();
    for taken in 0..8 {
        round.store(taken + 1, Ordering::SeqCst);
        batches.reset();
        for number in 0..taken.min(6) {
            let batch = batches.next().unwrap().unwrap();
            assert_eq!(batch.number(), number);
            assert!(batch.host().unwrap().iter().all(|&byte| byte == taken as u8 + 1), "stale");
        }
        assert_eq!(batches.next().is_none(), taken >= 6);
    }
    assert!(kept.host().unwrap().iter().all(|&byte| byte == 0));
    drop((kept, batches));
    gpu.finish();
}

/// Nor what was being loaded then.
#[test]
fn what_is_loaded_during_a_reset_is_dropped() {
    let gpu = Gpu::any(H200);
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let (tell, told) = std::sync::mpsc::channel::<()>();
    let (wait, round) = (std::sync::Mutex::new(wait), AtomicUsize::new(0));
    let fill = move |number: u64, rows: &mut [u8]| {
        let round = round.fetch_add(1, Ordering::SeqCst);
        rows.fill(round as u8);
        if round == 0 {
            tell.send(()).unwrap();
            wait.lock().unwrap().recv().unwrap();
        }
        Ok::<_, ()>(if number == 0 { 1 } else { 0 })
    };
    let mut batches = IngressPrefetcher::builder(&gpu.device, [1, ROW]).depth(1).fill(fill).unwrap();
    told.recv().unwrap();
    batches.reset();
    go.send(()).unwrap();
    let batch = batches.next().unwrap().unwrap();
    assert_eq!((batch.number(), batch.host().unwrap()[0]), (0, 1));
    assert!(batches.next().is_none());
    drop((batch, batches));
    gpu.finish();
}

#[test]
fn dropped_early_it_ends_and_what_is_out_stays() {
    let gpu = Gpu::any(H200);
    let mut batches = numbered(&gpu, u64::MAX, 3, 2);
    let (first, second) = (batches.next().unwrap().unwrap(), batches.next().unwrap().unwrap());
    within(HANG, move || drop(batches));
    assert_eq!(gpu.stream.clone_dtoh(&first.device(&gpu.stream).unwrap()).unwrap(), [0; 4 * ROW]);
    let tensor = second.into_tensor();
    assert_eq!(*tensor.host().unwrap(), [1; 4 * ROW]);
    drop((first, tensor));
    gpu.finish();
}

#[test]
fn batches_are_awaited_too() {
    let gpu = Gpu::any(H200);
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let fill = move |number: u64, rows: &mut [u8]| {
        wait.lock().unwrap().recv().ok();
        rows.fill(number as u8);
        Ok::<_, ()>(if number < 3 { 1 } else { 0 })
    };
    let mut batches = IngressPrefetcher::builder(&gpu.device, [1, ROW]).depth(1).fill(fill).unwrap();
    let waker = CountingWaker::new();
    let counting = std::task::Waker::from(waker.clone());
    let mut context = std::task::Context::from_waker(&counting);
    assert!(batches.poll_next(&mut context).is_pending());
    assert_eq!(waker.wakes(), 0);
    go.send(()).unwrap();
    until(|| waker.wakes() == 1);
    let std::task::Poll::Ready(Some(Ok(batch))) = batches.poll_next(&mut context) else { panic!("woken for nothing") };
    drop((batch, go));
    for number in 1..3 {
        let batch = block_on(Box::pin(batches.next_async())).unwrap().unwrap();
        assert_eq!(batch.number(), number);
    }
    assert!(block_on(Box::pin(batches.next_async())).is_none());
    drop(batches);
    gpu.finish();
}

#[test]
fn batches_that_hold_nothing_are_refused() {
    let gpu = Gpu::any(H200);
    for shape in [vec![0, 4], vec![4, 0], vec![usize::MAX, 2]] {
        let fill = |_: u64, _: &mut [u8]| Ok::<_, ()>(0);
        let error = IngressPrefetcher::builder(&gpu.device, shape).fill(fill).unwrap_err();
        assert!(error.is_unsupported() || error.is_invalid_input(), "{error}");
    }
    gpu.finish();
}

/// R28: batches go round: as many as the depth, and the one that is out. Where host and device share memory nothing is copied, nor
/// allocated on the device.
#[test]
fn no_more_is_allocated_than_goes_round() {
    for profile in [H200, SPARK] {
        let Some(gpu) = Gpu::simulated(profile) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        let count = |calls: &[&str]| calls.iter().map(|call| sim.count(call)).sum::<usize>();
        let host = || count(&["cuMemHostAlloc", "cuMemHostRegister", "cuMemAllocManaged"]);
        let device = || count(&["cuMemAlloc", "cuMemAllocAsync"]);
        let freed = || count(&["cuMemFree", "cuMemFreeAsync", "cuMemFreeHost", "cuMemHostUnregister"]);
        let (copies, kernels) = (|| sim.count("cuMemcpyHtoDAsync"), gpu.kernels());
        let mut target = gpu.both_sides(&[0u8; 4 * ROW]);
        drop(target.device_mut(&gpu.stream).unwrap());
        let before = (host(), device(), freed(), copies());
        let mut batches = numbered(&gpu, 200, 3, 1);
        for batch in &mut batches {
            let batch = batch.unwrap();
            assert_eq!(batch.strategy() == Strategy::ZeroCopy, profile == SPARK);
            kernels.copy(
                &gpu.stream,
                &mut target.device_mut(&gpu.stream).unwrap(),
                &batch.device(&gpu.stream).unwrap(),
            );
        }
        assert!(host() - before.0 <= 4, "{profile}: {}", host() - before.0);
        assert!(device() - before.1 <= if profile == SPARK { 0 } else { 4 }, "{profile}");
        assert_eq!((freed(), copies() - before.3), (before.2, if profile == SPARK { 0 } else { 200 }), "{profile}");
        drop((batches, target, kernels));
        gpu.finish();
    }
}
