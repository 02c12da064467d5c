//! Built-in bandwidth figures, by memory model and, where published, by compute capability.
//!
//! The driver's interface carries neither bandwidths nor which memory the GPU's L2 caches. So the planner works from this
//! table until the machine has been measured. The capability picks a finer row and never the model; one that is not in
//! the table gets its model's row. A figure that nobody published is an assumption and says so; two rules give most of
//! them: the GPU reads over a coherent link at 0.89 of what copies reach (335 of 377 GB/s on GH200), and from its L2
//! at three times the rate of its memory.
#![deny(unsafe_code)]

use crate::platform::{Ceiling, MemoryModel};

/// A bandwidth, and whether anybody published it.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Rate {
    /// 10⁹ bytes a second.
    pub gbs: f64,
    /// Nobody published or measured it for this kind of machine.
    pub assumed: bool,
}

impl Rate {
    /// A published or measured figure.
    pub const fn known(gbs: f64) -> Self {
        Self { gbs, assumed: false }
    }

    /// A figure that follows from a rule or a relative.
    pub const fn assumed(gbs: f64) -> Self {
        Self { gbs, assumed: true }
    }

    /// Seconds that `bytes` take. Finite for every rate: one that is not a positive number counts as 1 byte a second.
    pub(crate) fn seconds(self, bytes: u64) -> f64 {
        let rate = self.gbs * 1e9;
        bytes as f64 / if rate.is_finite() { rate.max(1.0) } else { 1.0 }
    }

    pub(crate) const fn times(self, factor: f64) -> Self {
        Self::assumed(self.gbs * factor)
    }
}

/// How a copy gets to or from host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CopyWay {
    /// It is page-locked.
    Pinned,
    /// Through page-locked memory of ours.
    Staged,
    /// The driver does what it does with ordinary memory.
    Driver,
}

/// A figure for each kind of host memory.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ByMemory<T> {
    /// From `cuMemHostAlloc`.
    pub pinned: T,
    /// From `cuMemAllocManaged`.
    pub managed: T,
    /// From `cuMemHostRegister`.
    pub registered: T,
    /// Ordinary memory.
    pub pageable: T,
}

impl<T: Copy> ByMemory<T> {
    const fn all(value: T) -> Self {
        Self { pinned: value, managed: value, registered: value, pageable: value }
    }
}

/// The figures a plan is made from.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Figures {
    /// Where they come from.
    pub source: String,
    /// Copy from page-locked host memory to device memory.
    pub host_to_device: Rate,
    /// Copy from device memory to page-locked host memory.
    pub device_to_host: Rate,
    /// Copy from ordinary host memory to device memory, through page-locked memory.
    pub pageable_to_device: Rate,
    /// Copy from device memory to ordinary host memory, through page-locked memory.
    pub device_to_pageable: Rate,
    /// As `pageable_to_device`, the driver's own way: what is left where no memory can be page-locked.
    pub driver_pageable_to_device: Rate,
    /// As `device_to_pageable`, the driver's own way.
    pub driver_device_to_pageable: Rate,
    /// Seconds that a copy takes however small it is.
    pub copy_latency: f64,
    /// The GPU on device memory.
    pub device_memory: Rate,
    /// The GPU on its L2.
    pub l2: Rate,
    /// The GPU reading host memory in place.
    pub read_in_place: ByMemory<Rate>,
    /// The GPU writing host memory in place.
    pub write_in_place: ByMemory<Rate>,
    /// The GPU's L2 keeps what it read from this memory.
    pub l2_caches: ByMemory<bool>,
    /// Registering memory that has been touched, where that page-locks it.
    pub register: Rate,
    /// One CPU thread copying.
    pub host_copy: Rate,
    /// The GPU reads mapped files in place about as fast as other ordinary memory.
    pub reads_mapped_files: bool,
}

