//! What a device tells about the program.

#![deny(unsafe_code)]

/// A call of the driver interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Position among everything that happened in the process; later calls have larger numbers.
    pub seq: u64,
    /// The exported name, with its version.
    pub name: String,
    /// The calling thread.
    pub thread: u64,
    /// The handle of the thread's current context, 0 for none.
    pub context: u64,
    /// The stream handle that was passed, `u64::MAX` where the call takes none.
    pub stream: u64,
    /// Bytes the call is about.
    pub bytes: u64,
    /// The status it returned.
    pub result: u32,
    /// Other arguments; which, depends on the call. For copies: destination and source.
    pub args: [u64; 4],
}

/// Bytes and violations of a device. It can be read also after all contexts are gone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Device memory allocated now.
    pub device_bytes: u64,
    /// Device memory allocated at most.
    pub device_bytes_peak: u64,
    /// Memory from `cuMemHostAlloc` now.
    pub pinned_bytes: u64,
    /// Memory from `cuMemHostAlloc` at most.
    pub pinned_bytes_peak: u64,
    /// Memory registered now.
    pub registered_bytes: u64,
    /// Memory registered at most.
    pub registered_bytes_peak: u64,
    /// Managed memory now.
    pub managed_bytes: u64,
    /// Managed memory at most.
    pub managed_bytes_peak: u64,
    /// Copied to the device from page-locked memory.
    pub copied_h2d_pinned: u64,
    /// Copied to the device from pageable memory.
    pub copied_h2d_pageable: u64,
    /// Copied from the device to page-locked memory.
    pub copied_d2h_pinned: u64,
    /// Copied from the device to pageable memory.
    pub copied_d2h_pageable: u64,
    /// Copied on the device or between devices.
    pub copied_d2d: u64,
    /// Kernels that ran.
    pub kernels: u64,
    /// Uses of freed memory and unordered overlapping uses, one sentence each.
    pub violations: Vec<String>,
}

/// Virtual time in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Clock {
    /// The end of the stream's last step that is done.
    pub stream_ns: u64,
    /// The end of the last copy on the engine for copies to the device.
    pub h2d_ns: u64,
    /// The end of the last copy on the engine for copies from the device.
    pub d2h_ns: u64,
    /// The end of the latest step of the device.
    pub now_ns: u64,
    /// The calling thread's time: it moves when the thread waits for the device.
    pub host_ns: u64,
}

/// What the driver takes an address for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// It knows nothing of it.
    Pageable,
    /// `cuMemAlloc` and its stream-ordered relatives.
    Device,
    /// `cuMemHostAlloc`.
    Pinned,
    /// `cuMemHostRegister`.
    Registered,
    /// `cuMemAllocManaged`.
    Managed,
}
