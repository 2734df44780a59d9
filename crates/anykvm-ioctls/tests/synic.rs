//! Hyper-V's synthetic interrupt controller, its timers, what it asks the VMM, and flushes of TLBs
//! (KVM API document, KVM_CAP_HYPERV_SYNIC; Hypervisor Top-Level Functional Specification).

#![allow(clippy::unwrap_used, reason = "tests")]

mod guest;
mod hyperv_guest;
mod long_mode;

use std::os::fd::AsRawFd;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use guest::{IRR, enable_lapic, ioctl, lapic_bit, next_port, set_msr};
use hyperv_guest::{CALL_PAGE, CODE, GUEST_OS_ID, HYPERCALL, RESULTS, call, msr, vcpu, write_msr};
use iced_x86::code_asm::*;
use kvm_abi::numbers::KVM_HYPERV_EVENTFD;
use kvm_bindings::*;
use long_mode::Machine;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const TIME_REF_COUNT: u32 = 0x4000_0020;
const SCONTROL: u32 = 0x4000_0080;
const SVERSION: u32 = 0x4000_0081;
const SIEFP: u32 = 0x4000_0082;
const SIMP: u32 = 0x4000_0083;
const EOM: u32 = 0x4000_0084;
const SINT0: u32 = 0x4000_0090;
const SINT2: u32 = SINT0 + 2;
const STIMER0_CONFIG: u32 = 0x4000_00b0;
const STIMER0_COUNT: u32 = 0x4000_00b1;
const SYNDBG_CONTROL: u32 = 0x4000_00f1;
const SYNDBG_STATUS: u32 = 0x4000_00f2;

const MESSAGES: u64 = 0x9000;
const SLOT2: u64 = MESSAGES + 2 * 256;
const MASKED: u64 = 1 << 16;
const VECTOR: u8 = 0x41;

fn enable(vcpu: &VcpuFd, cap: u32) -> Result<(), i32> {
    let cap = kvm_enable_cap {
        cap,
        ..Default::default()
    };
    vcpu.enable_cap(&cap).map_err(|e| e.errno())
}

/// A machine with chips, and a vCPU whose LAPIC and synthetic controller are on.
fn machine() -> (Machine, VcpuFd) {
    let m = Machine::new();
    m.vm.create_irq_chip().unwrap();
    let vcpu = vcpu(&m, u32::MAX, u32::MAX);
    enable_lapic(&vcpu);
    enable(&vcpu, KVM_CAP_HYPERV_SYNIC2).unwrap();
    (m, vcpu)
}

/// KVM_EXIT_HYPERV with its details.
fn hyperv(vcpu: &mut VcpuFd) -> kvm_hyperv_exit {
    match vcpu.run().unwrap() {
        VcpuExit::Hyperv => {}
        other => panic!("{other:?}"),
    }
    // SAFETY: the member that the exit says.
    unsafe { vcpu.get_kvm_run().__bindgen_anon_1.hyperv }
}

fn connection(m: &Machine, conn_id: u32, fd: i32, flags: u32) -> Result<i32, i32> {
    let mut args = kvm_hyperv_eventfd {
        conn_id,
        fd,
        flags,
        ..Default::default()
    };
    ioctl(&m.vm, KVM_HYPERV_EVENTFD, &mut args)
}

#[test]
fn it_is_off_until_the_vmm_wants_it() {
    let without = Machine::new();
    let bare = vcpu(&without, u32::MAX, u32::MAX);
    assert_eq!(enable(&bare, KVM_CAP_HYPERV_SYNIC), Err(libc::EINVAL));
    let m = Machine::new();
    m.vm.create_irq_chip().unwrap();
    let vcpu = vcpu(&m, u32::MAX, u32::MAX);
    assert_eq!(msr(&vcpu, SVERSION), Some(0));
    assert!(!set_msr(&vcpu, SCONTROL, 1));
    enable(&vcpu, KVM_CAP_HYPERV_SYNIC).unwrap();
    for (index, value, is_good) in [
        (SCONTROL, 1, true),
        (SIMP, MESSAGES | 1, true),
        (SIEFP, 0xa001, true),
        (SINT2, 0x1_0041, true),
        (STIMER0_COUNT, 1000, true),
        (STIMER0_CONFIG, 2 << 16, true),
    ] {
        assert_eq!(set_msr(&vcpu, index, value), is_good, "{index:#x}");
        assert_eq!(msr(&vcpu, index), Some(value), "{index:#x}");
    }
    assert_eq!(msr(&vcpu, SVERSION), Some(1));
    assert_eq!(msr(&vcpu, SINT0), Some(MASKED));
    assert_eq!(msr(&vcpu, EOM), Some(0));
}

