//! The tests that run on the simulated driver and, with `TRANSFER_TENSOR_DRIVER=real`, on a GPU.

mod support;
mod tensor;
