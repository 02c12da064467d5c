//! A device as a test holds it.

use super::load::function;
use super::{Call, Clock, Evidence, MemoryKind, SimError};
use crate::host::{HostFigures, write_host_tree};
use crate::profile::Profile;
use crate::wire::{CallSink, RawCall, RawClock, RawEvidence, RawText, Setting, TextSink};
use std::ffi::c_void;
use std::fs;
use std::path::{Path, PathBuf};

/// Describes a device before it is made.
#[derive(Debug, Clone)]
#[must_use]
pub struct DeviceBuilder {
    toml: String,
    key: String,
    settings: Vec<(Setting, u64)>,
    attributes: Vec<(i32, i32)>,
    host: Option<HostFigures>,
}

impl DeviceBuilder {
    /// Of a built-in profile.
    pub fn new(profile: &str) -> Self {
        Self::from_toml("", profile)
    }

    /// Of the profile `key` in a TOML text; see the crate's README for its form.
    pub fn from_toml(text: &str, key: &str) -> Self {
        Self { toml: text.to_owned(), key: key.to_owned(), settings: Vec::new(), attributes: Vec::new(), host: None }
    }

    fn with(mut self, setting: Setting, value: u64) -> Self {
        self.settings.push((setting, value));
        self
    }

    /// Seeds what is left to chance.
    pub fn seed(self, seed: u64) -> Self {
        self.with(Setting::Seed, seed)
    }

    /// Whether `cuMemFree`, `cuMemFreeHost` and `cuMemHostUnregister` wait for the work of their context (they do by
    /// default).
    pub fn free_waits(self, waits: bool) -> Self {
        self.with(Setting::FreeWaits, waits.into())
    }

    /// Whether freed memory is filled with 0xDD (it is by default).
    pub fn poison(self, poison: bool) -> Self {
        self.with(Setting::Poison, poison.into())
    }

    /// Whether steps that nothing orders are taken in any order, after short random delays.
    pub fn reorder(self, reorder: bool) -> Self {
        self.with(Setting::Reorder, reorder.into())
    }

    /// Whether steps start late and are said to be done late, by up to 2 ms in all.
    pub fn complete_late(self, late: bool) -> Self {
        self.with(Setting::Late, late.into())
    }

    /// The CUDA version the driver supports (1000 × major + 10 × minor). `cuGetProcAddress` finds no function that is younger,
    /// and calling it by its symbol is `CUDA_ERROR_NOT_SUPPORTED`: so far that is about `cuMemcpyBatchAsync` (12080).
    pub fn driver_version(self, version: u32) -> Self {
        self.with(Setting::DriverVersion, version.into())
    }

    /// The host beside the device, instead of the profile's.
    pub fn host(mut self, figures: HostFigures) -> Self {
        self.host = Some(figures);
        self
    }

    /// Overrides a device attribute, by its number.
    pub fn attribute(mut self, attribute: i32, value: i32) -> Self {
        self.attributes.push((attribute, value));
        self
    }

    /// Makes the device. The driver is installed if it was not.
    ///
    /// # Errors
    /// See [`SimError`].
    pub fn build(self) -> Result<Device, SimError> {
        let new: extern "C" fn(RawText, RawText, TextSink, *mut c_void) -> i64 = function("cusim_device_new")?;
        let profile =
            if self.toml.is_empty() { Profile::builtin(&self.key) } else { Profile::from_toml(&self.toml, &self.key) };
        let profile = profile.map_err(|error| SimError::Profile(error.to_string()))?;
        let mut errors: Vec<String> = Vec::new();
        let ordinal = new(RawText::of(&self.toml), RawText::of(&self.key), keep_text, user(&mut errors));
        let ordinal = usize::try_from(ordinal).map_err(|_| SimError::Profile(errors.concat()))?;
        let set_attribute: extern "C" fn(usize, i32, i32) -> bool = function("cusim_set_attribute")?;
        for (attribute, value) in self.attributes {
            set_attribute(ordinal, attribute, value);
        }
        let root = scratch().join(format!("cuda-sim-{}-{ordinal}", std::process::id()));
        let figures = self.host.unwrap_or_else(|| profile.host.clone());
        let device = Device { ordinal, profile, root };
        for (setting, value) in self.settings {
            device.set(setting, value);
        }
        device.write_host(&figures).map_err(|error| SimError::HostTree(error.to_string()))?;
        Ok(device)
    }
}

