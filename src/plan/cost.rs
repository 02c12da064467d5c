//! The cost model: every way to hand bytes over, what it costs, and how it stands on this kind of machine.
#![deny(unsafe_code)]

use super::figures::{ByMemory, CopyWay, Figures};
use super::{Backing, Direction, HostMemory, Request, Strategy};
use crate::copy::{PINNED_PIECE, STAGED_PIECE};
use crate::platform::{Capabilities, MemoryFigures, MemoryModel, Platform};

/// How a way stands, best first. The plan chooses among those of the best standing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Standing {
    /// A candidate on this kind of machine.
    Default,
    /// Taken when no default is possible.
    Fallback,
    /// Taken when no fallback is possible either.
    LastResort,
    /// Taken only by name.
    AskedOnly,
    /// It would be possible if there were room.
    TooBig,
    /// The machine does not have it.
    Impossible,
}

#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) strategy: Strategy,
    pub(super) backing: Backing,
    pub(super) seconds: f64,
    pub(super) duplicated_bytes: u64,
    pub(super) standing: Standing,
    pub(super) why: String,
}

/// Memory that the GPU can use in place, in the order that settles ties: pinned memory costs nothing beyond its allocation
/// and serves every route; ordinary memory comes last because nothing but the GPU's page walk can reach it.
const IN_PLACE: [Backing; 4] = [Backing::Pinned, Backing::Managed, Backing::Registered, Backing::Pageable];

/// Every way, in a fixed order.
pub(super) fn candidates(platform: &Platform, memory: &MemoryFigures, request: &Request) -> Vec<Candidate> {
    let model = Model { platform, memory, request, figures: platform.figures(), capabilities: platform.capabilities() };
    let mut all: Vec<_> = IN_PLACE.into_iter().map(|backing| model.in_place(Strategy::ZeroCopy, backing)).collect();
    let over_link: &[Backing] = if platform.model() == MemoryModel::Coherent { &IN_PLACE } else { &IN_PLACE[..1] };
    all.extend(over_link.iter().map(|&backing| model.in_place(Strategy::Coherent, backing)));
    all.push(model.streamed());
    all.push(model.host());
    all
}

struct Model<'a> {
    platform: &'a Platform,
    memory: &'a MemoryFigures,
    request: &'a Request,
    figures: &'a Figures,
    capabilities: &'a Capabilities,
}

