//! MSRs: those in CPU registers (`x86_cpu::msr_model`), and those of the hypervisor (TSC, APIC base, paravirtual clock,
//! machine check).

use kvm_bindings::{
    KVM_MSR_EXIT_REASON_FILTER, KVM_MSR_EXIT_REASON_INVAL, KVM_MSR_EXIT_REASON_UNKNOWN,
    KVM_MSR_FILTER_READ, KVM_MSR_FILTER_WRITE, kvm_msr_entry,
};
use x86_cpu::{
    CpuState, Exception, Fault, Flush, GuestBus,
    msr_model::{self, MsrWrite},
};
use x86_defs::msr::*;

use super::{Inner, bus::Bus, replay::DeviceAccess};
use crate::Exit;

/// IA32_APIC_BASE: BSP, x2APIC enable, enable and the address field.
const APIC_BASE_BSP: u64 = 1 << 8;
const APIC_BASE_ENABLE: u64 = 1 << 11;
const APIC_BASE_ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Returns the number of the KVM_FEATURE_* bit that an MSR belongs to.
const fn pv_feature(index: u32) -> Option<u32> {
    Some(match index {
        KVM_WALL_CLOCK | KVM_SYSTEM_TIME => 0,
        KVM_WALL_CLOCK_NEW | KVM_SYSTEM_TIME_NEW => 3,
        KVM_ASYNC_PF_EN => 4,
        KVM_STEAL_TIME => 5,
        KVM_PV_EOI_EN => 6,
        KVM_POLL_CONTROL => 12,
        KVM_ASYNC_PF_INT | KVM_ASYNC_PF_ACK => 14,
        _ => return None,
    })
}

impl Inner {
    /// KVM_SET_MSRS of one register; false if it or the value is refused. Once the vCPU has run, an MSR that describes
    /// the CPU can only be set to the value that it has.
    pub(super) fn store_msr(&mut self, e: &kvm_msr_entry) -> bool {
        let (bus, cpu) = (&mut self.bus, &mut self.cpu);
        if self.has_run && crate::system::is_fixed_feature(e.index) {
            return bus.msr(cpu, e.index, true) == Some(e.data);
        }
        bus.set_msr(cpu, e.index, e.data, true)
    }
}

impl Bus {
    /// RDMSR: applies the VMM's filter, reads the register, and asks the VMM about a refused access if it wants to
    /// know.
    pub(super) fn guest_read_msr(&mut self, cpu: &mut CpuState, index: u32) -> Result<u64, Fault> {
        let access = DeviceAccess::MsrRead { index };
        let mut reason = KVM_MSR_EXIT_REASON_FILTER;
        if self.replay.is_new(access) && self.allows_msr(index, KVM_MSR_FILTER_READ) {
            if let Some(value) = self.msr(cpu, index, false) {
                return Ok(value);
            }
            reason = self.refusal(cpu, index);
        }
        self.ask_about_msr(cpu, access, reason, Exit::Rdmsr { index, reason })
    }

    /// WRMSR, as [`Self::guest_read_msr`].
    pub(super) fn guest_write_msr(
        &mut self,
        cpu: &mut CpuState,
        index: u32,
        data: u64,
    ) -> Result<(), Fault> {
        let access = DeviceAccess::MsrWrite { index };
        let mut reason = KVM_MSR_EXIT_REASON_FILTER;
        if self.replay.is_new(access) && self.allows_msr(index, KVM_MSR_FILTER_WRITE) {
            if self.set_msr(cpu, index, data, false) {
                return Ok(());
            }
            reason = self.refusal(cpu, index);
        }
        let exit = Exit::Wrmsr {
            index,
            data,
            reason,
        };
        self.ask_about_msr(cpu, access, reason, exit).map(|_| ())
    }

    fn allows_msr(&mut self, index: u32, access: u32) -> bool {
        self.msr_filter.allows(&self.vm.options, index, access)
    }

