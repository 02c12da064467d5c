//! A slice of the device's that comes to the host chunk by chunk, through two pieces of page-locked memory: while one is read, the next
//! chunk is copied into the other.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::fetch::{Ends, Points, Source, keep, points};
use crate::device::Device;
use crate::driver::lane::Passed;
use crate::driver::memory::{SharedSlice, slice_address};
use crate::driver::{Driver, Event, Stream, copy};
use crate::element::{Element, validate};
use crate::error::{Error, Kind, Result};
use crate::pool::PinnedBuffer;

const READING: &str = "reading a slice chunk by chunk";

/// The chunks of a slice, one after another; [`EgressPool`](crate::EgressPool) delivers it for [`Chunked`](crate::Chunked).
///
/// The slice is kept until all of it has come, or this is dropped, which may be at any time.
pub struct Chunks<T: Element> {
    /// What is read; gone when all has come.
    source: Option<SharedSlice<T>>,
    targets: Targets,
    address: u64,
    elements: usize,
    /// Elements of a chunk; the last one may have fewer.
    chunk: usize,
    /// How many elements have been asked of the device, and how many were given out.
    asked: usize,
    given: usize,
    /// Behind the copy into each of the two; `None` once that has run.
    behind: [Option<Event>; 2],
    /// What carries the copies: a pool's stream until the first two have come, then, if there are more, one of its own, which nobody
    /// else's work holds up.
    stream: Arc<Stream>,
    /// What the first copies come after.
    after: Points,
    /// There may be copies on the stream that are not known to have run.
    flying: bool,
    /// The first two have come.
    landed: bool,
    failed: Option<Error>,
    device: Device,
}

/// Where chunks go by turns; the second is for who has more than one.
type Targets = [Option<PinnedBuffer>; 2];

impl<T: Element> Chunks<T> {
    /// Prepares the copies of a slice, after what `producer` has been given.
    ///
    /// # Errors
    /// The slice is another context's; there is no page-locked memory for two chunks; a stream is being captured; the driver refused.
    pub(crate) fn prepare(
        device: &Device,
        source: SharedSlice<T>,
        chunk: usize,
        producer: &Stream,
        stream: Arc<Stream>,
    ) -> Result<Self> {
        let context = device.context();
        if !device.owns(producer.cuda()) {
            return Err(Error::new(Kind::WrongContext { operation: READING }));
        }
        let elements = source.with(|slice| Ok(slice.len()))?;
        let (first, second) = (chunk.min(elements), chunk.min(elements.saturating_sub(chunk)));
        let mut targets: Targets = [None, None];
        for (target, elements) in targets.iter_mut().zip([first, second]) {
            if elements > 0 {
                *target = Some(device.pool().try_acquire(elements * size_of::<T>())?);
            }
        }
        let _bound = context.to_submit()?;
        producer.check_not_capturing(READING)?;
        let address = source.with(|slice| slice_address(context, slice, producer))?;
        let after = points(context, producer)?;
        Ok(Self {
            source: Some(source),
            targets,
            address,
            elements,
            chunk,
            asked: 0,
            given: 0,
            behind: [None, None],
            stream,
            after,
            flying: false,
            landed: false,
            failed: None,
            device: device.clone(),
        })
    }

    /// Submits the copies of the first two chunks, once.
    ///
    /// # Errors
    /// The driver refused. Part of it may be under way.
    pub(crate) fn launch(&mut self) -> Result<()> {
        {
            let _bound = self.device.context().to_submit()?;
            for event in self.after.iter_mut().filter_map(Option::take) {
                self.stream.wait_for(&event)?;
            }
        }
        while self.asked < self.elements.min(self.chunk.saturating_mul(2)) {
            self.ask()?;
        }
        Ok(())
    }

    /// The first two chunks have come.
    pub(crate) fn land(mut self, _passed: &Passed) -> Self {
        (self.landed, self.flying) = (true, false);
        self.let_go();
        self
    }

    /// Another handle of the slice, which may be read while copies run.
    pub(crate) fn handle(&self) -> Option<Arc<cudarc::driver::CudaSlice<T>>> {
        self.source.as_ref().and_then(SharedSlice::handle)
    }

    /// Elements of all chunks.
    pub fn len(&self) -> usize {
        self.elements
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.elements == 0
    }

    /// How many elements a chunk has; the last one may have fewer.
    pub fn chunk_len(&self) -> usize {
        self.chunk
    }

