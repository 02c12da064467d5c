//! Loading what was asked.
#![deny(unsafe_code)]

use std::collections::BTreeMap;

use super::TensorInfo;
use super::progress::{Callback, Meter};
use super::select::{Load, Reading};
use super::source::Run;
use crate::copy::chunks;
use crate::driver::{Bound, Stream};
use crate::error::{Error, Kind, Result};
use crate::layout::Shape;
use crate::os::ReadFile;
use crate::plan::{Backing, Decision, HostMemory, Request, Strategy};
use crate::tensor::{DynTensor, Landing};

/// Bytes that are allocated and then copied at once. The device memory of the next is allocated while the last slots of
/// one are still on their way; each begins with one thread and ends with a wait.
const BATCH: usize = 1 << 30;

/// Reads of memory that both sides use, where nothing is staged.
const PIECE: usize = 4 << 20;

type Tensors = BTreeMap<String, DynTensor>;

pub(super) fn run(mut load: Load<'_>) -> Result<Tensors> {
    load.check_context()?;
    let tensors = load.selected()?;
    let total = tensors.iter().map(|info| info.bytes()).sum();
    // The caller's function may use another GPU, and so make its context current.
    let progress = load.progress.take().map(|mut progress| -> Callback<'_> {
        Box::new(move |note| {
            let _kept = Bound::keep();
            progress(note)
        })
    });
    let meter = Meter::new(total, progress);
    let _range = crate::trace::range(c"load", total);
    let loaded = Job { load: &load, meter: &meter }.run(&tensors, total);
    match (loaded, meter.into_panic()) {
        (_, Some(panic)) => std::panic::resume_unwind(panic),
        (loaded, None) => loaded,
    }
}

struct Job<'j, 'a, 'c> {
    load: &'j Load<'a>,
    meter: &'j Meter<'c>,
}

impl<'j> Job<'j, '_, '_> {
    fn run(&self, tensors: &[&'j TensorInfo], total: u64) -> Result<Tensors> {
        let stream = Stream::of_caller(self.load.stream);
        let decision = self.plan(total)?;
        let loaded = match decision.strategy {
            Strategy::Streamed => self.streamed(tensors, decision, &stream)?,
            _ => self.in_place(tensors, decision)?,
        };
        if let Some(last) = tensors.last() {
            self.meter.finish(last.name())?;
        }
        let mut shards: Vec<_> = tensors.iter().map(|info| info.shard).collect();
        shards.dedup();
        let mut files = shards.into_iter().filter_map(|shard| self.load.checkpoint.shards.get(shard));
        files.try_for_each(ReadFile::check_unchanged)?;
        Ok(loaded)
    }

    /// One plan for all: what fits the device's memory or cache is a question of all.
    fn plan(&self, bytes: u64) -> Result<Decision> {
        let mut request = Request::new(bytes).access(self.load.access);
        // A file that is read goes where the plan says; one that is mapped is there.
        request.host = if self.load.reading == Reading::Read { HostMemory::Any } else { HostMemory::ReadOnly };
        request.strategy = self.load.strategy;
        self.load.device.plan(&request)
    }

    fn streamed(&self, tensors: &[&'j TensorInfo], mut decision: Decision, stream: &Stream) -> Result<Tensors> {
        let mapped = self.load.reading == Reading::Map;
        decision.reasons.push(match mapped {
            true => "the file's map is copied to page-locked staging memory, piece by piece".into(),
            false => "the file is read straight into page-locked staging memory".into(),
        });
        let mut loaded = Tensors::new();
        let mut landing = Landing::new(self.load.device, stream, decision)?;
        let mut run = Run::new(self.meter);
        let mut shard = None;
        for info in tensors {
            let file = self.load.checkpoint.shard(info)?;
            if run.bytes() + info.bytes() as usize > BATCH {
                landing.land(&std::mem::replace(&mut run, Run::new(self.meter)))?;
            }
            let map = if mapped { Some(file.map()?) } else { None };
            if shard.replace(info.shard) != Some(info.shard) {
                match &map {
                    Some(map) => map.advise_sequential(),
                    None => file.advise_sequential(),
                }
            }
            let tensor =
                landing.allocate(info.dtype(), Shape::from(info.loaded_shape())).map_err(|error| named(info, error))?;
            run.push(info.name(), file, info.range(), map);
            loaded.insert(info.name().to_owned(), tensor);
        }
        landing.land(&run)?;
        Ok(loaded)
    }

    fn in_place(&self, tensors: &[&'j TensorInfo], decision: Decision) -> Result<Tensors> {
        let mut loaded = Tensors::new();
        for info in tensors {
            self.meter.check()?;
            let tensor = self.one_in_place(info, &decision).map_err(|error| named(info, error))?;
            loaded.insert(info.name().to_owned(), tensor);
        }
        Ok(loaded)
    }

    /// Over the file's map where the device can use that, else read into memory that both sides use.
    fn one_in_place(&self, info: &TensorInfo, decision: &Decision) -> Result<DynTensor> {
        let (file, device) = (self.load.checkpoint.shard(info)?, self.load.device);
        let (dtype, shape) = (info.dtype(), Shape::from(info.loaded_shape()));
        let mut decision = decision.clone();
        let aligned = info.range().start.is_multiple_of(dtype.size() as u64);
        let usable = matches!(decision.backing, Backing::Registered | Backing::Pageable)
            && device.platform().capabilities().device_reads_pageable;
        if self.load.reading != Reading::Read && usable && aligned && info.bytes() > 0 {
            // Not registered: that would be a driver call or two for each tensor, and locks nothing where this works.
            decision.backing = Backing::Pageable;
            decision.reasons.push("the file's map is used in place, as ordinary memory".into());
            let range = info.range().start as usize..info.range().end as usize;
            let map = file.map()?;
            // Read now and by the CPU: a page that the device is the first to touch costs a fault there.
            for (_, piece) in chunks(range.len(), PIECE) {
                map.populate(&(range.start + piece.start..range.start + piece.end));
                self.meter.add(piece.len() as u64, info.name())?;
            }
            return DynTensor::over_shared(device, decision, map, range, dtype, shape);
        }
        if usable && !aligned {
            let why = format!(
                "byte {} of the file is not aligned for {dtype}: it is read instead of mapped",
                info.range().start
            );
            decision.reasons.push(why);
        }
        file.advise_sequential();
        DynTensor::filled(device, decision, dtype, shape, |into| {
            let mut offset = info.range().start;
            into.chunks_mut(PIECE).try_for_each(|piece| {
                file.read_at(offset, piece)?;
                offset += piece.len() as u64;
                self.meter.add(piece.len() as u64, info.name())
            })
        })
    }
}

/// Out of memory says for which tensor.
fn named(info: &TensorInfo, error: Error) -> Error {
    if !error.is_out_of_memory() {
        return error;
    }
    let why = format!("tensor {}: {error}", super::quoted(info.name()));
    Error::new(Kind::OutOfMemory { what: "a tensor", bytes: info.bytes(), why })
}
