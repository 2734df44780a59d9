//! Hyper-V's interface of a vCPU: MSRs and hypercalls (Hypervisor Top-Level Functional
//! Specification). KVM offers it to guests whose CPUID has Hyper-V's signature.
//!
//! Without the synthetic interrupt controller, its timers and the calls that flush TLBs, which CPUID
//! does not offer.

use std::sync::atomic::Ordering;

use host::clock::monotonic_ns;
use irqchip::{DeliveryMode, LapicIrq, lapic::spec::reg};
use kvm_bindings::{KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, kvm_cpuid_entry2};
use x86_cpu::{CpuState, Exception, Fault};
use x86_defs::reg::{R8, RAX, RBX, RCX, RDI, RDX, RSI};

use super::bus::Bus;
use crate::{
    system::{
        MAX_VCPUS,
        hv_cpuid::{FEATURES, INTERFACE, RECOMMENDATIONS, access, feature, recommended},
    },
    vm::hyperv::{ENABLE, UNIT_NS},
};

/// HV_X64_MSR_*.
pub(crate) mod index {
    pub(crate) const GUEST_OS_ID: u32 = 0x4000_0000;
    pub(crate) const HYPERCALL: u32 = 0x4000_0001;
    pub(crate) const VP_INDEX: u32 = 0x4000_0002;
    pub(crate) const RESET: u32 = 0x4000_0003;
    pub(crate) const VP_RUNTIME: u32 = 0x4000_0010;
    pub(crate) const TIME_REF_COUNT: u32 = 0x4000_0020;
    pub(crate) const REFERENCE_TSC: u32 = 0x4000_0021;
    pub(crate) const TSC_FREQUENCY: u32 = 0x4000_0022;
    pub(crate) const APIC_FREQUENCY: u32 = 0x4000_0023;
    pub(crate) const EOI: u32 = 0x4000_0070;
    pub(crate) const ICR: u32 = 0x4000_0071;
    pub(crate) const TPR: u32 = 0x4000_0072;
    pub(crate) const VP_ASSIST_PAGE: u32 = 0x4000_0073;
    pub(crate) const CRASH_P0: u32 = 0x4000_0100;
    pub(crate) const CRASH_P4: u32 = 0x4000_0104;
    pub(crate) const CRASH_CTL: u32 = 0x4000_0105;
    pub(crate) const REENLIGHTENMENT_CONTROL: u32 = 0x4000_0106;
    pub(crate) const TSC_EMULATION_CONTROL: u32 = 0x4000_0107;
    pub(crate) const TSC_EMULATION_STATUS: u32 = 0x4000_0108;

    /// What a VMM saves.
    pub(crate) const SAVED: [u32; 19] = [
        GUEST_OS_ID,
        HYPERCALL,
        TIME_REF_COUNT,
        REFERENCE_TSC,
        TSC_FREQUENCY,
        APIC_FREQUENCY,
        CRASH_P0,
        CRASH_P0 + 1,
        CRASH_P0 + 2,
        CRASH_P0 + 3,
        CRASH_P4,
        CRASH_CTL,
        RESET,
        VP_INDEX,
        VP_RUNTIME,
        VP_ASSIST_PAGE,
        REENLIGHTENMENT_CONTROL,
        TSC_EMULATION_CONTROL,
        TSC_EMULATION_STATUS,
    ];
}
use index::*;

/// The ICR in x2APIC mode.
const X2APIC_ICR: u32 = x86_defs::msr::IA32_X2APIC_BASE + reg::ICR as u32;
/// HV_CRASH_CTL_CRASH_NOTIFY.
const CRASH_NOTIFY: u64 = 1 << 63;
/// HV_CRASH_CTL_CRASH_NOTIFY_MSG.
const CRASH_NOTIFY_MSG: u64 = 1 << 62;

/// HV_STATUS_*.
mod status {
    pub(super) const SUCCESS: u64 = 0;
    pub(super) const INVALID_CODE: u64 = 2;
    pub(super) const INVALID_INPUT: u64 = 3;
    pub(super) const ACCESS_DENIED: u64 = 6;
}

