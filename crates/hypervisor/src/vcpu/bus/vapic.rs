//! The task priority in guest memory (KVM_SET_VAPIC_ADDR), and accesses to its register that are reported to the VMM
//! (KVM_TPR_ACCESS_REPORTING).
//!
//! A VMM that is told of a 32-bit guest's accesses replaces them by code of its own, which uses a word in memory. The
//! word's lowest byte is the priority, the next one the class of the highest interrupt in service, the last one the
//! highest requested interrupt. The guest writes the priority there without telling the vCPU. So the priority is taken
//! over before the LAPIC's state is used, and the word is written anew before the guest goes on.
//!
//! DEVIATION: the accesses of one instruction are reported 64 times. KVM reports each, but for processors that have the
//! register in hardware (APICv), where it reports none.
//!
//! DEVIATION: in interpreted code (real mode) an access is reported at the end of its block, not after the instruction.

use std::collections::{HashMap, VecDeque};

use super::Bus;
use crate::{Error, Exit, Result};

/// MMIO offset of the task priority in the LAPIC's page.
const TASK_PRIORITY: u64 = 0x80;
/// MSR of the task priority in x2APIC mode.
const X2APIC_TASK_PRIORITY: u32 = x86_defs::msr::IA32_X2APIC_BASE + 8;

/// The shared word, and the accesses to report.
#[derive(Debug, Default)]
pub(in crate::vcpu) struct Vapic {
    /// KVM_SET_VAPIC_ADDR; 0 for none.
    gpa: u64,
    /// The guest may have written to the word since the vCPU wrote it.
    is_shared: bool,
    /// KVM_TPR_ACCESS_REPORTING.
    reports: bool,
    /// Accesses not yet reported: RIP, and whether the access is a write.
    accesses: VecDeque<(u64, bool)>,
    /// How often accesses at a RIP have been reported.
    told: HashMap<u64, u8>,
}

/// How often the VMM is told of the accesses of one instruction. A VMM replaces an instruction at the first report, or
/// soon after. Those that it leaves alone need not end KVM_RUN each time.
const TOLD: u8 = 64;
/// Of how many instructions the VMM is told.
const INSTRUCTIONS: usize = 4096;

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
        self.vapic.told.clear();
    }

    /// Notes an access to the LAPIC's page, which may be one to report.
    #[inline]
    pub(in crate::vcpu) fn note_lapic_access(&mut self, rip: u64, gpa: u64, is_write: bool) {
        if self.vapic.reports && gpa & 0xff0 == TASK_PRIORITY {
            self.report_tpr(rip, is_write);
        }
    }

    /// Notes an access to an x2APIC register, which may be one to report.
    pub(in crate::vcpu) fn note_x2apic_access(&mut self, rip: u64, index: u32, is_write: bool) {
        if self.vapic.reports && index == X2APIC_TASK_PRIORITY && self.has_lapic() {
            self.report_tpr(rip, is_write);
        }
    }

    /// Queues a report for the VMM, which gets it before the guest goes on.
    #[cold]
    fn report_tpr(&mut self, rip: u64, is_write: bool) {
        let told = &mut self.vapic.told;
        if told.len() >= INSTRUCTIONS && !told.contains_key(&rip) {
            return;
        }
        let times = told.entry(rip).or_default();
        if *times >= TOLD {
            return;
        }
        *times += 1;
        self.vapic.accesses.push_back((rip, is_write));
        self.recheck = true;
    }

    /// Takes the next KVM_EXIT_TPR_ACCESS, if one is queued.
    #[inline]
    pub(in crate::vcpu) fn take_tpr_access(&mut self) -> Option<Exit> {
        let (rip, is_write) = self.vapic.accesses.pop_front()?;
        Some(Exit::TprAccess { rip, is_write })
    }

    /// Takes over the priority that the guest has written. Called before the LAPIC's state is used.
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

    /// Writes the word anew if the guest uses it. Called when the LAPIC has changed.
    #[inline]
    pub(in crate::vcpu) fn show_tpr(&mut self) {
        if self.vapic.is_shared {
            self.write_vapic();
        }
    }

    /// Writes the word and leaves it to the guest. Called before the guest goes on.
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

    /// Ends the sharing when KVM_RUN ends: from then on the VMM sees, and may change, the LAPIC's own state alone.
    #[inline]
    pub(in crate::vcpu) fn unshare_tpr(&mut self) {
        if self.vapic.is_shared {
            self.read_vapic();
            self.vapic.is_shared = false;
            self.recheck = true;
        }
    }
}
