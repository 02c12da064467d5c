//! Modules, functions and launches.

use super::types::{In, Out, Text};
use super::{Call, Here};
use crate::capture;
use crate::launch::KernelOp;
use crate::module::{Function, parse};
use crate::sched::op::Op;
use crate::state::Guard;
use crate::status::{FILE_NOT_FOUND, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, Res, Status};
use std::ffi::c_void;
use std::fs;

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    attributes: u64,
    attribute_count: u32,
}

export! {
    fn cuModuleLoad(call, module: Out<u64>, path: Text) {
        call.not_in_capture().ctx(|st, here| {
            let image = fs::read_to_string(path.get()?).map_err(|_| FILE_NOT_FOUND)?;
            load(st, here, module, &image)
        })
    }

    fn cuModuleLoadData(call, module: Out<u64>, image: Text) {
        call.not_in_capture().ctx(|st, here| load(st, here, module, &image.get()?))
    }

    fn cuModuleLoadDataEx(call, module: Out<u64>, image: Text, _count: u32, _options: In<u32>, _values: In<u64>) {
        call.not_in_capture().ctx(|st, here| load(st, here, module, &image.get()?))
    }

    fn cuModuleLoadFatBinary(call, _module: Out<u64>, _image: In<c_void>) {
        call.ctx(|_, _| Err(crate::status::NO_BINARY_FOR_GPU))
    }

    fn cuModuleUnload(call, module: u64) {
        call.not_in_capture().ctx(|st, _| st.modules.unload(module))
    }

    fn cuModuleGetFunction(call, function: Out<u64>, module: u64, name: Text) {
        call.ctx(|st, _| {
            function.check()?;
            let handle = st.handle();
            let found = st.modules.function(handle, module, &name.get()?)?;
            function.set(found)
        })
    }

    fn cuModuleGetFunctionCount(call, count: Out<u32>, module: u64) {
        call.ctx(|st, _| count.set(u32::try_from(st.modules.count(module)?).unwrap_or(u32::MAX)))
    }

    fn cuModuleGetGlobal_v2(call, _address: Out<u64>, _size: Out<usize>, module: u64, _name: Text) {
        call.ctx(|st, _| if st.modules.has_module(module) { Err(NOT_FOUND) } else { Err(INVALID_HANDLE) })
    }

    fn cuModuleGetLoadingMode(call, mode: Out<u32>) {
        // Eager.
        call.anywhere(|_| mode.set(1))
    }

    fn cuFuncGetModule(call, module: Out<u64>, function: u64) {
        call.ctx(|st, _| module.set(st.modules.module_of(function)?))
    }

    fn cuFuncGetAttribute(call, value: Out<i32>, attribute: u32, function: u64) {
        call.ctx(|st, here| {
            let dev = st.devices.get(here.device).ok_or(INVALID_VALUE)?;
            let binary = dev.profile.attribute(75).unwrap_or(9) * 10 + dev.profile.attribute(76).unwrap_or(0);
            let function = st.modules.get(function)?;
            let default = match attribute {
                0 => 1024,
                1..=3 | 7 => 0,
                4 => 32,
                5 | 6 => binary,
                8 => 48 << 10,
                9..=15 => 0,
                _ => return Err(INVALID_VALUE),
            };
            value.set(function.attributes.get(&attribute).copied().unwrap_or(default))
        })
    }

    fn cuFuncSetAttribute(call, function: u64, attribute: u32, value: i32) {
        call.ctx(|st, _| {
            // Only the dynamic shared memory, the carve-out and the cluster's shape can be set.
            if !(8..=15).contains(&attribute) {
                return Err(INVALID_VALUE);
            }
            st.modules.get_mut(function)?.attributes.insert(attribute, value);
            Ok(())
        })
    }

    fn cuFuncSetCacheConfig(call, function: u64, _config: u32) {
        call.ctx(|st, _| st.modules.get(function).map(|_| ()))
    }

    fn cuFuncLoad(call, function: u64) {
        call.ctx(|st, _| st.modules.get(function).map(|_| ()))
    }

    fn cuFuncIsLoaded(call, state: Out<u32>, function: u64) {
        call.ctx(|st, _| {
            st.modules.get(function)?;
            state.set(1)
        })
    }

    fn cuFuncGetParamInfo(call, function: u64, index: usize, offset: Out<usize>, size: Out<usize>) {
        call.ctx(|st, _| {
            let params = &st.modules.get(function)?.params;
            let found = *params.get(index).ok_or(INVALID_VALUE)?;
            offset.set(offsets(params).get(index).copied().unwrap_or(0))?;
            size.set_if(found);
            Ok(())
        })
    }

    fn cuLaunchKernel(
        call, function: u64, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: u64,
        params: In<In<u8>>, extra: In<u64>,
    ) {
        let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz], shared, stream };
        launch(call, function, shape, params, extra)
    }

    fn cuLaunchCooperativeKernel(
        call, function: u64, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: u64,
        params: In<In<u8>>,
    ) {
        let shape = Shape { grid: [gx, gy, gz], block: [bx, by, bz], shared, stream };
        launch(call, function, shape, params, In::null())
    }

    fn cuLaunchKernelEx(call, config: In<Config>, function: u64, params: In<In<u8>>, extra: In<u64>) {
        match config.get() {
            Ok(config) => {
                let Config { grid, block, shared, stream, .. } = config;
                launch(call, function, Shape { grid, block, shared, stream }, params, extra)
            }
            Err(status) => status,
        }
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(call, blocks: Out<i32>, function: u64, size: i32, _shared: usize) {
        call.ctx(|st, _| occupancy(st, function, size).and_then(|count| blocks.set(count)))
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        call, blocks: Out<i32>, function: u64, size: i32, _shared: usize, _flags: u32,
    ) {
        call.ctx(|st, _| occupancy(st, function, size).and_then(|count| blocks.set(count)))
    }

    fn cuOccupancyMaxPotentialBlockSize(
        call, grid: Out<i32>, block: Out<i32>, function: u64, _shared_of: In<c_void>, _shared: usize, limit: i32,
    ) {
        call.ctx(|st, here| potential(st, here, function, limit, grid, block))
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        call, grid: Out<i32>, block: Out<i32>, function: u64, _shared_of: In<c_void>, _shared: usize, limit: i32,
        _flags: u32,
    ) {
        call.ctx(|st, here| potential(st, here, function, limit, grid, block))
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(call, bytes: Out<usize>, function: u64, _blocks: i32, _size: i32) {
        call.ctx(|st, _| {
            st.modules.get(function)?;
            bytes.set(48 << 10)
        })
    }
}

/// The shape of a launch and its stream's handle.
#[derive(Clone, Copy)]
struct Shape {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
}

fn load(st: &mut Guard, here: Here, module: Out<u64>, image: &str) -> Res {
    module.check()?;
    let entries = parse(image)?;
    let handle = st.handle();
    st.modules.load(handle, here.ctx, entries);
    module.set(handle)
}

fn launch(call: Call, function: u64, shape: Shape, params: In<In<u8>>, extra: In<u64>) -> Status {
    call.stream(shape.stream).args([function, 0, 0, 0]).ctx(|st, here| {
        let stream = st.stream_of(here.ctx, shape.stream)?;
        let function = st.modules.get(function)?;
        if st.stream(stream)?.ctx != function.ctx {
            return Err(INVALID_HANDLE);
        }
        let threads = shape.block.iter().try_fold(1u32, |product, size| product.checked_mul(*size));
        if shape.grid.contains(&0) || !threads.is_some_and(|threads| (1..=1024).contains(&threads)) {
            return Err(INVALID_VALUE);
        }
        let op = KernelOp {
            name: function.name,
            kernel: function.kernel,
            grid: shape.grid,
            block: shape.block,
            shared: shape.shared,
            params: arguments(function, params, extra)?,
        };
        capture::enqueue(st, stream, Op::Kernel(op)).map(|_| ())
    })
}

/// Copies the arguments: from a list of pointers, or from a buffer that holds them all.
fn arguments(function: &Function, params: In<In<u8>>, extra: In<u64>) -> Res<Vec<Vec<u8>>> {
    if !params.is_null() {
        let sizes = function.params.iter().enumerate();
        return sizes.map(|(index, size)| params.at(index)?.bytes(*size)).collect();
    }
    if function.params.is_empty() {
        return Ok(Vec::new());
    }
    if extra.is_null() {
        return Err(INVALID_VALUE);
    }
    let (mut buffer, mut size) = (In::<u8>::null(), None);
    for pair in 0.. {
        match extra.at(2 * pair)? {
            // CU_LAUNCH_PARAM_END
            0 => break,
            1 => buffer = In::from_address(extra.at(2 * pair + 1)?),
            2 => size = Some(In::<usize>::from_address(extra.at(2 * pair + 1)?).get()?),
            _ => return Err(INVALID_VALUE),
        }
    }
    let whole = buffer.bytes(size.ok_or(INVALID_VALUE)?)?;
    let places = offsets(&function.params).into_iter().zip(&function.params);
    let cut = |(offset, size): (usize, &usize)| whole.get(offset..offset + size).map(<[u8]>::to_vec);
    places.map(|place| cut(place).ok_or(INVALID_VALUE)).collect()
}

/// Where each parameter lies in a buffer of all of them: aligned to its size, eight bytes at most.
fn offsets(params: &[usize]) -> Vec<usize> {
    let mut at = 0usize;
    let place = |size: &usize| {
        let align = size.next_power_of_two().clamp(1, 8);
        at = at.next_multiple_of(align);
        let offset = at;
        at += size;
        offset
    };
    params.iter().map(place).collect()
}

fn occupancy(st: &Guard, function: u64, size: i32) -> Res<i32> {
    st.modules.get(function)?;
    if (1..=1024).contains(&size) { Ok((2048 / size).clamp(1, 32)) } else { Err(INVALID_VALUE) }
}

fn potential(st: &Guard, here: Here, function: u64, limit: i32, grid: Out<i32>, block: Out<i32>) -> Res {
    st.modules.get(function)?;
    let processors = st.devices.get(here.device).and_then(|dev| dev.profile.attribute(16)).unwrap_or(1);
    grid.set(processors * 2)?;
    block.set(if limit > 0 { limit.min(1024) } else { 1024 })
}
