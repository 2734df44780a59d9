//! Hyper-V's interface, as KVM offers it (Hypervisor Top-Level Functional Specification).

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;
mod hyperv_guest;
mod long_mode;

use anykvm_ioctls::VcpuExit;
use guest::{IRR, enable_lapic, lapic_bit, set_msr};
use hyperv_guest::{CALL_PAGE, CODE, GUEST_OS_ID, HYPERCALL, RESULTS, call, msr, vcpu, write_msr};
use iced_x86::code_asm::*;
use kvm_bindings::*;
use long_mode::Machine;

const VP_INDEX: u32 = 0x4000_0002;
const RESET: u32 = 0x4000_0003;
const VP_RUNTIME: u32 = 0x4000_0010;
const TIME_REF_COUNT: u32 = 0x4000_0020;
const REFERENCE_TSC: u32 = 0x4000_0021;
const TSC_FREQUENCY: u32 = 0x4000_0022;
const VP_ASSIST_PAGE: u32 = 0x4000_0073;
const CRASH_P0: u32 = 0x4000_0100;
const CRASH_CTL: u32 = 0x4000_0105;
const TSC_EMULATION_STATUS: u32 = 0x4000_0108;

const TSC_PAGE: u64 = 0x9000;

#[test]
fn a_guest_calls_crashes_and_resets() {
    let m = Machine::new();
    m.vm.create_irq_chip().unwrap();
    let mut vcpu = vcpu(&m, u32::MAX, u32::MAX);
    // HvCallSendSyntheticClusterIpi in memory: vector 0x42 for processor 0.
    m.write(0xa000, &[0x42, 0, 0, 0, 0, 0, 0, 0, 1]);
    m.load(CODE, |a| {
        a.mov(rdi, RESULTS)?;
        // Without a system's name the page stays off.
        write_msr(a, HYPERCALL, CALL_PAGE | 1)?;
        write_msr(a, GUEST_OS_ID, 0x8100 << 48)?;
        write_msr(a, HYPERCALL, CALL_PAGE | 1)?;
        call(a, [0xbeef, 0, 0])?;
        call(a, [1 << 16 | 8, 0, 0])?;
        call(a, [1 << 32 | 8, 0, 0])?;
        call(a, [1 << 16 | 0xb, 0x41, 1])?;
        call(a, [1 << 16 | 0xb, 5, 1])?;
        call(a, [0xb, 0xa000, 0])?;
        write_msr(a, CRASH_P0, 0xdead)?;
        write_msr(a, CRASH_CTL, 1 << 63)?;
        write_msr(a, RESET, 1)?;
        a.hlt()
    });
    enable_lapic(&vcpu);
    let mut event = || match vcpu.run().unwrap() {
        VcpuExit::SystemEvent(kind, _) => kind,
        other => panic!("{other:?}"),
    };
    assert_eq!(event(), KVM_SYSTEM_EVENT_CRASH);
    assert_eq!(event(), KVM_SYSTEM_EVENT_RESET);
    let results: [u8; 48] = m.read(RESULTS);
    let (words, _) = results.as_chunks::<8>();
    let results: Vec<u64> = words.iter().map(|w| u64::from_le_bytes(*w)).collect();
    assert_eq!(results, [2, 0, 3, 0, 3, 0]);
    assert_eq!(msr(&vcpu, CRASH_P0), Some(0xdead));
    assert!(lapic_bit(&vcpu, IRR, 0x41) && lapic_bit(&vcpu, IRR, 0x42));
}

/// The guest reads `MSR` and halts; a #GP is a triple fault.
fn can_read<const MSR: u32>(features: u32, enforces: bool) -> bool {
    let m = Machine::new();
    let mut vcpu = vcpu(&m, features, 0);
    let cap = kvm_enable_cap {
        cap: KVM_CAP_HYPERV_ENFORCE_CPUID,
        args: [enforces.into(), 0, 0, 0],
        ..Default::default()
    };
    vcpu.enable_cap(&cap).unwrap();
    m.load(CODE, |a| {
        a.mov(ecx, MSR)?;
        a.rdmsr()?;
        a.hlt()
    });
    match vcpu.run().unwrap() {
        VcpuExit::Hlt => true,
        VcpuExit::Shutdown => false,
        other => panic!("{other:?}"),
    }
}

#[test]
fn cpuid_is_enforced_if_the_vmm_wants_that() {
    assert!(can_read::<VP_INDEX>(0, false));
    assert!(!can_read::<VP_INDEX>(0, true));
    assert!(can_read::<VP_INDEX>(1 << 6, true));
    // The synthetic interrupt controller is off.
    assert!(!can_read::<0x4000_0080>(u32::MAX, false));
}

