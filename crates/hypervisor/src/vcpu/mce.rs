//! Machine check: KVM_X86_SETUP_MCE, KVM_X86_SET_MCE and the bank registers
//! (SDM vol. 3, chapter 16; KVM API document).

use irqchip::{LapicConfig, lapic::LocalSource};
use kvm_bindings::kvm_x86_mce;
use x86_cpu::PendingException;
use x86_defs::{control::cr4, msr::*, vector};

use super::{Inner, Vcpu};
use crate::{
    Error, Result,
    limits::{MCE_BANKS, MCE_SUPPORTED_CAP, MCG_CMCI_P, MCG_CTL_P},
};

/// IA32_MCG_CAP: number of banks, and number of extended state registers.
const MCG_COUNTS: u64 = 0xff | 0xff_0000;
/// IA32_MCG_STATUS: a machine check is in progress.
const MCIP: u64 = 1 << 2;
/// IA32_MCi_STATUS: valid, overflow, uncorrected.
const VAL: u64 = 1 << 63;
const OVER: u64 = 1 << 62;
const UC: u64 = 1 << 61;
/// IA32_MCi_STATUS: the error is signalled by #MC: the processor's context is corrupt, signalled, action required.
const SIGNALLED: u64 = 1 << 57 | 1 << 56 | 1 << 55;
/// IA32_MCi_CTL2: errors that need no action raise the CMCI entry of the LVT.
const CMCI_EN: u64 = 1 << 30;
/// IA32_MCi_CTL2: after how many corrected errors.
const THRESHOLD: u64 = 0x7fff;

/// Registers of one bank.
#[derive(Clone, Copy, Debug, Default)]
struct Bank {
    ctl: u64,
    status: u64,
    addr: u64,
    misc: u64,
    ctl2: u64,
}

/// The machine-check architecture of a vCPU.
#[derive(Clone, Debug)]
pub(super) struct Mce {
    cap: u64,
    ctl: u64,
    status: u64,
    banks: [Bank; MCE_BANKS],
}

impl Default for Mce {
    fn default() -> Self {
        Self {
            cap: MCE_BANKS as u64,
            ctl: 0,
            status: 0,
            banks: [Bank::default(); MCE_BANKS],
        }
    }
}

/// True for the MSRs of this module.
pub(super) fn is_mce(index: u32) -> bool {
    matches!(
        index,
        IA32_MCG_STATUS | IA32_MCG_CTL | IA32_MCG_CAP | IA32_P5_MC_ADDR | IA32_P5_MC_TYPE
    ) || index.wrapping_sub(IA32_MC0_CTL) < 4 * MCE_BANKS as u32
        || is_ctl2(index)
}

/// True for IA32_MCi_CTL2.
fn is_ctl2(index: u32) -> bool {
    index.wrapping_sub(IA32_MC0_CTL2) < MCE_BANKS as u32
}

impl Mce {
    fn nr_banks(&self) -> usize {
        (self.cap & 0xff) as usize
    }
    fn bank_at(&mut self, n: u32) -> Option<&mut Bank> {
        let nr = self.nr_banks();
        self.banks.get_mut(..nr)?.get_mut(n as usize)
    }
    /// Returns the bank's register that an MSR names, and its number among the bank's four.
    fn bank(&mut self, index: u32) -> Option<(&mut u64, u32)> {
        let at = index.checked_sub(IA32_MC0_CTL)?;
        let bank = self.bank_at(at / 4)?;
        let register = match at % 4 {
            0 => &mut bank.ctl,
            1 => &mut bank.status,
            2 => &mut bank.addr,
            _ => &mut bank.misc,
        };
        Some((register, at % 4))
    }
    /// Returns the bank's IA32_MCi_CTL2, if an MSR names one.
    fn ctl2(&mut self, index: u32) -> Option<&mut u64> {
        let bank = self.bank_at(index.checked_sub(IA32_MC0_CTL2)?)?;
        Some(&mut bank.ctl2)
    }
    /// RDMSR; `None` is #GP.
    pub(super) fn read(&mut self, index: u32, host: bool) -> Option<u64> {
        match index {
            IA32_P5_MC_ADDR | IA32_P5_MC_TYPE => Some(0),
            IA32_MCG_CAP => Some(self.cap),
            IA32_MCG_CTL => (host || self.cap & MCG_CTL_P != 0).then_some(self.ctl),
            IA32_MCG_STATUS => Some(self.status),
            _ if is_ctl2(index) => {
                let may_read = host || self.cap & MCG_CMCI_P != 0;
                self.ctl2(index).filter(|_| may_read).copied()
            }
            _ => self.bank(index).map(|(register, _)| *register),
        }
    }
    /// WRMSR; false is #GP.
    pub(super) fn write(
        &mut self,
        index: u32,
        value: u64,
        host: bool,
        may_set_status: bool,
    ) -> bool {
        match index {
            IA32_MCG_STATUS => self.status = value,
            IA32_MCG_CTL => {
                let is_there = self.cap & MCG_CTL_P != 0;
                if !is_there && (value != 0 || !host) || value != 0 && value != u64::MAX {
                    return false;
                }
                self.ctl = value;
            }
            IA32_MCG_CAP => return host && value == self.cap,
            IA32_P5_MC_ADDR | IA32_P5_MC_TYPE => return false,
            _ if is_ctl2(index) => {
                let may_write = self.cap & MCG_CMCI_P != 0 || host && value == 0;
                let is_good = may_write && value & !(CMCI_EN | THRESHOLD) == 0;
                let Some(register) = self.ctl2(index).filter(|_| is_good) else {
                    return false;
                };
                *register = value;
            }
            _ => {
                let Some((register, which)) = self.bank(index) else {
                    return false;
                };
                let good = match which {
                    // All bits or none. Some guests clear bit 10 or bit 0 because of errata of CPUs.
                    0 => value == 0 || value | 1 << 10 | 1 == u64::MAX,
                    1 => host || value == 0 || may_set_status,
                    _ => true,
                };
                if good {
                    *register = value;
                }
                return good;
            }
        }
        true
    }
}

