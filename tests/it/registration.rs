//! Pinning memory that exists: twice, by others, unaligned, read-only, where it is refused, where there is a limit
//! (field reports R19, R20, R21, R23, R24, R56).

use std::io::Write;
use std::sync::Arc;

use cuda_sim::{DeviceBuilder, MemoryKind};
use memmap2::{Mmap, MmapOptions};
use transfer_tensor::cudarc::driver::sys;
use transfer_tensor::{Backing, DType, Detector, Device, DynTensor, Error, PoolOptions, Strategy, TransferTensor};

use crate::machines::{built, code, drain, pattern};
use crate::support::{Gpu, H200, SPARK};

const MIB: usize = 1 << 20;

/// Whether the driver has page-locked this memory.
fn is_page_locked(gpu: &Gpu, address: *const u8) -> bool {
    gpu.context.bind_to_thread().unwrap();
    let mut flags = 0;
    // SAFETY: a valid place for the answer; the driver checks the address.
    code(unsafe { sys::cuMemHostGetFlags(&raw mut flags, address.cast_mut().cast()) }) == 0
}

/// A read-only tensor over `bytes[range]`, asked to be pinned.
fn pinned_part<O>(gpu: &Gpu, bytes: &Arc<O>, range: std::ops::Range<usize>) -> TransferTensor<u8>
where
    O: AsRef<[u8]> + Send + Sync + 'static,
{
    let len = range.len();
    gpu.device.tensor().strategy(Strategy::Streamed).pin(true).from_shared_bytes(bytes.clone(), range, [len]).unwrap()
}

/// Sends the tensor's bytes to the device and reads them back there.
fn seen_by_device(gpu: &Gpu, tensor: &TransferTensor<u8>) -> Vec<u8> {
    let guard = tensor.device(&gpu.stream).unwrap();
    let mut copy = vec![0u8; tensor.len()];
    gpu.stream.memcpy_dtoh(&guard, &mut copy).unwrap();
    gpu.stream.synchronize().unwrap();
    copy
}

/// The device may write to all of the tensor, and sets bytes 1000 to 2000 to zero.
fn changed_by_device(gpu: &Gpu, tensor: &mut TransferTensor<u8>) {
    let guard = tensor.device_mut(&gpu.stream).unwrap();
    // SAFETY: inside the guard's memory, on its stream.
    let set = unsafe { sys::cuMemsetD8Async(guard.address() + 1000, 0, 1000, gpu.stream.cu_stream()) };
    assert_eq!(code(set), 0);
}

/// Nothing is left behind for the next user of the context.
fn no_error_is_left(gpu: &Gpu) {
    gpu.context.check_err().unwrap();
    gpu.context.synchronize().unwrap();
    assert_eq!(gpu.device.stats().free_errors, 0);
}

#[test]
fn memory_that_is_pinned_twice_is_unpinned_once() {
    let gpu = Gpu::any(H200);
    let bytes = Arc::new(pattern(3 * MIB + 5, 1));
    let all = || 0..bytes.len();
    let unregistered = || gpu.sim.as_ref().map_or(0, |sim| sim.count("cuMemHostUnregister"));
    let before = unregistered();
    let first = pinned_part(&gpu, &bytes, all());
    assert!(first.is_pinned());
    assert!(is_page_locked(&gpu, bytes.as_ptr()));
    let second = pinned_part(&gpu, &bytes, all());
    assert!(!second.is_pinned(), "it does not own the registration, which may end any time");
    let why = second.decision().reasons.join("\n");
    assert!(why.contains("already registered") && why.contains("pinned"), "{why}");
    // An overlapping part is no other case.
    let part = pinned_part(&gpu, &bytes, 100..1000);
    assert!(!part.is_pinned());
    // The owner of the registration goes first, while the others are used.
    assert_eq!(seen_by_device(&gpu, &first), **bytes);
    drop(first);
    assert_eq!(seen_by_device(&gpu, &second), **bytes);
    assert_eq!(seen_by_device(&gpu, &part), bytes[100..1000]);
    drop((second, part));
    drain(&gpu.device);
    assert!(!is_page_locked(&gpu, bytes.as_ptr()));
    if gpu.sim.is_some() {
        assert_eq!(unregistered(), before + 1);
    }
    // And it can be pinned again.
    let again = pinned_part(&gpu, &bytes, all());
    assert!(again.is_pinned());
    assert_eq!(seen_by_device(&gpu, &again), **bytes);
    drop(again);
    drain(&gpu.device);
    no_error_is_left(&gpu);
    gpu.finish();
}

