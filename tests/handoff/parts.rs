//! What can not be seen from outside: the comparison finds a single wrong byte, and a file that changes is noticed.

use std::fs::{self, OpenOptions};
use std::path::Path;

use indicatif::ProgressBar;
use transfer_tensor::Checkpoint;

use super::common::{Machine, MachineArgs};
use super::handover::{Outcome, hand_over};
use super::kernel::{self, index_hash};
use super::small_model;

cuda_sim::kernel! {
    /// Leaves the last byte as it is.
    fn all_but_the_last(launch) {
        let (bytes, len) = (launch.arg(0)?, launch.arg::<usize>(1)?);
        for (i, byte) in (0..).zip(launch.slice_mut::<u8>(bytes, len - 1)?) {
            *byte ^= index_hash(i);
        }
        Ok(())
    }
}

fn run_on(profile: &str, file: &Checkpoint) -> Outcome {
    let simulate = Some(profile.to_owned());
    let machine = Machine::open(&MachineArgs { simulate, ..MachineArgs::default() }).unwrap();
    hand_over(&machine, file, None, &ProgressBar::hidden()).unwrap()
}

/// One test, since kernels are known by name to the whole process.
#[test]
fn one_byte_that_was_not_changed_is_found() {
    let (_folder, path, _) = small_model();
    let file = Checkpoint::open(Path::new(&path)).unwrap();
    for profile in ["dgx_spark_gb10", "jetson_agx_orin_64gb", "gh200_480gb_numa", "x86_h200_sxm_gen5"] {
        cuda_sim::register_kernel(kernel::NAME, kernel::change_every_byte).unwrap();
        assert_eq!(run_on(profile, &file).mismatches(), 0);

        cuda_sim::register_kernel(kernel::NAME, all_but_the_last).unwrap();
        let outcome = run_on(profile, &file);
        for row in &outcome.rows {
            assert_eq!(row.mismatch, row.entry.bytes().checked_sub(1), "{profile}: {}", row.entry.name());
        }
        assert_eq!(outcome.mismatches(), outcome.rows.len() - 1, "all but the empty one");
    }
}

#[test]
fn the_hash_changes_every_byte() {
    assert!((0..100_000).all(|i| index_hash(i) != 0));
}

#[test]
fn a_file_that_shrinks_or_changes_while_it_is_read_is_an_error() {
    let (_folder, path, _) = small_model();
    let file = Checkpoint::open(Path::new(&path)).unwrap();
    let entry = file.tensors().iter().max_by_key(|entry| entry.bytes()).unwrap();
    let mut buffer = vec![0; entry.bytes() as usize];
    file.read(entry.name(), 0, &mut buffer).unwrap();
    file.check_unchanged().unwrap();

    let length = fs::metadata(&path).unwrap().len();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(length / 2).unwrap();
    let failure = file.read(entry.name(), 0, &mut buffer).unwrap_err();
    assert!(failure.is_file() && failure.to_string().contains("became shorter"), "{failure:?}");
    let failure = file.check_unchanged().unwrap_err();
    assert!(failure.is_file() && failure.to_string().contains("was changed"), "{failure:?}");
}
