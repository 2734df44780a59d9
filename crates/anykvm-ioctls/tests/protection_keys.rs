//! Protection keys of user and supervisor pages (SDM vol. 3, 4.6.2): offered on every host, and exact from the first access
//! after a change of PKRU or IA32_PKRS, by whatever way it comes.

#![allow(clippy::unwrap_used, reason = "tests")]

mod long_mode;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use iced_x86::code_asm::*;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, Msrs, kvm_msr_entry, kvm_xsave};
use long_mode::{Machine, PML4};
use vm_memory::{Bytes, GuestAddress};

const CODE: u64 = 0x5000;
const HANDLER: u64 = 0x5800;
const GDT: u64 = 0x6000;
const IDT: u64 = 0x7000;
/// An XSAVE image.
const IMAGE: u64 = 0x8000;
/// A supervisor's page of the same key, likewise.
const SUPERVISOR: u64 = 0x40_0000 + DATA;
/// A user's page of key 3, at the same gpa as [`DATA`].
const KEYED: u64 = 0x20_0000 + DATA;
const DATA: u64 = 0x9000;
const KEY: u32 = 3;
const NO_ACCESS: u32 = 1 << (2 * KEY);
const NO_WRITE: u32 = 2 << (2 * KEY);
const CR4_PKE: u64 = 1 << 22;
const CR4_PKS: u64 = 1 << 24;
const IA32_PKRS: u32 = 0x6e1;
const CR4_OSXSAVE: u64 = 1 << 18;
const CR0_WP: u64 = 1 << 16;
/// What RAX has if nothing faulted.
const FINE: u64 = 0x600d;
/// Error codes of #PF: present, and by a key; write.
const BY_KEY: u64 = 1 | 1 << 5;
const WRITE: u64 = 2;

/// The standard format's offset of PKRU.
fn offset(m: &Machine) -> usize {
    let supported = m.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    let find = |function, index| {
        let mut entries = supported.as_slice().iter();
        entries
            .find(|e| (e.function, e.index) == (function, index))
            .unwrap()
    };
    const PKU: u32 = 1 << 3;
    const PKS: u32 = 1 << 31;
    assert_eq!(find(7, 0).ecx & (PKU | PKS), PKU | PKS);
    assert_ne!(find(0xd, 0).eax & 1 << 9, 0);
    let leaf = find(0xd, 9);
    assert!(find(0xd, 0).ebx >= leaf.ebx + leaf.eax);
    leaf.ebx as usize
}

fn machine() -> (Machine, VcpuFd) {
    let m = Machine::new();
    let entries = [
        (PML4, PML4 + 0x1007),
        (PML4 + 0x1000, PML4 + 0x2007),
        // The large page of gpa 0 again, for users.
        (PML4 + 0x2008, 0x87 | u64::from(KEY) << 59),
        (PML4 + 0x2010, 0x83 | u64::from(KEY) << 59),
    ];
    for (at, entry) in entries {
        m.memory.write_obj(entry, GuestAddress(at)).unwrap();
    }
    m.load(HANDLER, |a| {
        a.pop(rax)?;
        a.hlt()
    });
    let vcpu = m.vcpu(0, CODE);
    m.handle_page_faults(&vcpu, [GDT, IDT], HANDLER);
    (m, vcpu)
}

fn with_keys(vcpu: &VcpuFd) {
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr4 |= CR4_PKE | CR4_OSXSAVE;
    sregs.cr0 |= CR0_WP;
    vcpu.set_sregs(&sregs).unwrap();
    long_mode::set_xcr0(vcpu, 0x203);
}

/// RAX after the code at `rip`.
fn run(vcpu: &mut VcpuFd, rip: u64) -> u64 {
    long_mode::start(vcpu, rip);
    assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
    vcpu.get_regs().unwrap().rax
}

fn set_pkru(vcpu: &VcpuFd, at: usize, pkru: u32) {
    let mut image: kvm_xsave = vcpu.get_xsave().unwrap();
    image.region[128] |= 1 << 9;
    image.region[at / 4] = pkru;
    // SAFETY: no component lies beyond the structure.
    unsafe { vcpu.set_xsave(&image) }.unwrap();
}

fn read(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rbx, KEYED)?;
    a.mov(rcx, qword_ptr(rbx))?;
    a.mov(rax, FINE)?;
    a.hlt()
}

fn write(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rbx, KEYED)?;
    a.mov(qword_ptr(rbx), rbx)?;
    a.mov(rax, FINE)?;
    a.hlt()
}

fn wrpkru(a: &mut CodeAssembler, pkru: u32) -> Result<(), IcedError> {
    a.xor(ecx, ecx)?;
    a.xor(edx, edx)?;
    a.mov(eax, pkru)?;
    a.wrpkru()
}

