//! How a staged copy is cut and how many threads it is worth. Pure.
#![deny(unsafe_code)]

use std::ops::Range;

use crate::os::HUGE_PAGE;
use crate::plan::Tuning;

/// A thread that is woken for less costs more than it brings.
const WORTH_A_THREAD: usize = 1 << 20;

/// What one thread does at a time of a block, at most.
const PART: usize = 512 << 10;

/// The first block of a copy, at most, so that the link has something to do soon.
const FIRST: usize = 1 << 20;

/// The smallest block, except that the first two are smaller: below, the link does little else than begin.
const SMALLEST: usize = 256 << 10;

/// How a copy is cut: into blocks, each of which travels as one, and these into parts, which threads fill or empty side by
/// side. So the link gets pieces that are worth its while, the driver few calls, and a block is ready soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocks {
    bytes: usize,
    first: usize,
    second: usize,
    block: usize,
    part: usize,
    /// The caller's among them.
    pub(crate) threads: usize,
}

impl Blocks {
    /// Up to `threads` threads; no block is larger than `largest`. A block is about a fourth of a small copy: little is left to
    /// travel when the last one is filled.
    pub(crate) fn new(bytes: usize, tuning: &Tuning, threads: usize, largest: usize) -> Self {
        let most = tuning.chunk.min(largest).max(1);
        let block = most.min((bytes / 4).max(SMALLEST).checked_next_power_of_two().unwrap_or(most));
        let part = (block / 8).clamp(1, PART);
        let first = (block / 4).max(part).min(FIRST);
        let threads = Self::worth(bytes).min(threads.max(1));
        Self { bytes, first, second: (2 * first).min(block), block, part, threads }
    }

    /// As [`new`](Self::new), for memory whose pages are made by the copy: parts are huge pages, of which the first begins
    /// `phase` bytes in, so that no two threads make the same one.
    pub(crate) fn of_huge_pages(bytes: usize, tuning: &Tuning, threads: usize, largest: usize, phase: usize) -> Self {
        let block = tuning.chunk.min(largest) / HUGE_PAGE * HUGE_PAGE;
        if block == 0 {
            return Self::new(bytes, tuning, threads, largest);
        }
        let phase = phase % HUGE_PAGE;
        let first = if phase > 0 { phase } else { HUGE_PAGE };
        Self {
            bytes,
            first,
            second: HUGE_PAGE,
            block,
            part: HUGE_PAGE,
            threads: Self::worth(bytes).min(threads.max(1)),
        }
    }

    fn worth(bytes: usize) -> usize {
        1 + bytes / WORTH_A_THREAD
    }

    /// How many blocks should be under way: those that the threads are at, two that travel, two between.
    pub(crate) fn under_way(&self) -> usize {
        (self.threads * self.part).div_ceil(self.block) + 4
    }

    /// Block `index`; `None` behind the last.
    pub(crate) fn block(&self, index: usize) -> Option<Range<usize>> {
        let start = match index {
            0 => 0,
            1 => self.first,
            _ => index.checked_sub(2)?.checked_mul(self.block)?.checked_add(self.first + self.second)?,
        };
        let size = match index {
            0 => self.first,
            1 => self.second,
            _ => self.block,
        };
        (start < self.bytes).then(|| start..self.bytes.min(start.saturating_add(size)))
    }

    /// How many blocks there are.
    pub(crate) fn count(&self) -> usize {
        let rest = self.bytes.saturating_sub(self.first + self.second).div_ceil(self.block);
        usize::from(self.bytes > 0) + usize::from(self.bytes > self.first) + rest
    }

    /// How many parts a block has.
    pub(crate) fn parts(&self, block: &Range<usize>) -> usize {
        block.len().div_ceil(self.part)
    }

    /// Part `index` of a block.
    pub(crate) fn part(&self, block: &Range<usize>, index: usize) -> Range<usize> {
        let start = block.start.saturating_add(index.saturating_mul(self.part)).min(block.end);
        start..block.end.min(start.saturating_add(self.part))
    }
}

/// A run of a source's bytes and the device address it goes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) source: Range<usize>,
    pub(crate) target: u64,
}

