//! The guest's access to the registers: the xAPIC page and the x2APIC MSRs.
//!
//! Each write returns an [`Action`]: what the vCPU must do once it has dropped the LAPIC's lock.

use super::spec::{self, lvt, reg, spiv};
use super::{Accepted, Lapic, icr};
use crate::{LapicIrq, Now, Shorthand};

/// End of an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Eoi {
    /// The interrupt's vector.
    pub vector: u8,
    /// The interrupt was level-triggered (TMR).
    pub level: bool,
    /// IOAPICs must be told: the interrupt was level-triggered, and the broadcast is not suppressed.
    pub broadcast: bool,
    /// Hyper-V's synthetic sources that use the vector, a bit each.
    pub sints: u16,
}

/// What the vCPU must do after a register write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    None,
    /// The APIC id may differ from the vCPU's id now.
    Renumbered,
    /// Priorities or requests changed: ask [`Lapic::pending`] again.
    Recheck,
    /// The task priority was written: ask [`Lapic::pending`] again.
    Priority,
    /// The timer was programmed: ask [`Lapic::timer_deadline`] again.
    Timer,
    /// Send this with [`crate::deliver`].
    Ipi(LapicIrq),
    /// Tell the IOAPIC (or the VMM, if the irqchip is split), then recheck.
    Eoi(Eoi),
}

/// The register or the mode does not allow the access: #GP for an MSR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidAccess;

impl Lapic {
    /// True if reading or writing the register at `offset` of the page depends on the time. For others any time may be
    /// given.
    pub const fn is_timed(offset: u64) -> bool {
        matches!((offset >> 4) as usize, reg::TMCCT | reg::TMICT | reg::TDCR)
    }

    /// As [`Self::is_timed`], for an MSR.
    pub const fn is_msr_timed(index: u32) -> bool {
        Self::is_timed((index.wrapping_sub(spec::MSR_BASE) as u64) << 4)
    }

    /// Reads from the register page; `offset` is below 4096. `None` means that the LAPIC does not answer MMIO, so the
    /// bus gives all ones (KVM's "MMIO hole": globally disabled, or in x2APIC mode).
    ///
    /// A read that crosses an aligned word gives 0, as in KVM.
    pub fn mmio_read(&self, offset: u64, size: u8, now: Now) -> Option<u64> {
        if !self.is_enabled() || self.is_x2apic() {
            return None;
        }
        let at = offset & 0xf;
        if at + u64::from(size) > 4 {
            return Some(0);
        }
        let value = self.read((offset >> 4) as usize, now).unwrap_or(0);
        let mask = u64::MAX >> (64 - 8 * u32::from(size.clamp(1, 8)));
        Some(u64::from(value) >> (at * 8) & mask)
    }

    /// Writes to the register page. Only aligned 32-bit writes have an effect.
    pub fn mmio_write(&mut self, offset: u64, size: u8, value: u32, now: Now) -> Action {
        if !self.is_enabled() || self.is_x2apic() || size != 4 || offset & 0xf != 0 {
            return Action::None;
        }
        self.write((offset >> 4) as usize, value, now)
            .unwrap_or(Action::None)
    }

    /// Reads a register ([`reg`]) by other means than the page, as Hyper-V's MSRs do.
    pub fn register(&self, r: usize, now: Now) -> Option<u32> {
        self.read(r, now)
    }

    /// Writes a register by other means than the page; `None` if the mode has no such register to write.
    pub fn set_register(&mut self, r: usize, value: u32, now: Now) -> Option<Action> {
        self.write(r, value, now)
    }

    /// RDMSR of 0x800 to 0x8ff.
    pub fn msr_read(&self, index: u32, now: Now) -> Result<u64, InvalidAccess> {
        let r = self.x2apic_reg(index)?;
        if r == reg::ICR {
            return Ok(u64::from(self.get(reg::ICR2)) << 32 | u64::from(self.get(reg::ICR)));
        }
        self.read(r, now).map(u64::from).ok_or(InvalidAccess)
    }

    /// WRMSR of 0x800 to 0x8ff.
    pub fn msr_write(&mut self, index: u32, value: u64, now: Now) -> Result<Action, InvalidAccess> {
        let r = self.x2apic_reg(index)?;
        if r == reg::ICR {
            return self.write_icr64(value);
        }
        let value = u32::try_from(value).map_err(|_| InvalidAccess)?;
        self.write(r, value, now).ok_or(InvalidAccess)
    }

    /// A 64-bit ICR write, by MSR.
    fn write_icr64(&mut self, value: u64) -> Result<Action, InvalidAccess> {
        let (low, high) = (value as u32, (value >> 32) as u32);
        if low & spec::icr::X2APIC_RESERVED != 0 {
            return Err(InvalidAccess);
        }
        self.set(reg::ICR2, high);
        Ok(self.write_icr(low))
    }

