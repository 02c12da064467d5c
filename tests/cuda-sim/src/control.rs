//! The control functions, `cusim_*`: what a test says to the driver behind the program's back.

use crate::device::Device;
use crate::hostility::{Callbacks, Hostility};
use crate::kernels::KernelFn;
use crate::memory::Kind;
use crate::profile::Profile;
use crate::sched::{self, Body, Lane, Work, bytes};
use crate::state::{self, Guard, State};
use crate::wire::{ABI, CallSink, RawCall, RawClock, RawEvidence, RawText, Setting, TextSink};
use crate::{clock, evidence};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Declares control functions; a panic in one answers `$default`.
macro_rules! control {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty, or $default:expr, $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $ty),*) -> $ret {
            catch_unwind(AssertUnwindSafe(|| $body)).unwrap_or($default)
        }
    )*};
}

/// The text the other half passed.
fn text(raw: RawText) -> String {
    if raw.start.is_null() {
        return String::new();
    }
    // SAFETY: the client half passes the pointer and length of a `str` that lives through the call.
    let bytes = unsafe { std::slice::from_raw_parts(raw.start, raw.len) };
    String::from_utf8_lossy(bytes).into_owned()
}

/// Writes an answer for the other half.
fn put<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: the client half passes a pointer to a variable of this type.
        unsafe { to.write(value) };
    }
}

