//! From layers to what is kept where.

use std::collections::{HashMap, HashSet};
use std::fmt;

use super::choose::Share;
use super::layer::OffloadLayer;
use super::link::pinned_budget;
use super::offloader::{Lanes, Offloader, Places, Slot, Watch};
use super::ring::{LayerOrder, Ring};
use crate::device::Device;
use crate::error::{Error, Kind, Refused, Result};
use crate::plan::{Access, Request, Strategy};
use crate::platform::MemoryModel;
use crate::tensor::{Home, OffloadTensor, Place, Room};

/// Tensors begin on such bytes of a slot: what allocations of the driver's are aligned to, and what vector loads and products like.
const ALIGN: usize = 256;

/// Tensors below this stay on the device, if not said: their copies would be as long as what a copy costs by itself.
const SMALL: usize = 64 << 10;

/// What is to be on its way behind the layer in use: less does not cover the time in which one copy ends and the next begins.
const AHEAD: f64 = 200e-6;

/// As many layers are on their way at most, where that is not said.
const MOST: usize = 16;

/// A part in so many of what the host has available is left to others.
const HOST_RESERVE: u64 = 8;

/// Makes an [`Offloader`].
#[derive(Debug)]
pub struct OffloaderBuilder<'d> {
    device: &'d Device,
    share: Share,
    depth: Option<usize>,
    order: LayerOrder,
    small: usize,
    access: Access,
    pinned: u64,
    timed: bool,
}

/// What an [`Offloader`] keeps where, and why. Bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct OffloadReport {
    /// The layers that are kept on the host.
    pub layers: Vec<usize>,
    /// Of their tensors, each counted once.
    pub host_bytes: u64,
    /// How much of that is page-locked.
    pub pinned_bytes: u64,
    /// What the device reads from memory that both sides see.
    pub in_place_bytes: u64,
    /// What stays on the device.
    pub resident_bytes: u64,
    /// How many layers are on the device at once, of those on the host.
    pub slots: usize,
    /// Of one slot.
    pub slot_bytes: u64,
    /// Device memory that is saved: what is on the host, less all slots.
    pub saved_bytes: u64,
    /// Why, in sentences.
    pub reasons: Vec<String>,
}

pub(super) struct Prepared {
    pub(super) places: Vec<Places>,
    pub(super) ring: Ring,
    pub(super) slots: Vec<Slot>,
    pub(super) lanes: Option<Lanes>,
    pub(super) report: OffloadReport,
    pub(super) watch: Option<Watch>,
}

impl<'d> OffloaderBuilder<'d> {
    pub(super) fn new(device: &'d Device) -> Self {
        Self {
            device,
            share: Share::Fraction(1.0),
            depth: None,
            order: LayerOrder::default(),
            small: SMALL,
            access: Access::default(),
            pinned: u64::MAX,
            timed: false,
        }
    }

    /// How much of the bytes that can be moved is kept on the host, from 0 to 1, as whole layers; all, if not said. They are spread evenly over
    /// the model, so that the link works all the time.
    pub fn fraction(mut self, fraction: f64) -> Self {
        self.share = Share::Fraction(fraction);
        self
    }

    /// Keeps these layers on the host.
    pub fn layers(mut self, layers: impl IntoIterator<Item = usize>) -> Self {
        self.share = Share::Layers(layers.into_iter().collect());
        self
    }

    /// How many layers of those on the host are on the device at once: one in use, the others ahead. At least 1 (nothing is ahead then). If not
    /// said, 2, or as many as keep the link at work for 200 µs, where layers are small, but no more than half of them.
    pub fn depth(mut self, depth: usize) -> Self {
        self.depth = Some(depth.max(1));
        self
    }

    /// The order in which a step uses the layers, again and again; from the first to the last, if not said.
    pub fn order(mut self, order: LayerOrder) -> Self {
        self.order = order;
        self
    }

    /// Tensors below so many bytes stay on the device; 64 KiB, if not said.
    pub fn small(mut self, bytes: usize) -> Self {
        self.small = bytes;
        self
    }

    /// How often a use touches every byte: on a coherent link, the plan decides by it which tensors are read where they are.
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// No more than so many bytes of ordinary memory are exchanged for page-locked memory; nor more than the host can spare
    /// ([`pinned_budget`](crate::pinned_budget), with an eighth of what is available in reserve), whatever is said.
    pub fn pinned_limit(mut self, bytes: u64) -> Self {
        self.pinned = bytes;
        self
    }

    /// Measures how long the caller's streams wait for layers: two more events for each use.
    pub fn timed(mut self, timed: bool) -> Self {
        self.timed = timed;
        self
    }

