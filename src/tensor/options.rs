//! How a tensor is to be made, and making it in memory of its own.

use std::sync::Arc;

use super::region::{Owner, Region};
use super::store::{State, Store, buffer_region, pageable_region, pinned_or_pageable, pinned_region};
use super::{TransferTensor, check_elements};
use crate::device::Device;
use crate::driver::memory::{Managed, Registered, Registration};
use crate::element::{Element, bytes_of};
use crate::error::{Error, Kind, Result};
use crate::layout::Shape;
use crate::os::Block;
use crate::plan::{Access, Backing, Decision, Direction, HostMemory, Request, Strategy, plan};
use crate::platform::{MemoryFigures, Platform};
use crate::pool::PinnedBuffer;
use crate::ranges::RangeSet;

/// How a tensor is to be made; from [`Device::tensor`].
///
/// ```
/// # cuda_sim::install().unwrap();
/// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
/// # let device = transfer_tensor::Device::open(gpu.ordinal())?;
/// use transfer_tensor::{Access, Strategy};
///
/// let weights = device.tensor().access(Access::reuse(100)?).from_vec(vec![0.5f32; 12], [3, 4])?;
/// assert_eq!(weights.strategy(), Strategy::Streamed);
/// println!("{}", weights.decision());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct TensorOptions<'d> {
    pub(super) device: Option<&'d Device>,
    pub(super) request: Request,
    pub(super) pin: bool,
}

/// What fresh memory begins with.
pub(super) enum Init<'a> {
    Zero,
    Copy(&'a [u8]),
    /// Whatever is there; who made it sets it.
    #[cfg(feature = "safetensors")]
    Later,
}

impl<'d> TensorOptions<'d> {
    pub(crate) fn new(device: &'d Device) -> Self {
        Self { device: Some(device), request: Request::new(0), pin: false }
    }

    /// For tensors that no device uses.
    pub fn host_only() -> TensorOptions<'static> {
        TensorOptions { device: None, request: Request::new(0), pin: false }
    }

    /// How often the GPU touches the elements; streaming (once) if not said.
    pub fn access(mut self, access: Access) -> Self {
        self.request.access = access;
        self
    }

    /// Which way the elements go; host to device if not said.
    pub fn direction(mut self, direction: Direction) -> Self {
        self.request.direction = direction;
        self
    }

    /// Forces a strategy instead of the planned one. One that the machine does not have is an error.
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.request.strategy = Some(strategy);
        self
    }

    /// Forces the kind of memory. One that can not be had is an error, where the planned one would be replaced.
    pub fn backing(mut self, backing: Backing) -> Self {
        self.request.backing = Some(backing);
        self
    }

    /// Registers (page-locks) the memory that a tensor is made from, so that copies of it are asynchronous. Worth it for
    /// memory that is copied several times: registering 1 GiB takes some 46 ms on an H200's host. Where it is refused, copies
    /// go through pinned staging, and [`TransferTensor::is_pinned`] says `false`. On machines with
    /// a GPU of its own memory that is so for maps of files: the kernel may try to page-lock their pages for ever.
    pub fn pin(mut self, pin: bool) -> Self {
        self.pin = pin;
        self
    }

    pub(super) fn decide(&self, bytes: usize, host: HostMemory) -> Result<Decision> {
        let mut request = self.request.clone();
        request.bytes = bytes as u64;
        request.host = host;
        match self.device {
            Some(device) => device.plan(&request),
            None => {
                let no_limit = MemoryFigures::new(u64::MAX, u64::MAX);
                plan(&Platform::host_only("no device was given"), &no_limit, &request)
            }
        }
    }

    /// A tensor of zeros. Where the bytes live on the device alone, no memory is touched before the first access.
    ///
    /// # Errors
    /// The shape is too large, a forced strategy or backing is not to be had here, or there is no memory.
    pub fn zeros<T: Element>(self, shape: impl Into<Shape>) -> Result<TransferTensor<T>> {
        let shape = shape.into();
        let bytes = shape.bytes(size_of::<T>())?;
        self.fresh(shape, bytes, Init::Zero)
    }

    /// A tensor with a copy of `values`, in memory of the planned kind.
    ///
    /// # Errors
    /// As [`zeros`](Self::zeros); the shape does not have as many elements.
    pub fn from_slice<T: Element>(self, values: &[T], shape: impl Into<Shape>) -> Result<TransferTensor<T>> {
        let shape = shape.into();
        check_elements(&shape, values.len())?;
        self.fresh(shape, size_of_val(values), Init::Copy(bytes_of(values)))
    }

    fn fresh<T: Element>(self, shape: Shape, bytes: usize, init: Init<'_>) -> Result<TransferTensor<T>> {
        let mut decision = self.decide(bytes, HostMemory::Any)?;
        let state = match decision.strategy {
            _ if bytes == 0 => State::default(),
            Strategy::Streamed => match (init, self.device) {
                (Init::Copy(values), Some(device)) => {
                    on_host_only(filled(pinned_or_pageable(device, bytes)?, &Init::Copy(values))?)
                }
                // Current nowhere: zeros, made where they are first asked for.
                _ => State::default(),
            },
            _ => both_sides(self.shared_region(&mut decision, bytes, &init)?),
        };
        let store = Store::new::<T>(self.device.cloned(), bytes, decision, None, state);
        Ok(TransferTensor::new(store, shape))
    }

    /// A tensor whose elements are a buffer's, valid and all that it has.
    ///
    /// # Errors
    /// As [`zeros`](Self::zeros).
    pub(super) fn in_buffer<T: Element>(self, buffer: PinnedBuffer, shape: Shape) -> Result<TransferTensor<T>> {
        check_elements(&shape, buffer.len() / size_of::<T>())?;
        let mut decision = self.decide(buffer.len(), HostMemory::Any)?;
        let Some(device) = self.device else {
            return Err(Error::new(Kind::HostOnly { operation: "a tensor in pinned memory" }));
        };
        let (bytes, visible) = (buffer.len(), buffer.device_address().is_some());
        let region = buffer_region(device, buffer);
        let state = if decision.strategy == Strategy::Streamed || !visible {
            on_host_only(region)
        } else {
            if decision.backing != Backing::Pinned {
                decision.reasons.push(format!("the elements are in pinned memory, not in {} memory", decision.backing));
                decision.backing = Backing::Pinned;
            }
            both_sides(region)
        };
        Ok(TransferTensor::new(Store::new::<T>(Some(device.clone()), bytes, decision, None, state), shape))
    }

    /// Memory that both sides see, of the decided kind; of another kind where that is refused and none was forced.
    pub(super) fn shared_region(&self, decision: &mut Decision, bytes: usize, init: &Init<'_>) -> Result<Region> {
        let Some(device) = self.device else { return filled(pageable_region(bytes, None)?, init) };
        let planned = decision.backing;
        let refused = match region_of(device, planned, bytes).and_then(|region| filled(region, init)) {
            Ok(region) => return Ok(region),
            Err(error) if self.request.backing.is_some() => return Err(error),
            Err(error) => error,
        };
        for backing in [Backing::Pinned, Backing::Registered, Backing::Pageable, Backing::Managed] {
            if backing == planned {
                continue;
            }
            if let Ok(region) = region_of(device, backing, bytes).and_then(|region| filled(region, init)) {
                decision.backing = backing;
                decision
                    .reasons
                    .push(format!("{planned} memory was refused ({refused}); {backing} memory serves instead"));
                return Ok(region);
            }
        }
        Err(refused)
    }
}

