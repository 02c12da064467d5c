//! Batches that are read from ranges of files.

use std::io::{Seek as _, Write as _};

use transfer_tensor::cudarc::driver::CudaSlice;
use transfer_tensor::{EgressPool, Error, HostTensor, IngressError, IngressPrefetcher, Output};

use crate::machines::pattern;
use crate::support::{GH200, Gpu, H200, HANG, SPARK};

const ROW: usize = 500;

#[test]
fn ranges_of_files_come_as_they_are_in_the_order_given() {
    for profile in [H200, GH200, SPARK] {
        let gpu = Gpu::any(profile);
        let folder = tempfile::tempdir().unwrap();
        let paths = ["a.bin", "b.bin"].map(|name| folder.path().join(name));
        let files = [1, 2].map(|seed| pattern(20 * ROW + 77, seed));
        for (path, bytes) in paths.iter().zip(&files) {
            std::fs::write(path, bytes).unwrap();
        }
        // From odd places, backwards, twice, by turns; the last ones are no whole batch.
        let ranges: Vec<_> =
            [(0, 77, 4), (1, 0, 4), (0, 33, 4), (0, 33, 4), (1, 16 * ROW + 77, 4), (0, 1, 1), (1, 3, 2)]
                .map(|(file, start, rows): (usize, usize, usize)| (file, start..start + rows * ROW))
                .into();
        for (depth, threads) in [(1, 1), (3, 4)] {
            let asked = ranges.iter().map(|(file, range)| (&paths[*file], range.start as u64..range.end as u64));
            let mut batches: IngressPrefetcher<u8, Error> = IngressPrefetcher::builder(&gpu.device, [4, ROW])
                .depth(depth)
                .threads(threads)
                .file_ranges(asked)
                .unwrap();
            // Twice, the second time from the beginning again.
            for _ in 0..2 {
                for (file, range) in &ranges {
                    let batch = batches.next().unwrap().unwrap();
                    assert_eq!(batch.rows(), range.len() / ROW);
                    let view = batch.view().unwrap();
                    let there = gpu.stream.clone_dtoh(&view.device(&gpu.stream).unwrap()).unwrap();
                    assert!(there == files[*file][range.clone()], "file {file}, {range:?}");
                }
                assert!(batches.next().is_none());
                batches.reset();
            }
        }
        gpu.finish();
    }
}

#[test]
fn what_can_not_be_a_batch_is_an_error_at_once() {
    let gpu = Gpu::any(H200);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.bin");
    std::fs::write(&path, vec![0; 100 * ROW]).unwrap();
    let start = |path: &std::path::Path, range: std::ops::Range<u64>| {
        IngressPrefetcher::builder(&gpu.device, [4, ROW / 4]).file_ranges::<u32, _>([(path, range)]).map(drop)
    };
    let row = ROW as u64;
    start(&path, 0..4 * row).unwrap();
    for (range, word) in [
        (0..0, "0..0"),
        (7..7, "7..7"),
        (std::ops::Range { start: 9, end: 3 }, "9..3"),
        (0..row + 1, "rows of 500"),
        (0..5 * row, "batches of 2000"),
        (97 * row..101 * row, "50000"),
        (0..u64::MAX, "50000"),
        (u64::MAX - row..u64::MAX, "50000"),
    ] {
        let error = start(&path, range.clone()).unwrap_err();
        assert!(error.to_string().contains(word) && error.to_string().contains("a.bin"), "{range:?}: {error}");
    }
    for missing in [folder.path().join("b.bin"), folder.path().into()] {
        let error = start(&missing, 0..row).unwrap_err();
        assert!(error.to_string().contains(&*missing.to_string_lossy()), "{error}");
    }
    let none: [(&str, std::ops::Range<u64>); 0] = [];
    let mut nothing = IngressPrefetcher::builder(&gpu.device, [4, ROW]).file_ranges::<u8, _>(none).unwrap();
    assert!(nothing.next().is_none());
    drop(nothing);
    gpu.finish();
}

/// A file that is changed, or cut, after it was opened; and a byte that is no `bool`: at the batch's position, and the others come.
#[test]
fn what_goes_wrong_later_is_the_batchs_error() {
    let gpu = Gpu::any(H200);
    let folder = tempfile::tempdir().unwrap();
    let (good, bad) = (folder.path().join("good"), folder.path().join("bad"));
    let mut flags = vec![1u8; 4 * ROW];
    std::fs::write(&good, &flags).unwrap();
    flags[ROW + 3] = 2;
    std::fs::write(&bad, &flags).unwrap();
    let row = ROW as u64;
    let ranges = [(&good, 0..row), (&bad, 0..4 * row), (&good, row..2 * row), (&bad, 2 * row..3 * row)];
    let mut batches: IngressPrefetcher<bool, Error> =
        IngressPrefetcher::builder(&gpu.device, [4, ROW]).depth(1).file_ranges(ranges).unwrap();
    assert_eq!(batches.next().unwrap().unwrap().rows(), 1);
    match batches.next().unwrap() {
        Err(IngressError::Source(error)) => assert!(error.is_invalid_input() && error.to_string().contains("503")),
        other => panic!("{other:?}"),
    }
    assert_eq!(batches.next().unwrap().unwrap().rows(), 1);
    assert_eq!(batches.next().unwrap().unwrap().rows(), 1);
    drop(batches);
    // Cut, and written to.
    let ranges = [(&good, 0..row), (&bad, 0..row)];
    for path in [&good, &bad] {
        [&good, &bad].iter().for_each(|path| std::fs::write(path, &flags).unwrap());
        let mut batches: IngressPrefetcher<u8, Error> =
            IngressPrefetcher::builder(&gpu.device, [1, ROW]).depth(1).file_ranges(ranges.clone()).unwrap();
        let file = std::fs::File::options().write(true).open(path).unwrap();
        match path == &good {
            true => file.set_len(row / 2).unwrap(),
            false => {
                let mut file = file;
                file.seek(std::io::SeekFrom::End(0)).unwrap();
                file.write_all(b"more").unwrap();
            }
        }
        let mut failed = batches.by_ref().filter_map(Result::err).map(|error| error.to_string());
        // The first batch may have been read before.
        let error = failed.next();
        drop(failed);
        batches.reset();
        let again: Vec<_> = batches.map(|batch| batch.map(drop).map_err(|error| error.to_string())).collect();
        assert_eq!(again.len(), 2);
        let (at, name) = if path == &good { (0, "good") } else { (1, "bad") };
        assert!(again[at].as_ref().is_err_and(|why| why.contains(name)), "{again:?}, before {error:?}");
    }
    gpu.finish();
}

