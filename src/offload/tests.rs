//! The talk's worked example, field reports, and what holds for any workload.

use proptest::prelude::*;

use super::choose::Share;
use super::ring::{LayerOrder, Ring};
use super::{Batch, Bound, Checkpointing, Fractions, Verdict, Workload, WorkloadLayer, pinned_budget};
use crate::platform::{Attributes, Platform};

const GB: u64 = 1_000_000_000;

/// A machine of the given attributes. The driver tells no bandwidths; those are built in.
fn machine(bytes: u64, attributes: Attributes) -> Platform {
    Platform::from_attributes("a machine", bytes, attributes)
}

fn grace_hopper() -> Platform {
    let attributes = Attributes {
        pageable_memory_access: Some(1),
        pageable_memory_access_uses_host_page_tables: Some(1),
        concurrent_managed_access: Some(1),
        host_register_supported: Some(1),
        compute_capability_major: Some(9),
        compute_capability_minor: Some(0),
        ..Attributes::default()
    };
    machine(102 * GB, attributes)
}

fn discrete(bytes: u64) -> Platform {
    let attributes = Attributes {
        integrated: Some(0),
        can_map_host_memory: Some(1),
        host_register_supported: Some(1),
        compute_capability_major: Some(9),
        compute_capability_minor: Some(0),
        ..Attributes::default()
    };
    machine(bytes, attributes)
}

/// Llama 2 70B on one Grace Hopper, as the talk has it.
fn talk() -> Workload {
    let mut workload = Workload::new(72 * GB, 21 * GB, 0.096).batch(4.0, 2.0 * 0.096).batch(2.0, 2.0 * 0.096 / 1.4);
    workload.activations_in_dram = Some(15 * GB);
    workload.link_gbs = Some(450.0);
    workload
}

fn near(found: f64, expected: f64, what: &str) {
    assert!((found / expected - 1.0).abs() < 0.01, "{what}: {found}, not {expected}");
}

#[test]
fn the_talks_figures() {
    let (workload, platform) = (talk(), grace_hopper());
    let advice = workload.advise(&platform).unwrap();
    near(advice.own_gbs, 1062.5, "own traffic");
    assert!(advice.headroom_gbs > 1000.0, "room on 4 TB/s: {}", advice.headroom_gbs);
    assert_eq!(advice.link_gbs, 450.0, "{:?}", advice.link);
    let weigh = |times, seconds, weights| {
        workload.weigh(&platform, Batch { times, seconds }, Fractions::of_weights(weights), false).unwrap()
    };
    near(weigh(1.0, 0.096, 1.0).needed_gbs, 1500.0, "naive");
    let four = weigh(4.0, 0.192, 1.0);
    near(four.needed_gbs, 750.0, "four times the batch in twice the time");
    assert_eq!(four.step.bound(), Bound::Link);
    near(four.gain, 1.2, "net");
    let third = weigh(2.0, 2.0 * 0.096 / 1.4, 1.0 / 3.0);
    near(third.needed_gbs, 350.0, "a third");
    assert_eq!(third.step.bound(), Bound::Compute);
    near(third.gain, 1.4, "all of it");
    assert_eq!(advice.verdict, Verdict::Offload, "{advice}");
    // With the rates that such machines were measured to have.
    let mut measured = talk();
    measured.link_gbs = None;
    let found = measured.advise(&platform).unwrap();
    assert!(found.verdict == Verdict::Offload && (1.2..=1.7).contains(&found.gain), "{found}");
    let text = advice.to_string();
    for figure in ["1062.5 GB/s", "1500.0 GB/s of 450.0", "72.0 GB", "2 x 15.0 GB", "96.000 ms"] {
        assert!(text.contains(figure), "{figure} is not in\n{text}");
    }
}

/// On a machine with a slow link the same: do not.
#[test]
fn a_slow_link_is_no_place_for_weights() {
    let mut workload = talk();
    workload.link_gbs = Some(55.0);
    for bytes in [100 * GB, 141 * GB] {
        let advice = workload.advise(&discrete(bytes)).unwrap();
        assert_eq!(advice.verdict, Verdict::Resident, "{advice}");
        assert_eq!(advice.fraction, 0.0);
        near(advice.needed_gbs, 1500.0, "what it would need");
    }
}

