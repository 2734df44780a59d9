//! Xen's hypercalls: number in RAX; arguments in RDI, RSI, RDX, R10, R8, R9, of 32-bit code in EBX, ECX, EDX, ESI, EDI, EBP
//! (Xen's public headers, arch-x86). The VMM answers all of them.

use x86_cpu::{CpuState, Exception, Fault};
use x86_defs::{
    control::efer,
    reg::{R8, R9, R10, RAX, RBP, RBX, RCX, RDI, RDX, RSI},
};

use super::Bus;
use crate::{Exit, vcpu::replay::DeviceAccess, vm::xen::PAGE};

/// Size in bytes of a call in the page.
const CALL: usize = 32;
/// This bit of RAX tells Hyper-V's hypercalls, where the guest has both.
const OF_HYPER_V: u64 = 1 << 31;

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
    let exit = || Exit::Xen {
        longmode,
        cpl,
        input,
        params,
    };
    let asked = bus.ask(cpu, DeviceAccess::Hypercall { nr: input }, exit);
    Some(asked.map(|answer| cpu.gpr[RAX] = answer.value))
}

impl Bus {
    /// Writes a page of calls for the guest: KVM's own, or the VMM's page whose number is in the low bits of `value`. False
    /// is #GP.
    pub(in crate::vcpu) fn write_xen_page(&self, cpu: &CpuState, value: u64) -> bool {
        let (gpa, n) = (value & !0xfff, (value & 0xfff) as usize);
        if !self.vm.xen.has_hypercalls() {
            let page = self.vm.xen.page(cpu.efer & efer::LMA != 0, n);
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
