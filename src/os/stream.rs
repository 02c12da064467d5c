//! A copy whose stores go past the caches: for memory that the CPU writes and does not read soon.
//!
//! An ordinary store first reads the line it writes to, which results of a GPU on the way to their place do not need; and a line
//! that a CPU has just written is in its cache, from where the link, and the CPU that writes it next, must fetch it.

/// Below this an ordinary copy is as fast, and leaves the bytes in the cache.
const SMALLEST: usize = 64 << 10;

/// Copies `bytes` bytes.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
pub(crate) unsafe fn copy_past_caches(source: *const u8, target: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if bytes >= SMALLEST {
        let head = target.align_offset(64).min(bytes);
        let body = (bytes - head) / 64 * 64;
        // SAFETY: the three parts lie inside both ranges; the middle one's target is aligned, and its instructions are there.
        unsafe {
            std::ptr::copy_nonoverlapping(source, target, head);
            let (from, to) = (source.add(head), target.add(head));
            if is_x86_feature_detected!("avx2") {
                stream_avx2(from, to, body);
            } else {
                stream_sse2(from, to, body);
            }
            std::ptr::copy_nonoverlapping(from.add(body), to.add(body), bytes - head - body);
        }
        return;
    }
    let _ = SMALLEST;
    // SAFETY: the caller's.
    unsafe { std::ptr::copy_nonoverlapping(source, target, bytes) };
}

/// # Safety
/// As for [`copy_past_caches`]; `bytes` is a multiple of 64, `target` of 32, and the CPU has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_avx2(source: *const u8, target: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    for offset in (0..bytes).step_by(64) {
        // SAFETY: the caller's; the offsets are below `bytes`.
        unsafe {
            let (from, to) = (source.add(offset).cast::<__m256i>(), target.add(offset).cast::<__m256i>());
            let (a, b) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            _mm256_stream_si256(to, a);
            _mm256_stream_si256(to.add(1), b);
        }
    }
    fence();
}

/// # Safety
/// As for [`stream_avx2`], with 16 instead of 32 and without AVX2.
#[cfg(target_arch = "x86_64")]
unsafe fn stream_sse2(source: *const u8, target: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    for offset in (0..bytes).step_by(16) {
        // SAFETY: as above; every x86-64 has SSE2.
        unsafe { _mm_stream_si128(target.add(offset).cast::<__m128i>(), _mm_loadu_si128(source.add(offset).cast())) };
    }
    fence();
}

/// Such stores are ordered with nothing: before anybody is told that the bytes are there.
#[cfg(target_arch = "x86_64")]
fn fence() {
    // SAFETY: every x86-64 has SSE. (A function of its own: where the feature is enabled, newer compilers call it safe.)
    unsafe { std::arch::x86_64::_mm_sfence() };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn it_copies_every_byte_and_no_other(from in 0usize..130, to in 0usize..130, len in 0usize..300_000, seed: u8) {
            let source: Vec<u8> = (0..from + len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
            let mut target = vec![0xaau8; to + len + 100];
            // SAFETY: both ranges lie inside their vectors.
            unsafe { copy_past_caches(source.as_ptr().add(from), target.as_mut_ptr().add(to), len) };
            prop_assert!(target[..to].iter().chain(&target[to + len..]).all(|&byte| byte == 0xaa));
            prop_assert_eq!(&target[to..to + len], &source[from..]);
        }

        #[test]
        #[cfg(target_arch = "x86_64")]
        fn so_does_the_older_way(blocks in 0usize..2000, from in 0usize..64) {
            let bytes = blocks * 64;
            let source: Vec<u8> = (0..from + bytes).map(|i| (i * 7) as u8).collect();
            let mut target = vec![0u8; bytes + 64];
            let head = target.as_ptr().align_offset(64);
            // SAFETY: both ranges lie inside their vectors, and the target's start is aligned.
            unsafe { stream_sse2(source.as_ptr().add(from), target.as_mut_ptr().add(head), bytes) };
            prop_assert_eq!(&target[head..head + bytes], &source[from..]);
        }
    }
}
