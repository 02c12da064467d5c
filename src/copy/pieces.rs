//! How a staged copy is cut and how many threads it is worth. Pure.
#![deny(unsafe_code)]

use std::ops::Range;

use crate::plan::Tuning;

/// A thread that is woken for less costs more than it brings.
const WORTH_A_THREAD: usize = 512 << 10;

/// No piece of several is smaller: each costs the driver some microseconds.
const SMALLEST: usize = 256 << 10;

const PAGE: usize = 4 << 10;

/// The pieces of a copy, by number, and the threads for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pieces {
    bytes: usize,
    first: usize,
    size: usize,
    /// The caller's among them.
    pub(crate) threads: usize,
}

impl Pieces {
    /// `phase` bytes lie before the first good place to cut: the first piece is so much shorter or longer.
    pub(crate) fn new(bytes: usize, phase: usize, tuning: &Tuning, largest: usize) -> Self {
        let threads = (bytes / WORTH_A_THREAD).clamp(1, tuning.threads.max(1));
        // Two for each thread, so that one is filled while the other travels.
        let share = bytes.div_ceil(2 * threads).max(SMALLEST).checked_next_multiple_of(PAGE).unwrap_or(largest);
        let size = share.min(tuning.chunk.max(PAGE)).min(largest).max(1);
        let first = if size > 0 && phase % size > 0 { phase % size } else { size };
        Self { bytes, first: first.min(bytes), size, threads }
    }

    pub(crate) fn count(&self) -> usize {
        if self.bytes == 0 { 0 } else { 1 + (self.bytes - self.first).div_ceil(self.size) }
    }

    /// The bytes of piece `index`; `None` behind the last.
    pub(crate) fn get(&self, index: usize) -> Option<Range<usize>> {
        if index >= self.count() {
            return None;
        }
        let Some(before) = index.checked_sub(1) else { return Some(0..self.first) };
        let start = self.first + before * self.size;
        Some(start..self.bytes.min(start.saturating_add(self.size)))
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
    use crate::platform::MemoryModel;

    fn tuning(threads: usize, chunk: usize) -> Tuning {
        let mut tuning = Tuning::built_in(MemoryModel::Discrete, threads);
        (tuning.threads, tuning.chunk) = (threads, chunk);
        tuning
    }

    proptest! {
        #[test]
        fn pieces_cover_everything_once(
            bytes in 0usize..(64 << 20), phase in 0usize..(2 << 20), threads in 0usize..20, chunk in 0usize..(8 << 20),
            largest in 1usize..(8 << 20),
        ) {
            let pieces = Pieces::new(bytes, phase, &tuning(threads, chunk), largest.max(bytes / 1000));
            let mut end = 0;
            for index in 0..pieces.count() {
                let piece = pieces.get(index).unwrap();
                prop_assert_eq!(piece.start, end);
                prop_assert!(!piece.is_empty() && piece.len() <= largest.max(bytes / 1000));
                end = piece.end;
            }
            prop_assert_eq!(end, bytes);
            prop_assert_eq!(pieces.get(pieces.count()), None);
            prop_assert!(pieces.threads >= 1 && pieces.threads <= threads.max(1));
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
    fn a_cut_falls_on_the_places_that_are_asked_for() {
        let pieces = Pieces::new(64 << 20, 4096, &tuning(4, 4 << 20), 4 << 20);
        assert_eq!(pieces.get(0), Some(0..4096));
        assert_eq!(pieces.get(1), Some(4096..4096 + (4 << 20)));
        assert_eq!(Pieces::new(usize::MAX, 0, &tuning(4, 4 << 20), 4 << 20).count(), usize::MAX.div_ceil(4 << 20));
    }
}
