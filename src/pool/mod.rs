//! Page-locked host memory that is used again and again.
//!
//! Getting such memory from the driver takes long, and giving it back waits for the whole device with the driver locked. So what is given back here is kept, by size, and the driver is only asked while a program warms up.

mod buffer;
mod classes;
mod shard;
mod shelf;

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub use self::buffer::PinnedBuffer;
use self::classes::capacity;
use self::shard::Block;
pub use self::shelf::WhenFull;
use self::shelf::{SHARDS, Shelf, Taken};
use crate::complete::{Waiter, free_later};
use crate::driver::pinned::{Pinned, Placement};
use crate::driver::{Context, Driver};
use crate::error::{Error, Kind, Result};

/// What a pool of page-locked memory may do.
///
/// ```
/// # cuda_sim::install().unwrap();
/// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
/// # let stream = cudarc::driver::CudaContext::new(gpu.ordinal())?.default_stream();
/// use transfer_tensor::{Device, PoolOptions, WhenFull};
///
/// let pool = PoolOptions::new().budget(256 << 20).when_full(WhenFull::Block).reserve(32 << 20, 4);
/// let device = Device::builder(&stream).pool(pool).build()?;
/// let mut buffer = device.pool().acquire(20 << 20)?;
/// buffer.fill(7);
/// drop(buffer); // kept for the next one that needs as much
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct PoolOptions {
    budget: Option<u64>,
    keep_idle: Option<u64>,
    when_full: WhenFull,
    strict: bool,
    reserve: Vec<(usize, usize)>,
}

impl PoolOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// The most bytes that may be page-locked, lent and idle together. If not said: half of what the host could still
    /// allocate when the device was made.
    pub fn budget(mut self, bytes: u64) -> Self {
        self.budget = Some(bytes);
        self
    }

    /// The most idle bytes that are kept; a block that comes back above that goes to the driver, on a thread of its own. If
    /// not said: an eighth of what the host could still allocate when the device was made; a thirty-second where that is the
    /// device's memory too.
    pub fn keep_idle(mut self, bytes: u64) -> Self {
        self.keep_idle = Some(bytes);
        self
    }

    /// What [`acquire`](PinnedPool::acquire) does when there is no room. If not said, it refuses. Tensors always refuse: their
    /// host side is pageable then.
    pub fn when_full(mut self, when_full: WhenFull) -> Self {
        self.when_full = when_full;
        self
    }

    /// A refused reservation is an error, and tensors whose host side can not be page-locked are too, instead of being made
    /// with a smaller pool and with pageable memory.
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Makes `count` blocks for `bytes` bytes each when the device is made: in the background; at once, where
    /// [`strict`](Self::strict).
    pub fn reserve(mut self, bytes: usize, count: usize) -> Self {
        self.reserve.push((bytes, count));
        self
    }
}

/// A device's page-locked host memory: a handle, cheap to clone, to use from any thread.
///
/// Blocks are at most an eighth larger than what was asked for (above 1 MiB), never write-combined (the CPU reads such
/// memory at a tenth of the speed), and near the device where the machine has several NUMA nodes.
#[derive(Clone)]
pub struct PinnedPool(Arc<[Arc<Lender>; SHARDS]>);

/// What a buffer keeps of its pool: the handle for one of the shards. The buffers of two threads count their references in
/// different cache lines.
#[repr(align(128))]
struct Lender {
    pool: Arc<Inner>,
    shard: usize,
}

struct Inner {
    shelf: Shelf<Pinned>,
    context: Arc<Context>,
    waiter: Arc<Waiter>,
    placement: Placement,
    keep_idle: u64,
    when_full: WhenFull,
    strict: bool,
    counts: Counts,
    /// Gives back what somebody keeps and does not need.
    reclaim: OnceLock<Reclaim>,
}

/// Gives blocks back; whether there may be more later.
struct Reclaim(Box<dyn Fn() -> bool + Send + Sync>);

/// How often who waits for room asks for what others keep.
const RECLAIM: Duration = Duration::from_millis(2);

