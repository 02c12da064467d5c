//! Properties of the planner, over random machines and requests.

use proptest::prelude::{Just, ProptestConfig, any, prop_assert, prop_assert_eq, prop_oneof, proptest};
use proptest::strategy::Strategy as Generator;

use super::*;
use crate::platform::{Attributes, MemoryModel};

fn attributes() -> impl Generator<Value = Attributes> {
    let flag = || prop_oneof![Just(None), Just(Some(0)), Just(Some(1))];
    let capability = prop_oneof![
        Just((5, 3)),
        Just((6, 2)),
        Just((7, 2)),
        Just((7, 5)),
        Just((8, 7)),
        Just((9, 0)),
        Just((10, 0)),
        Just((10, 3)),
        Just((11, 0)),
        Just((12, 0)),
        Just((12, 1)),
        Just((13, 7)),
    ];
    let l2 = prop_oneof![Just(None), (0i32..=i32::MAX).prop_map(Some)];
    (proptest::collection::vec(flag(), 10), proptest::option::of(capability), l2).prop_map(|(flags, cc, l2)| {
        Attributes {
            integrated: flags[0],
            can_map_host_memory: flags[1],
            managed_memory: flags[2],
            concurrent_managed_access: flags[3],
            pageable_memory_access: flags[4],
            pageable_memory_access_uses_host_page_tables: flags[5],
            host_register_supported: flags[6],
            read_only_host_register_supported: flags[7],
            memory_pools_supported: flags[8],
            direct_managed_mem_access_from_host: flags[9],
            l2_cache_bytes: l2,
            compute_capability_major: cc.map(|cc| cc.0),
            compute_capability_minor: cc.map(|cc| cc.1),
            ..Attributes::default()
        }
    })
}

fn platforms() -> impl Generator<Value = Platform> {
    prop_oneof![
        1 => Just(Platform::host_only("test")),
        20 => (attributes(), any::<u64>()).prop_map(|(attributes, total)| Platform::from_attributes("test", total, attributes)),
    ]
}

/// Sizes from every order of magnitude.
fn sizes() -> impl Generator<Value = u64> {
    prop_oneof![Just(0), Just(u64::MAX), (0u32..64, any::<u64>()).prop_map(|(shift, bits)| bits >> shift)]
}

fn memories() -> impl Generator<Value = MemoryFigures> {
    (sizes(), sizes(), proptest::option::of(sizes())).prop_map(|(a, b, host)| {
        let mut figures = MemoryFigures::new(a.min(b), a.max(b));
        figures.host_available = host;
        figures
    })
}

fn requests() -> impl Generator<Value = Request> {
    let touches = prop_oneof![Just(1), 1u32..100, Just(u32::MAX)];
    let host = proptest::sample::select(HostMemory::ALL);
    let direction = proptest::sample::select(Direction::ALL);
    let strategy = proptest::option::weighted(0.3, proptest::sample::select(Strategy::ALL));
    let backing = proptest::option::weighted(0.3, proptest::sample::select(Backing::ALL));
    (sizes(), touches, host, direction, strategy, backing).prop_map(
        |(bytes, touches, host, direction, strategy, backing)| {
            let access = Access::reuse(touches).unwrap_or_default();
            Request { bytes, direction, access, host, strategy, backing }
        },
    )
}

