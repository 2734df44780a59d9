//! The synthetic debugger: registers by which a guest and the VMM's debugger exchange packets. Their meaning is the
//! VMM's business (KVM API document, KVM_EXIT_HYPERV_SYNDBG).

use super::Bus;
use crate::{Exit, HyperVExit, system::hv_msrs::index::*};

impl Bus {
    /// Reads a register. If CPUID shows no debugger, only the VMM (`host`) may access the registers.
    pub(super) fn debugger_msr(&self, index: u32, host: bool) -> Option<u64> {
        if !host && !self.hv.has_debugger {
            return None;
        }
        let debugger = &self.vm.hyperv.partition().debugger;
        Some(match index {
            SYNDBG_CONTROL => debugger.control,
            SYNDBG_STATUS => debugger.status,
            SYNDBG_OPTIONS => debugger.options,
            _ => *debugger.pages.get((index - SYNDBG_SEND_BUFFER) as usize)?,
        })
    }

    /// Writes a register. The VMM is told of writes that ask it to act.
    pub(super) fn set_debugger_msr(&mut self, index: u32, value: u64, host: bool) -> bool {
        if !host && !self.hv.has_debugger {
            return false;
        }
        let mut partition = self.vm.hyperv.partition();
        let debugger = &mut partition.debugger;
        match index {
            SYNDBG_CONTROL => debugger.control = value,
            SYNDBG_STATUS => debugger.status = value,
            SYNDBG_OPTIONS => debugger.options = value,
            _ => match debugger
                .pages
                .get_mut((index - SYNDBG_SEND_BUFFER) as usize)
            {
                Some(page) => *page = value,
                None => return false,
            },
        }
        drop(partition);
        if !host && matches!(index, SYNDBG_CONTROL | SYNDBG_PENDING_BUFFER) {
            self.hv.synic.tell(index);
            self.recheck = true;
        }
        true
    }

    pub(super) fn debugger_exit(&self, msr: u32) -> Exit {
        let debugger = self.vm.hyperv.partition().debugger;
        Exit::HyperV(HyperVExit::Debugger {
            msr,
            control: debugger.control,
            status: debugger.status,
            pages: debugger.pages,
        })
    }

    /// Takes over the VMM's answer to KVM_EXIT_HYPERV_SYNDBG.
    pub(in crate::vcpu) fn set_debugger_status(&self, status: u64) {
        self.vm.hyperv.partition().debugger.status = status;
    }
}
