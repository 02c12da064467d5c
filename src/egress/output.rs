//! What a consumer gets, and the room it takes.
#![deny(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::gate::Gate;
use crate::driver::check_not_forked;

/// An output on the host, as an [`EgressPool`](crate::EgressPool) delivers it. Until it is dropped, anywhere, it takes room in the pool;
/// [`into_inner`](Output::into_inner) frees that, and keeps the memory.
#[derive(Debug)]
pub struct Output<O> {
    value: O,
    number: u64,
    permit: Permit,
}

impl<O> Output<O> {
    pub(super) fn new(value: O, number: u64, permit: Permit) -> Self {
        Self { value, number, permit }
    }

    /// The item's number: 0 for the first that the pool took, and so on.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The room that it takes.
    pub(super) fn bytes(&self) -> u64 {
        self.permit.bytes()
    }

    /// The value, which the pool does not count any more.
    pub fn into_inner(self) -> O {
        drop(self.permit);
        self.value
    }

    /// Another value in its place, which takes the same room: part of it, or what was made of it.
    pub fn map<P>(self, change: impl FnOnce(O) -> P) -> Output<P> {
        Output { value: change(self.value), number: self.number, permit: self.permit }
    }
}

impl<O> Deref for Output<O> {
    type Target = O;

    fn deref(&self) -> &O {
        &self.value
    }
}

impl<O> DerefMut for Output<O> {
    fn deref_mut(&mut self) -> &mut O {
        &mut self.value
    }
}

/// The room that an item takes, until this is dropped.
#[derive(Debug)]
pub(super) struct Permit {
    gate: Arc<Gate>,
    bytes: u64,
}

impl Permit {
    pub(super) fn new(gate: Arc<Gate>, bytes: u64) -> Self {
        Self { gate, bytes }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        // In a forked child the lock may never be free.
        if check_not_forked().is_ok() {
            self.gate.leave(self.bytes);
        }
    }
}
