//! Hyper-V's interface of a vCPU: MSRs and hypercalls (Hypervisor Top-Level Functional
//! Specification). KVM offers it to guests whose CPUID has Hyper-V's signature.
//!
//! [`synic`] has the synthetic interrupt controller, [`timers`] its timers, [`calls`] the hypercalls.

pub(in crate::vcpu) mod calls;
mod debugger;
mod synic;
mod timers;

use std::sync::atomic::Ordering;

use host::clock::monotonic_ns;
use irqchip::lapic::spec::reg;
use kvm_bindings::{KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, kvm_cpuid_entry2};
use x86_cpu::CpuState;

use self::{synic::Synic, timers::Timers};
use super::Bus;
use crate::{
    limits::MAX_VCPUS,
    system::{
        hv_cpuid::{DEBUGGER, FEATURES, INTERFACE, RECOMMENDATIONS, access},
        hv_msrs::{TABLE, index::*},
    },
    vm::hyperv::{ENABLE, UNIT_NS},
};

/// The ICR in x2APIC mode.
const X2APIC_ICR: u32 = x86_defs::msr::IA32_X2APIC_BASE + reg::ICR as u32;
/// HV_CRASH_CTL_CRASH_NOTIFY.
const CRASH_NOTIFY: u64 = 1 << 63;
/// HV_CRASH_CTL_CRASH_NOTIFY_MSG.
const CRASH_NOTIFY_MSG: u64 = 1 << 62;

/// Hyper-V's side of a vCPU.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::vcpu) struct HyperV {
    /// CPUID has Hyper-V's signature.
    is_offered: bool,
    /// KVM_CAP_HYPERV_ENFORCE_CPUID: only features that CPUID promises work.
    enforces: bool,
    /// EAX, EBX and EDX of leaf [`FEATURES`].
    features: [u32; 3],
    /// EAX and EBX of leaf [`RECOMMENDATIONS`].
    recommendations: [u32; 2],
    /// Leaf [`DEBUGGER`] says that the guest may be debugged.
    has_debugger: bool,
    pub(in crate::vcpu) synic: Synic,
    pub(in crate::vcpu) timers: Timers,
    assist_page: u64,
    /// Offset that is added to the measured run time, and the time at which measuring began.
    runtime: u64,
    began_ns: u64,
}

/// True for an MSR number that is Hyper-V's.
pub(in crate::vcpu) const fn is_hyperv(index: u32) -> bool {
    matches!(index, 0x4000_0000..=0x4000_01ff)
}

impl HyperV {
    /// KVM_SET_CPUID2.
    pub(in crate::vcpu) fn set_cpuid(&mut self, entries: &[kvm_cpuid_entry2]) {
        let find = |leaf| entries.iter().find(|e| e.function == leaf);
        self.is_offered = find(0x4000_0001).is_some_and(|e| e.eax == INTERFACE);
        self.features = find(FEATURES).map_or([0; 3], |e| [e.eax, e.ebx, e.edx]);
        self.recommendations = find(RECOMMENDATIONS).map_or([0; 2], |e| [e.eax, e.ebx]);
        self.has_debugger = find(DEBUGGER).is_some_and(|e| e.eax & 2 != 0);
        if self.began_ns == 0 {
            self.began_ns = monotonic_ns();
        }
    }

    /// KVM_CAP_HYPERV_ENFORCE_CPUID.
    pub(in crate::vcpu) fn set_enforces(&mut self, enforces: bool) {
        self.enforces = enforces;
    }

    /// True if the guest may access the MSR.
    fn allows(&self, index: u32) -> bool {
        let row = TABLE
            .iter()
            .find(|row| (row.first..=row.last).contains(&index));
        let (access, feature) = row.map_or((0, 0), |row| (row.access, row.feature));
        let [eax, _, edx] = self.features;
        self.is_offered && (!self.enforces || eax & access | edx & feature != 0)
    }
}

impl Bus {
    /// True if VMCALL and VMMCALL are Hyper-V's.
    #[inline]
    pub(in crate::vcpu) fn has_hv_hypercalls(&self) -> bool {
        self.hv.is_offered && self.vm.hyperv.has_hypercalls()
    }

    /// True if CPUID does not show an invariant TSC, because the guest may ask for it by an MSR and has not.
    pub(in crate::vcpu) fn hides_invariant_tsc(&self) -> bool {
        let [eax, ..] = self.hv.features;
        self.hv.is_offered
            && eax & access::INVARIANT_TSC != 0
            && self.vm.hyperv.partition().tsc_invariant == 0
    }

