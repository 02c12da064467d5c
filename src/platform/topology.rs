//! Where a device sits: its link, and the memory and CPUs near it. Pure: texts in, numbers out.
#![deny(unsafe_code)]

use super::model::MemoryModel;

/// Where a device sits, as far as the system tells.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct Topology {
    /// Its PCI address; integrated GPUs have one too.
    pub pci_bus_id: Option<String>,
    /// The NUMA node nearest to it that has CPUs: where host memory for it belongs.
    pub numa_node: Option<u32>,
    /// The CPUs of that node, ascending; empty where the system does not tell.
    pub numa_cpus: Vec<u32>,
    /// The host's NUMA nodes that have CPUs.
    pub host_nodes: Vec<u32>,
    /// The NUMA nodes without CPUs, such as the GPU's own memory on Grace: no places for host memory.
    pub memory_nodes: Vec<u32>,
    /// Its link's speed now, in the system's words (`32.0 GT/s PCIe`). Links slow down when idle.
    pub link_speed: Option<String>,
    /// The fastest its link can be.
    pub max_link_speed: Option<String>,
    /// Its link's width in lanes.
    pub link_width: Option<u32>,
    /// The widest its link can be.
    pub max_link_width: Option<u32>,
    /// Who manages the GPU's memory on Grace, in the kernel driver's words: `numa` (the system does, and may put page
    /// cache there) or `driver`.
    pub gpu_memory_mode: Option<String>,
}

impl Topology {
    /// What the PCIe link could carry one way at its fastest and widest, in GB/s, packet headers not counted; `None` where
    /// the system does not tell. Says nothing about GPUs whose bytes take another way (integrated ones, Grace).
    pub fn link_gbs(&self) -> Option<f64> {
        let fastest = [&self.link_speed, &self.max_link_speed].into_iter().flatten().filter_map(|text| transfers(text));
        let widest =
            [self.link_width, self.max_link_width].into_iter().flatten().filter(|width| (1..=32).contains(width));
        Some(lane_gbs(fastest.reduce(f64::max)?) * f64::from(widest.max()?))
    }

    /// Whether the PCIe link is as fast and as wide as it can be; `None` where the system does not tell. Links slow down when
    /// idle.
    pub fn link_is_at_maximum(&self) -> Option<bool> {
        let (now, most) = (transfers(self.link_speed.as_deref()?)?, transfers(self.max_link_speed.as_deref()?)?);
        Some(now >= most && self.link_width? >= self.max_link_width?)
    }

    /// The link in words, such as `32.0 GT/s PCIe x16`, and what it could be where that is more.
    pub(crate) fn link(&self) -> Option<String> {
        let mut text = format!("{} x{}", self.link_speed.as_deref()?, self.link_width?);
        if let (Some(false), Some(speed), Some(width)) =
            (self.link_is_at_maximum(), &self.max_link_speed, self.max_link_width)
        {
            text += &format!(" (of {speed} x{width})");
        }
        Some(text)
    }
}

/// Billions of transfers a second from `32.0 GT/s PCIe` or `16 GT/s`.
fn transfers(text: &str) -> Option<f64> {
    let (number, _) = text.trim().split_once("GT/s")?;
    number.trim().parse().ok().filter(|rate: &f64| rate.is_finite() && (1.0..=1024.0).contains(rate))
}

/// GB/s of one lane, encoding taken off: 8 of 10 bits before PCIe 3, 128 of 130 before PCIe 6, 236 of 256 bytes since.
fn lane_gbs(transfers: f64) -> f64 {
    let share = match transfers {
        rate if rate < 8.0 => 0.8,
        rate if rate < 64.0 => 128.0 / 130.0,
        _ => 236.0 / 256.0,
    };
    transfers * share / 8.0
}

/// The most that a copy between host and device could reach one way, in GB/s, and what says so.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Ceiling {
    pub(crate) gbs: f64,
    pub(crate) why: String,
}

impl Ceiling {
    /// `memory` is the rate of the GPU on its memory in GB/s.
    pub(crate) fn of(model: MemoryModel, topology: &Topology, memory: f64) -> Self {
        let (gbs, why) = match model {
            MemoryModel::Hmm | MemoryModel::Discrete => match topology.link_gbs() {
                Some(gbs) => (gbs, "PCIe link"),
                // PCIe 7.0, sixteen lanes.
                None => (lane_gbs(128.0) * 16.0, "fastest PCIe link there is"),
            },
            // NVLink-C2C carries 900 GB/s, half of it each way.
            MemoryModel::Coherent => (450.0, "coherent link"),
            // A copy reads and writes the one memory; caches may help.
            MemoryModel::Unified | MemoryModel::UnifiedMapped => (2.0 * memory, "memory"),
            MemoryModel::HostOnly => (4000.0, "host memory"),
        };
        let gbs = if gbs.is_finite() && gbs > 0.0 { gbs } else { 4000.0 };
        Self { gbs, why: format!("the {why} carries at most {gbs:.1} GB/s") }
    }

