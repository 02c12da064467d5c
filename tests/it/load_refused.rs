//! Loads that end early: files that lie or change, callers who stop, streams that will not do.

use std::fs::{self, OpenOptions};
use std::ops::ControlFlow;

use serde_json::{Map, Value};
use transfer_tensor::{Checkpoint, Reading};

use crate::load::{check, model, sharded, write, zoo};
use crate::support::{Gpu, H200, ORIN, SPARK};

#[test]
fn sharded_models_that_do_not_hold_together_are_refused() {
    let model = sharded(zoo());
    let folder = model.path.parent().unwrap();
    let index: Value = serde_json::from_slice(&fs::read(&model.path).unwrap()).unwrap();
    let refused = |change: &dyn Fn(&mut Map<String, Value>)| {
        let mut changed = index.clone();
        change(changed["weight_map"].as_object_mut().unwrap());
        fs::write(&model.path, changed.to_string()).unwrap();
        Checkpoint::open(&model.path).unwrap_err()
    };
    let error = refused(&|map| drop(map.insert("ghost".into(), "model-0.safetensors".into())));
    assert!(
        error.is_bad_file() && error.to_string().contains(r#"tensor "ghost" is not in "model-0.safetensors""#),
        "{error}"
    );
    let error = refused(&|map| drop(map.insert("f32".into(), "model-2.safetensors".into())));
    assert!(error.is_bad_file() && error.to_string().contains("\"f32\""), "{error}");
    let error = refused(&|map| drop(map.insert("f32".into(), "model-9.safetensors".into())));
    assert!(error.is_file() && error.to_string().contains("model-9.safetensors"), "{error}");
    let error = refused(&|map| drop(map.insert("f32".into(), "../model-0.safetensors".into())));
    assert!(error.is_bad_file() && error.to_string().contains("inside its folder"), "{error}");

    // The same name in two files.
    fs::write(&model.path, index.to_string()).unwrap();
    write(
        &folder.join("model-2.safetensors"),
        &zoo()[16..].iter().chain(&zoo()[..1]).cloned().collect::<Vec<_>>(),
        false,
    );
    let error = Checkpoint::open(&model.path).unwrap_err();
    assert!(error.is_bad_file() && error.to_string().contains(r#"tensor "f32" is in"#), "{error}");

    // Without an index nobody says which of the files are one model.
    fs::remove_file(&model.path).unwrap();
    let error = Checkpoint::open(folder).unwrap_err();
    assert!(error.is_file() && error.to_string().contains("more than one"), "{error}");
    let empty = tempfile::tempdir().unwrap();
    assert!(Checkpoint::open(empty.path()).unwrap_err().is_file());
    assert!(Checkpoint::open(empty.path().join("no.safetensors")).unwrap_err().is_file());
    assert!(Checkpoint::open("/dev/null").unwrap_err().to_string().contains("not a regular file"));
}

#[test]
fn a_load_that_is_cancelled_leaves_nothing_and_the_next_is_exact() {
    let model = model(zoo(), false);
    let checkpoint = Checkpoint::open(&model.path).unwrap();
    for profile in [H200, SPARK, ORIN] {
        for calls in [1, 2, 3] {
            let gpu = Gpu::any(profile);
            let mut left = calls;
            let stop = |_: transfer_tensor::Progress<'_>| {
                left -= 1;
                if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            };
            match checkpoint.load(&gpu.device, &gpu.stream).progress(stop).run() {
                Err(error) => assert!(
                    error.is_cancelled() && error.to_string().contains(&checkpoint.bytes().to_string()),
                    "{error}"
                ),
                // Several tensors that arrive together are told of once.
                Ok(_) => assert!(left > 0 && calls > 1),
            }
            let loaded = checkpoint.load(&gpu.device, &gpu.stream).run().unwrap();
            check(&gpu, &loaded, &model.tensors, profile);
            drop(loaded);
            gpu.finish();
        }
    }
}

#[test]
fn a_panic_of_the_progress_function_is_the_callers() {
    let model = model(zoo(), false);
    let checkpoint = Checkpoint::open(&model.path).unwrap();
    let gpu = Gpu::any(H200);
    let load = || checkpoint.load(&gpu.device, &gpu.stream).progress(|_| panic!("stop")).run();
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(load)).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"stop"));
    let loaded = checkpoint.load(&gpu.device, &gpu.stream).run().unwrap();
    check(&gpu, &loaded, &model.tensors, "after a panic");
    drop(loaded);
    gpu.finish();
}

