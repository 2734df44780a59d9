//! A 64-bit guest that uses Hyper-V's interface.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "tests")]

use anykvm_ioctls::VcpuFd;
use iced_x86::code_asm::*;
use kvm_bindings::*;

use crate::long_mode::Machine;

pub(crate) const GUEST_OS_ID: u32 = 0x4000_0000;
pub(crate) const HYPERCALL: u32 = 0x4000_0001;

pub(crate) const CODE: u64 = 0x5000;
pub(crate) const RESULTS: u64 = 0x6000;
pub(crate) const CALL_PAGE: u64 = 0x8000;

/// A vCPU whose CPUID has Hyper-V's signature and these features.
pub(crate) fn vcpu(machine: &Machine, features: u32, recommendations: u32) -> VcpuFd {
    let vcpu = machine.vcpu(0, CODE);
    let list = machine
        .kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .unwrap();
    let ours = [
        (0x4000_0000, 0x4000_0005),
        (0x4000_0001, 0x3123_7648),
        (0x4000_0003, features),
        (0x4000_0004, recommendations),
    ]
    .map(|(function, value)| kvm_cpuid_entry2 {
        function,
        eax: value,
        ..Default::default()
    });
    let is_other = |e: &&kvm_cpuid_entry2| e.function >> 28 != 4;
    let mut entries: Vec<_> = list.as_slice().iter().filter(is_other).copied().collect();
    entries.extend(ours);
    vcpu.set_cpuid2(&CpuId::from_entries(&entries).unwrap())
        .unwrap();
    vcpu
}

pub(crate) fn msr(vcpu: &VcpuFd, index: u32) -> Option<u64> {
    let entry = kvm_msr_entry {
        index,
        ..Default::default()
    };
    let mut msrs = Msrs::from_entries(&[entry]).unwrap();
    (vcpu.get_msrs(&mut msrs).unwrap() == 1).then(|| msrs.as_slice()[0].data)
}

pub(crate) fn write_msr(a: &mut CodeAssembler, index: u32, value: u64) -> Result<(), IcedError> {
    a.mov(ecx, index)?;
    a.mov(eax, value as u32)?;
    a.mov(edx, (value >> 32) as u32)?;
    a.wrmsr()
}

/// Calls the page and stores the result in the next of [`RESULTS`].
pub(crate) fn call(
    a: &mut CodeAssembler,
    [control, first, second]: [u64; 3],
) -> Result<(), IcedError> {
    a.mov(rcx, control)?;
    a.mov(rdx, first)?;
    a.mov(r8, second)?;
    a.mov(rbx, CALL_PAGE)?;
    a.call(rbx)?;
    a.mov(qword_ptr(rdi), rax)?;
    a.add(rdi, 8)
}