    /// `gbs`, or the ceiling if it is above it; then `notes` gets the reason.
    pub(crate) fn clamp(&self, what: &str, gbs: f64, notes: &mut Vec<String>) -> f64 {
        if gbs <= self.gbs {
            return gbs;
        }
        notes.push(format!("{what}: {gbs:.1} GB/s is taken as {:.1}: {}", self.gbs, self.why));
        self.gbs
    }
}

/// No machine has more CPUs or nodes; a list that names more is nonsense.
const MOST: u32 = 1 << 16;

/// The numbers of a list such as `0-3,8,10-11`, as the kernel writes CPUs and nodes, ascending. What is no number is passed
/// over.
pub(crate) fn list(text: &str) -> Vec<u32> {
    let mut all = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>())
            && last < MOST
        {
            all.extend(first..=last);
        }
    }
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn link(now: (&str, u32), most: (&str, u32)) -> Topology {
        Topology {
            link_speed: Some(now.0.into()),
            link_width: Some(now.1),
            max_link_speed: Some(most.0.into()),
            max_link_width: Some(most.1),
            ..Topology::default()
        }
    }

    #[test]
    fn a_link_that_sleeps_is_rated_by_what_it_can_be() {
        let asleep = link(("2.5 GT/s PCIe", 16), ("32.0 GT/s PCIe", 16));
        assert!((asleep.link_gbs().unwrap() - 63.0).abs() < 0.1);
        assert_eq!(asleep.link_is_at_maximum(), Some(false));
        assert_eq!(asleep.link().unwrap(), "2.5 GT/s PCIe x16 (of 32.0 GT/s PCIe x16)");
        let awake = link(("16.0 GT/s PCIe", 16), ("16.0 GT/s PCIe", 16));
        assert!((awake.link_gbs().unwrap() - 31.5).abs() < 0.1);
        assert_eq!(awake.link_is_at_maximum(), Some(true));
        // In a slot with half the lanes.
        assert_eq!(link(("16.0 GT/s PCIe", 8), ("16.0 GT/s PCIe", 16)).link_is_at_maximum(), Some(false));
        assert!((link(("5.0 GT/s PCIe", 1), ("5.0 GT/s PCIe", 1)).link_gbs().unwrap() - 0.5).abs() < 0.01);
        assert!((link(("64.0 GT/s PCIe", 16), ("64.0 GT/s PCIe", 16)).link_gbs().unwrap() - 118.0).abs() < 1.0);
    }

    #[test]
    fn what_the_system_does_not_know_is_no_link() {
        for speed in ["Unknown", "", "GT/s", "-1 GT/s", "1e9 GT/s", "NaN GT/s"] {
            assert_eq!(link((speed, 16), (speed, 16)).link_gbs(), None, "{speed}");
            assert_eq!(link((speed, 16), (speed, 16)).link_is_at_maximum(), None, "{speed}");
        }
        assert_eq!(link(("8.0 GT/s PCIe", 0), ("8.0 GT/s PCIe", 63)).link_gbs(), None);
        assert_eq!(Topology::default().link_gbs(), None);
    }

    /// R97: a default of 12,500 GB/s over PCIe 5 made everything free.
    #[test]
    fn more_than_the_link_carries_is_cut_and_said() {
        let topology = link(("32.0 GT/s PCIe", 16), ("32.0 GT/s PCIe", 16));
        let mut notes = Vec::new();
        let ceiling = Ceiling::of(MemoryModel::Discrete, &topology, 4800.0);
        assert_eq!(ceiling.clamp("up", 55.3, &mut notes), 55.3);
        assert!(notes.is_empty());
        assert!((ceiling.clamp("up", 12_500.0, &mut notes) - 63.0).abs() < 0.1);
        assert!(notes[0].contains("12500.0 GB/s") && notes[0].contains("PCIe link"), "{notes:?}");
        // Grace's bytes do not go over PCIe, whatever PCIe says.
        let coherent = Ceiling::of(MemoryModel::Coherent, &link(("2.5 GT/s", 1), ("2.5 GT/s", 1)), 3728.0);
        assert_eq!(coherent.clamp("up", 377.0, &mut Vec::new()), 377.0);
        assert_eq!(Ceiling::of(MemoryModel::Unified, &Topology::default(), 236.0).gbs, 472.0);
        for memory in [f64::NAN, -1.0, f64::INFINITY, 0.0] {
            assert!(Ceiling::of(MemoryModel::Unified, &Topology::default(), memory).gbs.is_finite());
        }
    }

    #[test]
    fn lists_of_the_kernel_are_read() {
        assert_eq!(list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(list("\n"), [0u32; 0]);
        assert_eq!(list("3,1,1-2"), [1, 2, 3]);
        assert_eq!(list("0-4294967295,7,x,-,5-2"), [7]);
    }

    proptest! {
        #[test]
        fn no_text_makes_a_list_absurd(text in "[0-9,\\- x]{0,40}") {
            let all = list(&text);
            prop_assert!(all.len() <= MOST as usize);
            prop_assert!(all.is_sorted());
        }
    }
}
