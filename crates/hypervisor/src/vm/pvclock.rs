//! Structures of paravirtual clocks in guest memory (KVM document "msr"): the guest reads them without a lock.

use std::sync::atomic::{Ordering, fence};

use super::VmState;

const NS_PER_SECOND: u64 = 1_000_000_000;

impl VmState {
    /// Runs `write` while the version at `gpa` is odd. The version continues from the one that is there: a guest that was
    /// migrated in the middle of a read could otherwise take half of the old and half of the new contents for one. False if
    /// there is no memory.
    pub(crate) fn with_version(&self, gpa: u64, write: impl FnOnce()) -> bool {
        let Some(version) = self.memory.read_gpa(gpa, 4) else {
            return false;
        };
        let odd = (version as u32).wrapping_add(1) | 1;
        let _ = self.memory.write_gpa(gpa, 4, odd.into());
        fence(Ordering::SeqCst);
        write();
        fence(Ordering::SeqCst);
        let _ = self.memory.write_gpa(gpa, 4, odd.wrapping_add(1).into());
        true
    }

    /// Writes a `pvclock_wall_clock`: the wall time at which kvmclock was zero. The upper half of its seconds goes to `high`.
    pub(crate) fn write_wall_clock(&self, gpa: u64, high: Option<u64>) {
        let (kvmclock_ns, _) = self.clock.now();
        let boot = host::clock::realtime_ns().saturating_sub(kvmclock_ns);
        let (seconds, ns) = (boot / NS_PER_SECOND, boot % NS_PER_SECOND);
        let words = [seconds as u32, ns as u32].map(u32::to_le_bytes);
        self.with_version(gpa, || {
            let _ = self
                .memory
                .write_bytes(gpa.wrapping_add(4), words.as_flattened());
            if let Some(high) = high {
                let _ = self.memory.write_gpa(high, 4, (seconds >> 32).into());
            }
        });
    }
}
