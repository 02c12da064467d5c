//! The pure part: from samples to figures.

use proptest::prelude::*;

use super::evaluate::{CHUNKS, Contest, Evaluated, Sample, Samples, Staged, THREADS, evaluate};
use super::*;
use crate::plan::Tuning;
use crate::platform::Ceiling;

const MIB: usize = 1 << 20;

fn ceiling(gbs: f64) -> Ceiling {
    Ceiling { gbs, why: format!("the link carries at most {gbs} GB/s") }
}

fn built_in() -> Tuning {
    Tuning::built_in(16)
}

fn at(bytes: usize, gbs: f64) -> Sample {
    Sample { bytes, seconds: bytes as f64 / gbs * 1e-9 }
}

fn staged(chunk: usize, threads: usize, up: f64, down: f64) -> Staged {
    let bytes = 256 * MIB;
    Staged { chunk, threads, up: vec![at(bytes, up); 2], down: vec![at(bytes, down); 2] }
}

/// Such as an H200 in a PCIe 5 slot, with 16 cores, might give: rates in GB/s, pageable copies by size.
fn h200() -> Samples {
    let contest = |bytes: usize, driver: f64, ours: f64| {
        let seconds = |gbs: f64| vec![at(bytes, gbs).seconds; 5];
        Contest { bytes, alone: seconds(driver), together: seconds(ours) }
    };
    let contests = || {
        vec![
            contest(64 << 10, 3.5, 1.5),
            contest(256 << 10, 8.0, 5.0),
            contest(MIB, 11.2, 14.0),
            contest(4 * MIB, 12.0, 25.0),
            contest(16 * MIB, 12.3, 40.0),
        ]
    };
    Samples {
        up: vec![at(32 * MIB, 2.0), at(32 * MIB, 54.9), at(32 * MIB, 55.0), at(32 * MIB, 55.1), at(32 * MIB, 55.0)],
        down: vec![at(32 * MIB, 54.8); 7],
        both: vec![at(256 * MIB, 95.0); 5],
        small: vec![2.6e-6; 9],
        latency_up: vec![8.8e-6, 9e-6, 8.7e-6, 400e-6, 8.8e-6],
        latency_down: vec![7.7e-6; 5],
        driver_up: vec![at(16 * MIB, 12.3); 3],
        driver_down: vec![at(16 * MIB, 11.8); 3],
        memcpy: vec![(1, vec![at(32 * MIB, 9.9); 2]), (8, vec![at(128 * MIB, 60.0); 2])],
        staged: vec![
            staged(2 * MIB, 1, 7.9, 7.5),
            staged(2 * MIB, 4, 29.0, 45.7),
            staged(2 * MIB, 8, 50.8, 48.7),
            staged(2 * MIB, 12, 50.5, 50.4),
            staged(2 * MIB, 16, 49.5, 51.3),
            staged(MIB, 12, 44.0, 44.0),
            staged(4 * MIB, 12, 50.4, 50.3),
        ],
        contest_up: contests(),
        contest_down: contests(),
        notes: Vec::new(),
    }
}

#[test]
fn an_h200_is_recognised_from_its_samples() {
    let found = evaluate(&h200(), &ceiling(63.0), built_in());
    assert!((found.up.unwrap() - 55.0).abs() < 0.2, "one slow sample does not count: {found:?}");
    assert_eq!(found.both.unwrap().round(), 95.0);
    assert!((found.latency_up.unwrap() - 8.8e-6).abs() < 1e-9);
    // Twelve threads are a little faster than eight; eight leave four CPUs to others.
    assert_eq!((found.tuning.threads, found.tuning.chunk), (8, 2 * MIB));
    assert_eq!((found.tuning.crossover_up, found.tuning.crossover_down), (MIB, MIB));
    assert_eq!((found.staged_up.unwrap().round(), found.driver_up.unwrap().round()), (51.0, 12.0));
    assert!(found.notes.is_empty(), "{:?}", found.notes);
}

