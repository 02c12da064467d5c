//! What every call of the driver interface has in common: it is refused inside host functions, needs its context,
//! meets the failures that were asked for, and is written down.

#![deny(unsafe_code)]

use crate::evidence;
use crate::hostility::Injected;
use crate::state::{self, Guard};
use crate::status::{
    DEINITIALIZED, INVALID_CONTEXT, INVALID_DEVICE, NOT_INITIALIZED, NOT_PERMITTED, Res, SUCCESS, Status, UNKNOWN,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Declares exported functions; the body gets a [`Call`] that knows the function's name.
macro_rules! export {
    ($($(#[$meta:meta])* fn $name:ident($call:ident $(, $arg:ident: $ty:ty)* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $ty),*) -> $crate::status::Status {
            let $call = $crate::abi::Call::new(stringify!($name));
            $body
        }
    )*};
}

/// Where a call happens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Here {
    pub(crate) ctx: u64,
    pub(crate) device: usize,
}

/// A call in progress.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    name: &'static str,
    stream: u64,
    bytes: u64,
    args: [u64; 4],
    /// Not allowed while a stream is being captured.
    unsafe_in_capture: bool,
    /// Answers also when the context is stuck in an error.
    lenient: bool,
}

impl Call {
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, stream: u64::MAX, bytes: 0, args: [0; 4], unsafe_in_capture: false, lenient: false }
    }

    /// The name, for what the call puts on a stream.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// The stream handle it was given.
    pub(crate) fn stream(mut self, stream: u64) -> Self {
        self.stream = stream;
        self
    }

    pub(crate) fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }

    pub(crate) fn args(mut self, args: [u64; 4]) -> Self {
        self.args = args;
        self
    }

    /// The call is potentially unsafe while a stream is being captured.
    pub(crate) fn not_in_capture(mut self) -> Self {
        self.unsafe_in_capture = true;
        self
    }

    /// The call answers also when the context is stuck in an error.
    pub(crate) fn lenient(mut self) -> Self {
        self.lenient = true;
        self
    }

    /// A call that needs a current context.
    pub(crate) fn ctx(self, body: impl FnOnce(&mut Guard, Here) -> Res) -> Status {
        self.guarded(|call| {
            let mut guard = call.enter()?;
            let ctx = state::current();
            let device = guard.contexts.get(&ctx).map(|context| context.device).ok_or(INVALID_CONTEXT);
            let here = device.map(|device| Here { ctx, device });
            call.perform(&mut guard, here.ok().map(|here| here.device), |guard| body(guard, here?))
        })
    }

    /// A call about a device, with or without a context.
    pub(crate) fn on_device(self, ordinal: i32, body: impl FnOnce(&mut Guard, usize) -> Res) -> Status {
        self.lenient().guarded(|call| {
            let mut guard = call.enter()?;
            let device = usize::try_from(ordinal).ok().filter(|device| *device < guard.devices.len());
            call.perform(&mut guard, device, |guard| body(guard, device.ok_or(INVALID_DEVICE)?))
        })
    }

    /// A call that needs neither; it is written down with the current context's device if there is one.
    pub(crate) fn anywhere(self, body: impl FnOnce(&mut Guard) -> Res) -> Status {
        self.lenient().guarded(|call| {
            let mut guard = call.enter()?;
            let device = guard.contexts.get(&state::current()).map(|context| context.device);
            call.perform(&mut guard, device, body)
        })
    }

    /// A call that works before `cuInit`, too.
    pub(crate) fn before_init(self, body: impl FnOnce(&mut Guard) -> Res) -> Status {
        self.lenient().guarded(|call| {
            let mut guard = state::lock();
            let device = guard.contexts.get(&state::current()).map(|context| context.device);
            call.perform(&mut guard, device, body)
        })
    }

    fn guarded(self, body: impl FnOnce(Self) -> Res) -> Status {
        if state::in_callback() {
            return NOT_PERMITTED;
        }
        match catch_unwind(AssertUnwindSafe(|| body(self))) {
            Ok(Ok(())) => SUCCESS,
            Ok(Err(status)) => status,
            Err(_) => UNKNOWN,
        }
    }

    fn enter(&self) -> Res<Guard> {
        let guard = state::lock();
        if guard.initialised { Ok(guard) } else { Err(NOT_INITIALIZED) }
    }

    fn perform(self, guard: &mut Guard, device: Option<usize>, body: impl FnOnce(&mut Guard) -> Res) -> Res {
        let ctx = state::current();
        let injected = self.injected(guard, device);
        let result = match injected {
            Some(Injected { status, after: false }) => Err(status),
            after => {
                let result = self.allowed(guard, device, ctx).and_then(|()| body(guard));
                after.map_or(result, |injected| Err(injected.status))
            }
        };
        self.note(guard, device, ctx, result);
        result
    }

    fn injected(self, guard: &mut Guard, device: Option<usize>) -> Option<Injected> {
        let Some(dev) = device.and_then(|device| guard.devices.get_mut(device)) else {
            return guard.hostility.injected(self.name);
        };
        if dev.hostility.gone {
            return Some(Injected { status: DEINITIALIZED, after: false });
        }
        dev.hostility.injected(self.name)
    }

    fn allowed(self, guard: &mut Guard, device: Option<usize>, ctx: u64) -> Res {
        if !self.lenient
            && let Some(status) = guard.sticky(ctx)
        {
            return Err(status);
        }
        if self.unsafe_in_capture
            && let Some(device) = device
        {
            crate::capture::check_unsafe(guard, device)?;
        }
        Ok(())
    }

    fn note(self, guard: &mut Guard, device: Option<usize>, ctx: u64, result: Res) {
        let seq = guard.tick();
        let call = evidence::Call {
            seq,
            name: self.name,
            thread: state::thread_id(),
            ctx,
            stream: self.stream,
            bytes: self.bytes,
            result: result.err().unwrap_or(SUCCESS),
            args: self.args,
        };
        if let Some(dev) = device.and_then(|device| guard.devices.get_mut(device)) {
            dev.evidence.call(call);
        }
    }
}
