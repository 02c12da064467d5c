//! Sizes and shapes: nothing, one, parts, more than 32 bits can count, strides (field reports R51, R52, R53).

use transfer_tensor::cudarc::driver::{DeviceSlice, LaunchConfig, PushKernelArg};
use transfer_tensor::{Access, Shape, Strategy, TransferTensor};

use crate::machines::{drain, kernel};
use crate::support::{Gpu, H200, SPARK};

/// Everything a tensor offers, on one without elements.
fn use_up(gpu: &Gpu, mut tensor: TransferTensor<f32>, shape: &[usize]) {
    assert_eq!((tensor.shape().dims(), tensor.len(), tensor.bytes()), (shape, 0, 0));
    assert!(tensor.is_empty());
    assert_eq!(*tensor.host().unwrap(), [0f32; 0]);
    assert_eq!(*tensor.host_mut().unwrap(), [0f32; 0]);
    {
        let guard = tensor.device(&gpu.stream).unwrap();
        assert_eq!((guard.address(), DeviceSlice::len(&guard)), (0, 0));
    }
    drop(tensor.device_mut(&gpu.stream).unwrap());
    if shape.first().is_some_and(|&rows| rows > 1) {
        assert_eq!(tensor.view(1..2).unwrap().len(), 0);
    }
    assert_eq!(tensor.byte_range(..).unwrap().len(), 0);
    assert_eq!(tensor.strided(0, shape, &vec![5; shape.len()]).unwrap().shape().dims(), shape);
    let mut ticket = tensor.to_device().unwrap();
    assert!(ticket.is_complete().unwrap());
    let tensor = ticket.try_wait().unwrap().to_host().unwrap().wait().unwrap();
    assert_eq!(tensor.copied_bytes(), (0, 0));
    let refused = tensor.into_cuda_slice().unwrap_err();
    assert!(refused.error.is_unsupported());
    let shared = refused.value.into_shared();
    assert_eq!(shared.clone().to_vec().unwrap(), [0f32; 0]);
    let tensor = TransferTensor::from_shared(shared).unwrap();
    let mut tensor = tensor.reshape([0, 7]).unwrap();
    assert_eq!(tensor.release_device().unwrap(), 0);
    assert_eq!(tensor.release_host(&gpu.stream).unwrap(), 0);
    assert_eq!(tensor.into_vec().unwrap(), [0f32; 0]);
}

#[test]
fn a_tensor_of_nothing_asks_nothing_of_the_driver() {
    for profile in [H200, SPARK, "gh200_480gb_numa", "jetson_agx_orin_64gb"] {
        let gpu = match profile {
            H200 => Gpu::any(H200),
            _ => match Gpu::simulated(profile) {
                Some(gpu) => gpu,
                None => return,
            },
        };
        if let Some(sim) = &gpu.sim {
            sim.clear_calls();
        }
        let shapes: [&[usize]; 4] = [&[0], &[2, 1, 1, 0], &[0, 5], &[3, 0, usize::MAX]];
        for shape in shapes {
            let options = || gpu.device.tensor().access(Access::Streaming);
            use_up(&gpu, options().zeros(shape).unwrap(), shape);
            use_up(&gpu, options().from_slice(&[], shape).unwrap(), shape);
            use_up(&gpu, options().pin(true).from_vec(Vec::with_capacity(10), shape).unwrap(), shape);
            use_up(&gpu, options().strategy(Strategy::Streamed).zeros(shape).unwrap(), shape);
        }
        if let Some(sim) = &gpu.sim {
            let calls: Vec<String> = sim.calls().into_iter().map(|call| call.name).collect();
            assert_eq!(calls, Vec::<String>::new(), "{profile}");
        }
        gpu.finish();
    }
}

/// An empty tensor among others: the others' order and values are what they would be without it.
#[test]
fn nothing_in_the_middle_changes_nothing() {
    let gpu = Gpu::any(H200);
    let tickets: Vec<_> = [5usize, 0, 7, 0, 1]
        .into_iter()
        .map(|len| {
            let values: Vec<u64> = (0..len as u64).collect();
            gpu.device.tensor().from_vec(values, [len]).unwrap().to_device().unwrap()
        })
        .collect();
    let lengths: Vec<usize> = tickets.into_iter().map(|ticket| ticket.wait().unwrap().len()).collect();
    assert_eq!(lengths, [5, 0, 7, 0, 1]);
    gpu.finish();
}

