//! Layers one by one: which of them to keep on the host, how many of those on the device at once, and how long a step of them takes.
//!
//! The model is the [`Offloader`](crate::Offloader)'s way of working: one copy after another, each into a slot whose last layer has been
//! used, beside the work on the layers in their order.

use super::choose::Share;
use super::workload::{Workload, WorkloadLayer};

/// More slots than this only take memory.
const MOST_SLOTS: usize = 16;

/// A step this much longer than with the most slots is good enough.
const NEAR: f64 = 1.01;

/// So many steps are followed: the first ones begin with nothing on its way.
const STEPS: usize = 8;

/// What to keep on the host, layer by layer.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct LayerAdvice {
    /// The layers, by their numbers: for [`OffloaderBuilder::layers`](crate::OffloaderBuilder::layers).
    pub layers: Vec<usize>,
    /// How many of them are on the device at once: for [`OffloaderBuilder::depth`](crate::OffloaderBuilder::depth).
    pub depth: usize,
    /// Bytes of all slots.
    pub slots_bytes: u64,
    /// Bytes of device memory that this saves.
    pub saved_bytes: u64,
    /// Seconds of a step, copies and work one beside the other.
    pub seconds: f64,
}

/// A use of a layer: seconds of work, and of the copy that has to come before.
#[derive(Debug, Clone, Copy)]
struct Use {
    work: f64,
    copy: Option<f64>,
}

/// Seconds of a step of these uses, again and again, with so many slots.
fn step(uses: &[Use], slots: usize) -> f64 {
    let (mut link, mut device, mut ends) = (0.0f64, 0.0f64, Vec::new());
    let mut finished = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        for Use { work, copy } in uses {
            if let Some(copy) = copy {
                // The slot's last layer but one round of slots ago.
                let free: f64 = ends.len().checked_sub(slots).and_then(|at| ends.get(at)).copied().unwrap_or(0.0);
                link = link.max(free) + copy;
                device = device.max(link) + work;
                ends.push(device);
            } else {
                device += work;
            }
        }
        finished.push(device);
    }
    // Once it is under way.
    match finished[..] {
        [.., half, _, _, _, last] => (last - half) / 4.0,
        _ => device,
    }
}

/// What frees at least `over` bytes for a micro-batch that takes `seconds`, of the layers that the workload lists; `None` where it lists none or that is more than
/// they have.
pub(super) fn advise(w: &Workload, over: u64, seconds: f64, gbs: f64) -> Option<LayerAdvice> {
    let bytes: Vec<u64> = w.layers.iter().map(|layer| layer.weights).collect();
    let all: u64 = bytes.iter().sum();
    let largest = bytes.iter().copied().max().filter(|largest| *largest > 0)?;
    let longer = seconds / w.seconds;
    let passes = w.passes() as usize;
    let of_slots = |slots: usize| -> Option<LayerAdvice> {
        let slots_bytes = largest.saturating_mul(slots as u64);
        let needed = over.saturating_add(slots_bytes);
        // Layers are whole: the next larger share, until it is enough.
        let mut fraction = needed as f64 / all as f64;
        let chosen = loop {
            let chosen = Share::Fraction(fraction.min(1.0)).choose(&bytes).ok()?;
            let moved: u64 = chosen.iter().zip(&bytes).filter(|(chosen, _)| **chosen).map(|(_, bytes)| bytes).sum();
            if moved >= needed {
                break chosen;
            }
            if fraction >= 1.0 {
                return None;
            }
            fraction += 0.5 * largest as f64 / all as f64;
        };
        let one = |(layer, chosen): (&WorkloadLayer, &bool)| Use {
            work: layer.seconds * longer / passes as f64,
            copy: chosen.then(|| layer.weights as f64 / (gbs.max(1e-9) * 1e9)),
        };
        let pass: Vec<Use> = w.layers.iter().zip(&chosen).map(one).collect();
        let mut uses = Vec::new();
        for number in 0..passes {
            // Every second pass goes back.
            if number % 2 == 0 { uses.extend(&pass) } else { uses.extend(pass.iter().rev()) }
        }
        let listed: f64 = w.layers.iter().map(|layer| layer.seconds).sum();
        uses.push(Use { work: (w.seconds - listed).max(0.0) * longer, copy: None });
        let layers: Vec<usize> = (0..chosen.len()).filter(|&layer| chosen[layer]).collect();
        let moved: u64 = layers.iter().map(|&layer| bytes[layer]).sum();
        Some(LayerAdvice {
            depth: slots,
            slots_bytes,
            saved_bytes: moved.saturating_sub(slots_bytes),
            seconds: step(&uses, slots),
            layers,
        })
    };
    let ways: Vec<LayerAdvice> = (1..=MOST_SLOTS).map_while(of_slots).collect();
    let best = ways.iter().map(|way| way.seconds).fold(f64::INFINITY, f64::min);
    ways.into_iter().find(|way| way.seconds <= best * NEAR)
}
