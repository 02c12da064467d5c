//! What machine this is: memory model, capabilities, memory, and a report of how that was found out.
#![deny(unsafe_code)]

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::calibrate::Calibration;
use crate::error::{Error, Result};
use crate::plan::{Figures, Strategy};

mod detect;
mod host;
mod memory;
mod model;
mod topology;

pub use detect::Detector;
pub use memory::MemoryFigures;
pub use model::{Attributes, Capabilities, MemoryModel};
pub use topology::Topology;

pub(crate) use memory::DriverMemory;
pub(crate) use model::{Route, Routes};
pub(crate) use topology::Ceiling;

/// One device and the host around it, as plain data.
///
/// Nothing is cached behind it: every detection asks the device anew, and each device has a `Platform` of its own.
///
/// ```
/// use transfer_tensor::{MemoryModel, Platform, Request, plan};
/// let platform = Platform::host_only("there is no GPU in this example");
/// assert_eq!(platform.model(), MemoryModel::HostOnly);
/// let decision = plan(&platform, &platform.memory(), &Request::new(4096))?;
/// println!("{platform}\n{decision}");
/// # Ok::<(), transfer_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Platform {
    model: MemoryModel,
    capabilities: Capabilities,
    ordinal: Option<usize>,
    name: String,
    uuid: Option<String>,
    compute_capability: Option<(i32, i32)>,
    driver_version: Option<i32>,
    total_bytes: u64,
    l2_bytes: u64,
    multiprocessors: u32,
    attributes: Attributes,
    topology: Topology,
    wsl: bool,
    figures: Figures,
    calibration: Option<Arc<Calibration>>,
    notes: Vec<String>,
    #[cfg_attr(feature = "serde", serde(skip))]
    forced: Forced,
    #[cfg_attr(feature = "serde", serde(skip))]
    fs_root: PathBuf,
}

/// The strategy that overrides the plan.
#[derive(Debug, Clone, Default)]
pub(crate) enum Forced {
    #[default]
    No,
    Builder(Strategy),
    Environment(Strategy),
    /// The environment's word could not be understood. Every plan fails with it: ignoring a wish silently is worse.
    Bad(Error),
}

/// What a device told about itself.
#[derive(Debug, Clone, Default)]
pub(crate) struct Facts {
    pub(crate) ordinal: usize,
    pub(crate) name: String,
    pub(crate) uuid: Option<String>,
    pub(crate) pci_bus_id: Option<String>,
    pub(crate) driver_version: i32,
    pub(crate) total_bytes: u64,
    pub(crate) attributes: Attributes,
    pub(crate) routes: Routes,
    pub(crate) notes: Vec<String>,
}

impl Platform {
    /// Detects device `ordinal` with the default [`Detector`]. Never fails: where there is no usable driver or device,
    /// the platform is host-only and its notes say why.
    pub fn detect(ordinal: usize) -> Self {
        Detector::new().detect(ordinal)
    }

    /// A platform without a device; `reason` becomes its note.
    pub fn host_only(reason: impl Into<String>) -> Self {
        Self {
            model: MemoryModel::HostOnly,
            capabilities: Capabilities { io_coherent: true, ..Capabilities::default() },
            ordinal: None,
            name: "host".into(),
            uuid: None,
            compute_capability: None,
            driver_version: None,
            total_bytes: 0,
            l2_bytes: 0,
            multiprocessors: 0,
            attributes: Attributes::default(),
            topology: Topology::default(),
            wsl: false,
            figures: Figures::built_in(MemoryModel::HostOnly, None),
            calibration: None,
            notes: vec![reason.into()],
            forced: Forced::No,
            fs_root: PathBuf::from("/"),
        }
    }

    /// A platform from attributes alone, every promise of theirs believed: to plan for a machine that is not at hand.
    pub fn from_attributes(name: impl Into<String>, total_bytes: u64, attributes: Attributes) -> Self {
        let facts = Facts { name: name.into(), total_bytes, attributes, ..Facts::default() };
        let mut platform = Self::from_facts(facts, PathBuf::from("/"));
        (platform.ordinal, platform.driver_version) = (None, None);
        platform
    }

