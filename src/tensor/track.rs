//! What runs on one allocation: by byte range, not by pointer value, so that slices count.
//!
//! Every access of the device is one [`Use`]. While its guard lives, or if the guard was forgotten, it is *open*: the only
//! thing known is the stream. Once the guard is dropped it is a recorded event.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::CudaContext;

use crate::driver::{Event, Pending, Stream};

/// An allocation's uses that are not known to be over.
#[derive(Debug, Default)]
pub(crate) struct Track {
    uses: Vec<Use>,
    /// Contexts on which a stream that we do not know got the address.
    foreign: Vec<Foreign>,
    next: u64,
}

#[derive(Debug)]
struct Use {
    id: UseId,
    range: Range<usize>,
    write: bool,
    stream: Stream,
    /// `None` while open.
    event: Option<Arc<Event>>,
}

#[derive(Debug)]
struct Foreign {
    id: UseId,
    context: Arc<CudaContext>,
    write: bool,
}

/// The name of a use within its track.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UseId(u64);

/// One thing to wait for before an access, and the use it stands for.
#[derive(Debug)]
pub(crate) struct Conflict {
    pub(crate) id: UseId,
    pub(crate) stream: Option<Stream>,
    pub(crate) pending: Pending,
}

impl Track {
    /// Notes a use that is submitted from now on and not yet recorded.
    pub(crate) fn open(&mut self, stream: Stream, range: Range<usize>, write: bool) -> UseId {
        let id = self.id();
        self.uses.push(Use { id, range, write, stream, event: None });
        id
    }

    /// Notes that all of a use lies before `event` on its stream.
    pub(crate) fn close(&mut self, id: UseId, event: Arc<Event>) {
        let Some(index) = self.uses.iter().position(|u| u.id == id) else { return };
        self.uses[index].event = Some(event);
        // What the same queue did before on the same bytes is over when this is; keep the list short.
        let closed = &self.uses[index];
        let (range, write, stream) = (closed.range.clone(), closed.write, closed.stream.clone());
        self.uses.retain(|u| {
            u.id == id
                || u.event.is_none()
                || u.write && !write
                || u.range.start < range.start
                || u.range.end > range.end
                || !u.stream.same_queue(&stream)
        });
    }

    /// Notes that the address went to a stream we do not know.
    pub(crate) fn foreign(&mut self, context: &Arc<CudaContext>, write: bool) {
        let known = self.foreign.iter_mut().find(|f| f.context.cu_ctx() == context.cu_ctx());
        match known {
            Some(known) => known.write |= write,
            None => {
                let id = self.id();
                self.foreign.push(Foreign { id, context: context.clone(), write });
            }
        }
    }

    /// What an access must come after: for a read all writes, for a write everything.
    pub(crate) fn conflicts(&self, range: &Range<usize>, write: bool) -> Vec<Conflict> {
        let uses = self.uses.iter().filter(|u| (write || u.write) && overlap(&u.range, range)).map(|u| Conflict {
            id: u.id,
            stream: Some(u.stream.clone()),
            pending: u.pending(),
        });
        let foreign = self.foreign.iter().filter(|f| write || f.write).map(|f| Conflict {
            id: f.id,
            stream: None,
            pending: Pending::Context(f.context.clone()),
        });
        uses.chain(foreign).collect()
    }

    /// Everything, for who wants to free the allocation.
    pub(crate) fn all(&self) -> Vec<Pending> {
        let foreign = self.foreign.iter().map(|f| Pending::Context(f.context.clone()));
        self.uses.iter().map(Use::pending).chain(foreign).collect()
    }

    /// Forgets uses that were waited for.
    pub(crate) fn passed(&mut self, ids: &[UseId]) {
        self.uses.retain(|u| !ids.contains(&u.id));
        self.foreign.retain(|f| !ids.contains(&f.id));
    }

    fn id(&mut self) -> UseId {
        self.next += 1;
        UseId(self.next)
    }
}

impl Use {
    fn pending(&self) -> Pending {
        match &self.event {
            Some(event) => Pending::Event(event.clone()),
            None => Pending::Stream(self.stream.clone()),
        }
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}
