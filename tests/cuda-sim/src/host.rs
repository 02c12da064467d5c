//! The host beside a simulated device: its figures, and a tree of files in place of /proc and /sys.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

use crate::profile::{Profile, attribute};

/// Which control-group interface limits the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CgroupVersion {
    /// `memory.limit_in_bytes` and `memory.usage_in_bytes` under the memory controller.
    V1,
    /// `memory.max` and `memory.current` in the unified hierarchy.
    #[default]
    V2,
}

/// What the host's files report, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFigures {
    /// `MemTotal`.
    pub total: u64,
    /// `MemAvailable`: free, or reclaimable at once.
    pub available: u64,
    /// `MemFree`, which page cache eats up.
    pub free: u64,
    /// `SwapFree`.
    pub swap_free: u64,
    /// The control group's limit, if it has one.
    pub cgroup_limit: Option<u64>,
    /// What the control group uses now.
    pub cgroup_used: u64,
    /// Where the limit is written.
    pub cgroup_version: CgroupVersion,
    /// NUMA nodes that have CPUs.
    pub numa_nodes: u32,
    /// The kernel's page size.
    pub page_size: u64,
}

impl HostFigures {
    /// A host with this much memory, an eighth of it in use, one node, 4 KiB pages, no limit.
    #[must_use]
    pub fn new(total: u64) -> Self {
        let available = total - total / 8;
        Self {
            total,
            available,
            free: available,
            swap_free: 0,
            cgroup_limit: None,
            cgroup_used: 0,
            cgroup_version: CgroupVersion::V2,
            numa_nodes: 1,
            page_size: 4096,
        }
    }
}

/// CPUs on each node of the tree.
const CPUS_PER_NODE: u32 = 16;

/// Writes the files that stand in for /proc and /sys on the host of this profile.
///
/// `pci_bus_id` is what `cuDeviceGetPCIBusId` answers, e.g. `0000:3B:00.0`. The tree is written
/// over an older one, so that figures may change while a test runs; files of a limit that is
/// gone are removed.
///
/// # Errors
/// As the file system's.
pub fn write_host_tree(dir: &Path, profile: &Profile, figures: &HostFigures, pci_bus_id: &str) -> io::Result<()> {
    let tree = Tree(dir);
    tree.put("proc/meminfo", meminfo(figures))?;
    tree.put("proc/version", kernel_version(profile))?;
    tree.put("proc/self/auxv", auxiliary_vector(figures.page_size))?;
    tree.put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")?;
    tree.cgroup(figures)?;
    tree.nodes(profile, figures)?;
    tree.pci(profile, pci_bus_id)?;
    if profile.has(attribute::USES_HOST_PAGE_TABLES) && !profile.has(attribute::INTEGRATED) {
        let mode = if profile.has(attribute::NUMA_CONFIG) { "numa" } else { "driver" };
        let line = format!("CoherentGPUMemoryMode: \"{mode}\"\n");
        tree.put("proc/driver/nvidia/params", &line)?;
    }
    Ok(())
}

fn meminfo(figures: &HostFigures) -> String {
    let HostFigures { total, available, free, swap_free, .. } = *figures;
    let lines = [
        ("MemTotal:", total),
        ("MemFree:", free),
        ("MemAvailable:", available),
        ("Buffers:", 0),
        ("Cached:", available.saturating_sub(free)),
        ("SwapTotal:", swap_free),
        ("SwapFree:", swap_free),
    ];
    let mut text = String::new();
    for (name, bytes) in lines {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{name:<16}{:>12} kB", bytes / 1024);
    }
    text.push_str("HugePages_Total:       0\nHugePages_Free:        0\nHugepagesize:       2048 kB\n");
    text
}

/// The kernel's own line: WSL is told by the name of its builder.
fn kernel_version(profile: &Profile) -> &'static str {
    if profile.os.contains("WSL") {
        "Linux version 5.15.167.4-microsoft-standard-WSL2 (simulated) #1 SMP\n"
    } else if profile.os.contains("L4T") {
        "Linux version 5.15.148-tegra (simulated) #1 SMP PREEMPT\n"
    } else {
        "Linux version 6.8.0-simulated (simulated) #1 SMP PREEMPT_DYNAMIC\n"
    }
}

/// `AT_PAGESZ` and the terminator, in the layout of the machine that reads them.
fn auxiliary_vector(page_size: u64) -> Vec<u8> {
    const AT_PAGESZ: u64 = 6;
    [AT_PAGESZ, page_size, 0, 0].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// A directory that files are put under.
struct Tree<'a>(&'a Path);

