//! What is the caller's in a prefetcher: wakers, errors and iterators that panic when they are dropped, and how it ends.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

use transfer_tensor::{IngressError, IngressPrefetcher};

use crate::egress::{FAULT, LEN};
use crate::egress_attack::LIMIT;
use crate::egress_callers::Holds;
use crate::pool::until;
use crate::support::{CountingWaker, Gpu, H200, within};

/// Panics when it is dropped.
struct Bad;

impl Drop for Bad {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            panic!("a drop of the caller's");
        }
    }
}

impl Iterator for Bad {
    type Item = Result<Vec<u8>, String>;

    fn next(&mut self) -> Option<Self::Item> {
        panic!("an iterator of the caller's")
    }
}

/// A source whose batch with this number is there when the sender says so, or is dropped; the count of those it was asked for.
#[allow(clippy::type_complexity)]
fn held<E: Send>(
    at: u64,
    then: impl Fn(u64) -> Result<usize, E> + Send + Sync,
) -> (Sender<()>, Arc<AtomicUsize>, impl Fn(u64, &mut [u8]) -> Result<usize, E> + Send + Sync) {
    let (go, wait) = channel();
    let (wait, asked) = (Mutex::new(wait), Arc::new(AtomicUsize::new(0)));
    let count = asked.clone();
    let fill = move |number: u64, _: &mut [u8]| {
        count.fetch_add(1, SeqCst);
        if number == at {
            let _ = wait.lock().unwrap().recv();
        }
        then(number)
    };
    (go, asked, fill)
}

/// A batch may be what a task keeps whose waker is replaced.
#[test]
fn a_waker_that_is_replaced_may_keep_a_batch() {
    let gpu = Gpu::any(H200).keeping();
    let (go, _, fill) = held(1, |number| Ok::<_, String>(usize::from(number < 3)));
    let mut batches = IngressPrefetcher::builder(&gpu.device, [1, LEN]).fill(fill).unwrap();
    let first = batches.next().unwrap().unwrap();
    let waker = Waker::from(Arc::new(Holds(Mutex::new(Some(first)))));
    assert!(batches.poll_next(&mut Context::from_waker(&waker)).is_pending());
    drop(waker);
    let batches = within(LIMIT, move || {
        let _ = batches.poll_next(&mut Context::from_waker(Waker::noop()));
        batches
    });
    drop(go);
    assert_eq!(batches.map(|batch| batch.unwrap().number()).collect::<Vec<_>>(), [1, 2]);
    gpu.finish();
}

/// What panics twice is told once, and ends no loader.
#[test]
fn an_iterator_that_panics_again_when_it_is_dropped() {
    let gpu = Gpu::any(H200).keeping();
    let mut batches = IngressPrefetcher::builder(&gpu.device, [1, LEN]).items(|| Bad).unwrap();
    let batches = within(LIMIT, move || {
        assert!(batches.next().unwrap().is_err());
        assert!(batches.next().is_none());
        batches
    });
    drop(batches);
    gpu.finish();
}

/// Errors that nobody wants any more: of a round that is over, loaded before a reset, and left at the end.
#[test]
fn errors_that_panic_when_they_are_dropped() {
    let gpu = Gpu::any(H200).keeping();
    for loaded in [false, true] {
        let calls = AtomicUsize::new(0);
        let (go, asked, fill) = held(0, move |_| if calls.fetch_add(1, SeqCst) == 0 { Err(Bad) } else { Ok(1) });
        let mut batches = IngressPrefetcher::builder(&gpu.device, [1, LEN]).depth(1).fill(fill).unwrap();
        until(|| asked.load(SeqCst) == 1);
        let counter = CountingWaker::new();
        assert!(batches.poll_next(&mut Context::from_waker(&Waker::from(counter.clone()))).is_pending());
        if loaded {
            drop(go);
            until(|| counter.wakes() == 1);
            batches.reset();
        } else {
            batches.reset();
            drop(go);
        }
        let batches = within(LIMIT, move || {
            assert!(batches.next().unwrap().is_ok());
            batches
        });
        drop(batches);
    }
    let (go, asked, fill) = held(9, |_| Err::<usize, _>(Bad));
    let batches = IngressPrefetcher::builder(&gpu.device, [1, LEN]).depth(2).fill(fill).unwrap();
    until(|| asked.load(SeqCst) == 2);
    drop((go, batches));
    gpu.finish();
}

/// After a fault every load fails: the first says so, and then it is the end.
#[test]
fn after_a_fault_there_is_an_end() {
    let Some(gpu) = Gpu::simulated(H200).map(Gpu::keeping) else { return };
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), vec![1u8; 8 * LEN]).unwrap();
    let ranges = (0..8u64).map(|number| (file.path(), number * LEN as u64..(number + 1) * LEN as u64));
    let mut batches = IngressPrefetcher::builder(&gpu.device, [1, LEN]).file_ranges::<u8, _>(ranges).unwrap();
    drop(batches.next().unwrap().unwrap());
    gpu.sim.as_ref().unwrap().sticky(FAULT);
    let failed: Vec<_> = batches.by_ref().take(100).filter_map(Result::err).collect();
    assert!(matches!(&failed[..], [IngressError::Transfer(error)] if error.is_fault()), "{failed:?}");
    assert!(batches.next().is_none());
}

/// Woken, it lets the source go on.
struct GoesOn(Mutex<Option<Sender<()>>>);

impl Wake for GoesOn {
    fn wake(self: Arc<Self>) {
        drop(self.0.lock().unwrap().take());
    }
}

/// What is loaded while the prefetcher is dropped does not live as long as the batches that are out.
#[test]
fn what_comes_too_late_is_not_kept() {
    let gpu = Gpu::any(H200).keeping();
    let alive = Arc::new(());
    let error = alive.clone();
    let (go, asked, fill) = held(1, move |number| if number == 0 { Ok(1) } else { Err(error.clone()) });
    let mut batches = IngressPrefetcher::builder(&gpu.device, [1, LEN]).depth(1).fill(fill).unwrap();
    let first = batches.next().unwrap().map_err(drop).unwrap();
    until(|| asked.load(SeqCst) == 2);
    // Woken when it is closed, by its drop.
    let waker = Waker::from(Arc::new(GoesOn(Mutex::new(Some(go)))));
    assert!(batches.poll_next(&mut Context::from_waker(&waker)).is_pending());
    drop(batches);
    // The source's, which goes with the last batch, and this.
    assert_eq!(Arc::strong_count(&alive), 2);
    drop(first);
    assert_eq!(Arc::strong_count(&alive), 1);
    gpu.finish();
}
