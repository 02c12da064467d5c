//! Copies and fills.

use super::init::BATCHES_FROM;
use super::types::{In, Out};
use super::{Call, Here};
use crate::capture;
use crate::sched::op::{CopyOp, End, FillOp, Op, Side};
use crate::sched::{self};
use crate::state::Guard;
use crate::status::{INVALID_VALUE, NOT_SUPPORTED, Res, Status};

/// When a copy's call returns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Returns {
    /// When the copy is done, if it touches host memory.
    Done,
    /// When the copy is queued (or, with pageable memory, done).
    Queued,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rectangle {
    src_x: usize,
    src_y: usize,
    src_kind: u32,
    src_host: u64,
    src_device: u64,
    src_array: u64,
    src_pitch: usize,
    dst_x: usize,
    dst_y: usize,
    dst_kind: u32,
    dst_host: u64,
    dst_device: u64,
    dst_array: u64,
    dst_pitch: usize,
    width: usize,
    height: usize,
}

export! {
    fn cuMemcpyHtoD_v2(call, dst: u64, src: u64, bytes: usize) {
        copy(call, (dst, Side::Device), (src, Side::Host), bytes, 0, Returns::Done)
    }

    fn cuMemcpyDtoH_v2(call, dst: u64, src: u64, bytes: usize) {
        copy(call, (dst, Side::Host), (src, Side::Device), bytes, 0, Returns::Done)
    }

    fn cuMemcpyDtoD_v2(call, dst: u64, src: u64, bytes: usize) {
        copy(call, (dst, Side::Device), (src, Side::Device), bytes, 0, Returns::Queued)
    }

    fn cuMemcpy(call, dst: u64, src: u64, bytes: usize) {
        copy(call, (dst, Side::Any), (src, Side::Any), bytes, 0, Returns::Done)
    }

    fn cuMemcpyHtoDAsync_v2(call, dst: u64, src: u64, bytes: usize, stream: u64) {
        copy(call, (dst, Side::Device), (src, Side::Host), bytes, stream, Returns::Queued)
    }

    fn cuMemcpyDtoHAsync_v2(call, dst: u64, src: u64, bytes: usize, stream: u64) {
        copy(call, (dst, Side::Host), (src, Side::Device), bytes, stream, Returns::Queued)
    }

    fn cuMemcpyDtoDAsync_v2(call, dst: u64, src: u64, bytes: usize, stream: u64) {
        copy(call, (dst, Side::Device), (src, Side::Device), bytes, stream, Returns::Queued)
    }

    fn cuMemcpyAsync(call, dst: u64, src: u64, bytes: usize, stream: u64) {
        copy(call, (dst, Side::Any), (src, Side::Any), bytes, stream, Returns::Queued)
    }

    fn cuMemcpyPeer(call, dst: u64, _dst_ctx: u64, src: u64, _src_ctx: u64, bytes: usize) {
        copy(call, (dst, Side::Device), (src, Side::Device), bytes, 0, Returns::Queued)
    }

    fn cuMemcpyPeerAsync(call, dst: u64, _dst_ctx: u64, src: u64, _src_ctx: u64, bytes: usize, stream: u64) {
        copy(call, (dst, Side::Device), (src, Side::Device), bytes, stream, Returns::Queued)
    }

    fn cuMemcpyBatchAsync(
        call, dsts: In<u64>, srcs: In<u64>, sizes: In<usize>, count: usize, attributes: In<BatchAttributes>,
        firsts: In<usize>, kinds: usize, failed: Out<usize>, stream: u64,
    ) {
        failed.set_if(usize::MAX);
        batch(call, Pieces { dsts, srcs, sizes, count }, Kinds { attributes, firsts, kinds }, failed, stream)
    }

    fn cuMemcpyBatchAsync_v2(
        call, dsts: In<u64>, srcs: In<u64>, sizes: In<usize>, count: usize, attributes: In<BatchAttributes>,
        firsts: In<usize>, kinds: usize, stream: u64,
    ) {
        let pieces = Pieces { dsts, srcs, sizes, count };
        batch(call, pieces, Kinds { attributes, firsts, kinds }, Out::null(), stream)
    }

    fn cuMemcpy2D_v2(call, rectangle: In<Rectangle>) {
        copy_2d(call, rectangle, 0, Returns::Done)
    }

    fn cuMemcpy2DUnaligned_v2(call, rectangle: In<Rectangle>) {
        copy_2d(call, rectangle, 0, Returns::Done)
    }

    fn cuMemcpy2DAsync_v2(call, rectangle: In<Rectangle>, stream: u64) {
        copy_2d(call, rectangle, stream, Returns::Queued)
    }

    fn cuMemsetD8_v2(call, dst: u64, value: u8, count: usize) {
        fill(call, dst, u32::from(value), 1, (count, 1, count), 0)
    }

    fn cuMemsetD16_v2(call, dst: u64, value: u16, count: usize) {
        fill(call, dst, u32::from(value), 2, (count, 1, 0), 0)
    }

    fn cuMemsetD32_v2(call, dst: u64, value: u32, count: usize) {
        fill(call, dst, value, 4, (count, 1, 0), 0)
    }

    fn cuMemsetD8Async(call, dst: u64, value: u8, count: usize, stream: u64) {
        fill(call, dst, u32::from(value), 1, (count, 1, 0), stream)
    }

    fn cuMemsetD16Async(call, dst: u64, value: u16, count: usize, stream: u64) {
        fill(call, dst, u32::from(value), 2, (count, 1, 0), stream)
    }

    fn cuMemsetD32Async(call, dst: u64, value: u32, count: usize, stream: u64) {
        fill(call, dst, value, 4, (count, 1, 0), stream)
    }

    fn cuMemsetD2D8_v2(call, dst: u64, pitch: usize, value: u8, width: usize, height: usize) {
        fill(call, dst, u32::from(value), 1, (width, height, pitch), 0)
    }

    fn cuMemsetD2D16_v2(call, dst: u64, pitch: usize, value: u16, width: usize, height: usize) {
        fill(call, dst, u32::from(value), 2, (width, height, pitch), 0)
    }

    fn cuMemsetD2D32_v2(call, dst: u64, pitch: usize, value: u32, width: usize, height: usize) {
        fill(call, dst, value, 4, (width, height, pitch), 0)
    }

    fn cuMemsetD2D8Async(call, dst: u64, pitch: usize, value: u8, width: usize, height: usize, stream: u64) {
        fill(call, dst, u32::from(value), 1, (width, height, pitch), stream)
    }

    fn cuMemsetD2D16Async(call, dst: u64, pitch: usize, value: u16, width: usize, height: usize, stream: u64) {
        fill(call, dst, u32::from(value), 2, (width, height, pitch), stream)
    }

    fn cuMemsetD2D32Async(call, dst: u64, pitch: usize, value: u32, width: usize, height: usize, stream: u64) {
        fill(call, dst, value, 4, (width, height, pitch), stream)
    }
}

