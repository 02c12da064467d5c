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
    /// What guards gave to streams that we do not know.
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
    guard: UseId,
    context: Arc<CudaContext>,
    write: bool,
    /// The guard lives or was forgotten. Whatever was waited for, it may have submitted more since.
    open: bool,
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

    /// A name for a guard that is no use of its own.
    pub(crate) fn guard(&mut self) -> UseId {
        self.id()
    }

    /// Notes that a guard gave the address to a stream we do not know.
    pub(crate) fn foreign(&mut self, guard: UseId, context: &Arc<CudaContext>, write: bool) {
        let known = self.foreign.iter_mut().find(|f| f.guard == guard && f.context.cu_ctx() == context.cu_ctx());
        match known {
            Some(known) => known.write |= write,
            None => {
                let id = self.id();
                self.foreign.push(Foreign { id, guard, context: context.clone(), write, open: true });
            }
        }
    }

    /// The contexts of the streams that a guard gave the address to.
    pub(crate) fn foreign_of(&self, guard: UseId) -> Vec<Pending> {
        let of_guard = self.foreign.iter().filter(|f| f.guard == guard);
        of_guard.map(|f| Pending::Context(f.context.clone())).collect()
    }

    /// Notes that a guard is gone: it submits no more. If it has waited for all it submitted, it leaves nothing.
    pub(crate) fn close_foreign(&mut self, guard: UseId, settled: bool) {
        if settled {
            self.foreign.retain(|f| f.guard != guard);
            return;
        }
        let (of_guard, others) = std::mem::take(&mut self.foreign).into_iter().partition(|f| f.guard == guard);
        self.foreign = others;
        for closed in Vec::into_iter(of_guard) {
            // Another name: a wait that began before the guard's last submission must not settle this. And it stands for
            // older ones of its kind.
            let closed = Foreign { id: self.id(), open: false, ..closed };
            self.foreign.retain(|f| f.open || f.write != closed.write || f.context.cu_ctx() != closed.context.cu_ctx());
            self.foreign.push(closed);
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
        self.foreign.retain(|f| f.open || !ids.contains(&f.id));
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