#[test]
fn what_somebody_else_registered_is_his_to_unregister() {
    let gpu = Gpu::any(H200);
    gpu.context.bind_to_thread().unwrap();
    let mut values = pattern(MIB, 2);
    let address = values.as_mut_ptr();
    // SAFETY: the memory is unregistered before it goes.
    assert_eq!(code(unsafe { sys::cuMemHostRegister_v2(address.cast(), values.len(), 0) }), 0);
    let expected = values.clone();
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).pin(true).from_vec(values, [MIB]).unwrap();
    assert!(!tensor.is_pinned());
    assert_eq!(seen_by_device(&gpu, &tensor), expected);
    let values = tensor.into_vec().unwrap();
    drain(&gpu.device);
    assert_eq!(values.as_ptr(), address.cast_const());
    assert!(is_page_locked(&gpu, address));
    // SAFETY: as above.
    assert_eq!(code(unsafe { sys::cuMemHostUnregister(address.cast()) }), 0);
    // Now it is free to be ours.
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).pin(true).from_vec(values, [MIB]).unwrap();
    assert!(tensor.is_pinned());
    drop(tensor);
    drain(&gpu.device);
    no_error_is_left(&gpu);
    gpu.finish();
}

/// Where registered memory was asked for by name, nothing else will do: the error says that the memory *is* pinned.
#[test]
fn a_forced_registration_of_registered_memory_is_a_typed_error() {
    let gpu = Gpu::any(H200);
    let bytes = Arc::new(pattern(MIB, 3));
    let forced = || {
        let options = gpu.device.tensor().strategy(Strategy::ZeroCopy).backing(Backing::Registered);
        options.from_shared_bytes::<u8, _>(bytes.clone(), 0..MIB, [MIB])
    };
    let first = forced().unwrap();
    assert_eq!((first.backing(), first.is_zero_copy()), (Backing::Registered, true));
    let error: Error = forced().unwrap_err();
    assert!(error.is_already_registered(), "{error}");
    assert!(error.to_string().contains("pinned"), "{error}");
    assert_eq!(seen_by_device(&gpu, &first), **bytes);
    drop(first);
    drain(&gpu.device);
    drop(forced().unwrap());
    drain(&gpu.device);
    no_error_is_left(&gpu);
    gpu.finish();
}

/// Neither the base nor the end of what is pinned needs to lie on a page, nor a page to itself.
#[test]
fn neighbours_on_one_page_are_pinned_each() {
    let gpu = Gpu::any(H200);
    let bytes = Arc::new(pattern(3 * 4096, 4));
    let offset = bytes.as_ptr().align_offset(4096);
    let (left, right) = (offset + 17..offset + 1017, offset + 1017..offset + 4001);
    let (a, b) = (pinned_part(&gpu, &bytes, left.clone()), pinned_part(&gpu, &bytes, right.clone()));
    assert!(a.is_pinned() && b.is_pinned());
    assert_eq!(seen_by_device(&gpu, &a), bytes[left]);
    drop(a);
    drain(&gpu.device);
    // The other one's registration is untouched.
    assert!(is_page_locked(&gpu, bytes[right.start..].as_ptr()));
    assert_eq!(seen_by_device(&gpu, &b), bytes[right]);
    drop(b);
    drain(&gpu.device);
    no_error_is_left(&gpu);
    gpu.finish();
}

fn file_of(bytes: &[u8]) -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    // Pages that are yet to be written back can keep the kernel from pinning them (seen on an H200's host: for minutes).
    file.sync_all().unwrap();
    file
}