#[test]
fn a_file_that_is_cut_or_changed_while_it_is_read_is_an_error() {
    for profile in [H200, ORIN] {
        let gpu = Gpu::any(profile);
        let model = model(zoo(), false);
        let checkpoint = Checkpoint::open(&model.path).unwrap();
        let length = fs::metadata(&model.path).unwrap().len();
        let file = OpenOptions::new().write(true).open(&model.path).unwrap();
        file.set_len(length - 5000).unwrap();
        let error = checkpoint.load(&gpu.device, &gpu.stream).reading(Reading::Read).run().unwrap_err();
        assert!(error.is_file() && error.to_string().contains("became shorter"), "{profile}: {error}");
        assert!(error.to_string().contains(&length.to_string()), "{profile}: {error}");
        // Mapped, it is looked at before.
        if profile == H200 {
            let error = checkpoint.load(&gpu.device, &gpu.stream).reading(Reading::Map).run().unwrap_err();
            assert!(error.is_file() && error.to_string().contains("was changed"), "{profile}: {error}");
        }
        // As long again, but not the same.
        file.set_len(length).unwrap();
        let error = checkpoint.load(&gpu.device, &gpu.stream).run().unwrap_err();
        assert!(error.is_file() && error.to_string().contains("was changed"), "{profile}: {error}");
        assert!(checkpoint.check_unchanged().unwrap_err().is_file());
        // Opened again it is a file like any other.
        drop(Checkpoint::open(&model.path).unwrap().load(&gpu.device, &gpu.stream).run().unwrap());
        gpu.finish();
    }
}

#[test]
fn files_that_lie_are_refused_with_what_is_wrong() {
    let good = model(zoo(), false);
    let bytes = fs::read(&good.path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for length in (0..10).chain([header - 1, header, header + 1, bytes.len() - 1]) {
        fs::write(&good.path, &bytes[..length]).unwrap();
        let error = Checkpoint::open(&good.path).unwrap_err();
        assert!(
            error.is_bad_file() && error.to_string().contains("model.safetensors: not a valid"),
            "{length}: {error}"
        );
    }
    let hostile = |header: &str, data: usize| {
        let length = (header.len() as u64).to_le_bytes();
        fs::write(&good.path, [&length[..], header.as_bytes(), &vec![0; data]].concat()).unwrap();
        let error = Checkpoint::open(&good.path).unwrap_err();
        assert!(error.is_bad_file(), "{error}");
        error.to_string()
    };
    let outside = hostile(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}"#, 8);
    assert!(outside.contains("offset") && outside.contains('a'), "{outside}");
    let twice =
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    assert!(hostile(twice, 4).contains(r#"tensor "a" is named twice"#));
    assert!(
        hostile(r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 3).contains("4 bytes, the file only 3")
    );
    assert!(hostile(r#"{"a":{"dtype":"U7","shape":[4],"data_offsets":[0,4]}}"#, 4).contains("U7"));
    fs::write(&good.path, u64::MAX.to_le_bytes()).unwrap();
    let error = Checkpoint::open(&good.path).unwrap_err().to_string();
    assert!(error.contains("more than the format allows (100000000)"), "{error}");
}

#[test]
fn a_stream_of_another_context_or_in_a_capture_is_refused() {
    let model = model(zoo(), false);
    let checkpoint = Checkpoint::open(&model.path).unwrap();
    let gpu = Gpu::any(H200);
    if let Some(other) = Gpu::simulated(SPARK) {
        let error = checkpoint.load(&gpu.device, &other.stream).run().unwrap_err();
        assert!(error.is_invalid_input(), "{error}");
        other.finish();
    }
    use transfer_tensor::cudarc::driver::sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
    gpu.stream.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
    let error = checkpoint.load(&gpu.device, &gpu.stream).run().unwrap_err();
    assert!(error.is_capturing(), "{error}");
    let mut graph = std::ptr::null_mut();
    // SAFETY: as above; the call writes one handle.
    let ended = unsafe { transfer_tensor::cudarc::driver::sys::cuStreamEndCapture(gpu.stream.cu_stream(), &mut graph) };
    ended.result().expect("the capture goes on");
    // SAFETY: made just now.
    unsafe { transfer_tensor::cudarc::driver::sys::cuGraphDestroy(graph) }.result().unwrap();
    gpu.finish();
}