    fn from_facts(facts: Facts, fs_root: PathBuf) -> Self {
        let Facts { ordinal, name, uuid, pci_bus_id, driver_version, total_bytes, attributes, routes, notes: mut all } =
            facts;
        let (capabilities, notes) = attributes.promised().corrected(&attributes, &routes);
        all.extend(notes);
        let model = attributes.model();
        let compute_capability = attributes.compute_capability();
        let positive = |value: Option<i32>| value.and_then(|value| u32::try_from(value).ok()).unwrap_or(0);
        let host_node = attributes.host_numa_id.and_then(|node| u32::try_from(node).ok());
        let wsl = host::is_wsl(&fs_root);
        if wsl {
            all.push("WSL: the total of page-locked memory is limited, to about 0.5 to 1 GiB".into());
        }
        if !capabilities.io_coherent {
            all.push(
                "mapped memory is not I/O coherent: a fence is needed between the CPU's writes and the GPU".into(),
            );
        }
        Self {
            model,
            capabilities,
            ordinal: Some(ordinal),
            name,
            uuid,
            compute_capability,
            driver_version: Some(driver_version),
            total_bytes,
            l2_bytes: positive(attributes.l2_cache_bytes).into(),
            multiprocessors: positive(attributes.multiprocessor_count),
            attributes,
            topology: host::topology(&fs_root, pci_bus_id, host_node),
            wsl,
            figures: Figures::built_in(model, compute_capability),
            calibration: None,
            notes: all,
            forced: Forced::No,
            fs_root,
        }
    }

    /// Replaces the built-in figures, for instance by measured ones. A rate that the link can not carry is cut to what it
    /// can, and one that is no rate counts as none; the [`notes`](Platform::notes) say so.
    #[must_use]
    pub fn with_figures(mut self, mut figures: Figures) -> Self {
        let behind_the_link = matches!(self.model, MemoryModel::Coherent | MemoryModel::Hmm | MemoryModel::Discrete);
        self.notes.extend(figures.clamp(&self.ceiling(), behind_the_link));
        self.figures = figures;
        self
    }

    /// The most that a copy between host and device could reach one way.
    pub(crate) fn ceiling(&self) -> Ceiling {
        let memory = Figures::built_in(self.model, self.compute_capability).device_memory.gbs;
        Ceiling::of(self.model, &self.topology, memory)
    }

    /// Plans with what was measured.
    pub(crate) fn with_calibration(mut self, calibration: Arc<Calibration>) -> Self {
        self.figures = calibration.figures(&self.figures, self.model);
        self.calibration = Some(calibration);
        self
    }

    /// What was measured on this device, where its [`Device`](crate::Device) was calibrated.
    pub fn calibration(&self) -> Option<&Calibration> {
        self.calibration.as_deref()
    }

    pub(crate) fn with_note(mut self, note: String) -> Self {
        self.notes.push(note);
        self
    }

    /// The topology as it is now: links slow down when idle.
    pub(crate) fn topology_now(&self) -> Topology {
        let host_node = self.attributes.host_numa_id.and_then(|node| u32::try_from(node).ok());
        host::topology(&self.fs_root, self.topology.pci_bus_id.clone(), host_node)
    }

    /// The version of the kernel's driver, where the system tells it.
    pub(crate) fn kernel_driver(&self) -> Option<String> {
        host::kernel_driver(&self.fs_root)
    }

    /// Forces a strategy for every plan on this platform, beating the environment; a request's own beats this.
    #[must_use]
    pub fn with_strategy(mut self, strategy: Strategy) -> Self {
        self.forced = Forced::Builder(strategy);
        self
    }

    /// How the memories of CPU and GPU relate.
    pub fn model(&self) -> MemoryModel {
        self.model
    }

    /// What the machine can do.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// CUDA's number of the device; `None` without one.
    pub fn ordinal(&self) -> Option<usize> {
        self.ordinal
    }

    /// The device's name. For people: nothing is decided from it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's UUID (of the slice, under MIG), as 32 hexadecimal digits.
    pub fn uuid(&self) -> Option<&str> {
        self.uuid.as_deref()
    }

    /// Major and minor compute capability.
    pub fn compute_capability(&self) -> Option<(i32, i32)> {
        self.compute_capability
    }

    /// The CUDA version that the driver supports: 1000 × major + 10 × minor.
    pub fn driver_version(&self) -> Option<i32> {
        self.driver_version
    }

    /// The device's memory in all.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// The GPU's L2 cache; 0 where the driver does not tell.
    pub fn l2_bytes(&self) -> u64 {
        self.l2_bytes
    }

