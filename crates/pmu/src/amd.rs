//! AMD's registers (APM vol. 2, 13.2).

use x86_defs::msr::*;

use crate::{Pmu, Refused, Tally};

/// Bits of an event select that do not exist. A write to them has no effect.
const SELECT_RESERVED: u64 = 0xffff_fff0_0028_0000;

/// A register of this PMU.
enum Register {
    Counter(usize),
    Select(usize),
    GlobalStatus,
    GlobalCtrl,
    GlobalStatusClear,
    GlobalStatusSet,
}

impl Pmu {
    fn amd_register(&self, index: u32) -> Option<Register> {
        let c = &self.config;
        let core = index.wrapping_sub(AMD64_PERFEVTSEL0_CORE);
        if c.has_core && core < 2 * u32::from(c.general) {
            let n = (core / 2) as usize;
            return Some(if core.is_multiple_of(2) {
                Register::Select(n)
            } else {
                Register::Counter(n)
            });
        }
        // The K7's numbers reach the first four counters.
        let general = usize::from(c.general).min(4);
        for (first, make) in [
            (K7_EVNTSEL0, Register::Select as fn(usize) -> Register),
            (K7_PERFCTR0, Register::Counter),
        ] {
            let n = index.wrapping_sub(first) as usize;
            if n < general {
                return Some(make(n));
            }
        }
        match index {
            _ if !c.has_global => None,
            AMD64_PERF_CNTR_GLOBAL_STATUS => Some(Register::GlobalStatus),
            AMD64_PERF_CNTR_GLOBAL_CTL => Some(Register::GlobalCtrl),
            AMD64_PERF_CNTR_GLOBAL_STATUS_CLR => Some(Register::GlobalStatusClear),
            AMD64_PERF_CNTR_GLOBAL_STATUS_SET => Some(Register::GlobalStatusSet),
            _ => None,
        }
    }

    pub(crate) fn read_amd(&mut self, index: u32, now: &Tally) -> Option<Result<u64, Refused>> {
        Some(Ok(match self.amd_register(index)? {
            Register::Counter(n) => self.general[n].value(now),
            Register::Select(n) => self.selects[n],
            Register::GlobalStatus => {
                self.settle(now);
                self.global_status
            }
            Register::GlobalCtrl => self.global_ctrl,
            Register::GlobalStatusClear | Register::GlobalStatusSet => 0,
        }))
    }

    pub(crate) fn write_amd(
        &mut self,
        index: u32,
        value: u64,
        is_host: bool,
        now: &Tally,
    ) -> Option<Result<(), Refused>> {
        match self.amd_register(index)? {
            Register::Counter(n) => self.set_counter(n, value, now),
            Register::Select(n) => {
                let value = value & !SELECT_RESERVED;
                if value != self.selects[n] {
                    self.change(now, |p| p.selects[n] = value);
                }
            }
            Register::GlobalCtrl => {
                let value = value & self.global_bits();
                if value != self.global_ctrl {
                    self.change(now, |p| p.global_ctrl = value);
                }
            }
            // The register is read-only, except for the VMM.
            Register::GlobalStatus => {
                self.settle(now);
                if is_host {
                    self.global_status = value & self.global_bits();
                }
            }
            Register::GlobalStatusClear => {
                self.settle(now);
                if !is_host {
                    self.global_status &= !value;
                }
            }
            Register::GlobalStatusSet => {
                self.settle(now);
                if !is_host {
                    self.global_status |= value & self.global_bits();
                }
            }
        }
        Some(Ok(()))
    }
}
