//! What a calibration needs of the driver: memory to copy between, and copies that are timed.
//!
//! The link is timed by events, on the device's own clock; what the caller waits for, by the wall.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::call::check;
use super::context::{Context, Way, synchronize};
use super::copy;
use super::event::Event;
use super::host::{HostSink, HostSource};
use super::pinned::{Address, Pinned, Placement, touch};
use super::stream::Stream;
use super::timing::Stopwatch;
use crate::copy::pieces::Part;
use crate::copy::workers::Workers;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::os::Mapping;
use crate::plan::Tuning;

/// The memory that a calibration copies between, and the streams it copies on. Both streams are idle between two calls that
/// succeeded; dropping it waits for them.
#[derive(Debug)]
pub(crate) struct Rig {
    context: Arc<Context>,
    up: Stream,
    down: Stream,
    watch: Stopwatch,
    /// `None` only while it is dropped.
    memory: Option<Memory>,
}

#[derive(Debug)]
struct Memory {
    device: DeviceBlock,
    pinned: Pinned,
    pageable: Pageable,
    /// Of the device's memory and of the ordinary.
    bytes: usize,
}

/// How much of each a [`Rig`] has, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// Of page-locked memory.
    pub(crate) pinned: usize,
    /// Of device memory, and as much ordinary memory.
    pub(crate) copied: usize,
}

/// Ordinary memory that was touched.
#[derive(Debug)]
struct Pageable {
    host: NonNull<u8>,
    _owner: Box<dyn Any>,
}

impl Pageable {
    fn new(bytes: usize, node: Option<u32>) -> Self {
        match Mapping::new(bytes, node) {
            Ok(mapping) => {
                touch(&mapping);
                Self { host: mapping.address(), _owner: Box::new(mapping) }
            }
            Err(_) => {
                // The system maps none. A value other than zero has the pages made.
                let mut owner = vec![1u8; bytes];
                Self { host: NonNull::from(owner.as_mut_slice()).cast(), _owner: Box::new(owner) }
            }
        }
    }
}

#[derive(Debug)]
struct DeviceBlock {
    address: u64,
    context: Arc<Context>,
}

impl DeviceBlock {
    fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let _bound = context.enter()?;
        let mut address = 0;
        // SAFETY: the context is current; the call writes one address.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut address, bytes) })?;
        Ok(Self { address, context: context.clone() })
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        let freed = self.context.enter().and_then(|_bound| {
            // SAFETY: from `cuMemAlloc`, freed once; the rig has waited for its streams.
            check("cuMemFree", unsafe { sys::cuMemFree_v2(self.address) })
        });
        if freed.is_err() {
            self.context.counters().free_errors.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Rig {
    /// # Errors
    /// No room, or a refused call. Nothing is left behind.
    pub(crate) fn new(context: &Arc<Context>, sizes: Sizes, placement: Placement) -> Result<Self> {
        let (up, down) =
            (context.fresh_stream(c"transfer-measure-up")?, context.fresh_stream(c"transfer-measure-down")?);
        let watch = Stopwatch::new(context)?;
        let memory = Memory {
            device: DeviceBlock::new(context, sizes.copied)?,
            pinned: Pinned::make(context, sizes.pinned, placement)?,
            pageable: Pageable::new(sizes.copied, placement.node),
            bytes: sizes.copied,
        };
        Ok(Self { context: context.clone(), up, down, watch, memory: Some(memory) })
    }

    fn memory(&self) -> Result<&Memory> {
        self.memory.as_ref().ok_or_else(|| Error::unsupported("calibration", "it is over"))
    }

    fn stream(&self, way: Way) -> &Stream {
        match way {
            Way::Up => &self.up,
            Way::Down => &self.down,
        }
    }

    fn idle(&self) -> Result<()> {
        self.up.synchronize().and(self.down.synchronize())
    }

    fn lane(&self, way: Way) -> Result<Lane<'_>> {
        Ok(Lane { stream: self.stream(way), way, device: self.memory()?.device.address })
    }

    /// How large a copy of ordinary memory can be, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.bytes)
    }