    /// Returns the reason of a refusal: whether the MSR exists at all.
    fn refusal(&mut self, cpu: &mut CpuState, index: u32) -> u32 {
        let exists = matches!(
            index,
            IA32_X2APIC_BASE..=IA32_X2APIC_END | IA32_PRED_CMD | IA32_FLUSH_CMD
        ) || self.msr(cpu, index, true).is_some();
        if exists {
            KVM_MSR_EXIT_REASON_INVAL
        } else {
            KVM_MSR_EXIT_REASON_UNKNOWN
        }
    }

    /// Returns the VMM's answer. #GP if the VMM does not want to be asked, or answers so.
    fn ask_about_msr(
        &mut self,
        cpu: &CpuState,
        access: DeviceAccess,
        reason: u32,
        exit: Exit,
    ) -> Result<u64, Fault> {
        if self.replay.is_new(access) && !self.vm.options.exits_for_msr(reason) {
            return Err(Exception::GP0.into());
        }
        let answered = self.ask(cpu, access, || exit)?;
        if answered.error {
            Err(Exception::GP0.into())
        } else {
            Ok(answered.value)
        }
    }

    /// True if CPUID promises the KVM_FEATURE_* of this bit, or is not enforced.
    pub(super) fn has_pv(&self, feature: u32) -> bool {
        !self.enforces_pv || super::cpuid::kvm_features(&self.cpuid) >> feature & 1 != 0
    }

    /// Reads an MSR for RDMSR or, with `host`, for KVM_GET_MSRS. `None` is `#GP`, or ends the list.
    pub(super) fn msr(&mut self, cpu: &mut CpuState, index: u32, host: bool) -> Option<u64> {
        if pv_feature(index).is_some_and(|feature| !self.has_pv(feature)) {
            return None;
        }
        match index {
            MSR_PLATFORM_INFO if !host && !self.vm.options.shows_platform_info() => None,
            IA32_TSC => Some(self.tsc.guest(host::cpu::rdtsc())),
            IA32_TSC_ADJUST => Some(self.tsc_adjust),
            IA32_APIC_BASE => Some(self.apic_base()),
            IA32_X2APIC_BASE..=IA32_X2APIC_END => {
                if !host {
                    self.note_x2apic_access(cpu.rip(), index, false);
                }
                self.x2apic_read(index)
            }
            IA32_TSC_DEADLINE if self.has_lapic() => Some(self.shared.lapic().tsc_deadline()),
            // KVM has the register even if the timer behind it does not exist.
            IA32_TSC_DEADLINE => Some(0),
            KVM_WALL_CLOCK | KVM_WALL_CLOCK_NEW => Some(self.pv.wall_clock),
            KVM_SYSTEM_TIME | KVM_SYSTEM_TIME_NEW => Some(self.pv.system_time),
            KVM_ASYNC_PF_EN => Some(self.pv.async_pf[0]),
            KVM_ASYNC_PF_INT => Some(self.pv.async_pf[1]),
            KVM_ASYNC_PF_ACK => Some(0),
            KVM_STEAL_TIME => Some(self.steal_msr()),
            KVM_PV_EOI_EN => Some(self.pv_eoi_msr()),
            KVM_POLL_CONTROL => Some((!self.pv.guest_polls).into()),
            ANYKVM_ROOT_CACHE if host || self.has_root_cache() => Some(self.root_cache_msr()),
            _ if super::mce::is_mce(index) => self.mce.read(index, host),
            _ if super::bus::hyperv::is_hyperv(index) => self.hv_msr(index, host),
            _ => match self.counter_msr(cpu, index, host) {
                Some(value) => value,
                None if host => msr_model::host_read(cpu, index),
                None => msr_model::read(cpu, index),
            },
        }
    }

