//! Which size a block has for a request. Pure.
//!
//! Eight sizes between a power of two and the next: a block is at most an eighth larger than what was asked for. Below
//! 1 MiB the powers of two themselves (pages are 4 KiB, and few sizes make few blocks); above 1 GiB whole huge pages, no
//! classes: a power of two for 20.4 GiB is 32.
#![deny(unsafe_code)]

use std::ops::RangeInclusive;

const PAGE: usize = 4 << 10;
const FINE: usize = 1 << 20;
const EXACT: usize = 1 << 30;
const HUGE_PAGE: usize = 2 << 20;

/// The bytes of a block for `bytes` bytes; `None` beyond any address space.
pub(crate) fn capacity(bytes: usize) -> Option<usize> {
    if bytes <= FINE {
        return Some(bytes.max(PAGE).next_power_of_two());
    }
    if bytes > EXACT {
        return bytes.checked_next_multiple_of(HUGE_PAGE).filter(|&capacity| capacity <= isize::MAX as usize);
    }
    // 2^k + 1 ..= 2^(k+1) come in steps of 2^k / 8.
    let step = 1 << ((bytes - 1).ilog2() - 3);
    Some(bytes.next_multiple_of(step))
}

/// The sizes of blocks that serve a request whose own block would have `capacity` bytes.
pub(crate) fn fitting(capacity: usize) -> RangeInclusive<usize> {
    // Without classes hardly two are the same: one that is at most an eighth larger.
    let most = if capacity <= EXACT { capacity } else { capacity.saturating_add(capacity / 8) };
    capacity..=most
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn a_block_holds_the_request_and_wastes_little(shift in 0u32..46, low in any::<u64>()) {
            let bytes = ((1u64 << shift) | (low & ((1 << shift) - 1))) as usize;
            let capacity = capacity(bytes).unwrap();
            prop_assert!(capacity >= bytes);
            if bytes > FINE {
                prop_assert!(capacity - bytes <= bytes / 8, "{bytes} {capacity}");
            }
            if bytes > EXACT {
                prop_assert!(capacity - bytes < HUGE_PAGE);
            }
            prop_assert_eq!(super::capacity(capacity), Some(capacity));
        }

        /// Also one for a smaller request, as long as that wastes little.
        #[test]
        fn a_block_that_fits_holds_the_request_and_wastes_little(a in 1usize..(4 << 30), b in 1usize..(4 << 30)) {
            let (a, b) = (capacity(a).unwrap(), capacity(b).unwrap());
            prop_assert!(fitting(a).contains(&a));
            prop_assert_eq!(fitting(a).contains(&b), a == b || (a > EXACT && a < b && b - a <= a / 8));
        }
    }

    #[test]
    fn sizes_that_reports_are_about() {
        assert_eq!(capacity(0), Some(PAGE));
        assert_eq!(capacity((80 << 20) + 1), Some(88 << 20));
        assert_eq!(capacity((5 << 30) + 1), Some((5 << 30) + HUGE_PAGE));
        assert_eq!(capacity((150 << 20) + 1), Some(160 << 20));
        assert_eq!(capacity(EXACT), Some(EXACT));
        assert_eq!(capacity(usize::MAX), None);
        assert_eq!(fitting(EXACT), EXACT..=EXACT);
        assert_eq!(fitting(2 * EXACT), 2 * EXACT..=2 * EXACT + EXACT / 4);
    }
}
