//! Where the pieces of a batch lie: in the order of their device addresses, which of them are one block, and what a round of
//! packed bytes consists of. Pure.
#![deny(unsafe_code)]

use std::ops::Range;

use crate::error::{Error, Kind, Result};

/// A piece on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) address: u64,
    pub(crate) bytes: usize,
    /// Which of the caller's pieces it is.
    pub(crate) index: usize,
    /// In which of the caller's blocks it lies.
    pub(crate) object: usize,
}

impl Placed {
    pub(crate) fn end(&self) -> u64 {
        self.address.saturating_add(self.bytes as u64)
    }
}

/// Puts pieces in the order of their addresses. Most batches come in that order.
pub(crate) fn sort(pieces: &mut [Placed]) {
    if !pieces.is_sorted_by_key(|piece| piece.address) {
        pieces.sort_unstable_by_key(|piece| piece.address);
    }
}

/// Refuses sorted pieces of which two would be written to the same bytes: nothing says which one is written last.
///
/// # Errors
/// Names the two.
pub(crate) fn check_apart(sorted: &[Placed]) -> Result<()> {
    for pair in sorted.windows(2) {
        if let [first, second] = pair
            && first.end() > second.address
        {
            let what = format!(
                "pieces {} and {} of the batch, of {} and {} bytes",
                first.index, second.index, first.bytes, second.bytes
            );
            return Err(Error::new(Kind::Overlap { what }));
        }
    }
    Ok(())
}

/// One block of device memory, which some pieces fill without a gap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) address: u64,
    /// Its bytes among all packed bytes.
    pub(crate) packed: Range<usize>,
}

/// Pieces one after the other, as they are packed.
#[derive(Debug, Default)]
pub(crate) struct Layout {
    /// Where each piece begins among the packed bytes; behind the last, where it ends.
    starts: Vec<usize>,
    blocks: Vec<Block>,
}

/// One copy of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Copy {
    pub(crate) address: u64,
    /// From the beginning of the round's packed bytes.
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

impl Copy {
    /// Bytes of a [`place`](Copy::place).
    pub(crate) const PLACE: usize = 16;

    /// As the kernel of `driver/scatter.rs` takes it: target, offset, bytes. `None` where these do not fit.
    pub(crate) fn place(&self) -> Option<[u8; Self::PLACE]> {
        let (offset, bytes) = (u32::try_from(self.offset).ok()?, u32::try_from(self.bytes).ok()?);
        let mut place = [0; Self::PLACE];
        let (target, rest) = place.split_at_mut(8);
        let (first, second) = rest.split_at_mut(4);
        target.copy_from_slice(&self.address.to_ne_bytes());
        first.copy_from_slice(&offset.to_ne_bytes());
        second.copy_from_slice(&bytes.to_ne_bytes());
        Some(place)
    }
}

/// What is done in one go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    /// Packed bytes of many small blocks.
    Packed(Range<usize>),
    /// One block, long enough to be staged by several threads.
    Long(Block),
}

impl Layout {
    /// Of sorted pieces. Adjacent ones become one block, if they are of one object, or of two of which `joined` says that they
    /// lie in one allocation: no copy may reach over the end of one.
    pub(crate) fn new(sorted: &[Placed], mut joined: impl FnMut(&Placed, &Placed) -> bool) -> Self {
        let mut layout = Self { starts: Vec::with_capacity(sorted.len() + 1), blocks: Vec::new() };
        let mut at = 0usize;
        let mut before: Option<&Placed> = None;
        for piece in sorted {
            layout.starts.push(at);
            let next = at.saturating_add(piece.bytes);
            let adjacent = before.take_if(|before| before.end() == piece.address);
            let follows = adjacent.is_some_and(|before| before.object == piece.object || joined(before, piece));
            match layout.blocks.last_mut() {
                Some(block) if follows => block.packed.end = next,
                _ => layout.blocks.push(Block { address: piece.address, packed: at..next }),
            }
            before = Some(piece);
            at = next;
        }
        layout.starts.push(at);
        layout
    }

