//! Transfers, tickets, outputs and batches are plain futures: any runtime polls them, on one thread too, and goes on with other tasks
//! meanwhile.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use transfer_tensor::cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use transfer_tensor::{Device, EgressPool, HostTensor, IngressPrefetcher, Order, Output, Strategy};

const LEN: usize = 1 << 12;
const ITEMS: usize = 64;

struct Gpu {
    sim: cuda_sim::Device,
    stream: Arc<CudaStream>,
    device: Device,
}

fn gpu() -> Gpu {
    cuda_sim::install().unwrap();
    let sim = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
    let stream = CudaContext::new(sim.ordinal()).unwrap().new_stream().unwrap();
    let device = Device::new(&stream).unwrap();
    Gpu { sim, stream, device }
}

/// Awaits 64 of each at a time: transfers up, outputs by ticket and one after another, and then batches. The stream is held until `open` is
/// done, which other tasks see to.
async fn everything(gpu: &Gpu, open: impl Future<Output = ()>) {
    let pool: EgressPool<CudaSlice<u8>, u8> = EgressPool::builder(&gpu.device)
        .capacity(2 * ITEMS)
        .consumer(|out: Output<HostTensor<u8>>| out[LEN - 1])
        .unwrap();
    let (sender, mut outputs) = pool.channel(Order::Submission);
    let slice = |item: usize| gpu.stream.clone_htod(&[item as u8; LEN]).unwrap();
    let streamed = || gpu.device.tensor().strategy(Strategy::Streamed);
    let tensor = |item: usize| streamed().from_slice(&[item as u8; LEN], [LEN]).unwrap();
    let warm = pool.submit(slice(0)).unwrap();
    warm.await.unwrap();
    let sources: Vec<_> = (0..ITEMS).map(|item| (slice(item), slice(item), tensor(item))).collect();
    let gate = gpu.sim.gate(gpu.stream.cu_stream() as u64);
    let mut going = Vec::new();
    for (own, output, tensor) in sources {
        sender.submit(output).unwrap();
        going.push((pool.submit(own).unwrap(), tensor.to_device().unwrap()));
    }
    drop(sender);
    // Polled once, so that somebody has to wake this task.
    std::future::poll_fn(|context| {
        assert!(outputs.poll_next(context).is_pending());
        Poll::Ready(())
    })
    .await;
    open.await;
    drop(gate);
    assert_eq!(outputs.next_async().await.unwrap().result.unwrap(), 0);
    for (item, (ticket, transfer)) in going.into_iter().enumerate() {
        assert_eq!(ticket.await.unwrap(), item as u8);
        assert_eq!(transfer.await.unwrap().host().unwrap()[0], item as u8);
    }
    for item in 1..ITEMS {
        assert_eq!(outputs.next_async().await.unwrap().result.unwrap(), item as u8);
    }
    assert!(outputs.next_async().await.is_none());

    let fill = |index: u64, rows: &mut [u8]| {
        rows.fill(index as u8);
        Ok::<_, std::io::Error>(if index < ITEMS as u64 { rows.len() } else { 0 })
    };
    let mut batches = IngressPrefetcher::builder(&gpu.device, [LEN]).depth(3).threads(2).fill(fill).unwrap();
    let mut count = 0;
    while let Some(batch) = batches.next_async().await {
        let batch = batch.unwrap();
        let guard = batch.device(&gpu.stream).unwrap();
        assert_eq!(gpu.stream.clone_dtoh(&guard).unwrap(), [count as u8; LEN]);
        count += 1;
    }
    assert_eq!(count, ITEMS);
}

#[test]
fn tokio_on_one_thread_ticks_meanwhile() {
    let gpu = gpu();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        // The gate opens after fifty ticks: with a task that blocks the thread there would be none.
        let (ticks, late) = (Rc::new(Cell::new(0u32)), Rc::new(Cell::new(Duration::ZERO)));
        let (count, worst) = (ticks.clone(), late.clone());
        let ticker = tokio::task::spawn_local(async move {
            let mut interval = tokio::time::interval(Duration::from_millis(1));
            let start = Instant::now();
            loop {
                interval.tick().await;
                worst.set(worst.get().max(start.elapsed().saturating_sub(Duration::from_millis(count.get().into()))));
                count.set(count.get() + 1);
            }
        });
        let open = async {
            while ticks.get() < 50 {
                tokio::task::yield_now().await;
            }
        };
        everything(&gpu, open).await;
        ticker.abort();
        println!("{} ticks of 1 ms, the latest {:?} late", ticks.get(), late.get());
    });
}

#[test]
fn tokio_on_many_threads() {
    let gpu = Arc::new(gpu());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_time().build().unwrap();
    let tasks: Vec<_> = (0..3)
        .map(|_| {
            let gpu = gpu.clone();
            runtime.spawn(async move {
                let pool = EgressPool::builder(&gpu.device).tickets().unwrap();
                let slices = (0..ITEMS).map(|item| gpu.stream.clone_htod(&[item as u8; LEN]).unwrap());
                let tickets: Vec<_> = slices.map(|slice: CudaSlice<u8>| pool.submit(slice).unwrap()).collect();
                for (item, ticket) in tickets.into_iter().enumerate() {
                    assert_eq!(ticket.await.unwrap()[LEN - 1], item as u8);
                }
            })
        })
        .collect();
    for task in tasks {
        runtime.block_on(task).unwrap();
    }
}

#[test]
fn smol_on_one_thread() {
    let gpu = gpu();
    let executor = smol::LocalExecutor::new();
    smol::block_on(executor.run(async {
        let turns = Rc::new(Cell::new(0));
        let seen = turns.clone();
        let other = executor.spawn(async move {
            loop {
                smol::future::yield_now().await;
                seen.set(seen.get() + 1);
            }
        });
        let open = async {
            while turns.get() < 50 {
                smol::future::yield_now().await;
            }
        };
        everything(&gpu, open).await;
        other.cancel().await;
    }));
}

#[test]
fn nothing_but_a_waker() {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let gpu = gpu();
    let mut future = pin!(everything(&gpu, async {}));
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    while future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
        std::thread::park();
    }
}
