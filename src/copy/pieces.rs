//! How a staged copy is cut and how many threads it is worth. Pure.
#![deny(unsafe_code)]

use std::ops::Range;

use crate::os::HUGE_PAGE;
use crate::plan::Tuning;

/// A thread that is woken for less costs more than it brings.
const WORTH_A_THREAD: usize = 256 << 10;

/// What one thread does at a time of a block: the blocks at the ends of a copy have several parts, too, so that all threads
/// work on them, and the parts of the largest cost few hand-overs.
const SMALLEST_PART: usize = 64 << 10;
const LARGEST_PART: usize = 256 << 10;

/// The smallest block: below, the link does little else than begin.
const SMALLEST: usize = 512 << 10;

/// The smallest block of a copy is an eighth of the largest, if that is not less: more small ones would cost more than they bring.
const HALVINGS: u32 = 3;

/// A copy has at least so many blocks, if they are not the smallest.
const FEWEST: usize = 8;

/// Blocks that are under way beside those that the threads are at: they travel, or wait to. So many, but where they are large only two or
/// as many as have so many bytes together: what is used in turn should stay in the CPU's caches.
const AHEAD: usize = 7;
const AHEAD_BYTES: usize = 32 << 20;

/// How a copy is cut: into blocks, each of which travels as one, and these into parts, which threads fill or empty side by
/// side. So the link gets pieces that are worth its while, the driver few calls, and a block is ready soon.
///
/// Blocks begin small, grow by pairs, and shrink again at the end: the link has something to do as soon as threads have filled the
/// first, it does not run dry while they fill the next, and little is left to do when the last has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Blocks {
    bytes: usize,
    /// Bytes of the first block, if it is none of the others.
    head: usize,
    /// The smallest and the largest block.
    smallest: usize,
    block: usize,
    /// So many blocks grow at the start, and so many shrink at the end.
    growing: usize,
    shrinking: usize,
    smallest_part: usize,
    largest_part: usize,
    /// The caller's among them.
    pub(crate) threads: usize,
}

impl Blocks {
    /// Up to `threads` threads; no block is larger than `largest`.
    pub(crate) fn new(bytes: usize, tuning: &Tuning, threads: usize, largest: usize) -> Self {
        let share = 1 << (bytes / FEWEST).max(SMALLEST).ilog2();
        let block = tuning.chunk.min(largest).clamp(1, share);
        // Half as large as often as that leaves the smallest.
        let halvings = (block / SMALLEST).max(1).ilog2().min(HALVINGS);
        let smallest = block >> halvings;
        let growing = 2 * halvings as usize;
        Self {
            bytes,
            head: 0,
            smallest,
            block,
            growing,
            shrinking: growing,
            smallest_part: SMALLEST_PART,
            largest_part: LARGEST_PART,
            threads: Self::worth(bytes).min(threads.max(1)),
        }
    }

    /// As [`new`](Self::new), for memory whose pages are made by the copy: parts are huge pages, of which the first begins
    /// `phase` bytes in, so that no two threads make the same one.
    pub(crate) fn of_huge_pages(bytes: usize, tuning: &Tuning, threads: usize, largest: usize, phase: usize) -> Self {
        let block = tuning.chunk.min(largest) / HUGE_PAGE * HUGE_PAGE;
        if block == 0 {
            return Self::new(bytes, tuning, threads, largest);
        }
        let phase = phase % HUGE_PAGE;
        Self {
            bytes,
            head: if phase > 0 { phase } else { HUGE_PAGE },
            smallest: block,
            block,
            growing: 0,
            shrinking: 0,
            smallest_part: HUGE_PAGE,
            largest_part: HUGE_PAGE,
            threads: Self::worth(bytes).min(threads.max(1)),
        }
    }

    fn worth(bytes: usize) -> usize {
        1 + bytes / WORTH_A_THREAD
    }

    /// How many bytes the copy has.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The largest block.
    pub(crate) fn largest(&self) -> usize {
        self.block
    }

    /// How many blocks should be under way.
    pub(crate) fn under_way(&self) -> usize {
        (self.threads * self.largest_part).div_ceil(self.block) + (AHEAD_BYTES / self.block).clamp(2, AHEAD)
    }

    /// Block `index`; `None` behind the last.
    pub(crate) fn block(&self, index: usize) -> Option<Range<usize>> {
        (index < self.count()).then(|| self.start(index)..self.start(index + 1))
    }

    /// Where block `index` begins, or the last one ends.
    fn start(&self, index: usize) -> usize {
        let count = self.count();
        let Some(place) = index.checked_sub(self.heads()) else { return 0 };
        let start = if index >= count {
            self.bytes
        } else if place <= self.growing {
            self.head + self.ramp(place)
        } else if count - index <= self.shrinking {
            self.bytes - self.ramp(count - index)
        } else {
            self.head + self.ramp(self.growing) + (place - self.growing) * self.block
        };
        start.min(self.bytes)
    }

    fn heads(&self) -> usize {
        usize::from(self.head > 0)
    }

    /// How many bytes the `count` smallest blocks at an end have, of which there are two of each size.
    fn ramp(&self, count: usize) -> usize {
        let pairs = count / 2;
        2 * self.smallest * ((1 << pairs) - 1) + (count % 2) * (self.smallest << pairs)
    }

    /// How many blocks there are.
    pub(crate) fn count(&self) -> usize {
        let ends = self.head + self.ramp(self.growing) + self.ramp(self.shrinking);
        let full = self.bytes.saturating_sub(ends).div_ceil(self.block);
        self.heads().min(self.bytes) + self.growing + self.shrinking + full
    }

    /// How many parts a block has.
    pub(crate) fn parts(&self, block: &Range<usize>) -> usize {
        block.len().div_ceil(self.part_of(block))
    }

    /// Part `index` of a block.
    pub(crate) fn part(&self, block: &Range<usize>, index: usize) -> Range<usize> {
        let size = self.part_of(block);
        let start = block.start.saturating_add(index.saturating_mul(size)).min(block.end);
        start..block.end.min(start.saturating_add(size))
    }

    fn part_of(&self, block: &Range<usize>) -> usize {
        (block.len() / FEWEST).clamp(self.smallest_part, self.largest_part)
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
        // Of 512 KiB, 1 MiB and 2 MiB there are two at either end.
        let last = (usize::MAX - (14 << 20)) / (4 << 20) + 12;
        assert_eq!(blocks.block(last).map(|block| block.end), Some(usize::MAX));
        assert_eq!(blocks.count(), last + 1);
    }

    #[test]
    fn blocks_grow_and_shrink() {
        let sizes = |bytes, chunk| {
            let blocks = Blocks::new(bytes, &tuning(8, chunk), 8, 8 << 20);
            (0..blocks.count())
                .filter_map(|index| blocks.block(index))
                .map(|block| block.len() >> 10)
                .collect::<Vec<_>>()
        };
        assert_eq!(sizes(3 << 20, 8 << 20), [512; 6]);
        assert_eq!(
            sizes((8 << 20) + (100 << 10), 8 << 20),
            [512, 512, 1024, 1024, 1024, 1024, 1024, 1024, 100, 512, 512]
        );
        let long = sizes(100 << 20, 8 << 20);
        assert_eq!(long[..7], [1024, 1024, 2048, 2048, 4096, 4096, 8192]);
        assert_eq!(long[long.len() - 6..], [4096, 4096, 2048, 2048, 1024, 1024]);
        assert_eq!(sizes(1 << 20, 300 << 10), [300, 300, 300, 124]);
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