#[test]
fn one_memory_has_nowhere_to_move_to() {
    let attributes = Attributes { integrated: Some(1), can_map_host_memory: Some(1), ..Attributes::default() };
    let advice = talk().advise(&machine(120 * GB, attributes)).unwrap();
    assert_eq!((advice.verdict, advice.fraction), (Verdict::Resident, 0.0), "{advice}");
    assert!(advice.to_string().contains("one memory") && advice.considered.iter().all(|choice| choice.host_bytes == 0));
}

/// R95: both times are told, and that overlapping is no gain over what is resident.
#[test]
fn serial_and_overlapped_are_both_told() {
    let mut workload = Workload::new(46_200_000, 0, 0.0306);
    (workload.weight_passes, workload.link_gbs) = (Some(1), Some(1.0));
    let platform = discrete(8 * GB);
    let all =
        workload.weigh(&platform, Batch { times: 1.0, seconds: 0.0306 }, Fractions::of_weights(1.0), false).unwrap();
    near(all.step.serial(), 0.0768, "one after the other");
    near(all.step.overlapped(), 0.0462, "at once");
    let advice = workload.advise(&platform).unwrap();
    assert_eq!((advice.verdict, advice.gain), (Verdict::Resident, 1.0), "{advice}");
    let text = advice.to_string();
    assert!(text.contains("46.200 ms at once (76.800 ms one after another)"), "{text}");
}

/// R96: computing is too short to hide a copy.
#[test]
fn what_computes_for_too_short_is_bound_by_the_link() {
    let mut workload = Workload::new(100_000, 0, 19e-6);
    (workload.weight_passes, workload.link_gbs) = (Some(1), Some(1.0));
    let platform = discrete(8 * GB);
    let all =
        workload.weigh(&platform, Batch { times: 1.0, seconds: 19e-6 }, Fractions::of_weights(1.0), false).unwrap();
    assert_eq!(all.step.bound(), Bound::Link);
    let advice = workload.advise(&platform).unwrap();
    assert_eq!(advice.verdict, Verdict::Resident, "{advice}");
    assert!(advice.to_string().contains("bound by the link"), "{advice}");
}

/// R97: a link that is faster than any is cut, and one that others use is less.
#[test]
fn a_link_is_no_faster_than_it_can_be() {
    let mut workload = talk();
    workload.link_gbs = Some(12_500.0);
    let platform = discrete(96 * GB);
    let advice = workload.advise(&platform).unwrap();
    assert!(advice.link_gbs < 300.0, "{}", advice.link_gbs);
    assert!(advice.warnings.iter().any(|line| line.contains("12500")), "{advice}");
    workload.link_share = Some(0.5);
    near(workload.advise(&platform).unwrap().link_gbs, advice.link_gbs / 2.0, "half of the link");
}

/// R99: what fits stays; and no more is page-locked than the host can spare.
#[test]
fn what_fits_stays_and_the_host_keeps_a_reserve() {
    let advice = Workload::new(10 * GB, 2 * GB, 0.01).advise(&discrete(24 * GB)).unwrap();
    assert_eq!((advice.verdict, advice.gain), (Verdict::Resident, 1.0), "{advice}");
    const GIB: u64 = 1 << 30;
    assert_eq!(pinned_budget(28 * GIB, 64 * GIB, 30 * GIB, 8 * GIB), 22 * GIB);
    assert_eq!(pinned_budget(28 * GIB, 16 * GIB, 30 * GIB, 8 * GIB), 16 * GIB);
    assert_eq!(pinned_budget(28 * GIB, 64 * GIB, 4 * GIB, 8 * GIB), 0);
    assert_eq!(pinned_budget(1, 2, u64::MAX, 0), 1);
}

#[test]
fn recomputing_is_weighed_too() {
    let mut workload = Workload::new(20 * GB, 20 * GB, 0.1).batch(2.0, 0.13);
    workload.checkpointing = Some(Checkpointing { forward: 0.033, frees: 16 * GB });
    workload.link_gbs = Some(5.0);
    let advice = workload.advise(&discrete(48 * GB)).unwrap();
    // 2 x 0.1 / (0.13 x 1.33) against 2 x 0.1 / 2.4 s over the link.
    assert_eq!(advice.verdict, Verdict::Checkpoint, "{advice}");
    near(advice.gain, 2.0 * 0.1 / (0.13 * 1.33), "with more to compute");
    // A model that fits in no other way.
    let mut large = workload.clone();
    large.weights = 60 * GB;
    assert_eq!(large.advise(&discrete(48 * GB)).unwrap().verdict, Verdict::Both);
    large.checkpointing = None;
    assert_eq!(large.advise(&discrete(48 * GB)).unwrap().verdict, Verdict::Offload);
    large.other = 100 * GB;
    let advice = large.advise(&discrete(48 * GB)).unwrap();
    assert_eq!((advice.verdict, advice.gain), (Verdict::DoesNotFit, 0.0), "{advice}");
    assert!(advice.choice.is_none() && advice.considered.is_empty());
}

