//! Xen's interface as a vCPU sees it.
//!
//! Hypercalls have their number in RAX; arguments in RDI, RSI, RDX, R10, R8, R9, of 32-bit code in EBX, ECX, EDX, ESI, EDI,
//! EBP (Xen's public headers, arch-x86). The VMM answers those that are not in [`Bus::xen_call`].

mod attributes;
mod events;
mod runstate;

use x86_cpu::{CpuState, Exception, Fault, Privilege};
use x86_defs::{
    control::efer,
    reg::{R8, R9, R10, RAX, RBP, RBX, RCX, RDI, RDX, RSI},
};

pub use self::{attributes::XenVcpuAttr, runstate::XenRunstate};
use super::{Bus, EFAULT, EINVAL};
use crate::{Exit, vcpu::replay::DeviceAccess, vm::xen::PAGE};

/// Size in bytes of a call in the page.
const CALL: usize = 32;
/// This bit of RAX tells Hyper-V's hypercalls, where the guest has both.
const OF_HYPER_V: u64 = 1 << 31;

/// __HYPERVISOR_set_timer_op.
const SET_TIMER_OP: u64 = 15;
/// __HYPERVISOR_xen_version.
const XEN_VERSION: u64 = 17;
/// __HYPERVISOR_vcpu_op.
const VCPU_OP: u64 = 24;
/// __HYPERVISOR_sched_op.
const SCHED_OP: u64 = 29;
/// __HYPERVISOR_event_channel_op.
const EVENT_CHANNEL_OP: u64 = 32;
/// XENVER_version.
const VERSION: u64 = 0;
/// SCHEDOP_yield.
const YIELD: u64 = 0;
/// SCHEDOP_poll.
const POLL: u64 = 3;
/// EVTCHNOP_send.
const SEND: u64 = 4;
/// VCPUOP_set_singleshot_timer.
const SET_SINGLESHOT_TIMER: u64 = 8;
/// VCPUOP_stop_singleshot_timer.
const STOP_SINGLESHOT_TIMER: u64 = 9;

/// What a vCPU of Xen's guest has, besides what other threads use of it ([`XenReceiver`]).
///
/// [`XenReceiver`]: crate::shared::XenReceiver
#[derive(Debug)]
pub(in crate::vcpu) struct XenVcpu {
    /// Its number among Xen's vCPUs.
    id: u32,
    /// Address of a second `struct pvclock_vcpu_time_info`.
    time_info: Option<u64>,
    runstate: runstate::Runstate,
    timer: events::Timer,
    /// SCHEDOP_poll: what the vCPU waits for.
    poll: Option<events::Poll>,
    /// The LAPIC was enabled when it was last looked at.
    had_lapic: bool,
}

impl XenVcpu {
    pub(super) fn new(index: usize) -> Self {
        Self {
            id: index as u32,
            time_info: None,
            runstate: runstate::Runstate::default(),
            timer: events::Timer::stopped(0),
            poll: None,
            had_lapic: false,
        }
    }
}

/// Executes VMCALL or VMMCALL. `None`: the hypercall is Hyper-V's.
pub(super) fn execute(bus: &mut Bus, cpu: &mut CpuState) -> Option<Result<(), Fault>> {
    if cpu.gpr[RAX] & OF_HYPER_V != 0 && bus.has_hv_hypercalls() {
        return None;
    }
    if !cpu.is_protected() {
        return Some(Err(Exception::UD.into()));
    }
    let longmode = cpu.is_64bit();
    let params = if longmode {
        [RDI, RSI, RDX, R10, R8, R9].map(|r| cpu.gpr[r])
    } else {
        [RBX, RCX, RDX, RSI, RDI, RBP].map(|r| cpu.gpr[r] & 0xffff_ffff)
    };
    let input = cpu.gpr[RAX];
    let cpl = cpu.cpl;
    let access = DeviceAccess::Hypercall { nr: input };
    // The VMM answers programs, which few hypercalls are for.
    if cpl == 0
        && bus.replay.is_new(access)
        && let Some(result) = bus.xen_call(cpu, input, params, longmode)
    {
        cpu.gpr[RAX] = result;
        return Some(Ok(()));
    }
    let exit = || Exit::Xen {
        longmode,
        cpl,
        input,
        params,
    };
    let asked = bus.ask(cpu, access, exit);
    Some(asked.map(|answer| cpu.gpr[RAX] = answer.value))
}