impl Model<'_> {
    fn to_device(&self) -> bool {
        self.request.direction == Direction::HostToDevice
    }

    fn fits_l2(&self) -> bool {
        self.request.bytes <= self.platform.l2_bytes()
    }

    /// All touches after the first.
    fn more_touches(&self) -> f64 {
        f64::from(self.request.access.touches() - 1)
    }

    /// The GPU's touches of bytes in device memory, the first included or not.
    fn device_seconds(&self, first: bool) -> f64 {
        let bytes = self.request.bytes;
        let memory = self.figures.device_memory.seconds(bytes);
        let again = if self.fits_l2() { memory.min(self.figures.l2.seconds(bytes)) } else { memory };
        (if first { memory } else { 0.0 }) + self.more_touches() * again
    }

    /// The GPU uses host memory where it is.
    fn in_place(&self, strategy: Strategy, backing: Backing) -> Candidate {
        let bytes = self.request.bytes;
        let rates = if self.to_device() { &self.figures.read_in_place } else { &self.figures.write_in_place };
        let rate = of(rates, backing);
        let cached = of(&self.figures.l2_caches, backing) && self.fits_l2();
        let touch = rate.seconds(bytes);
        let origin = self.origin(backing);
        let mut seconds = touch;
        seconds += if self.migrates(backing) {
            self.device_seconds(false)
        } else if cached {
            self.more_touches() * touch.min(self.figures.l2.seconds(bytes))
        } else {
            self.more_touches() * touch
        };
        seconds += match origin {
            Origin::Own | Origin::There => 0.0,
            Origin::Registered => self.figures.register.seconds(bytes),
            Origin::Copied => self.figures.host_copy.seconds(bytes),
        };
        let duplicated_bytes = if origin == Origin::Copied { bytes } else { 0 };

        let (standing, why) = self.refused(strategy, backing).unwrap_or_else(|| {
            let (standing, mut why) = self.standing_in_place(strategy, backing, origin);
            why += &format!(", {:.1} GB/s{}", rate.gbs, if rate.assumed { " (assumed)" } else { "" });
            if self.more_touches() > 0.0 && !self.migrates(backing) {
                why += match (of(&self.figures.l2_caches, backing), self.fits_l2()) {
                    (true, true) => ", then from the GPU's L2",
                    (true, false) => ", every time: it does not fit the GPU's L2",
                    (false, _) => ", every time: the GPU's L2 does not keep this memory",
                };
            }
            (standing, why)
        });
        let needs = if matches!(origin, Origin::Own | Origin::Copied) { bytes } else { 0 };
        let (standing, why) = self.fitted(standing, why, needs, self.host_room());
        Candidate { strategy, backing, seconds: self.unless_empty(seconds), duplicated_bytes, standing, why }
    }

    /// A copy into device memory.
    fn streamed(&self) -> Candidate {
        let bytes = self.request.bytes;
        let pageable = matches!(self.request.host, HostMemory::Pageable | HostMemory::ReadOnly);
        let way = match (self.capabilities.can_pin, pageable) {
            (false, _) => CopyWay::Driver,
            (true, true) => CopyWay::Staged,
            (true, false) => CopyWay::Pinned,
        };
        let rate = self.figures.copy(self.to_device(), way);
        let seconds = self.figures.copy_latency + rate.seconds(bytes) + self.device_seconds(true);
        let reused = self.more_touches() > 0.0;
        let mut why = format!("a copy at {:.1} GB/s{}", rate.gbs, if rate.assumed { " (assumed)" } else { "" });
        if reused {
            why += if self.fits_l2() { ", then from the GPU's L2" } else { ", then from device memory" };
        }
        if !self.capabilities.can_pin {
            why += "; page-locked memory is refused, so the driver stages it";
        }
        let standing = match self.platform.model() {
            MemoryModel::Coherent | MemoryModel::Hmm | MemoryModel::Discrete => Standing::Default,
            MemoryModel::Unified => {
                why += "; not by default: it would only duplicate the one memory";
                Standing::LastResort
            }
            MemoryModel::UnifiedMapped if reused && (self.fits_l2() || !self.capabilities.io_coherent) => {
                Standing::Default
            }
            MemoryModel::UnifiedMapped => {
                why += "; not by default: a copy pays here only for reused data that fits the GPU's L2";
                Standing::Fallback
            }
            MemoryModel::HostOnly => {
                why = "there is no device".into();
                Standing::Impossible
            }
        };
        // One memory has to hold both.
        let twice = self.platform.model().is_one_memory() && self.request.host == HostMemory::Any;
        let needs = if twice { bytes.saturating_mul(2) } else { bytes };
        let (standing, why) = self.fitted(standing, why, needs, Some(self.memory.free_bytes));
        let seconds = self.unless_empty(seconds);
        Candidate {
            strategy: Strategy::Streamed,
            backing: Backing::Device,
            seconds,
            duplicated_bytes: bytes,
            standing,
            why,
        }
    }

    /// No device at all.
    fn host(&self) -> Candidate {
        let bytes = self.request.bytes;
        let seconds = f64::from(self.request.access.touches()) * self.figures.host_copy.seconds(bytes);
        let (standing, why) = match self.platform.model() {
            MemoryModel::HostOnly => (Standing::Default, "ordinary memory; there is no device"),
            _ => (Standing::AskedOnly, "only by name: the bytes would never reach the device"),
        };
        let needs = if self.request.host == HostMemory::Any { bytes } else { 0 };
        let (standing, why) = self.fitted(standing, why.into(), needs, self.host_room());
        let seconds = self.unless_empty(seconds);
        Candidate { strategy: Strategy::Host, backing: Backing::Pageable, seconds, duplicated_bytes: 0, standing, why }
    }

    /// Zero bytes need no driver call and no time.
    fn unless_empty(&self, seconds: f64) -> f64 {
        if self.request.bytes == 0 { 0.0 } else { seconds }
    }

    /// What host memory is left for an allocation; `None` where nobody knows.
    fn host_room(&self) -> Option<u64> {
        if self.platform.model().is_one_memory() { Some(self.memory.free_bytes) } else { self.memory.host_available }
    }

    fn fitted(&self, standing: Standing, why: String, needs: u64, room: Option<u64>) -> (Standing, String) {
        match room {
            Some(room) if needs > room && standing < Standing::TooBig => {
                (Standing::TooBig, format!("it needs {needs} bytes and {room} are free"))
            }
            _ => (standing, why),
        }
    }

    /// Memory that moves to the GPU when the GPU first touches it, and is device memory from then on.
    fn migrates(&self, backing: Backing) -> bool {
        match self.platform.model() {
            MemoryModel::Hmm | MemoryModel::Discrete => matches!(backing, Backing::Managed | Backing::Pageable),
            MemoryModel::Coherent => backing == Backing::Managed,
            _ => false,
        }
    }

    /// How the request's bytes come to lie in `backing`.
    fn origin(&self, backing: Backing) -> Origin {
        match (self.request.host, backing) {
            (HostMemory::Any, _) => Origin::Own,
            (HostMemory::Pinned, Backing::Pinned)
            | (HostMemory::Managed, Backing::Managed)
            | (HostMemory::Registered, Backing::Registered)
            | (HostMemory::Pageable | HostMemory::ReadOnly, Backing::Pageable) => Origin::There,
            // Where the device walks the host's page tables, registering locks nothing (cuda.h, cuMemHostRegister).
            (HostMemory::Pageable | HostMemory::ReadOnly, Backing::Registered) => match self.platform.model() {
                MemoryModel::Unified | MemoryModel::Coherent => Origin::There,
                _ => Origin::Registered,
            },
            _ => Origin::Copied,
        }
    }

    /// Why the machine cannot do this at all.
    fn refused(&self, strategy: Strategy, backing: Backing) -> Option<(Standing, String)> {
        let can = self.capabilities;
        let model = self.platform.model();
        let why = if model == MemoryModel::HostOnly {
            "there is no device"
        } else if strategy == Strategy::Coherent && model != MemoryModel::Coherent {
            if model.is_one_memory() {
                "there is no coherent link: CPU and GPU share one memory, zero-copy is the word here"
            } else {
                "there is no coherent link between CPU and GPU"
            }
        } else {
            let read_only = self.request.host == HostMemory::ReadOnly;
            match backing {
                Backing::Pinned if !can.can_pin => "page-locked memory is refused",
                Backing::Pinned if !can.device_reads_pinned => "the device can not use page-locked memory in place",
                Backing::Managed if !can.managed => "managed memory is not supported",
                Backing::Managed if !can.concurrent_managed => {
                    "the CPU must not touch managed memory while the GPU works (CONCURRENT_MANAGED_ACCESS is 0)"
                }
                Backing::Registered if !can.can_register => "host memory can not be registered",
                Backing::Registered if !can.device_reads_registered => {
                    "the device can not use registered memory in place"
                }
                Backing::Registered if read_only && !can.can_register_read_only => {
                    "memory that may only be read can not be registered"
                }
                Backing::Pageable if !can.device_reads_pageable => "the device can not use ordinary memory in place",
                Backing::Device => "device memory is not host memory",
                _ => return None,
            }
        };
        Some((Standing::Impossible, why.into()))
    }

    /// How a possible in-place way stands.
    fn standing_in_place(&self, strategy: Strategy, backing: Backing, origin: Origin) -> (Standing, String) {
        use Standing::{AskedOnly, Default, Fallback, LastResort};
        let migrates = self.migrates(backing);
        let (standing, why) = match self.platform.model() {
            MemoryModel::Coherent if strategy == Strategy::ZeroCopy => {
                (AskedOnly, "this is what the coherent strategy does")
            }
            MemoryModel::Coherent if migrates => (LastResort, "not by default: the pages would move back and forth"),
            MemoryModel::Coherent => (Default, "in place over the coherent link"),
            MemoryModel::Unified
                if self.request.host == HostMemory::ReadOnly
                    && origin != Origin::Copied
                    && !self.figures.reads_mapped_files =>
            {
                (LastResort, "not by default: this GPU is slow on mapped files and was seen to fault on big ones")
            }
            MemoryModel::UnifiedMapped if !self.capabilities.io_coherent && self.more_touches() > 0.0 => (
                Fallback,
                "not by default: neither side caches mapped memory here, and the data is read more than once",
            ),
            MemoryModel::UnifiedMapped if backing == Backing::Pageable => {
                (Fallback, "not by default: the device does not walk the host's page tables")
            }
            MemoryModel::Unified | MemoryModel::UnifiedMapped => (Default, "in place in the one memory"),
            _ if migrates => (LastResort, "not by default: the pages migrate on demand, a copy in disguise"),
            _ => (Fallback, "not by default: every touch would cross PCIe"),
        };
        match origin {
            Origin::Copied if backing == Backing::Pinned => {
                (standing.max(Fallback), "not by default: the CPU would first copy the bytes there".into())
            }
            Origin::Copied => {
                (standing.max(LastResort), "not by default: the CPU would first copy the bytes there".into())
            }
            _ => (standing, why.into()),
        }
    }
}

