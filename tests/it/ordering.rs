//! Bytes are read and written in the order of the calls, and memory stays as long as anything uses it
//! (field reports R01–R05, R09, R11, R13, R15, R45, R46, R58).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cuda_sim::DeviceBuilder;
use transfer_tensor::cudarc::driver::sys::CUresult;
use transfer_tensor::{Access, Backing, Strategy, TransferTensor};

use crate::support::{GH200, Gpu, H200, ORIN, SPARK, THOR, builder, from_env};

const LEN: usize = 1 << 16;

/// A sequence of sizes that looks random and is the same every time.
pub(crate) fn sizes(count: usize, largest: usize) -> impl Iterator<Item = usize> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    (0..count).map(move |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // As many small ones as large ones.
        let bits = (state >> 58) as u32 % (usize::BITS - largest.leading_zeros());
        1 + ((state >> 16) as usize & ((1 << bits) - 1))
    })
}

/// R01: what a copy to the host has not yet brought can not be looked at.
#[test]
fn nobody_sees_a_copy_to_the_host_before_it_has_run() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    for (round, size) in sizes(24, 1 << 20).enumerate() {
        let value = round as u8 + 1;
        let mut tensor = gpu.on_device(&vec![0xFF; size]);
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), value);
        let mut ticket = tensor.to_host().unwrap();
        assert!(!ticket.is_complete().unwrap());
        let refused = ticket.try_wait().unwrap_err();
        assert!(refused.error.is_not_ready());
        gate.open();
        let tensor = refused.value.wait().unwrap();
        assert!(tensor.host().unwrap().iter().all(|&x| x == value), "{size} bytes");
    }
    drop(kernels);
    gpu.finish();
}

/// R02: a pinned source that is dropped is not given to somebody else before it has been read.
#[test]
fn a_dropped_source_is_read_before_its_memory_is_used_again() {
    for (profile, waits) in [(H200, true), (H200, false), (GH200, false), (SPARK, false)] {
        let simulated = Gpu::built(builder(profile).free_waits(waits));
        let gpu = simulated.unwrap_or_else(|| Gpu::any(profile));
        let kernels = gpu.kernels();
        let mut target = gpu.on_device(&[0; LEN]);
        let source = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&[0x11u8; LEN], [LEN]).unwrap();
        drop(target.device_mut(&gpu.stream).unwrap());
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        let guard = source.device(&gpu.stream).unwrap();
        kernels.copy(&gpu.stream, &mut target.device_mut(&gpu.stream).unwrap(), &guard);
        drop(guard);
        drop(source);
        assert!(gpu.device.drain(Duration::from_millis(20)).is_err(), "freed under a reader");
        if gpu.sim.is_some() {
            // The simulator hands freed addresses out first. (A real driver may wait for the device here.)
            let others: Vec<_> = (0..4).map(|_| gpu.both_sides(&[0x22u8; LEN])).collect();
            drop(others);
        }
        gate.open();
        assert_eq!(*target.host().unwrap(), [0x11; LEN]);
        drop((target, kernels));
        gpu.finish();
    }
}

/// R03: "small sizes pass by luck, ten thousand floats fail every time".
#[test]
fn a_source_is_written_to_after_it_was_read() {
    let gpu = Gpu::any(H200);
    for (gated, in_place) in [(true, false), (true, true), (false, false), (false, true)] {
        for n in [10usize, 10_000, 1 << 20] {
            let values = vec![1f32; n];
            let mut copy = gpu.stream.alloc_zeros::<f32>(n).unwrap();
            let mut tensor = if in_place {
                gpu.both_sides(&values)
            } else {
                gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&values, [n]).unwrap()
            };
            drop(tensor.device(&gpu.stream).unwrap());
            tensor.host_mut().unwrap()[0] = 1.0; // so that it is copied again
            gpu.context.synchronize().unwrap();
            let gate = gated.then(|| gpu.gate(&gpu.stream));
            gpu.stream.memcpy_dtod(&tensor.device(&gpu.stream).unwrap(), &mut copy).unwrap();
            let opener = gate.map(|gate| gate.open_later());
            tensor.host_mut().unwrap()[n - 1] = 2.0;
            assert!(opener.as_ref().is_none_or(|opener| opener.opened()), "written under a reader");
            drop(opener);
            assert_eq!(gpu.stream.clone_dtoh(&copy).unwrap(), values, "{n} gated: {gated} in place: {in_place}");
            // And the write is seen by the next copy.
            gpu.stream.memcpy_dtod(&tensor.device(&gpu.stream).unwrap(), &mut copy).unwrap();
            assert_eq!(gpu.stream.clone_dtoh(&copy).unwrap()[n - 1], 2.0);
        }
    }
    gpu.finish();
}