#[derive(Default)]
struct Counts {
    made: AtomicU64,
    freed: AtomicU64,
    refused: AtomicU64,
    peak: AtomicU64,
    /// Bytes of blocks that there are; what others are about to make, and may be refused, does not count.
    held: AtomicU64,
    /// What was held when the driver first refused more; 0: it never did.
    limit: AtomicU64,
}

/// What a pool holds and has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PoolStats {
    /// The most bytes that may be page-locked.
    pub budget: u64,
    /// Bytes that are page-locked, lent or idle.
    pub reserved: u64,
    /// Bytes that wait to be used again.
    pub idle: u64,
    /// The most bytes that were reserved at one time.
    pub peak: u64,
    /// Buffers handed out so far.
    pub acquired: u64,
    /// Blocks made: calls of the driver.
    pub made: u64,
    /// Blocks given back to the driver.
    pub freed: u64,
    /// Requests that got nothing, for want of budget or because the driver refused.
    pub refused: u64,
    /// How much the driver lets this process page-lock, if it has refused more (in a container, under WSL): what was
    /// reserved then.
    pub pinned_limit: Option<u64>,
}

impl PinnedPool {
    pub(crate) fn new(
        context: &Arc<Context>,
        waiter: &Arc<Waiter>,
        placement: Placement,
        host_available: Option<u64>,
        one_memory: bool,
        options: PoolOptions,
    ) -> Result<Self> {
        let share = if one_memory { 32 } else { 8 };
        let budget = options.budget.unwrap_or_else(|| host_available.map_or(u64::MAX, |bytes| bytes / 2));
        let inner = Arc::new(Inner {
            shelf: Shelf::new(budget),
            context: context.clone(),
            waiter: waiter.clone(),
            placement,
            keep_idle: options.keep_idle.unwrap_or_else(|| host_available.map_or(u64::MAX, |bytes| bytes / share)),
            when_full: options.when_full,
            strict: options.strict,
            counts: Counts::default(),
            reclaim: OnceLock::new(),
        });
        let pool = Self(Arc::new(std::array::from_fn(|shard| Arc::new(Lender { pool: inner.clone(), shard }))));
        if options.strict {
            options.reserve.iter().try_for_each(|&(bytes, count)| pool.reserve(bytes, count).map(drop))?;
        } else if !options.reserve.is_empty() {
            let own = pool.clone();
            let work = move || {
                crate::trace::name_thread();
                options.reserve.iter().for_each(|&(bytes, count)| drop(own.reserve(bytes, count)));
            };
            // Without a thread the blocks are made when they are asked for.
            let _ = std::thread::Builder::new().name("transfer-pin".into()).spawn(work);
        }
        Ok(pool)
    }

    /// A buffer of `bytes` bytes, with whatever bytes were there before. When there is no room, does what
    /// [`PoolOptions::when_full`] says.
    ///
    /// No driver call where a block of this size has come back; else one, which is slow and may wait for the device.
    ///
    /// # Errors
    /// There is no room within the budget, or the driver refuses more.
    pub fn acquire(&self, bytes: usize) -> Result<PinnedBuffer> {
        self.acquire_or(bytes, self.inner().when_full)
    }