#[test]
fn what_can_not_be_is_refused_by_name() {
    let platform = discrete(8 * GB);
    let refused = |change: fn(&mut Workload), names: &str| {
        let mut workload = talk();
        change(&mut workload);
        let error = workload.advise(&platform).unwrap_err();
        assert!(error.is_invalid_input() && error.to_string().contains(names), "{error}");
    };
    refused(|w| w.activations_in_dram = Some(22 * GB), "22000000000");
    refused(|w| w.seconds = 0.0, "seconds: 0");
    refused(|w| w.seconds = f64::NAN, "NaN");
    refused(|w| w.weight_passes = Some(0), "weight_passes");
    refused(|w| w.other = u64::MAX, "64 bits");
    refused(|w| w.batches[0].times = -1.0, "-1");
    refused(|w| w.batches[0].seconds = f64::INFINITY, "inf");
    refused(|w| w.batches.push(Batch { times: 2.0, seconds: 1.0 }), "2 times");
    refused(|w| w.batches.push(Batch { times: 1.0, seconds: 1.0 }), "0.096 s, and 1 s");
    assert!(talk().batch(1.0, 0.096).advise(&platform).is_ok());
    refused(|w| w.link_gbs = Some(0.0), "link_gbs");
    refused(|w| w.link_share = Some(1.5), "1.5");
    refused(|w| w.device_bytes = Some(0), "device_bytes");
    refused(|w| w.checkpointing = Some(Checkpointing { forward: 1.0, frees: 1 }), "forward");
    refused(|w| w.checkpointing = Some(Checkpointing { forward: 0.01, frees: 22 * GB }), "frees");
    let batch = Batch { times: 1.0, seconds: 1.0 };
    let error = talk().weigh(&platform, batch, Fractions::of_weights(1.1), false).unwrap_err();
    assert!(error.is_invalid_input() && error.to_string().contains("1.1"), "{error}");
}

fn workloads() -> impl Strategy<Value = Workload> {
    let bytes = || 0..200 * GB;
    let batches = prop::collection::vec((0.1..64.0f64, 1e-4..100.0f64), 0..4);
    let checkpointing = prop::option::of((0.01..0.99f64, 0.0..=1.0f64));
    (bytes(), bytes(), 0.0..=1.0f64, bytes(), bytes(), 0..50 * GB, 1e-4..10.0f64, 1..4u32, batches, checkpointing)
        .prop_map(
            |(weights, activations, dram, kv_cache, optimizer, other, seconds, passes, batches, checkpointing)| {
                let mut workload = Workload::new(weights, activations, seconds);
                workload.activations_in_dram = Some((activations as f64 * dram) as u64);
                (workload.kv_cache, workload.optimizer, workload.other) = (kv_cache, optimizer, other);
                workload.weight_passes = Some(passes);
                workload.batches = batches.into_iter().map(|(times, seconds)| Batch { times, seconds }).collect();
                workload.checkpointing = checkpointing.map(|(forward, frees)| Checkpointing {
                    forward: forward * seconds,
                    frees: (activations as f64 * frees) as u64,
                });
                workload
            },
        )
}