#[test]
fn the_vmm_hears_of_registers_and_messages() {
    let (m, mut vcpu) = machine();
    m.write(MESSAGES, &[7]);
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    assert_eq!(
        connection(&m, 1 << 24, event.as_raw_fd(), 0),
        Err(libc::EINVAL)
    );
    assert_eq!(connection(&m, 5, -1, 0), Err(libc::EBADF));
    assert_eq!(connection(&m, 5, event.as_raw_fd(), 2), Err(libc::EINVAL));
    assert_eq!(connection(&m, 5, event.as_raw_fd(), 0), Ok(0));
    assert_eq!(connection(&m, 5, event.as_raw_fd(), 0), Err(libc::EEXIST));
    // In memory: connection 6.
    m.write(0xa000, &[6]);
    m.load(CODE, |a| {
        write_msr(a, SIMP, MESSAGES | 1)?;
        write_msr(a, SCONTROL, 1)?;
        write_msr(a, GUEST_OS_ID, 0x8100 << 48)?;
        write_msr(a, HYPERCALL, CALL_PAGE | 1)?;
        a.mov(rdi, RESULTS)?;
        call(a, [1 << 16 | 0x5d, 5, 0])?;
        call(a, [1 << 16 | 0x5d, 1 << 24, 0])?;
        call(a, [0x5d, 0xa000, 0])?;
        call(a, [0x5c, 0xb000, 0x123])?;
        call(a, [1 << 32 | 0x5c, 0xb000, 0])?;
        // HvExtCallQueryCapabilities
        call(a, [0x8001, 0, 0xb000])?;
        call(a, [1 << 16 | 0x8001, 0, 0])?;
        a.out(0x80, al)
    });
    for index in [SIMP, SCONTROL] {
        let exit = hyperv(&mut vcpu);
        assert_eq!(exit.type_, KVM_EXIT_HYPERV_SYNIC);
        // SAFETY: the member that the type says.
        let synic = unsafe { exit.u.synic };
        let control = u64::from(index == SCONTROL);
        assert_eq!(
            (synic.msr, synic.msg_page, synic.control),
            (index, MESSAGES | 1, control)
        );
    }
    // KVM_CAP_HYPERV_SYNIC2 leaves the page alone.
    assert_eq!(m.read(MESSAGES), [7]);
    for (input, params, result) in [
        (0x5d, [0xa000, 0], 0x12),
        (0x5c, [0xb000, 0x123], 0x34),
        (0x8001, [0, 0xb000], 0x56),
    ] {
        let exit = hyperv(&mut vcpu);
        assert_eq!(exit.type_, KVM_EXIT_HYPERV_HCALL);
        // SAFETY: the member that the type says.
        let mut hcall = unsafe { exit.u.hcall };
        assert_eq!((hcall.input, hcall.params), (input, params));
        hcall.result = result;
        vcpu.get_kvm_run().__bindgen_anon_1.hyperv.u.hcall = hcall;
    }
    assert_eq!(next_port(&mut vcpu), 0x80);
    let results: [u8; 56] = m.read(RESULTS);
    let (words, _) = results.as_chunks::<8>();
    let results: Vec<u64> = words.iter().map(|w| u64::from_le_bytes(*w)).collect();
    assert_eq!(results, [0, 3, 0x12, 0x34, 3, 0x56, 5]);
    assert_eq!(event.read().unwrap(), 1);
    assert_eq!(connection(&m, 5, 0, KVM_HYPERV_EVENTFD_DEASSIGN), Ok(0));
    let again = connection(&m, 5, 0, KVM_HYPERV_EVENTFD_DEASSIGN);
    assert_eq!(again, Err(libc::ENOENT));
}

