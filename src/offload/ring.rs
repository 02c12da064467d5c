//! Which layer is in which slot, and which comes next: pure, so that it can be tested without a device.
//!
//! Invariants: a layer is in one slot at most; whoever is in use, and the layers that are used next, are never the ones to make room.

/// In which order a step uses the layers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LayerOrder {
    /// From the first to the last: inference, a forward pass.
    #[default]
    Forward,
    /// From the first to the last and back: training.
    ForwardBackward,
    /// As listed, by their numbers; again and again.
    Explicit(Vec<usize>),
}

impl LayerOrder {
    /// The numbers, of so many layers.
    pub(super) fn list(&self, layers: usize) -> Vec<usize> {
        match self {
            LayerOrder::Forward => (0..layers).collect(),
            LayerOrder::ForwardBackward => (0..layers).chain((0..layers).rev()).collect(),
            LayerOrder::Explicit(list) => list.clone(),
        }
    }
}

/// Slots, and a place in the order.
#[derive(Debug, Clone)]
pub(super) struct Ring {
    order: Vec<usize>,
    /// The position of the layer that was asked for last.
    at: Option<usize>,
    /// Whether a layer needs a slot.
    moves: Vec<bool>,
    slots: Vec<Slot>,
    clock: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    layer: Option<usize>,
    /// When it was asked for last.
    used: u64,
}

impl Ring {
    pub(super) fn new(order: Vec<usize>, moves: Vec<bool>, slots: usize) -> Self {
        Self { order, at: None, moves, slots: vec![Slot::default(); slots], clock: 0 }
    }

    /// Notes that a layer is asked for: the next in the order that is it. One that is not in the order leaves the position alone.
    pub(super) fn ask(&mut self, layer: usize) {
        let count = self.order.len();
        let first = self.at.map_or(0, |at| at + 1);
        let found = (first..first + count).map(|at| at % count).find(|&at| self.order.get(at) == Some(&layer));
        self.at = found.or(self.at);
        self.clock += 1;
        let clock = self.clock;
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.layer == Some(layer)) {
            slot.used = clock;
        }
    }

    /// Where a layer is.
    pub(super) fn slot_of(&self, layer: usize) -> Option<usize> {
        self.slots.iter().position(|slot| slot.layer == Some(layer))
    }

    /// Who is in a slot.
    pub(super) fn layer_in(&self, slot: usize) -> Option<usize> {
        self.slots.get(slot).and_then(|slot| slot.layer)
    }

    /// The layers that are to be in slots while `layer` is in use, that one and those used next: no more than there are slots, soonest first.
    pub(super) fn wanted(&self, layer: usize) -> Vec<usize> {
        let count = self.order.len();
        let first = self.at.map_or(0, |at| at + 1);
        let coming = (first..first + count).filter_map(|at| self.order.get(at % count).copied());
        let mut wanted = Vec::with_capacity(self.slots.len());
        for layer in std::iter::once(layer).chain(coming) {
            if wanted.len() == self.slots.len() {
                break;
            }
            if self.moves.get(layer) == Some(&true) && !wanted.contains(&layer) {
                wanted.push(layer);
            }
        }
        wanted
    }

    /// The slot that a layer is to be brought to: an empty one, or the one whose layer was used longest ago of those that are not wanted.
    pub(super) fn room(&self, wanted: &[usize]) -> Option<usize> {
        let free = |slot: &Slot| slot.layer.is_none_or(|layer| !wanted.contains(&layer));
        let slots = self.slots.iter().enumerate().filter(|(_, slot)| free(slot));
        slots.min_by_key(|(_, slot)| (slot.layer.is_some(), slot.used)).map(|(slot, _)| slot)
    }

    /// Notes who is in a slot now; nobody, where what was brought there is of no use.
    pub(super) fn put(&mut self, slot: usize, layer: Option<usize>) {
        let used = self.clock;
        if let Some(slot) = self.slots.get_mut(slot) {
            *slot = Slot { layer, used };
        }
    }
}