impl Inner {
    fn set_mce(&mut self, mce: &kvm_x86_mce) -> Result<()> {
        let m = &mut self.bus.mce;
        let nr = m.nr_banks();
        let bank = m
            .banks
            .get_mut(..nr)
            .and_then(|banks| banks.get_mut(usize::from(mce.bank)))
            .ok_or(Error::InvalidArgument)?;
        if mce.status & VAL == 0 {
            return Err(Error::InvalidArgument);
        }
        let uncorrected = mce.status & UC != 0;
        // Of an uncorrected error that needs no action (UCNA), nothing but CMCI tells.
        let needs_action = mce.mcg_status != 0 || mce.status & SIGNALLED != 0;
        if uncorrected && !needs_action {
            (bank.status, bank.addr, bank.misc) = (mce.status, mce.addr, mce.misc);
            m.status = 0;
            if m.cap & MCG_CMCI_P != 0 && bank.ctl2 & CMCI_EN != 0 {
                self.bus.deliver_local(LocalSource::Cmci);
            }
            return Ok(());
        }
        // The guest has switched off reporting, globally or for the bank.
        if uncorrected && m.cap & MCG_CTL_P != 0 && m.ctl != u64::MAX
            || uncorrected && bank.ctl != u64::MAX
        {
            return Ok(());
        }
        let over = if bank.status & VAL != 0 { OVER } else { 0 };
        if uncorrected {
            if m.status & MCIP != 0 || self.cpu.cr4 & cr4::MCE == 0 {
                self.cpu.events.triple_fault = true;
                return Ok(());
            }
            m.status = mce.mcg_status;
            self.cpu.events.exception = Some(PendingException {
                vector: vector::MC,
                ..PendingException::default()
            });
        } else if over != 0 && bank.status & UC != 0 {
            // A corrected error does not replace an uncorrected one.
            bank.status |= OVER;
            return Ok(());
        }
        bank.addr = mce.addr;
        bank.misc = mce.misc;
        bank.status = mce.status | over;
        Ok(())
    }
}

impl Vcpu {
    /// KVM_X86_SETUP_MCE: IA32_MCG_CAP. EINVAL for no banks, too many, or unknown bits.
    pub fn setup_mce(&self, cap: u64) -> Result<()> {
        let banks = (cap & 0xff) as usize;
        if banks == 0 || banks > MCE_BANKS || cap & !(MCE_SUPPORTED_CAP | MCG_COUNTS) != 0 {
            return Err(Error::InvalidArgument);
        }
        let mut inner = self.lock();
        let m = &mut inner.bus.mce;
        m.cap = cap;
        if cap & MCG_CTL_P != 0 {
            m.ctl = u64::MAX;
        }
        for bank in &mut m.banks[..banks] {
            bank.ctl = u64::MAX;
            if cap & MCG_CMCI_P != 0 {
                bank.ctl2 = 0;
            }
        }
        let mut lapic = self.shared.lapic();
        let config = LapicConfig {
            cmci: cap & MCG_CMCI_P != 0,
            ..*lapic.config()
        };
        lapic.set_config(config);
        drop(lapic);
        inner.bus.lapic_changed();
        Ok(())
    }
    /// KVM_X86_SET_MCE: records an error and, if it is uncorrected, raises #MC.
    pub fn set_mce(&self, mce: &kvm_x86_mce) -> Result<()> {
        self.lock().set_mce(mce)
    }
}
