//! One cudarc in the tree, under both.

/// cubecl's public interface has none of cudarc's types; naming one of its own is enough to build it.
pub use cubecl_cuda::CudaDevice;

/// The crate's cudarc is the one that cubecl's requirement resolves to.
pub fn same_stream(
    theirs: std::sync::Arc<cudarc::driver::CudaStream>,
) -> std::sync::Arc<transfer_tensor::cudarc::driver::CudaStream> {
    theirs
}
