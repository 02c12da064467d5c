//! The tests that run on the simulated driver and, with `TRANSFER_TENSOR_DRIVER=real`, on a GPU.

mod batch;
mod capture;
mod completion;
mod contexts;
mod driver_answers;
mod dtypes;
mod errors;
mod existing;
mod failing_calls;
mod lacking;
mod machines;
mod ordering;
mod registration;
mod shapes;
mod slices;
mod soundness;
mod support;
mod tensor;
mod unified;
