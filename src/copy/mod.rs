//! How a large copy is cut (pure), and the threads that help with it.
#![deny(unsafe_code)]

pub(crate) mod pieces;
pub(crate) mod workers;

use std::ops::Range;

use crate::error::Result;

/// A piece of a copy between page-locked memory and the device. The copy engine turns to other streams between two pieces, so
/// a small copy waits for about a millisecond behind a large one rather than for all of it; smaller pieces would cost
/// bandwidth (on an H200 16 MiB pieces reach 0.99 of one copy's, 4 MiB 0.96).
pub(crate) const PINNED_PIECE: usize = 64 << 20;

/// The largest piece that passes through staging memory, and the size of a slot: each costs the link some microseconds beside its
/// bytes.
pub(crate) const STAGED_PIECE: usize = 8 << 20;

/// Where bytes for the device come from. Called from several threads, for ranges that do not overlap.
pub(crate) trait Source: Sync {
    /// Fills `into` with the bytes from `offset` on.
    fn fill(&self, offset: usize, into: &mut [u8]) -> Result<()>;

    /// As [`fill`](Source::fill), for bytes that the CPU does not look at again: they had better not stay in its caches.
    fn fill_past_caches(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        self.fill(offset, into)
    }

    /// Whether that takes the CPU longer than copying memory does.
    fn is_slow(&self) -> bool {
        false
    }
}

/// Where bytes from the device go. Called from several threads, for ranges that do not overlap.
pub(crate) trait Sink: Sync {
    /// Takes the bytes from `offset` on.
    fn take(&self, offset: usize, from: &[u8]) -> Result<()>;
}

/// Cuts `0..bytes` into pieces of `size` bytes, the last one shorter; with their numbers. `size` 0 counts as 1.
pub(crate) fn chunks(bytes: usize, size: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let size = size.max(1);
    (0..bytes.div_ceil(size)).map(move |index| {
        let start = index * size;
        (index, start..bytes.min(start.saturating_add(size)))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn chunks_cover_everything_once(bytes in 0usize..10_000, size in 0usize..300) {
            let pieces: Vec<_> = chunks(bytes, size).collect();
            let mut end = 0;
            for (number, (index, range)) in pieces.iter().enumerate() {
                prop_assert_eq!(*index, number);
                prop_assert_eq!(range.start, end);
                prop_assert!(!range.is_empty() && range.len() <= size.max(1));
                end = range.end;
            }
            prop_assert_eq!(end, bytes);
        }
    }

    #[test]
    fn the_largest_sizes_do_not_overflow() {
        let last = chunks(usize::MAX, usize::MAX - 1).last();
        assert_eq!(last, Some((1, usize::MAX - 1..usize::MAX)));
    }
}
