//! Reading the system's files under a root: `/`, or a folder that stands in for it.
#![deny(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

use super::memory::{CgroupTexts, HostTexts};

/// Where a device sits, as far as the system tells.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Topology {
    /// Its PCI address; integrated GPUs have one too.
    pub pci_bus_id: Option<String>,
    /// The NUMA node nearest to it.
    pub numa_node: Option<u32>,
    /// Its link's speed now, in the system's words (`32.0 GT/s PCIe`). Links slow down when idle.
    pub link_speed: Option<String>,
    /// The fastest its link can be.
    pub max_link_speed: Option<String>,
    /// Its link's width in lanes.
    pub link_width: Option<u32>,
    /// Who manages the GPU's memory on Grace, in the kernel driver's words: `numa` (the system does, and may put page
    /// cache there) or `driver`.
    pub gpu_memory_mode: Option<String>,
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn trimmed(path: &Path) -> Option<String> {
    Some(text(path)?.trim().to_owned()).filter(|text| !text.is_empty())
}

/// The memory texts for a process on this host; `gpu_node` is the NUMA node that the GPU's memory forms.
pub(crate) fn memory_texts(root: &Path, gpu_node: Option<u32>) -> HostTexts {
    HostTexts {
        meminfo: text(&root.join("proc/meminfo")),
        cgroups: cgroups(root),
        gpu_node_meminfo: gpu_node
            .and_then(|node| text(&root.join(format!("sys/devices/system/node/node{node}/meminfo")))),
    }
}

/// The kernel says that it runs under WSL.
pub(crate) fn is_wsl(root: &Path) -> bool {
    text(&root.join("proc/version")).is_some_and(|version| version.to_ascii_lowercase().contains("microsoft"))
}

pub(crate) fn topology(root: &Path, pci_bus_id: Option<String>) -> Topology {
    let gpu_memory_mode = text(&root.join("proc/driver/nvidia/params")).and_then(|params| {
        let line = params.lines().find_map(|line| line.strip_prefix("CoherentGPUMemoryMode:"))?;
        Some(line.trim().trim_matches('"').to_owned()).filter(|mode| !mode.is_empty())
    });
    let nowhere = Topology { gpu_memory_mode, ..Topology::default() };
    let Some(id) = pci_bus_id else { return nowhere };
    // The id comes from the driver and becomes a path: only its own alphabet passes.
    let plain = id.chars().all(|c| c.is_ascii_hexdigit() || matches!(c, ':' | '.')) && !id.contains("..");
    if !plain {
        return Topology { pci_bus_id: Some(id), ..nowhere };
    }
    let folder = root.join("sys/bus/pci/devices").join(id.to_ascii_lowercase());
    Topology {
        numa_node: trimmed(&folder.join("numa_node")).and_then(|node| node.parse().ok()),
        link_speed: trimmed(&folder.join("current_link_speed")),
        max_link_speed: trimmed(&folder.join("max_link_speed")),
        link_width: trimmed(&folder.join("current_link_width")).and_then(|width| width.parse().ok()),
        pci_bus_id: Some(id),
        ..nowhere
    }
}

/// The groups of this process, in both versions of the interface, each with its parents. Inside a container the path in
/// `/proc/self/cgroup` may be the host's, so the mount's root is always among them.
fn cgroups(root: &Path) -> Vec<CgroupTexts> {
    let own = text(&root.join("proc/self/cgroup")).unwrap_or_default();
    let path_of = |wanted: fn(&str) -> bool| {
        own.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let controllers = parts.next()?;
            if wanted(controllers) { parts.next().map(str::to_owned) } else { None }
        })
    };
    let unified = path_of(str::is_empty).unwrap_or_default();
    let memory = path_of(|controllers| controllers.split(',').any(|name| name == "memory")).unwrap_or_default();
    let mut all = Vec::new();
    let files = [
        ("sys/fs/cgroup", unified, "memory.max", "memory.current"),
        ("sys/fs/cgroup/memory", memory, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ];
    for (mount, path, limit, usage) in files {
        let mount = root.join(mount);
        let group = inside(&mount, &path);
        for folder in group.ancestors().take_while(|folder| folder.starts_with(&mount)) {
            let limit = text(&folder.join(limit));
            if limit.is_some() {
                all.push(CgroupTexts {
                    limit,
                    usage: text(&folder.join(usage)),
                    stat: text(&folder.join("memory.stat")),
                });
            }
        }
    }
    all
}

/// `path` below `mount`, whatever it contains.
fn inside(mount: &Path, path: &str) -> PathBuf {
    path.split('/').filter(|part| !matches!(*part, "" | "." | "..")).fold(mount.to_owned(), |at, part| at.join(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    #[test]
    fn the_groups_above_the_own_one_are_read_in_both_versions() {
        let v2 = tree(&[
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.max", "1000\n"),
            ("sys/fs/cgroup/a/memory.current", "10\n"),
        ]);
        let found = cgroups(v2.path());
        assert_eq!(found.len(), 2);
        assert_eq!(found[1].limit.as_deref(), Some("1000\n"));
        assert_eq!(found[1].usage.as_deref(), Some("10\n"));
        let v1 = tree(&[
            ("proc/self/cgroup", "5:cpu:/x\n4:foo,memory:/gone/from/here\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000\n"),
        ]);
        let found = cgroups(v1.path());
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].limit.as_deref(), Some("2000\n"));
        // A fixture without /proc/self/cgroup still has the mount's own files.
        assert_eq!(cgroups(tree(&[("sys/fs/cgroup/memory.max", "7")]).path()).len(), 1);
        assert!(cgroups(tree(&[]).path()).is_empty());
    }

    #[test]
    fn a_hostile_group_path_stays_below_the_mount() {
        assert_eq!(inside(Path::new("/m"), "/../../etc/./x"), Path::new("/m/etc/x"));
    }

    #[test]
    fn wsl_is_told_by_the_kernel() {
        let wsl = tree(&[("proc/version", "Linux version 5.15.167.4-microsoft-standard-WSL2 (gcc)")]);
        assert!(is_wsl(wsl.path()));
        assert!(!is_wsl(tree(&[("proc/version", "Linux version 6.8.0-generic")]).path()));
        assert!(!is_wsl(tree(&[]).path()));
    }

    #[test]
    fn topology_reads_what_is_there() {
        let root = tree(&[
            ("sys/bus/pci/devices/0000:9a:00.0/numa_node", "1\n"),
            ("sys/bus/pci/devices/0000:9a:00.0/current_link_speed", "32.0 GT/s PCIe\n"),
            ("sys/bus/pci/devices/0000:9a:00.0/current_link_width", "16\n"),
            ("proc/driver/nvidia/params", "Other: 1\nCoherentGPUMemoryMode: \"driver\"\n"),
        ]);
        let found = topology(root.path(), Some("0000:9A:00.0".into()));
        assert_eq!((found.numa_node, found.link_width), (Some(1), Some(16)));
        assert_eq!(found.link_speed.as_deref(), Some("32.0 GT/s PCIe"));
        assert_eq!(found.gpu_memory_mode.as_deref(), Some("driver"));
        let none = topology(root.path(), Some("../../etc".into()));
        assert_eq!(none.numa_node, None);
        // "-1" means that there is no such node.
        let root = tree(&[("sys/bus/pci/devices/0000:01:00.0/numa_node", "-1\n")]);
        assert_eq!(topology(root.path(), Some("0000:01:00.0".into())).numa_node, None);
    }
}
