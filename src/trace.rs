//! What a profiler's user wants to see, for NVTX: ranges around transfers, waits and deliveries, in the domain `transfer-tensor`, and the
//! names of threads and streams. Nothing at all without the feature `nvtx`.
//!
//! A range's payload is a number of bytes: what is carried, waited for or handed over. It has none where nobody knows before it ends.
#![deny(unsafe_code)]

pub(crate) use imp::{Bytes, name_stream, name_thread, range, wait};

#[cfg(feature = "nvtx")]
mod imp {
    use std::ffi::{CStr, CString};
    use std::sync::OnceLock;

    use cudarc::driver::sys::CUstream;
    use nvtx::{CudaResource, Domain};

    /// A number of bytes, to be kept for a range that is yet to begin.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Bytes(u64);

    impl From<u64> for Bytes {
        fn from(bytes: u64) -> Self {
            Self(bytes)
        }
    }

    impl From<usize> for Bytes {
        fn from(bytes: usize) -> Self {
            Self(bytes as u64)
        }
    }

    fn domain() -> &'static Domain {
        static DOMAIN: OnceLock<Domain> = OnceLock::new();
        DOMAIN.get_or_init(|| Domain::new(c"transfer-tensor"))
    }

    /// A range of this thread, until dropped.
    pub(crate) fn range<B: Into<Bytes>>(name: &'static CStr, bytes: B) -> impl Drop + use<B> {
        let Bytes(bytes) = bytes.into();
        let attributes = domain().event_attributes_builder().message(name).payload(bytes).build();
        domain().local_range(attributes)
    }

    /// As [`range`], for who waits without knowing for how much.
    pub(crate) fn wait(name: &'static CStr) -> impl Drop {
        domain().local_range(domain().event_attributes_builder().message(name).build())
    }

    /// Tells this thread's name.
    pub(crate) fn name_thread() {
        if let Some(name) = std::thread::current().name().and_then(|name| CString::new(name).ok()) {
            nvtx::name_current_thread(name);
        }
    }

    /// Tells a stream's name.
    pub(crate) fn name_stream(stream: CUstream, name: &'static CStr) {
        nvtx::name_cuda_resource(CudaResource::Stream(stream.cast()), name);
    }
}

#[cfg(not(feature = "nvtx"))]
mod imp {
    use std::ffi::CStr;

    use cudarc::driver::sys::CUstream;

    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Bytes;

    impl From<u64> for Bytes {
        #[inline(always)]
        fn from(_: u64) -> Self {
            Self
        }
    }

    impl From<usize> for Bytes {
        #[inline(always)]
        fn from(_: usize) -> Self {
            Self
        }
    }

    pub(crate) struct Nothing;

    impl Drop for Nothing {
        #[inline(always)]
        fn drop(&mut self) {}
    }

    #[inline(always)]
    pub(crate) fn range(_name: &'static CStr, _bytes: impl Into<Bytes>) -> Nothing {
        Nothing
    }

    #[inline(always)]
    pub(crate) fn wait(_name: &'static CStr) -> Nothing {
        Nothing
    }

    #[inline(always)]
    pub(crate) fn name_thread() {}

    #[inline(always)]
    pub(crate) fn name_stream(_stream: CUstream, _name: &'static CStr) {}
}