control! {
    fn cusim_abi() -> u64, or 0, { ABI }

    /// Makes a device of a profile in a TOML text (empty: of the built-in ones). A negative answer is an error, told
    /// to the sink.
    fn cusim_device_new(toml: RawText, key: RawText, sink: TextSink, user: *mut c_void) -> i64, or -1, {
        let (toml, key) = (text(toml), text(key));
        let profile = if toml.is_empty() { Profile::builtin(&key) } else { Profile::from_toml(&toml, &key) };
        match profile {
            Ok(profile) => {
                let mut st = state::lock();
                let ordinal = st.devices.len();
                st.devices.push(Device::new(ordinal, profile, Hostility::default()));
                i64::try_from(ordinal).unwrap_or(-1)
            }
            Err(error) => {
                let error = error.to_string();
                sink(user, error.as_ptr(), error.len());
                -1
            }
        }
    }

    fn cusim_pci_bus_id(device: usize, sink: TextSink, user: *mut c_void) -> bool, or false, {
        let id = state::lock().devices.get(device).map(Device::pci_bus_id);
        id.map(|id| sink(user, id.as_ptr(), id.len())).is_some()
    }

    fn cusim_set_attribute(device: usize, attribute: i32, value: i32) -> bool, or false, {
        let mut st = state::lock();
        st.devices.get_mut(device).map(|dev| dev.profile.attributes.insert(attribute, value)).is_some()
    }

    fn cusim_set(device: usize, what: u32, value: u64) -> bool, or false, {
        let mut st = state::lock();
        match Setting::from_number(what) {
            Some(setting) => set(&mut st, device, setting, value),
            None => false,
        }
    }

    fn cusim_set_mem_info(device: usize, free: u64, total: u64) -> bool, or false, {
        let mut st = state::lock();
        st.devices.get_mut(device).map(|dev| dev.hostility.mem_info = Some((free, total))).is_some()
    }

    fn cusim_fail(device: usize, call: RawText, nth: u64, status: u32, after: bool) -> bool, or false, {
        let call = text(call);
        let mut st = state::lock();
        if device == usize::MAX {
            st.hostility.fail(&call, nth, status, after);
            return true;
        }
        st.devices.get_mut(device).map(|dev| dev.hostility.fail(&call, nth, status, after)).is_some()
    }

    /// Puts a step on a stream that faults when it runs.
    fn cusim_fault_on_stream(device: usize, stream: u64, status: u32) -> bool, or false, {
        let mut st = state::lock();
        let Some(stream) = stream_of(&mut st, device, stream) else { return false };
        sched::submit(&mut st, stream, Work::new("injected fault", Body::Fault(status), Lane::Inline)).is_ok()
    }

    /// Puts a gate on a stream: 0 if there is no such stream.
    fn cusim_gate(device: usize, stream: u64) -> u64, or 0, {
        let mut st = state::lock();
        let Some(stream) = stream_of(&mut st, device, stream) else { return 0 };
        sched::submit(&mut st, stream, Work::new("gate", Body::Gate, Lane::Inline)).map_or(0, |step| step.id)
    }

    fn cusim_gate_open(gate: u64) -> bool, or false, {
        sched::open_gate(&mut state::lock(), gate);
        true
    }

    fn cusim_calls(device: usize, sink: CallSink, user: *mut c_void) -> bool, or false, {
        let calls = state::lock().devices.get(device).map(|dev| dev.evidence.calls().to_vec());
        let Some(calls) = calls else { return false };
        for call in calls {
            let raw = RawCall {
                seq: call.seq,
                name: RawText::of(call.name),
                thread: call.thread,
                context: call.ctx,
                stream: call.stream,
                bytes: call.bytes,
                result: call.result,
                args: call.args,
            };
            sink(user, &raw const raw);
        }
        true
    }

    fn cusim_count(device: usize, call: RawText) -> u64, or 0, {
        let call = text(call);
        state::lock().devices.get(device).map_or(0, |dev| dev.evidence.count(&call))
    }

    fn cusim_evidence(device: usize, to: *mut RawEvidence) -> bool, or false, {
        let raw = state::lock().devices.get(device).map(raw_evidence);
        raw.map(|raw| put(to, raw)).is_some()
    }

    /// 0: violations, 1: leaks.
    fn cusim_texts(device: usize, which: u32, sink: TextSink, user: *mut c_void) -> bool, or false, {
        let st = state::lock();
        let texts = match which {
            0 => st.devices.get(device).map(|dev| dev.evidence.violations.clone()),
            _ => Some(evidence::leaks(&st, device)),
        };
        drop(st);
        for text in texts.unwrap_or_default() {
            sink(user, text.as_ptr(), text.len());
        }
        true
    }

    fn cusim_clock(device: usize, stream: u64, to: *mut RawClock) -> bool, or false, {
        let mut st = state::lock();
        let id = stream_of(&mut st, device, stream);
        let stream_ns = id.and_then(|id| st.streams.get(&id)).map_or(0, |stream| stream.clock_ns);
        let Some(dev) = st.devices.get(device) else { return false };
        let engine = |index: usize| dev.engines.get(index).map_or(0, |engine| engine.clock_ns);
        put(to, RawClock {
            stream_ns,
            h2d_ns: engine(dev.engine(true)),
            d2h_ns: engine(dev.engine(false)),
            now_ns: dev.now_ns,
            host_ns: state::host_ns(dev.now_ns),
        });
        true
    }

    /// The calling thread works for a while in virtual time.
    fn cusim_host_works(device: usize, ns: u64) -> bool, or false, {
        let now = state::lock().devices.get(device).map_or(0, |dev| dev.now_ns);
        state::host_works(now, ns);
        true
    }

    fn cusim_memcpy_ns(device: usize, bytes: u64) -> u64, or 0, {
        let st = state::lock();
        st.devices.get(device).map_or(0, |dev| clock::at_rate(bytes, dev.profile.bandwidth.cpu_memcpy))
    }

    /// Waits until everything that nothing holds back has run.
    fn cusim_idle(device: usize) -> bool, or false, {
        sched::wait_idle(&mut state::lock(), device);
        true
    }

    /// 0 pageable, 1 device, 2 pinned, 3 registered, 4 managed.
    fn cusim_memory_kind(address: u64) -> u32, or 0, {
        match state::lock().memory.find(address).map(|found| found.kind) {
            None => 0,
            Some(Kind::Device) => 1,
            Some(Kind::Pinned) => 2,
            Some(Kind::Registered) => 3,
            Some(Kind::Managed) => 4,
        }
    }

    /// Reads memory as the engines see it.
    fn cusim_peek(address: u64, to: *mut u8, len: usize) -> bool, or false, {
        let span = state::lock().memory.span(address, len as u64).ok().flatten();
        let Some(span) = span else { return false };
        bytes::copy(to as u64, false, span.engine, span.is_foreign(), len as u64).is_ok()
    }

    fn cusim_register_kernel(name: RawText, kernel: KernelFn) -> bool, or false, {
        crate::module::registry().insert(text(name), kernel);
        true
    }
}

