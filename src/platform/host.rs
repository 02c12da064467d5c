//! Reading the system's files under a root: `/`, or a folder that stands in for it.
#![deny(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::memory::{CgroupTexts, HostTexts};
use super::topology::{Topology, list};

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

/// `host_node` is the NUMA node that the driver calls the device's on the host; what PCI says goes first.
pub(crate) fn topology(root: &Path, pci_bus_id: Option<String>, host_node: Option<u32>) -> Topology {
    let gpu_memory_mode = text(&root.join("proc/driver/nvidia/params")).and_then(|params| {
        let line = params.lines().find_map(|line| line.strip_prefix("CoherentGPUMemoryMode:"))?;
        Some(line.trim().trim_matches('"').to_owned()).filter(|mode| !mode.is_empty())
    });
    let nodes = nodes(root);
    // The id comes from the driver and becomes a path: only its own alphabet passes.
    let plain = |id: &&String| {
        id.chars().all(|c| c.is_ascii_hexdigit() || matches!(c, ':' | '.')) && !id.contains("..") && !id.is_empty()
    };
    let folder =
        pci_bus_id.as_ref().filter(plain).map(|id| root.join("sys/bus/pci/devices").join(id.to_ascii_lowercase()));
    let read = |name: &str| folder.as_ref().and_then(|folder| trimmed(&folder.join(name)));
    // A node without CPUs is the memory of a device; host memory does not belong there.
    let usable = |node: &u32| nodes.get(node).is_none_or(|cpus| !cpus.is_empty());
    let near = [read("numa_node").and_then(|node| node.parse().ok()), host_node];
    let numa_node = near.into_iter().flatten().find(usable);
    let with_cpus = |wanted: bool| {
        nodes.iter().filter(|(_, cpus)| cpus.is_empty() != wanted).map(|(node, _)| *node).collect::<Vec<_>>()
    };
    Topology {
        numa_node,
        numa_cpus: numa_node.and_then(|node| nodes.get(&node).cloned()).unwrap_or_default(),
        host_nodes: with_cpus(true),
        memory_nodes: with_cpus(false),
        link_speed: read("current_link_speed"),
        max_link_speed: read("max_link_speed"),
        link_width: read("current_link_width").and_then(|width| width.parse().ok()),
        max_link_width: read("max_link_width").and_then(|width| width.parse().ok()),
        pci_bus_id,
        gpu_memory_mode,
    }
}

/// The NUMA nodes with their CPUs. A node whose list can not be read is left out: nothing is known about it.
fn nodes(root: &Path) -> BTreeMap<u32, Vec<u32>> {
    let folder = root.join("sys/devices/system/node");
    let online = text(&folder.join("online")).map(|online| list(&online)).unwrap_or_default();
    let cpus = |node: u32| Some((node, list(&text(&folder.join(format!("node{node}/cpulist")))?)));
    online.into_iter().filter_map(cpus).collect()
}

/// The version of the kernel's driver, where the system tells it.
pub(crate) fn kernel_driver(root: &Path) -> Option<String> {
    trimmed(&root.join("sys/module/nvidia/version"))
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
        let found = topology(root.path(), Some("0000:9A:00.0".into()), None);
        assert_eq!((found.numa_node, found.link_width), (Some(1), Some(16)));
        assert_eq!(found.link_speed.as_deref(), Some("32.0 GT/s PCIe"));
        assert_eq!(found.gpu_memory_mode.as_deref(), Some("driver"));
        let none = topology(root.path(), Some("../../etc".into()), None);
        assert_eq!(none.numa_node, None);
        // "-1" means that there is no such node.
        let root = tree(&[("sys/bus/pci/devices/0000:01:00.0/numa_node", "-1\n")]);
        assert_eq!(topology(root.path(), Some("0000:01:00.0".into()), None).numa_node, None);
    }

    /// R29: on Grace the memories of GPUs are nodes; of nine nodes one has CPUs.
    #[test]
    fn nodes_without_cpus_are_no_places_for_host_memory() {
        let root = tree(&[
            ("sys/devices/system/node/online", "0-8\n"),
            ("sys/devices/system/node/node0/cpulist", "0-71\n"),
            ("sys/bus/pci/devices/0009:01:00.0/numa_node", "0\n"),
            ("sys/bus/pci/devices/0019:01:00.0/numa_node", "1\n"),
        ]);
        for node in 1..=8 {
            let folder = root.path().join(format!("sys/devices/system/node/node{node}"));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("cpulist"), "\n").unwrap();
        }
        let found = topology(root.path(), Some("0009:01:00.0".into()), None);
        assert_eq!((found.numa_node, found.numa_cpus.len()), (Some(0), 72));
        assert_eq!((found.host_nodes, found.memory_nodes.len()), (vec![0], 8));
        // PCI names the GPU's own memory; the driver knows the host's node.
        let found = topology(root.path(), Some("0019:01:00.0".into()), Some(0));
        assert_eq!(found.numa_node, Some(0));
        let found = topology(root.path(), Some("0019:01:00.0".into()), Some(1));
        assert_eq!((found.numa_node, found.numa_cpus), (None, vec![]));
    }

    #[test]
    fn the_nearest_of_two_nodes_and_its_cpus() {
        let root = tree(&[
            ("sys/devices/system/node/online", "0-1\n"),
            ("sys/devices/system/node/node0/cpulist", "0-3,8-11\n"),
            ("sys/devices/system/node/node1/cpulist", "4-7\n"),
            ("sys/bus/pci/devices/0000:01:00.0/numa_node", "1\n"),
            ("sys/module/nvidia/version", "580.159.04\n"),
        ]);
        let found = topology(root.path(), Some("0000:01:00.0".into()), Some(0));
        assert_eq!((found.numa_node, found.numa_cpus), (Some(1), vec![4, 5, 6, 7]));
        assert_eq!(found.host_nodes, [0, 1]);
        assert_eq!(kernel_driver(root.path()).as_deref(), Some("580.159.04"));
    }
}