/// R04: two copies into one target; the owner of the first source is gone before it was read.
#[test]
fn the_later_of_two_copies_wins_and_both_sources_are_read() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let mut target = gpu.on_device(&[0; LEN]);
    let (a, b) = (gpu.both_sides(&[0xAAu8; LEN]), gpu.both_sides(&[0xBBu8; LEN]));
    drop(target.device_mut(&gpu.stream).unwrap());
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    for source in [a, b] {
        let guard = source.device(&gpu.stream).unwrap();
        kernels.copy(&gpu.stream, &mut target.device_mut(&gpu.stream).unwrap(), &guard);
    }
    gate.open();
    assert_eq!(*target.host().unwrap(), [0xBB; LEN]);
    drop((target, kernels));
    gpu.finish();
}

/// As R04 on two streams: the second waits for the first.
#[test]
fn writes_on_two_streams_are_ordered() {
    let gpu = Gpu::any(H200);
    let (kernels, other) = (gpu.kernels(), gpu.another_stream());
    let mut target = gpu.on_device(&[0; LEN]);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    kernels.fill(&gpu.stream, &mut target.device_mut(&gpu.stream).unwrap(), 0xAA);
    kernels.fill(&other, &mut target.device_mut(&other).unwrap(), 0xBB);
    gate.open();
    assert_eq!(*target.host().unwrap(), [0xBB; LEN]);
    // A write comes after a read on another stream.
    let mut copy = gpu.on_device(&[0; LEN]);
    let gate = gpu.gate(&gpu.stream);
    let guard = target.device(&gpu.stream).unwrap();
    kernels.copy(&gpu.stream, &mut copy.device_mut(&gpu.stream).unwrap(), &guard);
    drop(guard);
    kernels.fill(&other, &mut target.device_mut(&other).unwrap(), 0xCC);
    gate.open();
    assert_eq!(*copy.host().unwrap(), [0xBB; LEN]);
    assert_eq!(*target.host().unwrap(), [0xCC; LEN]);
    drop((target, copy, kernels, other));
    gpu.finish();
}

/// R05: device memory that was dropped while another stream reads it is not handed out again before.
#[test]
fn dropped_device_memory_is_not_used_again_under_a_reader() {
    let gpu = Gpu::any(H200);
    let (kernels, slow) = (gpu.kernels(), gpu.another_stream());
    let mut tensor = gpu.on_device(&[0; LEN]);
    kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 7);
    let mut copy = gpu.on_device(&[0; LEN]);
    drop(copy.device_mut(&slow).unwrap());
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&slow);
    let guard = tensor.device(&slow).unwrap();
    kernels.copy(&slow, &mut copy.device_mut(&slow).unwrap(), &guard);
    drop(guard);
    drop(tensor);
    // A real driver may let an allocation wait for the free, so there the gate does not outlast the loop.
    let (gate, _opener) = match gpu.sim {
        Some(_) => (Some(gate), None),
        None => (None, Some(gate.open_later())),
    };
    for _ in 0..20 {
        let mut again = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
        gpu.stream.memset_zeros(&mut again).unwrap();
        drop(again);
    }
    drop(gate);
    assert_eq!(*copy.host().unwrap(), [7; LEN]);
    drop((copy, kernels, slow));
    gpu.finish();
}

/// R05, for the copy to the host of a ticket that nobody keeps.
#[test]
fn dropped_device_memory_is_not_used_again_under_a_copy_to_the_host() {
    let gpu = Gpu::any(H200);
    let kernels = gpu.kernels();
    let mut tensor = gpu.on_device(&[0; LEN]);
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    kernels.fill(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap(), 7);
    let shared = tensor.to_host().unwrap().wait_timeout(std::time::Duration::ZERO).unwrap_err();
    assert!(shared.error.is_not_ready());
    drop(shared);
    if gpu.sim.is_some() {
        let other = gpu.another_stream();
        drop(other.alloc_zeros::<u8>(LEN).unwrap());
        drop(gpu.both_sides(&[1u8; LEN]));
    }
    gate.open();
    drop(kernels);
    gpu.finish();
}

/// An owner that says when it is dropped.
struct Watched(Vec<u8>, Arc<AtomicBool>);

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.fill(0xDD);
        self.1.store(true, Ordering::SeqCst);
    }
}

