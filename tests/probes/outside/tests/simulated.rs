//! The project's test: its own code on machines that nobody has at hand.

use cuda_sim::kernels::BUILTIN_PTX;
use probe_outside::add_one;

#[test]
fn adds_on_machines_nobody_has_at_hand() {
    cuda_sim::install().expect("the simulated driver lies beside the test");
    for profile in ["x86_h200_sxm_gen5", "dgx_spark_gb10", "gh200_480gb_numa", "jetson_agx_orin_64gb"] {
        let device = cuda_sim::device(profile).expect(profile);
        let numbers: Vec<f32> = (0..1000_u16).map(f32::from).collect();
        let result = add_one(device.ordinal(), BUILTIN_PTX, &numbers).expect(profile);
        assert!(result.iter().zip(&numbers).all(|(after, before)| *after == before + 1.0), "{profile}");
        assert_eq!(device.evidence().kernels, 1, "{profile}");
        assert!(device.violations().is_empty(), "{profile}: {:?}", device.violations());
        assert!(device.leaks().is_empty(), "{profile}: {:?}", device.leaks());
    }
}

#[test]
fn a_failing_call_is_the_projects_error() {
    cuda_sim::install().expect("the simulated driver lies beside the test");
    let device = cuda_sim::device("x86_h200_sxm_gen5").expect("a built-in profile");
    device.fail_nth("cuLaunchKernel", 1, 719);
    let error = add_one(device.ordinal(), BUILTIN_PTX, &[1.0]).expect_err("the launch was made to fail");
    assert_eq!(error.0 as u32, 719);
}
