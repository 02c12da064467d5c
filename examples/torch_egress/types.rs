//! The structs and constants of `transfer_tensor.h`, field by field.

use std::ffi::c_void;

/// The version of the interface; it changes when a struct or a function does.
pub const TT_EGRESS_ABI: u32 = 1;
/// A time-out that never is over.
pub const TT_FOREVER: u32 = u32::MAX;
/// Items come as their copies end.
pub const TT_ORDER_COMPLETION: u32 = 0;
/// Items come in the order of their submits.
pub const TT_ORDER_SUBMISSION: u32 = 1;

/// Called with its `user` when the device is done with the memory of a submit.
pub type TtRelease = unsafe extern "C" fn(user: *mut c_void);

/// What a pool is to be; zeroes are defaults.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct TtOptions {
    /// Number of the device, as CUDA counts.
    pub device: u32,
    /// Threads that put results into the queue of `next`; 0: the thread that sees copies end does it.
    pub workers: u32,
    /// How many items there may be at a time, under way or not yet given back; 0: 64.
    pub capacity: u32,
    /// [`TT_ORDER_COMPLETION`] or [`TT_ORDER_SUBMISSION`].
    pub order: u32,
    /// How many bytes these may have together; 0: half of what the host can allocate.
    pub budget: u64,
    /// How long `submit` waits for room; 0: not at all.
    pub room_timeout_ms: u32,
    /// 0.
    pub reserved: u32,
}

/// An item that `next` gave.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct TtOutput {
    /// For `release`; 0, if the item failed: there is nothing to release then.
    pub output: u64,
    /// Its bytes on the host.
    pub data: *const u8,
    /// How many.
    pub bytes: u64,
    /// As submitted.
    pub tag: u64,
    /// 0, or why it failed.
    pub error: i32,
    /// 0.
    pub reserved: i32,
}

impl Default for TtOutput {
    fn default() -> Self {
        Self { output: 0, data: std::ptr::null(), bytes: 0, tag: 0, error: 0, reserved: 0 }
    }
}

/// What became of the items that were open when a pool was shut down.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct TtShutdown {
    /// Delivered to the queue of `next`.
    pub delivered: u64,
    /// Failed.
    pub failed: u64,
    /// Not in time.
    pub abandoned: u64,
}

/// Numbers of a pool since it was made.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct TtStats {
    /// Items taken.
    pub submitted: u64,
    /// Items whose copy has not run.
    pub in_flight: u64,
    /// Items that were delivered to the queue of `next`.
    pub delivered: u64,
    /// Items that ended with an error.
    pub failed: u64,
    /// Bytes that came to the host.
    pub bytes: u64,
    /// Outputs that take room: under way, in the queue, or not yet given back.
    pub kept: u64,
    /// Their bytes.
    pub kept_bytes: u64,
    /// How long all items together took from submit to the host, in nanoseconds.
    pub copying_ns: u64,
    /// Memory of submits whose release callback is yet to be called.
    pub lent: u64,
    /// Release callbacks that were called.
    pub released: u64,
    /// 1, if the device faulted: nothing comes any more.
    pub faulted: u32,
    /// 1, if the pool takes nothing any more.
    pub closed: u32,
}
