//! MSRs: CPU registers from `x86_cpu::msr_model`, and those that belong to the
//! hypervisor (TSC, APIC base, paravirtual clock, machine check).

use x86_cpu::{
    CpuState, Flush, GuestBus,
    msr_model::{self, MsrWrite},
};
use x86_defs::msr::*;

use super::bus::Bus;

/// IA32_APIC_BASE: BSP, x2APIC enable, enable and the address field.
const APIC_BASE_BSP: u64 = 1 << 8;
const APIC_BASE_ENABLE: u64 = 1 << 11;
const APIC_BASE_ADDRESS: u64 = 0x000f_ffff_ffff_f000;

impl Bus {
    /// RDMSR (`host` false) or KVM_GET_MSRS; `None` is `#GP` or the end of the list.
    pub(super) fn msr(&mut self, cpu: &mut CpuState, index: u32, host: bool) -> Option<u64> {
        match index {
            IA32_TSC => Some(self.tsc.guest(host::cpu::rdtsc())),
            IA32_TSC_ADJUST => Some(self.tsc_adjust),
            IA32_APIC_BASE => Some(self.apic_base()),
            IA32_X2APIC_BASE..=IA32_X2APIC_END => self.x2apic_read(index),
            IA32_TSC_DEADLINE if self.has_lapic() => Some(self.shared.lapic().tsc_deadline()),
            KVM_WALL_CLOCK | KVM_WALL_CLOCK_NEW => Some(self.pv.wall_clock),
            KVM_SYSTEM_TIME | KVM_SYSTEM_TIME_NEW => Some(self.pv.system_time),
            KVM_ASYNC_PF_EN => Some(self.pv.async_pf[0]),
            KVM_ASYNC_PF_INT => Some(self.pv.async_pf[1]),
            KVM_ASYNC_PF_ACK => Some(0),
            KVM_STEAL_TIME => Some(self.steal_msr()),
            KVM_PV_EOI_EN => Some(self.pv_eoi_msr()),
            KVM_POLL_CONTROL => Some((!self.pv.guest_polls).into()),
            _ if super::mce::is_mce(index) => self.mce.read(index, host),
            _ if host => msr_model::host_read(cpu, index),
            _ => msr_model::read(cpu, index),
        }
    }

    /// WRMSR (`host` false) or KVM_SET_MSRS; false is `#GP` or the end of the list.
    pub(super) fn set_msr(
        &mut self,
        cpu: &mut CpuState,
        index: u32,
        value: u64,
        host: bool,
    ) -> bool {
        match index {
            IA32_TSC => {
                let before = self.tsc.offset;
                self.tsc = self.vm.clock.write_tsc(self.tsc, value, host);
                if !host {
                    // SDM vol. 3, 18.17.3: a write of the TSC moves TSC_ADJUST by the same amount.
                    self.tsc_adjust = self
                        .tsc_adjust
                        .wrapping_add(self.tsc.offset.wrapping_sub(before));
                }
                self.update_clock();
                self.update_timer();
                true
            }
            IA32_TSC_ADJUST => {
                if !host {
                    let delta = value.wrapping_sub(self.tsc_adjust);
                    self.tsc = self.tsc.with_offset(self.tsc.offset.wrapping_add(delta));
                    self.update_clock();
                }
                self.tsc_adjust = value;
                true
            }
            IA32_APIC_BASE => self.set_apic_base(cpu, value, host),
            IA32_X2APIC_BASE..=IA32_X2APIC_END => self.x2apic_write(index, value),
            IA32_TSC_DEADLINE if self.has_lapic() => {
                let action = self.shared.lapic().set_tsc_deadline(value);
                self.act(action);
                true
            }
            KVM_WALL_CLOCK | KVM_WALL_CLOCK_NEW => {
                self.pv.wall_clock = value;
                self.write_wall_clock();
                true
            }
            KVM_SYSTEM_TIME | KVM_SYSTEM_TIME_NEW => {
                self.pv.system_time = value;
                self.update_clock();
                true
            }
            KVM_ASYNC_PF_EN => {
                // Bits 4 and 5 are reserved; without a LAPIC there is no interrupt to send.
                let good = value & 0x30 == 0 && (self.has_lapic() || value == 0);
                if good {
                    self.pv.async_pf[0] = value;
                }
                good
            }
            KVM_ASYNC_PF_INT => {
                let good = value >> 8 == 0;
                if good {
                    self.pv.async_pf[1] = value;
                }
                good
            }
            KVM_ASYNC_PF_ACK => true,
            KVM_STEAL_TIME => self.set_steal_msr(value),
            KVM_PV_EOI_EN => self.set_pv_eoi_msr(value),
            KVM_POLL_CONTROL => {
                if value & !1 != 0 {
                    return false;
                }
                self.pv.guest_polls = value == 0;
                true
            }
            _ if super::mce::is_mce(index) => {
                // AMD64_HWCR.McStatusWrEn.
                let may_set_status = cpu.msr.hwcr >> 18 & 1 != 0;
                self.mce.write(index, value, host, may_set_status)
            }
            _ => {
                let outcome = if host {
                    msr_model::host_write(cpu, index, value)
                } else {
                    msr_model::write(cpu, index, value)
                };
                match outcome {
                    MsrWrite::Done => true,
                    MsrWrite::LoadRoot => {
                        let loaded = self.load_root(cpu).is_ok();
                        self.flush(cpu, Flush::All);
                        loaded
                    }
                    MsrWrite::SelectView => {
                        self.select_view(cpu);
                        true
                    }
                    MsrWrite::Rejected | MsrWrite::Unknown => false,
                }
            }
        }
    }

    /// Without an in-kernel LAPIC the register only holds its value, as in KVM.
    pub(super) fn set_apic_base(&mut self, cpu: &CpuState, value: u64, host: bool) -> bool {
        if self.has_lapic() {
            let result = self.shared.lapic().set_apic_base(value, host);
            let Ok(action) = result else { return false };
            self.act(action);
            self.update_timer();
            self.update_apic_page();
            return true;
        }
        let address = APIC_BASE_ADDRESS & ((1 << cpu.features.maxphyaddr.min(52)) - 1);
        let known = APIC_BASE_BSP | APIC_BASE_ENABLE | 1 << 10 | address;
        // x2APIC without xAPIC is not a state.
        if !host && (value & !known != 0 || value >> 10 & 3 == 1) {
            return false;
        }
        self.apic_base = value;
        true
    }
}