/// Pinned or staged, as the machine can: the bytes are right and no error stays behind.
fn mapped_files_travel(gpu: &Gpu) {
    for len in [4096, 8 * MIB] {
        let bytes = pattern(len, 5);
        let file = file_of(&bytes);
        // SAFETY: nobody else has the file, which is not changed while it is mapped.
        let read_only: Arc<Mmap> = Arc::new(unsafe { Mmap::map(&file) }.unwrap());
        // SAFETY: as above; a private mapping.
        let private = Arc::new(unsafe { MmapOptions::new().map_copy(&file) }.unwrap());
        let plain = Arc::new(bytes.clone());
        let tensors = [
            pinned_part(gpu, &read_only, 0..len),
            pinned_part(gpu, &private, 0..len),
            pinned_part(gpu, &plain, 0..len),
        ];
        for tensor in tensors {
            assert_eq!(seen_by_device(gpu, &tensor), bytes);
            assert_eq!(*tensor.host().unwrap(), *bytes);
            let not_pinned = tensor.decision().reasons.iter().any(|reason| reason.contains("not pinned"));
            assert_eq!(tensor.is_pinned(), !not_pinned, "{}", tensor.decision());
            if let Some(sim) = &gpu.sim {
                let kind = sim.memory_kind(tensor.host().unwrap().as_ptr() as u64);
                assert_eq!(kind == MemoryKind::Registered, tensor.is_pinned());
            }
            drop(tensor);
            drain(&gpu.device);
            no_error_is_left(gpu);
        }
    }
}

#[test]
fn read_only_and_private_mappings_of_files_travel() {
    let gpu = Gpu::any(H200);
    mapped_files_travel(&gpu);
    gpu.finish();
}

/// A B300's driver refuses the READ_ONLY flag; a confidential H200 and vGPUs refuse to register anything.
#[test]
fn mappings_travel_also_where_registering_them_is_refused() {
    for profile in ["x86_b300_sxm6_hmm", "h100_h200_confidential", SPARK, "jetson_agx_orin_64gb"] {
        let Some(gpu) = Gpu::simulated(profile) else { return };
        mapped_files_travel(&gpu);
        gpu.finish();
    }
}

/// Confidential computing: every registration is answered with 801, and every path goes on without.
#[test]
fn everything_works_without_registration() {
    let Some(gpu) = Gpu::simulated("h100_h200_confidential") else { return };
    let capabilities = gpu.device.platform().capabilities();
    assert!(!capabilities.can_register && !capabilities.device_reads_registered);
    let notes = gpu.device.platform().notes().join("\n");
    assert!(notes.contains("801") || notes.contains("regist"), "{notes}");
    let bytes = pattern(9 * MIB + 3, 6);
    let len = bytes.len();
    let tensors = [
        gpu.device.tensor().from_slice(&bytes, [len]).unwrap(),
        gpu.device.tensor().from_vec(bytes.clone(), [len]).unwrap(),
        gpu.device.tensor().pin(true).from_vec(bytes.clone(), [len]).unwrap(),
    ];
    assert!(!tensors[2].is_pinned());
    assert!(tensors[2].decision().reasons.join("\n").contains("not pinned"));
    for mut tensor in tensors {
        changed_by_device(&gpu, &mut tensor);
        tensor.host_mut().unwrap()[1000..2000].copy_from_slice(&bytes[1000..2000]);
        assert!(*tensor.host().unwrap() == *bytes);
    }
    let error = gpu.device.tensor().strategy(Strategy::ZeroCopy).backing(Backing::Registered).zeros::<u8>([8]);
    let error = error.unwrap_err();
    assert!(error.is_unsupported(), "{error}");
    drain(&gpu.device);
    no_error_is_left(&gpu);
    gpu.finish();
}

/// A machine on which only so much can be page-locked (WSL, containers).
fn with_pinned_limit(mib: u32) -> DeviceBuilder {
    let toml = format!(
        "[platform.limited]\nname = \"Limited\"\n[platform.limited.attributes]\n\
         integrated = 0\ncan_map_host_memory = 1\nasync_engine_count = 2\ncc_major = 8\ncc_minor = 9\n\
         host_register_supported = 1\nmemory_pools_supported = 1\nunified_addressing = 1\n\
         [platform.limited.behaviour]\npinned_limit_mib = {mib}\n"
    );
    DeviceBuilder::from_toml(&toml, "limited")
}