#[test]
fn one_odd_sample_does_not_move_the_crossover_far() {
    let mut samples = h200();
    // An interrupt during ours at 16 MiB, and a lucky one at 64 KiB.
    samples.contest_up[4].together = vec![at(16 * MIB, 11.9).seconds; 5];
    samples.contest_up[0].together = vec![at(64 << 10, 3.6).seconds; 5];
    assert_eq!(evaluate(&samples, &ceiling(63.0), built_in()).tuning.crossover_up, MIB);
    // Ours is never better: never take it. Always better: from the smallest size on.
    for contest in &mut samples.contest_up {
        contest.together = vec![1.0; 5];
    }
    for contest in &mut samples.contest_down {
        contest.together = vec![1e-7; 5];
    }
    let tuning = evaluate(&samples, &ceiling(63.0), built_in()).tuning;
    assert_eq!((tuning.crossover_up, tuning.crossover_down), (usize::MAX, 64 << 10));
}

#[test]
fn nothing_measured_keeps_what_was_built_in() {
    let found = evaluate(&Samples::default(), &ceiling(63.0), built_in());
    assert_eq!(found.tuning, built_in());
    assert_eq!((found.up, found.staged_up, found.latency_up), (None, None, None));
    assert!(found.memcpy.is_empty());
}

/// R97.
#[test]
fn rates_that_the_link_can_not_carry_are_cut_and_said() {
    let found = evaluate(&h200(), &ceiling(31.5), built_in());
    assert_eq!((found.up, found.down, found.staged_up, found.both), (Some(31.5), Some(31.5), Some(31.5), Some(63.0)));
    let said = |what: &str| found.notes.iter().any(|note| note.starts_with(what) && note.contains("31.5"));
    assert!(said("copy to the device") && said("copy to the host") && said("copy from pageable"), "{:?}", found.notes);
    assert!(found.notes.iter().any(|note| note.starts_with("both directions") && note.contains("63.0")));
}

fn calibration(found: Evaluated) -> Calibration {
    Calibration {
        device: "test".into(),
        gpu_uuid: "ab".into(),
        driver: "580_13000".into(),
        crate_version: env!("CARGO_PKG_VERSION").into(),
        unix_time: 1,
        took_seconds: 0.3,
        topology: Topology::default(),
        host_to_device: found.up.unwrap(),
        device_to_host: found.down.unwrap(),
        both_ways: found.both,
        small_copy: found.small,
        latency_to_device: found.latency_up,
        latency_to_host: found.latency_down,
        pageable_to_device: found.staged_up,
        device_to_pageable: found.staged_down,
        driver_pageable_to_device: found.driver_up,
        driver_device_to_pageable: found.driver_down,
        memcpy: found.memcpy,
        tuning: found.tuning,
        notes: found.notes,
        cached_in: None,
    }
}

#[test]
fn figures_take_what_was_measured_and_scale_the_rest() {
    let base = Figures::built_in(MemoryModel::Discrete, Some((9, 0)));
    let as_published = calibration(evaluate(&h200(), &ceiling(63.0), built_in()));
    let figures = as_published.figures(&base, MemoryModel::Discrete);
    assert_eq!(figures.read_in_place, base.read_in_place, "the link is as published, and so is this");
    assert_eq!((figures.host_copy.gbs.round(), figures.host_copy.assumed), (10.0, false));
    // The same GPU in a slot with half the lanes.
    let slow = calibration(evaluate(&h200(), &ceiling(31.5), built_in()));
    let figures = slow.figures(&base, MemoryModel::Discrete);
    assert_eq!((figures.host_to_device, figures.copy_latency), (Rate::known(31.5), 2.6e-6));
    assert!((figures.read_in_place.pinned.gbs - 51.1 * 31.5 / 55.3).abs() < 0.1);
    assert!(figures.read_in_place.pinned.assumed);
    // In one memory nothing in place goes over a link.
    let base = Figures::built_in(MemoryModel::Unified, None);
    assert_eq!(slow.figures(&base, MemoryModel::Unified).read_in_place, base.read_in_place);
}

#[test]
fn words_of_the_environment() {
    assert_eq!([None, Some(""), Some(" 0 "), Some("off")].map(Wish::parse), [const { Wish::No }; 4]);
    assert_eq!([Some("1"), Some("TRUE"), Some(" on\n")].map(Wish::parse), [const { Wish::Yes }; 3]);
    assert_eq!(Wish::parse(Some("Force")), Wish::Force);
    assert_eq!(Wish::parse(Some("2")), Wish::Unknown("2".into()));
}

