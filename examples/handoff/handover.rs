//! The main job: every tensor of a file from the host to the device, through a kernel, and back.

use std::time::Duration;

use indicatif::ProgressBar;
use transfer_tensor::cudarc::driver::CudaContext;
use transfer_tensor::{Backing, Checkpoint, Device, DynTensor, Platform, Strategy, TensorInfo};

use crate::common::{Failure, Machine};
use crate::kernel::{Kernel, index_hash};
use crate::meter::{Holding, Meter};

/// What happened to one tensor.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) entry: TensorInfo,
    pub(crate) strategy: Strategy,
    pub(crate) backing: Backing,
    pub(crate) copied: u64,
    pub(crate) time: Duration,
    /// The first byte that came back wrong.
    pub(crate) mismatch: Option<u64>,
}

/// What happened on one machine.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) driver: &'static str,
    /// The name of the simulated machine's profile.
    pub(crate) profile: Option<String>,
    pub(crate) platform: Platform,
    pub(crate) rows: Vec<Row>,
    pub(crate) bytes: u64,
    pub(crate) copied: u64,
    pub(crate) device_peak: u64,
    pub(crate) host_peak: u64,
    /// Ordinary memory in `host_peak`.
    pub(crate) pageable_peak: u64,
    pub(crate) time: Duration,
    pub(crate) kernels: Option<u64>,
    /// All tensors were kept where the GPU uses them.
    pub(crate) resident: bool,
    /// What the plan said where it had to give way, each once.
    pub(crate) notes: Vec<String>,
    pub(crate) violations: Vec<String>,
}

impl Outcome {
    pub(crate) fn mismatches(&self) -> usize {
        self.rows.iter().filter(|row| row.mismatch.is_some()).count()
    }
}

/// Hands every tensor of `file` over on `machine`.
///
/// Like a model that is loaded, the tensors stay where the GPU uses them until the end, if they take no more than half of
/// what is free: on the device, or in the one memory that both sides see. Host memory that only served a copy is released
/// at once.
pub(crate) fn hand_over(
    machine: &Machine,
    file: &Checkpoint,
    strategy: Option<Strategy>,
    progress: &ProgressBar,
) -> Result<Outcome, Failure> {
    let context = CudaContext::new(machine.ordinal)
        .map_err(|error| Failure::other(format!("device {}: no context: {:?}", machine.ordinal, error.0)))?;
    let stream = context.default_stream();
    let device = Device::with_detector(&stream, &machine.detector)?;
    let kernel = Kernel::load(&context)?;
    let mut meter = Meter::new(machine.simulated.as_ref(), stream.cu_stream() as u64);

    let memory = device.memory();
    let free = memory.free_bytes.min(memory.host_available.unwrap_or(u64::MAX));
    let resident = file.bytes() <= free / 2;
    let mut job = Job { device: &device, kernel, file, strategy, resident, kept: Vec::new(), held: Holding::default() };
    let mut rows = Vec::with_capacity(file.tensors().len());
    let mut notes = Vec::new();
    for entry in file.tensors() {
        let (row, tensor) = job.one(entry, &mut meter)?;
        for reason in tensor.bytes().decision().reasons.iter().filter(|reason| reason.contains("refused")) {
            if !notes.contains(reason) {
                notes.push(reason.clone());
            }
        }
        rows.push(row);
        job.put_away(tensor)?;
        meter.sample(job.held);
        progress.inc(entry.bytes());
    }
    progress.finish_and_clear();
    file.check_unchanged()?;
    Ok(Outcome {
        driver: if machine.simulated.is_some() { "simulated" } else { "cuda" },
        profile: machine.simulated.as_ref().map(|device| device.profile_key().to_owned()),
        platform: device.platform().clone(),
        bytes: file.bytes(),
        copied: meter.copied(),
        device_peak: meter.device_peak(),
        host_peak: meter.host_peak(),
        pageable_peak: meter.pageable_peak(),
        time: rows.iter().map(|row: &Row| row.time).sum(),
        kernels: meter.kernels(),
        resident: job.resident,
        notes,
        violations: meter.violations(),
        rows,
    })
}