/// The stream a handle stands for, seen from the calling thread's context if that is on the device, else from the
/// primary one.
fn stream_of(st: &mut State, device: usize, handle: u64) -> Option<u64> {
    let current = state::current();
    let here = st.contexts.get(&current).is_some_and(|context| context.device == device);
    let ctx = if here { Some(current) } else { st.devices.get(device)?.primary };
    match ctx {
        Some(ctx) => st.stream_of(ctx, handle).ok(),
        None => st.streams.contains_key(&handle).then_some(handle),
    }
}

fn set(st: &mut Guard, device: usize, setting: Setting, value: u64) -> bool {
    let Some(dev) = st.devices.get_mut(device) else { return false };
    let on = value != 0;
    let hostility = &mut dev.hostility;
    match setting {
        Setting::Seed => hostility.seed(value),
        Setting::FreeWaits => hostility.free_waits = on,
        Setting::Poison => hostility.poison = on,
        Setting::Reorder => hostility.reorder = on,
        Setting::Late => hostility.late = on,
        Setting::CallbacksRun => hostility.callbacks = if on { Callbacks::Always } else { Callbacks::Never },
        Setting::Gone => {
            hostility.gone = on;
            dev.notify();
        }
        Setting::Sticky => {
            hostility.sticky = u32::try_from(value).ok().filter(|status| *status != 0);
            dev.notify();
            sched::release_held(st, |node| on && node.step.device == device);
            sched::pump(st);
        }
        Setting::HostFree => dev.host_free = value,
        Setting::PeerWritesNothing => hostility.peer_writes_nothing = on,
        Setting::NoPeers => hostility.no_peers = on,
        Setting::ClearFailures => hostility.clear_failures(),
        Setting::ClearCalls => dev.evidence.clear_calls(),
        Setting::ClearMemInfo => hostility.mem_info = None,
        Setting::ClearViolations => dev.evidence.violations.clear(),
        Setting::DriverVersion => dev.profile.driver_version = i32::try_from(value).unwrap_or(i32::MAX),
        Setting::Retired => {
            for kind in [Kind::Device, Kind::Pinned, Kind::Managed] {
                dev.blocks(kind).discard_free();
            }
        }
    }
    true
}

fn raw_evidence(dev: &Device) -> RawEvidence {
    let seen = &dev.evidence;
    let level = |kind| seen.level(kind);
    RawEvidence {
        device_bytes: level(Kind::Device).now,
        device_bytes_peak: level(Kind::Device).peak,
        pinned_bytes: level(Kind::Pinned).now,
        pinned_bytes_peak: level(Kind::Pinned).peak,
        registered_bytes: level(Kind::Registered).now,
        registered_bytes_peak: level(Kind::Registered).peak,
        managed_bytes: level(Kind::Managed).now,
        managed_bytes_peak: level(Kind::Managed).peak,
        copied_h2d_pinned: seen.copied.h2d_pinned,
        copied_h2d_pageable: seen.copied.h2d_pageable,
        copied_d2h_pinned: seen.copied.d2h_pinned,
        copied_d2h_pageable: seen.copied.d2h_pageable,
        copied_d2d: seen.copied.d2d,
        kernels: seen.kernels,
    }
}
