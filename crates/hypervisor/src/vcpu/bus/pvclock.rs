//! kvmclock: the structures that the guest registers by MSR (KVM document "msr").

use std::sync::atomic::{Ordering, fence};

use super::Bus;
use crate::vm::clock::pvclock_scale;

/// Bit of the MSR: the guest uses the structure.
const ENABLE: u64 = 1;
/// PVCLOCK_TSC_STABLE_BIT.
const TSC_STABLE: u8 = 1 << 0;
/// PVCLOCK_GUEST_STOPPED.
const GUEST_STOPPED: u8 = 1 << 1;

/// Paravirtual MSRs of a vCPU.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::vcpu) struct Paravirt {
    /// MSR_KVM_WALL_CLOCK_NEW.
    pub(in crate::vcpu) wall_clock: u64,
    /// MSR_KVM_SYSTEM_TIME_NEW.
    pub(in crate::vcpu) system_time: u64,
    /// KVM_KVMCLOCK_CTRL: the guest is to be told once that it was stopped.
    pub(in crate::vcpu) guest_stopped: bool,
    pub(in crate::vcpu) steal: super::steal::Steal,
    pub(in crate::vcpu) eoi: super::pv_eoi::PvEoi,
    pub(in crate::vcpu) roots: super::roots::RootCache,
    /// MSR_KVM_ASYNC_PF_EN and MSR_KVM_ASYNC_PF_INT, for guests that were migrated from elsewhere. They have no effect,
    /// because the host's own page faults cannot be passed on.
    pub(in crate::vcpu) async_pf: [u64; 2],
    /// MSR_KVM_POLL_CONTROL bit 0 cleared: the guest polls by itself before HLT.
    pub(in crate::vcpu) guest_polls: bool,
}

impl Bus {
    /// Rewrites the guest's `pvclock_vcpu_time_info`, which has 32 bytes.
    pub(in crate::vcpu) fn update_clock(&mut self) {
        self.update_hv_page();
        if self.pv.system_time & ENABLE == 0 {
            return;
        }
        let gpa = self.pv.system_time & !ENABLE;
        let (host_tsc, kvmclock_ns) = self.vm.clock.master();
        let (mul, shift) = pvclock_scale(self.tsc.real_khz());
        // If the registered address has no memory, the guest gets no clock, as in KVM.
        let Some(before) = self.vm.memory.read_gpa(gpa, 4) else {
            return;
        };
        let mut flags = TSC_STABLE;
        // The flag stays set until the guest has seen it and cleared it.
        let is_unseen = self.vm.memory.read_gpa(gpa.wrapping_add(29), 1);
        if std::mem::take(&mut self.pv.guest_stopped)
            || is_unseen.is_some_and(|f| f as u8 & GUEST_STOPPED != 0)
        {
            flags |= GUEST_STOPPED;
        }
        // The guest may have been migrated in the middle of a read. The version continues from the one that it saw:
        // otherwise it could take half of the old and half of the new contents for one.
        let odd = (before as u32).wrapping_add(1) | 1;
        let mut info = [0u8; 32];
        info[8..16].copy_from_slice(&self.tsc.guest(host_tsc).to_le_bytes());
        info[16..24].copy_from_slice(&kvmclock_ns.to_le_bytes());
        info[24..28].copy_from_slice(&mul.to_le_bytes());
        info[28] = shift.to_le_bytes()[0];
        info[29] = flags;
        // The guest reads without a lock: odd version, contents, even version.
        let memory = &self.vm.memory;
        let _ = memory.write_gpa(gpa, 4, odd.into());
        fence(Ordering::SeqCst);
        let _ = memory.write_bytes(gpa.wrapping_add(8), &info[8..]);
        fence(Ordering::SeqCst);
        let _ = memory.write_gpa(gpa, 4, odd.wrapping_add(1).into());
    }

    /// Writes the guest's `pvclock_wall_clock`: the wall time at which kvmclock was zero. Nothing is written to address
    /// 0, because VMMs write 0 to the MSR at a reset.
    pub(in crate::vcpu) fn write_wall_clock(&mut self) {
        let gpa = self.pv.wall_clock & !3;
        if gpa == 0 {
            return;
        }
        let (kvmclock_ns, _) = self.vm.clock.now();
        let boot = host::clock::realtime_ns().saturating_sub(kvmclock_ns);
        let mut info = [0u8; 8];
        info[..4].copy_from_slice(&((boot / 1_000_000_000) as u32).to_le_bytes());
        info[4..].copy_from_slice(&((boot % 1_000_000_000) as u32).to_le_bytes());
        let memory = &self.vm.memory;
        let Some(version) = memory.read_gpa(gpa, 4) else {
            return;
        };
        // Odd while the contents change, whatever the version was before.
        let odd = (version as u32).wrapping_add(1) | 1;
        let _ = memory.write_gpa(gpa, 4, odd.into());
        fence(Ordering::SeqCst);
        let _ = memory.write_bytes(gpa.wrapping_add(4), &info);
        fence(Ordering::SeqCst);
        let _ = memory.write_gpa(gpa, 4, odd.wrapping_add(1).into());
    }
}