impl Bus {
    /// Does a hypercall that need not go to the VMM, and returns its result.
    fn xen_call(
        &mut self,
        cpu: &mut CpuState,
        nr: u64,
        params: [u64; 6],
        longmode: bool,
    ) -> Option<u64> {
        let [a0, a1, a2, ..] = params;
        match (nr, a0) {
            (XEN_VERSION, VERSION) => self.vm.xen.version().map(u64::from),
            (EVENT_CHANNEL_OP, SEND) => {
                let Some([port]) = self.read_words(cpu, a1) else {
                    return Some(EFAULT);
                };
                self.vm.send_guest_event(port).then_some(0)
            }
            (SCHED_OP, POLL) if self.has_lapic() && self.vm.xen.has_all_events() => {
                Some(self.poll_events(cpu, a1, longmode))
            }
            (SCHED_OP, POLL | YIELD) => {
                self.give_way(cpu);
                Some(0)
            }
            (SET_TIMER_OP, _) if self.has_xen_timer() => {
                let high = if longmode { 0 } else { a1 << 32 };
                match a0 | high {
                    0 => self.stop_xen_timer(),
                    expires_ns => self.start_xen_timer(expires_ns, true),
                }
                Some(0)
            }
            (VCPU_OP, SET_SINGLESHOT_TIMER | STOP_SINGLESHOT_TIMER) if self.has_xen_timer() => {
                if a1 != u64::from(self.xen.id) {
                    return Some(EINVAL);
                }
                if a0 == STOP_SINGLESHOT_TIMER {
                    self.stop_xen_timer();
                    return Some(0);
                }
                // The structure ends with flags, which are ignored, and of 64-bit guests with four bytes more.
                let time = if longmode {
                    self.read_words(cpu, a2)
                        .map(|[low, high, _, _]| [low, high])
                } else {
                    self.read_words(cpu, a2).map(|[low, high, _]| [low, high])
                };
                let Some([low, high]) = time else {
                    return Some(EFAULT);
                };
                self.start_xen_timer(u64::from(low) | u64::from(high) << 32, false);
                Some(0)
            }
            _ => None,
        }
    }

    /// Reads what a hypercall points to. False if it cannot be read.
    fn read_guest(&mut self, cpu: &mut CpuState, gva: u64, bytes: &mut [u8]) -> bool {
        let read = self.mmu.read_bytes(cpu, gva, bytes, Privilege::Current);
        read.is_ok()
    }

    fn read_words<const N: usize>(&mut self, cpu: &mut CpuState, gva: u64) -> Option<[u32; N]> {
        let mut bytes = [[0; 4]; N];
        self.read_guest(cpu, gva, bytes.as_flattened_mut())
            .then(|| bytes.map(u32::from_le_bytes))
    }

    /// Writes a page of calls for the guest: KVM's own, or the VMM's page whose number is in the low bits of `value`. False
    /// is #GP.
    pub(in crate::vcpu) fn write_xen_page(&self, cpu: &CpuState, value: u64) -> bool {
        let (gpa, n) = (value & !0xfff, (value & 0xfff) as usize);
        let is_long = cpu.efer & efer::LMA != 0;
        self.vm.set_xen_long_mode(is_long);
        if !self.vm.xen.has_hypercalls() {
            let page = self.vm.xen.page(is_long, n);
            return page.is_some_and(|page| self.vm.memory.write_bytes(gpa, &page));
        }
        // MOV EAX, imm32; VMCALL or VMMCALL; RET
        let [x, y, z] = super::hypercall_instruction(cpu);
        let mut page = [0xcc; PAGE];
        for (nr, call) in (0u32..).zip(page.chunks_exact_mut(CALL)) {
            let [a, b, c, d] = nr.to_le_bytes();
            let code = [0xb8, a, b, c, d, x, y, z, 0xc3];
            call[..code.len()].copy_from_slice(&code);
        }
        n == 0 && self.vm.memory.write_bytes(gpa, &page)
    }
}
