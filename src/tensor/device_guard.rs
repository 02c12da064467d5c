//! Device access: addresses of a tensor's bytes for work on one stream, from the guard's making to its drop.
//!
//! The guards go straight into cudarc's launches and copies. They never give out a `CudaView` in safe code: a view outlives
//! its guard too easily, and cudarc's tracking of it would not see ours.

use std::cell::{Cell, OnceCell};
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg,
    SyncOnDrop,
};

use super::region::{Region, Submitted};
use super::store::Store;
use super::track::UseId;
use crate::device::Device;
use crate::driver::memory::{alias_slice, forget_alias};
use crate::driver::{Event, Stream};
use crate::element::Element;
use crate::error::{Error, Kind, Result};

/// A tensor's elements, for work on one stream to read.
///
/// # Ordering
/// The stream has been made to wait for earlier writes, and for the copy to the device where there is one. What is
/// submitted to the stream while the guard lives is covered: later writes, host access and the freeing of the memory come
/// after it. **A kernel that gets this guard must run on the guard's stream** (launching is `unsafe` in cudarc; this is
/// one of its duties). Asking [`DevicePtr`] for another stream is allowed and ordered, but makes the next conflicting host
/// access, and the freeing, wait for the whole context.
///
/// Forgetting the guard (`mem::forget`) is sound: the tensor then waits for the whole stream.
pub struct DeviceRef<'a, T: Element>(Access<'a, T>);

/// A tensor's elements, for work on one stream to read and write. See [`DeviceRef`] for the ordering.
pub struct DeviceMut<'a, T: Element>(Access<'a, T>);

struct Access<'a, T: Element> {
    address: u64,
    len: usize,
    /// `None` for a tensor without elements.
    used: Option<Used>,
    /// Other streams than the guard's were given the address since the last wait for them.
    lent: Cell<bool>,
    /// That was ever so.
    foreign: Cell<bool>,
    stream: Stream,
    alias: OnceCell<CudaSlice<T>>,
    /// Not Send nor Sync: with the per-thread default stream, another thread's work would run on another queue.
    _borrow: PhantomData<(&'a [T], *const ())>,
}

const OPERATION: &str = "device access";

struct Used {
    region: Arc<Region>,
    /// The guard's own use.
    guard: UseId,
    write: bool,
    /// The guard's own use, and those of the copies that were made for it.
    submitted: Submitted,
}

impl<'a, T: Element> Access<'a, T> {
    fn new(store: &'a Store, range: &Range<usize>, stream: &Arc<CudaStream>, write: bool) -> Result<Self> {
        let device = store.need_device(OPERATION)?;
        Self::of_region(device, range, stream, write, |stream| store.on_device(range, write, stream))
    }

    /// Of the region that `find` gives, with the uses of the copies that brought the bytes there. The context is current then.
    fn of_region(
        device: &Device,
        range: &Range<usize>,
        stream: &Arc<CudaStream>,
        write: bool,
        find: impl FnOnce(&Stream) -> Result<(Arc<Region>, Submitted)>,
    ) -> Result<Self> {
        if !device.owns(stream) {
            return Err(Error::new(Kind::WrongContext { operation: OPERATION }));
        }
        let stream = Stream::of_caller(stream);
        let mut access = Self {
            address: 0,
            len: range.len() / size_of::<T>(),
            used: None,
            lent: Cell::new(false),
            foreign: Cell::new(false),
            stream,
            alias: OnceCell::new(),
            _borrow: PhantomData,
        };
        if range.is_empty() {
            return Ok(access);
        }
        let _bound = device.context().to_submit()?;
        access.stream.check_not_capturing(OPERATION)?;
        let (region, mut submitted) = find(&access.stream)?;
        region.order(&access.stream, range, write)?;
        access.address = region.device()? + range.start as u64;
        let id = region.open(&access.stream, range, write);
        submitted.push(&region, id);
        access.used = Some(Used { region, guard: id, write, submitted });
        Ok(access)
    }

    /// The address, for work on `stream`.
    fn address_on(&self, stream: &CudaStream, write: bool) -> u64 {
        let Some(used) = &self.used else { return 0 };
        // cudarc's trait has no way to say no: a null address makes the driver refuse the call that follows, so that a
        // capture can not get at the memory, and no work runs that was not ordered.
        self.prepare(used, stream, write).map_or(0, |()| self.address)
    }

    fn prepare(&self, used: &Used, stream: &CudaStream, write: bool) -> Result<()> {
        let own = self.stream.cuda();
        let same = stream.cu_stream() == own.cu_stream() && stream.context().cu_ctx() == own.context().cu_ctx();
        let _bound = crate::driver::Bound::enter(stream.context())?;
        crate::driver::stream::check_not_capturing(stream.cu_stream(), "handing an address to a stream")?;
        if used.write && self.lent.get() {
            // What another stream was given before comes first, and has no event to wait for.
            used.region.wait_foreign(used.guard)?;
            self.lent.set(false);
        }
        if !same {
            let device = used.region.on().ok_or_else(|| Error::new(Kind::HostOnly { operation: "device access" }))?;
            let event = {
                let _bound = device.context().enter()?;
                Event::record(device.context(), &self.stream)?
            };
            crate::driver::stream::wait_on(stream, &event)?;
            // From here on the address may be in use where we can not see it.
            used.region.mark_foreign(used.guard, stream.context(), write || used.write);
            self.lent.set(true);
            self.foreign.set(true);
        }
        Ok(())
    }

    fn alias(&self) -> Result<&CudaSlice<T>> {
        if let Some(alias) = self.alias.get() {
            return Ok(alias);
        }
        let alias = alias_slice::<T>(self.stream.cuda(), self.address, self.len)?;
        Ok(self.alias.get_or_init(|| alias))
    }
}