/// More files than a process may have open: some are at a time. One that took the place of another meanwhile is not read for it, even if
/// it looks the same.
#[test]
#[cfg(target_os = "linux")]
fn of_many_files_some_are_open_at_a_time() {
    const FILES: usize = 150;
    let gpu = Gpu::any(H200);
    let folder = tempfile::tempdir().unwrap();
    let path = |number: usize| folder.path().join(number.to_string());
    for number in 0..FILES {
        std::fs::write(path(number), [number as u8; ROW]).unwrap();
    }
    let open = || {
        let all =
            std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        all.filter(|file| file.starts_with(folder.path())).count()
    };
    let ranges = (0..FILES).chain([0, 1]).map(|number| (path(number), 0..ROW as u64));
    let mut batches: IngressPrefetcher<u8, Error> =
        IngressPrefetcher::builder(&gpu.device, [1, ROW]).depth(1).file_ranges(ranges).unwrap();
    assert!(open() <= 65, "{} are open", open());
    for number in 0..FILES {
        if number == FILES - 1 {
            let time = std::fs::metadata(path(0)).unwrap().modified().unwrap();
            let other = folder.path().join("other");
            std::fs::write(&other, [7; ROW]).unwrap();
            std::fs::File::options().write(true).open(&other).unwrap().set_modified(time).unwrap();
            std::fs::rename(other, path(0)).unwrap();
            std::fs::remove_file(path(1)).unwrap();
        }
        let batch = batches.next().unwrap().unwrap();
        let there = gpu.stream.clone_dtoh(&batch.device(&gpu.stream).unwrap()).unwrap();
        assert!(there == [number as u8; ROW], "file {number}");
        assert!(open() <= 65, "{} are open", open());
    }
    for word in ["changed", "No such file"] {
        let error = batches.next().unwrap().unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    assert!(batches.next().is_none());
    drop(batches);
    assert_eq!(open(), 0);
    gpu.finish();
}

/// The threads of both kinds of pool run where they are told to.
#[test]
#[cfg(target_os = "linux")]
fn threads_run_on_the_cpus_that_were_named() {
    let gpu = Gpu::any(H200).keeping();
    let all = allowed();
    let first: usize = all.split(['-', ',']).next().unwrap().parse().unwrap();
    let pool: EgressPool<CudaSlice<u8>, String> =
        EgressPool::builder(&gpu.device).cpus([first]).consumer(|_: Output<HostTensor<u8>>| allowed()).unwrap();
    let slice = crate::egress::slice(&gpu, 1);
    assert_eq!(pool.submit(slice).unwrap().wait_timeout(HANG).unwrap(), first.to_string());
    let mut batches = IngressPrefetcher::builder(&gpu.device, [1, 100])
        .cpus([first])
        .items(|| std::iter::once(Ok::<_, ()>(format!("{:<100}", allowed()).into_bytes())))
        .unwrap();
    let batch = batches.next().unwrap().unwrap();
    assert!(batch.host().unwrap().starts_with(format!("{first} ").as_bytes()));
    drop((batch, batches, pool));
    for cpus in [vec![], vec![1 << 20], vec![first, 1023]] {
        let builder = EgressPool::builder(&gpu.device).cpus(cpus.clone());
        let error = builder.tickets::<CudaSlice<u8>>().map(drop).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains(&format!("{cpus:?}")), "{error}");
        let builder = IngressPrefetcher::builder(&gpu.device, [1, 1]).cpus(cpus.clone());
        let error = builder.fill(|_, _: &mut [u8]| Ok::<_, ()>(0)).map(drop).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains(&format!("{cpus:?}")), "{error}");
    }
    let named = EgressPool::builder(&gpu.device).name("a\0b").tickets::<CudaSlice<u8>>();
    assert!(named.is_err_and(|error| error.to_string().contains("NUL")));
    assert_eq!(allowed(), all);
    gpu.finish();
}

/// The CPUs that the calling thread may run on.
#[cfg(target_os = "linux")]
fn allowed() -> String {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
}
