//! Copies between the bytes of a host region and those of a device region, each a use of both.

use std::ops::Range;
use std::sync::Arc;

use super::region::{Region, Submitted};
use crate::device::Device;
use crate::driver::{Event, Stream, Way, copy};
use crate::error::{Error, Kind, Result};
use crate::trace;

/// A region, and where in it the bytes begin.
pub(super) type Place<'a> = (&'a Arc<Region>, usize);

fn range((region, start): Place<'_>, bytes: usize) -> Result<Range<usize>> {
    match start.checked_add(bytes) {
        Some(end) if end <= region.bytes() => Ok(start..end),
        end => {
            let (end, len) = (end.unwrap_or(usize::MAX), region.bytes());
            Err(Error::new(Kind::Range { start, end, len, unit: "bytes" }))
        }
    }
}

/// Submits bringing `bytes` bytes from host to device on `stream`. Closing the uses, with an event that lies behind the copy, is the
/// caller's. The context is current.
pub(super) fn up(
    device: &Device,
    source: Place<'_>,
    target: Place<'_>,
    bytes: usize,
    stream: &Stream,
    submitted: &mut Submitted,
) -> Result<()> {
    let _range = trace::range(c"upload", bytes);
    let (from, to) = (range(source, bytes)?, range(target, bytes)?);
    let ((source, _), (target, _)) = (source, target);
    target.order(stream, &to, true)?;
    let address = target.device()? + to.start as u64;
    // SAFETY: the part lies inside the region.
    let host = unsafe { source.host()?.as_ptr().add(from.start) };
    let write = target.open(stream, &to, true);
    if source.is_pinned() || device.copies_pageable() {
        source.order(stream, &from, false)?;
        let read = source.open(stream, &from, false);
        // SAFETY: both ends are inside their regions, which track the copy and outlive it.
        unsafe { copy::host_to_device(address, host, bytes, stream)? };
        submitted.push(source, read);
        submitted.copies(bytes);
    } else {
        source.wait(&from, false)?;
        let read = source.open(stream, &from, false);
        // SAFETY: as above; the source is read before the call returns, while who calls keeps others from writing to it.
        unsafe { device.copy_up(address, host, bytes, stream)? };
        // Only if the call fails may the driver still be reading.
        source.passed(read);
    }
    submitted.push(target, write);
    Ok(())
}

/// Submits bringing `bytes` bytes from device to host on `stream`; to ordinary memory, it is done when this returns. The context is current.
pub(super) fn down(device: &Device, source: Place<'_>, target: Place<'_>, bytes: usize, stream: &Stream) -> Result<()> {
    let _range = trace::range(c"download", bytes);
    let (from, to) = (range(source, bytes)?, range(target, bytes)?);
    let ((source, _), (target, _)) = (source, target);
    source.order(stream, &from, false)?;
    let address = source.device()? + from.start as u64;
    // SAFETY: the part lies inside the region.
    let host = unsafe { target.host()?.as_ptr().add(to.start) };
    if target.is_pinned() || device.copies_pageable() {
        target.order(stream, &to, true)?;
        let (read, write) = (source.open(stream, &from, false), target.open(stream, &to, true));
        // SAFETY: both ends are inside their regions, which track the copy and outlive it.
        unsafe { copy::device_to_host(host, address, bytes, stream)? };
        let event = Arc::new(device.behind_copy(stream, Way::Down, bytes)?);
        source.close(read, event.clone());
        target.close(write, event);
    } else {
        target.wait(&to, true)?;
        // Done when the call returns; if it fails, the driver may still be at it, and both uses stay open.
        let (read, write) = (source.open(stream, &from, false), target.open(stream, &to, true));
        // SAFETY: as above; while the caller keeps others from looking at the target's bytes.
        unsafe { device.copy_down(host, false, address, bytes, stream)? };
        target.passed(write);
        source.close(read, Arc::new(Event::record(device.context(), stream)?));
    }
    Ok(())
}