    /// Copy engines; 0 where the driver does not tell.
    pub fn copy_engines(&self) -> u32 {
        self.capabilities.copy_engines
    }

    /// Multiprocessors; 0 where the driver does not tell.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// The attributes as the driver told them.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// Where the device sits.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The process runs under WSL.
    pub fn is_wsl(&self) -> bool {
        self.wsl
    }

    /// The figures that plans are made from.
    pub fn figures(&self) -> &Figures {
        &self.figures
    }

    /// What was found on the way: refused routes with call and code, missing attributes, limits.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The folder that stands for `/`.
    pub(crate) fn fs_root(&self) -> &Path {
        &self.fs_root
    }

    /// The NUMA node that the device's memory forms.
    fn gpu_node(&self) -> Option<u32> {
        let forms_one = self.attributes.numa_config.is_some_and(|config| config == 1);
        self.attributes.numa_id.filter(|_| forms_one).and_then(|node| u32::try_from(node).ok())
    }

    fn figures_from(&self, driver: Option<&DriverMemory>) -> MemoryFigures {
        let texts = host::memory_texts(self.fs_root(), self.gpu_node());
        memory::figures(self.model.is_one_memory(), driver, &texts)
    }

    /// The strategy that overrides the plan, and how it came to be.
    pub(crate) fn forced_strategy(&self) -> Result<(Option<Strategy>, &'static str)> {
        match &self.forced {
            Forced::No => Ok((None, "")),
            Forced::Builder(strategy) => Ok((Some(*strategy), " (set for the platform)")),
            Forced::Environment(strategy) => Ok((Some(*strategy), " (from TRANSFER_TENSOR_STRATEGY)")),
            Forced::Bad(error) => Err(error.clone()),
        }
    }

    /// One sentence on how the model was found.
    pub(crate) fn why_model(&self) -> String {
        let why = match self.model {
            MemoryModel::Unified => "CPU and GPU share one memory and its page table",
            MemoryModel::UnifiedMapped => "CPU and GPU share one memory; the GPU needs memory that is mapped for it",
            MemoryModel::Coherent => "two memories and a coherent link between them",
            MemoryModel::Hmm => "two memories; ordinary pages migrate when the GPU faults on them",
            MemoryModel::Discrete => "two memories with PCIe between them",
            MemoryModel::HostOnly => "there is no usable device",
        };
        format!("{}: {why}", self.model)
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ordinal {
            Some(ordinal) => write!(f, "device {ordinal}: {}", self.name)?,
            None => write!(f, "{}", self.name)?,
        }
        if let Some((major, minor)) = self.compute_capability {
            write!(f, ", compute capability {major}.{minor}")?;
        }
        if let Some(version) = self.driver_version {
            write!(f, ", driver for CUDA {}.{}", version / 1000, version % 1000 / 10)?;
        }
        write!(f, "\n  model         {}", self.why_model())?;
        if self.model != MemoryModel::HostOnly {
            write!(f, "\n  memory        {}, L2 {}", memory::size(self.total_bytes), memory::size(self.l2_bytes))?;
            write!(f, "\n  copy engines  {}", self.copy_engines())?;
        }
        if let Some(id) = &self.topology.pci_bus_id {
            write!(f, "\n  PCI           {id}")?;
            if let Some(link) = self.topology.link() {
                write!(f, ", {link}")?;
            }
            if let Some(node) = self.topology.numa_node {
                write!(f, ", NUMA node {node}")?;
            }
        }
        if let Some(mode) = &self.topology.gpu_memory_mode {
            write!(f, "\n  GPU memory    managed by {mode}")?;
        }
        for (name, value) in self.capabilities.flags() {
            write!(f, "\n  {name:<24}{}", if value { "yes" } else { "no" })?;
        }
        if let Some(calibration) = &self.calibration {
            write!(f, "\n  measured      {calibration}")?;
            match &calibration.cached_in {
                Some(path) => write!(f, "\n                read from {}", path.display())?,
                None => write!(f, "\n                in {:.2} s", calibration.took_seconds)?,
            }
            for note in &calibration.notes {
                write!(f, "\n                {note}")?;
            }
        }
        for note in &self.notes {
            write!(f, "\n  note: {note}")?;
        }
        Ok(())
    }
}
