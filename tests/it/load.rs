//! Tensors of safetensors files: every byte where it belongs, nothing copied that need not be, files that lie or change.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde_json::{Map, Value, json};
use tempfile::TempDir;
use transfer_tensor::{
    Access, Backing, Checkpoint, DType, DynTensor, Error, Reading, Strategy, TransferTensor, cudarc::driver::CudaSlice,
};

use crate::failing_calls::survives_every_failure;
use crate::machines::pattern;
use crate::support::{GH200, Gpu, H200, Kernels, ORIN, SPARK, THOR};

/// A tensor of a file: name, type, shape, bytes.
pub(crate) type Spec = (String, &'static str, Vec<usize>, Vec<u8>);

const MIB: usize = 1 << 20;

/// A file with these tensors in this order; `odd` makes the data begin at an odd offset.
pub(crate) fn write(path: &Path, tensors: &[Spec], odd: bool) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
        data.extend_from_slice(bytes);
    }
    let mut header = serde_json::to_vec(&header).unwrap();
    while (header.len() % 8 != 0) != odd {
        header.push(b' ');
    }
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], &header, &data].concat()).unwrap();
}

pub(crate) fn spec(name: &str, dtype: &'static str, shape: &[usize], bits: usize) -> Spec {
    let bytes = shape.iter().product::<usize>() * bits / 8;
    let mut bytes = pattern(bytes, name.len() as u64 + bits as u64);
    if dtype == "BOOL" {
        bytes.iter_mut().for_each(|byte| *byte &= 1);
    }
    (name.into(), dtype, shape.to_vec(), bytes)
}

/// Every type of the format, scalars, empty ones, odd lengths (which put what follows at odd offsets), and one that is
/// longer than a few staging slots.
pub(crate) fn zoo() -> Vec<Spec> {
    vec![
        spec("f32", "F32", &[129, 33], 32),
        spec("byte", "U8", &[1], 8),
        spec("odd.f64", "F64", &[17], 64),
        spec("mask", "BOOL", &[127], 8),
        spec("f16", "F16", &[385], 16),
        spec("bf16", "BF16", &[384, 3], 16),
        spec("none", "F32", &[0, 7], 32),
        spec("i8", "I8", &[5], 8),
        spec("i16", "I16", &[3, 1], 16),
        spec("u16", "U16", &[2], 16),
        spec("i32", "I32", &[], 32),
        spec("u32", "U32", &[9], 32),
        spec("large", "F32", &[3 * MIB + 5], 32),
        spec("i64", "I64", &[], 64),
        spec("u64", "U64", &[4], 64),
        spec("f8a", "F8_E4M3", &[31], 8),
        spec("f8b", "F8_E5M2", &[7], 8),
        spec("scale", "F8_E8M0", &[3], 8),
        spec("four", "F4", &[127, 66], 4),
        spec("six", "F6_E2M3", &[4, 12], 6),
        spec("complex", "C64", &[3, 5], 64),
        spec("last.none", "BOOL", &[0], 8),
    ]
}

pub(crate) struct Model {
    _folder: TempDir,
    pub(crate) path: PathBuf,
    pub(crate) tensors: Vec<Spec>,
}

pub(crate) fn model(tensors: Vec<Spec>, odd: bool) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write(&path, &tensors, odd);
    Model { _folder: folder, path, tensors }
}

/// A model of three files with an index.
pub(crate) fn sharded(tensors: Vec<Spec>) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let mut map = Map::new();
    for (number, part) in tensors.chunks(tensors.len().div_ceil(3)).enumerate() {
        let file = format!("model-{number}.safetensors");
        write(&folder.path().join(&file), part, number == 1);
        map.extend(part.iter().map(|(name, ..)| (name.clone(), Value::from(file.clone()))));
    }
    let path = folder.path().join("model.safetensors.index.json");
    fs::write(&path, json!({ "metadata": { "total_size": 1 }, "weight_map": map }).to_string()).unwrap();
    Model { _folder: folder, path, tensors }
}

/// The bytes as the host and as the device see them.
fn check_bytes(gpu: &Gpu, kernels: &Kernels, tensor: &DynTensor, expected: &[u8], what: &str) {
    if !expected.is_empty() {
        let mut seen: TransferTensor<u8> = gpu.device.tensor().zeros([expected.len()]).unwrap();
        {
            let from = tensor.bytes().device(&gpu.stream).unwrap();
            kernels.copy(&gpu.stream, &mut seen.device_mut(&gpu.stream).unwrap(), &from);
        }
        assert!(*seen.host().unwrap() == *expected, "{what}, on the device");
    }
    assert!(*tensor.bytes().host().unwrap() == *expected, "{what}, on the host");
}

