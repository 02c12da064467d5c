//! The built-in kernels over a piece of plain memory, and what happens when one goes wrong.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::ptx;

/// Device memory that begins at this address.
const BASE: u64 = 0x7000_0000_0000;

struct Device {
    memory: Vec<u64>,
    fault: AtomicU32,
}

impl Device {
    fn new(words: usize) -> Self {
        Self { memory: vec![0; words], fault: AtomicU32::new(0) }
    }

    fn bytes(&mut self) -> &mut [u8] {
        let len = self.memory.len() * 8;
        // SAFETY: the words are plain bytes, borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), len) }
    }

    /// Launches a kernel of the registry with these arguments; answers the fault.
    fn launch(&mut self, kernel: KernelFn, params: &[&[u8]]) -> u32 {
        let pointers: Vec<_> = params.iter().map(|param| param.as_ptr().cast()).collect();
        let sizes: Vec<_> = params.iter().map(|param| param.len()).collect();
        let call = KernelCall {
            grid: [2, 1, 1],
            block: [32, 1, 1],
            shared: 0,
            params: pointers.as_ptr(),
            param_sizes: sizes.as_ptr(),
            nparams: params.len(),
            ctx: std::ptr::from_mut(self).cast_const().cast(),
            translate,
            fault,
        };
        // SAFETY: the call is complete and lives through the kernel.
        unsafe { kernel(&raw const call) };
        self.fault.swap(0, Ordering::Relaxed)
    }
}

unsafe extern "C" fn translate(ctx: *const c_void, at: u64, len: usize, _: bool) -> *mut u8 {
    // SAFETY: `launch` passes its device.
    let device = unsafe { &mut *ctx.cast_mut().cast::<Device>() };
    let Some(offset) = at.checked_sub(BASE).and_then(|at| usize::try_from(at).ok()) else {
        return std::ptr::null_mut();
    };
    let bytes = device.bytes();
    match offset.checked_add(len) {
        Some(end) if end <= bytes.len() => bytes[offset..].as_mut_ptr(),
        _ => std::ptr::null_mut(),
    }
}

unsafe extern "C" fn fault(ctx: *const c_void, code: u32) {
    // SAFETY: `launch` passes its device.
    unsafe { &*ctx.cast::<Device>() }.fault.store(code, Ordering::Relaxed);
}

fn named(name: &str) -> KernelFn {
    Registry::with_builtins().get(name).unwrap()
}

#[test]
fn the_ptx_and_the_registry_agree() {
    let entries = ptx::parse(BUILTIN_PTX).unwrap();
    let names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
    let known: Vec<_> = BUILTINS.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, known);
    let sizes: Vec<_> = entries.iter().map(|entry| entry.params.as_slice()).collect();
    let expected: [&[usize]; 6] = [&[8, 8], &[8, 8, 4], &[8, 8, 8], &[8, 8], &[8, 4], &[8]];
    assert_eq!(sizes, expected);
}

#[test]
fn the_hash_is_splitmix64() {
    // The generator's published first output for seed 0 is 0xE220A8397B1DCDAF.
    assert_eq!(index_hash(0), 0xAF);
    let unchanged = (0..1 << 16).filter(|i| index_hash(*i) == 0).count();
    assert!((150..400).contains(&unchanged), "about one in 256: {unchanged}");
}