    /// As [`acquire`](Self::acquire); an error at once when there is no room.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn try_acquire(&self, bytes: usize) -> Result<PinnedBuffer> {
        self.acquire_or(bytes, WhenFull::Refuse)
    }

    /// As [`acquire`](Self::acquire), with another way of waiting.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn acquire_or(&self, bytes: usize, when_full: WhenFull) -> Result<PinnedBuffer> {
        Driver::get()?;
        let lender = self.lender().clone();
        if bytes == 0 {
            return Ok(PinnedBuffer { block: None, len: 0, lender });
        }
        let block = lender.take(bytes, when_full).inspect_err(|_| {
            lender.pool.counts.refused.fetch_add(1, Ordering::Relaxed);
        })?;
        Ok(PinnedBuffer { block: Some(block), len: bytes, lender })
    }

    fn inner(&self) -> &Arc<Inner> {
        &self.0[0].pool
    }

    /// The one of this thread, which it shares with as few others as can be.
    fn lender(&self) -> &Arc<Lender> {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local!(static THREAD: usize = THREADS.fetch_add(1, Ordering::Relaxed));
        &self.0[THREAD.try_with(|&thread| thread).unwrap_or(0) % SHARDS]
    }

    /// Who holds blocks that he could do without gives them back by `reclaim` when others want room: what it returns says
    /// whether he may do so again. Called without a lock of the pool's.
    pub(crate) fn on_shortage(&self, reclaim: impl Fn() -> bool + Send + Sync + 'static) {
        let _ = self.inner().reclaim.set(Reclaim(Box::new(reclaim)));
    }

    /// Makes `count` blocks for `bytes` bytes each, to lie ready; returns how many bytes of blocks there are. Fewer than asked
    /// for where the budget or the driver has no room.
    ///
    /// # Errors
    /// The pool is strict, and not all could be had.
    pub fn reserve(&self, bytes: usize, count: usize) -> Result<u64> {
        // All at once, or each would be the one before.
        let mut blocks = Vec::new();
        if bytes == 0 {
            return Ok(0);
        }
        for _ in 0..count {
            match self.try_acquire(bytes) {
                Ok(block) => blocks.push(block),
                Err(error) if self.inner().strict => return Err(error),
                Err(_) => break,
            }
        }
        Ok(blocks.iter().map(|block| block.capacity() as u64).sum())
    }

    /// Gives idle blocks back to the driver until no more than `keep` idle bytes are left; returns how many bytes went. Each
    /// may wait for the device.
    pub fn trim(&self, keep: u64) -> u64 {
        let (inner, mut freed) = (self.inner(), 0);
        while Driver::get().is_ok() && inner.shelf.idle() > keep {
            let Some(block) = inner.shelf.evict() else { break };
            freed += block.capacity() as u64;
            inner.free(vec![block]);
        }
        freed
    }

    /// What the pool holds and has done.
    pub fn stats(&self) -> PoolStats {
        let Inner { shelf, counts, .. } = &**self.inner();
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        PoolStats {
            budget: shelf.budget(),
            reserved: shelf.reserved(),
            idle: shelf.idle(),
            peak: load(&counts.peak),
            acquired: shelf.reused() + load(&counts.made),
            made: load(&counts.made),
            freed: load(&counts.freed),
            refused: load(&counts.refused),
            pinned_limit: Some(load(&counts.limit)).filter(|&limit| limit > 0),
        }
    }

    /// The most bytes that may be page-locked.
    pub(crate) fn budget(&self) -> u64 {
        self.inner().shelf.budget()
    }

    /// Whether a refusal is an error rather than a reason for pageable memory.
    pub(crate) fn is_strict(&self) -> bool {
        self.inner().strict
    }
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PinnedPool").field(&self.stats()).finish()
    }
}

impl Lender {
    fn take(&self, bytes: usize, when_full: WhenFull) -> Result<Pinned> {
        let capacity = capacity(bytes).ok_or_else(|| Error::overflow(format!("{bytes} bytes of pinned memory")))?;
        match self.take_or_reclaim(capacity, when_full) {
            Some(Taken::Block(block)) => Ok(block),
            Some(Taken::Grant(evicted)) => {
                self.pool.free(evicted);
                self.pool.make(capacity).map_err(|error| error.of_request(bytes as u64))
            }
            None => {
                let shelf = &self.pool.shelf;
                let lent = shelf.reserved().saturating_sub(shelf.idle());
                let why = format!("the pool's budget is {} bytes, of which {lent} are lent", shelf.budget());
                Err(Error::new(Kind::OutOfMemory { what: "pinned host memory", bytes: bytes as u64, why }))
            }
        }
    }