fn ways(platform: &Platform, memory: &MemoryFigures, request: &Request) -> Vec<Candidate> {
    cost::candidates(platform, memory, request)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_decision_is_the_least_of_its_own_estimates(platform in platforms(), memory in memories(), request in requests()) {
        let Ok(decision) = plan(&platform, &memory, &request) else { return Ok(()) };
        let allowed: Vec<_> = decision.estimates.iter().filter(|estimate| estimate.allowed).collect();
        let chosen = decision.chosen().unwrap();
        prop_assert!(chosen.allowed);
        let least = allowed.iter().map(|estimate| estimate.seconds).fold(f64::INFINITY, f64::min);
        prop_assert!(chosen.seconds <= least * 1.15);
        for other in &allowed {
            // Nothing as fast duplicates less, and nothing that duplicates as little is faster.
            if other.seconds <= least * 1.15 {
                prop_assert!(other.duplicated_bytes >= chosen.duplicated_bytes);
            }
            if other.duplicated_bytes == chosen.duplicated_bytes {
                prop_assert!(other.seconds >= chosen.seconds);
            }
        }
        for estimate in &decision.estimates {
            prop_assert!(estimate.seconds.is_finite() && estimate.seconds >= 0.0);
            prop_assert!(!estimate.why.is_empty());
        }
        prop_assert!(request.strategy.is_none_or(|strategy| strategy == decision.strategy));
        prop_assert!(request.backing.is_none_or(|backing| backing == decision.backing));
        prop_assert!(decision.chunk_bytes < request.bytes.max(1));
        prop_assert!(decision.chunk_bytes == 0 || decision.strategy == Strategy::Streamed);
    }

    #[test]
    fn nothing_is_refused_that_is_feasible(platform in platforms(), memory in memories(), request in requests()) {
        let open = Request { strategy: None, backing: None, ..request.clone() };
        let possible = ways(&platform, &memory, &open).iter().any(|way| way.standing < Standing::AskedOnly);
        let read_only = open.host == HostMemory::ReadOnly && open.direction == Direction::DeviceToHost;
        prop_assert_eq!(plan(&platform, &memory, &open).is_ok(), possible && !read_only);
        // A forced way is refused with a reason, never silently replaced.
        if let Err(error) = plan(&platform, &memory, &request) {
            prop_assert!(error.is_unsupported() || error.is_out_of_memory());
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn more_bytes_never_take_less_time_nor_fit_better(
        platform in platforms(), memory in memories(), request in requests(), more in sizes(),
    ) {
        let larger = Request { bytes: request.bytes.max(more), ..request.clone() };
        let (small, large) = (ways(&platform, &memory, &request), ways(&platform, &memory, &larger));
        for (small, large) in small.iter().zip(&large) {
            prop_assert_eq!((small.strategy, small.backing), (large.strategy, large.backing));
            prop_assert!(large.seconds >= small.seconds, "{:?} {:?}", small, large);
            prop_assert!(large.duplicated_bytes >= small.duplicated_bytes);
            if small.standing >= Standing::TooBig {
                prop_assert!(large.standing >= Standing::TooBig);
            }
        }
    }

    #[test]
    fn more_touches_never_take_less_time(platform in platforms(), memory in memories(), request in requests()) {
        let once = Request { access: Access::Streaming, ..request.clone() };
        for (once, more) in ways(&platform, &memory, &once).iter().zip(&ways(&platform, &memory, &request)) {
            prop_assert!(more.seconds >= once.seconds);
        }
    }

    #[test]
    fn one_memory_is_never_duplicated_by_default(attributes in attributes(), bytes in sizes(), touches in 1u32..1000) {
        let platform = Platform::from_attributes("test", u64::MAX, attributes);
        let memory = MemoryFigures::new(u64::MAX, u64::MAX);
        let request = Request::new(bytes).access(Access::reuse(touches).unwrap());
        let decision = plan(&platform, &memory, &request).unwrap();
        let duplicates = decision.strategy == Strategy::Streamed;
        match platform.model() {
            MemoryModel::Unified => prop_assert!(!duplicates),
            MemoryModel::UnifiedMapped if duplicates && platform.capabilities().io_coherent => {
                let routes = platform.capabilities();
                let in_place = routes.device_reads_pinned || routes.concurrent_managed || routes.device_reads_pageable
                    || routes.device_reads_registered;
                prop_assert!(!in_place || (touches > 1 && bytes <= platform.l2_bytes()));
            }
            MemoryModel::Discrete | MemoryModel::Hmm => prop_assert!(duplicates),
            _ => {}
        }
    }
}

fn machine(change: impl FnOnce(&mut Attributes)) -> Platform {
    let mut attributes = Attributes {
        can_map_host_memory: Some(1),
        managed_memory: Some(1),
        concurrent_managed_access: Some(1),
        host_register_supported: Some(1),
        ..Attributes::default()
    };
    change(&mut attributes);
    Platform::from_attributes("test", 1 << 36, attributes)
}

fn room() -> MemoryFigures {
    MemoryFigures::new(1 << 36, 1 << 36)
}

#[test]
fn a_forced_strategy_is_obeyed_or_refused_by_name() {
    let h200 = machine(|_| {});
    let of = |platform: &Platform, request: &Request| plan(platform, &room(), request);
    let forced = |strategy| Request::new(1 << 20).strategy(strategy);
    let zero_copy = of(&h200, &forced(Strategy::ZeroCopy)).unwrap();
    assert_eq!((zero_copy.strategy, zero_copy.backing), (Strategy::ZeroCopy, Backing::Pinned));
    let error = of(&h200, &forced(Strategy::Coherent)).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("no coherent link"), "{error}");
    assert_eq!(of(&h200, &forced(Strategy::Host)).unwrap().backing, Backing::Pageable);
    // For the whole platform; the request's own choice beats it.
    let platform = h200.with_strategy(Strategy::ZeroCopy);
    assert_eq!(of(&platform, &Request::new(1)).unwrap().strategy, Strategy::ZeroCopy);
    assert_eq!(of(&platform, &forced(Strategy::Streamed)).unwrap().strategy, Strategy::Streamed);
    let host = Platform::host_only("test");
    assert!(of(&host, &forced(Strategy::Streamed)).unwrap_err().is_unsupported());
    assert_eq!(of(&host, &Request::new(u64::MAX)).unwrap().strategy, Strategy::Host);
    let never = Request::new(1).strategy(Strategy::Streamed).backing(Backing::Pinned);
    assert!(of(&platform, &never).unwrap_err().to_string().contains("do not go together"));
}

#[test]
fn managed_memory_without_concurrent_access_is_refused_with_the_attribute_named() {
    let jetson = machine(|attributes| {
        attributes.integrated = Some(1);
        attributes.concurrent_managed_access = Some(0);
    });
    let error = plan(&jetson, &room(), &Request::new(1).backing(Backing::Managed)).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("CONCURRENT_MANAGED_ACCESS"), "{error}");
    let decision = plan(&jetson, &room(), &Request::new(1 << 20)).unwrap();
    assert_eq!((decision.strategy, decision.backing), (Strategy::ZeroCopy, Backing::Pinned));
}

