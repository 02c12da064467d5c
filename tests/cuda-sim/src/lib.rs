//! A simulated CUDA driver.

mod abi;
mod alloc;
mod capture;
mod client;
mod clock;
mod control;
mod device;
mod evidence;
mod host;
mod hostility;
mod maps;
mod memory;
mod module;
mod profile;
mod sched;
mod state;
mod status;
mod wire;