/// Hyper-V's side of a vCPU.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HyperV {
    /// CPUID has Hyper-V's signature.
    is_offered: bool,
    /// KVM_CAP_HYPERV_ENFORCE_CPUID: only what CPUID promises works.
    enforces: bool,
    /// Leaf [`FEATURES`], EAX and EDX.
    features: [u32; 2],
    /// Leaf [`RECOMMENDATIONS`], EAX and EBX.
    recommendations: [u32; 2],
    assist_page: u64,
    /// Added to the measured time, and when that began.
    runtime: u64,
    began_ns: u64,
}

/// True for an MSR number that is Hyper-V's.
pub(super) const fn is_hyperv(index: u32) -> bool {
    matches!(index, 0x4000_0000..=0x4000_01ff)
}

impl HyperV {
    /// KVM_SET_CPUID2.
    pub(super) fn set_cpuid(&mut self, entries: &[kvm_cpuid_entry2]) {
        let find = |leaf| entries.iter().find(|e| e.function == leaf);
        self.is_offered = find(0x4000_0001).is_some_and(|e| e.eax == INTERFACE);
        self.features = find(FEATURES).map_or([0; 2], |e| [e.eax, e.edx]);
        self.recommendations = find(RECOMMENDATIONS).map_or([0; 2], |e| [e.eax, e.ebx]);
        if self.began_ns == 0 {
            self.began_ns = monotonic_ns();
        }
    }

    /// KVM_CAP_HYPERV_ENFORCE_CPUID.
    pub(super) fn set_enforces(&mut self, enforces: bool) {
        self.enforces = enforces;
    }

    /// The guest may access the MSR.
    fn allows(&self, index: u32) -> bool {
        let (access, feature) = match index {
            GUEST_OS_ID | HYPERCALL => (access::HYPERCALL, 0),
            VP_RUNTIME => (access::RUNTIME, 0),
            TIME_REF_COUNT => (access::TIME, 0),
            VP_INDEX => (access::INDEX, 0),
            RESET => (access::RESET, 0),
            REFERENCE_TSC => (access::REFERENCE_TSC, 0),
            EOI | ICR | TPR | VP_ASSIST_PAGE => (access::APIC, 0),
            TSC_FREQUENCY | APIC_FREQUENCY => (access::FREQUENCIES, 0),
            REENLIGHTENMENT_CONTROL | TSC_EMULATION_CONTROL | TSC_EMULATION_STATUS => {
                (access::REENLIGHTENMENT, 0)
            }
            CRASH_P0..=CRASH_CTL => (0, feature::CRASH),
            _ => (0, 0),
        };
        let [eax, edx] = self.features;
        self.is_offered && (!self.enforces || eax & access | edx & feature != 0)
    }
}

impl Bus {
    /// VMCALL and VMMCALL are Hyper-V's.
    #[inline]
    pub(super) fn has_hv_hypercalls(&self) -> bool {
        self.hv.is_offered && self.vm.hyperv.has_hypercalls()
    }