pub(crate) fn check(gpu: &Gpu, loaded: &BTreeMap<String, DynTensor>, tensors: &[Spec], what: &str) {
    let kernels = gpu.kernels();
    assert_eq!(loaded.len(), tensors.len());
    for (name, dtype, shape, bytes) in tensors {
        let (tensor, what) = (&loaded[name], format!("{name}, {what}"));
        match dtype.parse::<DType>() {
            Ok(dtype) => assert_eq!((tensor.dtype(), tensor.shape().dims()), (dtype, &shape[..]), "{what}"),
            Err(_) => assert_eq!((tensor.dtype(), tensor.shape().dims()), (DType::U8, &[bytes.len()][..]), "{what}"),
        }
        if !bytes.is_empty() {
            let address = tensor.bytes().device(&gpu.stream).unwrap().address();
            assert!(address.is_multiple_of(tensor.dtype().size() as u64), "{what}: {address:#x}");
        }
        check_bytes(gpu, &kernels, tensor, bytes, &what);
    }
}

#[test]
fn every_type_arrives_bit_by_bit_on_every_kind_of_machine() {
    for odd in [false, true] {
        let model = model(zoo(), odd);
        let checkpoint = Checkpoint::open(&model.path).unwrap();
        for profile in [H200, GH200, SPARK, THOR, ORIN] {
            for reading in [Reading::Auto, Reading::Map, Reading::Read] {
                let gpu = Gpu::any(profile);
                let loaded = checkpoint.load(&gpu.device, &gpu.stream).reading(reading).run().unwrap();
                check(&gpu, &loaded, &model.tensors, &format!("{profile}, {reading:?}, odd: {odd}"));
                drop(loaded);
                gpu.finish();
            }
        }
    }
}

#[test]
fn every_strategy_that_a_machine_has_gives_the_same_bytes() {
    let model = model(zoo(), false);
    let checkpoint = Checkpoint::open(&model.path).unwrap();
    for (profile, strategy) in [
        (H200, Strategy::ZeroCopy),
        (SPARK, Strategy::Streamed),
        (GH200, Strategy::Streamed),
        (GH200, Strategy::Coherent),
        (ORIN, Strategy::Streamed),
    ] {
        let Some(gpu) = Gpu::simulated(profile) else { break };
        let loaded = checkpoint.load(&gpu.device, &gpu.stream).strategy(strategy).run().unwrap();
        assert!(loaded.values().all(|tensor| tensor.bytes().strategy() == strategy));
        check(&gpu, &loaded, &model.tensors, &format!("{profile}, {strategy}"));
        drop(loaded);
        gpu.finish();
    }
    let gpu = Gpu::any(H200);
    let error = checkpoint.load(&gpu.device, &gpu.stream).strategy(Strategy::Coherent).run().unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("coherent"), "{error}");
    gpu.finish();
}

#[test]
fn where_memory_is_one_the_file_is_used_in_place_and_nothing_is_copied() {
    let model = model(zoo(), false);
    let checkpoint = Checkpoint::open(&model.path).unwrap();
    for (profile, access) in
        [(SPARK, Access::reuse(50).unwrap()), (SPARK, Access::Streaming), (GH200, Access::Streaming)]
    {
        let Some(gpu) = Gpu::simulated(profile) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        let loaded = checkpoint.load(&gpu.device, &gpu.stream).access(access).run().unwrap();
        for (name, tensor) in &loaded {
            drop(tensor.bytes().device(&gpu.stream).unwrap());
            assert_eq!(tensor.bytes().copied_bytes(), (0, 0), "{name}");
            let backing = tensor.bytes().host_backing();
            let in_place = matches!(backing, None | Some(Backing::Pageable));
            assert!(in_place || is_unaligned(&checkpoint, name), "{name}: {backing:?}");
        }
        gpu.stream.synchronize().unwrap();
        let evidence = sim.evidence();
        let copied = [evidence.copied_h2d_pinned, evidence.copied_h2d_pageable, evidence.copied_d2d];
        assert_eq!((evidence.device_bytes_peak, copied), (0, [0; 3]), "{profile}");
        // What is not aligned for its type is read; all else is the file's map.
        let unaligned: usize =
            model.tensors.iter().filter(|(name, ..)| is_unaligned(&checkpoint, name)).map(|spec| spec.3.len()).sum();
        assert!(
            unaligned > 0 && evidence.pinned_bytes_peak + evidence.managed_bytes_peak <= unaligned as u64,
            "{evidence:?}"
        );
        drop(loaded);
        gpu.finish();
    }
}