/// Where the files of the hosts go: in memory where that is possible, since every device writes some dozen of them.
fn scratch() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if std::env::var_os("TMPDIR").is_none() && memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() }
}

/// A simulated device. Dropping it ends nothing in the driver: contexts and memory live as long as the program
/// keeps them.
#[derive(Debug)]
pub struct Device {
    ordinal: usize,
    profile: Profile,
    root: PathBuf,
}

impl Drop for Device {
    fn drop(&mut self) {
        // A test that fails by what came of a violation says so: a fault tells nobody which copy met which memory.
        if std::thread::panicking() {
            for violation in self.violations() {
                eprintln!("violation on device {}: {violation}", self.ordinal);
            }
        }
        self.set(Setting::Retired, 1);
        let _ = fs::remove_dir_all(&self.root);
    }
}

impl Device {
    /// The number `cuDeviceGet` takes.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The name of its profile.
    #[must_use]
    pub fn profile_key(&self) -> &str {
        &self.profile.key
    }

    /// Its profile as it was read.
    #[must_use]
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// A folder with files that stand in for /proc and /sys on this device's host.
    #[must_use]
    pub fn host_root(&self) -> &Path {
        &self.root
    }

    /// Calls a control function; the driver is there, or the device would not be.
    fn call<F: Copy, R>(&self, name: &'static str, with: impl FnOnce(F) -> R) -> Option<R> {
        function::<F>(name).ok().map(with)
    }

    fn set(&self, setting: Setting, value: u64) {
        self.call::<extern "C" fn(usize, u32, u64) -> bool, _>("cusim_set", |set| {
            set(self.ordinal, setting as u32, value)
        });
    }

    fn fail(&self, call: &str, nth: u64, code: u32, after: bool) {
        self.call::<extern "C" fn(usize, RawText, u64, u32, bool) -> bool, _>("cusim_fail", |fail| {
            fail(self.ordinal, RawText::of(call), nth, code, after)
        });
    }

    /// The `n`th call of this name from now on (1: the next) does nothing and returns `code`. Names are those of the
    /// driver interface; the version may be left out.
    pub fn fail_nth(&self, call: &str, n: u64, code: u32) {
        self.fail(call, n.max(1), code, false);
    }

    /// The `n`th call of this name does its work and returns `code` all the same.
    pub fn fail_nth_after(&self, call: &str, n: u64, code: u32) {
        self.fail(call, n.max(1), code, true);
    }

    /// Every call of this name returns `code`.
    pub fn fail_always(&self, call: &str, code: u32) {
        self.fail(call, 0, code, false);
    }

    /// Forgets all failures that were asked for.
    pub fn clear_failures(&self) {
        self.set(Setting::ClearFailures, 0);
    }

    /// The device is faulted from now on: every call that needs its context returns `code` (0 heals it).
    pub fn sticky(&self, code: u32) {
        self.set(Setting::Sticky, code.into());
    }

    /// Puts a step on a stream (its handle; 0 is the legacy stream, 2 the calling thread's) that faults the context
    /// when it runs.
    pub fn fault_on_stream(&self, stream: u64, code: u32) {
        self.call::<extern "C" fn(usize, u64, u32) -> bool, _>("cusim_fault_on_stream", |fault| {
            fault(self.ordinal, stream, code)
        });
    }

    /// Puts a step on a stream that holds it until the gate is opened or dropped.
    ///
    /// # Panics
    /// There is no such stream.
    #[must_use]
    pub fn gate(&self, stream: u64) -> Gate {
        let gate = self.call::<extern "C" fn(usize, u64) -> u64, _>("cusim_gate", |gate| gate(self.ordinal, stream));
        let id = gate.unwrap_or(0);
        assert!(id != 0, "device {} has no stream {stream:#x}", self.ordinal);
        Gate { id }
    }

    /// See [`DeviceBuilder::free_waits`].
    pub fn set_free_waits(&self, waits: bool) {
        self.set(Setting::FreeWaits, waits.into());
    }

    /// What `cuMemGetInfo` answers.
    pub fn set_mem_info(&self, free: u64, total: u64) {
        self.call::<extern "C" fn(usize, u64, u64) -> bool, _>("cusim_set_mem_info", |set| {
            set(self.ordinal, free, total)
        });
    }