/// How bytes come to lie in the memory a way needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// We allocate it.
    Own,
    /// They are there.
    There,
    /// The caller's memory is registered first.
    Registered,
    /// The CPU copies them.
    Copied,
}

fn of<T: Copy>(figures: &ByMemory<T>, backing: Backing) -> T {
    match backing {
        Backing::Pinned => figures.pinned,
        Backing::Managed => figures.managed,
        Backing::Registered => figures.registered,
        Backing::Pageable | Backing::Device => figures.pageable,
    }
}

/// The pieces of a copy; 0 where it fits one.
pub(super) fn chunk_bytes(strategy: Strategy, request: &Request) -> u64 {
    let chunk = match (strategy, request.host) {
        (Strategy::Streamed, HostMemory::Pageable | HostMemory::ReadOnly) => STAGED_PIECE as u64,
        (Strategy::Streamed, _) => PINNED_PIECE as u64,
        _ => 0,
    };
    if request.bytes > chunk { chunk } else { 0 }
}

/// The sentence that tells why `chosen` won.
pub(super) fn why_chosen<'a>(
    chosen: &Candidate,
    least: f64,
    group: impl Iterator<Item = &'a Candidate>,
    request: &Request,
) -> String {
    let (strategy, backing) = (chosen.strategy, chosen.backing);
    let mut text = format!("{strategy} in {backing} memory: {}", chosen.why);
    if request.bytes == 0 {
        return text + "; nothing to move";
    }
    text += &format!("; {} estimated", time(chosen.seconds));
    if chosen.seconds > least {
        text += &format!(", within 15 % of the fastest ({}) and duplicates less", time(least));
    }
    let next = group
        .filter(|other| (other.strategy, other.backing) != (strategy, backing))
        .min_by(|a, b| a.seconds.total_cmp(&b.seconds));
    if let Some(next) = next {
        text += &format!("; next: {} in {} memory, {}", next.strategy, next.backing, time(next.seconds));
    }
    text
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}
