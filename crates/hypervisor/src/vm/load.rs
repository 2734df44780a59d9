//! Whether a VM's vCPUs have the cores that they want, judged by their number and by how long they had to wait for a
//! core.

use std::sync::atomic::{AtomicU64, Ordering};

use super::VmState;

/// Default limit of KVM_CAP_HALT_POLL.
const HALT_POLL_NS: u64 = 50_000;

/// How long the loss of a core counts as contention, by other vCPUs or by the host's other work. A vCPU that gives way
/// loses no core and so notices no contention: to find out again costs a slice of the host's scheduler (3 ms).
const CONTENTION_NS: u64 = 100_000_000;

/// Load figures that the vCPUs of a VM share.
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
    /// Longest time that HLT spins.
    pub(crate) fn halt_poll_ns(&self) -> u64 {
        self.halt_poll_ns.load(Ordering::Relaxed)
    }
    /// KVM_CAP_HALT_POLL.
    pub(crate) fn set_halt_poll_ns(&self, ns: u64) {
        self.halt_poll_ns.store(ns, Ordering::Relaxed);
    }
    /// Notes that a vCPU has its core back, which another thread had taken while the vCPU computed.
    pub(crate) fn note_contention(&self, now_ns: u64) {
        let until = now_ns.saturating_add(CONTENTION_NS);
        self.contended_until_ns.store(until, Ordering::Relaxed);
    }
    /// True if a vCPU lost its core a short time ago.
    pub(crate) fn is_contended(&self, now_ns: u64) -> bool {
        now_ns < self.contended_until_ns.load(Ordering::Relaxed)
    }
}

impl VmState {
    /// True if more vCPUs want to run than there are cores. vCPUs are counted at each call, because their entries are
    /// far more frequent than calls.
    pub(crate) fn is_crowded(&self) -> bool {
        self.vcpus().iter().filter(|v| v.wants_core()).count() > self.load.cores
    }
    /// True if a spinning vCPU takes no core from another one.
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