impl AsRef<[u8]> for Watched {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// R09: where the device reads ordinary memory in place, freeing that does not wait for the device by itself.
#[test]
fn ordinary_memory_that_the_device_reads_in_place_is_kept() {
    let wanted = [
        (SPARK, None),
        (SPARK, Some(Backing::Pageable)),
        (GH200, None),
        (GH200, Some(Backing::Pageable)),
        (THOR, None),
        (ORIN, None),
        (H200, Some(Backing::Registered)),
    ];
    for (profile, backing) in wanted {
        let gpu = Gpu::any(profile);
        let kernels = gpu.kernels();
        let mut copy = gpu.on_device(&[0; LEN]);
        drop(copy.device_mut(&gpu.stream).unwrap());
        let gone = Arc::new(AtomicBool::new(false));
        let source = Arc::new(Watched(vec![0x77; LEN], gone.clone()));
        let options = gpu.device.tensor().access(Access::Streaming);
        let options = match (backing, gpu.sim.is_some()) {
            (None, true) => options,
            (Some(Backing::Pageable), true) if profile == GH200 => {
                options.strategy(Strategy::Coherent).backing(Backing::Pageable)
            }
            (Some(Backing::Pageable), true) => options.strategy(Strategy::ZeroCopy).backing(Backing::Pageable),
            _ => options.strategy(Strategy::ZeroCopy).backing(Backing::Registered),
        };
        let source: TransferTensor<u8> = options.from_shared_bytes(source, 0..LEN, [LEN]).unwrap();
        gpu.context.synchronize().unwrap();
        let in_place = source.is_zero_copy() && source.backing() != Backing::Pinned;
        let gate = gpu.gate(&gpu.stream);
        let guard = source.device(&gpu.stream).unwrap();
        kernels.copy(&gpu.stream, &mut copy.device_mut(&gpu.stream).unwrap(), &guard);
        drop(guard);
        drop(source);
        assert!(!in_place || !gone.load(Ordering::SeqCst), "{profile}: freed under a reader");
        gate.open();
        assert_eq!(*copy.host().unwrap(), [0x77; LEN], "{profile}");
        gpu.device.drain(crate::support::HANG).unwrap();
        assert!(gone.load(Ordering::SeqCst), "{profile}: kept for ever");
        drop((copy, kernels));
        gpu.finish();
    }
}

/// R09, for a `Vec` and for a file mapping.
#[test]
fn a_vec_and_a_mapping_are_kept_while_the_device_reads_them() {
    for profile in [SPARK, GH200, H200] {
        let gpu = Gpu::any(profile);
        let kernels = gpu.kernels();
        let mut copy = gpu.on_device(&[0; 2 * LEN]).reshape([2, LEN]).unwrap();
        drop(copy.device_mut(&gpu.stream).unwrap());
        let options = || {
            let options = gpu.device.tensor().access(Access::Streaming);
            if gpu.sim.is_some() && profile != H200 {
                options
            } else {
                options.strategy(Strategy::ZeroCopy).backing(Backing::Registered)
            }
        };
        let file = tempfile::tempfile().unwrap();
        file.set_len(LEN as u64).unwrap();
        // SAFETY: nobody else has the file.
        let mut map = unsafe { memmap2::MmapMut::map_mut(&file) }.unwrap();
        map.fill(0x55);
        let mapped: TransferTensor<u8> = options().from_shared_bytes(Arc::new(map), 0..LEN, [LEN]).unwrap();
        let vec = options().from_vec(vec![0x66u8; LEN], [LEN]).unwrap();
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        for (row, source) in [mapped, vec].into_iter().enumerate() {
            let guard = source.device(&gpu.stream).unwrap();
            let mut row = copy.view_mut(row..=row).unwrap();
            kernels.copy(&gpu.stream, &mut row.device_mut(&gpu.stream).unwrap(), &guard);
        }
        // What the allocator would give out next.
        let churn: Vec<Vec<u8>> = (0..8).map(|_| vec![0xEE; LEN]).collect();
        gate.open();
        assert_eq!(*copy.view(0..1).unwrap().host().unwrap(), [0x55; LEN]);
        assert_eq!(*copy.view(1..2).unwrap().host().unwrap(), [0x66; LEN]);
        drop((churn, copy, kernels));
        gpu.finish();
    }
}

/// R11: the consumer's stream waits for the copy, whichever stream it is.
#[test]
fn a_consumer_comes_after_the_transfer() {
    let gpu = Gpu::any(H200);
    let (kernels, consumer) = (gpu.kernels(), gpu.another_stream());
    let mut copy = gpu.on_device(&[0; LEN]);
    let mut batch = gpu.on_device(&[0; LEN]);
    drop(copy.device_mut(&consumer).unwrap());
    gpu.context.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    // The transfer has to come after this, and so after the gate: the upper half is written there.
    {
        let mut half = batch.byte_range_mut(LEN / 2..).unwrap();
        kernels.fill(&gpu.stream, &mut half.device_mut(&gpu.stream).unwrap(), 5);
    }
    batch.byte_range_mut(..LEN / 2).unwrap().host_mut().unwrap().fill(4);
    let ticket = batch.to_device().unwrap();
    let ticket = ticket.try_wait().unwrap_err();
    assert!(ticket.error.is_not_ready());
    gate.open();
    let batch = ticket.value.wait().unwrap();
    let guard = batch.device(&consumer).unwrap();
    kernels.copy(&consumer, &mut copy.device_mut(&consumer).unwrap(), &guard);
    drop(guard);
    let copy_now = copy.host().unwrap().to_vec();
    assert!(copy_now[..LEN / 2].iter().all(|&x| x == 4) && copy_now[LEN / 2..].iter().all(|&x| x == 5));

    // Without a wait of the host: the streams order it.
    let gate = gpu.gate(&gpu.stream);
    let mut batch = batch;
    kernels.fill(&gpu.stream, &mut batch.device_mut(&gpu.stream).unwrap(), 6);
    let guard = batch.device(&consumer).unwrap();
    kernels.copy(&consumer, &mut copy.device_mut(&consumer).unwrap(), &guard);
    drop(guard);
    gate.open();
    assert_eq!(*copy.host().unwrap(), [6; LEN]);
    drop((copy, batch, kernels, consumer));
    gpu.finish();
}

/// R15: what a tensor holds is its own, and it says whether it is the device's too.
#[test]
fn a_tensor_is_no_alias_of_what_it_was_copied_from() {
    for profile in [SPARK, THOR, ORIN, GH200, H200] {
        let gpu = Gpu::any(profile);
        for n in [1usize, 16, 100, 1 << 18] {
            let mut source = vec![1u32; n];
            let tensor = gpu.device.tensor().from_slice(&source, [n]).unwrap();
            source.fill(2);
            assert!(tensor.host().unwrap().iter().all(|&x| x == 1));
            assert!(gpu.stream.clone_dtoh(&tensor.device(&gpu.stream).unwrap()).unwrap().iter().all(|&x| x == 1));
            let host = tensor.host().unwrap().as_ptr() as u64;
            assert_ne!(host, source.as_ptr() as u64);
            if let (Some(_), true) = (&gpu.sim, tensor.is_zero_copy()) {
                assert_eq!(tensor.copied_bytes(), (0, 0), "{profile}");
            } else if !tensor.is_zero_copy() {
                assert_eq!(tensor.copied_bytes().0, 4 * n as u64, "{profile}");
            }
            // A vector is moved in: the tensor is it, and it comes out again.
            let address = source.as_ptr();
            let tensor = gpu.device.tensor().from_vec(source, [n]).unwrap();
            let back = tensor.into_vec().unwrap();
            assert_eq!(back, vec![2; n]);
            assert!(profile != H200 || back.as_ptr() == address);
        }
        gpu.finish();
    }
}

/// A Jetson before I/O coherency: the device sees the host's writes to mapped memory at a synchronisation.
pub(crate) const OLD_JETSON: &str = r#"
[platform.old.attributes]
integrated = 1
can_map_host_memory = 1
unified_addressing = 1
managed_memory = 1
concurrent_managed_access = 0
pageable_memory_access = 0
host_register_supported = 0
cc_major = 6
cc_minor = 2
async_engine_count = 1
[platform.old.behaviour]
io_coherent = false
"#;

/// R45.
#[test]
fn a_device_without_io_coherency_sees_what_the_host_wrote() {
    let Some(gpu) = Gpu::built(from_env(DeviceBuilder::from_toml(OLD_JETSON, "old"))) else { return };
    assert!(!gpu.device.platform().capabilities().io_coherent);
    let kernels = gpu.kernels();
    let mut tensor = gpu.both_sides(&[0u8; 64]);
    for round in 0..100u8 {
        tensor.host_mut().unwrap().fill(round);
        kernels.xor(&gpu.stream, &mut tensor.device_mut(&gpu.stream).unwrap());
        let seen = tensor.host().unwrap().to_vec();
        assert!(seen.iter().enumerate().all(|(i, &x)| x == round ^ crate::support::index_hash(i)), "{round}");
    }
    // A look of the device at one part does not settle what the host goes on to write to another.
    let mut copy = gpu.both_sides(&[0u8; 32]);
    drop(copy.device_mut(&gpu.stream).unwrap());
    drop(tensor.host_mut().unwrap());
    {
        let (mut head, mut tail) = tensor.view_mut(..).unwrap().split_at(32).unwrap();
        let mut host = head.host_mut().unwrap();
        kernels.fill(&gpu.stream, &mut tail.device_mut(&gpu.stream).unwrap(), 1);
        gpu.stream.synchronize().unwrap();
        host.fill(9);
    }
    let head = tensor.view(..32).unwrap();
    kernels.copy(&gpu.stream, &mut copy.device_mut(&gpu.stream).unwrap(), &head.device(&gpu.stream).unwrap());
    assert_eq!(*copy.host().unwrap(), [9; 32]);
    drop((tensor, copy, kernels));
    gpu.finish();
}

/// R46: the host looks at one tensor while the device works on another, also where managed memory would fault.
#[test]
fn the_host_looks_at_one_tensor_while_the_device_works_on_another() {
    for profile in [ORIN, "wsl2_rtx", "windows_wddm_dgpu", SPARK, H200] {
        let gpu = Gpu::any(profile);
        let kernels = gpu.kernels();
        let mut busy = gpu.device.tensor().zeros::<u8>([LEN]).unwrap();
        let mut idle = gpu.device.tensor().zeros::<u8>([LEN]).unwrap();
        for tensor in [&mut busy, &mut idle] {
            drop(tensor.device_mut(&gpu.stream).unwrap());
            drop(tensor.host_mut().unwrap());
        }
        drop(busy.device_mut(&gpu.stream).unwrap());
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        kernels.fill(&gpu.stream, &mut busy.device_mut(&gpu.stream).unwrap(), 1);
        // These would hang, or fault.
        idle.host_mut().unwrap().fill(2);
        assert_eq!(*idle.host().unwrap(), [2; LEN]);
        gate.open();
        assert_eq!(*busy.host().unwrap(), [1; LEN]);
        drop((busy, idle, kernels));
        gpu.finish();
    }
}

/// R58: bytes go from one device to another through the host; a stream of the other device is refused, not recorded on.
#[test]
fn another_devices_stream_is_refused() {
    let (Some(a), Some(b)) = (Gpu::simulated(H200), Gpu::simulated(SPARK)) else { return };
    let mut of_a = a.on_device(&[1; LEN]);
    assert!(of_a.device(&b.stream).unwrap_err().is_invalid_input());
    assert!(of_a.device_mut(&b.stream).unwrap_err().is_invalid_input());
    drop(of_a.device_mut(&a.stream).unwrap());
    // Pinned memory last used by one device goes to the other.
    let mut of_b = b.device.tensor().from_slice(&of_a.host().unwrap(), [LEN]).unwrap();
    let kernels = b.kernels();
    kernels.xor(&b.stream, &mut of_b.device_mut(&b.stream).unwrap());
    assert!(of_b.host().unwrap().iter().enumerate().all(|(i, &x)| x == 1 ^ crate::support::index_hash(i)));
    let bad = [&a, &b].map(|gpu| {
        let calls = gpu.sim.as_ref().unwrap().calls();
        calls.into_iter().filter(|call| call.result == CUresult::CUDA_ERROR_INVALID_HANDLE as u32).count()
    });
    assert_eq!(bad, [0, 0]);
    drop((of_a, of_b, kernels));
    a.finish();
    b.finish();
}

/// The same with frees that return at once and frees that wait (R10): none of these tests may rely on either.
#[test]
fn pinned_memory_is_not_freed_under_a_copy_whether_or_not_frees_wait() {
    for waits in [true, false] {
        let Some(gpu) = Gpu::built(builder(H200).free_waits(waits)) else { return };
        let mut copy = gpu.stream.alloc_zeros::<u8>(LEN).unwrap();
        let tensor = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&[8u8; LEN], [LEN]).unwrap();
        gpu.context.synchronize().unwrap();
        let gate = gpu.gate(&gpu.stream);
        gpu.stream.memcpy_dtod(&tensor.device(&gpu.stream).unwrap(), &mut copy).unwrap();
        drop(tensor);
        gate.open();
        assert_eq!(gpu.stream.clone_dtoh(&copy).unwrap(), [8; LEN]);
        drop(copy);
        gpu.finish();
    }
}