    /// RDMSR or, for `host`, KVM_GET_MSRS.
    pub(super) fn hv_msr(&mut self, index: u32, host: bool) -> Option<u64> {
        if !host && !self.hv.allows(index) {
            return None;
        }
        let lapic = |bus: &mut Self, r: usize| {
            bus.sync_pv_eoi();
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
            TIME_REF_COUNT => {
                let tsc = self.tsc.guest(host::cpu::rdtsc());
                let by_page = self.vm.hyperv.partition().time(tsc);
                Some(by_page.unwrap_or_else(|| self.vm.clock.now().0 / UNIT_NS))
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
                    _ => return None,
                })
            }
        }
    }

    /// WRMSR or, for `host`, KVM_SET_MSRS; false is #GP or the end of the list.
    pub(super) fn set_hv_msr(
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
            // Read-only, but a VMM gives back what it has saved.
            TIME_REF_COUNT | TSC_FREQUENCY | APIC_FREQUENCY => host,
            RESET => {
                if value == 1 {
                    self.system_event = Some(KVM_SYSTEM_EVENT_RESET);
                    self.recheck = true;
                }
                true
            }
            EOI => self.write_lapic_register(reg::EOI, value as u32),
            ICR if self.has_lapic() && self.shared.lapic().is_x2apic() => {
                self.x2apic_write(X2APIC_ICR, value)
            }
            ICR => {
                // The destination first: the low half sends.
                self.write_lapic_register(reg::ICR2, (value >> 32) as u32)
                    && self.write_lapic_register(reg::ICR, value as u32)
            }
            TPR => self.write_lapic_register(reg::TASKPRI, value as u32),
            VP_ASSIST_PAGE => self.set_assist_page(value),
            _ => self.set_partition_msr(cpu, index, value, host),
        }
    }

    fn write_lapic_register(&mut self, r: usize, value: u32) -> bool {
        if !self.has_lapic() {
            return false;
        }
        self.sync_pv_eoi();
        let now = self.now();
        let action = self.shared.lapic().set_register(r, value, now);
        self.lapic_changed();
        action.map(|action| self.act(action)).is_some()
    }

    /// The page's first word is "no EOI required", which KVM's own PV EOI is made of.
    fn set_assist_page(&mut self, value: u64) -> bool {
        let gpa = value & !0xfff;
        let is_used = value & ENABLE != 0;
        if is_used && self.vm.memory.write_gpa(gpa, 4, 0).is_none() {
            return false;
        }
        self.hv.assist_page = value;
        let eoi = if is_used { gpa | ENABLE } else { 0 };
        // Without a LAPIC in here nothing sets the bit.
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
            // Without a system's name there are no hypercalls.
            HYPERCALL if p.guest_os_id == 0 => {}
            HYPERCALL => {
                if value & ENABLE != 0 && !self.write_hypercall_page(cpu, value & !0xfff) {
                    return false;
                }
                p.hypercall = value;
            }
            REFERENCE_TSC => {
                p.reference_tsc = value;
                // As in KVM no page is no error: the sequence tells the guest, if anything.
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
            // Emulation that is not under way cannot begin by being told of.
            TSC_EMULATION_STATUS if value != 0 && !host => return false,
            TSC_EMULATION_STATUS => p.tsc_emulation_status = value,
            _ => return false,
        }
        vm.hyperv.publish(&p);
        true
    }

    /// The guest calls it: the processor's own hypercall instruction, and RET.
    fn write_hypercall_page(&self, cpu: &CpuState, gpa: u64) -> bool {
        let last = if cpu.features.has(x86_cpu::Feature::Amd) {
            0xd9
        } else {
            0xc1
        };
        self.vm.memory.write_bytes(gpa, &[0x0f, 0x01, last, 0xc3])
    }

    /// The clock has changed: the page has to say so, unless the guest wants to be told first, which
    /// needs no change here.
    pub(super) fn update_hv_page(&mut self) {
        if !self.vm.hyperv.has_page() {
            return;
        }
        let mut p = self.vm.hyperv.partition();
        if p.tsc_emulation_control == 0 {
            let _ = p.write_page(&self.vm.memory, self.tsc, self.vm.clock.master());
        }
    }
}

/// A hypercall's input.
#[derive(Clone, Copy, Debug)]
struct Call {
    code: u16,
    /// The arguments are in registers.
    is_fast: bool,
    repeats: u16,
    /// The two registers: addresses, or the arguments.
    input: [u64; 2],
}

/// Executes VMCALL or VMMCALL.
pub(super) fn execute(bus: &mut Bus, cpu: &mut CpuState) -> Result<(), Fault> {
    if cpu.cpl != 0 || cpu.cr0 & 1 == 0 {
        return Err(Exception::UD.into());
    }
    bus.counters.hypercalls += 1;
    let wide = cpu.is_64bit();
    let pair = |high: usize, low: usize| cpu.gpr[high] << 32 | cpu.gpr[low] & 0xffff_ffff;
    let (control, input) = if wide {
        (cpu.gpr[RCX], [cpu.gpr[RDX], cpu.gpr[R8]])
    } else {
        (pair(RDX, RAX), [pair(RBX, RCX), pair(RDI, RSI)])
    };
    let call = Call {
        code: control as u16,
        is_fast: control >> 16 & 1 != 0,
        repeats: (control >> 32 & 0xfff) as u16,
        input,
    };
    let result = answer(bus, call);
    if wide {
        cpu.gpr[RAX] = result;
    } else {
        cpu.gpr[RDX] = result >> 32;
        cpu.gpr[RAX] = result & 0xffff_ffff;
    }
    Ok(())
}