struct Job<'j> {
    device: &'j Device,
    kernel: Kernel,
    file: &'j Checkpoint,
    strategy: Option<Strategy>,
    /// Tensors are kept until the end.
    resident: bool,
    kept: Vec<DynTensor>,
    /// By the kept tensors.
    held: Holding,
}

impl Job<'_> {
    fn one(&mut self, entry: &TensorInfo, meter: &mut Meter<'_>) -> Result<(Row, DynTensor), Failure> {
        let named = |error: transfer_tensor::Error| Failure::other(format!("tensor {:?}: {error}", entry.name()));
        let made = self.make(entry);
        let mut tensor = match made {
            // A limit that nobody told, such as WSL's on page-locked memory: without the others there is room.
            Err(error) if error.is_out_of_memory() && !self.kept.is_empty() => {
                self.resident = false;
                self.kept.clear();
                self.held = Holding::default();
                self.settle()?;
                self.make(entry)
            }
            made => made,
        }
        .map_err(named)?;
        let stream = self.device.stream();

        // The file's bytes go straight into the tensor's own memory: no buffer in between, no second copy.
        let begin = meter.mark();
        self.file.read(entry.name(), 0, &mut tensor.bytes_mut().host_mut().map_err(named)?)?;
        let start = meter.mark();
        self.kernel.launch(stream, &mut tensor.bytes_mut().device_mut(stream).map_err(named)?)?;
        let back = tensor.bytes().host().map_err(named)?;
        let time = meter.elapsed(&start);
        meter.sample(self.held.plus(Holding::of(tensor.bytes(), true)));
        let mismatch = self.first_difference(entry, &back)?;
        drop(back);

        let (up, down) = tensor.bytes().copied_bytes();
        meter.count(up + down);
        let row = Row {
            entry: entry.clone(),
            strategy: tensor.bytes().strategy(),
            // Nothing serves a tensor without bytes: then what would.
            backing: match entry.bytes() {
                0 => tensor.bytes().decision().backing,
                _ => tensor.bytes().backing(),
            },
            copied: meter.copied_since(&begin),
            time,
            mismatch,
        };
        Ok((row, tensor))
    }

    /// A tensor of the entry's type and shape.
    fn make(&self, entry: &TensorInfo) -> transfer_tensor::Result<DynTensor> {
        let mut options = self.device.tensor();
        if let Some(strategy) = self.strategy {
            options = options.strategy(strategy);
        }
        DynTensor::zeros(options, entry.dtype(), entry.loaded_shape())
    }

    /// Undoes the kernel's change on what came back, and compares with the file.
    fn first_difference(&self, entry: &TensorInfo, back: &[u8]) -> Result<Option<u64>, Failure> {
        const PIECE: usize = 1 << 20;
        if back.len() as u64 != entry.bytes() {
            return Ok(Some(back.len() as u64));
        }
        let mut original = vec![0; PIECE.min(back.len())];
        let mut offset = 0;
        for changed in back.chunks(PIECE) {
            let original = &mut original[..changed.len()];
            self.file.read(entry.name(), offset, original)?;
            let differs = |(index, (changed, original)): (u64, (&u8, &u8))| {
                let undone = changed ^ index_hash(index);
                (undone != *original).then_some(index)
            };
            if let Some(index) = (offset..).zip(changed.iter().zip(&*original)).find_map(differs) {
                return Ok(Some(index));
            }
            offset += changed.len() as u64;
        }
        Ok(None)
    }

    /// Keeps what the GPU would go on using and releases the rest.
    fn put_away(&mut self, mut tensor: DynTensor) -> Result<(), Failure> {
        if self.resident {
            tensor.bytes_mut().release_host(self.device.stream())?;
            self.held = self.held.plus(Holding::of(tensor.bytes(), true));
            self.kept.push(tensor);
        } else {
            drop(tensor);
        }
        self.settle()
    }

    /// Waits until what was dropped is free: so the peaks are those of the job, not of how fast memory is freed.
    fn settle(&self) -> Result<(), Failure> {
        const LONG: Duration = Duration::from_secs(60);
        self.device.drain(LONG).map_err(|error| Failure::other(format!("freeing memory: {error}")))
    }
}
