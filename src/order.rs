//! In which order items are handed over. Pure.
#![deny(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};

/// In which order items are handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Order {
    /// As their copies complete.
    #[default]
    Completion,
    /// As they were submitted: one that failed does not hold up the others, one that is late does.
    Submission,
}

/// Items with their numbers, each of which, from 0 on, comes once.
#[derive(Debug)]
pub(crate) struct Sorter<I> {
    order: Order,
    ready: VecDeque<(u64, I)>,
    /// Those before which one has yet to come.
    early: BTreeMap<u64, I>,
    next: u64,
}

impl<I> Sorter<I> {
    pub(crate) fn new(order: Order) -> Self {
        Self { order, ready: VecDeque::new(), early: BTreeMap::new(), next: 0 }
    }

    pub(crate) fn put(&mut self, number: u64, item: I) {
        if self.order == Order::Completion || number == self.next {
            self.ready.push_back((number, item));
            self.next += 1;
        } else {
            self.early.insert(number, item);
        }
        while let Some(item) = self.early.remove(&self.next) {
            self.ready.push_back((self.next, item));
            self.next += 1;
        }
    }

    /// The next one that may be handed over.
    pub(crate) fn take(&mut self) -> Option<(u64, I)> {
        self.ready.pop_front()
    }

    /// Whether `take` has one.
    pub(crate) fn has_next(&self) -> bool {
        !self.ready.is_empty()
    }

    /// All that were not taken.
    pub(crate) fn into_all(self) -> impl Iterator<Item = I> {
        self.ready.into_iter().map(|(_, item)| item).chain(self.early.into_values())
    }

    /// How many were not taken.
    pub(crate) fn len(&self) -> usize {
        self.ready.len() + self.early.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_comes_once_and_in_order(numbers in Just((0..40u64).collect::<Vec<_>>()).prop_shuffle(), pauses: Vec<bool>, sorted: bool) {
            let mut sorter = Sorter::new(if sorted { Order::Submission } else { Order::Completion });
            let mut taken = Vec::new();
            for (at, number) in numbers.iter().enumerate() {
                sorter.put(*number, *number);
                prop_assert_eq!(sorter.len() + taken.len(), at + 1);
                if pauses.get(at).copied().unwrap_or_default() {
                    taken.extend(std::iter::from_fn(|| sorter.take()));
                }
            }
            taken.extend(std::iter::from_fn(|| sorter.take()));
            prop_assert!(taken.iter().all(|(number, item)| number == item));
            let taken: Vec<u64> = taken.into_iter().map(|(number, _)| number).collect();
            prop_assert_eq!(taken, if sorted { (0..40).collect() } else { numbers });
        }
    }
}