#[test]
fn a_scalar_has_one_element_and_no_axis() {
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        for strategy in [Strategy::Streamed, Strategy::ZeroCopy] {
            let mut tensor = gpu.device.tensor().strategy(strategy).from_vec(vec![7.5f32], []).unwrap();
            assert_eq!((tensor.shape().rank(), tensor.len(), tensor.bytes()), (0, 1, 4));
            let (function, one) = (kernel(&gpu.context, "add_one_f32"), 1u64);
            {
                let guard = tensor.device_mut(&gpu.stream).unwrap();
                let mut launch = gpu.stream.launch_builder(&function);
                launch.arg(&guard).arg(&one);
                // SAFETY: one float at the guard's address, on its stream.
                unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.unwrap();
            }
            assert_eq!(*tensor.host().unwrap(), [8.5]);
            assert!(tensor.view(0..1).unwrap_err().is_invalid_input());
            assert_eq!(tensor.strided(0, [], &[]).unwrap().len(), 1);
            let tensor = tensor.reshape([1, 1, 1]).unwrap();
            assert_eq!(tensor.view(..).unwrap().shape().dims(), [1, 1, 1]);
            let refused = tensor.reshape([2]).unwrap_err();
            assert!(refused.error.is_invalid_input());
            assert_eq!(refused.value.into_vec().unwrap(), [8.5]);
        }
        gpu.finish();
    }
}

/// R52, on the device: the part that is meant is copied, and nothing before or behind it.
#[test]
fn a_copy_between_parts_copies_just_those() {
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        for strategy in [Strategy::Streamed, Strategy::ZeroCopy] {
            let options = || gpu.device.tensor().strategy(strategy);
            let source = options().from_vec((0..100).map(|i| i as f32).collect(), [100]).unwrap();
            let mut target = options().from_vec(vec![-1f32; 50], [50]).unwrap();
            {
                let from = source.view(10..15).unwrap();
                let mut to = target.view_mut(20..25).unwrap();
                let from = from.device(&gpu.stream).unwrap();
                let mut to = to.device_mut(&gpu.stream).unwrap();
                assert_eq!((from.len(), to.len()), (5, 5));
                gpu.stream.memcpy_dtod(&from, &mut to).unwrap();
            }
            let mut expected = vec![-1f32; 50];
            expected[20..25].copy_from_slice(&[10.0, 11.0, 12.0, 13.0, 14.0]);
            assert_eq!(*target.host().unwrap(), *expected, "{profile} {strategy}");
            assert_eq!(source.host().unwrap()[9..16], [9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0]);
        }
        gpu.finish();
    }
}

/// R52, both directions: what one side wrote to a part reaches the other, and what the other wrote elsewhere stays.
#[test]
fn parts_written_on_either_side_meet() {
    // Larger than two staging slots, for the pageable way; parts smaller than the tensor.
    let rows = 5000;
    let shape = [rows, 500];
    let number = |row: usize, column: usize| (row * 500 + column) as f32;
    let all: Vec<f32> = (0..rows).flat_map(|row| (0..500).map(move |column| number(row, column))).collect();
    let mut expected = all.clone();
    for rows in [100..101, 200..4700, 4999..5000] {
        expected[rows.start * 500..rows.end * 500].iter_mut().for_each(|x| *x += 1.0);
    }
    expected[300 * 500..310 * 500].fill(-3.0);
    expected[4999 * 500..][..2].fill(-4.0);
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        let add_one = kernel(&gpu.context, "add_one_f32");
        for (strategy, pin) in [(Strategy::Streamed, false), (Strategy::Streamed, true), (Strategy::ZeroCopy, false)] {
            let options = gpu.device.tensor().strategy(strategy).pin(pin);
            let mut tensor = options.from_vec(all.clone(), shape).unwrap();
            for rows in [100..101, 200..4700, 4999..5000] {
                let mut part = tensor.view_mut(rows).unwrap();
                let len = part.len() as u64;
                let guard = part.device_mut(&gpu.stream).unwrap();
                let mut launch = gpu.stream.launch_builder(&add_one);
                launch.arg(&guard).arg(&len);
                // SAFETY: as many floats at the guard's address, on its stream.
                unsafe { launch.launch(LaunchConfig::for_num_elems(len as u32)) }.unwrap();
            }
            // A part of what the device has just written, and the very end.
            tensor.view_mut(300..310).unwrap().host_mut().unwrap().fill(-3.0);
            tensor.view_mut(4999..).unwrap().host_mut().unwrap()[..2].fill(-4.0);
            let mut seen = vec![0f32; all.len()];
            gpu.stream.memcpy_dtoh(&tensor.device(&gpu.stream).unwrap(), &mut seen).unwrap();
            gpu.stream.synchronize().unwrap();
            assert!(seen == expected, "{profile} {strategy} {pin}: on the device");
            assert!(*tensor.host().unwrap() == *expected, "{profile} {strategy} {pin}: on the host");
        }
        drop(add_one);
        gpu.finish();
    }
}

