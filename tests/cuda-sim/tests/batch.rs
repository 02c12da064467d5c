//! Many copies in one call, and copies of rows.

mod common;

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;

use common::*;
use cuda_sim::{Device, DeviceBuilder};
use cudarc::driver::sys;

const H200: &str = "x86_h200_sxm_gen5";
const INVALID_VALUE: u32 = 1;
const NOT_FOUND: u32 = 500;
const NOT_SUPPORTED: u32 = 801;

/// `CUmemcpyAttributes`, with the sources read in stream order.
#[repr(C)]
struct Attributes {
    order: u32,
    places: [u32; 4],
    flags: u32,
}

const IN_ORDER: Attributes = Attributes { order: 1, places: [0; 4], flags: 0 };

type First = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const Attributes,
    *const usize,
    usize,
    *mut usize,
    sys::CUstream,
) -> u32;
type Second = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const Attributes,
    *const usize,
    usize,
    sys::CUstream,
) -> u32;

/// What the loader finds.
fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: C strings; the library is loaded already.
    unsafe {
        let library = libc::dlopen(c"libcuda.so".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_NOW);
        libc::dlsym(library, name.as_ptr())
    }
}

/// What the driver says the function of a name and version is.
fn entry(name: &CStr, version: i32) -> Result<*mut c_void, u32> {
    type Look = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64) -> u32;
    let mut address = null_mut();
    // SAFETY: the function's type, and valid pointers.
    let code = unsafe {
        let look: Look = std::mem::transmute(symbol(c"cuGetProcAddress"));
        look(name.as_ptr(), &raw mut address, version, 0)
    };
    if code == 0 { Ok(address) } else { Err(code) }
}

/// A batch by the first signature; the code, and which copy was to blame.
fn first(copies: &[(u64, u64, usize)], attributes: &[Attributes], stream: sys::CUstream) -> (u32, usize) {
    let (dsts, srcs, sizes) = columns(copies);
    let (starts, mut failed) = (vec![0; attributes.len()], 7);
    // SAFETY: the function's type; the arrays are as long as they are said to be.
    let code = unsafe {
        let call: First = std::mem::transmute(symbol(c"cuMemcpyBatchAsync"));
        let (dsts, srcs, sizes) = (dsts.as_ptr(), srcs.as_ptr(), sizes.as_ptr());
        let kinds = attributes.len();
        call(dsts, srcs, sizes, copies.len(), attributes.as_ptr(), starts.as_ptr(), kinds, &raw mut failed, stream)
    };
    (code, failed)
}

fn columns(copies: &[(u64, u64, usize)]) -> (Vec<u64>, Vec<u64>, Vec<usize>) {
    (
        copies.iter().map(|copy| copy.0).collect(),
        copies.iter().map(|copy| copy.1).collect(),
        copies.iter().map(|copy| copy.2).collect(),
    )
}

fn on(builder: DeviceBuilder) -> Device {
    let sim = builder.build().unwrap();
    context(sim.ordinal());
    sim
}

/// Copies of `len` bytes from `host` to every second place at `to`.
fn scattered(to: u64, host: &[u8], len: usize) -> Vec<(u64, u64, usize)> {
    let from = host.as_ptr() as u64;
    (0..host.len() / len).map(|i| (to + (2 * i * len) as u64, from + (i * len) as u64, len)).collect()
}

#[test]
fn both_signatures_move_every_piece_both_ways() {
    let sim = on(DeviceBuilder::new(H200));
    let (s, d) = (stream(), alloc(2000));
    let (host, back) = (pinned(1000), pinned(1000));
    for (i, byte) in host.iter_mut().enumerate() {
        *byte = i as u8;
    }
    let up = scattered(d, host, 100);
    assert_eq!(first(&up, &[IN_ORDER], s), (0, usize::MAX));
    let down: Vec<_> =
        up.iter().map(|&(d, h, len)| (h - host.as_ptr() as u64 + back.as_ptr() as u64, d, len)).collect();
    let (dsts, srcs, sizes) = columns(&down);
    // SAFETY: the function's type; the arrays are as long as they are said to be.
    let code = unsafe {
        let call: Second = std::mem::transmute(symbol(c"cuMemcpyBatchAsync_v2"));
        call(dsts.as_ptr(), srcs.as_ptr(), sizes.as_ptr(), 10, &IN_ORDER, &0, 1, s)
    };
    assert_eq!(code, 0);
    ok(sync(s));
    assert_eq!(host, back);
    let log: Vec<_> = sim.calls().into_iter().filter(|call| call.name.starts_with("cuMemcpyBatchAsync")).collect();
    assert_eq!(log.iter().map(|call| (call.bytes, call.args[0])).collect::<Vec<_>>(), [(1000, 10); 2]);
    assert_eq!((sim.evidence().copied_h2d_pinned, sim.evidence().copied_d2h_pinned), (1000, 1000));
    assert!(sim.violations().is_empty(), "{:?}", sim.violations());
}

