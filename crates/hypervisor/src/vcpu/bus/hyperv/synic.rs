//! The synthetic interrupt controller: sixteen sources per processor, each with a message slot in one page of guest
//! memory and event flags in another (Hypervisor Top-Level Functional Specification, "Synthetic Interrupt Controller").
//!
//! The LAPIC holds the sources' vectors. The VMM raises them through GSIs, and learns from them that the guest has
//! taken a message (KVM API document, KVM_CAP_HYPERV_SYNIC). The event flags are the VMM's alone.

use std::sync::{Arc, atomic::Ordering};

use irqchip::Accepted;
use irqchip::lapic::NR_SINTS;

use super::Bus;
use crate::{Error, Exit, HyperVExit, Result, system::hv_msrs::index::*, vm::hyperv::ENABLE};

/// Bytes of a message, its header included.
const MESSAGE: u64 = 256;
/// Offset of the message's flags.
const FLAGS: u64 = 5;
/// HV_SYNIC_VERSION_1.
const VERSION: u64 = 1;
/// The MSRs whose change is an exit. If several have changed, the exits come in this order.
const TOLD: [u32; 5] = [SCONTROL, SIEFP, SIMP, SYNDBG_CONTROL, SYNDBG_PENDING_BUFFER];

/// A processor's controller.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::vcpu) struct Synic {
    /// KVM_ENABLE_CAP has switched it on.
    pub(super) is_active: bool,
    /// KVM_CAP_HYPERV_SYNIC2: pages are not cleared when the guest sets their addresses.
    keeps_pages: bool,
    control: u64,
    version: u64,
    /// HV_X64_MSR_SIEFP.
    events: u64,
    /// HV_X64_MSR_SIMP.
    messages: u64,
    /// Bit for each of [`TOLD`]: the VMM has yet to be told of a write.
    told: u8,
}

impl Synic {
    /// Notes that the VMM must be told of a write to the MSR.
    pub(super) fn tell(&mut self, msr: u32) {
        if let Some(i) = TOLD.iter().position(|told| *told == msr) {
            self.told |= 1 << i;
        }
    }
}

/// The outcome of posting a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    Done,
    /// The slot is occupied. The guest will say when it is free.
    Busy,
    /// There is no page, or the source is masked.
    Failed,
}

impl Bus {
    /// KVM_CAP_HYPERV_SYNIC and KVM_CAP_HYPERV_SYNIC2.
    pub(in crate::vcpu) fn activate_synic(&mut self, keeps_pages: bool) -> Result<()> {
        if !self.has_lapic() {
            return Err(Error::InvalidArgument);
        }
        let synic = &mut self.hv.synic;
        if !synic.is_active {
            synic.version = VERSION;
        }
        synic.is_active = true;
        synic.keeps_pages = keeps_pages;
        Ok(())
    }

    /// Takes the next exit that tells the VMM of a changed MSR.
    #[inline]
    pub(in crate::vcpu) fn take_hyperv_exit(&mut self) -> Option<Exit> {
        if self.hv.synic.told == 0 {
            return None;
        }
        let synic = &mut self.hv.synic;
        let i = synic.told.trailing_zeros() as usize;
        synic.told &= synic.told - 1;
        let msr = *TOLD.get(i)?;
        if matches!(msr, SYNDBG_CONTROL | SYNDBG_PENDING_BUFFER) {
            return Some(self.debugger_exit(msr));
        }
        Some(Exit::HyperV(HyperVExit::Synic {
            msr,
            control: synic.control,
            events: synic.events,
            messages: synic.messages,
        }))
    }

    pub(super) fn synic_msr(&self, index: u32, host: bool) -> Option<u64> {
        let synic = &self.hv.synic;
        if !synic.is_active && !host {
            return None;
        }
        match index {
            SCONTROL => Some(synic.control),
            SVERSION => Some(synic.version),
            SIEFP => Some(synic.events),
            SIMP => Some(synic.messages),
            EOM => Some(0),
            SINT0..=SINT15 => self.shared.lapic().sint((index - SINT0) as usize),
            _ => None,
        }
    }

    pub(super) fn set_synic_msr(&mut self, index: u32, value: u64, host: bool) -> bool {
        // A VMM may write zeros, as it does at a reset.
        if !self.hv.synic.is_active && (!host || value != 0) {
            return false;
        }
        match index {
            SCONTROL => self.hv.synic.control = value,
            SVERSION if host => self.hv.synic.version = value,
            SIEFP | SIMP => {
                let is_new = value & ENABLE != 0 && !host && !self.hv.synic.keeps_pages;
                if is_new && !self.vm.memory.write_bytes(value & !0xfff, &[0; 4096]) {
                    return false;
                }
                match index {
                    SIEFP => self.hv.synic.events = value,
                    _ => self.hv.synic.messages = value,
                }
            }
            EOM => {
                if self.hv.synic.is_active {
                    self.sints_ended(u16::MAX);
                }
            }
            SINT0..=SINT15 => {
                self.sync_lapic();
                let sint = (index - SINT0) as usize;
                return self.shared.lapic().set_sint(sint, value, host);
            }
            _ => return false,
        }
        if !host && index != EOM {
            self.hv.synic.tell(index);
            self.recheck = true;
        }
        true
    }

    /// Notes that the guest is done with these sources' interrupts, by an EOI or by ending a message.
    pub(in crate::vcpu) fn sints_ended(&mut self, sints: u16) {
        self.resume_synthetic_timers(sints);
        let vp = self.shared.vp_index.load(Ordering::Relaxed);
        let vm = Arc::clone(&self.vm);
        vm.with_routing(|chip, lapics| {
            for sint in (0..NR_SINTS as u32).filter(|sint| sints >> sint & 1 != 0) {
                chip.sint_ended(lapics, (vp, sint), |gsi| vm.resample(gsi));
            }
        });
        self.recheck = true;
    }

    /// Puts a message into the source's slot and raises its interrupt. `waits` says whether the guest is to tell when
    /// an occupied slot is free.
    pub(super) fn post_message(&self, sint: u8, kind: u32, payload: &[u8], waits: bool) -> Posted {
        let messages = self.hv.synic.messages;
        if messages & ENABLE == 0 {
            return Posted::Failed;
        }
        let memory = &self.vm.memory;
        let slot = (messages & !0xfff).wrapping_add(u64::from(sint) * MESSAGE);
        match memory.read_gpa(slot, 4) {
            Some(0) => {}
            Some(_) if !waits => return Posted::Done,
            Some(_) => {
                let flagged = memory.rmw_gpa(slot.wrapping_add(FLAGS), 1, |flags| flags | 1);
                // The slot became free meanwhile, so the guest may not have seen the flag.
                if flagged.is_none() || memory.read_gpa(slot, 4) != Some(0) {
                    return Posted::Busy;
                }
            }
            None => return Posted::Failed,
        }
        let mut bytes = [0; MESSAGE as usize - 4];
        if let Some(to) = bytes.get_mut(12..12 + payload.len()) {
            to.copy_from_slice(payload);
        }
        bytes[0] = payload.len() as u8;
        // The message's type is written last, because it says that the slot has a message.
        let is_written = memory.write_bytes(slot.wrapping_add(4), &bytes[..12 + payload.len()])
            && memory.write_gpa(slot, 4, kind.into()).is_some();
        let accepted = self.shared.lapic().raise_sint(sint.into());
        self.shared.accepted(accepted);
        if is_written && accepted != Accepted::Ignored {
            Posted::Done
        } else {
            Posted::Failed
        }
    }
}
