//! The tests that run on the simulated driver and, with `TRANSFER_TENSOR_DRIVER=real`, on a GPU.

// They look at what is kept on disk.
mod attack;
mod batch;
#[cfg(feature = "serde")]
mod calibration;
mod capture;
mod completion;
mod contexts;
mod copying;
mod driver_answers;
mod dtypes;
mod errors;
mod existing;
mod failing_calls;
mod given_away;
mod lacking;
mod lent;
#[cfg(feature = "safetensors")]
mod load;
mod machines;
mod ordering;
mod pool;
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