/// What of `piece` goes where: ranges of the source, inside `piece`, with their addresses. `parts` ascend and are disjoint.
pub(crate) fn meeting(parts: &[Part], piece: &Range<usize>) -> impl Iterator<Item = (Range<usize>, u64)> {
    let from = parts.partition_point(|part| part.source.end <= piece.start);
    let piece = piece.clone();
    parts
        .iter()
        .skip(from)
        .take_while({
            let end = piece.end;
            move |part| part.source.start < end
        })
        .filter_map(move |part| {
            let range = part.source.start.max(piece.start)..part.source.end.min(piece.end);
            let target = part.target + (range.start.saturating_sub(part.source.start)) as u64;
            (!range.is_empty()).then_some((range, target))
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tuning(threads: usize, chunk: usize) -> Tuning {
        let mut tuning = Tuning::built_in(threads);
        (tuning.threads, tuning.chunk) = (threads, chunk);
        tuning
    }

    proptest! {
        #[test]
        fn parts_cover_everything_once(
            bytes in 0usize..(64 << 20), phase in 0usize..(4 << 20), threads in 0usize..20, chunk in 0usize..(8 << 20),
            largest in 1usize..(8 << 20), huge: bool,
        ) {
            let least = 1 + bytes / 200;
            let (chunk, largest) = (chunk.max(least), largest.max(least));
            let tuning = tuning(threads, chunk);
            let blocks = match huge {
                true => Blocks::of_huge_pages(bytes, &tuning, threads, largest, phase),
                false => Blocks::new(bytes, &tuning, threads, largest),
            };
            let (mut end, mut index) = (0, 0);
            while let Some(block) = blocks.block(index) {
                prop_assert!(block.start == end && block.len() <= largest);
                for part in 0..blocks.parts(&block) {
                    let part = blocks.part(&block, part);
                    prop_assert!(part.start == end && !part.is_empty());
                    if huge && blocks.block >= HUGE_PAGE && part.end < bytes {
                        prop_assert_eq!(part.end % HUGE_PAGE, phase % HUGE_PAGE);
                    }
                    end = part.end;
                }
                prop_assert_eq!(block.end, end);
                index += 1;
            }
            prop_assert_eq!((end, index), (bytes, blocks.count()));
            prop_assert!(blocks.threads >= 1 && blocks.threads <= threads.max(1) && blocks.under_way() >= 4);
        }

        #[test]
        fn parts_meet_pieces_byte_for_byte(
            lens in proptest::collection::vec((0usize..50, 0usize..20), 0..20), start in 0usize..400, len in 1usize..200,
        ) {
            let (mut at, mut parts) = (0, Vec::new());
            for (len, gap) in lens {
                parts.push(Part { source: at..at + len, target: 10_000 + 3 * at as u64 });
                at += len + gap;
            }
            let piece = start..start + len;
            let mut expected = Vec::new();
            for part in &parts {
                for byte in part.source.clone() {
                    if piece.contains(&byte) {
                        expected.push((byte, part.target + (byte - part.source.start) as u64));
                    }
                }
            }
            let got: Vec<_> = meeting(&parts, &piece)
                .flat_map(|(range, target)| range.clone().map(move |byte| (byte, target + (byte - range.start) as u64)))
                .collect();
            prop_assert_eq!(got, expected);
        }
    }

    #[test]
    fn the_largest_sizes_do_not_overflow() {
        let blocks = Blocks::new(usize::MAX, &tuning(4, 4 << 20), 4, 4 << 20);
        assert_eq!(blocks.block(usize::MAX), None);
        let last = (usize::MAX - (3 << 20)) / (4 << 20) + 2;
        assert_eq!(blocks.block(last).map(|block| block.end), Some(usize::MAX));
        assert_eq!(blocks.count(), last + 1);
    }

    /// R48: 5,000 pieces of 16 KiB, on machines with few and many CPUs.
    #[test]
    fn a_long_copy_takes_few_blocks_whatever_the_machine() {
        for cores in 1..40 {
            let tuning = Tuning::built_in(cores);
            let count = Blocks::new(5000 * (16 << 10), &tuning, tuning.threads, tuning.chunk).count();
            assert!(count <= 64, "{cores} CPUs: {count} blocks");
        }
    }
}
