//! Hand tensors between CPU and GPU: you say what is handed over and how it will be touched, the crate decides how from the
//! machine it runs on, says why, and lets you overrule it.
//!
//! | machine | strategy |
//! |---|---|
//! | unified memory (DGX Spark, Jetson) | [`Strategy::ZeroCopy`]: a host view and a device view of the same bytes |
//! | coherent link (Grace Hopper, Grace Blackwell) | [`Strategy::Coherent`] for bytes that are touched once or do not fit; [`Strategy::Streamed`] for reused ones |
//! | PCIe | [`Strategy::Streamed`]: copies from and to pinned memory |
//! | no NVIDIA driver | [`Strategy::Host`]: ordinary memory |
//!
//! ```text
//! platform ─► plan (request × platform × figures → decision + reasons)
//!               │
//! host bytes ─► TransferTensor ─► device guard ─► kernel ─► device guard dropped ─► host guard ─► &[T]
//! ```
//!
//! # Where to begin
//!
//! - [`Device::new`] takes your `Arc<CudaStream>` and finds out what the machine is ([`Platform`]).
//! - [`Device::tensor`] makes a [`TransferTensor`] as the [`plan()`] for it says.
//! - [`TransferTensor::host`], [`host_mut`](TransferTensor::host_mut), [`device`](TransferTensor::device) and
//!   [`device_mut`](TransferTensor::device_mut) give guards; these wait, order and copy.
//! - [`Device::calibrate`] measures the machine at hand, and keeps that on disk; without it plans use built-in figures.
//!
//! ```
//! # cuda_sim::install().unwrap();
//! # let gpu = cuda_sim::device("x86_h200_sxm_gen5").unwrap();
//! # let ordinal = gpu.ordinal();
//! use transfer_tensor::{Access, Device, Strategy, TransferTensor, cudarc::driver::CudaContext};
//!
//! let stream = CudaContext::new(ordinal)?.new_stream()?;
//! let device = Device::new(&stream)?;
//! let mut tensor: TransferTensor<f32> = device.tensor().access(Access::reuse(8)?).zeros([256, 256])?;
//! assert_eq!(tensor.strategy(), Strategy::Streamed); // this machine's link is PCIe
//!
//! tensor.host_mut()?.fill(1.0);
//! stream.memset_zeros(&mut tensor.device_mut(&stream)?)?;
//! assert!(tensor.host()?.iter().all(|&x| x == 0.0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Ordering, errors, panics
//!
//! Every method that touches a stream says what it waits for and whether it blocks. Errors name the values that were wrong;
//! refusals give back what was handed in ([`Refused`]). Nothing panics. What makes the safe interface sound, and what no
//! wrapper of cudarc can close, is in `docs/safety.md` of the repository.
//!
//! # Crate features
//!
//! - `serde` (default): reports and decisions implement `Serialize`, and calibrations are kept on disk.
//! - `safetensors` (default): [`Checkpoint`], which streams the tensors of files to the device.
//! - `half`, `float8`: their types as elements.
//! - `dynamic-linking`: link libcuda at build time instead of loading it at run time.
//! - `nvtx`: NVTX ranges with byte counts around uploads, downloads and waits, in the domain `transfer-tensor`; its build needs
//!   libclang.
#![deny(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod batch;
mod calibrate;
#[allow(unsafe_code)]
mod complete;
mod copy;
mod device;
#[allow(unsafe_code)]
pub(crate) mod driver;
mod egress;
#[allow(unsafe_code)]
mod element;
mod error;
mod ingress;
mod layout;
#[cfg(feature = "safetensors")]
mod load;
mod offload;
mod order;
#[allow(unsafe_code)]
mod os;
mod plan;
mod platform;
mod pool;
mod ranges;
mod rows;
mod sync;
#[allow(unsafe_code)]
mod tensor;
mod trace;

pub use batch::{Batch, BatchReport};
pub use calibrate::{Calibration, Scaling};
pub use cudarc;
pub use device::{Device, DeviceBuilder, DeviceStats};
pub use driver::managed::{Advice, Location};
pub use egress::{
    Chunked, Delivered, EgressHealth, EgressPool, EgressPoolBuilder, EgressSender, EgressSource, EgressStats, OnError,
    Output, Outputs, Shutdown, Stage, Tagged, Ticket,
};
pub use element::{DType, Element};
pub use error::{Error, Refused, Result};
pub use ingress::{IngressBatch, IngressBuilder, IngressError, IngressPrefetcher, IngressResult};
pub use layout::Shape;
#[cfg(feature = "safetensors")]
pub use load::{Checkpoint, Load, Progress, Reading, TensorInfo};
pub use offload::{
    ActivationStack, ActivationStats, ActiveLayer, ActiveTensor, Batch as OffloadBatch, Bound, Checkpointing, Choice,
    Fractions, LayerAdvice, LayerOrder, OffloadAdvice, OffloadLayer, OffloadLink, OffloadReport, OffloadStats,
    Offloader, OffloaderBuilder, Point, Sensitivity, StepTime, Verdict, Workload, WorkloadLayer, pinned_budget,
};
pub use order::Order;
pub use plan::{
    Access, Backing, ByMemory, Decision, Direction, Estimate, Figures, HostMemory, Rate, Request, Strategy, Tuning,
    plan,
};
pub use platform::{Attributes, Capabilities, Detector, MemoryFigures, MemoryModel, Platform, Topology};
pub use pool::{PinnedBuffer, PinnedPool, PoolOptions, PoolStats, WhenFull};
pub use rows::Rows;
pub use tensor::{
    BothEnds, Chunks, Copying, DeviceMemory, DeviceMut, DeviceRef, DynTensor, HostMut, HostRef, HostTensor,
    OffloadTensor, SharedTensor, TensorOptions, TensorView, TensorViewMut, Transfer, TransferTensor,
};

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// So does that of the page about offloading.
#[cfg(doctest)]
#[doc = include_str!("../docs/offload.md")]
struct Offload;