#[cfg(feature = "serde")]
#[test]
fn a_kept_calibration_is_taken_back_only_if_it_is_sound() {
    use serde_json::Value;

    let folder = tempfile::tempdir().unwrap();
    let key = Key::new(Some("ab"), "580_13000".into()).unwrap();
    let link = ceiling(63.0);
    let load = || cache::load(folder.path(), &key, &link);
    assert_eq!(load(), None, "there is no file yet");
    let kept = calibration(evaluate(&h200(), &link, built_in()));
    cache::store(folder.path(), &key, &kept).unwrap();
    let path = folder.path().join(concat!("ab-580_13000-", env!("CARGO_PKG_VERSION"), ".json"));
    let same = Calibration { cached_in: Some(path.clone()), ..kept };
    assert_eq!(load(), Some(same.clone()));

    let good = std::fs::read_to_string(&path).unwrap();
    let value: Value = serde_json::from_str(&good).unwrap();
    let changed = |pointer: &str, to: Value| {
        let mut value = value.clone();
        *value.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = to;
        value.to_string()
    };
    let rate = format!("\"host_to_device\": {}", value["host_to_device"]);
    assert!(good.contains(&rate));
    let bad = [
        String::new(),
        "null".into(),
        "[1, 2]".into(),
        "{}".into(),
        good[..good.len() / 2].into(),
        good.clone() + "}",
        "\0\u{feff}rubbish".into(),
        "[".repeat(100_000),
        " ".repeat(2 << 20) + &good,
        changed("/host_to_device", (-1.0).into()),
        changed("/host_to_device", 0.into()),
        changed("/host_to_device", 1e300.into()),
        changed("/host_to_device", Value::Null),
        changed("/host_to_device", "55".into()),
        // More than the link carries (R97).
        changed("/host_to_device", 12_500.0.into()),
        changed("/pageable_to_device", 1e9.into()),
        changed("/both_ways", (-5.0).into()),
        changed("/latency_to_device", 1e300.into()),
        changed("/took_seconds", (-1.0).into()),
        changed("/memcpy/0/gbs", (-1.0).into()),
        changed("/memcpy/0/threads", 0.into()),
        changed("/tuning/chunk", 0.into()),
        changed("/tuning/chunk", u64::MAX.into()),
        changed("/tuning/threads", 0.into()),
        changed("/tuning/threads", 1_000_000.into()),
        changed("/gpu_uuid", "cd".into()),
        changed("/driver", "1".into()),
        changed("/crate_version", "0.0.0".into()),
        good.replace(&rate, "\"host_to_device\": NaN"),
        good.replace(&rate, "\"host_to_device\": 1e999"),
    ];
    for bad in bad {
        std::fs::write(&path, &bad).unwrap();
        let what: String = bad.chars().take(300).collect();
        assert_eq!(load(), None, "{what}");
    }
    std::fs::write(&path, [0xFF, 0xFE, 0]).unwrap();
    assert_eq!(load(), None);
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert_eq!(load(), None);
    assert!(cache::store(folder.path(), &key, &same).is_err(), "a folder is in the way");
    std::fs::remove_dir(&path).unwrap();
    cache::store(folder.path(), &key, &same).unwrap();
    assert_eq!(load(), Some(same));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file was left");
}

#[test]
fn what_the_driver_says_stays_within_the_folder() {
    let folder = std::path::Path::new("/cache");
    let key = Key::new(Some("../../etc/passwd"), "/580/..".into()).unwrap();
    assert_eq!(cache::path(folder, &key).parent(), Some(folder));
    let long = Key::new(Some(&"x".repeat(10_000)), String::new()).unwrap();
    assert!(cache::path(folder, &long).as_os_str().len() < 255);
    assert_eq!(Key::new(Some(""), "580".into()), None);
}

/// Times that a clock, or a broken one, may give.
fn seconds() -> impl Strategy<Value = f64> {
    prop_oneof![
        1e-9..1e-1f64,
        Just(0.0),
        Just(-1.0),
        Just(f64::NAN),
        Just(f64::INFINITY),
        Just(f64::MIN_POSITIVE),
        Just(1e300),
    ]
}

