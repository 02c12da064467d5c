//! Rows that are apart on the host or the device.

use transfer_tensor::{Rows, Strategy};

use crate::batch::{filled, on_host};
use crate::machines::{drain, pattern};
use crate::support::{Gpu, H200};

const MIB: usize = 1 << 20;

/// R33: the shapes that were refused or a thousand times slower elsewhere.
#[test]
fn strided_shapes_have_the_right_values() {
    const N: usize = 1024;
    const LONG: usize = 1 << 20;
    let gpu = Gpu::any(H200);
    let stream = &gpu.stream;
    let values: Vec<f32> = (0..2 * LONG).map(|i| i as f32).collect();
    let mut target = stream.alloc_zeros::<f32>(LONG).unwrap();
    let mut upload = |source: &[f32], rows: Rows, expected: &dyn Fn(usize) -> f32| {
        gpu.device.upload_rows(stream, source, &rows, &mut target).unwrap();
        let got = stream.clone_dtoh(&target).unwrap();
        assert!(got.iter().enumerate().all(|(i, &value)| value == expected(i)), "{rows:?}");
        // And back to the same places.
        let mut back = vec![-1f32; source.len()];
        gpu.device.download_rows(stream, &target, &rows, &mut back).unwrap();
        assert_eq!(back.iter().filter(|&&value| value >= 0.0).count(), LONG, "{rows:?}");
        assert!(back.iter().zip(source).all(|(&got, &sent)| got < 0.0 || got == sent), "{rows:?}");
    };
    // .t() of a square, a column, a row slice, and a block of columns.
    upload(&values[..LONG], Rows::new(N, N).host_pitch(1).host_step(N), &|i| ((i % N) * N + i / N) as f32);
    upload(&values[1..], Rows::new(LONG, 1).host_pitch(2), &|i| (2 * i + 1) as f32);
    upload(&values[LONG..], Rows::new(1, LONG), &|i| (LONG + i) as f32);
    upload(&values[7..], Rows::new(LONG / 16, 16).host_pitch(32), &|i| (7 + i / 16 * 32 + i % 16) as f32);
    // One row, many times.
    gpu.device.upload_rows(stream, &values[..N], &Rows::new(N, N).host_pitch(0), &mut target).unwrap();
    let got = stream.clone_dtoh(&target).unwrap();
    assert!(got.iter().enumerate().all(|(i, &value)| value == (i % N) as f32));
    drop(target);
    drain(&gpu.device);
    gpu.finish();
}

/// Rows apart on the device: wide ones by the two-dimensional copy, narrow ones with what lies between, or not at all.
#[test]
fn rows_apart_on_the_device_go_the_way_that_is_fast() {
    let gpu = Gpu::any(H200);
    let count = |call: &str| gpu.sim.as_ref().map_or(0, |sim| sim.count(call));
    for (rows, width, pitch, two_d) in
        [(5000, 600, 1000, 4), (3, 3 * MIB, 4 * MIB, 0), (64, 4, 2000, 2), (100, 511, 511, 0), (1, 7, 9, 0)]
    {
        let (bytes, total) = (pattern(rows * (width + 1), 4), rows * pitch);
        let mut target = filled(&gpu, total, 9);
        let how = Rows::new(rows, width).host_pitch(width + 1).device_pitch(pitch);
        let before = count("cuMemcpy2DAsync");
        gpu.device.upload_rows(&gpu.stream, &bytes, &how, &mut target).unwrap();
        let mut expected = vec![9; total];
        for (row, target) in bytes.chunks(width + 1).zip(expected.chunks_mut(pitch)) {
            target[..width].copy_from_slice(&row[..width]);
        }
        assert!(on_host(&gpu, &target) == expected, "{how:?}");
        let mut back = vec![3; bytes.len()];
        gpu.device.download_rows(&gpu.stream, &target, &how, &mut back).unwrap();
        for (row, sent) in back.chunks(width + 1).zip(bytes.chunks(width + 1)) {
            assert!(row[..width] == sent[..width] && row[width] == 3, "{how:?}");
        }
        if gpu.sim.is_some() {
            assert_eq!(count("cuMemcpy2DAsync") - before, two_d, "{how:?}");
        }
        drop(target);
    }
    // A column of the device's: eight times as many bytes are brought over, not more.
    let values: Vec<u32> = (0..80_000).collect();
    let mut target = gpu.stream.clone_htod(&values).unwrap();
    let mut column = vec![0; 10_000];
    gpu.device
        .download_rows(&gpu.stream, &target.slice(7..), &Rows::new(10_000, 1).device_pitch(8), &mut column)
        .unwrap();
    assert!(column.iter().enumerate().all(|(i, &value)| value as usize == 8 * i + 7));
    let far = Rows::new(8_000, 1).device_pitch(10);
    let error = gpu.device.download_rows(&gpu.stream, &target, &far, &mut column).unwrap_err();
    assert!(error.is_non_contiguous() && error.to_string().contains("[8000, 1] with strides [10, 1]"), "{error}");
    let error = gpu.device.upload_rows(&gpu.stream, &column, &far, &mut target).unwrap_err();
    assert!(error.is_non_contiguous(), "{error}");
    drop(target);
    drain(&gpu.device);
    gpu.finish();
}