#[test]
fn a_gsi_is_a_source_and_its_end_is_told() {
    let (m, mut vcpu) = machine();
    let mut entry = kvm_irq_routing_entry {
        gsi: 30,
        type_: KVM_IRQ_ROUTING_HV_SINT,
        ..Default::default()
    };
    entry.u.hv_sint = kvm_irq_routing_hv_sint { vcpu: 0, sint: 2 };
    let table = KvmIrqRouting::from_entries(&[entry]).unwrap();
    m.vm.set_gsi_routing(&table).unwrap();
    let (signal, resample) = (
        EventFd::new(EFD_NONBLOCK).unwrap(),
        EventFd::new(EFD_NONBLOCK).unwrap(),
    );
    m.vm.register_irqfd_with_resample(&signal, &resample, 30)
        .unwrap();
    // Masked as it is.
    m.vm.set_irq_line(30, true).unwrap();
    assert!(!lapic_bit(&vcpu, IRR, VECTOR));
    assert!(set_msr(&vcpu, SINT2, VECTOR.into()));
    m.vm.set_irq_line(30, true).unwrap();
    assert!(lapic_bit(&vcpu, IRR, VECTOR));
    m.load(CODE, |a| {
        write_msr(a, EOM, 0)?;
        a.out(0x80, al)
    });
    assert!(resample.read().is_err());
    assert_eq!(next_port(&mut vcpu), 0x80);
    assert_eq!(resample.read().unwrap(), 1);
}

/// Waits until one of the bits is set there.
fn wait_for(a: &mut CodeAssembler, at: u64, bits: u32) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.test(dword_ptr(at), bits)?;
    a.je(again)
}

/// A one-shot timer of source 2, a millisecond from now.
fn start_timer(a: &mut CodeAssembler) -> Result<(), IcedError> {
    write_msr(a, STIMER0_CONFIG, 2 << 16 | 1)?;
    a.mov(ecx, TIME_REF_COUNT)?;
    a.rdmsr()?;
    a.add(eax, 10_000)?;
    a.adc(edx, 0)?;
    a.mov(ecx, STIMER0_COUNT)?;
    a.wrmsr()
}

#[test]
fn a_timer_sends_a_message_when_there_is_room() {
    let (m, mut vcpu) = machine();
    assert!(set_msr(&vcpu, SIMP, MESSAGES | 1));
    assert!(set_msr(&vcpu, SINT2, VECTOR.into()));
    // The slot is taken.
    m.write(SLOT2, &[9]);
    m.load(CODE, |a| {
        start_timer(a)?;
        wait_for(a, SLOT2 + 4, 1 << 8)?;
        a.out(0x80, al)?;
        a.mov(dword_ptr(SLOT2), 0)?;
        write_msr(a, EOM, 0)?;
        wait_for(a, SLOT2, u32::MAX)?;
        a.out(0x81, al)
    });
    assert_eq!(next_port(&mut vcpu), 0x80);
    assert!(!lapic_bit(&vcpu, IRR, VECTOR));
    let count = msr(&vcpu, STIMER0_COUNT).unwrap();
    assert_eq!(next_port(&mut vcpu), 0x81);
    assert!(lapic_bit(&vcpu, IRR, VECTOR));
    let message: [u8; 40] = m.read(SLOT2);
    let word = |at| u64::from_le_bytes(std::array::from_fn(|i| message[at + i]));
    assert_eq!(word(0), 0x18 << 32 | 0x8000_0010);
    assert_eq!((word(16), word(24)), (0, count));
    assert!(word(32) >= count);
    // It was one shot.
    assert_eq!(msr(&vcpu, STIMER0_CONFIG), Some(2 << 16));
}

#[test]
fn a_direct_timer_wakes_from_hlt() {
    let (m, mut vcpu) = machine();
    // An IDT with one gate of 64 bits, to the handler.
    const IDT: u64 = 0xc000;
    const HANDLER: u64 = 0xd000;
    let at = IDT + u64::from(VECTOR) * 16;
    m.write(at, &(HANDLER as u16).to_le_bytes());
    m.write(at + 2, &[8, 0, 0, 0x8e]);
    // And a GDT for its selector.
    m.write(0xe008, &0x00af_9b00_0000_ffff_u64.to_le_bytes());
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.idt.base, sregs.idt.limit) = (IDT, 0xfff);
    (sregs.gdt.base, sregs.gdt.limit) = (0xe000, 0xff);
    vcpu.set_sregs(&sregs).unwrap();
    m.load(HANDLER, |a| a.out(0x81, al));
    m.load(CODE, |a| {
        // Direct, vector 0x41, periodic: a millisecond.
        write_msr(a, STIMER0_COUNT, 10_000)?;
        write_msr(a, STIMER0_CONFIG, 1 << 12 | 0x41 << 4 | 0b11)?;
        a.sti()?;
        a.hlt()?;
        a.out(0x80, al)
    });
    assert_eq!(next_port(&mut vcpu), 0x81);
}