    /// The largest copy that [`link`](Rig::link) and [`both`](Rig::both) make, in bytes: half of each memory.
    pub(crate) fn largest(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.pinned.bytes().min(memory.bytes) / 2)
    }

    /// Seconds on the device's clock that `times` copies of `bytes` bytes from or to page-locked memory take, one behind the
    /// other; of at most the [`largest`](Rig::largest) size.
    pub(crate) fn link(&self, way: Way, bytes: usize, times: usize) -> Result<f64> {
        let bytes = bytes.min(self.largest());
        let (host, offset) = self.half(way)?;
        let (lane, stream) = (self.lane(way)?, self.stream(way));
        {
            let _bound = self.context.to_submit()?;
            self.watch.start(stream)?;
            for _ in 0..times {
                // SAFETY: this direction's half of both memories; nobody else touches it before the wait below.
                unsafe { lane.submit(host, offset, bytes)? };
            }
            self.watch.stop(stream)?;
        }
        stream.synchronize()?;
        self.watch.seconds()
    }

    /// Seconds on the device's clock until both directions have made `times` copies at once.
    pub(crate) fn both(&self, up: usize, down: usize, times: usize) -> Result<f64> {
        let most = self.largest();
        let (to, from) = (self.half(Way::Up)?, self.half(Way::Down)?);
        let (up_lane, down_lane) = (self.lane(Way::Up)?, self.lane(Way::Down)?);
        {
            let _bound = self.context.to_submit()?;
            self.watch.start(&self.up)?;
            self.down.wait_for(&Event::record(&self.context, &self.up)?)?;
            for _ in 0..times {
                // SAFETY: each direction has a half of both memories for itself, until the waits below.
                unsafe { up_lane.submit(to.0, to.1, up.min(most))? };
                // SAFETY: as above.
                unsafe { down_lane.submit(from.0, from.1, down.min(most))? };
            }
            self.up.wait_for(&Event::record(&self.context, &self.down)?)?;
            self.watch.stop(&self.up)?;
        }
        self.idle()?;
        self.watch.seconds()
    }

    /// This direction's half of the page-locked memory and of the device's.
    fn half(&self, way: Way) -> Result<(*mut u8, usize)> {
        let (host, half) = (self.memory()?.pinned.host().as_ptr(), self.largest());
        match way {
            Way::Up => Ok((host, 0)),
            // SAFETY: at most the middle of the block.
            Way::Down => Ok((unsafe { host.add(half) }, half)),
        }
    }

    /// How long the caller waits for one copy of `bytes` bytes of page-locked memory.
    pub(crate) fn latency(&self, way: Way, bytes: usize) -> Result<Duration> {
        let (host, offset) = self.half(way)?;
        let bytes = bytes.min(self.largest());
        let lane = self.lane(way)?;
        let start = Instant::now();
        let event = {
            let _bound = self.context.to_submit()?;
            // SAFETY: as in `link`; the wait below ends it.
            unsafe { lane.submit(host, offset, bytes)? };
            Event::record(&self.context, lane.stream)?
        };
        event.wait()?;
        Ok(start.elapsed())
    }

    /// Seconds on the device's clock that a copy of `bytes` bytes of ordinary memory takes, the driver's own way.
    pub(crate) fn by_driver(&self, way: Way, bytes: usize) -> Result<f64> {
        let memory = self.memory()?;
        let lane = self.lane(way)?;
        {
            let _bound = self.context.to_submit()?;
            self.watch.start(lane.stream)?;
            // SAFETY: nobody else touches the memory before the wait below.
            unsafe { lane.submit(memory.pageable.host.as_ptr(), 0, bytes.min(memory.bytes))? };
            self.watch.stop(lane.stream)?;
        }
        lane.stream.synchronize()?;
        self.watch.seconds()
    }

    /// How long the caller waits for `bytes` bytes of ordinary memory to go through `device`'s staging, set to `tuning`.
    pub(crate) fn staged(&self, device: &Device, way: Way, bytes: usize, tuning: &Tuning) -> Result<Duration> {
        let memory = self.memory()?;
        let bytes = bytes.min(memory.bytes);
        let (host, address, stream) = (memory.pageable.host.as_ptr(), memory.device.address, self.stream(way));
        let start = Instant::now();
        {
            let _bound = self.context.to_submit()?;
            // SAFETY: both memories are `bytes` long, and nobody else touches them before the wait below.
            unsafe {
                match way {
                    Way::Up => {
                        let source = HostSource::new(host).ok_or_else(gone)?;
                        let parts = [Part { source: 0..bytes, target: address }];
                        device.staging().up(&parts, &source, tuning, stream)?;
                    }
                    Way::Down => {
                        let sink = HostSink::new(host, bytes).ok_or_else(gone)?;
                        device.staging().down(&sink, None, address, bytes, tuning, stream)?;
                    }
                }
            }
        }
        stream.synchronize()?;
        Ok(start.elapsed())
    }

    /// How long `threads` threads take to copy `bytes` bytes from page-locked to ordinary memory, and how many it were.
    pub(crate) fn memcpy(&self, threads: usize, bytes: usize) -> Result<(usize, Duration)> {
        const PIECE: usize = 1 << 20;
        let memory = self.memory()?;
        let pieces = bytes.min(memory.bytes) / PIECE;
        let sources = (memory.pinned.bytes() / PIECE).max(1);
        let (from, to) = (Address(memory.pinned.host()), Address(memory.pageable.host));
        let next = AtomicUsize::new(0);
        let share = move || {
            loop {
                let piece = next.fetch_add(1, Ordering::Relaxed);
                if piece >= pieces {
                    return;
                }
                // SAFETY: inside both blocks, which outlive the call of `run`; each piece is written by one thread, and the
                // streams are idle.
                unsafe {
                    let source = from.get().as_ptr().add(piece % sources * PIECE);
                    std::ptr::copy_nonoverlapping(source, to.get().as_ptr().add(piece * PIECE), PIECE);
                }
            }
        };
        let start = Instant::now();
        Workers::get().run(threads.saturating_sub(1), Box::new(share));
        Ok((pieces * PIECE, start.elapsed()))
    }
}

#[cold]
fn gone() -> Error {
    Error::unsupported("calibration", "its memory has no address")
}

/// One direction's way between host memory and the device's.
struct Lane<'a> {
    stream: &'a Stream,
    way: Way,
    device: u64,
}

impl Lane<'_> {
    /// Submits one copy between `host` and the device memory from `offset` on. The context is current.
    ///
    /// # Safety
    /// `offset + bytes` lies within the device memory; `host` is valid for `bytes` bytes and left alone until the stream has
    /// passed.
    unsafe fn submit(&self, host: *mut u8, offset: usize, bytes: usize) -> Result<()> {
        let device = self.device + offset as u64;
        // SAFETY: the caller's.
        unsafe {
            match self.way {
                Way::Up => copy::host_to_device(device, host, bytes, self.stream),
                Way::Down => copy::device_to_host(host, device, bytes, self.stream),
            }
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        if self.idle().or_else(|_| synchronize(self.context.cuda())).is_err() {
            // Not known to be idle: never freed.
            self.context.count_leak();
            std::mem::forget(memory);
        }
    }
}
