//! In the steady state an item costs no allocation: what is counted is the process's, so this is alone in it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use transfer_tensor::cudarc::driver::{CudaContext, CudaSlice};
use transfer_tensor::{Device, EgressPool, HostTensor, Output};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: as the system's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The names of the crate's threads, on Linux, where each has a folder. (The simulated driver has its own, as it needs them.)
fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let mut names: Vec<_> = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok()).collect();
    names.retain(|name| name.starts_with("transfer-"));
    names.sort();
    names
}

/// `TRANSFER_TENSOR_ITEMS` says of how many items. Tables that hold what is under way may grow once more, if more of it meets there than in
/// the warm-up: a few allocations, however many items there are.
#[test]
fn an_item_costs_no_allocation_and_no_thread() {
    let sim = match cuda_sim::install_from_env().unwrap() {
        cuda_sim::Driver::Simulated => Some(cuda_sim::device("x86_h200_sxm_gen5").unwrap()),
        cuda_sim::Driver::Real => None,
    };
    let items = std::env::var("TRANSFER_TENSOR_ITEMS").ok().and_then(|items| items.parse().ok()).unwrap_or(10_000);
    let stream = CudaContext::new(sim.as_ref().map_or(0, |sim| sim.ordinal())).unwrap().new_stream().unwrap();
    let device = Device::new(&stream).unwrap();
    let pool: EgressPool<Arc<CudaSlice<u8>>, usize> =
        EgressPool::builder(&device).workers(3).capacity(32).consumer(|out: Output<HostTensor<u8>>| out.len()).unwrap();
    let source: Arc<CudaSlice<u8>> = Arc::new(stream.alloc_zeros(4096).unwrap());
    let mut tickets = Vec::with_capacity(8);
    let mut run = |items: usize| {
        for item in 0..items {
            let ticket = pool.submit(source.clone()).map_err(|refused| refused.error).unwrap();
            // Some are waited for, some are not.
            if item % 3 > 0 {
                tickets.push(ticket);
            }
            if tickets.len() == tickets.capacity() {
                tickets.drain(..).for_each(|ticket| assert_eq!(ticket.wait().unwrap(), 4096));
            }
        }
        tickets.drain(..).for_each(|ticket| assert_eq!(ticket.wait().unwrap(), 4096));
        pool.drain(std::time::Duration::from_secs(60)).unwrap();
    };
    run(2000);
    // Their names are allocated, too.
    let names = threads();
    let before = (ALLOCATIONS.load(Ordering::Relaxed), names);
    run(items);
    let after = (ALLOCATIONS.load(Ordering::Relaxed), threads());
    println!("{} allocations in {items} items", after.0 - before.0);
    assert!(after.0 - before.0 < 40, "{} allocations in {items} items", after.0 - before.0);
    assert_eq!(after.1, before.1);
    drop((pool, source));
}