    /// The elements that were not given out yet.
    pub fn rest(&self) -> Range<usize> {
        self.given..self.elements
    }

    /// The next chunk; `None` after the last. Has the memory of the one before filled with the one after the next, and waits, if need be, until the
    /// next one has come.
    ///
    /// # Errors
    /// The device faulted, or the driver refused; a byte is no value of the type (`bool`). It stays at that.
    pub fn next_chunk(&mut self) -> Result<Option<&[T]>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        match self.advance() {
            Ok(None) => Ok(None),
            Ok(Some((which, elements))) => {
                let Some(buffer) = self.target(which) else { return Ok(None) };
                // SAFETY: so many elements have come, were found valid, and lie in aligned memory of this value's; nothing writes
                // there before this is called again, which takes the borrow.
                Ok(Some(unsafe { std::slice::from_raw_parts(buffer.host().cast::<T>().as_ptr(), elements) }))
            }
            Err(error) => {
                self.failed = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Which of the two holds the next chunk, and how many elements.
    fn advance(&mut self) -> Result<Option<(usize, usize)>> {
        // Not in a forked child, whatever has come before.
        Driver::get()?;
        if !self.landed {
            return Err(Error::unsupported(READING, "the first chunk has not come"));
        }
        // What was given out last is read no more.
        if self.given > 0 && self.asked < self.elements {
            if self.asked <= self.chunk.saturating_mul(2) {
                self.stream = Arc::new(self.device.context().fresh_stream(c"transfer-chunks")?);
            }
            let which = self.ask()?;
            let _bound = self.device.context().to_submit()?;
            self.behind[which] = Some(Event::record(self.device.context(), &self.stream)?);
        }
        if self.given == self.elements {
            return Ok(None);
        }
        let which = self.which(self.given);
        let elements = self.chunk.min(self.elements - self.given);
        if let Some(event) = &self.behind[which] {
            let _range = crate::trace::range(c"egress chunk wait", elements * size_of::<T>());
            event.wait()?;
            self.behind[which] = None;
            self.flying = self.behind.iter().any(Option::is_some);
            self.let_go();
        }
        if let Some(buffer) = self.target(which) {
            validate::<T>(buffer.get(..elements * size_of::<T>()).unwrap_or_default())?;
        }
        self.given += elements;
        Ok(Some((which, elements)))
    }

    /// Which of the two the chunk that begins at an element goes to.
    fn which(&self, element: usize) -> usize {
        element / self.chunk % 2
    }

    fn target(&self, which: usize) -> Option<&PinnedBuffer> {
        self.targets.get(which)?.as_ref()
    }

    /// The device's memory is free for the next step, if all of it has come.
    fn let_go(&mut self) {
        if !self.flying
            && self.asked == self.elements
            && let Some(source) = self.source.take()
        {
            source.let_go(&self.device);
        }
    }

    /// Submits the copy of the next chunk, and says where to.
    fn ask(&mut self) -> Result<usize> {
        let which = self.which(self.asked);
        let elements = self.chunk.min(self.elements - self.asked);
        let bytes = elements * size_of::<T>();
        let Some(target) = self.target(which).filter(|target| bytes <= target.capacity()) else {
            return Err(Error::unsupported(READING, "there is no room for the chunk"));
        };
        let _range = crate::trace::range(c"download", bytes);
        let target = target.host().as_ptr();
        let _bound = self.device.context().to_submit()?;
        self.flying = true;
        let source = self.address + (self.asked * size_of::<T>()) as u64;
        // SAFETY: the elements lie inside the slice; the target has room, and nobody reads it: the chunk that it held was given back. Both
        // ends are kept until the copy has run (`Drop`).
        unsafe { copy::device_to_host(target, source, bytes, &self.stream)? };
        self.asked += elements;
        Ok(which)
    }
}

impl<T: Element> Drop for Chunks<T> {
    fn drop(&mut self) {
        let Some(source) = self.source.take() else { return };
        let ends = Ends::new(source, std::mem::take(&mut self.targets), &self.device);
        // Whether they have run is not known here.
        if self.flying {
            keep(&self.device, &self.stream, ends);
        }
    }
}

impl<T: Element> fmt::Debug for Chunks<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chunks").field("chunk", &self.chunk).field("rest", &self.rest()).finish_non_exhaustive()
    }
}