/// 8.8 µs: a 4 KiB copy to an H200 and back to the host, synchronised.
const COPY_LATENCY: f64 = 8.8e-6;
const L2_OVER_MEMORY: f64 = 3.0;
const IN_PLACE_OVER_COPY: f64 = 0.89;
/// What copies through staging are taken to reach of the link's rate, where there are CPUs enough to keep up with it: about what a probe with
/// eight threads of two slots reached on an H200's link.
const STAGED_UP: f64 = 0.92;
const STAGED_DOWN: f64 = 0.85;

impl Figures {
    /// The built-in figures for a memory model; the compute capability picks a finer row where there is one.
    pub fn built_in(model: MemoryModel, compute_capability: Option<(i32, i32)>) -> Self {
        match model {
            MemoryModel::Unified => unified(compute_capability),
            MemoryModel::UnifiedMapped => unified_mapped(compute_capability),
            MemoryModel::Coherent => coherent(compute_capability),
            MemoryModel::Hmm | MemoryModel::Discrete => discrete(compute_capability),
            MemoryModel::HostOnly => host_only(),
        }
    }

    /// Copy to the device, or back.
    pub(crate) fn copy(&self, to_device: bool, way: CopyWay) -> Rate {
        match (to_device, way) {
            (true, CopyWay::Pinned) => self.host_to_device,
            (false, CopyWay::Pinned) => self.device_to_host,
            (true, CopyWay::Staged) => self.pageable_to_device,
            (false, CopyWay::Staged) => self.device_to_pageable,
            (true, CopyWay::Driver) => self.driver_pageable_to_device,
            (false, CopyWay::Driver) => self.driver_device_to_pageable,
        }
    }

    /// Cuts every rate that would cross the link faster than anything can, and sets what is no rate to 1 byte a second;
    /// says so for each. `in_place`: host memory that the GPU uses in place lies behind that link too.
    pub(crate) fn clamp(&mut self, ceiling: &Ceiling, in_place: bool) -> Vec<String> {
        let mut notes = Vec::new();
        let mut cut = |what: &str, rate: &mut Rate, link: bool| {
            if !(rate.gbs.is_finite() && rate.gbs > 0.0) {
                notes.push(format!("{what}: {} GB/s is no rate, it counts as none", rate.gbs));
                *rate = Rate::assumed(1e-9);
            } else if link {
                let gbs = ceiling.clamp(what, rate.gbs, &mut notes);
                if gbs < rate.gbs {
                    *rate = Rate::assumed(gbs);
                }
            }
        };
        cut("copy to the device", &mut self.host_to_device, true);
        cut("copy to the host", &mut self.device_to_host, true);
        cut("copy from pageable memory", &mut self.pageable_to_device, true);
        cut("copy to pageable memory", &mut self.device_to_pageable, true);
        cut("the driver's copy from pageable memory", &mut self.driver_pageable_to_device, true);
        cut("the driver's copy to pageable memory", &mut self.driver_device_to_pageable, true);
        for (what, rates) in [("read in place", &mut self.read_in_place), ("write in place", &mut self.write_in_place)]
        {
            for rate in [&mut rates.pinned, &mut rates.managed, &mut rates.registered, &mut rates.pageable] {
                cut(what, rate, in_place);
            }
        }
        cut("device memory", &mut self.device_memory, false);
        cut("L2", &mut self.l2, false);
        cut("registering", &mut self.register, false);
        cut("copy on the host", &mut self.host_copy, false);
        if !(self.copy_latency.is_finite() && self.copy_latency >= 0.0) {
            notes.push(format!("latency of a copy: {} s is no time, it counts as {COPY_LATENCY} s", self.copy_latency));
            self.copy_latency = COPY_LATENCY;
        }
        notes
    }
}

