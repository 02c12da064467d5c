//! A simulated device: its profile, its engines, its memory, its hostility and the evidence about it.

#![deny(unsafe_code)]

use crate::evidence::Evidence;
use crate::hostility::Hostility;
use crate::memory::arena::Access;
use crate::memory::{Kind, Pool};
use crate::profile::{Profile, attribute};
use parking_lot::Condvar;
use std::collections::VecDeque;

/// One device.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    pub(crate) profile: Profile,
    /// The host's `MemFree`.
    pub(crate) host_free: u64,
    pub(crate) hostility: Hostility,
    pub(crate) evidence: Evidence,
    /// Told whenever a step of the device is done.
    pub(crate) changed: &'static Condvar,
    pub(crate) waiters: usize,
    /// Steps that are not done.
    pub(crate) in_flight: usize,
    pub(crate) engines: Vec<Engine>,
    device_pool: Pool,
    pinned_pool: Pool,
    managed_pool: Pool,
    pub(crate) primary: Option<u64>,
    /// The handle of the primary context, from the first one on.
    pub(crate) primary_handle: Option<u64>,
    pub(crate) primary_refs: usize,
    pub(crate) primary_flags: u32,
    pub(crate) default_pool: u64,
    pub(crate) current_pool: u64,
    /// The end of the latest step, in virtual time.
    pub(crate) now_ns: u64,
}

/// A copy engine.
#[derive(Debug, Default)]
pub(crate) struct Engine {
    pub(crate) busy: bool,
    pub(crate) queue: VecDeque<u64>,
    pub(crate) clock_ns: u64,
    /// When it moves bytes, as far as the other engine may still meet it.
    pub(crate) stretches: VecDeque<crate::clock::Stretch>,
}

impl Device {
    pub(crate) fn new(ordinal: usize, profile: Profile, hostility: Hostility) -> Self {
        let access = if profile.behaviour.host_reads_device_memory { Access::ReadWrite } else { Access::None };
        let engines = (0..profile.copy_engines().max(1)).map(|_| Engine::default()).collect();
        Self {
            ordinal,
            host_free: profile.host.free,
            hostility,
            evidence: Evidence::default(),
            changed: Box::leak(Box::new(Condvar::new())),
            waiters: 0,
            in_flight: 0,
            engines,
            device_pool: Pool::packed(access),
            pinned_pool: Pool::paged(),
            managed_pool: Pool::paged(),
            primary: None,
            primary_handle: None,
            primary_refs: 0,
            primary_flags: 0,
            default_pool: 0,
            current_pool: 0,
            now_ns: 0,
            profile,
        }
    }

    pub(crate) fn blocks(&mut self, kind: Kind) -> &mut Pool {
        match kind {
            Kind::Device => &mut self.device_pool,
            Kind::Managed => &mut self.managed_pool,
            Kind::Pinned | Kind::Registered => &mut self.pinned_pool,
        }
    }

    /// The engine for a direction: the first for copies to the device, the second, if there is one, for the others.
    pub(crate) fn engine(&self, to_device: bool) -> usize {
        if to_device || self.engines.len() < 2 { 0 } else { 1 }
    }

    pub(crate) fn has(&self, attribute: i32) -> bool {
        self.profile.has(attribute)
    }

    /// Whether kernels read any host memory.
    pub(crate) fn reads_pageable(&self) -> bool {
        self.has(attribute::PAGEABLE_MEMORY_ACCESS)
    }

    /// Managed memory may be touched by the host only while the device is idle.
    pub(crate) fn guards_managed(&self) -> bool {
        !self.has(attribute::CONCURRENT_MANAGED_ACCESS)
    }

    /// `domain:bus:device.function`, different for every device.
    pub(crate) fn pci_bus_id(&self) -> String {
        let bus = self.ordinal % 255 + 1;
        format!("{:04x}:{:02x}:00.0", self.ordinal / 255, bus)
    }

    /// A UUID made of the ordinal.
    pub(crate) fn uuid(&self) -> [u8; 16] {
        let mut uuid = *b"cuda-sim\0\0\0\0\0\0\0\0";
        uuid[8..].copy_from_slice(&(self.ordinal as u64 + 1).to_be_bytes());
        uuid
    }

    /// Says that something a thread may wait for has changed.
    pub(crate) fn notify(&self) {
        if self.waiters > 0 {
            self.changed.notify_all();
        }
    }
}