#[test]
fn beyond_the_limit_on_pinned_memory_ordinary_memory_serves() {
    // Neither the tensor nor the staging slots fit; only the tensor does not; everything fits.
    for (limit, pinned) in [(1, false), (12, false), (64, true)] {
        let Some(gpu) = built(with_pinned_limit(limit)) else { return };
        let bytes = pattern(16 * MIB + 1, 7);
        let mut tensor = gpu.device.tensor().from_slice(&bytes, [bytes.len()]).unwrap();
        assert_eq!(tensor.is_pinned(), pinned, "{limit} MiB");
        changed_by_device(&gpu, &mut tensor);
        let mut expected = bytes.clone();
        expected[1000..2000].fill(0);
        assert!(*tensor.host().unwrap() == *expected, "{limit} MiB");
        no_error_is_left(&gpu);
        // Pinned memory by name is another matter.
        let forced = || gpu.device.tensor().strategy(Strategy::ZeroCopy).backing(Backing::Pinned);
        let strict = forced().zeros::<u8>([70 * MIB]);
        let error = strict.unwrap_err();
        assert!(error.is_out_of_memory(), "{error}");
        assert!(error.to_string().contains(&(70 * MIB).to_string()), "{error}");
        // The refusal replays nowhere.
        no_error_is_left(&gpu);
        drop(tensor);
        drain(&gpu.device);
        forced().zeros::<u8>([1000]).unwrap();
        drain(&gpu.device);
        gpu.finish();
    }
}

/// R56: `into_vec` gives memory that `Vec` may free: the caller's own, or fresh, never the driver's.
#[test]
fn a_vec_never_owns_the_drivers_memory() {
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        let strategies: &[Strategy] = &[Strategy::Streamed, Strategy::ZeroCopy];
        for &strategy in strategies {
            let mut tensor = gpu.device.tensor().strategy(strategy).zeros::<f32>([1001]).unwrap();
            tensor.host_mut().unwrap().fill(2.5);
            let mut host = tensor.into_vec().unwrap();
            drain(&gpu.device);
            assert!(!is_page_locked(&gpu, host.as_ptr().cast()));
            // The allocator takes it for its own.
            host.shrink_to_fit();
            host.extend([1.0; 5000]);
            assert_eq!(host[1000..1002], [2.5, 1.0]);
        }
        no_error_is_left(&gpu);
        gpu.finish();
    }
}

#[test]
fn a_registered_vec_comes_back_unregistered_and_is_the_same() {
    let gpu = Gpu::any(H200);
    let values: Vec<u32> = (0..100_000).collect();
    let address = values.as_ptr();
    let tensor = gpu.device.tensor().strategy(Strategy::Streamed).pin(true).from_vec(values, [100_000]).unwrap();
    assert!(tensor.is_pinned());
    // Brought to the device, which is still reading when the Vec is asked back.
    let ticket = tensor.to_device().unwrap();
    let values = ticket.wait().unwrap().into_vec().unwrap();
    assert_eq!(values.as_ptr(), address);
    assert!(!is_page_locked(&gpu, address.cast()));
    assert!((0..100_000).eq(values));
    drain(&gpu.device);
    no_error_is_left(&gpu);
    gpu.finish();
}

/// Bytes that are looked at as another type become a `Vec` of that type with a layout of that type.
#[test]
fn retyped_bytes_become_a_vec_with_its_own_layout() {
    let gpu = Gpu::any(H200);
    let options = || gpu.device.tensor().strategy(Strategy::Streamed);
    let floats = vec![1.5f32, -2.5, 3.5];
    let bytes: Vec<u8> = floats.iter().flat_map(|x| x.to_le_bytes()).collect();
    // A Vec<u8>, of which it is not known that it is aligned for more.
    let tensor = options().from_vec(bytes.clone(), [12]).unwrap();
    let aligned = bytes_are_aligned(&tensor);
    let dynamic = DynTensor::from_bytes(tensor, DType::F32, [3]).unwrap();
    match dynamic.downcast::<f32>() {
        Ok(tensor) => assert_eq!(tensor.into_vec().unwrap(), floats),
        Err(refused) => assert!(refused.error.is_invalid_input() && !aligned),
    }
    // And back: a Vec<f32> as bytes.
    let dynamic = DynTensor::from(options().from_vec(floats, [3]).unwrap());
    assert_eq!(dynamic.dtype(), DType::F32);
    let mut back = dynamic.into_bytes().into_vec().unwrap();
    assert_eq!(back, bytes);
    back.shrink_to_fit();
    back.push(1);
    gpu.finish();
}

