//! Hand tensors between CPU and GPU.
