//! The only place that calls `cudarc::driver::{sys, result}`.

pub(crate) mod batch;
pub(crate) mod call;
mod carry;
pub(crate) mod context;
pub(crate) mod copy;
pub(crate) mod event;
mod host;
pub(crate) mod lane;
pub(crate) mod load;
pub(crate) mod managed;
pub(crate) mod measure;
pub(crate) mod memory;
pub(crate) mod pending;
pub(crate) mod pieces;
pub(crate) mod pinned;
pub(crate) mod probe;
mod ring;
pub(crate) mod rows;
mod scatter;
mod slot;
pub(crate) mod slots;
pub(crate) mod staging;
pub(crate) mod stream;
pub(crate) mod timing;

pub(crate) use call::{Bound, check};
pub(crate) use context::{Context, LentStream, Way};
pub(crate) use event::Event;
pub(crate) use load::{Driver, check_not_forked};
pub(crate) use pending::Pending;
pub(crate) use stream::Stream;