    /// Takes the layers: those that are to be on the host give up their memory on the device, the others are brought there.
    ///
    /// # Ordering
    /// Blocks while ordinary memory is exchanged for page-locked memory, and for the work that wrote to tensors with ordinary memory; for no other copies.
    ///
    /// # Errors
    /// The fraction is not from 0 to 1, a layer in a list is not there, a tensor has no device or that of another context, there is no memory, or the
    /// device faulted. The layers come back.
    pub fn build(self, layers: Vec<OffloadLayer>) -> Result<Offloader, Refused<Vec<OffloadLayer>>> {
        match self.prepare(&layers) {
            Ok(prepared) => Ok(Offloader::start(self.device, layers, prepared)),
            Err(error) => Err(Refused { error, value: layers }),
        }
    }

    /// Whether a tensor can be moved.
    fn moves(&self, tensor: &OffloadTensor) -> Result<bool> {
        let platform = self.device.platform();
        let one_memory = platform.model().is_one_memory();
        if one_memory || tensor.bytes() == 0 || tensor.bytes() < self.small {
            return Ok(false);
        }
        if !tensor.is_in_place() || platform.model() != MemoryModel::Coherent {
            return Ok(true);
        }
        let request = Request::new(tensor.bytes() as u64).access(self.access);
        Ok(self.device.plan(&request)?.strategy == Strategy::Streamed)
    }

    fn prepare(&self, layers: &[OffloadLayer]) -> Result<Prepared> {
        let device = self.device;
        let tensors = || layers.iter().flat_map(|layer| &layer.tensors);
        for tensor in tensors() {
            if tensor.device()?.context().cuda().cu_ctx() != device.context().cuda().cu_ctx() {
                return Err(Error::new(Kind::WrongContext { operation: "offloading" }));
            }
        }
        let order = self.order.list(layers.len());
        if let Some(&layer) = order.iter().find(|&&layer| layer >= layers.len()) {
            return Err(Error::absent(layer, layers.len(), "layers"));
        }
        let can: Vec<Vec<bool>> = (layers.iter())
            .map(|layer| layer.tensors.iter().map(|tensor| self.moves(tensor)).collect::<Result<_>>())
            .collect::<Result<_>>()?;
        let movable = |(layer, can): (&OffloadLayer, &Vec<bool>)| -> u64 {
            let moved = layer.tensors.iter().zip(can).filter(|(_, can)| **can);
            moved.map(|(tensor, _)| tensor.bytes() as u64).sum()
        };
        let movable: Vec<u64> = layers.iter().zip(&can).map(movable).collect();
        let chosen = self.share.choose(&movable)?;
        let goes = |layer: usize, tensor: usize| chosen[layer] && can[layer][tensor];

        let mut report = OffloadReport::default();
        let homes = self.homes(layers, goes, &mut report)?;
        let mut slot_bytes = 0;
        let mut places = Vec::with_capacity(layers.len());
        for (number, layer) in layers.iter().enumerate() {
            let mut end = 0usize;
            // Tied within the layer: once.
            let mut seen: Vec<(usize, Place)> = Vec::new();
            let mut place = |tensor: &OffloadTensor| {
                let home = homes.get(&tensor.memory())?;
                let (memory, from) = (tensor.memory(), tensor.range());
                let same = |(of, place): &&(usize, Place)| {
                    *of == memory && place.from == from.start && place.range.len() == from.len()
                };
                if let Some((_, place)) = seen.iter().find(same) {
                    return Some(place.clone());
                }
                let start = end.next_multiple_of(ALIGN);
                end = start + from.len();
                let place = Place { home: home.clone(), from: from.start, range: start..end };
                seen.push((memory, place.clone()));
                Some(place)
            };
            let of = |(index, tensor)| if goes(number, index) { place(tensor) } else { None };
            let of_tensors: Vec<_> = layer.tensors.iter().enumerate().map(of).collect();
            let copied = seen.into_iter().map(|(_, place)| place).collect();
            places.push(Places { of_tensors, copied });
            slot_bytes = slot_bytes.max(end);
        }

        let moves: Vec<bool> = places.iter().map(|places| !places.copied.is_empty()).collect();
        report.layers = (0..layers.len()).filter(|&layer| moves[layer]).collect();
        let count = self.slots(report.layers.len(), slot_bytes);
        let mut lanes = None;
        let mut slots = Vec::new();
        if count > 0 {
            let context = device.context();
            let made = Lanes { up: context.lend_stream(c"offload-in")?, down: context.lend_stream(c"offload-out")? };
            for _ in 0..count {
                let room = Room::new(device, slot_bytes, &made.up)?;
                slots.push(Slot { room, written: Vec::new(), fresh: false });
            }
            lanes = Some(made);
        }
        let mut stay = HashSet::new();
        for (number, layer) in layers.iter().enumerate() {
            for (_, tensor) in layer.tensors.iter().enumerate().filter(|(index, _)| !goes(number, *index)) {
                let first = stay.insert(tensor.memory());
                if tensor.is_in_place() {
                    report.in_place_bytes += if first { tensor.memory_bytes() as u64 } else { 0 };
                } else {
                    tensor.settle()?;
                    // All of the memory that it is a part of.
                    report.resident_bytes += if first { tensor.memory_bytes() as u64 } else { 0 };
                }
            }
        }
        (report.slots, report.slot_bytes) = (count, slot_bytes as u64);
        self.explain(layers, goes, &stay, &mut report);
        let watch = self.timed.then(Watch::default);
        Ok(Prepared { places, ring: Ring::new(order, moves, count), slots, lanes, report, watch })
    }

