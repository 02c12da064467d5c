//! One thread a device for copies that nobody waits for while they begin: it does them in the order in which they came.

use std::cell::Cell;
use std::sync::mpsc::{Sender, channel};

use parking_lot::Mutex;

use crate::error::{Error, Kind, Result, quietly};

thread_local! {
    static ON_BACKGROUND: Cell<bool> = const { Cell::new(false) };
}

/// Whether this is such a thread. It must not wait for its own jobs.
pub(super) fn on_background() -> bool {
    ON_BACKGROUND.get()
}

/// A job that is dropped unrun tells so by itself.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The handle; dropping it lets the thread finish its jobs and end.
#[derive(Debug, Default)]
pub(crate) struct Background {
    jobs: Mutex<Option<Sender<Job>>>,
}

impl Background {
    /// Where jobs go; starts the thread, if there is none yet.
    ///
    /// # Errors
    /// It could not be started.
    pub(crate) fn queue(&self) -> Result<Sender<Job>> {
        let mut jobs = self.jobs.lock();
        if let Some(sender) = &*jobs {
            return Ok(sender.clone());
        }
        let (sender, receiver) = channel::<Job>();
        let work = move || {
            ON_BACKGROUND.set(true);
            crate::trace::name_thread();
            for job in receiver {
                // A panic in a caller's waker is his; the other jobs go on.
                let _ = quietly(job);
            }
        };
        let started = std::thread::Builder::new().name("transfer-stage".into()).spawn(work);
        started.map_err(|error| Error::new(Kind::Thread { what: format!("transfer-stage: {error}") }))?;
        Ok(jobs.insert(sender).clone())
    }
}
