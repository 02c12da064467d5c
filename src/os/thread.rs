//! Threads with a name, and the CPUs that they run on.

use std::sync::mpsc::channel;
use std::thread::{Builder, JoinHandle};

use crate::error::{Error, Kind, Result};

/// Starts a thread that does `work`: on these CPUs only, by the system's numbers, if any are named, and from the beginning on.
///
/// # Errors
/// It can not be started; the name has a NUL in it; there are none of these CPUs, the system does not bind threads, or this process may not use them.
pub(crate) fn spawn(
    name: String,
    cpus: Option<&[usize]>,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>> {
    if name.contains('\0') {
        return Err(Error::unsupported(format!("a thread of the name {name:?}"), "there is a NUL in it"));
    }
    let start = |work: Box<dyn FnOnce() + Send>| {
        let started = Builder::new().name(name.clone()).spawn(work);
        started.map_err(|error| Error::new(Kind::Thread { what: format!("{name}: {error}") }))
    };
    let Some(cpus) = cpus else { return start(Box::new(work)) };
    let (tell, told) = channel();
    let own = cpus.to_vec();
    let thread = start(Box::new(move || {
        let bound = bind(&own);
        let good = bound.is_ok();
        let _ = tell.send(bound);
        if good {
            work();
        }
    }))?;
    match told.recv() {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(why)) => {
            Err(Error::new(Kind::Unsupported { what: format!("binding the thread {name} to CPUs {cpus:?}"), why }))
        }
        Err(_) => Err(Error::new(Kind::Thread { what: format!("{name}: it has ended") })),
    }
}

/// Lets the calling thread run on these CPUs only; why not.
#[cfg(target_os = "linux")]
fn bind(cpus: &[usize]) -> std::result::Result<(), String> {
    // Of the C library's fixed size.
    // SAFETY: a plain set of bits, for which zeros are the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if cpus.is_empty() {
        return Err("none is named".into());
    }
    for &cpu in cpus {
        if cpu >= libc::CPU_SETSIZE as usize {
            return Err(format!("the numbers are below {} here", libc::CPU_SETSIZE));
        }
        // SAFETY: the number was checked.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: as above.
    let mut bound: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: 0 is the calling thread, and the sets are as long as is said.
    let code = unsafe {
        match libc::sched_setaffinity(0, size_of_val(&set), &raw const set) {
            0 => libc::sched_getaffinity(0, size_of_val(&bound), &raw mut bound),
            code => code,
        }
    };
    if code != 0 {
        return Err(std::io::Error::last_os_error().to_string());
    }
    // The system leaves out what there is not.
    // SAFETY: plain sets.
    match unsafe { libc::CPU_EQUAL(&set, &bound) } {
        true => Ok(()),
        false => Err("some of them are not there, or not for this process".into()),
    }
}

#[cfg(not(target_os = "linux"))]
fn bind(_: &[usize]) -> std::result::Result<(), String> {
    Err("this system has no call for that".into())
}
