//! Gives the cdylib half the soname of the real driver and tells the crate whether it runs under AddressSanitizer.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=CARGO_ENCODED_RUSTFLAGS");
    println!("cargo:rustc-check-cfg=cfg(cusim_asan)");
    // glibc answers `dlopen("libcuda.so")` with a loaded library of that soname.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    // The executable links the rlib half and may export the same names (`-rdynamic`): the library must use its own.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    if flags.contains("sanitizer=address") {
        println!("cargo:rustc-cfg=cusim_asan");
    }
}