    /// The host memory of what goes, by the memory it lies in.
    fn homes(
        &self,
        layers: &[OffloadLayer],
        goes: impl Fn(usize, usize) -> bool,
        report: &mut OffloadReport,
    ) -> Result<HashMap<usize, Home>> {
        let available = self.device.memory().host_available.unwrap_or(u64::MAX);
        let mut budget = pinned_budget(u64::MAX, self.pinned, available, available / HOST_RESERVE);
        let mut homes = HashMap::new();
        for (number, layer) in layers.iter().enumerate() {
            for (index, tensor) in layer.tensors.iter().enumerate() {
                if !goes(number, index) || homes.contains_key(&tensor.memory()) {
                    continue;
                }
                let bytes = tensor.memory_bytes() as u64;
                let (home, fresh) = Home::of(tensor, bytes <= budget)?;
                report.pinned_bytes += if home.is_pinned() { bytes } else { 0 };
                budget -= if fresh { bytes.min(budget) } else { 0 };
                report.host_bytes += bytes;
                homes.insert(tensor.memory(), home);
            }
        }
        Ok(homes)
    }

    /// How many slots, for so many layers on the host.
    fn slots(&self, layers: usize, slot_bytes: usize) -> usize {
        let planned = || {
            let seconds = self.device.platform().figures().host_to_device.seconds(slot_bytes as u64);
            let ahead = ((AHEAD / seconds.max(1e-9)).ceil() as usize).clamp(1, MOST);
            // Small layers: not so many that hardly any memory is saved.
            (1 + ahead).min((layers / 2).max(2))
        };
        self.depth.unwrap_or_else(planned).min(layers)
    }

    /// `stay`: the memories in which tensors stay.
    fn explain(
        &self,
        layers: &[OffloadLayer],
        goes: impl Fn(usize, usize) -> bool,
        stay: &HashSet<usize>,
        report: &mut OffloadReport,
    ) {
        let (mut seen, mut gone, mut shared) = (HashSet::new(), 0, 0);
        for (number, layer) in layers.iter().enumerate() {
            for (_, tensor) in layer.tensors.iter().enumerate().filter(|(index, _)| goes(number, *index)) {
                // What both sides saw was not on the device before.
                if tensor.is_in_place() || !seen.insert(tensor.memory()) {
                    continue;
                }
                // What a layer that stays shares with one that goes is on the device all the same.
                let sum = if stay.contains(&tensor.memory()) { &mut shared } else { &mut gone };
                *sum += tensor.memory_bytes() as u64;
            }
        }
        let slots = report.slots as u64 * report.slot_bytes;
        report.saved_bytes = gone.saturating_sub(slots);
        let mut say = |reason: String| report.reasons.push(reason);
        if shared > 0 {
            say(format!(
                "{shared} bytes are on the device all the same: tensors that stay lie in the same memory as some that go"
            ));
        }
        match self.device.platform().model() {
            MemoryModel::Unified | MemoryModel::UnifiedMapped => {
                say("CPU and GPU have one memory: nothing is moved".into());
            }
            _ if report.layers.is_empty() => say("no layer is kept on the host".into()),
            model => {
                if model == MemoryModel::Coherent && report.in_place_bytes > 0 {
                    say("the device reads over a coherent link: what it touches too seldom to be copied is read where it is".into());
                }
                if report.slots == report.layers.len() {
                    say(format!("all {} layers on the host have a slot: no device memory is saved", report.slots));
                } else if gone <= slots {
                    say(format!(
                        "{} slots take as much as is on the host alone: no device memory is saved",
                        report.slots
                    ));
                }
            }
        }
        if report.pinned_bytes < report.host_bytes {
            let pageable = report.host_bytes - report.pinned_bytes;
            say(format!(
                "{pageable} bytes are in ordinary memory: the budget of page-locked memory did not take them, or the device needs none"
            ));
        }
    }
}

impl fmt::Display for OffloadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "{} layers on the host ({:.1} MiB, {:.1} page-locked), {} slots of {:.1} MiB; {:.1} MiB stay on the device, {:.1} are read in place; {:.1} MiB of device memory saved",
            self.layers.len(),
            mib(self.host_bytes),
            mib(self.pinned_bytes),
            self.slots,
            mib(self.slot_bytes),
            mib(self.resident_bytes),
            mib(self.in_place_bytes),
            mib(self.saved_bytes),
        )?;
        self.reasons.iter().try_for_each(|reason| write!(f, "\n  - {reason}"))
    }
}