fn is_unaligned(checkpoint: &Checkpoint, name: &str) -> bool {
    let before: u64 = checkpoint.tensors().iter().take_while(|info| info.name() != name).map(|info| info.bytes()).sum();
    let info = checkpoint.get(name).unwrap();
    !before.is_multiple_of(info.dtype().size() as u64)
}

/// Whatever the file's size, and whichever way it is read: the same slots.
#[test]
fn pinned_memory_is_that_of_the_slots_alone() {
    for reading in [Reading::Read, Reading::Map] {
        let Some(gpu) = Gpu::simulated(H200) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        // Pinned by the driver's allocator, or registered.
        let pinned = || sim.evidence().pinned_bytes_peak + sim.evidence().registered_bytes_peak;
        let peaks = [32, 96].map(|mib| {
            let half = mib * MIB / 2;
            let model = model(vec![spec("a", "U8", &[half], 8), spec("b", "U8", &[half], 8)], false);
            let checkpoint = Checkpoint::open(&model.path).unwrap();
            drop(checkpoint.load(&gpu.device, &gpu.stream).reading(reading).run().unwrap());
            pinned()
        });
        // Slots of 4 MiB: sixteen that were not free yet, five for the copy at hand; and small change.
        let allowed = (21 * 4 * MIB + MIB) as u64;
        assert!(peaks.iter().all(|&peak| peak <= allowed), "{reading:?}: {peaks:?} of {allowed}");
        gpu.stream.synchronize().unwrap();
        assert_eq!(sim.evidence().copied_h2d_pageable, 0);
        assert!(sim.evidence().copied_h2d_pinned >= 128 * MIB as u64);
        gpu.finish();
    }
}

/// Field report R48: no engine run, and no wait, for each of many small tensors.
#[test]
fn small_neighbours_share_the_slots() {
    // In single-stream mode cudarc records no events of its own.
    let gpu = Gpu::on_stream(H200, |context| context.default_stream());
    let Some(sim) = gpu.sim.as_ref() else { return };
    let tensors: Vec<_> = (0..500).map(|i| spec(&format!("layer.{i}"), "BF16", &[16, 16 + i % 3], 16)).collect();
    let model = model(tensors, false);
    let checkpoint = Checkpoint::open(&model.path).unwrap();
    drop(checkpoint.load(&gpu.device, &gpu.stream).run().unwrap());
    sim.clear_calls();
    let loaded = checkpoint.load(&gpu.device, &gpu.stream).run().unwrap();
    let calls = sim.calls();
    let count = |name: &str| calls.iter().filter(|call| call.name == name).count();
    // One each, and one more where a piece ends within a tensor.
    assert!((500..510).contains(&count("cuMemcpyHtoDAsync_v2")), "{}", count("cuMemcpyHtoDAsync_v2"));
    assert!(count("cuEventRecord") <= 10, "{}", count("cuEventRecord"));
    assert!(count("cuStreamSynchronize") <= 1);
    check(&gpu, &loaded, &model.tensors, "small");
    drop(loaded);
    gpu.finish();
}

#[test]
fn a_sharded_model_is_one_by_index_and_by_folder() {
    let model = sharded(zoo());
    for path in [&*model.path, model.path.parent().unwrap()] {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(checkpoint.files().len(), 3);
        assert_eq!(checkpoint.path(), model.path);
        let names: Vec<_> = checkpoint.tensors().iter().map(|info| info.name()).collect();
        assert_eq!(names, model.tensors.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>());
        assert_eq!(checkpoint.bytes(), model.tensors.iter().map(|spec| spec.3.len() as u64).sum::<u64>());
        for profile in [H200, SPARK] {
            let gpu = Gpu::any(profile);
            let loaded = checkpoint.load(&gpu.device, &gpu.stream).run().unwrap();
            check(&gpu, &loaded, &model.tensors, profile);
            drop(loaded);
            gpu.finish();
        }
    }
}

