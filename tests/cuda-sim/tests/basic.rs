//! cudarc on the simulated driver: contexts, allocations, copies.

use cuda_sim::{MemoryKind, device};
use cudarc::driver::CudaContext;

#[test]
fn round_trip() {
    let sim = device("x86_h200_sxm_gen5").unwrap();
    let ctx = CudaContext::new(sim.ordinal()).unwrap();
    let stream = ctx.default_stream();
    let zeros = stream.alloc_zeros::<u8>(1000).unwrap();
    assert_eq!(stream.clone_dtoh(&zeros).unwrap(), vec![0; 1000]);
    let data: Vec<u32> = (0..100_000).collect();
    let on_device = stream.clone_htod(&data).unwrap();
    assert_eq!(stream.clone_dtoh(&on_device).unwrap(), data);
    assert!(sim.evidence().device_bytes >= 400_000);
    drop((zeros, on_device, stream));
    drop(ctx);
    assert_eq!(sim.leaks(), Vec::<String>::new());
    assert_eq!(sim.violations(), Vec::<String>::new());
    assert_eq!(sim.memory_kind(data.as_ptr() as u64), MemoryKind::Pageable);
}