fn bytes_are_aligned(tensor: &TransferTensor<u8>) -> bool {
    (tensor.host().unwrap().as_ptr() as usize).is_multiple_of(4)
}

/// R19: memory that stays registered is not freed: whoever got its address next would meet the old registration.
#[test]
fn memory_that_can_not_be_unregistered_is_never_freed() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let options = || gpu.device.tensor().strategy(Strategy::Streamed).pin(true);
    let shared = Arc::new(pattern(100_000, 8));
    let of_shared = pinned_part(&gpu, &shared, 0..100_000);
    let (dropped, given) = (vec![1u8; 50_000], vec![2u8; 50_000]);
    let (dropped_at, given_at) = (dropped.as_ptr(), given.as_ptr());
    let dropped = options().from_vec(dropped, [50_000]).unwrap();
    let given = options().from_vec(given, [50_000]).unwrap();
    let block = gpu.device.tensor().strategy(Strategy::ZeroCopy).backing(Backing::Registered).zeros::<u8>([50_000]);
    let block = block.unwrap();
    sim.fail_always("cuMemHostUnregister", 999);
    drop((of_shared, dropped, block));
    drain(&gpu.device);
    assert_eq!(gpu.device.stats().leaked, 3);
    assert_eq!(Arc::strong_count(&shared), 2);
    // Somebody who wants it back gets a copy.
    let copy = given.into_vec().unwrap();
    assert_eq!(copy, vec![2u8; 50_000]);
    assert_ne!(copy.as_ptr(), given_at);
    drain(&gpu.device);
    assert_eq!(gpu.device.stats().leaked, 4);
    sim.clear_failures();
    // The addresses are not given to anybody else.
    let others: Vec<Vec<u8>> = (0..20).map(|_| vec![0u8; 50_000]).collect();
    assert!(others.iter().all(|other| other.as_ptr() != dropped_at && other.as_ptr() != given_at));
    gpu.context.check_err().unwrap();
}

/// A device of the same simulated one, with a pool of its own.
fn with_pool(gpu: &Gpu, options: PoolOptions) -> Device {
    let detector = Detector::new().fs_root(gpu.sim.as_ref().unwrap().host_root());
    Device::builder(&gpu.stream).detector(detector).pool(options).build().unwrap()
}

/// Of what comes back only so much lies idle; the rest goes to the driver, and counts no more.
#[test]
fn a_pool_keeps_no_more_idle_memory_than_it_may() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let (mib, device) = (MIB as u64, with_pool(&gpu, PoolOptions::new().keep_idle(8 << 20)));
    let buffers: Vec<_> = (0..3).map(|_| device.pool().acquire(4 * MIB).unwrap()).collect();
    drop(buffers);
    drain(&device);
    let stats = device.pool().stats();
    assert_eq!((stats.idle, stats.reserved, stats.freed), (8 * mib, 8 * mib, 1));
    drop(device);
    gpu.finish();
}

/// The budget is of memory that there is: what the driver refused takes no room.
#[test]
fn a_block_that_was_refused_takes_no_room_in_the_budget() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let device = with_pool(&gpu, PoolOptions::new().budget(8 << 20));
    sim.fail_always("cuMemHostAlloc", 2);
    sim.fail_always("cuMemHostRegister", 2);
    assert!(device.pool().try_acquire(8 * MIB).unwrap_err().is_out_of_memory());
    assert_eq!(device.pool().stats().reserved, 0);
    sim.clear_failures();
    drop(device.pool().try_acquire(8 * MIB).unwrap());
    drop(device);
    gpu.finish();
}

/// Large blocks are mapped by us: the driver forgets them before they are unmapped.
#[test]
fn a_block_is_unregistered_before_it_is_unmapped() {
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let counts = || ["cuMemHostRegister", "cuMemHostUnregister"].map(|call| sim.count(call));
    let [registered, unregistered] = counts();
    let buffer = gpu.device.pool().acquire(8 * MIB).unwrap();
    assert!(is_page_locked(&gpu, buffer.as_ptr()));
    assert_eq!(counts(), [registered + 1, unregistered]);
    drop(buffer);
    drain(&gpu.device);
    assert_eq!(counts(), [registered + 1, unregistered + 1]);
    gpu.finish();
}
