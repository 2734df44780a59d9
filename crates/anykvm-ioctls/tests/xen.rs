//! Xen's hypercalls: the page that an MSR writes, and exits to the VMM (KVM API document, KVM_XEN_HVM_CONFIG).

#![allow(clippy::unwrap_used, reason = "tests")]

mod engines;
mod guest;
mod hyperv_guest;
mod long_mode;

use anykvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use guest::{ioctl, set_msr};
use hyperv_guest::{CALL_PAGE, CODE, GUEST_OS_ID, HYPERCALL, write_msr};
use iced_x86::{IcedError, code_asm::*};
use kvm_abi::numbers::*;
use kvm_bindings::*;
use long_mode::Machine;

/// The MSR that writes the page.
const MSR: u32 = 0x4000_0200;
/// Where the guest has Xen's page.
const PAGE: u64 = 0x9000;
/// A hypercall, and the VMM's answer.
const NUMBER: u64 = 17;
const ANSWER: u64 = 0xfeed_5a5a_0123_4567;

fn configure(vm: &VmFd, config: kvm_xen_hvm_config) -> Result<i32, i32> {
    ioctl(vm, KVM_XEN_HVM_CONFIG, &mut { config })
}

fn intercepting() -> kvm_xen_hvm_config {
    kvm_xen_hvm_config {
        flags: KVM_XEN_HVM_CONFIG_INTERCEPT_HCALL,
        msr: MSR,
        ..Default::default()
    }
}

/// Runs to a hypercall, and answers it. Returns its number and its arguments.
fn answer(vcpu: &mut VcpuFd) -> (u64, [u64; 6]) {
    let exit = format!("{:?}", vcpu.run().unwrap());
    let run = vcpu.get_kvm_run();
    assert_eq!(run.exit_reason, KVM_EXIT_XEN, "{exit}");
    // SAFETY: the members that belong to this exit reason; all are integers.
    let call = unsafe {
        assert_eq!(run.__bindgen_anon_1.xen.type_, KVM_EXIT_XEN_HCALL);
        &mut run.__bindgen_anon_1.xen.u.hcall
    };
    assert_eq!((call.longmode, call.cpl), (1, 0));
    call.result = ANSWER;
    (call.input, call.params)
}

fn arguments(a: &mut CodeAssembler) -> Result<(), IcedError> {
    for (n, r) in (1..).zip([rdi, rsi, rdx, r10, r8, r9]) {
        a.mov(r, n * 0x1111_1111_1111u64)?;
    }
    a.mov(eax, NUMBER as u32)
}

/// A hypercall by the instruction, one by Xen's page, and one by Hyper-V's.
fn calls(a: &mut CodeAssembler) -> Result<(), IcedError> {
    arguments(a)?;
    a.vmcall()?;
    a.push(rax)?;
    write_msr(a, MSR, PAGE)?;
    arguments(a)?;
    a.mov(eax, 0)?;
    a.mov(rbx, PAGE + 32 * NUMBER)?;
    a.call(rbx)?;
    a.push(rax)?;
    write_msr(a, GUEST_OS_ID, 0x5a)?;
    write_msr(a, HYPERCALL, CALL_PAGE | 1)?;
    // HVCALL_SIGNAL_EVENT with a badly aligned address.
    a.mov(ecx, 0x5d)?;
    a.mov(rdx, 0x5a5a_5a5au64)?;
    a.xor(eax, eax)?;
    a.mov(rbx, CALL_PAGE)?;
    a.call(rbx)?;
    a.hlt()
}

#[test]
fn hypercalls_go_to_the_vmm() {
    let m = Machine::new();
    configure(&m.vm, intercepting()).unwrap();
    let mut vcpu = hyperv_guest::vcpu(&m, 0xffff_ffff, 0xffff_ffff);
    m.load(CODE, calls);
    let want = [1, 2, 3, 4, 5, 6].map(|n| n * 0x1111_1111_1111u64);
    assert_eq!(answer(&mut vcpu), (NUMBER, want));
    assert_eq!(answer(&mut vcpu), (NUMBER, want));
    let exit = vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::Hlt), "{exit:?}");
    let regs = vcpu.get_regs().unwrap();
    let answers = [0, 8].map(|at| u64::from_le_bytes(m.read(regs.rsp + at)));
    assert_eq!(answers, [ANSWER; 2]);
    assert_eq!(regs.rax, 4, "HV_STATUS_INVALID_ALIGNMENT");
}

/// Writes the MSR, and calls what the page begins with.
fn calls_page(a: &mut CodeAssembler) -> Result<(), IcedError> {
    write_msr(a, MSR, PAGE | 1)?;
    a.mov(rbx, PAGE)?;
    a.call(rbx)?;
    a.hlt()
}

#[test]
fn the_vmm_may_have_pages_of_its_own() {
    let m = Machine::new();
    let mut pages = [0xccu8; 2 * 4096];
    // mov eax, 1234h; ret
    pages[4096..][..6].copy_from_slice(&[0xb8, 0x34, 0x12, 0, 0, 0xc3]);
    let config = kvm_xen_hvm_config {
        msr: MSR,
        blob_addr_64: pages.as_ptr() as u64,
        blob_size_64: 2,
        ..Default::default()
    };
    configure(&m.vm, config).unwrap();
    m.load(CODE, calls_page);
    let mut vcpu = m.vcpu(0, CODE);
    let exit = vcpu.run().unwrap();
    assert!(matches!(exit, VcpuExit::Hlt), "{exit:?}");
    assert_eq!(vcpu.get_regs().unwrap().rax, 0x1234);
    // There is no third page, and none for a VMM that has none.
    let msr = |value| set_msr(&vcpu, MSR, value);
    assert_eq!((msr(PAGE), msr(PAGE | 2)), (true, false));
    configure(&m.vm, kvm_xen_hvm_config::default()).unwrap();
    assert!(!msr(PAGE));
}

#[test]
fn configurations_that_are_refused() {
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    assert_eq!(vm.check_extension_raw(KVM_CAP_XEN_HVM.into()), 0xff);
    let unknown = kvm_xen_hvm_config {
        flags: KVM_XEN_HVM_CONFIG_SHARED_INFO,
        ..Default::default()
    };
    let both = kvm_xen_hvm_config {
        blob_size_32: 1,
        ..intercepting()
    };
    let unreadable = kvm_xen_hvm_config {
        msr: MSR,
        blob_addr_32: 0x10,
        blob_size_32: 1,
        ..Default::default()
    };
    assert_eq!(configure(&vm, unknown), Err(libc::EINVAL));
    assert_eq!(configure(&vm, both), Err(libc::EINVAL));
    assert_eq!(configure(&vm, unreadable), Err(libc::EFAULT));
    assert_eq!(configure(&vm, intercepting()), Ok(0));
}

#[test]
fn the_interpreter_does_the_same() {
    engines::again_on("interp");
}
