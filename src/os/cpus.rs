//! Which CPUs a thread runs on.

use std::thread::JoinHandle;

use crate::error::{Error, Kind, Result};

/// Lets a thread run on these CPUs only, by the system's numbers.
///
/// # Errors
/// There are none of these; the system does not bind threads, or this process may not use them.
pub(crate) fn bind<T>(thread: &JoinHandle<T>, cpus: &[usize]) -> Result<()> {
    let failed = |why: String| {
        let name = thread.thread().name().unwrap_or("a thread").to_owned();
        Error::new(Kind::Unsupported { what: format!("binding {name} to CPUs {cpus:?}"), why })
    };
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::thread::JoinHandleExt as _;
        // Of the C library's fixed size.
        // SAFETY: a plain set of bits, for which zeros are the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        for &cpu in cpus {
            if cpu >= libc::CPU_SETSIZE as usize {
                return Err(failed(format!("there is no CPU {cpu}")));
            }
            // SAFETY: the number was checked.
            unsafe { libc::CPU_SET(cpu, &mut set) };
        }
        // SAFETY: the handle's thread was not joined, so its name is good, and the set is as long as is said.
        let code = unsafe { libc::pthread_setaffinity_np(thread.as_pthread_t(), size_of_val(&set), &raw const set) };
        match code {
            0 => Ok(()),
            code => Err(failed(std::io::Error::from_raw_os_error(code).to_string())),
        }
    }
    #[cfg(not(target_os = "linux"))]
    Err(failed("this system has no call for that".into()))
}
