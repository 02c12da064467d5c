//! NVTX ranges around what a profiler's user wants to see; nothing at all without the feature `nvtx`.
#![deny(unsafe_code)]

pub(crate) use imp::range;

#[cfg(feature = "nvtx")]
mod imp {
    use std::ffi::CStr;
    use std::sync::OnceLock;

    use nvtx::Domain;

    /// A range of this thread in the domain `transfer-tensor`, until dropped; its payload is the number of bytes.
    pub(crate) fn range(name: &'static CStr, bytes: usize) -> impl Drop {
        static DOMAIN: OnceLock<Domain> = OnceLock::new();
        let domain = DOMAIN.get_or_init(|| Domain::new(c"transfer-tensor"));
        let attributes = domain.event_attributes_builder().message(name).payload(bytes as u64).build();
        domain.local_range(attributes)
    }
}

#[cfg(not(feature = "nvtx"))]
mod imp {
    use std::ffi::CStr;

    pub(crate) struct Nothing;

    impl Drop for Nothing {
        #[inline(always)]
        fn drop(&mut self) {}
    }

    #[inline(always)]
    pub(crate) fn range(_name: &'static CStr, _bytes: usize) -> Nothing {
        Nothing
    }
}
