//! A C interface over [`EgressPool`](transfer_tensor::EgressPool): a process that is not Rust, PyTorch say, hands over
//! memory of the device and gets it on the host. `transfer_tensor.h` is the same for C, and says what each function
//! does.
//!
//! ```text
//! submit ─► our stream waits for theirs ─► EgressPool ─► queue ─► next ─► consumer ─► release
//!                                              └► copy has passed ─► the caller's callback
//! ```
//!
//! Pools and outputs are known by numbers that are never used twice, so that one that is gone, or never was, is an
//! error and not a crash. No panic leaves a function; each ends as a code, with a text in [`tt_egress_last_error`].

mod calls;
mod code;
mod loan;
mod pool;
mod producer;
mod table;
mod types;

use std::ffi::{c_char, c_void};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

pub use code::Code;
pub use types::{
    TT_EGRESS_ABI, TT_FOREVER, TT_ORDER_COMPLETION, TT_ORDER_SUBMISSION, TtOptions, TtOutput, TtRelease, TtShutdown,
    TtStats,
};

use calls::{address, guarded, timeout};
use code::Failure;
use loan::Release;
use pool::{Landed, Next, Pool};
use producer::Before;
use table::Table;

static POOLS: LazyLock<Table<Arc<Pool>>> = LazyLock::new(Table::new);
static OUTPUTS: LazyLock<Table<Landed>> = LazyLock::new(Table::new);

fn pool(number: u64) -> Result<Arc<Pool>, Failure> {
    POOLS.get(number).ok_or_else(|| Failure::new(Code::Invalid, format!("there is no pool {number}")))
}

/// The version of this interface: [`TT_EGRESS_ABI`].
#[unsafe(no_mangle)]
pub extern "C" fn tt_egress_abi() -> u32 {
    TT_EGRESS_ABI
}

/// What went wrong in this thread's last call that returned an error, or in the item that its last `next` gave: a text
/// that ends with 0 and stays until this thread's next call. Empty, if nothing has.
#[unsafe(no_mangle)]
pub extern "C" fn tt_egress_last_error() -> *const c_char {
    calls::last_error()
}

/// Makes a pool on a device's primary context, and writes its number to `pool`.
///
/// # Safety
/// Each pointer is null or valid for its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tt_egress_create(options: *const TtOptions, pool: *mut u64) -> i32 {
    guarded(|| {
        let pool = address(pool, "pool")?;
        // SAFETY: the caller's: not null, so it is valid.
        let options = unsafe { address(options.cast_mut(), "options")?.read() };
        let number = POOLS.put(Arc::new(Pool::open(&options)?));
        // SAFETY: the caller's.
        unsafe { pool.write(number) };
        Ok(())
    })
}

/// Hands `bytes` bytes of the device at `data` to the pool, which copies them after all that `stream` was given before.
/// `release` is called with `user` once, when the copy has passed; never, if this returns an error.
///
/// # Safety
/// Until `release` is called, or this returns an error, `data` stays valid and is written by nobody whom `stream` does
/// not order before this. `stream` is 0, 1, 2 or a stream that is alive. `release` may be called on any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tt_egress_submit(
    pool: u64,
    data: u64,
    bytes: u64,
    stream: u64,
    tag: u64,
    release: Option<TtRelease>,
    user: *mut c_void,
) -> i32 {
    guarded(|| {
        let release = Release::new(release, user);
        // SAFETY: the caller's.
        unsafe { self::pool(pool)?.submit(data, bytes, stream, tag, release) }
    })
}

/// Waits for the next item, and says in `output` what became of it. It is given once, to one of those who wait.
///
/// # Safety
/// `output` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tt_egress_next(pool: u64, timeout_ms: u32, output: *mut TtOutput) -> i32 {
    guarded(|| {
        let output = address(output, "output")?;
        let (tag, value) = match self::pool(pool)?.next(timeout(timeout_ms))? {
            Next::Output { tag, value } => (tag, value),
            Next::Failed { tag, failure } => {
                let failed = TtOutput { tag, error: failure.code as i32, ..TtOutput::default() };
                calls::note(&failure.text);
                // SAFETY: the caller's.
                unsafe { output.write(failed) };
                return Ok(());
            }
        };
        let (data, bytes) = (value.as_ptr(), value.len() as u64);
        // The bytes stay where they are when what owns them moves.
        let number = OUTPUTS.put(value);
        // SAFETY: the caller's.
        unsafe { output.write(TtOutput { output: number, data, bytes, tag, error: 0, reserved: 0 }) };
        Ok(())
    })
}

/// Gives the memory of an output back, and its room in the pool. It may outlive the pool.
#[unsafe(no_mangle)]
pub extern "C" fn tt_egress_release(output: u64) -> i32 {
    guarded(|| match OUTPUTS.take(output) {
        Some(_) => Ok(()),
        None => Err(Failure::new(Code::Invalid, format!("there is no output {output}"))),
    })
}

/// Waits until `next` has, or could have, all that was submitted.
#[unsafe(no_mangle)]
pub extern "C" fn tt_egress_drain(pool: u64, timeout_ms: u32) -> i32 {
    guarded(|| self::pool(pool)?.drain(timeout(timeout_ms)))
}

/// Takes nothing any more, and waits for what is open. What is not there in time ends with [`Code::Closed`]; then this
/// returns [`Code::Timeout`]. `report` may be null.
///
/// # Safety
/// `report` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tt_egress_shutdown(pool: u64, timeout_ms: u32, report: *mut TtShutdown) -> i32 {
    guarded(|| {
        let done = self::pool(pool)?.shutdown(timeout(timeout_ms));
        if !report.is_null() {
            let (delivered, failed, abandoned) = (done.delivered, done.failed, done.abandoned);
            // SAFETY: the caller's.
            unsafe { report.write(TtShutdown { delivered, failed, abandoned }) };
        }
        match done.abandoned {
            0 => Ok(()),
            late => Err(Failure::new(Code::Timeout, format!("{late} items were not delivered in time"))),
        }
    })
}

/// Writes what the pool has done to `stats`.
///
/// # Safety
/// `stats` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tt_egress_stats(pool: u64, stats: *mut TtStats) -> i32 {
    guarded(|| {
        let stats = address(stats, "stats")?;
        let now = self::pool(pool)?.stats();
        // SAFETY: the caller's.
        unsafe { stats.write(now) };
        Ok(())
    })
}

/// Shuts the pool down, waits until the device is done with all that it was lent, and forgets the pool. If that is not
/// in time it returns [`Code::Timeout`], and may be called again.
#[unsafe(no_mangle)]
pub extern "C" fn tt_egress_destroy(pool: u64, timeout_ms: u32) -> i32 {
    guarded(|| {
        self::pool(pool)?.end(timeout(timeout_ms))?;
        let _before = Before::now();
        // Whoever comes second finds nothing; who waits in `next` is told the end.
        drop(POOLS.take(pool));
        Ok(())
    })
}

/// How long a refused submit waits for a copy that had begun: such a copy runs at the speed of the link.
const BEGUN: Duration = Duration::from_secs(30);
