//! Both see the same cudarc: its types are one.

/// What candle's `CudaDevice::cuda_stream()` gives is what the crate takes.
pub fn same_stream(
    theirs: std::sync::Arc<cudarc::driver::CudaStream>,
) -> std::sync::Arc<transfer_tensor::cudarc::driver::CudaStream> {
    theirs
}

/// And so are the slices.
pub fn same_slice<T>(theirs: cudarc::driver::CudaSlice<T>) -> transfer_tensor::cudarc::driver::CudaSlice<T> {
    theirs
}