/// Copies between device memory and host memory that is the same memory: nobody published one for these machines, but
/// such a copy reads and writes each byte once, so half the memory's rate bounds it.
fn unified(cc: Option<(i32, i32)>) -> Figures {
    let memory = Rate::known(236.0);
    let base = Figures {
        source: "unified memory, any".into(),
        host_to_device: memory.times(0.5),
        device_to_host: memory.times(0.5),
        pageable_to_device: memory.times(0.5 * STAGED_UP),
        device_to_pageable: memory.times(0.5 * STAGED_DOWN),
        driver_pageable_to_device: Rate::known(4.14),
        driver_device_to_pageable: Rate::assumed(4.14),
        copy_latency: COPY_LATENCY,
        device_memory: memory.times(1.0),
        l2: memory.times(L2_OVER_MEMORY),
        read_in_place: ByMemory {
            pinned: Rate::assumed(196.0),
            managed: Rate::assumed(162.0),
            registered: Rate::assumed(161.0),
            pageable: Rate::assumed(161.0),
        },
        write_in_place: ByMemory::all(Rate::assumed(161.0)),
        // What all published members of the class have in common.
        l2_caches: ByMemory { pinned: false, managed: false, registered: true, pageable: true },
        register: Rate::assumed(100.0),
        host_copy: Rate::known(55.0),
        reads_mapped_files: true,
    };
    match cc {
        // DGX Spark. In-place reads: rborkow/umseq, RESULTS-T6. The cache keeps managed memory
        // (open-gpu-kernel-modules, gpu_should_cache_sysmem) and not pinned memory (379 ns against 138).
        Some((12, 1)) => {
            let read = ByMemory {
                pinned: Rate::known(196.0),
                managed: Rate::known(162.0),
                registered: Rate::assumed(161.0),
                pageable: Rate::known(161.0),
            };
            Figures {
                source: "unified memory, compute capability 12.1 (DGX Spark)".into(),
                device_memory: memory,
                read_in_place: read,
                write_in_place: read.map(|rate| rate.times(1.0)),
                l2_caches: ByMemory { pinned: false, managed: true, registered: true, pageable: true },
                ..base
            }
        }
        // Jetson Thor: 250 GB/s GPU triad on mapped memory; caching by the CUDA for Tegra application note, table 1.
        // Mapped files: 1.3 GiB/s, and a fault from 64 GiB on (single report).
        Some((11, 0)) => {
            let memory = Rate::known(250.2);
            Figures {
                source: "unified memory, compute capability 11.0 (Jetson Thor)".into(),
                host_to_device: memory.times(0.5),
                device_to_host: memory.times(0.5),
                device_memory: memory,
                l2: memory.times(L2_OVER_MEMORY),
                read_in_place: ByMemory { pinned: memory, ..ByMemory::all(memory.times(1.0)) },
                write_in_place: ByMemory { pinned: memory, ..ByMemory::all(memory.times(1.0)) },
                l2_caches: ByMemory { pinned: false, managed: false, registered: true, pageable: true },
                reads_mapped_files: false,
                ..base
            }
        }
        _ => base,
    }
}

/// Jetson Orin and Xavier. Memory at 0.85 of the vendor's peak (GB10 reaches 0.86 of its own); copies measured on Orin in
/// a low-power mode. Caching by the CUDA for Tegra application note: pinned and registered memory are not cached.
fn unified_mapped(cc: Option<(i32, i32)>) -> Figures {
    let (name, memory) = match cc {
        Some((8, 7)) => ("compute capability 8.7 (Jetson Orin)", Rate::assumed(0.85 * 204.8)),
        Some((7, 2)) => ("compute capability 7.2 (Jetson Xavier)", Rate::assumed(0.85 * 136.5)),
        Some((12, 1)) => ("compute capability 12.1", Rate::assumed(236.0)),
        _ => ("any", Rate::assumed(0.85 * 204.8)),
    };
    // Before 7.2 mapped memory is cached by neither side, and kernels on it are slower than a copy would have been
    // (NVIDIA forum t/42504). How much slower is an assumption.
    let in_place = if cc.is_some_and(|cc| cc < (7, 2)) { memory.times(0.25) } else { memory };
    Figures {
        source: format!("unified mapped memory, {name}"),
        host_to_device: Rate::known(15.6),
        device_to_host: Rate::known(14.8),
        pageable_to_device: Rate::assumed(7.8),
        device_to_pageable: Rate::assumed(7.4),
        driver_pageable_to_device: Rate::assumed(7.8),
        driver_device_to_pageable: Rate::assumed(7.4),
        copy_latency: COPY_LATENCY,
        device_memory: memory,
        l2: memory.times(L2_OVER_MEMORY),
        read_in_place: ByMemory::all(in_place),
        write_in_place: ByMemory::all(in_place),
        l2_caches: ByMemory { pinned: false, managed: true, registered: false, pageable: false },
        register: Rate::assumed(23.0),
        host_copy: Rate::assumed(10.0),
        reads_mapped_files: false,
    }
}