#[test]
fn only_what_is_asked_is_read_and_an_unknown_name_is_named() {
    let model = model(zoo(), false);
    let checkpoint = Checkpoint::open(&model.path).unwrap();
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        let loaded =
            checkpoint.load(&gpu.device, &gpu.stream).only(["i64", "f32", "u64"]).only(["mask"]).run().unwrap();
        let asked = |spec: &&Spec| ["i64", "f32", "u64", "mask"].contains(&spec.0.as_str());
        let expected: Vec<_> = model.tensors.iter().filter(asked).cloned().collect();
        check(&gpu, &loaded, &expected, profile);
        let copied: u64 = loaded.values().map(|tensor| tensor.bytes().copied_bytes().0).sum();
        assert!(copied <= expected.iter().map(|spec| spec.3.len() as u64).sum());

        let small = |info: &transfer_tensor::TensorInfo| info.bytes() < 100;
        let some = checkpoint.load(&gpu.device, &gpu.stream).only(["f32", "i64"]).filter(small).run().unwrap();
        assert_eq!(some.keys().collect::<Vec<_>>(), ["i64"]);
        assert!(checkpoint.load(&gpu.device, &gpu.stream).filter(|_| false).run().unwrap().is_empty());

        let error = checkpoint.load(&gpu.device, &gpu.stream).only(["f32", "f33"]).run().unwrap_err();
        assert!(error.is_invalid_input(), "{error}");
        assert!(error.to_string().ends_with(r#"there is no tensor "f33" among its 22"#), "{error}");
        drop((loaded, some));
        gpu.finish();
    }
}

#[test]
fn progress_grows_to_the_total_and_names_tensors() {
    let model = sharded(zoo());
    let checkpoint = Checkpoint::open(&model.path).unwrap();
    for profile in [H200, SPARK, ORIN] {
        let gpu = Gpu::any(profile);
        let mut told = Vec::new();
        let note = |progress: transfer_tensor::Progress<'_>| {
            assert_eq!(progress.total, checkpoint.bytes());
            assert!(checkpoint.get(progress.tensor).is_some());
            told.push(progress.done);
            ControlFlow::Continue(())
        };
        drop(checkpoint.load(&gpu.device, &gpu.stream).progress(note).run().unwrap());
        assert!(told.len() >= 2 && told.is_sorted(), "{profile}: {told:?}");
        assert_eq!(told.last(), Some(&checkpoint.bytes()), "{profile}");
        gpu.finish();
    }
}

/// The load returns when the file is read; who looks at a tensor waits for its copy.
#[test]
fn a_tensor_is_looked_at_when_its_copy_has_run() {
    let model = model(vec![spec("a", "F32", &[1000], 32), spec("b", "U8", &[3], 8)], false);
    let checkpoint = Checkpoint::open(&model.path).unwrap();
    let gpu = Gpu::any(H200);
    // Warm: nothing is pinned behind the gate, and device memory comes from a pool.
    let first = checkpoint.load(&gpu.device, &gpu.stream).run().unwrap();
    assert!(*first["a"].bytes().host().unwrap() == model.tensors[0].3);
    drop(first);
    gpu.stream.synchronize().unwrap();
    let gate = gpu.gate(&gpu.stream);
    let loaded = checkpoint.load(&gpu.device, &gpu.stream).run().unwrap();
    let dropped = checkpoint.load(&gpu.device, &gpu.stream).run().unwrap();
    drop(dropped);
    let opener = gate.open_later();
    assert!(*loaded["a"].bytes().host().unwrap() == model.tensors[0].3);
    assert!(opener.opened(), "looked at while the copy was held");
    assert!(*loaded["b"].bytes().host().unwrap() == model.tensors[1].3);
    drop((opener, loaded));
    gpu.finish();
}