    /// Reads an MSR for RDMSR or, with `host`, for KVM_GET_MSRS. `None` refuses the access.
    pub(in crate::vcpu) fn hv_msr(&mut self, index: u32, host: bool) -> Option<u64> {
        if !host && !self.hv.allows(index) {
            return None;
        }
        let lapic = |bus: &mut Self, r: usize| {
            bus.sync_lapic();
            let now = bus.now();
            bus.has_lapic()
                .then(|| bus.shared.lapic().register(r, now))
                .flatten()
        };
        match index {
            VP_INDEX => Some(self.shared.vp_index.load(Ordering::Relaxed).into()),
            RESET => Some(0),
            VP_RUNTIME => {
                let idle = self.counters.halt_wait_ns.saturating_add(self.stolen_ns());
                let ns = monotonic_ns().saturating_sub(self.hv.began_ns);
                let busy = ns.saturating_sub(idle) / UNIT_NS;
                Some(busy.wrapping_add(self.hv.runtime))
            }
            TIME_REF_COUNT => Some(self.reference_time()),
            SCONTROL..=EOM | SINT0..=SINT15 => self.synic_msr(index, host),
            STIMER0_CONFIG..=STIMER3_COUNT => self.synthetic_timer_msr(index, host),
            SYNDBG_CONTROL..=SYNDBG_PENDING_BUFFER | SYNDBG_OPTIONS => {
                self.debugger_msr(index, host)
            }
            TSC_FREQUENCY => Some(u64::from(self.tsc.khz) * 1000),
            APIC_FREQUENCY => Some(1_000_000_000 / self.vm.options.apic_tick_ns().max(1)),
            EOI => None,
            ICR if self.has_lapic() && self.shared.lapic().is_x2apic() => {
                self.x2apic_read(X2APIC_ICR)
            }
            ICR => {
                let low = lapic(self, reg::ICR)?;
                Some(u64::from(lapic(self, reg::ICR2)?) << 32 | u64::from(low))
            }
            TPR => lapic(self, reg::TASKPRI).map(u64::from),
            VP_ASSIST_PAGE => Some(self.hv.assist_page),
            _ => {
                let p = self.vm.hyperv.partition();
                Some(match index {
                    GUEST_OS_ID => p.guest_os_id,
                    HYPERCALL => p.hypercall,
                    REFERENCE_TSC => p.reference_tsc,
                    CRASH_P0..=CRASH_P4 => p.crash[(index - CRASH_P0) as usize],
                    CRASH_CTL => p.crash_ctl,
                    REENLIGHTENMENT_CONTROL => p.reenlightenment,
                    TSC_EMULATION_CONTROL => p.tsc_emulation_control,
                    TSC_EMULATION_STATUS => p.tsc_emulation_status,
                    TSC_INVARIANT_CONTROL => p.tsc_invariant,
                    _ => return None,
                })
            }
        }
    }

    /// Writes an MSR for WRMSR or, with `host`, for KVM_SET_MSRS. False is #GP, or ends the list.
    pub(in crate::vcpu) fn set_hv_msr(
        &mut self,
        cpu: &CpuState,
        index: u32,
        value: u64,
        host: bool,
    ) -> bool {
        if !host && !self.hv.allows(index) {
            return false;
        }
        match index {
            VP_INDEX if host && value < MAX_VCPUS as u64 => {
                self.shared.vp_index.store(value as u32, Ordering::Relaxed);
                true
            }
            VP_RUNTIME if host => {
                self.hv.runtime = 0;
                let measured = self.hv_msr(VP_RUNTIME, true).unwrap_or(0);
                self.hv.runtime = value.wrapping_sub(measured);
                true
            }
            // Read-only for the guest; a VMM writes back the value that it has saved.
            TIME_REF_COUNT | TSC_FREQUENCY | APIC_FREQUENCY => host,
            RESET => {
                if value == 1 {
                    self.system_event = Some(KVM_SYSTEM_EVENT_RESET);
                    self.recheck = true;
                }
                true
            }
            SCONTROL..=EOM | SINT0..=SINT15 => self.set_synic_msr(index, value, host),
            STIMER0_CONFIG..=STIMER3_COUNT => self.set_synthetic_timer_msr(index, value, host),
            SYNDBG_CONTROL..=SYNDBG_PENDING_BUFFER | SYNDBG_OPTIONS => {
                self.set_debugger_msr(index, value, host)
            }
            EOI => self.write_lapic_register(reg::EOI, value as u32),
            ICR if self.has_lapic() && self.shared.lapic().is_x2apic() => {
                self.x2apic_write(X2APIC_ICR, value)
            }
            ICR => {
                // The high half, which has the destination, comes first: writing the low half sends.
                self.write_lapic_register(reg::ICR2, (value >> 32) as u32)
                    && self.write_lapic_register(reg::ICR, value as u32)
            }
            TPR => self.write_lapic_register(reg::TASKPRI, value as u32),
            VP_ASSIST_PAGE => self.set_assist_page(value),
            _ => self.set_partition_msr(cpu, index, value, host),
        }
    }