const TSC_INVARIANT_CONTROL: u32 = 0x4000_0118;

#[test]
fn the_tsc_is_invariant_once_the_guest_asks() {
    let m = Machine::new();
    let mut vcpu = vcpu(&m, u32::MAX, u32::MAX);
    m.load(CODE, |a| {
        let mut read = a.create_label();
        let mut next = a.create_label();
        a.mov(rdi, RESULTS)?;
        a.call(read)?;
        write_msr(a, TSC_INVARIANT_CONTROL, 1)?;
        a.call(read)?;
        a.jmp(next)?;
        a.set_label(&mut read)?;
        a.mov(eax, 0x8000_0007_u32)?;
        a.cpuid()?;
        a.mov(dword_ptr(rdi), edx)?;
        a.add(rdi, 4)?;
        a.ret()?;
        a.set_label(&mut next)?;
        a.hlt()?;
        // Not taken back: a #GP without a handler.
        write_msr(a, TSC_INVARIANT_CONTROL, 0)
    });
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    let seen: [u8; 8] = m.read(RESULTS);
    // The host's own bit, if it has it.
    assert_eq!((seen[1] & 1, seen[0]), (0, seen[4]));
    let supported = m.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    let mut leaves = supported.as_slice().iter();
    let own = leaves.find(|e| e.function == 0x8000_0007);
    assert_eq!(seen[5] & 1, own.map_or(0, |e| (e.edx >> 8 & 1) as u8));
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Shutdown));
    assert_eq!(msr(&vcpu, TSC_INVARIANT_CONTROL), Some(1));
    assert!(!set_msr(&vcpu, TSC_INVARIANT_CONTROL, 2));
    assert!(set_msr(&vcpu, TSC_INVARIANT_CONTROL, 0));
}

#[test]
fn registers_of_the_vmm() {
    let m = Machine::new();
    let vcpu = vcpu(&m, u32::MAX, u32::MAX);
    for (index, value, is_good) in [
        (VP_INDEX, 7, true),
        (VP_INDEX, 1 << 20, false),
        (VP_RUNTIME, 1 << 40, true),
        (TIME_REF_COUNT, 5, true),
        (TSC_FREQUENCY, 5, true),
        (TSC_EMULATION_STATUS, 1, true),
        // No memory is there.
        (VP_ASSIST_PAGE, 0x7000_0001, false),
        (VP_ASSIST_PAGE, 0xb001, true),
        // Zeros are what a VMM writes at a reset.
        (0x4000_0090, 0, true),
        (0x4000_0090, 0x41, false),
        (0x4000_00b0, 0, true),
        (0x4000_00b1, 1, false),
    ] {
        assert_eq!(set_msr(&vcpu, index, value), is_good, "{index:#x}");
    }
    assert_eq!(msr(&vcpu, VP_INDEX), Some(7));
    assert!(msr(&vcpu, VP_RUNTIME).unwrap() >= 1 << 40);
    assert_eq!(msr(&vcpu, VP_ASSIST_PAGE), Some(0xb001));
    let hz = u64::from(vcpu.get_tsc_khz().unwrap()) * 1000;
    assert_eq!(msr(&vcpu, TSC_FREQUENCY), Some(hz));
}

#[test]
fn the_page_and_the_register_tell_the_same_time() {
    let m = Machine::new();
    let mut vcpu = vcpu(&m, u32::MAX, u32::MAX);
    m.load(CODE, |a| {
        write_msr(a, REFERENCE_TSC, TSC_PAGE | 1)?;
        a.hlt()?;
        a.rdtsc()?;
        a.hlt()
    });
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    let word = |at| u64::from_le_bytes(m.read(TSC_PAGE + at));
    assert_eq!(word(0), 1);
    let clock = kvm_clock_data {
        clock: 5_000_000_000,
        ..Default::default()
    };
    m.vm.set_clock(&clock).unwrap();
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(word(0), 2);
    let regs = vcpu.get_regs().unwrap();
    let tsc = regs.rdx << 32 | regs.rax;
    let scaled = (u128::from(tsc) * u128::from(word(8))) >> 64;
    let by_page = (scaled as u64).wrapping_add(word(16));
    let by_register = msr(&vcpu, TIME_REF_COUNT).unwrap();
    // Five seconds, and what has passed since; the register was read later.
    assert!((50_000_000..80_000_000).contains(&by_page), "{by_page}");
    let later = by_register - by_page;
    assert!(later < 10_000_000, "{by_page} {by_register}");
}
