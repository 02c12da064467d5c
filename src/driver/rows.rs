//! Rows: which way they go, and packing them.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::batch::{Copies, Counted, MOST_PITCH, Rectangle, is_pinned};
use super::context::Way;
use super::pieces::{DIRECT, DeviceEnd, HostTarget, around};
use super::slots::{ROUND, Slots, rounds};
use super::stream::Stream;
use super::{Event, copy};
use crate::copy::{Sink, Source};
use crate::device::Device;
use crate::error::{Error, Kind, Result};
use crate::rows::geometry::Geometry;

/// Rows at least this long are worth the device's two-dimensional copy.
const WIDE: usize = 512;

/// So few rows are, however short.
const FEW: usize = 64;

/// How much more than the rows may be brought to the host to have them.
const MOST_EXTRA: usize = 8;

/// How rows go.
enum Route {
    /// From or to where they are on the host, by the device.
    Direct,
    /// One block on the device.
    Block,
    /// The device packs or unpacks them.
    Rectangles,
    /// More of the device's memory than the rows.
    Enclosing,
}

fn route(geometry: &Geometry, host: *const u8, device_may: bool, way: Way) -> Result<Route> {
    let pitches = geometry.host_pitch.max(geometry.device_pitch);
    let by_rectangle = geometry.width >= WIDE && geometry.host_pitch >= geometry.width && pitches <= MOST_PITCH;
    let as_it_is = geometry.is_block() || (geometry.host_has_rows() && by_rectangle);
    if device_may && as_it_is && geometry.bytes() >= DIRECT && is_pinned(host, geometry.on_host()) {
        return Ok(Route::Direct);
    }
    if geometry.device_is_block() {
        return Ok(Route::Block);
    }
    if geometry.width >= WIDE || geometry.rows <= FEW {
        return Ok(Route::Rectangles);
    }
    if way == Way::Down && geometry.on_device() <= geometry.bytes().saturating_mul(MOST_EXTRA) {
        return Ok(Route::Enclosing);
    }
    let element = geometry.element.max(1);
    let signed = |bytes: usize| isize::try_from(bytes / element).unwrap_or(isize::MAX);
    let (shape, strides) = (vec![geometry.rows, geometry.width / element], vec![signed(geometry.device_pitch), 1]);
    Err(Error::new(Kind::NonContiguous { shape, strides }))
}

/// Copies bytes; elements without a call.
///
/// # Safety
/// As `copy_nonoverlapping`.
#[inline]
unsafe fn copy_bytes(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's; arrays of bytes need no alignment.
    unsafe {
        match len {
            1 => to.write(from.read()),
            2 => to.cast::<[u8; 2]>().write(from.cast::<[u8; 2]>().read()),
            4 => to.cast::<[u8; 4]>().write(from.cast::<[u8; 4]>().read()),
            8 => to.cast::<[u8; 8]>().write(from.cast::<[u8; 8]>().read()),
            _ => std::ptr::copy_nonoverlapping(from, to, len),
        }
    }
}

/// The rows, packed. The host's memory is as long as the geometry reaches.
struct Gather<'r> {
    geometry: &'r Geometry,
    host: &'r [u8],
    /// The packed byte that counts as the first.
    start: usize,
}

impl Source for Gather<'_> {
    fn fill(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        let start = self.start + offset;
        let (from, to) = (self.host.as_ptr(), into.as_mut_ptr());
        self.geometry.each(start..start + into.len(), |at, host, len| {
            debug_assert!(at + len <= into.len() && host + len <= self.host.len());
            // SAFETY: within `into`, and within the host's memory, which is as long as the geometry reaches.
            unsafe { copy_bytes(from.add(host), to.add(at), len) };
        });
        Ok(())
    }
}

/// Unpacks rows.
struct Scatter<'r, 'a> {
    geometry: &'r Geometry,
    host: &'r HostTarget<'a>,
    start: usize,
}

impl Scatter<'_, '_> {
    fn put(&self, start: usize, from: &[u8]) -> Result<()> {
        self.host.check(from)?;
        let (bytes, to) = (from.as_ptr(), self.host.start().as_ptr());
        self.geometry.each(start..start + from.len(), |at, host, len| {
            debug_assert!(at + len <= from.len() && host + len <= self.host.bytes());
            // SAFETY: within `from`, and within the host's memory, which is as long as the geometry reaches and borrowed
            // exclusively; each packed byte has a place of its own there, and threads take different ones.
            unsafe { copy_bytes(bytes.add(at), to.add(host), len) };
        });
        Ok(())
    }
}

