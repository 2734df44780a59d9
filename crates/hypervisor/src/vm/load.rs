//! How many of a VM's vCPUs want to run, against the cores there are.

use std::sync::atomic::{AtomicU64, Ordering};

use super::VmState;

/// Default limit of KVM_CAP_HALT_POLL.
const HALT_POLL_NS: u64 = 50_000;

/// Shared by the vCPUs of a VM.
#[derive(Debug)]
pub(crate) struct Load {
    cores: usize,
    halt_poll_ns: AtomicU64,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            halt_poll_ns: AtomicU64::new(HALT_POLL_NS),
        }
    }
}

impl Load {
    /// Longest that HLT spins.
    pub(crate) fn halt_poll_ns(&self) -> u64 {
        self.halt_poll_ns.load(Ordering::Relaxed)
    }
    /// KVM_CAP_HALT_POLL.
    pub(crate) fn set_halt_poll_ns(&self, ns: u64) {
        self.halt_poll_ns.store(ns, Ordering::Relaxed);
    }
}

impl VmState {
    /// More vCPUs want to run than there are cores. They are counted when somebody asks, as
    /// entries are far more frequent.
    pub(crate) fn is_crowded(&self) -> bool {
        self.vcpus().iter().filter(|v| v.wants_core()).count() > self.load.cores
    }
    /// Spinning takes no core from another vCPU.
    pub(crate) fn has_room(&self) -> bool {
        self.load.cores > 1 && !self.is_crowded()
    }
}
