//! The bytes of a tensor: on the host, on the device, or in one place that both see, and which of them are current.
//!
//! A byte that is current nowhere is zero. An access first makes the bytes it needs current where it wants them, which is
//! where copies happen; a write makes them stale on the other side.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::parts;
use super::region::{Owner, Region, Submitted};
use crate::device::Device;
use crate::driver::memory::{alloc_device, slice_address};
use crate::driver::{Event, Stream, Way, copy};
#[cfg(feature = "safetensors")]
use crate::element::DType;
use crate::element::Element;
use crate::error::{Error, Kind, Result};
use crate::plan::{Backing, Decision, Strategy};
use crate::pool::PinnedBuffer;
use crate::ranges::RangeSet;
use crate::trace;

/// The storage of a tensor. `TransferTensor` holds the only handle; views borrow it, shared tensors count it.
#[derive(Debug)]
pub(crate) struct Store {
    device: Option<Device>,
    bytes: usize,
    decision: Decision,
    /// Why it may only be read, if so.
    read_only: Option<&'static str>,
    state: Mutex<State>,
    allocate: AllocDevice,
    uploaded: AtomicU64,
    downloaded: AtomicU64,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) host: Option<Arc<Region>>,
    pub(crate) device: Option<Arc<Region>>,
    /// One region serves both sides (then `host` and `device` are the same, and all of it is current).
    pub(crate) shared: bool,
    pub(crate) host_current: RangeSet,
    pub(crate) device_current: RangeSet,
    /// What the host wrote since the device last looked there, and the device's view needs a fence to see. By range: a host
    /// guard on one part may still write while the device looks at another.
    pub(crate) unfenced: RangeSet,
}

/// Allocates device memory as a `CudaSlice<T>`, so that it can become one again.
type AllocDevice = fn(&Device, &Stream, usize) -> Result<(Box<dyn Any + Send>, u64)>;

fn allocate<T: Element>(device: &Device, stream: &Stream, bytes: usize) -> Result<(Box<dyn Any + Send>, u64)> {
    let _bound = device.context().enter()?;
    let slice = alloc_device::<T>(device.context(), stream, bytes / size_of::<T>())?;
    let address = slice_address(device.context(), &slice, stream)?;
    Ok((Box::new(slice), address))
}

impl Store {
    pub(crate) fn new<T: Element>(
        device: Option<Device>,
        bytes: usize,
        decision: Decision,
        read_only: Option<&'static str>,
        state: State,
    ) -> Arc<Self> {
        Arc::new(Self {
            device,
            bytes,
            decision,
            read_only,
            state: Mutex::new(state),
            allocate: allocate::<T>,
            uploaded: AtomicU64::new(0),
            downloaded: AtomicU64::new(0),
        })
    }

    /// As [`new`](Store::new), for an element type that is known at run time only.
    #[cfg(feature = "safetensors")]
    pub(crate) fn of_dtype(
        device: Option<Device>,
        bytes: usize,
        dtype: DType,
        decision: Decision,
        read_only: Option<&'static str>,
        state: State,
    ) -> Arc<Self> {
        let make = match dtype {
            DType::Bool => Self::new::<bool>,
            DType::U8 => Self::new::<u8>,
            DType::I8 => Self::new::<i8>,
            DType::U16 => Self::new::<u16>,
            DType::I16 => Self::new::<i16>,
            DType::U32 => Self::new::<u32>,
            DType::I32 => Self::new::<i32>,
            DType::F32 => Self::new::<f32>,
            DType::U64 => Self::new::<u64>,
            DType::I64 => Self::new::<i64>,
            DType::F64 => Self::new::<f64>,
            #[cfg(feature = "half")]
            DType::F16 => Self::new::<half::f16>,
            #[cfg(feature = "half")]
            DType::BF16 => Self::new::<half::bf16>,
            #[cfg(feature = "float8")]
            DType::F8E4M3 => Self::new::<float8::F8E4M3>,
            #[cfg(feature = "float8")]
            DType::F8E5M2 => Self::new::<float8::F8E5M2>,
            // Nobody can name its elements in this build.
            #[allow(unreachable_patterns)]
            _ => Self::new::<u8>,
        };
        make(device, bytes, decision, read_only, state)
    }

