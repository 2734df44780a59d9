//! Steal time and the "preempted" mark (KVM document "msr", MSR_KVM_STEAL_TIME).
//!
//! A process cannot ask for its run-queue delay without a system call. But a
//! running vCPU looks at the clock every few microseconds, so a gap between two
//! looks is time that the host gave to someone else.
//!
//! DEVIATION: delays below a millisecond are not counted, and the mark is set
//! only while the vCPU sleeps in HLT: nobody announces a preemption by the host.

use x86_cpu::{CpuState, Flush, GuestBus};

use super::bus::Bus;

/// The structure is in use.
const ENABLE: u64 = 1;
/// Bits 1 to 5 are reserved: the structure is 64 bytes long and aligned.
const RESERVED: u64 = 0x3e;
/// Offsets in `struct kvm_steal_time`.
const STEAL: u64 = 0;
const VERSION: u64 = 8;
const PREEMPTED: u64 = 16;
/// KVM_VCPU_PREEMPTED.
const MARK: u128 = 1;
/// KVM_VCPU_FLUSH_TLB: another vCPU asks for a flush before this one runs again.
const FLUSH_TLB: u128 = 2;
/// Shortest gap that counts. A slice of the host's scheduler is about 3 ms; 128
/// blocks of guest code with a few host page faults stay below this.
const GAP_NS: u64 = 1_000_000;

/// Steal time of a vCPU.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Steal {
    /// MSR_KVM_STEAL_TIME.
    msr: u64,
    stolen_ns: u64,
    version: u32,
    /// Last look at the clock while running; 0 after a pause of our own.
    looked_ns: u64,
}

impl Bus {
    pub(super) const fn steal_msr(&self) -> u64 {
        self.pv.steal.msr
    }
    pub(super) const fn stolen_ns(&self) -> u64 {
        self.pv.steal.stolen_ns
    }
    /// WRMSR of MSR_KVM_STEAL_TIME; false is #GP.
    pub(super) fn set_steal_msr(&mut self, value: u64) -> bool {
        if value & RESERVED != 0 {
            return false;
        }
        self.pv.steal.msr = value;
        self.write_steal();
        true
    }
    /// The running vCPU looks at the clock.
    #[inline]
    pub(super) fn note_time(&mut self, now_ns: u64) {
        let steal = &mut self.pv.steal;
        let before = std::mem::replace(&mut steal.looked_ns, now_ns);
        if before != 0 && now_ns.saturating_sub(before) >= GAP_NS {
            steal.stolen_ns = steal.stolen_ns.saturating_add(now_ns - before);
            self.write_steal();
        }
    }
    /// The vCPU stops running by itself: what follows is not stolen.
    pub(super) fn note_pause(&mut self) {
        self.pv.steal.looked_ns = 0;
    }
    fn gpa(&self) -> Option<u64> {
        let msr = self.pv.steal.msr;
        (msr & ENABLE != 0).then_some(msr & !ENABLE)
    }
    fn write_steal(&mut self) {
        let Some(gpa) = self.gpa() else { return };
        let steal = &mut self.pv.steal;
        // Odd version, contents, even version, as the guest reads without a lock.
        // An address without memory gets nothing, as in KVM.
        let odd = steal.version | 1;
        steal.version = odd.wrapping_add(1);
        let memory = &self.vm.memory;
        let _ = memory.write_gpa(gpa + VERSION, 4, odd.into());
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let _ = memory.write_gpa(gpa + STEAL, 8, steal.stolen_ns.into());
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let _ = memory.write_gpa(gpa + VERSION, 4, steal.version.into());
    }
    /// Before sleeping: other vCPUs need not interrupt this one for a TLB flush, nor wait for it.
    pub(super) fn mark_preempted(&mut self) {
        if let Some(gpa) = self.gpa() {
            let _ = self.vm.memory.rmw_gpa(gpa + PREEMPTED, 1, |_| MARK);
        }
    }
    /// After sleeping: carries out the flush that was left for this vCPU.
    pub(super) fn unmark_preempted(&mut self, cpu: &mut CpuState) {
        if let Some(gpa) = self.gpa()
            && let Some(old) = self.vm.memory.rmw_gpa(gpa + PREEMPTED, 1, |_| 0)
            && old & FLUSH_TLB != 0
        {
            self.flush(cpu, Flush::All);
        }
    }
}