#[test]
fn parts_of_a_shared_tensor_outlive_the_whole() {
    let gpu = Gpu::any(H200);
    let tensor = gpu.device.tensor().from_vec((0..1000u32).collect(), [10, 100]).unwrap();
    let shared = tensor.into_shared();
    let row = shared.rows(3..4).unwrap();
    let bytes = shared.byte_range(400..408).unwrap();
    let refused = TransferTensor::from_shared(shared.clone()).unwrap_err();
    assert!(refused.error.to_string().contains("shared"), "{}", refused.error);
    drop((shared, refused));
    assert_eq!((row.shape().dims(), bytes.shape().dims()), (&[1, 100][..], &[2][..]));
    assert_eq!(row.to_vec().unwrap(), (300..400).collect::<Vec<u32>>());
    assert_eq!(gpu.stream.clone_dtoh(&bytes.device(&gpu.stream).unwrap()).unwrap(), [100, 101]);
    gpu.stream.synchronize().unwrap();
    assert!(row.rows(0..2).is_err());
    // A part can not be made whole again.
    drop(bytes);
    assert!(TransferTensor::from_shared(row).is_err());
    gpu.finish();
}

#[test]
fn a_split_is_written_side_by_side() {
    let gpu = Gpu::any(H200);
    let mut tensor = gpu.device.tensor().zeros::<u16>([10, 3]).unwrap();
    {
        let (mut head, mut tail) = tensor.view_mut(2..).unwrap().split_at(5).unwrap();
        assert_eq!((head.shape().dims(), tail.shape().dims()), (&[5, 3][..], &[3, 3][..]));
        // One side on the device, the other on the host, at the same time.
        let mut on_device = head.device_mut(&gpu.stream).unwrap();
        tail.host_mut().unwrap().fill(9);
        gpu.stream.memcpy_htod(&[7u16; 15], &mut on_device).unwrap();
    }
    gpu.stream.synchronize().unwrap();
    let expected: Vec<u16> = [vec![0; 6], vec![7; 15], vec![9; 9]].concat();
    assert_eq!(*tensor.host().unwrap(), *expected);
    drop(tensor);
    gpu.finish();
}

/// R53: a view that is not one block is refused, never copied as if it were.
#[test]
fn strided_views_are_refused_and_contiguous_ones_are_right() {
    let gpu = Gpu::any(H200);
    let on_device = gpu.device.tensor().from_vec((0..8i32).collect(), [2, 2, 2]).unwrap();
    let on_host = TransferTensor::from_vec((0..8i32).collect(), [2, 2, 2]).unwrap();
    for tensor in [&on_device, &on_host] {
        let refused: [(usize, &[usize], &[isize], &str); 9] = [
            (0, &[2, 2], &[1, 2], "transposed"),
            (1, &[2, 2], &[4, 2], "the second of the last axis"),
            (0, &[4, 2], &[0, 1], "broadcast"),
            (7, &[8], &[-1], "reversed"),
            (0, &[3, 2], &[1, 1], "overlapping"),
            (0, &[2, 2], &[4, 1], "with gaps"),
            (0, &[2], &[], "without strides"),
            (0, &[2, 2], &[2], "with too few strides"),
            (0, &[2], &[isize::MIN], "with an absurd stride"),
        ];
        for (offset, shape, strides, what) in refused {
            let error = tensor.strided(offset, shape, strides).unwrap_err();
            assert!(error.is_non_contiguous(), "{what}: {error}");
        }
        let outside: [(usize, &[usize], &[isize]); 3] =
            [(1, &[8], &[1]), (usize::MAX, &[2], &[1]), (0, &[usize::MAX], &[1])];
        for (offset, shape, strides) in outside {
            let error = tensor.strided(offset, shape, strides).unwrap_err();
            assert!(error.is_invalid_input() && !error.is_non_contiguous(), "{offset} {shape:?}: {error}");
        }
        let view = tensor.strided(2, [2, 1, 2], &[2, 99, 1]).unwrap();
        assert_eq!(*view.host().unwrap(), [2, 3, 4, 5]);
        assert_eq!(*view.rows(1..).unwrap().host().unwrap(), [4, 5]);
    }
    let view = on_device.strided(2, [4], &[1]).unwrap();
    assert_eq!(gpu.stream.clone_dtoh(&view.device(&gpu.stream).unwrap()).unwrap(), [2, 3, 4, 5]);
    gpu.stream.synchronize().unwrap();
    drop(on_device);
    gpu.finish();
}