impl Sink for Scatter<'_, '_> {
    fn take(&self, offset: usize, from: &[u8]) -> Result<()> {
        self.put(self.start + offset, from)
    }
}

/// Unpacks rows from a block that holds more than them.
struct Pick<'r, 'a>(Scatter<'r, 'a>);

impl Sink for Pick<'_, '_> {
    fn take(&self, offset: usize, from: &[u8]) -> Result<()> {
        for (packed, at) in self.0.geometry.rows_in(offset..offset + from.len()) {
            self.0.put(packed.start, from.get(at..at + packed.len()).unwrap_or_default())?;
        }
        Ok(())
    }
}

/// The rows on the device.
struct Transfer<'t> {
    device: &'t Device,
    stream: &'t Stream,
    geometry: &'t Geometry,
    address: u64,
    copies: Copies,
    counted: Counted,
}

impl Transfer<'_> {
    /// From or to page-locked memory where it is; done when it returns.
    ///
    /// # Safety
    /// The host's memory is as long as the geometry reaches, page-locked, borrowed for the call, and nobody touches it.
    unsafe fn direct(&mut self, way: Way, host: NonNull<u8>) -> Result<()> {
        let Geometry { rows, width, host_pitch, device_pitch, .. } = *self.geometry;
        let host = host.as_ptr();
        // SAFETY: the caller's, and borrowed device memory; waited for below.
        unsafe {
            match way {
                Way::Up if rows <= 1 => copy::host_to_device(self.address, host, width, self.stream)?,
                Way::Down if rows <= 1 => copy::device_to_host(host, self.address, width, self.stream)?,
                _ => Rectangle { device: self.address, device_pitch, host, host_pitch, width, rows }.submit(
                    way,
                    self.stream,
                    &mut self.counted,
                )?,
            }
        }
        let event = Event::record(self.device.context(), self.stream)?;
        let _range = crate::trace::range(c"wait", self.geometry.bytes());
        event.wait()
    }

    /// Submits some whole rows from or to where they are packed.
    ///
    /// # Safety
    /// The packed rows are page-locked, and stay as they are until the stream has passed.
    unsafe fn rectangle(&mut self, way: Way, packed: std::ops::Range<usize>, host: NonNull<u8>) -> Result<()> {
        let Geometry { width, device_pitch, .. } = *self.geometry;
        let (first, rows) = (packed.start / width, packed.len() / width);
        let device = self.address + (first * device_pitch) as u64;
        if device_pitch > MOST_PITCH {
            self.copies.clear();
            for row in 0..rows {
                let at = device + (row * device_pitch) as u64;
                self.copies.push(at, host.as_ptr().wrapping_add(row * width), width);
            }
            // SAFETY: the caller's, and borrowed device memory.
            return unsafe { self.copies.submit(self.device.context(), way, self.stream, &mut self.counted) };
        }
        let rectangle = Rectangle { device, device_pitch, host: host.as_ptr(), host_pitch: width, width, rows };
        // SAFETY: the caller's, and borrowed device memory.
        unsafe { rectangle.submit(way, self.stream, &mut self.counted) }
    }
}