    /// `cuMemGetInfo` answers by the profile again.
    pub fn clear_mem_info(&self) {
        self.set(Setting::ClearMemInfo, 0);
    }

    /// Changes the host beside the device.
    ///
    /// # Errors
    /// Its files could not be written.
    pub fn set_host(&self, figures: &HostFigures) -> std::io::Result<()> {
        self.write_host(figures)
    }

    fn write_host(&self, figures: &HostFigures) -> std::io::Result<()> {
        self.set(Setting::HostFree, figures.free);
        let mut id: Vec<String> = Vec::new();
        self.call::<extern "C" fn(usize, TextSink, *mut c_void) -> bool, _>("cusim_pci_bus_id", |get| {
            get(self.ordinal, keep_text, user(&mut id))
        });
        fs::create_dir_all(&self.root)?;
        write_host_tree(&self.root, &self.profile, figures, &id.concat())
    }

    /// See [`DeviceBuilder::complete_late`].
    pub fn complete_late(&self, late: bool) {
        self.set(Setting::Late, late.into());
    }

    /// See [`DeviceBuilder::reorder`].
    pub fn reorder(&self, reorder: bool) {
        self.set(Setting::Reorder, reorder.into());
    }

    /// See [`DeviceBuilder::seed`].
    pub fn seed(&self, seed: u64) {
        self.set(Setting::Seed, seed);
    }

    /// Host functions run also after a fault (`true`), or never (`false`). Without this they run until a fault.
    pub fn callbacks_run(&self, run: bool) {
        self.set(Setting::CallbacksRun, run.into());
    }

    /// Every call returns `CUDA_ERROR_DEINITIALIZED`, as in a process that is ending.
    pub fn driver_gone(&self, gone: bool) {
        self.set(Setting::Gone, gone.into());
    }

    /// Copies from and to other devices succeed but move nothing.
    pub fn peer_writes_nothing(&self, lost: bool) {
        self.set(Setting::PeerWritesNothing, lost.into());
    }

    /// No peer access to or from any other device.
    pub fn no_peers(&self, none: bool) {
        self.set(Setting::NoPeers, none.into());
    }

