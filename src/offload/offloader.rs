//! Layers that are on the device while they are used.
//!
//! ```text
//! home (host) ──copy, on a stream of ours──► slot (device) ──guard──► work on the caller's stream
//!      ▲                                       │ written to
//!      └──────copy, on another stream──────────┘          the slot's next layer comes after all of these
//! ```
//!
//! Which layer is in which slot is `ring.rs`; the order of copies and work is that of any region (`tensor/region.rs`). A guard borrows the
//! offloader, so no slot gets another layer while one is in use.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaStream;

use super::builder::{OffloadReport, OffloaderBuilder, Prepared};
use super::layer::{ActiveLayer, ActiveTensor, At, OffloadLayer};
use super::ring::Ring;
use crate::device::Device;
use crate::driver::timing::Stopwatch;
use crate::driver::{LentStream, Stream};
use crate::error::{Error, Kind, Refused, Result};
use crate::tensor::{Home, OffloadTensor, Place, Room};
use crate::trace;

/// Stall times are read back when there are so many.
const WATCHES: usize = 64;

/// Keeps layers of a model on the host and brings each to the device before it is used, beside the work on those before.
///
/// ```
/// # cuda_sim::install().unwrap();
/// # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
/// # let stream = transfer_tensor::cudarc::driver::CudaContext::new(gpu.ordinal())?.new_stream()?;
/// use transfer_tensor::{Device, OffloadLayer, Offloader};
///
/// let device = Device::new(&stream)?;
/// let mut layers = Vec::new();
/// for number in 0..8 {
///     let weights = device.tensor().from_vec(vec![number as f32; 1 << 16], [256, 256])?;
///     let bias = device.tensor().from_vec(vec![0f32; 256], [256])?; // small: stays on the device
///     layers.push(OffloadLayer::new().tensor(weights).tensor(bias));
/// }
/// let mut model = Offloader::builder(&device).fraction(0.5).build(layers)?;
/// println!("{}", model.report());
/// for _step in 0..2 {
///     for number in 0..8 {
///         let layer = model.layer(number, &stream)?; // the layers that follow are on their way now
///         let weights = layer.device::<f32>(0)?; // a kernel's argument, or a product's: comes after the copy
///         # let read: Vec<f32> = stream.memcpy_dtov(&weights)?;
///         # assert_eq!(read[7], number as f32);
///     } // its slot is the next layer's, after the work that was submitted
/// }
/// assert_eq!(model.stats().uses, 8); // of the four layers that are on the host, in two steps
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// | | |
/// |---|---|
/// | memory on the device | slots: [`depth`](OffloaderBuilder::depth) times the largest layer that is kept on the host, allocated once |
/// | a layer that is asked for out of order | is brought when it is asked for, and the order goes on from there |
/// | written to, with [`ActiveLayer::device_mut`] | copied home after the work on it, before the slot gets another layer |
/// | one memory (DGX Spark, Jetson) | nothing is moved; the report says so |
/// | a coherent link (Grace) | tensors that both sides see are read where they are, or brought like the others, as the plan has it |
/// | ordinary host memory | is exchanged for page-locked memory, as far as the budget goes (the caller's raw memory, too, which is not written to any more); copies from what is left block the caller |
/// | an error | of bringing a layer is that layer's: what was to come ahead is tried again when it is asked for |
/// | dropped, forgotten | memory goes when the device is done with it; what was written to and not yet copied home is lost: [`flush`](Offloader::flush), [`into_layers`](Offloader::into_layers) |
///
/// One layer is in use at a time:
///
/// ```compile_fail,E0499
/// # fn f(model: &mut transfer_tensor::Offloader, stream: &std::sync::Arc<transfer_tensor::cudarc::driver::CudaStream>) {
/// let first = model.layer(0, stream).unwrap();
/// let second = model.layer(1, stream).unwrap();
/// println!("{first:?}");
/// # }
/// ```
pub struct Offloader {
    device: Device,
    layers: Vec<Layer>,
    ring: Ring,
    slots: Vec<Slot>,
    /// `None` where nothing is moved.
    lanes: Option<Lanes>,
    report: OffloadReport,
    stats: OffloadStats,
    watch: Option<Watch>,
}

struct Layer {
    tensors: Vec<OffloadTensor>,
    places: Places,
}

/// Where a layer's tensors are in a slot.
pub(super) struct Places {
    /// Of each, if it moves.
    pub(super) of_tensors: Vec<Option<Place>>,
    /// Each once: what has to be copied.
    pub(super) copied: Vec<Place>,
}

pub(super) struct Slot {
    pub(super) room: Room,
    /// Which tensors of its layer were written to and are not copied home.
    pub(super) written: Vec<bool>,
    /// Its layer has not been used since it was brought.
    pub(super) fresh: bool,
}

/// Streams of ours: nothing else holds up what layers wait for.
pub(super) struct Lanes {
    pub(super) up: LentStream,
    pub(super) down: LentStream,
}

