//! What loader threads and the one who takes batches share.
//!
//! Invariants: a number is loaded by one thread, and comes out once, in order, unless the prefetcher begins again before; no number is
//! begun that is `depth` or more beyond the next to come out; whoever sleeps is woken by what he waits for and by the end.
#![deny(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::batch::IngressBatch;
use super::{IngressError, IngressResult};
use crate::device::Device;
use crate::element::Element;
use crate::error::{Error, Kind, Result, quietly};
use crate::layout::Shape;
use crate::order::{Order, Sorter};
use crate::plan::Access;
use crate::tensor::TransferTensor;
use crate::trace;

/// Gives the next rows of an iterator: how many, 0 at the end.
pub(super) type Items<T, E> = Box<dyn FnMut(&mut [T]) -> Result<usize, IngressError<E>> + Send>;

type Fill<T, E> = Box<dyn Fn(u64, &mut [T]) -> Result<usize, E> + Send + Sync>;

/// Where rows come from.
pub(super) enum Source<T, E> {
    Fill(Fill<T, E>),
    /// For one thread. Makes them, for the first time or again.
    Items(Box<dyn Fn() -> Items<T, E> + Send + Sync>),
}

pub(super) struct Shared<T: Element, E> {
    device: Device,
    shape: Shape,
    access: Access,
    depth: u64,
    source: Source<T, E>,
    state: Mutex<State<T, E>>,
    changed: Condvar,
}

struct State<T: Element, E> {
    /// The one that came back first, whose work is over first, first.
    free: VecDeque<TransferTensor<T>>,
    loaded: Sorter<Result<Loaded<T>, IngressError<E>>>,
    /// The next number to load, and to come out.
    begun: u64,
    taken: u64,
    /// The first number that there is not.
    end: Option<u64>,
    /// Which time the source is gone through.
    round: u64,
    closed: bool,
    waker: Option<Waker>,
}

struct Loaded<T: Element> {
    tensor: TransferTensor<T>,
    rows: usize,
}

