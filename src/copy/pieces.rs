//! How a staged copy is cut and how many threads it is worth. Pure.
#![deny(unsafe_code)]

use std::ops::Range;

use crate::os::HUGE_PAGE;
use crate::plan::Tuning;

/// A thread that is woken for less costs more than it brings.
const WORTH_A_THREAD: usize = 3 << 20;

/// No piece of several is smaller: each costs the driver some microseconds.
const SMALLEST: usize = 256 << 10;

/// From this size on pieces end where huge pages do, so that two threads do not make one page.
const WHOLE_PAGES: usize = HUGE_PAGE;

/// The pieces of a copy, taken one after the other, and the threads for it.
///
/// The first ones are small, so that the link has something to do at once and every thread gets one soon; the last ones are
/// too, so that no thread is late. Between them they have the full size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pieces {
    bytes: usize,
    phase: usize,
    largest: usize,
    /// The caller's among them.
    pub(crate) threads: usize,
}

impl Pieces {
    /// `phase` bytes lie before the first good place to cut; no piece is larger than `largest`.
    pub(crate) fn new(bytes: usize, phase: usize, tuning: &Tuning, largest: usize) -> Self {
        let threads = (1 + bytes / WORTH_A_THREAD).min(tuning.threads.max(1));
        let largest = tuning.chunk.min(largest).max(1);
        Self { bytes, phase: phase % HUGE_PAGE, largest, threads }
    }

    /// The piece that begins at `start`; `None` at the end.
    pub(crate) fn at(&self, start: usize) -> Option<Range<usize>> {
        let rest = self.bytes.checked_sub(start).filter(|&rest| rest > 0)?;
        let size = (start / self.threads).min(rest / (2 * self.threads)).max(SMALLEST).min(self.largest);
        let mut end = start.saturating_add(size).min(self.bytes);
        if size >= WHOLE_PAGES && end < self.bytes {
            let over = (end.wrapping_sub(self.phase)) % HUGE_PAGE;
            end -= if over < size { over } else { 0 };
        }
        Some(start..end)
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
            bytes in 0usize..(64 << 20), phase in 0usize..(4 << 20), threads in 0usize..20, chunk in 0usize..(8 << 20),
            largest in 1usize..(8 << 20),
        ) {
            let largest = largest.max(bytes / 1000);
            let pieces = Pieces::new(bytes, phase, &tuning(threads, chunk.max(bytes / 1000)), largest);
            let mut end = 0;
            while let Some(piece) = pieces.at(end) {
                prop_assert_eq!(piece.start, end);
                prop_assert!(!piece.is_empty() && piece.len() <= largest);
                end = piece.end;
            }
            prop_assert_eq!(end, bytes);
            prop_assert_eq!(pieces.at(usize::MAX), None);
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
    fn large_pieces_end_with_huge_pages_and_the_first_and_last_are_small() {
        let pieces = Pieces::new(256 << 20, 4096, &tuning(4, 4 << 20), 4 << 20);
        let mut all = Vec::new();
        while let Some(piece) = pieces.at(all.last().map_or(0, |piece: &Range<usize>| piece.end)) {
            all.push(piece);
        }
        assert!(all.iter().take(4).chain(all.last()).all(|piece| piece.len() <= SMALLEST));
        let full = all.iter().filter(|piece| piece.len() > 3 << 20).count();
        assert!(
            full > 50 && all.iter().filter(|piece| piece.len() > 3 << 20).all(|piece| piece.end % HUGE_PAGE == 4096)
        );
        // Whatever the size.
        assert!(Pieces::new(usize::MAX, 1, &tuning(4, 4 << 20), 4 << 20).at(usize::MAX - 1).is_some());
    }
}
