//! Intel's registers (SDM vol. 3, 20.2; vol. 4, table 2-2).

use x86_defs::msr::*;

use crate::{FIXED_SHIFT, MASK, Pmu, Refused, Tally};

/// Reserved bits of an event select: ANY, which is deprecated, and all bits above CMASK.
const SELECT_RESERVED: u64 = 0xffff_ffff_0020_0000;
/// A counter's field in IA32_FIXED_CTR_CTRL: its levels and PMI. ANY is deprecated.
const FIXED_VALID: u64 = 0b1011;
/// Bits of IA32_PERF_GLOBAL_OVF_CTRL whose conditions never occur here: uncore, OvfBuf, CondChgd.
const OTHER_STATUS: u64 = 7 << 61;

/// A register of this PMU.
enum Register {
    General(usize),
    GeneralInFull(usize),
    Select(usize),
    Fixed(usize),
    FixedCtrl,
    GlobalStatus,
    GlobalCtrl,
    GlobalOvfCtrl,
}

impl Pmu {
    fn intel_register(&self, index: u32) -> Option<Register> {
        let c = &self.config;
        let within = |first: u32, n: u8| {
            let at = index.wrapping_sub(first);
            (at < n.into()).then_some(at as usize)
        };
        if let Some(n) = within(IA32_PMC0, c.general) {
            return Some(Register::General(n));
        }
        if let Some(n) = within(IA32_PERFEVTSEL0, c.general) {
            return Some(Register::Select(n));
        }
        if let Some(n) = within(IA32_A_PMC0, c.general).filter(|_| c.full_width) {
            return Some(Register::GeneralInFull(n));
        }
        if !c.has_global {
            return None;
        }
        if let Some(n) = within(IA32_FIXED_CTR0, c.fixed) {
            return Some(Register::Fixed(n));
        }
        match index {
            IA32_FIXED_CTR_CTRL => Some(Register::FixedCtrl),
            IA32_PERF_GLOBAL_STATUS => Some(Register::GlobalStatus),
            IA32_PERF_GLOBAL_CTRL => Some(Register::GlobalCtrl),
            IA32_PERF_GLOBAL_OVF_CTRL => Some(Register::GlobalOvfCtrl),
            _ => None,
        }
    }

    pub(crate) fn read_intel(
        &mut self,
        index: u32,
        _is_host: bool,
        now: &Tally,
    ) -> Option<Result<u64, Refused>> {
        Some(Ok(match self.intel_register(index)? {
            Register::General(n) | Register::GeneralInFull(n) => self.general[n].value(now),
            Register::Select(n) => self.selects[n],
            Register::Fixed(n) => self.fixed[n].value(now),
            Register::FixedCtrl => self.fixed_ctrl,
            Register::GlobalStatus => {
                self.settle(now);
                self.global_status
            }
            Register::GlobalCtrl => self.global_ctrl,
            Register::GlobalOvfCtrl => 0,
        }))
    }

    pub(crate) fn write_intel(
        &mut self,
        index: u32,
        value: u64,
        is_host: bool,
        now: &Tally,
    ) -> Option<Result<(), Refused>> {
        let good = match self.intel_register(index)? {
            Register::General(n) => {
                // A write by the legacy number takes 32 bits and sign-extends them (SDM vol. 3, 20.2.8).
                let value = if is_host { value } else { value as i32 as u64 };
                self.set_counter(n, value, now);
                true
            }
            Register::GeneralInFull(n) => {
                let good = value & !MASK == 0;
                if good {
                    self.set_counter(n, value, now);
                }
                good
            }
            Register::Select(n) => {
                let good = value & SELECT_RESERVED == 0;
                if good && value != self.selects[n] {
                    self.change(now, |p| p.selects[n] = value);
                }
                good
            }
            Register::Fixed(n) => {
                self.settle(now);
                self.fixed[n].set(value, now);
                true
            }
            Register::FixedCtrl => {
                let valid = (0..self.config.fixed).fold(0, |v, n| v | FIXED_VALID << (4 * n));
                let good = value & !valid == 0;
                if good && value != self.fixed_ctrl {
                    self.change(now, |p| p.fixed_ctrl = value);
                }
                good
            }
            Register::GlobalStatus => {
                let good = is_host && value & !(self.global_bits() | OTHER_STATUS) == 0;
                if good {
                    self.settle(now);
                    self.global_status = value;
                }
                good
            }
            Register::GlobalCtrl => {
                let good = value & !self.global_bits() == 0;
                if good && value != self.global_ctrl {
                    self.change(now, |p| p.global_ctrl = value);
                }
                good
            }
            Register::GlobalOvfCtrl => {
                let good = value & !(self.global_bits() | OTHER_STATUS) == 0;
                // The VMM may restore the register, which always reads as zero.
                if good && !is_host {
                    self.settle(now);
                    self.global_status &= !value;
                }
                good
            }
        };
        Some(if good { Ok(()) } else { Err(Refused) })
    }
}

const _: () = assert!(FIXED_SHIFT == 32);