proptest! {
    /// Any workload gets an answer, and the answer keeps to its own arithmetic.
    #[test]
    fn the_answer_keeps_to_its_arithmetic(workload in workloads(), device in 1..200 * GB) {
        let advice = workload.advise(&discrete(device)).unwrap();
        prop_assert_eq!(advice.choice.is_none(), advice.verdict == Verdict::DoesNotFit);
        for choice in &advice.considered {
            prop_assert!(choice.device_bytes <= device);
            prop_assert!(choice.gain.is_finite() && choice.gain >= choice.serial_gain);
            // No step is shorter than its longest part.
            let most = choice.batch * workload.seconds / choice.step.compute.max(choice.step.link);
            prop_assert!(choice.gain <= most * (1.0 + 1e-9));
            // What is chosen is the best, but for the hundredth that what is simpler may be worse, three times.
            prop_assert!(choice.gain <= advice.gain * 1.04);
        }
        if let Some(choice) = &advice.choice {
            prop_assert!(advice.considered.contains(choice) && choice.gain == advice.gain);
            prop_assert_eq!(advice.fraction == 0.0, choice.host_bytes == 0);
            prop_assert_eq!(matches!(advice.verdict, Verdict::Resident | Verdict::Checkpoint), choice.host_bytes == 0);
        }
        prop_assert_eq!(advice.curve.len(), 33);
        prop_assert!(!advice.to_string().is_empty());
    }

    #[test]
    fn a_faster_link_is_no_worse(workload in workloads(), device in 1..200 * GB, slow in 0.1..60.0f64, more in 1.0..10.0f64) {
        let at = |gbs: f64| {
            let mut workload = workload.clone();
            workload.link_gbs = Some(gbs);
            workload.advise(&discrete(device)).unwrap().gain
        };
        prop_assert!(at(slow * more) >= at(slow) * (1.0 - 1e-9));
    }

    /// Nothing moved is what is resident, whatever the link.
    #[test]
    fn no_fraction_is_resident(workload in workloads(), gbs in 0.001..100.0f64) {
        let mut workload = workload;
        workload.link_gbs = Some(gbs);
        let choice = workload.weigh(&discrete(GB), workload.own(), Fractions::default(), false).unwrap();
        prop_assert_eq!((choice.gain, choice.serial_gain, choice.up_bytes, choice.down_bytes), (1.0, 1.0, 0, 0));
    }
}

/// The talk's workload by layers: a third of them, and a step that is no longer for it.
#[test]
fn layers_are_chosen_with_room_for_those_in_use() {
    let mut workload = talk();
    workload.batches.retain(|batch| batch.times == 2.0);
    workload.layers = vec![WorkloadLayer { weights: GB * 72 / 80, seconds: 0.096 / 80.0 }; 80];
    let advice = workload.advise(&grace_hopper()).unwrap();
    let (choice, layers) = (advice.choice.clone().unwrap(), advice.layers.clone().unwrap());
    let needed = (72.0 * GB as f64 * choice.fractions.weights) as u64;
    assert!(layers.saved_bytes >= needed && layers.saved_bytes < needed + 2 * GB, "{layers:?} for {needed}");
    assert!((1..=3).contains(&layers.depth), "{layers:?}");
    near(layers.seconds, choice.step.overlapped(), "by layers");
    assert!(advice.to_string().contains("by layers:"), "{advice}");
    // Layers that are not all of the weights may not be enough.
    workload.layers.truncate(5);
    assert_eq!(workload.advise(&grace_hopper()).unwrap().layers, None);
    workload.layers = vec![WorkloadLayer { weights: 73 * GB, seconds: 0.01 }];
    assert!(workload.advise(&grace_hopper()).unwrap_err().to_string().contains("layers"));
    workload.layers = vec![WorkloadLayer { weights: GB, seconds: 0.2 }];
    assert!(workload.advise(&grace_hopper()).unwrap_err().to_string().contains("0.2"));
}

/// One slot: a layer's copy waits for the work on the one before, and the step takes both.
#[test]
fn with_one_slot_nothing_overlaps_where_all_layers_move() {
    // What does not fit is almost everything; no room for a second slot.
    let mut workload = Workload::new(10 * GB, 0, 0.1);
    workload.weight_passes = Some(1);
    workload.link_gbs = Some(50.0);
    workload.device_bytes = Some(GB);
    workload.layers = vec![WorkloadLayer { weights: GB, seconds: 0.01 }; 10];
    let layers = workload.advise(&discrete(GB)).unwrap().layers.unwrap();
    assert_eq!((layers.depth, layers.layers.len()), (1, 10));
    near(layers.seconds, 10.0 * (0.02 + 0.01), "serial");
    workload.device_bytes = Some(2 * GB);
    let layers = workload.advise(&discrete(2 * GB)).unwrap().layers.unwrap();
    assert_eq!(layers.depth, 2);
    near(layers.seconds, 10.0 * 0.02, "bound by the link");
}

