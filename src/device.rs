//! One GPU as this crate uses it: the caller's context and stream, the platform, and what transfers share.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream};

use crate::calibrate::{self, Wish};
use crate::complete::{Background, Waiter, free_later};
use crate::driver::context::cudarc_error;
use crate::driver::pinned::Placement;
use crate::driver::staging::Staging;
use crate::driver::{Context, Driver, Event, Pending, Stream, Way};
use crate::error::{Error, Result};
use crate::plan::{Decision, Request, Tuning, plan};
use crate::platform::{Detector, MemoryFigures, MemoryModel, Platform};
use crate::pool::{PinnedPool, PoolOptions};
use crate::tensor::TensorOptions;

/// A GPU that tensors are made for: a handle, cheap to clone, to use from any thread.
///
/// It works inside the context it is given and leaves that as it found it: the current context of the calling thread, its
/// stream capture mode and cudarc's single-stream mode stay what they were.
///
/// ```
/// # cuda_sim::install().unwrap();
/// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
/// # let ordinal = gpu.ordinal();
/// use transfer_tensor::{Device, cudarc::driver::CudaContext};
///
/// let stream = CudaContext::new(ordinal)?.default_stream();
/// let device = Device::new(&stream)?;
/// println!("{}", device.platform());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Device(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Arc<Context>,
    stream: Arc<CudaStream>,
    platform: Platform,
    memory: MemoryFigures,
    /// What the link's peak is, one way, in GB/s.
    most_gbs: f64,
    /// What the caller said, which nothing that is measured replaces.
    forced: Option<Tuning>,
    built_in: Tuning,
    calibration: calibrate::State,
    waiter: Arc<Waiter>,
    background: Background,
    pool: PinnedPool,
    staging: Staging,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A forked child, or a driver that is gone: nothing is freed, and a lock may never be.
        if Driver::get().is_err() {
            return;
        }
        // An upload from pageable memory returns when the source has been read, not when the slots have been.
        for (slot, busy) in self.staging.take_all() {
            // Idle or not: freeing may wait for the whole device, and a drop must not.
            let (cuda, pending) = (self.context.cuda().clone(), busy.into_iter().map(Pending::Event).collect());
            free_later(&self.context, cuda, &self.waiter, Box::new(slot), pending);
        }
    }
}

/// Makes a [`Device`].
#[derive(Debug, Clone)]
#[must_use]
pub struct DeviceBuilder<'s> {
    stream: &'s Arc<CudaStream>,
    detector: Detector,
    pool: PoolOptions,
    tuning: Option<Tuning>,
}

impl DeviceBuilder<'_> {
    /// Finds out what the machine is; if not said, [`Detector`]'s defaults.
    pub fn detector(mut self, detector: Detector) -> Self {
        self.detector = detector;
        self
    }

    /// The device's pool of page-locked memory.
    pub fn pool(mut self, pool: PoolOptions) -> Self {
        self.pool = pool;
        self
    }

    /// What staged copies go by; if not said, built-in values, or what [`Device::calibrate`] measures.
    pub fn tuning(mut self, tuning: Tuning) -> Self {
        self.tuning = Some(tuning);
        self
    }

    /// The device.
    ///
    /// # Errors
    /// There is no usable driver; a strict pool could not reserve what it was told to.
    pub fn build(self) -> Result<Device> {
        Driver::get()?;
        let cuda = self.stream.context();
        let wish = self.detector.calibrate();
        let mut platform = self.detector.detect_in(cuda);
        if let Wish::Unknown(word) = &wish {
            platform =
                platform.with_note(format!("TRANSFER_TENSOR_CALIBRATE is {word:?}, not 0, 1 or force: not calibrated"));
        }
        let memory = platform.memory_in(cuda);
        let (context, waiter) = (Context::new(cuda.clone()), Arc::new(Waiter::new()));
        let placement = placement(&platform);
        let one_memory = platform.model().is_one_memory();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let pool = PinnedPool::new(&context, &waiter, placement, memory.host_available, one_memory, self.pool)?;
        let staging = Staging::new(&context, &pool);
        let mut device = Device(Arc::new(Inner {
            staging,
            context,
            stream: self.stream.clone(),
            most_gbs: platform.ceiling().gbs,
            platform,
            memory,
            forced: self.tuning,
            built_in: Tuning::built_in(cores),
            calibration: calibrate::State::new(self.detector.cache()),
            waiter,
            background: Background::default(),
            pool,
        }));
        if matches!(wish, Wish::Yes | Wish::Force)
            && let Err(error) = device.calibrated(wish == Wish::Force)
            && let Some(inner) = Arc::get_mut(&mut device.0)
        {
            let platform = inner.platform.clone();
            inner.platform = platform.with_note(format!("not calibrated, built-in figures are used: {error}"));
        }
        Ok(device)
    }
}

fn placement(platform: &Platform) -> Placement {
    let discrete = matches!(platform.model(), MemoryModel::Discrete | MemoryModel::Hmm);
    Placement {
        map: cfg!(target_os = "linux") && discrete && platform.capabilities().can_register,
        node: platform.topology().numa_node,
    }
}

/// What went on behind a [`Device`]'s calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceStats {
    /// Allocations that are kept for ever, because the device faulted or the driver was gone before it was known to be
    /// done with them.
    pub leaked: u64,
    /// Errors of other calls that were found parked in the `CudaContext` and taken out of the way of ours.
    pub stale_errors: u64,
    /// Frees that the driver refused.
    pub free_errors: u64,
}