fn answer(bus: &mut Bus, call: Call) -> u64 {
    const NOTIFY_LONG_SPIN_WAIT: u16 = 0x8;
    const SEND_IPI: u16 = 0xb;
    const SEND_IPI_EX: u16 = 0x15;
    let [advice, spins] = bus.hv.recommendations;
    let may = |bit| !bus.hv.enforces || advice & bit != 0;
    let is_allowed = match call.code {
        NOTIFY_LONG_SPIN_WAIT => !bus.hv.enforces || !matches!(spins, 0 | u32::MAX),
        SEND_IPI => may(recommended::IPI),
        SEND_IPI_EX => may(recommended::IPI) && may(recommended::SPARSE),
        _ => return status::INVALID_CODE,
    };
    if !is_allowed {
        return status::ACCESS_DENIED;
    }
    // None of these repeats.
    if call.repeats != 0 {
        return status::INVALID_INPUT;
    }
    match call.code {
        NOTIFY_LONG_SPIN_WAIT => {
            bus.give_way();
            status::SUCCESS
        }
        SEND_IPI => send_ipi(bus, call),
        // Registers of SSE as arguments are not offered.
        _ if call.is_fast => status::INVALID_INPUT,
        _ => send_ipi_ex(bus, call.input[0]),
    }
}

/// HvCallSendSyntheticClusterIpi: a vector, and a bit for each of the first 64 processors.
fn send_ipi(bus: &Bus, call: Call) -> u64 {
    let [vector, mask] = if call.is_fast {
        call.input
    } else {
        let mut bytes = [0; 16];
        if !bus.vm.memory.read_bytes(call.input[0], &mut bytes) {
            return status::INVALID_INPUT;
        }
        words(&bytes)
    };
    // The upper half of the first word is the target's privilege level, of which there is one.
    send(bus, vector as u32, |vp| vp < 64 && mask >> vp & 1 != 0)
}

/// HvCallSendSyntheticClusterIpiEx: a bit for each bank of 64 processors that has a word.
fn send_ipi_ex(bus: &Bus, gpa: u64) -> u64 {
    const SPARSE: u64 = 0;
    const ALL: u64 = 1;
    let mut head = [0; 24];
    if !bus.vm.memory.read_bytes(gpa, &mut head) {
        return status::INVALID_INPUT;
    }
    let [vector, format, banks] = words(&head);
    if format == ALL {
        return send(bus, vector as u32, |_| true);
    }
    if format != SPARSE {
        return status::INVALID_INPUT;
    }
    if banks == 0 {
        return status::SUCCESS;
    }
    let mut bytes = [0; 64 * 8];
    let given = &mut bytes[..banks.count_ones() as usize * 8];
    if !bus.vm.memory.read_bytes(gpa.wrapping_add(24), given) {
        return status::INVALID_INPUT;
    }
    let masks = words::<64>(&bytes);
    send(bus, vector as u32, |vp| {
        let (bank, bit) = (vp / 64, vp % 64);
        let before = (banks & ((1u64 << (bank & 63)) - 1)).count_ones() as usize;
        let mask = masks.get(before).copied().unwrap_or(0);
        bank < 64 && banks >> bank & 1 != 0 && mask >> bit & 1 != 0
    })
}

fn words<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let (chunks, _) = bytes.as_chunks::<8>();
    std::array::from_fn(|i| chunks.get(i).map_or(0, |word| u64::from_le_bytes(*word)))
}

/// A fixed interrupt for the processors whose index is wanted.
fn send(bus: &Bus, vector: u32, is_wanted: impl Fn(u32) -> bool) -> u64 {
    /// HV_IPI_LOW_VECTOR.
    const LOWEST: u32 = 16;
    let Some(vector) = u8::try_from(vector)
        .ok()
        .filter(|v| u32::from(*v) >= LOWEST)
    else {
        return status::INVALID_INPUT;
    };
    if bus.vm.chips().is_none() {
        return status::SUCCESS;
    }
    for target in bus.vm.vcpus().iter() {
        if is_wanted(target.vp_index.load(Ordering::Relaxed)) {
            target.interrupt(&LapicIrq::edge(target.id, DeliveryMode::Fixed, vector));
        }
    }
    status::SUCCESS
}