proptest! {
    /// Layers by a fraction: within half of the largest of it, and evenly: any part of the model has its share, too.
    #[test]
    fn a_fraction_is_spread_evenly(bytes in prop::collection::vec(0..1000u64, 0..60), fraction in 0.0..=1.0f64) {
        let chosen = Share::Fraction(fraction).choose(&bytes).unwrap();
        let largest = bytes.iter().copied().max().unwrap_or(0) as f64;
        let (mut seen, mut moved) = (0.0, 0.0);
        for (bytes, chosen) in bytes.iter().zip(&chosen) {
            seen += *bytes as f64;
            moved += if *chosen { *bytes as f64 } else { 0.0 };
            prop_assert!((moved - fraction * seen).abs() <= largest / 2.0 + 1e-6, "{moved} of {seen}");
            prop_assert!(*bytes > 0 || !chosen);
        }
    }

    /// However layers are asked for: who is in use is in a slot, nobody is in two, what comes next is there, and nobody makes room for himself.
    #[test]
    fn the_ring_holds_what_is_used_and_what_comes_next(
        moves in prop::collection::vec(any::<bool>(), 1..12),
        listed in prop::collection::vec(0..12usize, 0..20),
        which in 0..3u8,
        slots in 1..5usize,
        asked in prop::collection::vec((0..12usize, any::<bool>()), 0..60),
    ) {
        let layers = moves.len();
        let order = match which {
            0 => LayerOrder::Forward,
            1 => LayerOrder::ForwardBackward,
            _ => LayerOrder::Explicit(listed.into_iter().filter(|layer| *layer < layers).collect()),
        };
        let list = order.list(layers);
        let mut ring = Ring::new(list.clone(), moves.clone(), slots);
        let mut at = None;
        for (other, next) in asked {
            // Mostly what comes next.
            let following = at.map_or(0, |at: usize| at + 1) % list.len().max(1);
            let layer = if next { list.get(following).copied().unwrap_or(0) } else { other % layers };
            ring.ask(layer);
            let first = at.map_or(0, |at: usize| at + 1);
            at = (first..first + list.len()).map(|at| at % list.len()).find(|&at| list[at] == layer).or(at);
            let wanted = ring.wanted(layer);
            prop_assert!(wanted.len() <= slots);
            prop_assert_eq!(wanted.first() == Some(&layer), moves[layer]);
            prop_assert!(wanted.iter().all(|layer| moves[*layer]));
            // The next one that moves, if there is room for it beside the one in use.
            let from = at.map_or(0, |at| at + 1);
            let coming = (from..from + list.len()).map(|at| list[at % list.len()]).find(|next| moves[*next] && *next != layer);
            if let Some(coming) = coming.filter(|_| slots > usize::from(moves[layer])) {
                prop_assert!(wanted.contains(&coming));
            }
            for wants in wanted.clone() {
                if ring.slot_of(wants).is_none() {
                    let slot = ring.room(&wanted).unwrap();
                    prop_assert!(ring.layer_in(slot).is_none_or(|layer| !wanted.contains(&layer)));
                    ring.put(slot, Some(wants));
                }
            }
            let inside: Vec<usize> = (0..slots).filter_map(|slot| ring.layer_in(slot)).collect();
            prop_assert!(wanted.iter().all(|layer| inside.iter().filter(|other| *other == layer).count() == 1));
            let mut once = inside.clone();
            once.sort_unstable();
            once.dedup();
            prop_assert_eq!(once.len(), inside.len());
        }
    }

    /// By layers no step is shorter than its work or its copies, nor longer than both one after another.
    #[test]
    fn a_step_of_layers_is_between_its_bounds(
        layers in prop::collection::vec((1..4 * GB, 1e-4..0.01f64), 1..20),
        passes in 1..4u32,
        gbs in 1.0..100.0f64,
        fits in 0.0..1.0f64,
    ) {
        let weights = layers.iter().map(|(bytes, _)| bytes).sum::<u64>();
        let seconds = layers.iter().map(|(_, seconds)| seconds).sum::<f64>();
        let mut workload = Workload::new(weights, 0, seconds);
        workload.layers = layers.iter().map(|&(weights, seconds)| WorkloadLayer { weights, seconds }).collect();
        (workload.weight_passes, workload.link_gbs) = (Some(passes), Some(gbs));
        let room = ((weights as f64 * fits) as u64).max(1);
        let advice = workload.advise(&discrete(room)).unwrap();
        if let Some(by) = advice.layers {
            let copies: u64 = by.layers.iter().map(|&layer| layers[layer].0).sum();
            let copies = copies as f64 * f64::from(passes) / (advice.link_gbs * 1e9);
            prop_assert!(by.seconds >= seconds.max(copies) * (1.0 - 1e-6), "{by:?}: {seconds} {copies}");
            prop_assert!(by.seconds <= (seconds + copies) * (1.0 + 1e-6), "{by:?}: {seconds} {copies}");
        }
    }
}
