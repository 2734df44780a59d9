//! kvmclock: the structures that the guest registers by MSR (KVM document "msr").

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
    /// Rewrites the guest's structures of time: KVM's own and Xen's.
    pub(in crate::vcpu) fn update_clock(&mut self) {
        self.update_hv_page();
        let own = (self.pv.system_time & ENABLE != 0).then_some(self.pv.system_time & !ENABLE);
        if let Some(gpa) = own {
            let is_stopped = std::mem::take(&mut self.pv.guest_stopped);
            self.write_time(gpa, TSC_STABLE, is_stopped);
        }
        let is_stable = !self.vm.xen.has_unstable_clock();
        for gpa in self.xen_times().into_iter().flatten() {
            self.write_time(gpa, u8::from(is_stable) * TSC_STABLE, false);
        }
    }

    /// Writes a `pvclock_vcpu_time_info`, which has 32 bytes. If the address has no memory, the guest gets no clock, as in
    /// KVM.
    fn write_time(&self, gpa: u64, flags: u8, is_stopped: bool) {
        let memory = &self.vm.memory;
        let (host_tsc, kvmclock_ns) = self.vm.clock.master();
        let (mul, shift) = pvclock_scale(self.tsc.real_khz());
        // The flag stays set until the guest has seen it and cleared it.
        let unseen = memory.read_gpa(gpa.wrapping_add(29), 1).unwrap_or(0) as u8;
        let is_stopped = is_stopped || unseen & GUEST_STOPPED != 0;
        let stopped = u8::from(is_stopped) * GUEST_STOPPED;
        // What follows the version and four bytes without a meaning.
        let mut info = [0u8; 24];
        info[..8].copy_from_slice(&self.tsc.guest(host_tsc).to_le_bytes());
        info[8..16].copy_from_slice(&kvmclock_ns.to_le_bytes());
        info[16..20].copy_from_slice(&mul.to_le_bytes());
        info[20] = shift.to_le_bytes()[0];
        info[21] = flags | stopped;
        self.vm.with_version(gpa, || {
            let _ = memory.write_bytes(gpa.wrapping_add(8), &info);
        });
    }

    /// Writes the guest's `pvclock_wall_clock`. Nothing is written to address 0, because VMMs write 0 to the MSR at a reset.
    pub(in crate::vcpu) fn write_wall_clock(&mut self) {
        let gpa = self.pv.wall_clock & !3;
        if gpa != 0 {
            self.vm.write_wall_clock(gpa, None);
        }
    }
}
