//! What is to be loaded, and how.
#![deny(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::progress::{Callback, Progress};
use super::run::run;
use super::{Checkpoint, TensorInfo};
use crate::device::Device;
use crate::error::{Error, Kind, Result};
use crate::plan::{Access, Strategy};
use crate::tensor::DynTensor;

/// How a file's bytes are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Reading {
    /// [`Map`](Reading::Map) where the device then uses the file's pages in place, so that nothing is copied at all;
    /// [`Read`](Reading::Read) where the bytes have to be copied anyway: a read copies them once, from the page cache to the
    /// page-locked memory they are sent from, without a page fault for each 4 to 64 KiB, without the file's pages counting as
    /// this process's memory, and a file that is cut meanwhile is an error and not a signal. Each tensor's
    /// [decision](crate::TransferTensor::decision) says which it was.
    #[default]
    Auto,
    /// Through a memory map, read from front to back in pieces that are unmapped again, where it is not used in place.
    Map,
    /// By reads (`pread`). Where the device uses host memory in place, into memory of the planned kind.
    Read,
}

/// How often the device is taken to read a model's bytes, if the caller does not say.
const READS: u32 = 100;

/// A load that is being described; from [`Checkpoint::load`].
#[must_use = "nothing happens before `run`"]
pub struct Load<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) device: &'a Device,
    pub(super) stream: &'a Arc<CudaStream>,
    pub(super) reading: Reading,
    pub(super) access: Access,
    pub(super) strategy: Option<Strategy>,
    pub(super) progress: Option<Callback<'a>>,
    names: Option<Vec<String>>,
    filter: Option<Filter<'a>>,
}

type Filter<'a> = Box<dyn FnMut(&TensorInfo) -> bool + 'a>;

impl<'a> Load<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, device: &'a Device, stream: &'a Arc<CudaStream>) -> Self {
        let access = Access::reuse(READS).unwrap_or_default();
        let (reading, strategy, progress, names, filter) = (Reading::Auto, None, None, None, None);
        Self { checkpoint, device, stream, reading, access, strategy, progress, names, filter }
    }

    /// Loads only the tensors of these names; a second call adds to the first. A name that the checkpoint does not have is an
    /// error of [`run`](Self::run).
    pub fn only<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
        self.names.get_or_insert_default().extend(names.into_iter().map(N::into));
        self
    }

    /// Loads only the tensors for which `wanted` is true (among those of [`only`](Self::only), if that was said).
    pub fn filter(mut self, wanted: impl FnMut(&TensorInfo) -> bool + 'a) -> Self {
        self.filter = Some(Box::new(wanted));
        self
    }

    /// How the files' bytes are taken.
    pub fn reading(mut self, reading: Reading) -> Self {
        self.reading = reading;
        self
    }

    /// How often the device reads the bytes; many times if not said, as it does a model's. All tensors are planned as one
    /// transfer.
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Forces a strategy instead of the planned one. One that the machine does not have is an error of [`run`](Self::run).
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = Some(strategy);
        self
    }

    /// Calls `progress` as the load goes on, at least once for every few MiB, the last time with all bytes done. Where bytes are
    /// copied it is called from threads of this crate too, never from two at once, and the copy waits for it. `Break` ends
    /// the load: [`run`](Self::run) gives an error for which [`Error::is_cancelled`] holds. A panic goes on in `run`.
    pub fn progress(mut self, progress: impl FnMut(Progress<'_>) -> ControlFlow<()> + Send + 'a) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Loads: the tensors by name.
    ///
    /// On machines with a GPU of its own memory each is device memory, filled from the file through the device's page-locked
    /// staging slots: several threads read neighbouring tensors at once, and no other host memory is used. Where CPU and GPU
    /// share memory each is the file's map, or, if asked to be read or not aligned there for its type, memory of the planned
    /// kind.
    ///
    /// # Ordering
    /// Blocks until the files are read. Copies may still run on `stream` then; the tensors' guards come after them.
    ///
    /// # Errors
    /// A name is unknown, the stream belongs to another context or is being captured, there is no room, the files can not be
    /// read or were changed, the driver refused a call, or the caller cancelled. Nothing is in flight then and nothing is kept.
    pub fn run(self) -> Result<BTreeMap<String, DynTensor>> {
        run(self)
    }

    /// What is asked, in the order of the files.
    pub(super) fn selected(&mut self) -> Result<Vec<&'a TensorInfo>> {
        let checkpoint = self.checkpoint;
        let mut wanted = vec![self.names.is_none(); checkpoint.tensors.len()];
        for name in self.names.iter().flatten() {
            let mark = checkpoint.by_name.get(name).and_then(|&number| wanted.get_mut(number));
            *mark.ok_or_else(|| checkpoint.unknown(name))? = true;
        }
        let all = checkpoint.tensors.iter().zip(wanted).filter_map(|(info, wanted)| wanted.then_some(info));
        Ok(match &mut self.filter {
            Some(filter) => all.filter(|info| filter(info)).collect(),
            None => all.collect(),
        })
    }

    pub(super) fn check_context(&self) -> Result<()> {
        if self.device.owns(self.stream) {
            return Ok(());
        }
        Err(Error::new(Kind::WrongContext { operation: "loading a checkpoint" }))
    }
}

impl fmt::Debug for Load<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Load")
            .field("checkpoint", &self.checkpoint.path)
            .field("reading", &self.reading)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}
