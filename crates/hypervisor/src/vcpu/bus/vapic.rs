//! The task priority in guest memory (KVM_SET_VAPIC_ADDR), and accesses to its register that the VMM
//! hears of (KVM_TPR_ACCESS_REPORTING).
//!
//! A VMM that is told of the accesses of a 32-bit guest puts code of its own in their place, which
//! uses a word of memory: the priority in the lowest byte, in the next one the class of the highest
//! interrupt in service, in the last one the highest requested interrupt. The guest writes the
//! priority there and nobody is told, so before anything looks at the LAPIC it is taken over, and
//! before the guest goes on the word is written anew.
//!
//! DEVIATION: where code is interpreted (real mode) the VMM hears of an access at the end of the block
//! that it is in, and not after the instruction.

use std::collections::VecDeque;

use super::Bus;
use crate::{Error, Exit, Result};

/// MMIO offset of the task priority in the LAPIC's page.
const TASK_PRIORITY: u64 = 0x80;
/// Its MSR.
const X2APIC_TASK_PRIORITY: u32 = x86_defs::msr::IA32_X2APIC_BASE + 8;

/// The shared word, and what is reported.
#[derive(Debug, Default)]
pub(in crate::vcpu) struct Vapic {
    /// KVM_SET_VAPIC_ADDR; 0 for none.
    gpa: u64,
    /// The guest may have written to the word since it was written here.
    is_shared: bool,
    /// KVM_TPR_ACCESS_REPORTING.
    reports: bool,
    /// Accesses that the VMM has not heard of: RIP, and whether it is a write.
    accesses: VecDeque<(u64, bool)>,
}

impl Bus {
    /// KVM_SET_VAPIC_ADDR.
    pub(in crate::vcpu) fn set_vapic_addr(&mut self, gpa: u64) -> Result<()> {
        let is_memory = gpa == 0 || self.vm.memory.read_gpa(gpa, 4).is_some();
        if !self.has_lapic() || !is_memory {
            return Err(Error::InvalidArgument);
        }
        self.vapic.gpa = gpa;
        self.vapic.is_shared = false;
        self.recheck = true;
        Ok(())
    }

    /// KVM_TPR_ACCESS_REPORTING.
    pub(in crate::vcpu) fn set_reports_tpr(&mut self, reports: bool) {
        self.vapic.reports = reports;
    }

    /// The guest accesses the LAPIC's page.
    #[inline]
    pub(in crate::vcpu) fn note_lapic_access(&mut self, rip: u64, gpa: u64, is_write: bool) {
        if self.vapic.reports && gpa & 0xff0 == TASK_PRIORITY {
            self.report_tpr(rip, is_write);
        }
    }

    /// The guest accesses an x2APIC register.
    pub(in crate::vcpu) fn note_x2apic_access(&mut self, rip: u64, index: u32, is_write: bool) {
        if self.vapic.reports && index == X2APIC_TASK_PRIORITY && self.has_lapic() {
            self.report_tpr(rip, is_write);
        }
    }

    /// The VMM hears of it before the guest goes on.
    #[cold]
    fn report_tpr(&mut self, rip: u64, is_write: bool) {
        self.vapic.accesses.push_back((rip, is_write));
        self.recheck = true;
    }

    /// KVM_EXIT_TPR_ACCESS, if it is due.
    #[inline]
    pub(in crate::vcpu) fn take_tpr_access(&mut self) -> Option<Exit> {
        let (rip, is_write) = self.vapic.accesses.pop_front()?;
        Some(Exit::TprAccess { rip, is_write })
    }

    /// Takes over what the guest has written. To be called before the LAPIC's state is used.
    #[inline]
    pub(in crate::vcpu) fn take_shared_tpr(&mut self) {
        if self.vapic.is_shared {
            self.read_vapic();
        }
    }

    #[cold]
    fn read_vapic(&mut self) {
        let Some(word) = self.vm.memory.read_gpa(self.vapic.gpa, 4) else {
            return;
        };
        let mut lapic = self.shared.lapic();
        if lapic.tpr() != word as u8 {
            lapic.set_tpr(word as u8);
            drop(lapic);
            self.lapic = None;
            self.is_quiet = false;
            self.recheck = true;
        }
    }

    /// The LAPIC has changed, or the guest is about to go on.
    #[inline]
    pub(in crate::vcpu) fn show_tpr(&mut self) {
        if self.vapic.is_shared {
            self.write_vapic();
        }
    }

    /// The guest is about to go on.
    #[inline]
    pub(in crate::vcpu) fn share_tpr(&mut self) {
        if self.vapic.gpa != 0 {
            self.write_vapic();
        }
    }

    #[cold]
    fn write_vapic(&mut self) {
        let lapic = self.shared.lapic();
        let served = lapic.highest_isr().unwrap_or(0) & 0xf0;
        let requested = lapic.highest_irr().unwrap_or(0);
        let word = u32::from_le_bytes([lapic.tpr(), served, 0, requested]);
        drop(lapic);
        let written = self.vm.memory.write_gpa(self.vapic.gpa, 4, word.into());
        self.vapic.is_shared = written.is_some();
    }

    /// KVM_RUN ends: the VMM sees, and may change, the LAPIC alone.
    #[inline]
    pub(in crate::vcpu) fn unshare_tpr(&mut self) {
        if self.vapic.is_shared {
            self.read_vapic();
            self.vapic.is_shared = false;
            self.recheck = true;
        }
    }
}