/// Grace. The GPU does not cache the CPU's memory (DGX Station development guide), pinned and ordinary memory are the
/// same speed to it (335 GB/s each, dnhkng's GH200 runs), and managed memory migrates (18 to 29 GB/s when both touch it).
fn coherent(cc: Option<(i32, i32)>) -> Figures {
    let (name, to_device, to_host, memory) = match cc {
        Some((9, 0)) => ("9.0 (GH200)", Rate::known(377.0), Rate::known(297.0), Rate::known(3728.0)),
        Some((10, 0)) => ("10.0 (GB200)", Rate::known(201.0), Rate::known(193.0), Rate::assumed(7672.0)),
        Some((10, 3)) => ("10.3 (GB300)", Rate::known(359.05), Rate::known(377.15), Rate::assumed(7478.0)),
        _ => ("any", Rate::assumed(201.0), Rate::assumed(193.0), Rate::assumed(3728.0)),
    };
    let in_place =
        |copy: Rate| ByMemory { managed: Rate::known(23.0), ..ByMemory::all(copy.times(IN_PLACE_OVER_COPY)) };
    Figures {
        source: format!("coherent link, compute capability {name}"),
        host_to_device: to_device,
        device_to_host: to_host,
        pageable_to_device: to_device.times(1.0),
        device_to_pageable: to_host.times(1.0),
        driver_pageable_to_device: to_device.times(1.0),
        driver_device_to_pageable: to_host.times(1.0),
        copy_latency: COPY_LATENCY,
        device_memory: memory,
        l2: memory.times(L2_OVER_MEMORY),
        read_in_place: in_place(to_device),
        write_in_place: in_place(to_host),
        l2_caches: ByMemory::all(false),
        register: Rate::assumed(100.0),
        host_copy: Rate::assumed(30.0),
        reads_mapped_files: true,
    }
}