fn copy(call: Call, dst: (u64, Side), src: (u64, Side), bytes: usize, stream: u64, returns: Returns) -> Status {
    let name = call.name();
    let bytes = bytes as u64;
    call.stream(stream)
        .bytes(bytes)
        .args([dst.0, src.0, 0, 0])
        .ctx(|st, here| queue(st, here, stream, CopyOp::flat(name, dst, src, bytes), returns))
}

/// The copies of a batch.
#[derive(Clone, Copy)]
struct Pieces {
    dsts: In<u64>,
    srcs: In<u64>,
    sizes: In<usize>,
    count: usize,
}

/// `CUmemcpyAttributes`: when the sources may be read, and where the ends are.
#[repr(C)]
#[derive(Clone, Copy)]
struct BatchAttributes {
    order: u32,
    src: [u32; 2],
    dst: [u32; 2],
    flags: u32,
}

/// Which attributes hold from which copy on.
#[derive(Clone, Copy)]
struct Kinds {
    attributes: In<BatchAttributes>,
    firsts: In<usize>,
    kinds: usize,
}

impl Kinds {
    /// They begin at the first copy and go on from there; the order is one of three.
    fn check(self, count: usize) -> Res {
        if self.kinds == 0 || self.kinds > count {
            return Err(INVALID_VALUE);
        }
        let mut next = 0;
        for index in 0..self.kinds {
            let first = self.firsts.at(index)?;
            let order = self.attributes.at(index)?.order;
            if first < next || first >= count || (index == 0 && first != 0) || !(1..=3).contains(&order) {
                return Err(INVALID_VALUE);
            }
            next = first + 1;
        }
        Ok(())
    }
}

