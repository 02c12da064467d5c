//! Detection on the machine at hand, with `TRANSFER_TENSOR_DRIVER=real`. Elsewhere these tests have nothing to say.

use std::time::{Duration, Instant};

use transfer_tensor::cudarc::driver::CudaContext;
use transfer_tensor::{Backing, Detector, MemoryModel, Platform, Request, Strategy, plan};

/// The first device of the real driver, if that is what was asked for.
fn real() -> Option<Platform> {
    if std::env::var_os("TRANSFER_TENSOR_DRIVER").is_none_or(|driver| driver != "real") {
        return None;
    }
    Some(Detector::new().environment(false).detect(0))
}

#[test]
fn the_machine_is_what_its_attributes_say() {
    let Some(platform) = real() else { return };
    println!("{platform}\n{}", platform.memory());
    assert_ne!(platform.model(), MemoryModel::HostOnly, "{platform}");
    assert_eq!(platform.model(), platform.attributes().model());
    assert!(platform.total_bytes() > 0 && platform.l2_bytes() > 0 && platform.uuid().is_some());
    if platform.name().contains("H200") && cfg!(target_arch = "x86_64") {
        let attributes = platform.attributes();
        assert_eq!(attributes.integrated, Some(0));
        assert_eq!(attributes.pageable_memory_access_uses_host_page_tables, Some(0));
        assert!(matches!(platform.model(), MemoryModel::Discrete | MemoryModel::Hmm));
        let capabilities = platform.capabilities();
        assert!(capabilities.can_pin && capabilities.device_reads_pinned, "{platform}");
        assert!(capabilities.can_register && capabilities.device_reads_registered, "{platform}");
        assert!(capabilities.managed && capabilities.concurrent_managed, "{platform}");
    }
}

#[test]
fn what_can_be_forced_and_what_not() {
    let Some(platform) = real() else { return };
    let memory = platform.memory();
    assert!(memory.free_bytes > 0 && memory.free_bytes <= memory.total_bytes, "{memory}");
    let of = |strategy| plan(&platform, &memory, &Request::new(1 << 20).strategy(strategy));
    let default = plan(&platform, &memory, &Request::new(256 << 20)).unwrap();
    println!("{default}");
    if matches!(platform.model(), MemoryModel::Discrete | MemoryModel::Hmm) {
        assert_eq!((default.strategy, default.backing), (Strategy::Streamed, Backing::Device));
        assert_eq!(of(Strategy::ZeroCopy).unwrap().backing, Backing::Pinned);
        let error = of(Strategy::Coherent).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("no coherent link"), "{error}");
    }
}

#[test]
fn detection_takes_a_few_milliseconds_beyond_the_context() {
    if real().is_none() {
        return;
    }
    let context = CudaContext::new(0).unwrap();
    let mut times: Vec<Duration> = (0..9)
        .map(|_| {
            let start = Instant::now();
            let platform = Detector::new().environment(false).detect_in(&context);
            assert_ne!(platform.model(), MemoryModel::HostOnly);
            start.elapsed()
        })
        .collect();
    times.sort();
    println!("detection: median {:?}, all {times:?}", times[4]);
    assert!(times[4] < Duration::from_millis(10), "{times:?}");
}