    fn take_or_reclaim(&self, capacity: usize, when_full: WhenFull) -> Option<Taken<Pinned>> {
        let shelf = &self.pool.shelf;
        let taken = shelf.take(self.shard, capacity, WhenFull::Refuse);
        if taken.is_some() || capacity as u64 > shelf.budget() {
            return taken;
        }
        let more = || self.pool.reclaim.get().is_some_and(|reclaim| (reclaim.0)());
        let end = match when_full {
            WhenFull::Refuse => {
                more();
                return shelf.take(self.shard, capacity, WhenFull::Refuse);
            }
            WhenFull::Block => None,
            WhenFull::Wait(limit) => Instant::now().checked_add(limit),
        };
        loop {
            // What is kept now may be needless later, and nobody would tell.
            let waits = if more() { RECLAIM } else { Duration::MAX };
            let left = end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            let taken = shelf.take(self.shard, capacity, WhenFull::Wait(waits.min(left)));
            if taken.is_some() || left <= waits {
                return taken;
            }
        }
    }

    /// To the shard it was taken for, on whatever thread that is: there it is looked for first.
    fn give_back(&self, block: Pinned) {
        let pool = &self.pool;
        if Driver::get().is_err() {
            // A forked child, or a driver that is gone: nothing can be freed, and a lock may never be.
            std::mem::forget(block);
            return;
        }
        if pool.keeps(block.capacity()) {
            pool.shelf.put(self.shard, block);
            return;
        }
        // Freeing may wait for the whole device, and a drop must not.
        let leaving = Box::new(Leaving { block: Some(block), pool: pool.clone() });
        free_later(&pool.context, pool.context.cuda().clone(), &pool.waiter, leaving, Vec::new());
    }
}

impl Inner {
    /// Makes a block that was granted. Where the driver refuses, idle blocks go first.
    fn make(&self, capacity: usize) -> Result<Pinned> {
        let made = loop {
            match Pinned::make(&self.context, capacity, self.placement) {
                Err(error) if error.is_out_of_memory() => {
                    let limit = self.counts.held.load(Ordering::Relaxed);
                    let _ = self.counts.limit.compare_exchange(0, limit.max(1), Ordering::Relaxed, Ordering::Relaxed);
                    match self.shelf.evict() {
                        Some(block) => self.free(vec![block]),
                        None => break Err(error),
                    }
                }
                made => break made,
            }
        };
        match &made {
            Ok(_) => {
                self.counts.made.fetch_add(1, Ordering::Relaxed);
                self.counts.held.fetch_add(capacity as u64, Ordering::Relaxed);
                self.counts.peak.fetch_max(self.shelf.reserved(), Ordering::Relaxed);
            }
            Err(_) => self.shelf.give_up(capacity),
        }
        made
    }

    fn free(&self, blocks: Vec<Pinned>) {
        let bytes = blocks.iter().map(|block| block.capacity() as u64).sum();
        self.counts.held.fetch_sub(bytes, Ordering::Relaxed);
        self.counts.freed.fetch_add(blocks.len() as u64, Ordering::Relaxed);
        drop(blocks);
    }

    /// Whether a block of `capacity` bytes that comes back may stay.
    fn keeps(&self, capacity: usize) -> bool {
        // No more can be idle than is reserved; what is idle is many threads' to say.
        self.shelf.reserved() <= self.keep_idle || self.shelf.idle().saturating_add(capacity as u64) <= self.keep_idle
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A forked child, or a driver that is gone: nothing can be freed, and a lock may never be.
        let usable = Driver::get().is_ok();
        for block in self.shelf.drain() {
            if !usable {
                std::mem::forget(block);
                continue;
            }
            free_later(&self.context, self.context.cuda().clone(), &self.waiter, Box::new(block), Vec::new());
        }
    }
}

/// A block on its way back to the driver: counted until it is there.
struct Leaving {
    block: Option<Pinned>,
    pool: Arc<Inner>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            let capacity = block.capacity();
            self.pool.free(vec![block]);
            self.pool.shelf.give_up(capacity);
        }
    }
}

impl Block for Pinned {
    fn capacity(&self) -> usize {
        self.bytes()
    }
}
