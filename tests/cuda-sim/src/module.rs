//! Modules and kernels.

#![deny(unsafe_code)]

use crate::sched::Work;
use crate::state::State;
use crate::status::{NOT_SUPPORTED, Res};

#[derive(Debug, Default)]
pub(crate) struct Modules {}
impl Modules {
    pub(crate) fn drop_context(&mut self, _ctx: u64) {}
    pub(crate) fn live(&self, _ctx: u64) -> Vec<String> {
        Vec::new()
    }
}
#[derive(Debug, Clone)]
pub(crate) struct KernelOp {}
#[derive(Debug)]
pub(crate) struct KernelJob {}
pub(crate) struct Ran {
    pub(crate) result: Res,
    pub(crate) duration_ns: u64,
}
pub(crate) fn prepare(_st: &mut State, _ctx: u64, _op: &KernelOp) -> Res<Work> {
    Err(NOT_SUPPORTED)
}
pub(crate) fn run(_id: u64, _ctx: u64, _device: usize, _job: KernelJob) -> Ran {
    Ran { result: Ok(()), duration_ns: 0 }
}

/// What the host wrote is visible to the device from here on.
pub(crate) fn fence(_st: &mut State, _device: usize) {}

/// The kernels this driver knows.
pub(crate) fn registry() -> &'static crate::kernels::Registry {
    static REGISTRY: std::sync::LazyLock<crate::kernels::Registry> = std::sync::LazyLock::new(Default::default);
    &REGISTRY
}
