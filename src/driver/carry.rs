//! A device's copies from and to memory that is not page-locked: which way each goes.

use super::copy;
use super::host::{HostSink, HostSource};
use super::stream::Stream;
use crate::copy::pieces::Part;
use crate::copy::{Sink, Source};
use crate::device::Device;
use crate::error::Result;
use crate::platform::MemoryModel;

/// Memory below this is seldom new, though nobody has used it yet: the allocator had it before (glibc maps from 32 MiB on, at the
/// latest, whatever its threshold has grown to: mallopt(3)).
const MAPPED: usize = 32 << 20;

impl Device {
    /// Whether the copy engines reach ordinary memory themselves: then a detour through page-locked memory only costs.
    pub(crate) fn copies_pageable(&self) -> bool {
        self.platform().model() == MemoryModel::Coherent
    }

    /// Brings a source's bytes to places on the device, in the order of `stream`; see [`Staging::up`].
    ///
    /// # Safety
    /// As [`Staging::up`].
    pub(crate) unsafe fn stage_up_scattered(&self, parts: &[Part], source: &dyn Source, stream: &Stream) -> Result<()> {
        let _range = crate::trace::range(c"stage up", parts.iter().map(|part| part.source.len()).sum::<usize>());
        // SAFETY: the caller's.
        unsafe { self.staging().up(parts, source, &self.tuning(), stream).map(drop) }
    }

    /// As [`stage_up_scattered`](Self::stage_up_scattered), to one place.
    ///
    /// # Safety
    /// As [`Staging::up`].
    pub(crate) unsafe fn stage_up(
        &self,
        target: u64,
        source: &dyn Source,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.stage_up_scattered(&[Part { source: 0..bytes, target }], source, stream) }
    }

    /// Brings the device's bytes to a sink, in the order of `stream`; see [`Staging::down`].
    ///
    /// # Safety
    /// As [`Staging::down`].
    pub(crate) unsafe fn stage_down(&self, sink: &dyn Sink, source: u64, bytes: usize, stream: &Stream) -> Result<()> {
        let _range = crate::trace::range(c"stage down", bytes);
        // SAFETY: the caller's.
        unsafe { self.staging().down(sink, None, source, bytes, &self.tuning(), stream).map(drop) }
    }

    /// Brings ordinary host memory to the device, in the order of `stream`, the way that is fastest for its size. On return
    /// the source has been read.
    ///
    /// # Safety
    /// `source` is readable for `bytes` bytes during the call; as [`Staging::up`].
    pub(crate) unsafe fn copy_up(&self, target: u64, source: *const u8, bytes: usize, stream: &Stream) -> Result<()> {
        if self.copies_pageable() {
            // SAFETY: the caller's; the wait ends the copy before the source can go.
            let submitted = unsafe { copy::host_to_device(target, source, bytes, stream) };
            let _range = crate::trace::range(c"wait", bytes);
            return stream.synchronize().and(submitted);
        }
        // SAFETY: the caller's.
        match unsafe { HostSource::new(source) } {
            // SAFETY: the caller's.
            Some(source) => unsafe { self.stage_up(target, &source, bytes, stream) },
            None => Ok(()),
        }
    }

    /// Brings the device's bytes to ordinary host memory, in the order of `stream`; done when it returns. `fresh`: nobody has
    /// touched that memory yet.
    ///
    /// # Safety
    /// `target` is writable for `bytes` bytes, and nobody looks there during the call; as [`Staging::down`].
    pub(crate) unsafe fn copy_down(
        &self,
        target: *mut u8,
        fresh: bool,
        source: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        if self.copies_pageable() {
            // SAFETY: the caller's; the wait ends the copy before the target is looked at.
            let submitted = unsafe { copy::device_to_host(target, source, bytes, stream) };
            let _range = crate::trace::range(c"wait", bytes);
            return stream.synchronize().and(submitted);
        }
        // SAFETY: the caller's.
        match unsafe { HostSink::new(target, bytes) } {
            // SAFETY: the caller's.
            Some(sink) => unsafe {
                let _range = crate::trace::range(c"stage down", bytes);
                let fresh = (fresh && bytes >= MAPPED).then(|| sink.phase());
                self.staging().down(&sink, fresh, source, bytes, &self.tuning(), stream).map(drop)
            },
            None => Ok(()),
        }
    }
}