/// PCIe. H200 and B300 measured; the others from the link's generation and the memory's data sheet.
fn discrete(cc: Option<(i32, i32)>) -> Figures {
    let (name, to_device, to_host, memory) = match cc {
        Some((9, 0)) => ("9.0 (H100, H200)", Rate::known(55.3), Rate::known(55.2), Rate::known(4800.0)),
        Some((10, 0)) => ("10.0 (B200)", Rate::assumed(57.6), Rate::assumed(57.3), Rate::known(7672.0)),
        Some((10, 3)) => ("10.3 (B300)", Rate::known(57.6), Rate::known(57.3), Rate::known(7478.0)),
        Some((12, 0)) => ("12.0 (RTX 50)", Rate::assumed(55.0), Rate::assumed(55.0), Rate::assumed(1792.0)),
        Some((8, 9)) => ("8.9 (L4, L40S, RTX 40)", Rate::assumed(25.5), Rate::assumed(25.5), Rate::assumed(864.0)),
        Some((8, 0)) => ("8.0 (A100)", Rate::assumed(25.0), Rate::assumed(25.0), Rate::assumed(1935.0)),
        Some((7, 5)) => ("7.5 (T4)", Rate::assumed(12.0), Rate::assumed(12.0), Rate::assumed(320.0)),
        _ => ("any", Rate::assumed(25.0), Rate::assumed(25.0), Rate::assumed(800.0)),
    };
    let (read, write) = match cc {
        Some((9, 0)) => (Rate::known(51.1), Rate::known(52.4)),
        Some((10, 3)) => (Rate::known(53.8), Rate::known(52.8)),
        Some((8, 0)) => (Rate::known(25.1), Rate::assumed(25.0)),
        _ => (to_device.times(0.92), to_host.times(0.92)),
    };
    let (staged_up, staged_down) = (to_device.times(STAGED_UP), to_host.times(STAGED_DOWN));
    // In place, managed and HMM memory migrate on the first touch: at the rate of a prefetch (40.9 of 55.3 GB/s on the
    // H200, 9.8 back) and of a cold HMM fault.
    let in_place = |rate: Rate, migrate: Rate| ByMemory {
        pinned: rate,
        managed: migrate,
        registered: rate.times(1.0),
        pageable: Rate::assumed(2.8),
    };
    Figures {
        source: format!("PCIe, compute capability {name}"),
        host_to_device: to_device,
        device_to_host: to_host,
        pageable_to_device: staged_up,
        device_to_pageable: staged_down,
        driver_pageable_to_device: to_device.times(0.12),
        driver_device_to_pageable: to_host.times(0.2),
        copy_latency: COPY_LATENCY,
        device_memory: memory,
        l2: memory.times(L2_OVER_MEMORY),
        read_in_place: in_place(read, to_device.times(0.74)),
        write_in_place: in_place(write, to_host.times(0.18)),
        l2_caches: ByMemory::all(false),
        register: Rate::known(23.3),
        host_copy: Rate::known(9.9),
        reads_mapped_files: false,
    }
}

fn host_only() -> Figures {
    let memory = Rate::assumed(10.0);
    Figures {
        source: "no device".into(),
        host_to_device: memory,
        device_to_host: memory,
        pageable_to_device: memory,
        device_to_pageable: memory,
        driver_pageable_to_device: memory,
        driver_device_to_pageable: memory,
        copy_latency: 0.0,
        device_memory: memory,
        l2: memory,
        read_in_place: ByMemory::all(memory),
        write_in_place: ByMemory::all(memory),
        l2_caches: ByMemory::all(false),
        register: memory,
        host_copy: memory,
        reads_mapped_files: true,
    }
}

impl<T> ByMemory<T> {
    pub(crate) fn map<U>(self, change: impl Fn(T) -> U) -> ByMemory<U> {
        ByMemory {
            pinned: change(self.pinned),
            managed: change(self.managed),
            registered: change(self.registered),
            pageable: change(self.pageable),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_capability_gets_the_figures_of_its_model() {
        for &model in MemoryModel::ALL {
            let any = Figures::built_in(model, None);
            assert_eq!(Figures::built_in(model, Some((99, 7))), any);
            assert!(any.device_memory.gbs > 0.0);
        }
    }

    #[test]
    fn the_l2_is_never_slower_than_what_it_caches() {
        for &model in MemoryModel::ALL {
            for cc in [
                (5, 3),
                (6, 2),
                (7, 2),
                (7, 5),
                (8, 0),
                (8, 7),
                (8, 9),
                (9, 0),
                (10, 0),
                (10, 3),
                (11, 0),
                (12, 0),
                (12, 1),
            ] {
                let figures = Figures::built_in(model, Some(cc));
                let ByMemory { pinned, managed, registered, pageable } = figures.read_in_place;
                for rate in [figures.device_memory, pinned, managed, registered, pageable] {
                    assert!(figures.l2.gbs >= rate.gbs, "{model} {cc:?}");
                }
            }
        }
    }

    #[test]
    fn seconds_are_finite_whatever_the_rate() {
        for gbs in [0.0, -1.0, f64::NAN, f64::INFINITY, f64::MIN_POSITIVE, 1e300] {
            let seconds = Rate::known(gbs).seconds(u64::MAX);
            assert!(seconds.is_finite() && seconds >= 0.0, "{gbs}: {seconds}");
        }
    }
}