#[test]
fn mapped_memory_that_nobody_caches_is_not_read_twice_in_place() {
    let of = |cc: (i32, i32), touches| {
        let platform = machine(|attributes| {
            attributes.integrated = Some(1);
            attributes.concurrent_managed_access = Some(0);
            (attributes.compute_capability_major, attributes.compute_capability_minor) = (Some(cc.0), Some(cc.1));
        });
        plan(&platform, &room(), &Request::new(64 << 20).access(Access::reuse(touches).unwrap())).unwrap()
    };
    let nano = of((5, 3), 2);
    assert_eq!(nano.strategy, Strategy::Streamed);
    assert!(nano.estimates.iter().any(|estimate| !estimate.allowed && estimate.why.contains("neither side caches")));
    assert_eq!(of((5, 3), 1).strategy, Strategy::ZeroCopy);
    assert_eq!(of((7, 2), 2).strategy, Strategy::ZeroCopy);
}

#[test]
fn the_callers_memory_is_used_where_it_is() {
    let spark = machine(|attributes| {
        attributes.integrated = Some(1);
        attributes.pageable_memory_access = Some(1);
        attributes.pageable_memory_access_uses_host_page_tables = Some(1);
    });
    let of = |platform: &Platform, host| plan(platform, &room(), &Request::new(1 << 20).host(host)).unwrap();
    for (host, backing) in [
        (HostMemory::Pinned, Backing::Pinned),
        (HostMemory::Managed, Backing::Managed),
        (HostMemory::Registered, Backing::Registered),
        (HostMemory::Pageable, Backing::Registered),
        (HostMemory::ReadOnly, Backing::Registered),
    ] {
        let decision = of(&spark, host);
        assert_eq!((decision.strategy, decision.backing), (Strategy::ZeroCopy, backing), "{host}");
        assert_eq!(decision.chosen().unwrap().duplicated_bytes, 0, "{host}");
        assert_eq!(of(&machine(|_| {}), host).strategy, Strategy::Streamed, "{host}");
    }
    let into_read_only = Request::new(1).host(HostMemory::ReadOnly).direction(Direction::DeviceToHost);
    assert!(plan(&spark, &room(), &into_read_only).unwrap_err().is_unsupported());
}

#[test]
fn what_fits_nowhere_is_out_of_memory() {
    let platform = machine(|_| {});
    let memory = MemoryFigures::new(1 << 30, 1 << 30).with_host_available(1 << 31);
    let of = |bytes| plan(&platform, &memory, &Request::new(bytes));
    assert_eq!(of(1 << 30).unwrap().strategy, Strategy::Streamed);
    // Too big for the device: in place, over PCIe, is what is left.
    let big = of((1 << 30) + 1).unwrap();
    assert_eq!(big.strategy, Strategy::ZeroCopy);
    assert!(big.reasons.iter().any(|reason| reason.contains("next best")), "{:?}", big.reasons);
    let error = of(u64::MAX).unwrap_err();
    assert!(error.is_out_of_memory() && error.to_string().contains("18446744073709551615"), "{error}");
}

#[test]
fn measured_figures_replace_the_built_in_ones() {
    let mut figures = Figures::built_in(MemoryModel::Discrete, None);
    figures.source = "measured".into();
    figures.host_to_device = Rate::known(4.9);
    let platform = machine(|_| {}).with_figures(figures);
    let decision = plan(&platform, &room(), &Request::new(4_900_000_000)).unwrap();
    assert!(decision.chosen().unwrap().seconds > 1.0);
    assert!(decision.reasons.iter().any(|reason| reason.contains("measured")));
}

/// R97: a rate of 12,500 GB/s made every transfer free.
#[test]
fn figures_that_no_link_carries_are_cut_and_the_plan_says_so() {
    let mut figures = Figures::built_in(MemoryModel::Discrete, None);
    figures.source = "a user".into();
    figures.host_to_device = Rate::known(12_500.0);
    figures.device_to_host = Rate::known(f64::NAN);
    figures.read_in_place.pinned = Rate::known(1e300);
    figures.copy_latency = f64::NEG_INFINITY;
    let platform = machine(|_| {}).with_figures(figures);
    let found = platform.figures();
    assert!(found.host_to_device.gbs < 300.0 && found.host_to_device.assumed);
    assert!(found.read_in_place.pinned.gbs < 300.0);
    assert!(found.device_to_host.gbs > 0.0 && found.device_to_host.gbs < 1.0);
    assert!(found.copy_latency > 0.0 && found.copy_latency < 1e-3);
    let decision = plan(&platform, &room(), &Request::new(1 << 28)).unwrap();
    assert!(decision.reasons.iter().any(|reason| reason.contains("12500.0 GB/s")), "{:?}", decision.reasons);
    assert!(decision.estimates.iter().all(|estimate| estimate.seconds.is_finite()));
}