    fn x2apic_reg(&self, index: u32) -> Result<usize, InvalidAccess> {
        let r = index.wrapping_sub(spec::MSR_BASE) as usize;
        if self.is_x2apic() && r < spec::NR_REGS {
            Ok(r)
        } else {
            Err(InvalidAccess)
        }
    }

    /// Returns `None` if the mode has no such register to read.
    fn read(&self, r: usize, now: Now) -> Option<u32> {
        let x2apic = self.is_x2apic();
        match r {
            reg::PROCPRI => Some(u32::from(self.ppr())),
            reg::TMCCT => Some(self.current_count(now)),
            reg::ARBPRI if !x2apic => Some(0),
            reg::DFR | reg::ICR2 if !x2apic => Some(self.get(r)),
            reg::LVTCMCI if self.config.cmci => Some(self.get(r)),
            reg::ID
            | reg::VERSION
            | reg::TASKPRI
            | reg::LDR
            | reg::SPIV
            | reg::ISR..=reg::IRR_END
            | reg::ESR
            | reg::ICR
            | reg::LVTT..=reg::TMICT
            | reg::TDCR => Some(self.get(r)),
            _ => None,
        }
    }

    /// Returns `None` if the mode has no such register to write.
    fn write(&mut self, r: usize, value: u32, now: Now) -> Option<Action> {
        let x2apic = self.is_x2apic();
        Some(match r {
            reg::ID if !x2apic => {
                self.set(r, value & 0xff00_0000);
                Action::Renumbered
            }
            reg::TASKPRI => {
                self.set(r, value & 0xff);
                Action::Priority
            }
            reg::EOI => self.eoi().map_or(Action::None, Action::Eoi),
            reg::LDR if !x2apic => {
                self.set(r, value & 0xff00_0000);
                Action::None
            }
            reg::DFR if !x2apic => {
                self.set(r, value | 0x0fff_ffff);
                Action::None
            }
            reg::SPIV => self.write_spiv(value),
            reg::ICR if !x2apic => self.write_icr(value),
            reg::ICR2 if !x2apic => {
                self.set(r, value & 0xff00_0000);
                Action::None
            }
            reg::LVTT => {
                let modes = if self.config.tsc_deadline {
                    lvt::TIMER_MODE
                } else {
                    lvt::TIMER_PERIODIC
                };
                let value = self.masked_if_disabled(value) & (lvt::ANY | modes);
                self.write_lvtt(value)
            }
            reg::LVTTHMR | reg::LVTPC => self.write_lvt(r, value, lvt::ANY | lvt::MODE),
            reg::LVT0 | reg::LVT1 => self.write_lvt(r, value, lvt::LINT),
            reg::LVTERR => self.write_lvt(r, value, lvt::ANY),
            reg::LVTCMCI if self.config.cmci => self.write_lvt(r, value, lvt::ANY | lvt::MODE),
            reg::ESR if !x2apic || value == 0 => Action::None,
            reg::TMICT => self.write_initial_count(value, now),
            reg::TDCR => self.write_divide(value, now),
            reg::SELF_IPI if x2apic && value & !0xff == 0 => {
                if self.is_software_enabled() {
                    self.set_irq(value as u8, false);
                }
                Action::Recheck
            }
            _ => return None,
        })
    }

    fn write_icr(&mut self, low: u32) -> Action {
        let low = low & !spec::icr::BUSY;
        self.set(reg::ICR, low);
        let irq = icr::decode(low, self.get(reg::ICR2), self.is_x2apic());
        // The most frequent IPI to oneself concerns no other LAPIC.
        if irq.shorthand == Shorthand::ToSelf
            && matches!(
                self.accept(&irq),
                Accepted::Interrupt | Accepted::Coalesced | Accepted::Ignored
            )
        {
            return Action::Recheck;
        }
        Action::Ipi(irq)
    }

    fn write_spiv(&mut self, value: u32) -> Action {
        let mut writable = spiv::WRITABLE;
        if self.get(reg::VERSION) & spec::VERSION_DIRECTED_EOI != 0 {
            writable |= spiv::DIRECTED_EOI;
        }
        self.set(reg::SPIV, value & writable);
        if value & spiv::ENABLED == 0 {
            // SDM vol. 3, 11.4.7.2: software-disabling masks every LVT entry.
            for r in self.lvts() {
                let entry = self.get(r);
                self.set(r, entry | lvt::MASKED);
            }
        }
        Action::Recheck
    }

    fn write_lvt(&mut self, r: usize, value: u32, writable: u32) -> Action {
        let value = self.masked_if_disabled(value) & writable;
        self.set(r, value);
        // Unmasking LINT0 may let the PIC through.
        Action::Recheck
    }

    fn masked_if_disabled(&self, value: u32) -> u32 {
        if self.is_software_enabled() {
            value
        } else {
            value | lvt::MASKED
        }
    }
}