#[test]
fn the_vmm_sets_pkru() {
    let (m, mut vcpu) = machine();
    let at = offset(&m);
    let (reads, writes) = (CODE, CODE + 0x100);
    m.load(reads, read);
    m.load(writes, write);
    // Without CR4.PKE keys mean nothing.
    set_pkru(&vcpu, at, NO_ACCESS);
    assert_eq!(run(&mut vcpu, reads), FINE);
    with_keys(&vcpu);
    for _ in 0..3 {
        for (pkru, by_read, by_write) in [
            (0, FINE, FINE),
            (NO_ACCESS, BY_KEY, BY_KEY | WRITE),
            (NO_WRITE, FINE, BY_KEY | WRITE),
            // Of other keys.
            (!(NO_ACCESS | NO_WRITE), FINE, FINE),
        ] {
            set_pkru(&vcpu, at, pkru);
            assert_eq!(vcpu.get_xsave().unwrap().region[at / 4], pkru);
            assert_eq!(run(&mut vcpu, reads), by_read, "{pkru:#x}");
            assert_eq!(run(&mut vcpu, writes), by_write, "{pkru:#x}");
        }
    }
    // A supervisor without CR0.WP writes where it may read.
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr0 &= !CR0_WP;
    vcpu.set_sregs(&sregs).unwrap();
    set_pkru(&vcpu, at, NO_WRITE);
    assert_eq!(run(&mut vcpu, writes), FINE);
    set_pkru(&vcpu, at, NO_ACCESS);
    assert_eq!(run(&mut vcpu, writes), BY_KEY | WRITE);
    // An image without the component has its initial value.
    let mut image = vcpu.get_xsave().unwrap();
    image.region[128] &= !(1 << 9);
    // SAFETY: no component lies beyond the structure.
    unsafe { vcpu.set_xsave(&image) }.unwrap();
    assert_eq!(vcpu.get_xsave().unwrap().region[at / 4], 0);
    assert_eq!(run(&mut vcpu, writes), FINE);
}

#[test]
fn the_guest_sets_pkru() {
    let (m, mut vcpu) = machine();
    let at = offset(&m);
    with_keys(&vcpu);
    // The page is known when its rights go, and again when they come back.
    let twice: [long_mode::Assemble; 2] = [
        |a| {
            a.mov(rbx, KEYED)?;
            a.mov(rsi, qword_ptr(rbx))?;
            wrpkru(a, NO_ACCESS)?;
            read(a)
        },
        |a| {
            a.mov(rbx, KEYED)?;
            wrpkru(a, 0)?;
            a.mov(qword_ptr(rbx), rbx)?;
            wrpkru(a, NO_WRITE)?;
            a.mov(rsi, qword_ptr(rbx))?;
            write(a)
        },
    ];
    for (code, expected) in twice.into_iter().zip([BY_KEY, BY_KEY | WRITE]) {
        m.load(CODE, code);
        for _ in 0..3 {
            set_pkru(&vcpu, at, 0);
            assert_eq!(run(&mut vcpu, CODE), expected);
        }
    }
    assert_eq!(vcpu.get_xsave().unwrap().region[at / 4], NO_WRITE);
    // What XSAVE saves of it XRSTOR restores, and the first access goes by it.
    m.load(CODE, |a| {
        wrpkru(a, NO_ACCESS)?;
        a.mov(eax, 1 << 9)?;
        a.mov(rdi, IMAGE)?;
        a.xsave(ptr(rdi))?;
        wrpkru(a, 0)?;
        a.mov(rbx, KEYED)?;
        a.mov(rsi, qword_ptr(rbx))?;
        a.mov(eax, 1 << 9)?;
        a.xrstor(ptr(rdi))?;
        a.xor(ecx, ecx)?;
        a.rdpkru()?;
        a.mov(r8, rax)?;
        read(a)
    });
    assert_eq!(run(&mut vcpu, CODE), BY_KEY);
    assert_eq!(vcpu.get_regs().unwrap().r8, u64::from(NO_ACCESS));
    assert_eq!(m.read::<4>(IMAGE + at as u64), NO_ACCESS.to_le_bytes());
    // Keys say nothing of execution.
    m.load(CODE, |a| {
        wrpkru(a, NO_ACCESS)?;
        a.mov(rbx, 0x20_0000 + HANDLER)?;
        a.push(rcx)?;
        a.jmp(rbx)
    });
    assert_eq!(run(&mut vcpu, CODE), 0);
}

