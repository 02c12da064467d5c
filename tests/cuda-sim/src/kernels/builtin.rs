//! The kernels that every test may use. `kernels/kernels.cu` holds the same for a real GPU. One more belongs to the crate
//! `transfer-tensor`, which brings its own module.

use std::time::Duration;

use super::{KernelFn, Launch};

/// The built-in kernels by name.
pub const BUILTINS: &[(&str, KernelFn)] = &[
    ("xor_index_u8", xor_index_u8),
    ("fill_u8", fill_u8),
    ("copy_u8", copy_u8),
    ("add_one_f32", add_one_f32),
    ("spin_until", spin_until),
    ("oob", oob),
];

/// The kernel of `transfer-tensor`'s batches, by the name of its entry.
pub(super) const SCATTER: (&str, KernelFn) = ("transfer_tensor_scatter", scatter);

/// What `xor_index_u8` applies to byte `i`: the low byte of splitmix64's mix of `i`,
///
/// ```text
/// z = i + 0x9E3779B97F4A7C15
/// z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
/// z = (z ^ (z >> 27)) * 0x94D049BB133111EB
/// hash = low byte of z ^ (z >> 31)
/// ```
///
/// in wrapping 64-bit arithmetic.
#[must_use]
pub const fn index_hash(i: u64) -> u8 {
    let z = i.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)).to_le_bytes()[0]
}

crate::kernel! {
    /// `xor_index_u8(p: u64, n: u64)`: `p[i] ^= index_hash(i)`; twice is nothing.
    fn xor_index_u8(launch) {
        let (p, n) = (launch.arg(0)?, launch.arg(1)?);
        for (i, byte) in (0_u64..).zip(launch.slice_mut::<u8>(p, n)?) {
            *byte ^= index_hash(i);
        }
        Ok(())
    }
}

crate::kernel! {
    /// `fill_u8(p: u64, n: u64, value: u32)`: every byte becomes the low byte of `value`.
    fn fill_u8(launch) {
        let (p, n, value) = (launch.arg(0)?, launch.arg(1)?, launch.arg::<u32>(2)?);
        launch.slice_mut::<u8>(p, n)?.fill(value.to_le_bytes()[0]);
        Ok(())
    }
}

crate::kernel! {
    /// `copy_u8(dst: u64, src: u64, n: u64)`.
    fn copy_u8(launch) {
        let (dst, src, n) = (launch.arg(0)?, launch.arg(1)?, launch.arg(2)?);
        launch.copy(dst, src, n)
    }
}

crate::kernel! {
    /// `add_one_f32(p: u64, n: u64)`: `p[i] += 1.0`.
    fn add_one_f32(launch) {
        let (p, n) = (launch.arg(0)?, launch.arg(1)?);
        for x in launch.slice_mut::<f32>(p, n)? {
            *x += 1.0;
        }
        Ok(())
    }
}

crate::kernel! {
    /// `spin_until(flag: u64, value: u32)`: a gate, runs until `*flag == value`.
    fn spin_until(launch) {
        let (flag, value) = (launch.arg(0)?, launch.arg::<u32>(1)?);
        while read_flag(launch, flag)? != value {
            // Hardware would spin; here another thread has to get on.
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }
}

/// Asks for the address anew each time: a gate whose flag is freed must fault, not hang.
fn read_flag(launch: &Launch<'_>, flag: u64) -> Result<u32, super::Fault> {
    let place = launch.bytes::<u32>(flag, 1, false)?;
    // SAFETY: `bytes` answered for these four aligned bytes. Volatile, as in the CUDA source:
    // the host writes the flag while this reads it.
    Ok(unsafe { place.read_volatile() })
}

crate::kernel! {
    /// `transfer_tensor_scatter(packed: u64, places: u64, count: u32)`: brings runs of packed bytes to their places. Each of those
    /// is 16 bytes: a u64 address, the run's u32 offset in the packed bytes, its u32 length.
    fn scatter(launch) {
        let (packed, places) = (launch.arg::<u64>(0)?, launch.arg::<u64>(1)?);
        let count = usize::try_from(launch.arg::<u32>(2)?).map_err(|_| super::Fault::LaunchFailed)?;
        for place in launch.slice::<u64>(places, 2 * count)?.to_vec().chunks_exact(2) {
            let (target, run) = (place[0], place[1].to_le());
            launch.copy(target, packed.wrapping_add(run & 0xFFFF_FFFF), (run >> 32) as usize)?;
        }
        Ok(())
    }
}

crate::kernel! {
    /// `oob(p: u64)`: writes 2⁴⁸ bytes past `p`, where nothing is mapped on any machine.
    fn oob(launch) {
        let p = launch.arg::<u64>(0)?;
        launch.slice_mut::<u8>(p.wrapping_add(1 << 48), 1)?[0] = 1;
        Ok(())
    }
}