#[test]
fn tensors_become_typed_ones_and_cudarc_slices() {
    let model = model(zoo(), false);
    let checkpoint = Checkpoint::open(&model.path).unwrap();
    let gpu = Gpu::any(H200);
    let mut loaded = checkpoint.load(&gpu.device, &gpu.stream).run().unwrap();
    let tensor: TransferTensor<f32> = loaded.remove("f32").unwrap().downcast().unwrap();
    let expected: Vec<f32> = model.tensors[0].3.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let same = |got: &[f32]| got.iter().map(|x| x.to_bits()).eq(expected.iter().map(|x| x.to_bits()));
    assert!(same(&tensor.host().unwrap()));
    // The device's own allocation, given away without a copy.
    let address = tensor.device(&gpu.stream).unwrap().address();
    let slice: CudaSlice<f32> = tensor.into_cuda_slice().unwrap();
    let tensor = gpu.device.tensor().from_cuda_slice(slice, [129, 33]).unwrap();
    assert_eq!(tensor.device(&gpu.stream).unwrap().address(), address);
    assert!(same(&tensor.host().unwrap()));
    let mask: TransferTensor<bool> = loaded.remove("mask").unwrap().downcast().unwrap();
    assert_eq!(mask.into_vec().unwrap().iter().map(|&bit| u8::from(bit)).collect::<Vec<_>>(), model.tensors[3].3);
    assert_eq!(loaded["four"].bytes().bytes(), 127 * 66 / 2);
    assert!(loaded["none"].bytes().is_empty());
    drop((tensor, loaded));
    gpu.finish();
}

#[test]
fn parts_are_read_on_the_host() {
    let model = model(zoo(), true);
    let checkpoint = Checkpoint::open(&model.path).unwrap();
    let info = checkpoint.get("odd.f64").unwrap();
    assert_eq!((info.file_dtype(), info.dtype(), info.shape(), info.bytes()), ("F64", DType::F64, &[17][..], 136));
    let mut part = [0; 20];
    checkpoint.read("odd.f64", 100, &mut part).unwrap();
    assert_eq!(part[..], model.tensors[2].3[100..120]);
    assert!(checkpoint.read("odd.f64", 117, &mut part).unwrap_err().is_invalid_input());
    assert!(checkpoint.read("odd.f64", u64::MAX, &mut part).unwrap_err().is_invalid_input());
    assert!(checkpoint.read("even", 0, &mut part).unwrap_err().to_string().contains("\"even\""));
    checkpoint.read("none", 0, &mut []).unwrap();
}

/// What is allocated at once ends between two tensors; a copy of the next begins in another run.
#[test]
fn a_model_of_several_batches_arrives_whole() {
    const LARGE: usize = 140 * MIB;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let header = format!(
        r#"{{"a":{{"dtype":"U8","shape":[{LARGE}],"data_offsets":[0,{LARGE}]}},"b":{{"dtype":"U8","shape":[{LARGE}],"data_offsets":[{LARGE},{}]}}}}"#,
        2 * LARGE
    );
    fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let start = 8 + header.len() as u64;
    file.set_len(start + 2 * LARGE as u64).unwrap();
    for (at, text) in [(LARGE - 4, b"enda"), (LARGE, b"1stb"), (2 * LARGE - 4, b"endb")] {
        std::os::unix::fs::FileExt::write_all_at(&file, text, start + at as u64).unwrap();
    }
    drop(file);
    let gpu = Gpu::any(H200);
    let loaded = Checkpoint::open(&path).unwrap().load(&gpu.device, &gpu.stream).run().unwrap();
    let mut seen: TransferTensor<u8> = gpu.device.tensor().zeros([4]).unwrap();
    for (name, at, expected) in [("a", LARGE - 4, b"enda"), ("b", 0, b"1stb"), ("b", LARGE - 4, b"endb")] {
        let part = loaded[name].bytes().view(at..at + 4).unwrap();
        let kernels = gpu.kernels();
        kernels.copy(&gpu.stream, &mut seen.device_mut(&gpu.stream).unwrap(), &part.device(&gpu.stream).unwrap());
        assert_eq!(&*seen.host().unwrap(), expected, "{name}");
    }
    drop((loaded, seen));
    gpu.finish();
}

fn load(gpu: &Gpu) -> Result<(), Error> {
    static MODEL: LazyLock<Model> =
        LazyLock::new(|| sharded(vec![spec("a", "F32", &[300_077], 32), spec("c", "F16", &[400_000], 16)]));
    let checkpoint = Checkpoint::open(&MODEL.path)?;
    let loaded = checkpoint.load(&gpu.device, &gpu.stream).run()?;
    for (name, _, _, bytes) in &MODEL.tensors {
        let tensor = loaded[name].bytes();
        drop(tensor.device(&gpu.stream).or_else(|_first| tensor.device(&gpu.stream))?);
        let host = tensor.host();
        // A download that failed has lost nothing.
        assert!(*host.or_else(|_first| tensor.host())? == **bytes, "{name}");
    }
    Ok(())
}

#[test]
fn a_load_survives_the_failure_of_any_call() {
    survives_every_failure(H200, load);
    survives_every_failure(ORIN, load);
}
