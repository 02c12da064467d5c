//! The C interface: one file per subject. Every exported function goes through [`Call`].

#[macro_use]
mod call;
mod context;
mod copy;
mod device;
mod event;
mod graph;
mod init;
mod memory;
mod misc;
mod module;
mod pool;
mod query;
mod stream;
pub(crate) mod types;

pub(crate) use call::{Call, Here};