#[test]
fn built_in_kernels_compute() {
    let mut device = Device::new(8);
    let n = |n: u64| n.to_ne_bytes();
    assert_eq!(device.launch(named("fill_u8"), &[&n(BASE), &n(5), &0x1234_u32.to_ne_bytes()]), 0);
    assert_eq!(device.bytes()[..6], [0x34, 0x34, 0x34, 0x34, 0x34, 0]);
    assert_eq!(device.launch(named("xor_index_u8"), &[&n(BASE), &n(5)]), 0);
    assert_eq!(device.bytes()[3], 0x34 ^ index_hash(3));
    assert_eq!(device.launch(named("copy_u8"), &[&n(BASE + 32), &n(BASE), &n(6)]), 0);
    let copied = device.bytes()[32..38].to_vec();
    assert_eq!(device.bytes()[..6], copied);
    device.bytes()[8..12].copy_from_slice(&1.5_f32.to_ne_bytes());
    assert_eq!(device.launch(named("add_one_f32"), &[&n(BASE + 8), &n(1)]), 0);
    assert_eq!(device.bytes()[8..12], 2.5_f32.to_ne_bytes());
    device.bytes()[16] = 7;
    assert_eq!(device.launch(named("spin_until"), &[&n(BASE + 16), &7_u32.to_ne_bytes()]), 0);
    assert_eq!(device.launch(named("fill_u8"), &[&n(0), &n(0), &[0; 4]]), 0, "no bytes, no fault");
}

#[test]
fn runs_of_packed_bytes_are_brought_to_their_places() {
    let mut device = Device::new(16);
    device.bytes()[..16].copy_from_slice(&std::array::from_fn::<u8, 16, _>(|i| i as u8));
    // Three bytes from 1 on, five from 9 on, and none.
    for (i, (target, offset, bytes)) in [(BASE + 99, 1u32, 3u32), (BASE + 111, 9, 5), (0, 0, 0)].into_iter().enumerate()
    {
        let place = [&target.to_le_bytes()[..], &offset.to_le_bytes(), &bytes.to_le_bytes()].concat();
        device.bytes()[16 + 16 * i..][..16].copy_from_slice(&place);
    }
    let n = |n: u64| n.to_ne_bytes();
    let scatter = named("transfer_tensor_scatter");
    assert_eq!(device.launch(scatter, &[&n(BASE), &n(BASE + 16), &3u32.to_ne_bytes()]), 0);
    assert_eq!(device.bytes()[98..103], [0, 1, 2, 3, 0]);
    assert_eq!(device.bytes()[110..117], [0, 9, 10, 11, 12, 13, 0]);
    assert_eq!(device.launch(scatter, &[&n(BASE + 8), &n(BASE + 16), &1u32.to_ne_bytes()]), 0);
    assert_eq!(device.bytes()[99..102], [9, 10, 11]);
    assert_eq!(device.launch(scatter, &[&n(BASE + 120), &n(BASE + 32), &1u32.to_ne_bytes()]), 700, "packed bytes");
    assert_eq!(device.launch(scatter, &[&n(BASE), &n(BASE + 120), &1u32.to_ne_bytes()]), 700, "places");
    device.bytes()[16..24].copy_from_slice(&(BASE + 126).to_le_bytes());
    assert_eq!(device.launch(scatter, &[&n(BASE), &n(BASE + 16), &1u32.to_ne_bytes()]), 700, "a target");
}

#[test]
fn faults_are_reported_and_stay_inside() {
    crate::kernel! { fn panics(_launch) { panic!("a kernel's own panic, caught") } }
    let mut device = Device::new(1);
    let n = |n: u64| n.to_ne_bytes();
    assert_eq!(device.launch(named("oob"), &[&n(BASE)]), 700);
    assert_eq!(device.launch(named("xor_index_u8"), &[&n(BASE), &n(9)]), 700);
    assert_eq!(device.launch(named("xor_index_u8"), &[&n(BASE), &n(u64::MAX)]), 700);
    assert_eq!(device.launch(named("add_one_f32"), &[&n(BASE + 2), &n(1)]), 716);
    assert_eq!(device.launch(named("add_one_f32"), &[&n(BASE)]), 719, "an argument too few");
    assert_eq!(device.launch(named("oob"), &[&[0; 4]]), 719, "an argument of another size");
    assert_eq!(device.launch(panics, &[]), 719);
}

#[test]
fn a_registered_kernel_replaces_one_of_its_name() {
    crate::kernel! { fn nothing(_launch) { Ok(()) } }
    let registry = Registry::default();
    assert!(registry.get("nothing").is_none());
    registry.insert("oob", nothing);
    let mut device = Device::new(1);
    assert_eq!(device.launch(registry.get("oob").unwrap(), &[]), 0);
}