#[test]
fn wide_rows_in_pinned_memory_are_copied_where_they_are() {
    let gpu = Gpu::any(H200);
    let bytes = pattern(MIB, 2);
    let mut pinned = gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&bytes, [MIB]).unwrap();
    let mut target = filled(&gpu, MIB, 0);
    let mut host = pinned.host_mut().unwrap();
    let rows = Rows::new(1000, 600).host_pitch(1000).device_pitch(800);
    let opener = gpu.gate(&gpu.stream).open_later();
    gpu.device.upload_rows(&gpu.stream, &host, &rows, &mut target).unwrap();
    assert!(opener.opened(), "it is still being read");
    host.fill(0);
    gpu.device.download_rows(&gpu.stream, &target, &rows, &mut host).unwrap();
    for (got, sent) in host.chunks(1000).zip(bytes.chunks(1000)).take(1000) {
        assert!(got[..600] == sent[..600] && got[600..] == [0; 400]);
    }
    if let Some(sim) = &gpu.sim {
        assert_eq!(sim.count("cuMemcpy2DAsync"), 2);
        assert_eq!(sim.evidence().copied_h2d_pinned, 600_000);
    }
    drop(host);
    drop((pinned, target));
    drain(&gpu.device);
    gpu.finish();
}

#[test]
fn what_is_wrong_with_rows_is_said() {
    let gpu = Gpu::any(H200);
    let mut target = filled(&gpu, 100, 1);
    let mut host = [0u8; 50];
    let mut refuse = |rows: Rows, down: bool, words: &str| {
        let result = match down {
            false => gpu.device.upload_rows(&gpu.stream, &host, &rows, &mut target),
            true => gpu.device.download_rows(&gpu.stream, &target, &rows, &mut host),
        };
        let error = result.expect_err(words);
        assert!(error.is_invalid_input() && error.to_string().contains(words), "{error}");
    };
    refuse(Rows::new(6, 10), false, "0..60 is outside of 0..50");
    refuse(Rows::new(5, 10).device_pitch(23), false, "0..102 is outside of 0..100");
    refuse(Rows::new(5, 10).device_pitch(9), false, "overlap");
    refuse(Rows::new(5, 10).host_pitch(9), true, "overlap");
    refuse(Rows::new(5, 10).host_step(0), true, "overlap");
    refuse(Rows::new(usize::MAX, 10), false, "overflow");
    refuse(Rows::new(3, 10).host_pitch(usize::MAX), true, "overflow");
    let calls = gpu.sim.as_ref().map_or(0, |sim| sim.calls().len());
    for rows in [Rows::new(0, 10), Rows::new(10, 0), Rows::new(0, 0)] {
        gpu.device.upload_rows(&gpu.stream, &host, &rows, &mut target).unwrap();
        gpu.device.download_rows(&gpu.stream, &target, &rows, &mut host).unwrap();
    }
    assert_eq!(gpu.sim.as_ref().map_or(0, |sim| sim.calls().len()), calls, "nothing to do");
    drop(target);
    gpu.finish();
}
