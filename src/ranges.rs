//! A set of byte positions, as sorted, disjoint, non-touching ranges. Pure.
//!
//! A tensor keeps two: which of its bytes are current on the host, and which on the device. Nearly always one range.
#![deny(unsafe_code)]

use std::ops::Range;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RangeSet(Vec<Range<usize>>);

impl RangeSet {
    pub(crate) fn full(len: usize) -> Self {
        let mut set = Self::default();
        set.insert(&(0..len));
        set
    }

    pub(crate) fn insert(&mut self, range: &Range<usize>) {
        if range.is_empty() {
            return;
        }
        // All that touch the new range melt into it.
        let first = self.0.partition_point(|r| r.end < range.start);
        let last = self.0.partition_point(|r| r.start <= range.end);
        let merged = match self.0.get(first..last) {
            Some([only]) => only.start.min(range.start)..only.end.max(range.end),
            Some([head, .., tail]) => head.start.min(range.start)..tail.end.max(range.end),
            _ => range.clone(),
        };
        self.0.splice(first..last, [merged]);
    }

    pub(crate) fn remove(&mut self, range: &Range<usize>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|r| r.end <= range.start);
        let last = self.0.partition_point(|r| r.start < range.end);
        if first >= last {
            return;
        }
        let left = self.0[first].start..range.start;
        let right = range.end..self.0[last - 1].end;
        self.0.splice(first..last, [left, right].into_iter().filter(|r| !r.is_empty()));
    }

    /// The parts of `range` that are in the set.
    pub(crate) fn within(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        self.0.iter().map(|r| r.start.max(range.start)..r.end.min(range.end)).filter(|r| !r.is_empty()).collect()
    }

    /// The parts of `range` that are not in the set.
    pub(crate) fn missing(&self, range: &Range<usize>) -> Vec<Range<usize>> {
        let mut rest = Self::default();
        rest.insert(range);
        for r in &self.0 {
            rest.remove(r);
        }
        rest.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_as_a_set_of_positions(
            steps in prop::collection::vec((any::<bool>(), 0usize..64, 0usize..64), 0..40),
            a in 0usize..64, b in 0usize..64,
        ) {
            let (mut set, mut model) = (RangeSet::default(), [false; 64]);
            for (insert, a, b) in steps {
                let range = a.min(b)..a.max(b);
                if insert { set.insert(&range) } else { set.remove(&range) }
                model[range].fill(insert);
            }
            for pair in set.0.windows(2) {
                prop_assert!(pair[0].end < pair[1].start, "sorted, disjoint, not touching: {:?}", set);
            }
            let range = a.min(b)..a.max(b);
            let positions = |ranges: Vec<Range<usize>>| ranges.into_iter().flatten().collect::<Vec<_>>();
            prop_assert_eq!(positions(set.within(&range)), range.clone().filter(|&i| model[i]).collect::<Vec<_>>());
            prop_assert_eq!(positions(set.missing(&range)), range.clone().filter(|&i| !model[i]).collect::<Vec<_>>());
        }
    }
}