#[test]
fn what_a_batch_refuses() {
    let _sim = on(DeviceBuilder::new(H200));
    let (s, d) = (stream(), alloc(2000));
    let host = pinned(1000);
    let copies = scattered(d, host, 100);
    for default in [null_mut(), 1 as sys::CUstream, 2 as sys::CUstream] {
        assert_eq!(first(&copies, &[IN_ORDER], default).0, INVALID_VALUE, "{default:?}");
    }
    assert_eq!(first(&[], &[IN_ORDER], s), (INVALID_VALUE, usize::MAX));
    assert_eq!(first(&copies, &[], s).0, INVALID_VALUE, "no attributes");
    assert_eq!(first(&copies, &[Attributes { order: 0, ..IN_ORDER }], s).0, INVALID_VALUE);
    let mut bad = copies.clone();
    bad[3].2 = 0;
    assert_eq!(first(&bad, &[IN_ORDER], s), (INVALID_VALUE, 3));
    bad[3] = (d + 1950, copies[3].1, 100);
    assert_eq!(first(&bad, &[IN_ORDER], s), (INVALID_VALUE, 3), "past the end");
    ok(sync(s));
}

#[test]
fn copies_of_one_batch_have_no_order() {
    let sim = on(DeviceBuilder::new(H200));
    let (s, d) = (stream(), alloc(2000));
    let host = pinned(1000);
    let mut copies = scattered(d, host, 100);
    copies[4].0 = copies[3].0 + 99;
    assert_eq!(first(&copies, &[IN_ORDER], s).0, 0);
    ok(sync(s));
    assert_eq!(sim.violations().len(), 1, "{:?}", sim.violations());
    sim.clear_violations();
    // One after the other is an order.
    for copy in copies {
        assert_eq!(first(&[copy], &[IN_ORDER], s).0, 0);
    }
    ok(sync(s));
    assert!(sim.violations().is_empty(), "{:?}", sim.violations());
}

#[test]
fn an_older_driver_lacks_it() {
    const NAME: &CStr = c"cuMemcpyBatchAsync";
    let _old = on(DeviceBuilder::new(H200).driver_version(12_060));
    assert_eq!(entry(NAME, 13_000), Err(NOT_FOUND));
    let (s, d) = (stream(), alloc(100));
    let host = pinned(100);
    assert_eq!(first(&[(d, host.as_ptr() as u64, 100)], &[IN_ORDER], s).0, NOT_SUPPORTED);
    let _first = on(DeviceBuilder::new(H200).driver_version(12_080));
    assert_eq!(entry(NAME, 13_000), Ok(symbol(NAME)));
    let _newest = on(DeviceBuilder::new(H200));
    assert_eq!(entry(NAME, 12_060), Err(NOT_FOUND));
    assert_eq!(entry(NAME, 12_090), Ok(symbol(NAME)));
    assert_eq!(entry(NAME, 13_000), Ok(symbol(c"cuMemcpyBatchAsync_v2")));
}

#[test]
fn a_batch_costs_less_than_its_copies_and_narrow_rows_more_than_a_block() {
    const PIECES: usize = 500;
    let sim = on(DeviceBuilder::new(H200));
    let (s, d) = (stream(), alloc(2 * PIECES * 4096));
    let host = pinned(PIECES * 4096);
    let copies = scattered(d, host, 4096);
    let time = |work: &dyn Fn()| {
        let start = sim.clock(s as u64).stream_ns;
        work();
        ok(sync(s));
        sim.clock(s as u64).stream_ns - start
    };
    let single = time(&|| copies.iter().for_each(|&(to, _, len)| ok(h2d(to, &host[..len], s))));
    let batch = time(&|| assert_eq!(first(&copies, &[IN_ORDER], s).0, 0));
    assert!(batch * 3 < single * 2, "{batch} ns in one call, {single} ns in {PIECES}");
    let block = time(&|| ok(h2d(d, host, s)));
    let rows = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: host.as_ptr().cast(),
        srcDevice: 0,
        srcArray: null_mut(),
        srcPitch: 4,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: null_mut(),
        dstDevice: d,
        dstArray: null_mut(),
        dstPitch: 8,
        WidthInBytes: 4,
        Height: host.len() / 4,
    };
    // SAFETY: the rectangle lies in both blocks.
    let narrow = time(&|| ok(unsafe { sys::cuMemcpy2DAsync_v2(&raw const rows, s) }));
    assert!(narrow > 100 * block, "rows of 4 bytes {narrow} ns, one block {block} ns");
    assert_eq!(sim.evidence().copied_h2d_pinned, 4 * host.len() as u64);
}