/// QEMU on a host without keys: it finds no place for PKRU, so it sets images that have nothing there.
#[test]
fn a_vmm_that_knows_no_place_for_pkru_does_not_lose_it() {
    let (m, _) = machine();
    let at = offset(&m);
    let vcpu = m.vm.create_vcpu(1).unwrap();
    let mut cpuid = m.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    for e in cpuid.as_mut_slice() {
        if (e.function, e.index) == (0xd, 9) {
            e.ebx = 0;
        }
    }
    vcpu.set_cpuid2(&cpuid).unwrap();
    let shown = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).unwrap();
    let mut shown = shown.as_slice().iter();
    let leaf = shown.find(|e| (e.function, e.index) == (0xd, 9)).unwrap();
    assert_eq!(leaf.ebx as usize, at);
    let mut vcpu = vcpu;
    m.load(CODE, |a| {
        wrpkru(a, NO_WRITE)?;
        a.hlt()
    });
    m.load(CODE + 0x100, |a| {
        a.xor(ecx, ecx)?;
        a.rdpkru()?;
        a.hlt()
    });
    let sregs = m.vcpu(2, CODE).get_sregs().unwrap();
    vcpu.set_sregs(&sregs).unwrap();
    with_keys(&vcpu);
    run(&mut vcpu, CODE);
    let mut image = vcpu.get_xsave().unwrap();
    image.region[at / 4] = 0;
    // SAFETY: no component lies beyond the structure.
    unsafe { vcpu.set_xsave(&image) }.unwrap();
    assert_eq!(run(&mut vcpu, CODE + 0x100), u64::from(NO_WRITE));
    // A reset's image does not have the component.
    image.region[128] &= !(1 << 9);
    // SAFETY: no component lies beyond the structure.
    unsafe { vcpu.set_xsave(&image) }.unwrap();
    assert_eq!(run(&mut vcpu, CODE + 0x100), 0);
}

fn set_pkrs(vcpu: &VcpuFd, value: u64) -> bool {
    let entry = kvm_msr_entry {
        index: IA32_PKRS,
        data: value,
        ..Default::default()
    };
    vcpu.set_msrs(&Msrs::from_entries(&[entry]).unwrap())
        .unwrap()
        == 1
}

fn wrmsr(a: &mut CodeAssembler, rights: u32) -> Result<(), IcedError> {
    a.mov(ecx, IA32_PKRS)?;
    a.xor(edx, edx)?;
    a.mov(eax, rights)?;
    a.wrmsr()
}

#[test]
fn supervisor_keys() {
    let (m, mut vcpu) = machine();
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr4 |= CR4_PKS;
    sregs.cr0 |= CR0_WP;
    vcpu.set_sregs(&sregs).unwrap();
    assert!(!set_pkrs(&vcpu, 1 << 32));
    // The page is known when its rights go, and again when they come back.
    let accesses: [long_mode::Assemble; 3] = [
        |a| {
            a.mov(rbx, SUPERVISOR)?;
            wrmsr(a, 0)?;
            a.mov(qword_ptr(rbx), rbx)?;
            wrmsr(a, NO_WRITE)?;
            a.mov(rsi, qword_ptr(rbx))?;
            a.mov(qword_ptr(rbx), rbx)?;
            a.hlt()
        },
        |a| {
            a.mov(rbx, SUPERVISOR)?;
            wrmsr(a, 0)?;
            a.mov(rsi, qword_ptr(rbx))?;
            wrmsr(a, NO_ACCESS)?;
            a.mov(rsi, qword_ptr(rbx))?;
            a.hlt()
        },
        // Users' pages are PKRU's.
        |a| {
            wrmsr(a, NO_ACCESS)?;
            read(a)
        },
    ];
    for (code, expected) in accesses.into_iter().zip([BY_KEY | WRITE, BY_KEY, FINE]) {
        m.load(CODE, code);
        for _ in 0..3 {
            assert_eq!(run(&mut vcpu, CODE), expected);
        }
    }
    // The VMM's way, and what it reads.
    m.load(CODE, |a| {
        a.mov(rbx, SUPERVISOR)?;
        a.mov(rsi, qword_ptr(rbx))?;
        a.mov(rax, FINE)?;
        a.hlt()
    });
    for (rights, expected) in [(0, FINE), (NO_ACCESS, BY_KEY), (NO_WRITE, FINE)] {
        assert!(set_pkrs(&vcpu, rights.into()));
        assert_eq!(run(&mut vcpu, CODE), expected);
    }
    let mut entries = Msrs::from_entries(&[kvm_msr_entry {
        index: IA32_PKRS,
        ..Default::default()
    }])
    .unwrap();
    assert_eq!(vcpu.get_msrs(&mut entries).unwrap(), 1);
    assert_eq!(entries.as_slice()[0].data, u64::from(NO_WRITE));
    // Without CR4.PKS the register means nothing.
    assert!(set_pkrs(&vcpu, NO_ACCESS.into()));
    sregs.cr4 &= !CR4_PKS;
    vcpu.set_sregs(&sregs).unwrap();
    assert_eq!(run(&mut vcpu, CODE), FINE);
}