/// Brings rows to the device: what [`Device::upload_rows`] says.
pub(crate) fn upload<'a>(
    device: &Device,
    geometry: &Geometry,
    source: &[u8],
    target: DeviceEnd<'a>,
    cuda: &'a Arc<CudaStream>,
) -> Result<()> {
    let bytes = geometry.bytes();
    if bytes == 0 {
        return Ok(());
    }
    check_reach(geometry, source.len(), target.bytes())?;
    let start = NonNull::from(source).cast::<u8>();
    around(device, cuda, vec![target], "an upload of rows", |stream, addresses| {
        let address = addresses.first().copied().unwrap_or(0);
        let (copies, counted) = (Copies::default(), Counted::default());
        let mut way = Transfer { device, stream, geometry, address, copies, counted };
        let source = |start| Gather { geometry, host: source, start };
        match route(geometry, start.as_ptr(), true, Way::Up)? {
            // SAFETY: the source is page-locked, and only read.
            Route::Direct => unsafe { way.direct(Way::Up, start) },
            Route::Block | Route::Enclosing => {
                let mut slots = Slots::new(device, bytes);
                if bytes > ROUND && slots.pinned() {
                    // SAFETY: borrowed device memory of that length.
                    return unsafe { device.stage_up(address, &source(0), bytes, stream) };
                }
                slots.up(stream, rounds(0..bytes, ROUND), &source(0), |round, slot| {
                    let packed = slot.start().as_ptr();
                    // SAFETY: the slot is ours until its event has passed.
                    unsafe { copy::host_to_device(address + round.start as u64, packed, round.len(), stream) }
                })
            }
            Route::Rectangles if geometry.width > ROUND => (0..geometry.rows).try_for_each(|row| {
                let at = address + (row * geometry.device_pitch) as u64;
                // SAFETY: borrowed device memory of that length.
                unsafe { device.stage_up(at, &source(row * geometry.width), geometry.width, stream) }
            }),
            Route::Rectangles => {
                let step = ROUND / geometry.width * geometry.width;
                // SAFETY: the slot is ours until its event has passed.
                Slots::new(device, bytes).up(stream, rounds(0..bytes, step), &source(0), |round, slot| unsafe {
                    way.rectangle(Way::Up, round, slot.start())
                })
            }
        }
    })
}

/// Brings rows to the host: what [`Device::download_rows`] says.
pub(crate) fn download<'a>(
    device: &Device,
    geometry: &Geometry,
    target: HostTarget<'_>,
    source: DeviceEnd<'a>,
    cuda: &'a Arc<CudaStream>,
) -> Result<()> {
    let bytes = geometry.bytes();
    if bytes == 0 {
        return Ok(());
    }
    check_reach(geometry, target.bytes(), source.bytes())?;
    geometry.check_apart_on_host()?;
    around(device, cuda, vec![source], "a download of rows", |stream, addresses| {
        let address = addresses.first().copied().unwrap_or(0);
        let (copies, counted) = (Copies::default(), Counted::default());
        let mut way = Transfer { device, stream, geometry, address, copies, counted };
        let sink = |start| Scatter { geometry, host: &target, start };
        match route(geometry, target.start().as_ptr(), target.takes_anything(), Way::Down)? {
            // SAFETY: the target is page-locked, borrowed exclusively, and may hold any bytes.
            Route::Direct => unsafe { way.direct(Way::Down, target.start()) },
            Route::Block => down_block(device, address, bytes, &sink(0), stream),
            Route::Enclosing => down_block(device, address, geometry.on_device(), &Pick(sink(0)), stream),
            Route::Rectangles if geometry.width > ROUND => (0..geometry.rows).try_for_each(|row| {
                let at = address + (row * geometry.device_pitch) as u64;
                // SAFETY: borrowed device memory of that length.
                unsafe { device.stage_down(&sink(row * geometry.width), at, geometry.width, stream) }
            }),
            Route::Rectangles => {
                let step = ROUND / geometry.width * geometry.width;
                // SAFETY: the slot is ours until its event has passed.
                Slots::new(device, bytes).down(stream, 0..bytes, step, &sink(0), |round, packed| unsafe {
                    way.rectangle(Way::Down, round, packed)
                })
            }
        }
    })
}

/// One block of borrowed device memory.
fn down_block(device: &Device, address: u64, bytes: usize, sink: &dyn Sink, stream: &Stream) -> Result<()> {
    let mut slots = Slots::new(device, bytes);
    if bytes > ROUND && slots.pinned() {
        // SAFETY: borrowed device memory of that length.
        return unsafe { device.stage_down(sink, address, bytes, stream) };
    }
    slots.down(stream, 0..bytes, ROUND, sink, |round, packed| {
        // SAFETY: the slot is ours until its event has passed.
        unsafe { copy::device_to_host(packed.as_ptr(), address + round.start as u64, round.len(), stream) }
    })
}

/// What the unsafe code above relies on, whatever its callers have checked.
fn check_reach(geometry: &Geometry, host: usize, device: usize) -> Result<()> {
    let fits = |end: usize, len: usize| {
        if end <= len { Ok(()) } else { Err(Error::new(Kind::Range { start: 0, end, len, unit: "bytes" })) }
    };
    fits(geometry.on_host(), host)?;
    fits(geometry.on_device(), device)
}
