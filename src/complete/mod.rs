//! Completion: who is told, and when, that the device has passed a point.

mod background;
pub(crate) mod flights;
mod queue;
pub(crate) mod signal;
pub(crate) mod waiter;

pub(crate) use background::{Background, Job};
pub(crate) use signal::Signal;
pub(crate) use waiter::{Waiter, free_later};

/// Whether this is one of a device's own threads, for which much waits: a waker of the caller's may run there.
pub(crate) fn on_device_thread() -> bool {
    waiter::on_waiter() || background::on_background()
}
