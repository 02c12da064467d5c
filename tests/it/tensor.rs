//! What a tensor promises when nothing goes wrong.

use transfer_tensor::{Access, Strategy, TransferTensor};

use crate::support::{Gpu, H200, SPARK};

#[test]
fn values_go_to_the_device_and_come_back() {
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        let values: Vec<u32> = (0..10_000).collect();
        let mut tensor = gpu.device.tensor().from_vec(values.clone(), [100, 100]).unwrap();
        drop(tensor.device_mut(&gpu.stream).unwrap());
        assert_eq!(*tensor.host().unwrap(), values);
        assert_eq!(tensor.into_vec().unwrap(), values);
    }
}

#[test]
fn zeros_are_zero_on_both_sides() {
    for profile in [H200, SPARK] {
        let gpu = Gpu::any(profile);
        let mut tensor: TransferTensor<f64> = gpu.device.tensor().access(Access::Streaming).zeros([3, 5]).unwrap();
        assert!(tensor.host().unwrap().iter().all(|&x| x == 0.0));
        gpu.stream.memset_zeros(&mut tensor.device_mut(&gpu.stream).unwrap()).unwrap();
        assert!(tensor.host().unwrap().iter().all(|&x| x == 0.0));
        if let Some(sim) = &gpu.sim {
            assert_eq!(sim.violations(), Vec::<String>::new());
        }
    }
    assert!(matches!(Strategy::Streamed, Strategy::Streamed));
}