/// How long the caller's stream waited for layers.
#[derive(Default)]
pub(super) struct Watch {
    idle: Vec<Stopwatch>,
    running: VecDeque<Stopwatch>,
    total: f64,
}

/// What an [`Offloader`] has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct OffloadStats {
    /// Layers that were asked for, of those on the host.
    pub uses: u64,
    /// Of these, how many had been brought ahead.
    pub ahead: u64,
    /// How many were still there from their last use.
    pub kept: u64,
    /// How many were brought only when they were asked for.
    pub late: u64,
    /// Bytes brought to the device.
    pub up_bytes: u64,
    /// Bytes brought home.
    pub down_bytes: u64,
    /// How long the callers' streams have waited for layers, as far as that is known by now; with [`OffloaderBuilder::timed`]. Where more than 64 uses are
    /// submitted ahead of the device, those beyond are not timed.
    pub stalled: Option<Duration>,
}

impl OffloadStats {
    /// The share of the uses whose layer was there or on its way, from 0 to 1; 1 where there were none.
    pub fn hit_rate(&self) -> f64 {
        if self.uses == 0 { 1.0 } else { (self.ahead + self.kept) as f64 / self.uses as f64 }
    }
}

impl Offloader {
    /// For layers whose tensors were made for `device`.
    pub fn builder(device: &Device) -> OffloaderBuilder<'_> {
        OffloaderBuilder::new(device)
    }

    /// Begins to bring the first layers.
    pub(super) fn start(device: &Device, layers: Vec<OffloadLayer>, prepared: Prepared) -> Self {
        let Prepared { places, ring, slots, lanes, report, watch } = prepared;
        let layers = layers.into_iter().zip(places);
        let layers = layers.map(|(OffloadLayer { tensors }, places)| Layer { tensors, places }).collect();
        let (device, stats) = (device.clone(), OffloadStats::default());
        let mut offloader = Self { device, layers, ring, slots, lanes, report, stats, watch };
        let first = offloader.ring.wanted(usize::MAX);
        offloader.look_ahead(&first);
        offloader
    }

    /// How many layers there are.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// What is kept where, and why.
    pub fn report(&self) -> &OffloadReport {
        &self.report
    }

    /// What was done so far. Asks the device which stalls are over, and does not wait for it.
    pub fn stats(&mut self) -> OffloadStats {
        if let Some(watch) = &mut self.watch {
            watch.read();
            self.stats.stalled = Duration::try_from_secs_f64(watch.total).ok();
        }
        self.stats
    }

    /// A layer, for work on `stream`, and the copies of those that follow in the order.
    ///
    /// # Ordering
    /// Does not block, unless host memory of this layer or of those that follow is not page-locked, or a guard of a layer was lent to another stream than its own
    /// (the context is waited for then, as wherever that is done). Guards of the layer's tensors come after its copy; copies to its slot come after what is submitted
    /// while they live.
    ///
    /// # Errors
    /// There is no such layer, the stream belongs to another context or is being captured, the device faulted, or the driver refused a copy; nothing is
    /// lost then, and it may be asked for again.
    pub fn layer(&mut self, number: usize, stream: &Arc<CudaStream>) -> Result<ActiveLayer<'_>> {
        if number >= self.layers.len() {
            return Err(Error::absent(number, self.layers.len(), "layers"));
        }
        if !self.device.owns(stream) {
            return Err(Error::new(Kind::WrongContext { operation: "a layer" }));
        }
        let _range = trace::range(c"offload layer", self.report.slot_bytes);
        self.ring.ask(number);
        let wanted = self.ring.wanted(number);
        // What can not go home now is tried again before its slot gets another layer.
        for slot in 0..self.slots.len() {
            let _ = self.save(slot);
        }
        let moves = wanted.first() == Some(&number);
        if moves {
            let (slot, late) = match self.ring.slot_of(number) {
                Some(slot) => (slot, false),
                None => (self.load(number, &wanted)?, true),
            };
            self.count(slot, late);
        }
        self.look_ahead(&wanted);
        let slot = self.ring.slot_of(number).filter(|_| moves);
        if let (Some(watch), Some(slot)) = (&mut self.watch, slot.and_then(|slot| self.slots.get(slot))) {
            watch.time(&self.device, &slot.room, stream)?;
        }
        self.activate(number, slot, stream)
    }

    fn activate(&mut self, number: usize, slot: Option<usize>, stream: &Arc<CudaStream>) -> Result<ActiveLayer<'_>> {
        let Some(Layer { tensors, places }) = self.layers.get(number) else {
            return Ok(ActiveLayer { number, tensors: Vec::new() });
        };
        let (room, mut written) = match slot.and_then(|slot| self.slots.get_mut(slot)) {
            Some(Slot { room, written, .. }) => (Some(&*room), written.iter_mut()),
            None => (None, [].iter_mut()),
        };
        let tensors = tensors.iter().zip(&places.of_tensors).map(|(tensor, place)| {
            let at = match (place, room, written.next()) {
                (Some(Place { range, .. }), Some(room), Some(written)) => At::Slot { room, range, written },
                _ => At::Own,
            };
            ActiveTensor { tensor, at, stream: stream.clone() }
        });
        Ok(ActiveLayer { number, tensors: tensors.collect() })
    }

    /// Submits what is wanted and not there. What fails is tried again when it is asked for.
    fn look_ahead(&mut self, wanted: &[usize]) {
        for &layer in wanted {
            if self.ring.slot_of(layer).is_none() && self.load(layer, wanted).is_err() {
                return;
            }
        }
    }

    /// Submits bringing a layer to a slot, in which what was written to before goes home first.
    fn load(&mut self, number: usize, wanted: &[usize]) -> Result<usize> {
        let none = || Error::unsupported("bringing a layer", "there is no slot for it");
        let index = self.ring.room(wanted).ok_or_else(none)?;
        self.save(index)?;
        let (Some(slot), Some(layer), Some(lanes)) = (self.slots.get_mut(index), self.layers.get(number), &self.lanes)
        else {
            return Err(none());
        };
        let places = &layer.places.copied;
        let bytes: usize = places.iter().map(|place| place.range.len()).sum();
        let _range = trace::range(c"offload load", bytes);
        self.ring.put(index, None);
        slot.room.fill(places, &lanes.up)?;
        self.ring.put(index, Some(number));
        slot.fresh = true;
        slot.written.clear();
        slot.written.resize(layer.places.of_tensors.len(), false);
        self.stats.up_bytes += bytes as u64;
        Ok(index)
    }

    /// Submits bringing home what was written to in a slot.
    fn save(&mut self, index: usize) -> Result<()> {
        let Some(number) = self.ring.layer_in(index) else { return Ok(()) };
        let (Some(slot), Some(layer), Some(lanes)) = (self.slots.get_mut(index), self.layers.get(number), &self.lanes)
        else {
            return Ok(());
        };
        for (written, place) in slot.written.iter_mut().zip(&layer.places.of_tensors) {
            if let (true, Some(place)) = (*written, place) {
                let _range = trace::range(c"offload save", place.range.len());
                slot.room.save(place, &lanes.down)?;
                *written = false;
                self.stats.down_bytes += place.range.len() as u64;
            }
        }
        Ok(())
    }

    /// Notes how a use found its layer.
    fn count(&mut self, slot: usize, late: bool) {
        let Some(slot) = self.slots.get_mut(slot) else { return };
        self.stats.uses += 1;
        *match (late, std::mem::replace(&mut slot.fresh, false)) {
            (true, _) => &mut self.stats.late,
            (false, true) => &mut self.stats.ahead,
            (false, false) => &mut self.stats.kept,
        } += 1;
    }

    /// Brings home what was written to, and blocks until it is there.
    ///
    /// # Errors
    /// The device faulted, or the driver refused a copy; then it may be called again.
    pub fn flush(&mut self) -> Result<()> {
        for slot in 0..self.slots.len() {
            self.save(slot)?;
        }
        let homes = self.layers.iter().flat_map(|layer| &layer.places.copied);
        homes.map(|place| &place.home).try_for_each(Home::wait)
    }

    /// The layers, with all that was written to; the slots' memory is given up.
    ///
    /// # Errors
    /// As [`flush`](Self::flush); the offloader comes back.
    pub fn into_layers(mut self) -> Result<Vec<OffloadLayer>, Refused<Box<Self>>> {
        match self.flush() {
            Ok(()) => Ok(self.layers.into_iter().map(|Layer { tensors, .. }| OffloadLayer { tensors }).collect()),
            Err(error) => Err(Refused { error, value: Box::new(self) }),
        }
    }
}

impl Watch {
    /// Records the wait for a slot on `stream`.
    fn time(&mut self, device: &Device, room: &Room, stream: &Arc<CudaStream>) -> Result<()> {
        if self.idle.is_empty() && self.running.len() >= WATCHES {
            self.read();
            if self.idle.is_empty() {
                // So far ahead of the device, the stream is given no more of them: their number is bounded.
                return Ok(());
            }
        }
        let watch = self.idle.pop().map_or_else(|| Stopwatch::new(device.context()), Ok)?;
        let _bound = device.context().to_submit()?;
        let queue = Stream::of_caller(stream);
        queue.check_not_capturing("a layer")?;
        watch.start(&queue)?;
        room.order(stream)?;
        watch.stop(&queue)?;
        self.running.push_back(watch);
        Ok(())
    }

    /// Adds up what is over.
    fn read(&mut self) {
        while let Some(seconds) = self.running.front().and_then(|watch| watch.seconds().ok()) {
            self.total += seconds;
            self.idle.extend(self.running.pop_front());
        }
    }
}

impl fmt::Debug for Offloader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Offloader").field("report", &self.report).field("stats", &self.stats).finish_non_exhaustive()
    }
}
