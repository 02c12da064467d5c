//! What the planner decides on every built-in machine, from its attributes alone.

use cuda_sim::profile::Profile;
use transfer_tensor::{
    Access, Attributes, Backing, Decision, MemoryFigures, MemoryModel, Platform, Request, Strategy, plan,
};

const MIB: u64 = 1 << 20;

fn platform(profile: &Profile) -> (Platform, MemoryFigures) {
    let attributes = Attributes::read(|id| profile.attribute(id));
    let platform = Platform::from_attributes(&profile.name, profile.total_mem, attributes);
    let memory = MemoryFigures::new(profile.total_mem, profile.total_mem).with_host_available(512 << 30);
    (platform, memory)
}

fn decide(key: &str, bytes: u64, touches: u32) -> Decision {
    let (platform, memory) = platform(&Profile::builtin(key).unwrap());
    let request = Request::new(bytes).access(Access::reuse(touches).unwrap());
    plan(&platform, &memory, &request).unwrap_or_else(|error| panic!("{key}: {error}"))
}

fn expect(key: &str, bytes: u64, touches: u32, strategy: Strategy, backings: &[Backing]) {
    let decision = decide(key, bytes, touches);
    assert_eq!(decision.strategy, strategy, "{key} {bytes} x{touches}: {decision}");
    assert!(backings.contains(&decision.backing), "{key} {bytes} x{touches}: {decision}");
    assert!(decision.reasons.len() >= 2);
    assert_eq!(decision.chunk_bytes > 0, strategy == Strategy::Streamed && bytes > 64 * MIB, "{key}");
}

#[test]
fn every_machine_has_its_model() {
    for key in Profile::builtin_keys() {
        let (platform, _) = platform(&Profile::builtin(key).unwrap());
        let model = match key {
            "dgx_spark_gb10" | "jetson_agx_thor" => MemoryModel::Unified,
            key if key.starts_with("jetson") || key == "rtx_spark_n1x_windows" => MemoryModel::UnifiedMapped,
            key if key.starts_with("gh200") || key.starts_with("gb") => MemoryModel::Coherent,
            "x86_h100_sxm_hmm" | "x86_b200_hgx" | "x86_b300_sxm6_hmm" => MemoryModel::Hmm,
            _ => MemoryModel::Discrete,
        };
        assert_eq!(platform.model(), model, "{key}");
    }
}

#[test]
fn spark() {
    let of = |bytes, touches, backing| expect("dgx_spark_gb10", bytes, touches, Strategy::ZeroCopy, &[backing]);
    of(256 * MIB, 1, Backing::Pinned);
    of(8 * MIB, 8, Backing::Managed);
    of(256 * MIB, 8, Backing::Pinned);
    of(24 * MIB, 8, Backing::Managed);
    of(24 * MIB + 1, 8, Backing::Pinned);
}

#[test]
fn thor() {
    let of = |bytes, touches, backings: &[_]| expect("jetson_agx_thor", bytes, touches, Strategy::ZeroCopy, backings);
    of(256 * MIB, 1, &[Backing::Pinned]);
    of(8 * MIB, 8, &[Backing::Registered]);
    of(256 * MIB, 8, &[Backing::Pinned, Backing::Registered]);
}

#[test]
fn orin_and_xavier() {
    for key in ["jetson_agx_orin_64gb", "jetson_agx_xavier_16gb"] {
        for (bytes, touches) in [(256 * MIB, 1), (8 * MIB, 8), (256 * MIB, 8)] {
            expect(key, bytes, touches, Strategy::ZeroCopy, &[Backing::Pinned]);
        }
        expect(key, 256 << 10, 64, Strategy::Streamed, &[Backing::Device]);
    }
}

#[test]
fn grace() {
    let in_place = &[Backing::Pinned, Backing::Registered, Backing::Pageable];
    let keys = Profile::builtin_keys();
    let grace: Vec<_> = keys.iter().filter(|key| key.starts_with("gh200") || key.starts_with("gb")).collect();
    assert_eq!(grace.len(), 5, "{grace:?}");
    for key in grace {
        expect(key, 256 * MIB, 1, Strategy::Coherent, in_place);
        expect(key, 8 * MIB, 8, Strategy::Streamed, &[Backing::Device]);
        expect(key, 256 * MIB, 8, Strategy::Streamed, &[Backing::Device]);
        let more_than_device = Profile::builtin(key).unwrap().total_mem + 1;
        expect(key, more_than_device, 8, Strategy::Coherent, in_place);
        assert_eq!(decide(key, 256 * MIB, 1).chosen().unwrap().duplicated_bytes, 0);
    }
}

#[test]
fn pcie() {
    let keys = Profile::builtin_keys();
    assert_eq!(keys.len(), 26);
    let others = [
        "wsl2_rtx",
        "windows_wddm_dgpu",
        "mig_1g_h100",
        "vgpu_timesliced_fractional",
        "vgpu_full_1to1_uvm",
        "h100_h200_confidential",
    ];
    let pcie: Vec<_> = keys.iter().filter(|key| key.starts_with("x86") || others.contains(key)).collect();
    assert!(pcie.len() >= 14, "{pcie:?}");
    for key in pcie {
        for (bytes, touches) in [(256 * MIB, 1), (8 * MIB, 8), (256 * MIB, 8)] {
            expect(key, bytes, touches, Strategy::Streamed, &[Backing::Device]);
        }
    }
}

/// vLLM once believed that GH200 says INTEGRATED=1: coherent if it does not, and something sane if it does.
#[test]
fn a_gh200_that_calls_itself_integrated_still_gets_no_duplicate() {
    let mut profile = Profile::builtin("gh200_480gb_numa").unwrap();
    profile.attributes.insert(18, 1);
    let (platform, memory) = platform(&profile);
    assert_eq!(platform.model(), MemoryModel::Unified);
    for touches in [1, 8] {
        let request = Request::new(256 * MIB).access(Access::reuse(touches).unwrap());
        let decision = plan(&platform, &memory, &request).unwrap();
        assert_eq!(decision.strategy, Strategy::ZeroCopy);
        assert_eq!(decision.chosen().unwrap().duplicated_bytes, 0);
    }
}

/// The compute capability picks figures, never the class.
#[test]
fn a_capability_that_nobody_knows_changes_no_strategy() {
    for key in Profile::builtin_keys() {
        let known = decide(key, 256 * MIB, 1);
        let mut profile = Profile::builtin(key).unwrap();
        for (major, minor) in [(99, 0), (9, 0), (12, 1), (11, 0), (8, 7)] {
            profile.attributes.insert(75, major);
            profile.attributes.insert(76, minor);
            let (platform, memory) = platform(&profile);
            let decision = plan(&platform, &memory, &Request::new(256 * MIB)).unwrap();
            assert_eq!(decision.strategy, known.strategy, "{key} as {major}.{minor}");
        }
    }
}