fn batch(call: Call, pieces: Pieces, kinds: Kinds, failed: Out<usize>, stream: u64) -> Status {
    let name = call.name();
    let count = pieces.count;
    let bytes = (0..count).map(|index| pieces.sizes.at(index).unwrap_or(0) as u64).fold(0, u64::saturating_add);
    call.stream(stream).bytes(bytes).args([count as u64, 0, 0, 0]).ctx(|st, here| {
        if st.device(here.device)?.profile.driver_version < BATCHES_FROM {
            return Err(NOT_SUPPORTED);
        }
        // The default streams are refused, and so is an empty batch.
        if stream <= 2 || count == 0 {
            return Err(INVALID_VALUE);
        }
        kinds.check(count)?;
        let mut ranges = Vec::with_capacity(count);
        for index in 0..count {
            let (dst, src, bytes) = (pieces.dsts.at(index)?, pieces.srcs.at(index)?, pieces.sizes.at(index)? as u64);
            let op = CopyOp { batched: index > 0, ..CopyOp::flat(name, (dst, Side::Any), (src, Side::Any), bytes) };
            let queued = if bytes == 0 { Err(INVALID_VALUE) } else { queue(st, here, stream, op, Returns::Queued) };
            if let Err(status) = queued {
                failed.set_if(index);
                return Err(status);
            }
            ranges.extend([(dst, dst + bytes, true), (src, src + bytes, false)]);
        }
        // Nothing says in which order the copies of a batch run.
        if let Some(text) = meeting(name, ranges)
            && let Some(dev) = st.devices.get_mut(here.device)
        {
            dev.evidence.violate([text]);
        }
        Ok(())
    })
}

/// Says which two ranges of a batch overlap, at least one of them written.
fn meeting(name: &str, mut ranges: Vec<(u64, u64, bool)>) -> Option<String> {
    ranges.sort_unstable();
    let (mut read_to, mut written_to) = (0, 0);
    for (start, end, written) in ranges {
        if start < written_to || (written && start < read_to) {
            return Some(format!(
                "overlap: copies of one {name} meet at {start:#x}, and neither is ordered before the other"
            ));
        }
        let reach = if written { &mut written_to } else { &mut read_to };
        *reach = end.max(*reach);
    }
    None
}

fn copy_2d(call: Call, rectangle: In<Rectangle>, stream: u64, returns: Returns) -> Status {
    let name = call.name();
    let bytes = rectangle.get().map_or(0, |r| (r.width as u64).saturating_mul(r.height as u64));
    call.stream(stream).bytes(bytes).ctx(|st, here| {
        let r = rectangle.get()?;
        let src = end((r.src_kind, r.src_host, r.src_device), (r.src_x, r.src_y), (r.src_pitch, r.width))?;
        let dst = end((r.dst_kind, r.dst_host, r.dst_device), (r.dst_x, r.dst_y), (r.dst_pitch, r.width))?;
        let (width, height) = (r.width as u64, r.height as u64);
        let op = CopyOp { what: name, dst, src, width, height, stage: true, batched: false };
        queue(st, here, stream, op, returns)
    })
}

fn end((kind, host, device): (u32, u64, u64), (x, y): (usize, usize), (pitch, width): (usize, usize)) -> Res<End> {
    let (base, side) = match kind {
        1 => (host, Side::Host),
        2 => (device, Side::Device),
        3 => return Err(NOT_SUPPORTED),
        4 => (device, Side::Any),
        _ => return Err(INVALID_VALUE),
    };
    let pitch = if pitch == 0 { width } else { pitch } as u64;
    let offset = (y as u64).checked_mul(pitch).and_then(|rows| rows.checked_add(x as u64));
    let addr = offset.and_then(|offset| base.checked_add(offset)).ok_or(INVALID_VALUE)?;
    Ok(End { addr, pitch, side })
}

fn queue(st: &mut Guard, here: Here, stream: u64, op: CopyOp, returns: Returns) -> Res {
    if op.bytes() == 0 {
        return Ok(());
    }
    if returns == Returns::Done {
        capture::check_unsafe(st, here.device)?;
    }
    let stream = st.stream_of(here.ctx, stream)?;
    let host = op.dst.side != Side::Device || op.src.side != Side::Device;
    let Some(queued) = capture::enqueue(st, stream, Op::Copy(op))? else { return Ok(()) };
    if queued.blocks || (returns == Returns::Done && host) {
        sched::wait(st, &queued.step)?;
    }
    Ok(())
}

fn fill(
    call: Call,
    dst: u64,
    value: u32,
    element: u64,
    (width, height, pitch): (usize, usize, usize),
    stream: u64,
) -> Status {
    let (width, height) = (width as u64, height as u64);
    let bytes = width.saturating_mul(height).saturating_mul(element);
    call.stream(stream).bytes(bytes).args([dst, u64::from(value), 0, 0]).ctx(|st, here| {
        let stream = st.stream_of(here.ctx, stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let pitch = if height == 1 { width.saturating_mul(element) } else { pitch as u64 };
        let op = FillOp { addr: dst, value, element, width, height, pitch };
        capture::enqueue(st, stream, Op::Fill(op))?;
        Ok(())
    })
}