#[test]
fn ranges_outside_reversed_or_misaligned_are_refused() {
    let mut tensor = TransferTensor::from_vec(vec![0u32; 12], [3, 4]).unwrap();
    assert!(tensor.view(1..4).unwrap_err().is_invalid_input());
    assert!(tensor.view(..=usize::MAX).unwrap_err().is_invalid_input());
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = tensor.view(2..1);
    assert!(reversed.unwrap_err().is_invalid_input());
    assert!(tensor.view_mut(4..4).is_err());
    assert_eq!(tensor.view(3..3).unwrap().len(), 0);
    assert!(tensor.byte_range(2..8).unwrap_err().to_string().contains("start"));
    assert!(tensor.byte_range(4..9).unwrap_err().to_string().contains("end"));
    assert!(tensor.byte_range(40..52).unwrap_err().is_invalid_input());
    assert_eq!(tensor.byte_range_mut(44..48).unwrap().len(), 1);
    assert!(tensor.reshape([13]).is_err());
}

/// Sizes that only 64 bits count: offsets beyond 4 GiB are right, and what does not fit is an error, before any memory.
#[test]
fn offsets_beyond_32_bits_are_right() {
    let gpu = Gpu::any(H200);
    let (rows, row) = (5usize, 1usize << 30);
    let mut tensor = gpu.device.tensor().strategy(Strategy::Streamed).zeros::<u8>([rows, row]).unwrap();
    assert_eq!(tensor.bytes(), 5 << 30);
    let base = {
        let first = tensor.byte_range(..1).unwrap();
        first.device(&gpu.stream).unwrap().address()
    };
    let fill = kernel(&gpu.context, "fill_u8");
    // One piece across the 4 GiB mark, and the last bytes.
    let mark = 4usize << 30;
    for (range, value) in [(mark - 3..mark + 5, 7u32), ((5 << 30) - 2..5 << 30, 9)] {
        let mut part = tensor.byte_range_mut(range.clone()).unwrap();
        let guard = part.device_mut(&gpu.stream).unwrap();
        assert_eq!(guard.address(), base + range.start as u64);
        let len = range.len() as u64;
        let mut launch = gpu.stream.launch_builder(&fill);
        launch.arg(&guard).arg(&len).arg(&value);
        // SAFETY: as many bytes at the guard's address, on its stream.
        unsafe { launch.launch(LaunchConfig::for_num_elems(8)) }.unwrap();
    }
    let read = |tensor: &TransferTensor<u8>, range| {
        let part = tensor.byte_range(range).unwrap();
        let bytes = gpu.stream.clone_dtoh(&part.device(&gpu.stream).unwrap()).unwrap();
        gpu.stream.synchronize().unwrap();
        bytes
    };
    assert_eq!(read(&tensor, mark - 5..mark + 7), [0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0]);
    assert_eq!(read(&tensor, (5 << 30) - 4..5 << 30), [0, 0, 9, 9]);
    // What a 32-bit offset would have hit.
    assert_eq!(read(&tensor, 0..5), [0; 5]);
    assert_eq!(read(&tensor, (1 << 30) - 2..(1 << 30) + 2), [0; 4]);
    let last = tensor.view(4..5).unwrap();
    assert_eq!((last.len(), last.shape().dims()), (row, &[1, row][..]));
    if gpu.sim.is_some() {
        // The host side too: there it costs nothing.
        tensor.byte_range_mut(mark + 1..mark + 3).unwrap().host_mut().unwrap().fill(1);
        assert_eq!(read(&tensor, mark - 1..mark + 6), [7, 7, 1, 1, 7, 7, 0]);
        assert_eq!(*tensor.byte_range(mark - 4..mark).unwrap().host().unwrap(), [0, 7, 7, 7]);
    }
    drop((tensor, fill));
    drain(&gpu.device);
    gpu.finish();
}

#[test]
fn sizes_that_no_memory_has_are_errors() {
    let gpu = Gpu::any(H200);
    for shape in [vec![usize::MAX, 2], vec![1 << 62], vec![1 << 32, 1 << 32], vec![isize::MAX as usize / 8 + 1]] {
        let error = gpu.device.tensor().zeros::<f64>(shape.clone()).unwrap_err();
        assert!(error.is_invalid_input(), "{shape:?}: {error}");
        assert!(TransferTensor::<f64>::zeros(shape).unwrap_err().is_invalid_input());
    }
    // It can be counted, but it is nowhere.
    for strategy in [None, Some(Strategy::Streamed), Some(Strategy::ZeroCopy)] {
        let options = gpu.device.tensor();
        let options = match strategy {
            Some(strategy) => options.strategy(strategy),
            None => options,
        };
        let error = options.zeros::<u8>([1usize << 50]).unwrap_err();
        assert!(error.is_out_of_memory(), "{strategy:?}: {error}");
        assert!(error.to_string().contains(&(1u64 << 50).to_string()), "{error}");
    }
    // The zero counts, wherever it stands.
    assert_eq!(Shape::from([usize::MAX, usize::MAX, 0]).elements().unwrap(), 0);
    gpu.finish();
}
