//! The rest: profiler, and what is not supported.

use super::types::{In, Out};
use crate::status::NOT_SUPPORTED;
use std::ffi::c_void;

export! {
    fn cuProfilerStart(call) {
        call.ctx(|_, _| Ok(()))
    }

    fn cuProfilerStop(call) {
        call.ctx(|_, _| Ok(()))
    }

    fn cuMemAddressReserve(call, _address: Out<u64>, _size: usize, _align: usize, _hint: u64, _flags: u64) {
        call.ctx(|_, _| Err(NOT_SUPPORTED))
    }

    fn cuMemCreate(call, _handle: Out<u64>, _size: usize, _properties: In<c_void>, _flags: u64) {
        call.ctx(|_, _| Err(NOT_SUPPORTED))
    }

    fn cuMemGetAllocationGranularity(call, size: Out<usize>, _properties: In<c_void>, _option: u32) {
        call.ctx(|_, _| size.set(2 << 20))
    }

    fn cuMemExportToShareableHandle(call, _to: Out<c_void>, _handle: u64, _kind: u32, _flags: u64) {
        call.ctx(|_, _| Err(NOT_SUPPORTED))
    }

    fn cuIpcGetMemHandle(call, _handle: Out<c_void>, _address: u64) {
        call.ctx(|_, _| Err(NOT_SUPPORTED))
    }

    fn cuImportExternalMemory(call, _memory: Out<u64>, _description: In<c_void>) {
        call.ctx(|_, _| Err(NOT_SUPPORTED))
    }
}