    /// Returns HV_X64_MSR_TIME_REF_COUNT, in units of [`UNIT_NS`].
    fn reference_time(&self) -> u64 {
        let tsc = self.tsc.guest(host::cpu::rdtsc());
        let by_page = self.vm.hyperv.partition().time(tsc);
        by_page.unwrap_or_else(|| self.vm.clock.now().0 / UNIT_NS)
    }

    fn write_lapic_register(&mut self, r: usize, value: u32) -> bool {
        if !self.has_lapic() {
            return false;
        }
        self.sync_lapic();
        let now = self.now();
        let action = self.shared.lapic().set_register(r, value, now);
        action.map(|action| self.lapic_written(action)).is_some()
    }

    /// Sets the VP assist page. Its first word is "no EOI required", which KVM's own PV EOI implements.
    fn set_assist_page(&mut self, value: u64) -> bool {
        let gpa = value & !0xfff;
        let is_used = value & ENABLE != 0;
        if is_used && self.vm.memory.write_gpa(gpa, 4, 0).is_none() {
            return false;
        }
        self.hv.assist_page = value;
        let eoi = if is_used { gpa | ENABLE } else { 0 };
        // Without an in-kernel LAPIC nothing sets the bit.
        !self.has_lapic() || self.set_pv_eoi_msr(eoi)
    }

    fn set_partition_msr(&mut self, cpu: &CpuState, index: u32, value: u64, host: bool) -> bool {
        let vm = std::sync::Arc::clone(&self.vm);
        let mut p = vm.hyperv.partition();
        match index {
            GUEST_OS_ID => {
                p.guest_os_id = value;
                if value == 0 {
                    p.hypercall &= !ENABLE;
                }
            }
            // A guest that has not named its system has no hypercalls.
            HYPERCALL if p.guest_os_id == 0 => {}
            HYPERCALL => {
                if value & ENABLE != 0 && !self.write_hypercall_page(cpu, value & !0xfff) {
                    return false;
                }
                p.hypercall = value;
            }
            REFERENCE_TSC => {
                p.reference_tsc = value;
                // As in KVM, a missing page is no error: the guest sees at most the sequence number.
                let _ = p.write_page(&vm.memory, self.tsc, vm.clock.master());
            }
            CRASH_P0..=CRASH_P4 => p.crash[(index - CRASH_P0) as usize] = value,
            CRASH_CTL if host => p.crash_ctl = value & (CRASH_NOTIFY | CRASH_NOTIFY_MSG),
            CRASH_CTL => {
                if value & CRASH_NOTIFY != 0 {
                    self.system_event = Some(KVM_SYSTEM_EVENT_CRASH);
                    self.recheck = true;
                }
            }
            REENLIGHTENMENT_CONTROL => p.reenlightenment = value,
            TSC_EMULATION_CONTROL => p.tsc_emulation_control = value,
            // TSC emulation that is not active cannot be made active by this register.
            TSC_EMULATION_STATUS if value != 0 && !host => return false,
            TSC_EMULATION_STATUS => p.tsc_emulation_status = value,
            // The register has one bit, which a guest can set but not clear.
            TSC_INVARIANT_CONTROL if value > 1 || !host && value < p.tsc_invariant => return false,
            TSC_INVARIANT_CONTROL => p.tsc_invariant = value,
            _ => return false,
        }
        vm.hyperv.publish(&p);
        true
    }

    /// Writes the page that the guest calls for a hypercall: the processor's own hypercall instruction, and RET.
    fn write_hypercall_page(&self, cpu: &CpuState, gpa: u64) -> bool {
        // OR EAX, 80000000h marks a hypercall as Hyper-V's where VMCALL and VMMCALL are Xen's, too.
        let mark: &[u8] = if self.vm.xen.has_hypercalls() {
            &[0x0d, 0, 0, 0, 0x80]
        } else {
            &[]
        };
        let code = [mark, &super::hypercall_instruction(cpu), &[0xc3]].concat();
        self.vm.memory.write_bytes(gpa, &code)
    }

    /// Rewrites the reference TSC page after the clock has changed. If the guest has TSC emulation enabled, because it
    /// wants to be told first, the page stays as it is.
    pub(in crate::vcpu) fn update_hv_page(&mut self) {
        self.recheck_synthetic_timers();
        if !self.vm.hyperv.has_page() {
            return;
        }
        let mut p = self.vm.hyperv.partition();
        if p.tsc_emulation_control == 0 {
            let _ = p.write_page(&self.vm.memory, self.tsc, self.vm.clock.master());
        }
    }
}