    /// The calls that were made with this device's contexts current, or about this device.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        let mut calls: Vec<Call> = Vec::new();
        self.call::<extern "C" fn(usize, CallSink, *mut c_void) -> bool, _>("cusim_calls", |get| {
            get(self.ordinal, keep_call, user(&mut calls))
        });
        calls
    }

    /// Forgets the calls.
    pub fn clear_calls(&self) {
        self.set(Setting::ClearCalls, 0);
    }

    /// How often a call was made; the version in the name does not count.
    #[must_use]
    pub fn count(&self, call: &str) -> usize {
        let count = self.call::<extern "C" fn(usize, RawText) -> u64, _>("cusim_count", |count| {
            count(self.ordinal, RawText::of(call))
        });
        usize::try_from(count.unwrap_or(0)).unwrap_or(usize::MAX)
    }

    /// Bytes, kernels and violations.
    #[must_use]
    pub fn evidence(&self) -> Evidence {
        let mut raw = RawEvidence::default();
        self.call::<extern "C" fn(usize, *mut RawEvidence) -> bool, _>("cusim_evidence", |get| {
            get(self.ordinal, &raw mut raw)
        });
        Evidence {
            device_bytes: raw.device_bytes,
            device_bytes_peak: raw.device_bytes_peak,
            pinned_bytes: raw.pinned_bytes,
            pinned_bytes_peak: raw.pinned_bytes_peak,
            registered_bytes: raw.registered_bytes,
            registered_bytes_peak: raw.registered_bytes_peak,
            managed_bytes: raw.managed_bytes,
            managed_bytes_peak: raw.managed_bytes_peak,
            copied_h2d_pinned: raw.copied_h2d_pinned,
            copied_h2d_pageable: raw.copied_h2d_pageable,
            copied_d2h_pinned: raw.copied_d2h_pinned,
            copied_d2h_pageable: raw.copied_d2h_pageable,
            copied_d2d: raw.copied_d2d,
            kernels: raw.kernels,
            violations: self.violations(),
        }
    }

    fn texts(&self, which: u32) -> Vec<String> {
        let mut texts: Vec<String> = Vec::new();
        self.call::<extern "C" fn(usize, u32, TextSink, *mut c_void) -> bool, _>("cusim_texts", |get| {
            get(self.ordinal, which, keep_text, user(&mut texts))
        });
        texts
    }

    /// Uses of freed memory and unordered overlapping uses, one sentence each.
    #[must_use]
    pub fn violations(&self) -> Vec<String> {
        self.texts(0)
    }

    /// Forgets the violations, for tests that provoke one.
    pub fn clear_violations(&self) {
        self.set(Setting::ClearViolations, 0);
    }

    /// Allocations, registrations, events, streams, modules and contexts that are alive, and those that were when
    /// their context was destroyed.
    #[must_use]
    pub fn leaks(&self) -> Vec<String> {
        self.texts(1)
    }

    /// Virtual time of a stream (0: the legacy one), the engines, the device and the calling thread.
    #[must_use]
    pub fn clock(&self, stream: u64) -> Clock {
        let mut raw = RawClock::default();
        self.call::<extern "C" fn(usize, u64, *mut RawClock) -> bool, _>("cusim_clock", |get| {
            get(self.ordinal, stream, &raw mut raw)
        });
        Clock {
            stream_ns: raw.stream_ns,
            h2d_ns: raw.h2d_ns,
            d2h_ns: raw.d2h_ns,
            now_ns: raw.now_ns,
            host_ns: raw.host_ns,
        }
    }

    /// Waits until everything has run that no gate (and no value a stream waits for) holds back.
    pub fn idle(&self) {
        self.call::<extern "C" fn(usize) -> bool, _>("cusim_idle", |idle| idle(self.ordinal));
    }

    /// What the driver takes an address for.
    #[must_use]
    pub fn memory_kind(&self, address: u64) -> MemoryKind {
        let kind = self.call::<extern "C" fn(u64) -> u32, _>("cusim_memory_kind", |kind| kind(address));
        match kind {
            Some(1) => MemoryKind::Device,
            Some(2) => MemoryKind::Pinned,
            Some(3) => MemoryKind::Registered,
            Some(4) => MemoryKind::Managed,
            _ => MemoryKind::Pageable,
        }
    }

    /// The bytes at an address of an allocation, read behind the driver's back: no call, no order.
    #[must_use]
    pub fn peek(&self, address: u64, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0u8; len];
        let done = self.call::<extern "C" fn(u64, *mut u8, usize) -> bool, _>("cusim_peek", |peek| {
            peek(address, bytes.as_mut_ptr(), len)
        });
        done.unwrap_or(false).then_some(bytes)
    }
}

/// Holds a stream until it is opened or dropped.
#[derive(Debug)]
pub struct Gate {
    id: u64,
}

impl Gate {
    /// Lets the stream go on.
    pub fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Ok(open) = function::<extern "C" fn(u64) -> bool>("cusim_gate_open") {
            open(self.id);
        }
    }
}

/// The pointer a sink below gets back.
fn user<T>(to: &mut Vec<T>) -> *mut c_void {
    std::ptr::from_mut(to).cast()
}

extern "C" fn keep_text(user: *mut c_void, text: *const u8, len: usize) {
    // SAFETY: `user` is the vector that was passed along with this function, lent for the call.
    let texts = unsafe { &mut *user.cast::<Vec<String>>() };
    // SAFETY: the driver passes the pointer and length of a text that lives through this call.
    let bytes = unsafe { std::slice::from_raw_parts(text, len) };
    texts.push(String::from_utf8_lossy(bytes).into_owned());
}

extern "C" fn keep_call(user: *mut c_void, call: *const RawCall) {
    // SAFETY: `user` is the vector that was passed along with this function, lent for the call.
    let calls = unsafe { &mut *user.cast::<Vec<Call>>() };
    // SAFETY: the driver passes a call that lives through this one.
    let call = unsafe { &*call };
    // SAFETY: the name is a static text of the driver.
    let name = unsafe { std::slice::from_raw_parts(call.name.start, call.name.len) };
    calls.push(Call {
        seq: call.seq,
        name: String::from_utf8_lossy(name).into_owned(),
        thread: call.thread,
        context: call.context,
        stream: call.stream,
        bytes: call.bytes,
        result: call.result,
        args: call.args,
    });
}