pub(super) fn both_sides(region: Region) -> State {
    let region = Arc::new(region);
    let all = RangeSet::full(region.bytes());
    State {
        host: Some(region.clone()),
        device: Some(region),
        shared: true,
        host_current: all.clone(),
        device_current: all.clone(),
        unfenced: all,
    }
}

pub(super) fn on_host_only(region: Region) -> State {
    let host_current = RangeSet::full(region.bytes());
    State { host: Some(Arc::new(region)), host_current, ..State::default() }
}

/// A tensor of nothing.
pub(super) fn empty_store<T: Element>() -> Arc<Store> {
    Store::new::<T>(None, 0, Decision::host_only(), None, State::default())
}

/// Memory of one kind that both sides see; not yet set, except pageable and registered, which are zeros.
fn region_of(device: &Device, backing: Backing, bytes: usize) -> Result<Region> {
    let capabilities = device.platform().capabilities();
    let region = match backing {
        Backing::Pinned => pinned_region(device, bytes)?,
        Backing::Managed if !capabilities.concurrent_managed => {
            // Any later work on the device would make a live host reference fault.
            return Err(Error::unsupported(
                "managed memory",
                "the device has no concurrent managed access: the host may not touch it while the device works",
            ));
        }
        Backing::Managed => {
            let managed = Managed::alloc(device.context(), bytes)?;
            let address = managed.address();
            let owner = Owner::Slow(Box::new(managed));
            // SAFETY: the allocation owns `bytes` bytes at its one address.
            unsafe {
                let device_address = Some(address.as_ptr() as u64);
                Region::new(Some(address), device_address, bytes, backing, Some(device.clone()), owner)
            }
        }
        Backing::Registered => {
            let block = Block::zeroed(bytes)?;
            let host = block.address();
            // SAFETY: the block is kept with the registration, and dropped after it.
            let registration = unsafe { Registration::new(device.context(), host, bytes, false)? };
            let address = Some(registration.device());
            let owner = Owner::Slow(Box::new(Registered::new(registration, block)));
            // SAFETY: the block owns `bytes` bytes, which the device sees at the registration's address.
            unsafe { Region::new(Some(host), address, bytes, backing, Some(device.clone()), owner) }
        }
        Backing::Pageable => pageable_region(bytes, Some(device.clone()))?,
        Backing::Device => {
            return Err(Error::unsupported("memory for both sides", "the host does not see the device's memory"));
        }
    };
    region.device()?;
    Ok(region)
}

/// Sets the bytes of a region that nobody else has.
fn filled(region: Region, init: &Init<'_>) -> Result<Region> {
    let host = region.host()?;
    match init {
        #[cfg(feature = "safetensors")]
        Init::Later => {}
        // Already zeros.
        Init::Zero if matches!(region.backing(), Backing::Pageable | Backing::Registered) => {}
        // SAFETY: the region is ours alone and `bytes` long.
        Init::Zero => unsafe { host.as_ptr().write_bytes(0, region.bytes()) },
        // SAFETY: as above; the values are as long as the region.
        Init::Copy(values) => unsafe {
            let len = values.len().min(region.bytes());
            std::ptr::copy_nonoverlapping(values.as_ptr(), host.as_ptr(), len);
        },
    }
    Ok(region)
}