impl Tree<'_> {
    fn put(&self, name: impl AsRef<Path>, content: impl AsRef<[u8]>) -> io::Result<()> {
        let path = self.0.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        // A reader on another thread sees the old file or the new one, never half of either.
        let mut beside = path.clone().into_os_string();
        beside.push(".new");
        fs::write(&beside, content)?;
        fs::rename(beside, path)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.0.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn cgroup(&self, figures: &HostFigures) -> io::Result<()> {
        const V1: [&str; 2] =
            ["sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"];
        const V2: [&str; 2] = ["sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"];
        let (ours, theirs) = match figures.cgroup_version {
            CgroupVersion::V1 => (V1, V2),
            CgroupVersion::V2 => (V2, V1),
        };
        for name in theirs {
            self.remove(name)?;
        }
        let membership = match figures.cgroup_version {
            CgroupVersion::V1 => "9:memory:/\n0::/\n",
            CgroupVersion::V2 => "0::/\n",
        };
        self.put("proc/self/cgroup", membership)?;
        let Some(limit) = figures.cgroup_limit else {
            for name in ours {
                self.remove(name)?;
            }
            return Ok(());
        };
        self.put(ours[0], format!("{limit}\n"))?;
        self.put(ours[1], format!("{}\n", figures.cgroup_used))
    }

    fn nodes(&self, profile: &Profile, figures: &HostFigures) -> io::Result<()> {
        let nodes = figures.numa_nodes.max(1);
        let share = figures.total / u64::from(nodes);
        for node in 0..nodes {
            let first = node * CPUS_PER_NODE;
            self.node(node, &format!("{first}-{}", first + CPUS_PER_NODE - 1), share)?;
        }
        let mut online = if nodes == 1 { "0".to_owned() } else { format!("0-{}", nodes - 1) };
        // In NUMA mode the GPU's memory is a node without CPUs.
        let own_node = profile.attribute(attribute::NUMA_ID).and_then(|id| u32::try_from(id).ok());
        if let Some(node) = own_node.filter(|id| *id >= nodes && profile.has(attribute::NUMA_CONFIG)) {
            self.node(node, "", profile.total_mem)?;
            let _ = write!(online, ",{node}");
        }
        online.push('\n');
        self.put("sys/devices/system/node/online", &online)
    }

    fn node(&self, node: u32, cpus: &str, bytes: u64) -> io::Result<()> {
        let dir = format!("sys/devices/system/node/node{node}");
        self.put(format!("{dir}/cpulist"), format!("{cpus}\n"))?;
        let kib = bytes / 1024;
        let meminfo = format!("Node {node} MemTotal: {kib} kB\nNode {node} MemFree: {kib} kB\n");
        self.put(format!("{dir}/meminfo"), meminfo)
    }

    fn pci(&self, profile: &Profile, bus_id: &str) -> io::Result<()> {
        let dir = format!("sys/bus/pci/devices/{}", bus_id.to_ascii_lowercase());
        let node = profile.attribute(attribute::HOST_NUMA_ID).unwrap_or(-1);
        self.put(format!("{dir}/numa_node"), format!("{node}\n"))?;
        if profile.has(attribute::INTEGRATED) || profile.has(attribute::USES_HOST_PAGE_TABLES) {
            // Their bytes go over another link; what PCIe says means nothing.
            return Ok(());
        }
        let speed = match profile.bandwidth.h2d_pinned {
            rate if rate > 30.0 => "32.0 GT/s PCIe",
            rate if rate > 15.0 => "16.0 GT/s PCIe",
            _ => "8.0 GT/s PCIe",
        };
        for name in ["current_link_speed", "max_link_speed"] {
            self.put(format!("{dir}/{name}"), format!("{speed}\n"))?;
        }
        for name in ["current_link_width", "max_link_width"] {
            self.put(format!("{dir}/{name}"), "16\n")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scratch(std::path::PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("cuda-sim-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&dir);
            Self(dir)
        }

        fn read(&self, name: &str) -> Option<String> {
            fs::read_to_string(self.0.join(name)).ok()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn every_built_in_profile_has_a_tree() {
        for key in Profile::builtin_keys() {
            let profile = Profile::builtin(key).unwrap();
            let scratch = Scratch::new(key);
            write_host_tree(&scratch.0, &profile, &profile.host, "0000:3B:00.0").unwrap();
            let meminfo = scratch.read("proc/meminfo").unwrap();
            assert!(meminfo.contains("MemAvailable:"), "{key}");
            let wsl = scratch.read("proc/version").unwrap().contains("microsoft");
            assert_eq!(wsl, key.starts_with("wsl2") || key.starts_with("rtx_spark"), "{key}");
            assert!(scratch.read("sys/bus/pci/devices/0000:3b:00.0/numa_node").is_some());
        }
    }

    #[test]
    fn a_limit_is_written_where_its_version_keeps_it_and_goes_away() {
        let profile = Profile::builtin("x86_h200_sxm_gen5").unwrap();
        let scratch = Scratch::new("cgroup");
        let mut figures = HostFigures::new(64 << 30);
        figures.cgroup_limit = Some(8 << 30);
        figures.cgroup_used = 1 << 30;
        write_host_tree(&scratch.0, &profile, &figures, "0000:01:00.0").unwrap();
        assert_eq!(scratch.read("sys/fs/cgroup/memory.max").unwrap(), "8589934592\n");
        figures.cgroup_version = CgroupVersion::V1;
        write_host_tree(&scratch.0, &profile, &figures, "0000:01:00.0").unwrap();
        assert_eq!(scratch.read("sys/fs/cgroup/memory.max"), None);
        let used = scratch.read("sys/fs/cgroup/memory/memory.usage_in_bytes").unwrap();
        assert_eq!(used, "1073741824\n");
        figures.cgroup_limit = None;
        write_host_tree(&scratch.0, &profile, &figures, "0000:01:00.0").unwrap();
        assert_eq!(scratch.read("sys/fs/cgroup/memory/memory.limit_in_bytes"), None);
    }

    #[test]
    fn grace_in_numa_mode_shows_its_memory_as_a_node_without_cpus() {
        let scratch = Scratch::new("numa");
        let profile = Profile::builtin("gh200_480gb_numa").unwrap();
        write_host_tree(&scratch.0, &profile, &profile.host, "0009:01:00.0").unwrap();
        assert_eq!(scratch.read("sys/devices/system/node/online").unwrap(), "0,1\n");
        assert_eq!(scratch.read("sys/devices/system/node/node1/cpulist").unwrap(), "\n");
        assert!(scratch.read("proc/driver/nvidia/params").unwrap().contains("numa"));
        let link = scratch.read("sys/bus/pci/devices/0009:01:00.0/current_link_speed");
        assert_eq!(link, None);
    }
}