    /// All packed bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Blocks of at least `long` bytes alone, what lies between them together.
    pub(crate) fn parts(&self, long: usize) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut small: Option<Range<usize>> = None;
        for block in &self.blocks {
            if block.packed.len() >= long {
                parts.extend(small.take().map(Part::Packed));
                parts.push(Part::Long(block.clone()));
            } else {
                small = Some(small.map_or(block.packed.clone(), |range| range.start..block.packed.end));
            }
        }
        parts.extend(small.map(Part::Packed));
        parts
    }

    /// How many blocks there are: a round of any of them needs no more copies.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Cuts packed bytes into rounds of at most `bytes` bytes and `copies` copies, as long as these allow. 0 counts as 1.
    pub(crate) fn rounds(
        &self,
        range: Range<usize>,
        bytes: usize,
        copies: usize,
    ) -> impl Iterator<Item = Range<usize>> {
        let (bytes, copies) = (bytes.max(1), copies.max(1));
        let mut start = range.start;
        std::iter::from_fn(move || {
            let round = start..range.end.min(start.saturating_add(bytes));
            let first = self.blocks.partition_point(|block| block.packed.end <= start);
            // The first block that would be one too many.
            let beyond = self.blocks.get(first.saturating_add(copies));
            start = beyond.map_or(round.end, |block| block.packed.start.min(round.end));
            (!round.is_empty()).then_some(round.start..start)
        })
    }

    /// The copies that a round of packed bytes needs.
    pub(crate) fn copies(&self, round: Range<usize>) -> impl Iterator<Item = Copy> {
        let first = self.blocks.partition_point(|block| block.packed.end <= round.start);
        let touched = self.blocks.get(first..).unwrap_or_default().iter();
        touched.take_while(move |block| block.packed.start < round.end).map(move |block| {
            let (start, end) = (block.packed.start.max(round.start), block.packed.end.min(round.end));
            let address = block.address.saturating_add((start - block.packed.start) as u64);
            Copy { address, offset: start - round.start, bytes: end - start }
        })
    }

    /// The pieces that packed bytes belong to, by their place in the order: which, and which bytes of it.
    pub(crate) fn pieces(&self, packed: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let first = self.starts.partition_point(|&start| start <= packed.start).saturating_sub(1);
        let bounds = self.starts.windows(2).enumerate().skip(first);
        bounds
            .filter_map(|(piece, bounds)| match bounds {
                &[start, end] => Some((piece, start, end)),
                _ => None,
            })
            .take_while(move |&(_, start, _)| start < packed.end)
            .map(move |(piece, start, end)| {
                (piece, start.max(packed.start) - start..end.min(packed.end).max(packed.start) - start)
            })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pieces of the given lengths and gaps before them, in some order.
    fn placed(lengths: &[(usize, usize)]) -> Vec<Placed> {
        let mut address = 0x1000;
        let all = lengths.iter().enumerate().map(|(index, &(gap, bytes))| {
            address += gap as u64;
            let piece = Placed { address, bytes, index, object: index / 3 };
            address += bytes as u64;
            piece
        });
        all.collect()
    }

    proptest! {
        #[test]
        fn rounds_bring_every_byte_to_its_place_once(
            lengths in proptest::collection::vec((0usize..3, 1usize..40), 1..60), round in 1usize..64, long in 1usize..100,
            most in 1usize..9,
        ) {
            let sorted = placed(&lengths);
            let layout = Layout::new(&sorted, |a, b| (a.index + b.index) % 4 == 1);
            // The device's bytes by address: which piece's byte came there.
            let mut device = std::collections::BTreeMap::new();
            let mut bring = |range: Range<usize>| {
                let mut staged = Vec::new();
                for (piece, part) in layout.pieces(range.clone()) {
                    staged.extend(part.map(|byte| (piece, byte)));
                }
                assert_eq!(staged.len(), range.len());
                let mut end = 0;
                for copy in layout.copies(range) {
                    assert_eq!(copy.offset, end, "packed without gaps");
                    end += copy.bytes;
                    for i in 0..copy.bytes {
                        assert!(device.insert(copy.address + i as u64, staged[copy.offset + i]).is_none());
                    }
                }
                assert_eq!(end, staged.len());
            };
            for part in layout.parts(long) {
                let range = match part {
                    Part::Packed(range) => range,
                    Part::Long(block) => {
                        prop_assert!(block.packed.len() >= long);
                        block.packed
                    }
                };
                let mut end = range.start;
                for piece in layout.rounds(range.clone(), round, most) {
                    prop_assert_eq!(piece.start, end);
                    end = piece.end;
                    let copies = layout.copies(piece.clone()).count();
                    prop_assert!(!piece.is_empty() && piece.len() <= round && copies <= most);
                    prop_assert!(piece.len() == round || copies == most || end == range.end, "shorter than it may be");
                    bring(piece);
                }
                prop_assert_eq!(end, range.end);
            }
            for (i, piece) in sorted.iter().enumerate() {
                for byte in 0..piece.bytes {
                    prop_assert_eq!(device.remove(&(piece.address + byte as u64)), Some((i, byte)));
                }
            }
            prop_assert!(device.is_empty());
        }

        #[test]
        fn overlaps_are_found_in_any_order(
            pieces in proptest::collection::vec((0u64..200, 1usize..12), 0..12),
        ) {
            let mut placed: Vec<_> = pieces
                .iter()
                .enumerate()
                .map(|(index, &(address, bytes))| Placed { address, bytes, index, object: 0 })
                .collect();
            sort(&mut placed);
            let mut hit = [0u8; 256];
            for &(address, bytes) in &pieces {
                hit[address as usize..][..bytes].iter_mut().for_each(|byte| *byte += 1);
            }
            prop_assert_eq!(check_apart(&placed).is_err(), hit.iter().any(|&times| times > 1));
        }
    }

    #[test]
    fn places_are_what_the_kernel_takes() {
        let copy = Copy { address: 0x0102_0304_0506_0708, offset: 0x0A0B_0C0D, bytes: 0x1A1B_1C1D };
        let expected = [copy.address, 0x1A1B_1C1D_0A0B_0C0D].map(u64::to_le_bytes).concat();
        assert_eq!(copy.place().unwrap()[..], expected[..]);
        assert_eq!(Copy { offset: 1 << 32, ..copy }.place(), None);
        assert_eq!(Copy { bytes: 1 << 32, ..copy }.place(), None);
    }

    #[test]
    fn adjacent_pieces_are_one_copy() {
        let layout = Layout::new(&placed(&[(0, 16); 5000]), |_, _| true);
        assert_eq!(layout.copies(0..layout.bytes()).count(), 1);
        assert_eq!(layout.parts(1 << 20), [Part::Packed(0..80_000)]);
        assert!(matches!(&layout.parts(80_000)[..], [Part::Long(block)] if block.packed == (0..80_000)));
        // Three of each object.
        let layout = Layout::new(&placed(&[(0, 16); 3000]), |_, _| false);
        assert_eq!(layout.copies(0..layout.bytes()).count(), 1000);
    }
}