impl<T: Element> Drop for Access<'_, T> {
    fn drop(&mut self) {
        if let Some(alias) = self.alias.take() {
            forget_alias(alias);
        }
        let Some(used) = &mut self.used else { return };
        if self.foreign.get() {
            used.region.close_foreign(used.guard, !self.lent.get());
        }
        let Some(device) = used.region.on() else { return };
        // If any of this fails the use stays open, and whoever comes next waits for the whole stream.
        let recorded = device.context().to_submit().and_then(|_bound| {
            self.stream.check_not_capturing("dropping a device guard")?;
            Event::record(device.context(), &self.stream)
        });
        if let Ok(event) = recorded {
            used.submitted.close(&Arc::new(event));
        }
    }
}

impl<'a, T: Element> DeviceRef<'a, T> {
    pub(super) fn new(store: &'a Store, range: &Range<usize>, stream: &Arc<CudaStream>) -> Result<Self> {
        Access::new(store, range, stream, false).map(Self)
    }

    /// Of a region whose bytes are there, or will be behind its uses.
    pub(super) fn over(
        region: &'a Arc<Region>,
        device: &Device,
        range: &Range<usize>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self> {
        Access::of_region(device, range, stream, false, |_| Ok((region.clone(), Submitted::default()))).map(Self)
    }

    /// The device address of the first element; 0 where there is none. Valid for work on the guard's stream that is
    /// submitted while the guard lives.
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// The elements as cudarc's view, for libraries that take nothing else.
    ///
    /// # Errors
    /// The guard's stream belongs to a context that is not a device's primary one.
    ///
    /// # Safety
    /// The view is used on the guard's stream only, and not after the guard is gone, also not through views made from it.
    /// cudarc does not track its uses.
    pub unsafe fn as_cuda_view(&self) -> Result<CudaView<'_, T>> {
        self.0.alias().map(CudaSlice::as_view)
    }
}

impl<'a, T: Element> DeviceMut<'a, T> {
    /// The caller holds the tensor exclusively for `'a`.
    pub(super) fn new(store: &'a Store, range: &Range<usize>, stream: &Arc<CudaStream>) -> Result<Self> {
        store.check_writable()?;
        Access::new(store, range, stream, true).map(Self)
    }

    /// As [`DeviceRef::over`]; the caller holds the range exclusively for `'a`.
    pub(super) fn over(
        region: &'a Arc<Region>,
        device: &Device,
        range: &Range<usize>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self> {
        Access::of_region(device, range, stream, true, |_| Ok((region.clone(), Submitted::default()))).map(Self)
    }

    /// As [`DeviceRef::address`].
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// As [`DeviceRef::as_cuda_view`].
    ///
    /// # Errors
    /// As [`DeviceRef::as_cuda_view`].
    ///
    /// # Safety
    /// As [`DeviceRef::as_cuda_view`].
    pub unsafe fn as_cuda_view(&self) -> Result<CudaView<'_, T>> {
        self.0.alias().map(CudaSlice::as_view)
    }

    /// As [`DeviceRef::as_cuda_view`], to write.
    ///
    /// # Errors
    /// As [`DeviceRef::as_cuda_view`].
    ///
    /// # Safety
    /// As [`DeviceRef::as_cuda_view`].
    pub unsafe fn as_cuda_view_mut(&mut self) -> Result<CudaViewMut<'_, T>> {
        self.0.alias()?;
        match self.0.alias.get_mut() {
            Some(alias) => Ok(alias.as_view_mut()),
            None => Err(Error::unsupported("a view", "the alias is gone")),
        }
    }
}

impl<T: Element> DeviceSlice<T> for DeviceRef<'_, T> {
    fn len(&self) -> usize {
        self.0.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.0.stream.cuda()
    }
}

impl<T: Element> DeviceSlice<T> for DeviceMut<'_, T> {
    fn len(&self) -> usize {
        self.0.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.0.stream.cuda()
    }
}

impl<T: Element> DevicePtr<T> for DeviceRef<'_, T> {
    fn device_ptr<'s>(&'s self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>) {
        (self.0.address_on(stream, false), SyncOnDrop::Record(None))
    }
}

impl<T: Element> DevicePtr<T> for DeviceMut<'_, T> {
    fn device_ptr<'s>(&'s self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>) {
        (self.0.address_on(stream, false), SyncOnDrop::Record(None))
    }
}

impl<T: Element> DevicePtrMut<T> for DeviceMut<'_, T> {
    fn device_ptr_mut<'s>(&'s mut self, stream: &'s CudaStream) -> (u64, SyncOnDrop<'s>) {
        (self.0.address_on(stream, true), SyncOnDrop::Record(None))
    }
}

// SAFETY: the argument is the address, eight bytes that live as long as the borrowed guard.
unsafe impl<'a, 'b: 'a, 'c: 'b, T: Element> PushKernelArg<&'b DeviceRef<'c, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b DeviceRef<'c, T>) -> &mut Self {
        self.arg(&arg.0.address)
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, 'c: 'b, T: Element> PushKernelArg<&'b DeviceMut<'c, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b DeviceMut<'c, T>) -> &mut Self {
        self.arg(&arg.0.address)
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, 'c: 'b, T: Element> PushKernelArg<&'b mut DeviceMut<'c, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut DeviceMut<'c, T>) -> &mut Self {
        self.arg(&arg.0.address)
    }
}

impl<T: Element> fmt::Debug for DeviceRef<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceRef").field("address", &self.0.address).field("len", &self.0.len).finish_non_exhaustive()
    }
}

impl<T: Element> fmt::Debug for DeviceMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMut").field("address", &self.0.address).field("len", &self.0.len).finish_non_exhaustive()
    }
}
