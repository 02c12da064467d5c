//! Which size a block has for a request. Pure.
//!
//! Eight sizes between a power of two and the next: a block is at most an eighth larger than what was asked for. Below
//! 1 MiB the powers of two themselves (pages are 4 KiB, and few sizes make few blocks); above 1 GiB whole huge pages, no
//! classes: a power of two for 20.4 GiB is 32.
#![deny(unsafe_code)]

const PAGE: usize = 4 << 10;
const FINE: usize = 1 << 20;
const EXACT: usize = 1 << 30;
const HUGE_PAGE: usize = 2 << 20;

/// The number of classes.
pub(crate) const CLASSES: usize = 8 + 8 * 10 + 1;

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

/// The class of a block with `capacity` bytes; `None` where there are none.
pub(crate) fn class(capacity: usize) -> Option<usize> {
    if capacity <= FINE {
        return Some((capacity / PAGE).max(1).ilog2() as usize);
    }
    if capacity > EXACT {
        return None;
    }
    let exponent = (capacity - 1).ilog2() as usize;
    let eighths = (capacity - (1 << exponent)) >> (exponent - 3);
    Some(8 + (exponent - 20) * 8 + eighths)
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

        #[test]
        fn one_class_is_one_size(a in 1usize..(1 << 30), b in 1usize..(1 << 30)) {
            let (a, b) = (capacity(a).unwrap(), capacity(b).unwrap());
            let classes = (class(a), class(b));
            prop_assert!(classes.0.is_some_and(|class| class < CLASSES));
            prop_assert_eq!(a == b, classes.0 == classes.1);
            prop_assert_eq!(a < b, classes.0 < classes.1);
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
        assert_eq!(class(EXACT), Some(CLASSES - 1));
        assert_eq!(class(EXACT + HUGE_PAGE), None);
    }
}