    /// Writes an MSR for WRMSR or, with `host`, for KVM_SET_MSRS. False is `#GP`, or ends the list.
    pub(super) fn set_msr(
        &mut self,
        cpu: &mut CpuState,
        index: u32,
        value: u64,
        host: bool,
    ) -> bool {
        // The VMM may choose any number.
        if self.vm.xen.is_msr(index) {
            return self.write_xen_page(cpu, value);
        }
        if pv_feature(index).is_some_and(|feature| !self.has_pv(feature)) {
            return false;
        }
        match index {
            IA32_TSC => {
                self.set_tsc(value, host);
                true
            }
            IA32_TSC_ADJUST => {
                self.set_tsc_adjust(value, host);
                true
            }
            IA32_APIC_BASE => self.set_apic_base(cpu, value, host),
            IA32_X2APIC_BASE..=IA32_X2APIC_END => {
                if !host {
                    self.note_x2apic_access(cpu.rip(), index, true);
                }
                self.x2apic_write(index, value)
            }
            IA32_TSC_DEADLINE if self.has_lapic() => {
                let action = self.shared.lapic().set_tsc_deadline(value);
                self.act(action);
                true
            }
            IA32_TSC_DEADLINE => true,
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
            // MONITOR came with SSE3, so if CPUID's bit follows this register, the CPU must have SSE3.
            IA32_MISC_ENABLE
                if self.cpuid_follows().misc_enable
                    && (cpu.msr.misc_enable ^ value) & super::cpuid::MISC_ENABLE_MWAIT != 0
                    && !cpu.features.has(x86_cpu::Feature::Sse3) =>
            {
                false
            }
            KVM_STEAL_TIME => self.set_steal_msr(value),
            KVM_PV_EOI_EN => self.set_pv_eoi_msr(value),
            KVM_POLL_CONTROL => {
                if value & !1 != 0 {
                    return false;
                }
                self.pv.guest_polls = value == 0;
                true
            }
            ANYKVM_ROOT_CACHE if host || self.has_root_cache() => {
                self.set_root_cache_msr(cpu, value, host)
            }
            _ if super::bus::hyperv::is_hyperv(index) => self.set_hv_msr(cpu, index, value, host),
            _ if super::mce::is_mce(index) => {
                // AMD64_HWCR.McStatusWrEn.
                let may_set_status = cpu.msr.hwcr >> 18 & 1 != 0;
                self.mce.write(index, value, host, may_set_status)
            }
            _ => self
                .set_counter_msr(cpu, index, value, host)
                .unwrap_or_else(|| self.set_cpu_msr(cpu, index, value, host)),
        }
    }

    fn set_tsc(&mut self, value: u64, host: bool) {
        let before = self.tsc.offset;
        self.tsc = self.vm.clock.write_tsc(self.tsc, value, host);
        if !host {
            // SDM vol. 3, 18.17.3: a write of the TSC changes TSC_ADJUST by the same amount.
            self.tsc_adjust = self
                .tsc_adjust
                .wrapping_add(self.tsc.offset.wrapping_sub(before));
        }
        self.tsc_changed();
    }

    /// Writes IA32_TSC_ADJUST. A value that the VMM restores does not move the TSC, whose offset the VMM restores by
    /// itself.
    fn set_tsc_adjust(&mut self, value: u64, host: bool) {
        let delta = value.wrapping_sub(self.tsc_adjust);
        if !host && delta != 0 {
            self.tsc = self.tsc.with_offset(self.tsc.offset.wrapping_add(delta));
            self.tsc_changed();
        }
        self.tsc_adjust = value;
    }

    fn tsc_changed(&mut self) {
        self.update_clock();
        self.update_timer();
        // Translated code has a copy of the offset.
        self.recheck = true;
    }

    /// Like [`Self::set_msr`], for MSRs that are CPU registers.
    fn set_cpu_msr(&mut self, cpu: &mut CpuState, index: u32, value: u64, host: bool) -> bool {
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

    /// Writes IA32_APIC_BASE. Without an in-kernel LAPIC the register only holds its value, as in KVM.
    pub(super) fn set_apic_base(&mut self, cpu: &CpuState, value: u64, host: bool) -> bool {
        if self.has_lapic() {
            let result = self.shared.lapic().set_apic_base(value, host);
            let Ok(action) = result else { return false };
            self.lapic_changed();
            self.act(action);
            self.update_timer();
            self.update_apic_page();
            return true;
        }
        let address = APIC_BASE_ADDRESS & ((1 << cpu.features.maxphyaddr.min(52)) - 1);
        let known = APIC_BASE_BSP | APIC_BASE_ENABLE | 1 << 10 | address;
        // There is no state with x2APIC enabled and the LAPIC disabled.
        if !host && (value & !known != 0 || value >> 10 & 3 == 1) {
            return false;
        }
        self.apic_base = value;
        true
    }
}