prop_compose! {
    fn any_sample()(bytes in prop_oneof![0usize..1 << 30, Just(usize::MAX)], seconds in seconds()) -> Sample {
        Sample { bytes, seconds }
    }
}

fn list<T: std::fmt::Debug>(of: impl Strategy<Value = T>) -> impl Strategy<Value = Vec<T>> {
    proptest::collection::vec(of, 0..6)
}

prop_compose! {
    fn any_contest()(bytes in 0usize..1 << 30, alone in list(seconds()), together in list(seconds())) -> Contest {
        Contest { bytes, alone, together }
    }
}

prop_compose! {
    fn any_staged()(
        chunk in prop_oneof![0usize..1 << 27, Just(usize::MAX)], threads in 0usize..1000,
        up in list(any_sample()), down in list(any_sample()),
    ) -> Staged {
        Staged { chunk, threads, up, down }
    }
}

prop_compose! {
    fn any_samples()(
        links in proptest::array::uniform5(list(any_sample())),
        latencies in proptest::array::uniform3(list(seconds())),
        memcpy in list((0usize..1000, list(any_sample()))),
        staged in list(any_staged()),
        contests in proptest::array::uniform2(list(any_contest())),
    ) -> Samples {
        let [up, down, both, driver_up, driver_down] = links;
        let [small, latency_up, latency_down] = latencies;
        let [contest_up, contest_down] = contests;
        Samples {
            up, down, both, small, latency_up, latency_down, driver_up, driver_down, memcpy, staged, contest_up, contest_down,
            notes: Vec::new(),
        }
    }
}

proptest! {
    #[test]
    fn no_samples_make_absurd_figures(samples in any_samples(), limit in 0.1..500f64) {
        let found = evaluate(&samples, &ceiling(limit), built_in());
        let within = |figure: Option<f64>, most: f64| figure.is_none_or(|n| n.is_finite() && n > 0.0 && n <= most);
        for rate in [found.up, found.down, found.staged_up, found.staged_down, found.driver_up, found.driver_down] {
            prop_assert!(within(rate, limit), "{found:?}");
        }
        prop_assert!(within(found.both, 2.0 * limit));
        prop_assert!(within(found.small, 1.0) && within(found.latency_up, 1.0) && within(found.latency_down, 1.0));
        prop_assert!(found.memcpy.iter().all(|scaling| scaling.threads > 0 && within(Some(scaling.gbs), 4000.0)));
        prop_assert!(CHUNKS.contains(&found.tuning.chunk) && THREADS.contains(&found.tuning.threads));
        // Whatever comes out can be kept and is taken back.
        #[cfg(feature = "serde")]
        if found.up.is_some() && found.down.is_some() {
            let made = calibration(found);
            let text = serde_json::to_string(&made).unwrap();
            let read: Calibration = serde_json::from_str(&text).unwrap();
            let key = Key::new(Some("ab"), "580_13000".into()).unwrap();
            prop_assert!(read.is_sound(&key, &ceiling(limit)), "{text}");
            prop_assert!(!read.is_sound(&Key::new(Some("cd"), "580_13000".into()).unwrap(), &ceiling(limit)));
        }
    }

    /// A faster link never gives lower figures, and what is measured comes out.
    #[test]
    fn rates_follow_the_samples(gbs in 0.1..60f64, faster in 1.0..1.5f64) {
        let of = |gbs: f64| {
            let mut samples = h200();
            samples.up = vec![at(32 * MIB, gbs); 7];
            evaluate(&samples, &ceiling(63.0), built_in()).up.unwrap()
        };
        prop_assert!((of(gbs) / gbs - 1.0).abs() < 1e-6);
        prop_assert!(of(gbs * faster) >= of(gbs) - 1e-9);
    }

    /// The slower the driver is, the earlier our way is taken.
    #[test]
    fn the_crossover_falls_as_one_thread_slows(slower in 1.0..20f64, much in 1.0..20f64) {
        let of = |factor: f64| {
            let mut samples = h200();
            for contest in &mut samples.contest_up {
                contest.alone.iter_mut().for_each(|seconds| *seconds *= factor);
            }
            evaluate(&samples, &ceiling(63.0), built_in()).tuning.crossover_up
        };
        prop_assert!(of(slower * much) <= of(slower));
    }
}
