//! Whether a VM's vCPUs have the cores that they want: by their number, and by how long they had to wait for one.

use std::sync::atomic::{AtomicU64, Ordering};

use super::VmState;

/// Default limit of KVM_CAP_HALT_POLL.
const HALT_POLL_NS: u64 = 50_000;

/// How long a vCPU that lost its core tells of others that want it, the host's other work among them.
/// Who gives way sees no more of it, so each time it costs a slice of the host's scheduler (3 ms) to find out again.
const CONTENTION_NS: u64 = 100_000_000;

/// Shared by the vCPUs of a VM.
#[derive(Debug)]
pub(crate) struct Load {
    cores: usize,
    halt_poll_ns: AtomicU64,
    contended_until_ns: AtomicU64,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            cores: host::thread::cores(),
            halt_poll_ns: AtomicU64::new(HALT_POLL_NS),
            contended_until_ns: AtomicU64::new(0),
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
    /// A vCPU has its core again, which somebody else had taken while it computed.
    pub(crate) fn note_contention(&self, now_ns: u64) {
        let until = now_ns.saturating_add(CONTENTION_NS);
        self.contended_until_ns.store(until, Ordering::Relaxed);
    }
    /// That was not long ago.
    pub(crate) fn is_contended(&self, now_ns: u64) -> bool {
        now_ns < self.contended_until_ns.load(Ordering::Relaxed)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_core_tells_of_contention_for_a_while() {
        let load = Load::default();
        assert!(!load.is_contended(0));
        load.note_contention(1000);
        assert!(load.is_contended(1000) && load.is_contended(999 + CONTENTION_NS));
        assert!(!load.is_contended(1000 + CONTENTION_NS));
    }
}