impl Device {
    /// The device of `stream`'s context, detected with the defaults of [`Detector`].
    ///
    /// # Errors
    /// There is no usable driver.
    pub fn new(stream: &Arc<CudaStream>) -> Result<Self> {
        Self::with_detector(stream, &Detector::default())
    }

    /// As [`new`](Device::new), with a detector of the caller's: another root for `/proc` and `/sys`, a forced strategy.
    ///
    /// # Errors
    /// As [`new`](Device::new).
    pub fn with_detector(stream: &Arc<CudaStream>, detector: &Detector) -> Result<Self> {
        Self::builder(stream).detector(detector.clone()).build()
    }

    /// Starts a handle with more said about it.
    pub fn builder(stream: &Arc<CudaStream>) -> DeviceBuilder<'_> {
        DeviceBuilder { stream, detector: Detector::default(), pool: PoolOptions::default(), tuning: None }
    }

    /// The device with this ordinal: its primary context and default stream.
    ///
    /// # Errors
    /// There is no usable driver, or no such device.
    pub fn open(ordinal: usize) -> Result<Self> {
        Driver::get()?;
        let context = CudaContext::new(ordinal).map_err(|error| cudarc_error("cuDevicePrimaryCtxRetain", error))?;
        Self::new(&context.default_stream())
    }

    /// Starts a tensor of this device.
    pub fn tensor(&self) -> TensorOptions<'_> {
        TensorOptions::new(self)
    }

    /// Plans a transfer on this device, with the memory that is free now.
    ///
    /// # Errors
    /// As [`plan`](crate::plan()).
    pub fn plan(&self, request: &Request) -> Result<Decision> {
        // Asking the driver and the system for free memory takes longer than planning: small tensors do with what was free
        // at first.
        let small = request.bytes < self.0.memory.free_bytes / 1024;
        if small {
            plan(self.platform(), &self.0.memory, request)
        } else {
            plan(self.platform(), &self.memory(), request)
        }
    }

    /// How much memory there is and how much is free.
    pub fn memory(&self) -> MemoryFigures {
        self.0.platform.memory_in(self.0.context.cuda())
    }

    /// What the machine is and what it can do; with what was measured, once it was [calibrated](Device::calibrate).
    pub fn platform(&self) -> &Platform {
        self.0.calibration.platform().unwrap_or(&self.0.platform)
    }

    /// Its page-locked host memory.
    pub fn pool(&self) -> &PinnedPool {
        &self.0.pool
    }

    /// What the copy engine is set to for this device.
    pub fn tuning(&self) -> Tuning {
        self.0.forced.or_else(|| self.0.calibration.tuning()).unwrap_or(self.0.built_in)
    }

    /// The caller's stream that this handle was made with.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.0.stream
    }

    /// What went on behind the calls.
    pub fn stats(&self) -> DeviceStats {
        let counters = self.0.context.counters();
        DeviceStats {
            leaked: counters.leaked.load(Ordering::Relaxed),
            stale_errors: counters.stale_errors.load(Ordering::Relaxed),
            free_errors: counters.free_errors.load(Ordering::Relaxed),
        }
    }

    /// Blocks until memory that was dropped while in use, or that is slow to unpin, has been freed. In a task's waker, which may run on the
    /// thread that frees it, it does not block.
    ///
    /// # Errors
    /// `timeout` passed first. The process is a forked child, in which nothing is freed.
    pub fn drain(&self, timeout: Duration) -> Result<()> {
        Driver::get()?;
        let _range = crate::trace::wait(c"drain");
        if self.0.waiter.drain(timeout) { Ok(()) } else { Err(Error::new(crate::error::Kind::NotReady)) }
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    /// Records what is on `stream` now, behind a copy of so many bytes: a wait for it sleeps while no link could have carried them, and
    /// then stays awake for what this one should take.
    pub(crate) fn behind_copy(&self, stream: &Stream, way: Way, bytes: usize) -> Result<Event> {
        let figures = self.platform().figures();
        let cost = match way {
            Way::Up => figures.host_to_device,
            Way::Down => figures.device_to_host,
        };
        let duration = |seconds| Duration::try_from_secs_f64(seconds);
        let least = duration(bytes as f64 / self.0.most_gbs * 1e-9).unwrap_or_default();
        let expected = duration(cost.seconds(bytes as u64)).unwrap_or(Duration::MAX);
        Ok(Event::record(self.context(), stream)?.not_before(least).expecting(expected))
    }

    /// What `stream` has been given so far.
    pub(crate) fn point(&self, stream: &Stream) -> Pending {
        let event = self.context().to_submit().and_then(|_bound| Event::record(self.context(), stream));
        event.map_or_else(|_| Pending::Stream(stream.clone()), |event| Pending::Event(Arc::new(event)))
    }

    /// No link of this device carries more, in GB/s.
    pub(crate) fn most_gbs(&self) -> f64 {
        self.0.most_gbs
    }

    /// How it makes page-locked memory.
    pub(crate) fn placement(&self) -> Placement {
        placement(&self.0.platform)
    }

    pub(crate) fn calibration_state(&self) -> &calibrate::State {
        &self.0.calibration
    }

    pub(crate) fn waiter(&self) -> &Waiter {
        &self.0.waiter
    }

    pub(crate) fn background(&self) -> &Background {
        &self.0.background
    }

    pub(crate) fn staging(&self) -> &Staging {
        &self.0.staging
    }

    /// Whether `stream` runs on this device's context.
    pub(crate) fn owns(&self, stream: &CudaStream) -> bool {
        stream.context().cu_ctx() == self.0.context.cuda().cu_ctx()
    }
}
