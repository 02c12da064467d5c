//! Batches and rows of which some call fails (field report R77).

use std::collections::BTreeMap;
use std::sync::LazyLock;

use transfer_tensor::cudarc::driver::CudaSlice;
use transfer_tensor::{Error, Rows, Strategy, TransferTensor};

use crate::batch::{apart, filled};
use crate::machines::{drain, pattern};
use crate::support::{Gpu, H200};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// What [`Ends::everything`] goes between.
struct Ends {
    small: &'static [u8],
    long: &'static [u8],
    pinned: TransferTensor<u8>,
    targets: [CudaSlice<u8>; 3],
}

impl Ends {
    fn new(gpu: &Gpu) -> Self {
        // More than two rounds, and as long as is staged.
        static SMALL: LazyLock<Vec<u8>> = LazyLock::new(|| pattern(4 * MIB + 1, 1));
        static LONG: LazyLock<Vec<u8>> = LazyLock::new(|| pattern(8 * MIB, 2));
        let (small, long) = (&SMALL[..], &LONG[..]);
        let pinned =
            gpu.device.tensor().strategy(Strategy::Streamed).from_slice(&long[..100 * KIB], [100 * KIB]).unwrap();
        let targets = [9 * MIB, 8 * MIB, 100 * KIB].map(|bytes| filled(gpu, bytes, 0));
        Self { small, long, pinned, targets }
    }

    /// Several rounds both ways, a long block, pinned pieces, and rows; checked whenever it returns.
    fn everything(&mut self, gpu: &Gpu) -> Result<(), Error> {
        const PIECE: usize = 20 * KIB + 3;
        let (stream, [a, b, c]) = (&gpu.stream, &mut self.targets);
        {
            let host = self.pinned.host()?;
            let mut batch = gpu.device.batch(stream);
            batch.upload_parts(a, apart(self.small, PIECE))?;
            batch.upload(self.long, b)?.upload(&host, c)?;
            batch.run()?;
        }
        let (mut small, mut long) = (vec![0; self.small.len()], vec![0; self.long.len()]);
        let mut batch = gpu.device.batch(stream);
        batch.download_parts(a, small.chunks_mut(PIECE).enumerate().map(|(i, piece)| (2 * i * PIECE, piece)))?;
        batch.download(b, &mut long)?;
        batch.run()?;
        assert!(small == self.small && long == self.long, "wrong bytes");
        let rows = Rows::new(3000, 600).device_pitch(1000);
        gpu.device.upload_rows(stream, self.small, &rows, b)?;
        gpu.device.download_rows(stream, b, &rows, &mut long)?;
        assert!(long[..1_800_000] == small[..1_800_000], "wrong rows");
        Ok(())
    }
}

/// R77 for batches and rows: whichever call fails, before or after its work, nothing is in flight when the error comes out,
/// nothing is leaked, and the next batch is right.
#[test]
fn batches_survive_the_failure_of_any_call() {
    const OURS: [&str; 12] = [
        "cuMemcpyHtoDAsync",
        "cuMemcpyDtoHAsync",
        "cuMemcpyBatchAsync",
        "cuMemcpy2DAsync",
        "cuMemHostAlloc",
        "cuGetProcAddress",
        "cuPointerGetAttribute",
        "cuStreamIsCapturing",
        "cuStreamWaitEvent",
        "cuStreamSynchronize",
        "cuEventRecord",
        "cuEventQuery",
    ];
    let Some(gpu) = Gpu::simulated(H200) else { return };
    let sim = gpu.sim.as_ref().unwrap();
    let mut ends = Ends::new(&gpu);
    sim.clear_calls();
    ends.everything(&gpu).unwrap();
    drain(&gpu.device);
    let mut calls = BTreeMap::<_, u64>::new();
    for name in OURS {
        calls.insert(name, sim.count(name) as u64);
    }
    assert!(calls.values().filter(|&&times| times > 0).count() > 9, "{calls:?}");
    each_call_fails(calls, Ends::new, |gpu, ends, _| ends.everything(gpu));
}

/// Fails each of these calls that are made so often, before and after its work, on a device of its own each time: whether or not what is
/// done then is an error, nothing is in flight afterwards, nothing is leaked, and the next time is right.
pub(crate) fn each_call_fails<S>(
    calls: impl IntoIterator<Item = (&'static str, u64)>,

    begin: impl Fn(&Gpu) -> S,
    everything: impl Fn(&Gpu, &mut S, Option<&str>) -> Result<(), Error>,
) {
    for (call, times) in calls {
        // A polled event is asked as often as time makes it.
        let times = if call == "cuEventQuery" { times.min(4) } else { times };
        for (nth, after) in (1..=times).flat_map(|nth| [(nth, false), (nth, true)]) {
            let what = format!("{call} {nth} of {times}, after its work: {after}");
            let gpu = Gpu::simulated(H200).unwrap();
            let sim = gpu.sim.as_ref().unwrap();
            let mut state = begin(&gpu);
            match after {
                false => sim.fail_nth(call, nth, 999),
                true => sim.fail_nth_after(call, nth, 999),
            }
            if let Err(error) = everything(&gpu, &mut state, Some(call)) {
                assert_eq!(error.driver_code(), Some(999), "{what}: {error}");
            }
            sim.clear_failures();
            gpu.context.check_err().unwrap_or_else(|error| panic!("{what}: parked {:?}", error.0));
            everything(&gpu, &mut state, None).unwrap_or_else(|error| panic!("{what}: the next batch: {error}"));
            drop(state);
            drain(&gpu.device);
            assert_eq!(sim.violations(), Vec::<String>::new(), "{what}");
            // What was allocated although the driver said no is lost; and a buffer whose event could not be asked for is kept for
            // ever, and counted.
            let lost = after && call == "cuMemHostAlloc" || call == "cuEventQuery" && gpu.device.stats().leaked > 0;
            if !lost {
                println!("{what}");
                gpu.finish();
            }
        }
    }
}

/// What was submitted before a call failed has run when the error comes out.
#[test]
fn a_batch_that_fails_half_way_is_drained_before_its_error() {
    for (call, nth) in [("cuMemcpyBatchAsync", 2), ("cuEventRecord", 2), ("cuMemcpyBatchAsync", 3)] {
        let Some(gpu) = Gpu::simulated(H200) else { return };
        let sim = gpu.sim.as_ref().unwrap();
        let bytes = pattern(3 * MIB, 7);
        let parts = apart(&bytes, 10 * KIB);
        let (mut target, mut back) = (filled(&gpu, 6 * MIB, 0), vec![0; 3 * MIB]);
        let opener = gpu.gate(&gpu.stream).open_later();
        sim.fail_nth(call, nth, 999);
        let mut batch = gpu.device.batch(&gpu.stream);
        batch.upload_parts(&mut target, parts.iter().copied()).unwrap();
        let up = batch.run();
        let error = match up {
            Err(error) => error,
            // The third is the download's first.
            Ok(_) => {
                let mut batch = gpu.device.batch(&gpu.stream);
                batch.download_parts(&target, back.chunks_mut(10 * KIB).map(|piece| (0, piece))).unwrap();
                batch.run().unwrap_err()
            }
        };
        assert_eq!(error.driver_code(), Some(999), "{call}: {error}");
        assert!(opener.opened(), "{call}: the error came while the first round was on its way");
        sim.clear_failures();
        drop(target);
        drain(&gpu.device);
        gpu.finish();
    }
}