impl<T: Element, E: Send + 'static> Shared<T, E> {
    pub(super) fn new(device: &Device, shape: Shape, access: Access, depth: usize, source: Source<T, E>) -> Self {
        let state = State {
            free: VecDeque::new(),
            loaded: Sorter::new(Order::Submission),
            begun: 0,
            taken: 0,
            end: None,
            round: 0,
            closed: false,
            waker: None,
        };
        let (device, depth) = (device.clone(), u64::try_from(depth).unwrap_or(u64::MAX));
        Self { device, shape, access, depth, source, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// What a loader thread does.
    pub(super) fn load(&self) {
        // The iterator of a round, made when that begins.
        let mut items: Option<(u64, Items<T, E>)> = None;
        while let Some((number, round, tensor)) = self.begin() {
            let loaded = self.load_one(number, round, tensor, &mut items);
            self.put(number, round, loaded);
        }
    }

    /// Blocks for a number to load, and a tensor for it if there is a free one; `None` at the end.
    fn begin(&self) -> Option<(u64, u64, Option<TransferTensor<T>>)> {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return None;
            }
            let over = state.end.is_some_and(|end| state.begun >= end);
            if !over && state.begun - state.taken < self.depth {
                state.begun += 1;
                return Some((state.begun - 1, state.round, state.free.pop_front()));
            }
            self.changed.wait(&mut state);
        }
    }

    /// A batch; `None` at the end. The tensor of one that does not come is free again.
    fn load_one(
        &self,
        number: u64,
        round: u64,
        tensor: Option<TransferTensor<T>>,
        items: &mut Option<(u64, Items<T, E>)>,
    ) -> Result<Option<Loaded<T>>, IngressError<E>> {
        let mut tensor = tensor.map_or_else(|| self.make(), Ok).map_err(IngressError::Transfer)?;
        let _range = trace::range(c"ingress load", tensor.bytes());
        let filled = self.fill(number, round, &mut tensor, items);
        match filled {
            Ok(rows) if rows > 0 => {
                // Who uses it on the device comes after the copy; nobody need wait for that here.
                let transfer = tensor.to_device().map_err(|refused| {
                    self.give_back(refused.value);
                    IngressError::Transfer(refused.error)
                })?;
                Ok(Some(Loaded { tensor: transfer.into_parts().0, rows }))
            }
            filled => {
                self.give_back(tensor);
                filled.map(|_| None)
            }
        }
    }

    /// Has the source fill a tensor: how many rows, 0 at the end.
    fn fill(
        &self,
        number: u64,
        round: u64,
        tensor: &mut TransferTensor<T>,
        items: &mut Option<(u64, Items<T, E>)>,
    ) -> Result<usize, IngressError<E>> {
        let filled = quietly(|| {
            // Waits until the device has read what was there before.
            let mut values = tensor.host_mut().map_err(IngressError::Transfer)?;
            let _range = trace::range(c"ingress source", size_of_val::<[T]>(&values));
            match &self.source {
                Source::Fill(fill) => fill(number, &mut values).map_err(IngressError::Source),
                Source::Items(make) => {
                    if items.as_ref().is_none_or(|(of, _)| *of != round) {
                        *items = Some((round, make()));
                    }
                    items.as_mut().map_or(Ok(0), |(_, items)| items(&mut values))
                }
            }
        });
        let rows = filled.unwrap_or_else(|panicked| {
            // What panicked is not asked again.
            let before = items.replace((round, Box::new(|_: &mut [T]| Ok(0usize))));
            let _ = quietly(|| drop(before));
            Err(IngressError::Transfer(panicked))
        })?;
        let most = self.shape.dims().first().copied().unwrap_or(1);
        if rows > most {
            let error = Error::new(Kind::Range { start: 0, end: rows, len: most, unit: "rows" });
            return Err(IngressError::Transfer(error));
        }
        Ok(rows)
    }

    fn make(&self) -> Result<TransferTensor<T>> {
        self.device.tensor().access(self.access).zeros(self.shape.clone())
    }

    fn put(&self, number: u64, round: u64, loaded: Result<Option<Loaded<T>>, IngressError<E>>) {
        let mut state = self.state.lock();
        if round != state.round || state.closed {
            drop(state);
            return self.discard(loaded.transpose());
        }
        let end = match &loaded {
            Ok(None) => Some(number),
            // No more can come.
            Err(IngressError::Transfer(error)) if error.is_fault() => Some(number + 1),
            _ => None,
        };
        if let Some(end) = end {
            state.end = Some(state.end.map_or(end, |before| before.min(end)));
        }
        if let Some(loaded) = loaded.transpose() {
            state.loaded.put(number, loaded);
        }
        self.tell(state);
    }

    fn tell(&self, mut state: MutexGuard<'_, State<T, E>>) {
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_all();
        if let Some(waker) = waker {
            let _ = quietly(|| waker.wake());
        }
    }

    /// The next batch; `Some(None)` at the end, `None` where it is not loaded.
    fn take(self: &Arc<Self>, state: &mut State<T, E>) -> Option<Option<IngressResult<T, E>>> {
        if state.closed || state.end.is_some_and(|end| state.taken >= end) {
            return Some(None);
        }
        let (number, loaded) = state.loaded.take()?;
        state.taken += 1;
        let _range = trace::range(c"ingress batch", loaded.as_ref().map_or(0, |loaded| loaded.tensor.bytes()));
        Some(Some(loaded.map(|Loaded { tensor, rows }| IngressBatch::new(tensor, number, rows, self.clone()))))
    }

    pub(super) fn next(self: &Arc<Self>) -> Option<IngressResult<T, E>> {
        let mut state = self.state.lock();
        loop {
            if let Some(next) = self.take(&mut state) {
                drop(state);
                self.changed.notify_all();
                return next;
            }
            let _range = trace::wait(c"ingress wait");
            self.changed.wait(&mut state);
        }
    }

    pub(super) fn poll_next(self: &Arc<Self>, context: &mut Context<'_>) -> Poll<Option<IngressResult<T, E>>> {
        let mut state = self.state.lock();
        match self.take(&mut state) {
            Some(next) => {
                drop(state);
                self.changed.notify_all();
                Poll::Ready(next)
            }
            None => {
                let before = state.waker.replace(context.waker().clone());
                // Not under the lock: a caller's task may go with it.
                drop(state);
                drop(before);
                Poll::Pending
            }
        }
    }

    /// A batch's tensor, to be filled again.
    pub(super) fn give_back(&self, tensor: TransferTensor<T>) {
        let mut state = self.state.lock();
        // Nothing is left where a caller has taken it for good.
        if !state.closed && tensor.shape() == &self.shape {
            state.free.push_back(tensor);
        } else {
            // Not under the lock: it is freed.
            drop((state, tensor));
        }
    }

    pub(super) fn reset(&self) {
        let mut state = self.state.lock();
        state.round += 1;
        (state.begun, state.taken, state.end) = (0, 0, None);
        let loaded = std::mem::replace(&mut state.loaded, Sorter::new(Order::Submission));
        drop(state);
        self.discard(loaded.into_all());
        self.changed.notify_all();
    }

    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let free = std::mem::take(&mut state.free);
        let loaded = std::mem::replace(&mut state.loaded, Sorter::new(Order::Submission));
        self.tell(state);
        drop(free);
        self.discard(loaded.into_all());
    }

    /// What was loaded and is not wanted: the tensors go round. An error is a caller's own, and may do anything when it is dropped.
    fn discard(&self, loaded: impl IntoIterator<Item = Result<Loaded<T>, IngressError<E>>>) {
        for loaded in loaded {
            match loaded {
                Ok(Loaded { tensor, .. }) => self.give_back(tensor),
                Err(error) => drop(quietly(|| drop(error))),
            }
        }
    }
}