    pub(crate) fn device_handle(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// The device, for an operation that needs one.
    pub(crate) fn need_device(&self, operation: &'static str) -> Result<&Device> {
        self.device.as_ref().ok_or_else(|| Error::new(Kind::HostOnly { operation }))
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn strategy(&self) -> Strategy {
        self.decision.strategy
    }

    pub(crate) fn decision(&self) -> &Decision {
        &self.decision
    }

    /// From now on device memory is allocated as a slice of `T`. False if there is some already.
    pub(crate) fn retype<T: Element>(&mut self) -> bool {
        self.allocate = allocate::<T>;
        self.state.get_mut().device.is_none()
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        self.read_only.map_or(Ok(()), |why| Err(Error::new(Kind::ReadOnly { why })))
    }

    pub(crate) fn copied(&self) -> (u64, u64) {
        (self.uploaded.load(Ordering::Relaxed), self.downloaded.load(Ordering::Relaxed))
    }

    pub(crate) fn count_upload(&self, bytes: usize) {
        self.uploaded.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// The kind of memory that serves the device, or the host where there is none.
    pub(crate) fn backing(&self) -> Backing {
        let state = self.state.lock();
        match (&state.host, &state.device, self.strategy()) {
            (Some(host), _, Strategy::ZeroCopy | Strategy::Coherent | Strategy::Host) => host.backing(),
            (_, _, Strategy::Streamed) => Backing::Device,
            _ => Backing::Pageable,
        }
    }

    /// The kind of memory on the host side, where there is some.
    pub(crate) fn host_backing(&self) -> Option<Backing> {
        self.state.lock().host.as_ref().map(|region| region.backing())
    }

    pub(crate) fn with_state<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.state.lock())
    }

    /// The host region with `range` current, and, for a write, with the device's copy of it stale. Returns before the
    /// copies are done: `Region::wait` is the caller's.
    pub(crate) fn on_host(&self, range: &Range<usize>, write: bool) -> Result<Arc<Region>> {
        self.on_host_by(range, write, None)
    }

    /// As [`on_host`](Store::on_host), with copies on `lane`, if one is given.
    pub(crate) fn on_host_by(&self, range: &Range<usize>, write: bool, lane: Option<&Stream>) -> Result<Arc<Region>> {
        let mut state = self.state.lock();
        if state.host.is_none() {
            state.host = Some(Arc::new(self.new_host_region()?));
        }
        let region = state.host.clone().ok_or_else(|| Error::unsupported("a host view", "no host memory"))?;
        if !state.shared {
            self.download(&mut state, &region, range, lane)?;
        }
        if write {
            state.device_current.remove(range);
            if state.shared && self.device.as_ref().is_some_and(|device| !io_coherent(device)) {
                state.unfenced.insert(range);
            }
        }
        Ok(region)
    }

    fn download(
        &self,
        state: &mut State,
        host: &Arc<Region>,
        range: &Range<usize>,
        lane: Option<&Stream>,
    ) -> Result<()> {
        for missing in state.host_current.missing(range) {
            let mut zero = RangeSet::default();
            zero.insert(&missing);
            for part in state.device_current.within(&missing) {
                zero.remove(&part);
                let source =
                    state.device.clone().ok_or_else(|| Error::unsupported("a download", "no device memory"))?;
                self.download_part(&source, host, &part, lane)?;
                state.host_current.insert(&part);
            }
            for part in zero.within(&missing) {
                host.wait(&part, true)?;
                // SAFETY: inside the region; nobody else looks at bytes that are current nowhere, and nothing runs on them.
                unsafe { host.host()?.as_ptr().add(part.start).write_bytes(0, part.len()) };
                state.host_current.insert(&part);
            }
        }
        Ok(())
    }

    fn download_part(
        &self,
        source: &Arc<Region>,
        target: &Arc<Region>,
        part: &Range<usize>,
        lane: Option<&Stream>,
    ) -> Result<()> {
        let device = self.need_device("a download")?;
        let _bound = device.context().to_submit()?;
        let stream = lane.cloned().map_or_else(|| device.context().copy_stream(Way::Down), Ok)?;
        parts::down(device, (source, part.start), (target, part.start), part.len(), &stream)?;
        self.downloaded.fetch_add(part.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// The device's region with `range` current once `stream` has passed, and, for a write, with the host's copy of it
    /// stale. `stream` is not yet ordered after the uses of the region: `Region::order` is the caller's. So is closing the
    /// uses that were opened for copies, with an event that lies behind them. The context is current.
    pub(crate) fn on_device(
        &self,
        range: &Range<usize>,
        write: bool,
        stream: &Stream,
    ) -> Result<(Arc<Region>, Submitted)> {
        let device = self.need_device("device access")?;
        let mut state = self.state.lock();
        if !state.shared && state.device.is_none() {
            state.device = Some(Arc::new(self.new_device_region(device, stream)?));
        }
        let region = if state.shared { state.host.clone() } else { state.device.clone() };
        let region = region.ok_or_else(|| Error::unsupported("a device view", "no device memory"))?;
        let mut submitted = Submitted::default();
        if state.shared {
            if !io_coherent(device) && !state.unfenced.within(range).is_empty() {
                // The host's writes become visible to the device at a synchronisation (CUDA for Tegra, I/O coherency).
                let _range = trace::range(c"wait", range.len());
                stream.synchronize()?;
                state.unfenced.remove(range);
            }
        } else {
            self.upload(device, &mut state, &region, range, stream, &mut submitted)?;
        }
        if write {
            state.host_current.remove(range);
        }
        Ok((region, submitted))
    }

    /// Submits bringing `range` to the device on `lane`. Not for a guard, which has uses of its own to close.
    pub(crate) fn bring(&self, range: &Range<usize>, lane: &Stream) -> Result<Arc<Region>> {
        let device = self.need_device("a copy to the device")?;
        let _bound = device.context().to_submit()?;
        let (region, mut submitted) = self.on_device(range, false, lane)?;
        let event = device.behind_copy(lane, Way::Up, submitted.in_flight())?;
        submitted.close(&Arc::new(event));
        Ok(region)
    }

    fn upload(
        &self,
        device: &Device,
        state: &mut State,
        target: &Arc<Region>,
        range: &Range<usize>,
        stream: &Stream,
        submitted: &mut Submitted,
    ) -> Result<()> {
        for missing in state.device_current.missing(range) {
            let mut zero = RangeSet::default();
            zero.insert(&missing);
            for part in state.host_current.within(&missing) {
                zero.remove(&part);
                let source = state.host.clone().ok_or_else(|| Error::unsupported("an upload", "no host memory"))?;
                parts::up(device, (&source, part.start), (target, part.start), part.len(), stream, submitted)?;
                self.count_upload(part.len());
                state.device_current.insert(&part);
            }
            for part in zero.within(&missing) {
                target.order(stream, &part, true)?;
                let write = target.open(stream, &part, true);
                // SAFETY: inside the region, which tracks the write and outlives it.
                unsafe { copy::zero(target.device()? + part.start as u64, part.len(), stream)? };
                submitted.push(target, write);
                state.device_current.insert(&part);
            }
        }
        Ok(())
    }

    /// Host memory for a tensor that lives on the device: pinned, so that copies run at the speed of the link; pageable
    /// where pinning is refused.
    fn new_host_region(&self) -> Result<Region> {
        match &self.device {
            Some(device) => pinned_or_pageable(device, self.bytes),
            None => pageable_region(self.bytes, None),
        }
    }

    fn new_device_region(&self, device: &Device, stream: &Stream) -> Result<Region> {
        let region = self.allocate_device(device, stream)?;
        allocated(device, &region, stream)?;
        Ok(region)
    }

    /// Device memory of the tensor's size and type, allocated in the order of `stream`; other streams know nothing of that yet.
    pub(crate) fn allocate_device(&self, device: &Device, stream: &Stream) -> Result<Region> {
        device_region(self.allocate, device, self.bytes, stream)
    }
}

fn device_region(allocate: AllocDevice, device: &Device, bytes: usize, stream: &Stream) -> Result<Region> {
    let allocate = || allocate(device, stream, bytes);
    let (slice, address) = allocate().or_else(|error| retry_after_drain(device, error, allocate))?;
    let owner = Owner::Device { slice, stream: stream.clone(), shared: false };
    // SAFETY: the slice owns `bytes` bytes at its address.
    Ok(unsafe { Region::new(None, Some(address), bytes, Backing::Device, Some(device.clone()), owner) })
}

/// Notes the allocation, after which other streams must come.
fn allocated(device: &Device, region: &Region, stream: &Stream) -> Result<()> {
    let allocation = region.open(stream, &(0..region.bytes()), true);
    region.close(allocation, Arc::new(Event::record(device.context(), stream)?));
    Ok(())
}

/// Device memory of no tensor's own, allocated in the order of `stream`.
pub(super) fn device_room(device: &Device, bytes: usize, stream: &Stream) -> Result<Region> {
    let region = device_region(allocate::<u8>, device, bytes, stream)?;
    let _bound = device.context().to_submit()?;
    allocated(device, &region, stream)?;
    Ok(region)
}

fn io_coherent(device: &Device) -> bool {
    device.platform().capabilities().io_coherent
}

/// Memory that was dropped may still be waiting to be freed, and staging slots lie idle: after an out-of-memory, wait for the
/// one, give up the other, and try once more.
pub(crate) fn retry_after_drain<R>(device: &Device, error: Error, again: impl FnOnce() -> Result<R>) -> Result<R> {
    if !error.is_out_of_memory() {
        // A forked child, for one: the locks below may never be free.
        return Err(error);
    }
    device.staging().release();
    if device.platform().model().is_one_memory() {
        // What lies idle on the host is the device's memory too.
        device.pool().trim(0);
    }
    if device.drain(Duration::from_secs(2)).is_ok() { again() } else { Err(error) }
}

/// Pinned memory of the device's pool, not yet set.
pub(crate) fn pinned_region(device: &Device, bytes: usize) -> Result<Region> {
    let allocate = || device.pool().try_acquire(bytes);
    let buffer = allocate().or_else(|error| retry_after_drain(device, error, allocate))?;
    Ok(buffer_region(device, buffer))
}

pub(super) fn buffer_region(device: &Device, buffer: PinnedBuffer) -> Region {
    let (host, address, bytes) = (buffer.host(), buffer.device_address(), buffer.len());
    let owner = Owner::Host(Box::new(buffer));
    // SAFETY: the buffer owns `bytes` bytes at both addresses.
    unsafe { Region::new(Some(host), address, bytes, Backing::Pinned, Some(device.clone()), owner) }
}

/// Pinned memory; pageable where pinning is refused and the pool is not strict.
pub(crate) fn pinned_or_pageable(device: &Device, bytes: usize) -> Result<Region> {
    match pinned_region(device, bytes) {
        Err(_) if !device.pool().is_strict() => pageable_region(bytes, Some(device.clone())),
        region => region,
    }
}

/// Ordinary memory, zeroed, aligned for every element type and for vector instructions; on huge pages where the system
/// gives them for large blocks.
pub(crate) fn pageable_region(bytes: usize, device: Option<Device>) -> Result<Region> {
    let block = crate::os::Block::zeroed(bytes)?;
    let host = block.address();
    let address = device
        .as_ref()
        .filter(|device| device.platform().capabilities().device_reads_pageable)
        .map(|_| host.as_ptr() as u64);
    // SAFETY: the block owns `bytes` bytes; where the device reads pageable memory it does so at the host's address.
    Ok(unsafe { Region::new(Some(host), address, bytes, Backing::Pageable, device, Owner::Host(Box::new(block))) })
}
