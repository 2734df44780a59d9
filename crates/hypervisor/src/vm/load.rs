//! How many of a VM's vCPUs want to run, against the cores there are.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Default limit of KVM_CAP_HALT_POLL.
const HALT_POLL_NS: u64 = 50_000;

/// Shared by the vCPUs of a VM.
#[derive(Debug)]
pub(crate) struct Load {
    /// In KVM_RUN and not asleep.
    running: AtomicU32,
    cores: u32,
    halt_poll_ns: AtomicU64,
}

impl Default for Load {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            running: AtomicU32::new(0),
            cores: u32::try_from(cores).unwrap_or(u32::MAX),
            halt_poll_ns: AtomicU64::new(HALT_POLL_NS),
        }
    }
}

impl Load {
    /// A vCPU begins to run.
    pub(crate) fn enter(&self) {
        self.running.fetch_add(1, Ordering::Relaxed);
    }
    /// A vCPU stops running.
    pub(crate) fn leave(&self) {
        self.running.fetch_sub(1, Ordering::Relaxed);
    }
    /// More vCPUs want to run than there are cores.
    pub(crate) fn is_crowded(&self) -> bool {
        self.running.load(Ordering::Relaxed) > self.cores
    }
    /// Spinning takes no core from another vCPU.
    pub(crate) fn has_room(&self) -> bool {
        self.cores > 1 && !self.is_crowded()
    }
    /// Longest that HLT spins.
    pub(crate) fn halt_poll_ns(&self) -> u64 {
        self.halt_poll_ns.load(Ordering::Relaxed)
    }
    /// KVM_CAP_HALT_POLL.
    pub(crate) fn set_halt_poll_ns(&self, ns: u64) {
        self.halt_poll_ns.store(ns, Ordering::Relaxed);
    }
}