#[test]
fn the_debugger_hears_and_answers() {
    let (m, mut vcpu) = machine();
    let mut cpuid = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).unwrap();
    cpuid
        .push(kvm_cpuid_entry2 {
            function: 0x4000_0082,
            eax: 2,
            ..Default::default()
        })
        .unwrap();
    vcpu.set_cpuid2(&cpuid).unwrap();
    m.load(CODE, |a| {
        write_msr(a, SYNDBG_CONTROL, 0x55)?;
        a.mov(ecx, SYNDBG_STATUS)?;
        a.rdmsr()?;
        a.out(0x80, al)
    });
    let exit = hyperv(&mut vcpu);
    assert_eq!(exit.type_, KVM_EXIT_HYPERV_SYNDBG);
    // SAFETY: the member that the type says.
    let mut details = unsafe { exit.u.syndbg };
    assert_eq!((details.msr, details.control), (SYNDBG_CONTROL, 0x55));
    details.status = 0x66;
    vcpu.get_kvm_run().__bindgen_anon_1.hyperv.u.syndbg = details;
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(0x80, data) => assert_eq!(data, [0x66]),
        other => panic!("{other:?}"),
    }
}

/// A page above 3 GiB, which is another page of memory before a flush and after it.
const GVA: u64 = 0xc000_0000;
const TABLE: u64 = 0x11_0000;
const BEFORE: u64 = 0x12_0000;
const AFTER: u64 = 0x13_0000;

#[test]
fn a_flush_reaches_the_other_processor() {
    let m = Machine::new();
    m.vm.create_irq_chip().unwrap();
    m.map_large(GVA);
    m.write(long_mode::PML4 + 0x3000, &(TABLE | 3).to_le_bytes());
    m.write(TABLE, &(BEFORE | 3).to_le_bytes());
    m.write(BEFORE, &[1]);
    m.write(AFTER, &[2]);
    let mut first = vcpu(&m, u32::MAX, u32::MAX);
    let mut second = m.vcpu(1, CODE + 0x800);
    let state = kvm_mp_state {
        mp_state: KVM_MP_STATE_RUNNABLE,
    };
    second.set_mp_state(state).unwrap();
    m.load(CODE, |a| {
        write_msr(a, GUEST_OS_ID, 0x8100 << 48)?;
        write_msr(a, HYPERCALL, CALL_PAGE | 1)?;
        a.mov(rdi, RESULTS)?;
        a.mov(rsi, GVA)?;
        // Until the other one has the translation.
        wait_for(a, 0x7000, 1)?;
        a.mov(rax, AFTER | 3)?;
        a.mov(qword_ptr(TABLE), rax)?;
        // HvCallFlushVirtualAddressListEx, two elements: all spaces, sparse, bank 0, processor 1.
        call(a, [2 << 32 | 1 << 17 | 0x14, 0xa000, 0])?;
        a.out(0x80, al)
    });
    for (at, word) in [(0, 0), (8, 2), (16, 0), (24, 1), (32, 2u64)] {
        m.write(0xa000 + at, &word.to_le_bytes());
    }
    m.load(CODE + 0x800, |a| {
        let mut again = a.create_label();
        let mut done = a.create_label();
        a.mov(rsi, GVA)?;
        a.mov(ebx, 1u32 << 30)?;
        a.set_label(&mut again)?;
        a.mov(al, byte_ptr(rsi))?;
        a.mov(byte_ptr(0x7000), 1)?;
        a.cmp(al, 2)?;
        a.je(done)?;
        a.dec(ebx)?;
        a.jne(again)?;
        a.out(0x82, al)?;
        a.set_label(&mut done)?;
        a.out(0x81, al)
    });
    let other = std::thread::spawn(move || next_port(&mut second));
    assert_eq!(next_port(&mut first), 0x80);
    assert_eq!(other.join().unwrap(), 0x81);
    assert_eq!(u64::from_le_bytes(m.read(RESULTS)), 2 << 32);
}
