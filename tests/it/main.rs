//! The tests that run on the simulated driver and, with `TRANSFER_TENSOR_DRIVER=real`, on a GPU.

// They look at what is kept on disk.
mod attack;
mod batch;
mod batch_failing;
mod batch_memory;
#[cfg(feature = "serde")]
mod calibration;
mod capture;
mod completion;
mod contexts;
mod copying;
mod driver_answers;
mod dtypes;
mod egress;
mod egress_attack;
mod egress_callers;
mod egress_chunks;
mod egress_edges;
mod egress_ends;
mod egress_frees;
mod egress_lanes;
mod egress_reports;
mod errors;
mod existing;
mod failing_calls;
mod forked;
mod forks;
mod given_away;
mod ingress;
mod ingress_callers;
mod ingress_files;
mod lacking;
mod lent;
#[cfg(feature = "safetensors")]
mod load;
#[cfg(feature = "safetensors")]
mod load_refused;
mod machines;
mod offload;
mod offload_activations;
mod offload_attack;
mod offload_failing;
mod ordering;
mod ordering_failing;
mod pool;
mod pool_users;
mod pool_waits;
mod registration;
mod rows;
mod scatter;
mod shapes;
mod slices;
mod soundness;
mod staged;
mod support;
mod tensor;
mod unified;
