//! Address spaces that a guest shares with the hypervisor: docs/paravirt.md, "Address spaces that are kept".

#![allow(clippy::unwrap_used, reason = "tests")]

mod engines;
mod guest;
mod long_mode;

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use guest::{Ram, add_slot, next_port, set_msr};
use iced_x86::code_asm::*;
use kvm_abi::numbers::KVM_SET_NR_MMU_PAGES;
use kvm_bindings::*;
use long_mode::{Machine, PML4, counted, start};
use vm_memory::{Bytes, GuestAddress};

const ROOT_CACHE: u32 = 0x616b_0001;
const KEEP: u64 = 1 << 63;
/// Loads each root of a list in turn, and reads and writes the window.
const SWITCHES: u64 = 0x1000;
/// WRMSR.
const WRITE: u64 = 0x1100;
/// VMCALL.
const CALL: u64 = 0x1140;
/// Reads the window after a load of CR3.
const LOOK: u64 = 0x1180;
/// INVLPG of the window, then as that.
const FLUSH: u64 = 0x11c0;
/// General-protection faults come here.
const FAULT: u64 = 0x1f00;
const GDT: u64 = 0x2000;
const IDT: u64 = 0x3000;
/// The list.
const LIST: u64 = 0x8000;
/// The shared area.
const AREA: u64 = 0x9000;
const FIRST: u64 = AREA + 64;
const DATA: u64 = 0x2_0000;
const ROOTS: u64 = 0x11_0000;
const WINDOW: u64 = 0x20_0000;

fn root(n: u64) -> u64 {
    ROOTS + n * 0x4000
}

/// What the window shows in a root.
fn value(n: u64) -> u64 {
    1000 + n * n
}

fn put(m: &Machine, at: u64, value: u64) {
    m.memory.write_obj(value, GuestAddress(at)).unwrap();
}

/// Root `n` has the window at the page of `data`.
fn show(m: &Machine, n: u64, data: u64) {
    put(m, root(n) + 0x3000, data | 3);
}

/// So many roots, which have all of memory in common and the window for themselves.
fn machine(roots: u64) -> Machine {
    let m = Machine::new();
    m.load(SWITCHES, |a| {
        let (mut round, mut next) = (a.create_label(), a.create_label());
        a.set_label(&mut round)?;
        a.xor(ebx, ebx)?;
        a.set_label(&mut next)?;
        a.mov(rax, qword_ptr(rdi + rbx * 8))?;
        a.mov(cr3, rax)?;
        a.add(r8, qword_ptr(WINDOW))?;
        a.inc(qword_ptr(WINDOW + 8))?;
        a.inc(rbx)?;
        a.cmp(rbx, rsi)?;
        a.jb(next)?;
        a.dec(rcx)?;
        a.jnz(round)?;
        a.out(0x80, al)
    });
    m.load(WRITE, |a| {
        a.wrmsr()?;
        a.out(0x80, al)
    });
    m.load(CALL, |a| {
        a.vmcall()?;
        a.out(0x80, al)
    });
    m.load(LOOK, |a| {
        a.mov(cr3, rax)?;
        a.mov(rdx, qword_ptr(WINDOW))?;
        a.mov(rbx, cr3)?;
        a.out(0x80, al)
    });
    m.load(FLUSH, |a| {
        a.mov(cr3, rax)?;
        a.invlpg(qword_ptr(WINDOW))?;
        a.mov(rdx, qword_ptr(WINDOW))?;
        a.out(0x80, al)
    });
    m.load(FAULT, |a| a.out(0x81, al));
    for n in 0..roots {
        let at = root(n);
        for (place, entry) in [
            (at, at + 0x1003),
            (at + 0x1000, at + 0x2003),
            (at + 0x2000, 0x183),
            (at + 0x2008, at + 0x3003),
            (LIST + 8 * n, at | KEEP),
        ] {
            put(&m, place, entry);
        }
        show(&m, n, DATA + n * 0x1000);
        put(&m, DATA + n * 0x1000, value(n));
    }
    m
}

fn vcpu(m: &Machine, id: u64) -> VcpuFd {
    let vcpu = m.vcpu(id, SWITCHES);
    m.handle_page_faults(&vcpu, [GDT, IDT], FAULT);
    put(m, IDT + 13 * 16, FAULT | 8 << 16 | 0x8e << 40);
    put(m, IDT + 13 * 16 + 8, 0);
    // PGE.
    long_mode::set_cr4(&vcpu, 1 << 7);
    vcpu
}

fn run(vcpu: &mut VcpuFd, rip: u64, set: impl FnOnce(&mut kvm_regs)) -> (u16, kvm_regs) {
    start(vcpu, rip);
    let mut regs = vcpu.get_regs().unwrap();
    set(&mut regs);
    vcpu.set_regs(&regs).unwrap();
    let port = next_port(vcpu);
    (port, vcpu.get_regs().unwrap())
}

/// The guest's WRMSR; false: #GP.
fn write_msr(vcpu: &mut VcpuFd, value: u64) -> bool {
    let (port, _) = run(vcpu, WRITE, |r| {
        (r.rcx, r.rax, r.rdx) = (ROOT_CACHE.into(), value & 0xffff_ffff, value >> 32);
    });
    port == 0x80
}

fn read_msr(vcpu: &VcpuFd) -> u64 {
    let entry = kvm_msr_entry {
        index: ROOT_CACHE,
        ..Default::default()
    };
    let mut msrs = Msrs::from_entries(&[entry]).unwrap();
    assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), 1);
    msrs.as_slice()[0].data
}

fn word(m: &Machine, at: u64) -> u32 {
    u32::from_le_bytes(m.read(at))
}

/// What the guest says at the head of its area.
fn ask(m: &Machine, area: u64, [version, size, entries]: [u32; 3]) {
    let words = [version, 0, size, entries, 77];
    for (n, word) in words.into_iter().enumerate() {
        m.write(area + 4 * n as u64, &word.to_le_bytes());
    }
}

/// The host's version, the size, entries and status.
fn answer(m: &Machine, area: u64) -> [u32; 4] {
    [4, 8, 12, 16].map(|at| word(m, area + at))
}

fn enable(m: &Machine, vcpu: &mut VcpuFd, entries: u32) {
    ask(m, AREA, [1, 64 + 16 * entries, entries]);
    assert!(write_msr(vcpu, AREA | 1));
    assert_eq!(answer(m, AREA), [1, 64 + 16 * entries, entries, 0]);
    assert_eq!(read_msr(vcpu), AREA | 1);
}

/// What the window shows after a load of CR3.
fn look(vcpu: &mut VcpuFd, loaded: u64) -> u64 {
    let (port, regs) = run(vcpu, LOOK, |r| r.rax = loaded);
    assert_eq!((port, regs.rbx), (0x80, loaded & !KEEP));
    regs.rdx
}

fn switches(vcpu: &mut VcpuFd, roots: u64, rounds: u64) -> u64 {
    let (port, regs) = run(vcpu, SWITCHES, |r| {
        (r.rdi, r.rsi, r.rcx) = (LIST, roots, rounds);
    });
    assert_eq!(port, 0x80);
    regs.r8
}

#[test]
fn the_guest_finds_it() {
    let m = Machine::new();
    let all = m.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    let leaf = |function| all.as_slice().iter().find(|e| e.function == function);
    let base = leaf(0x4000_0200).unwrap();
    let signature = [base.ebx, base.ecx, base.edx].map(u32::to_le_bytes);
    assert_eq!(signature.as_flattened(), b"anykvmanykvm");
    assert_eq!(base.eax, 0x4000_0201);
    let features = leaf(base.eax).unwrap();
    assert_eq!(features.eax & 3, 3);
    assert_eq!(
        [features.ebx, features.ecx, features.edx],
        [1, 128, 64 + 16 * 128]
    );
    // KVM's own leaves are where they were, and the highest is what it was.
    let kvm = leaf(0x4000_0000).unwrap();
    assert_eq!((kvm.eax, kvm.ebx), (0x4000_0001, 0x4b4d_564b));
    let list = m.kvm.get_msr_index_list().unwrap();
    assert!(list.as_slice().contains(&ROOT_CACHE));
}

#[test]
fn each_root_has_memory_of_its_own() {
    for (roots, entries) in [(1, 1), (2, 2), (5, 8), (40, 64), (40, 7), (3, 1)] {
        let m = machine(roots);
        let mut vcpu = vcpu(&m, 0);
        enable(&m, &mut vcpu, entries);
        for round in 1..=3 {
            let sum: u64 = (0..roots).map(value).sum();
            assert_eq!(
                switches(&mut vcpu, roots, 50),
                50 * sum,
                "{roots} {entries}"
            );
            for n in 0..roots {
                let written = u64::from_le_bytes(m.read(DATA + n * 0x1000 + 8));
                assert_eq!(written, 50 * round, "{roots} {entries} {n}");
            }
        }
        // The guest sees which are kept.
        let kept: Vec<u64> = (0..u64::from(entries))
            .filter(|n| word(&m, FIRST + 16 * n + 8) == 1)
            .map(|n| u64::from_le_bytes(m.read(FIRST + 16 * n)))
            .collect();
        if u64::from(entries) >= roots {
            assert!((0..roots).all(|n| kept.contains(&root(n))), "{kept:x?}");
        }
    }
}

#[test]
fn the_other_engines_agree() {
    engines::again_on("interp");
    engines::again_on("lockstep");
}

#[test]
fn a_hit_leaves_translated_code_for_nothing() {
    if std::env::var_os("ANYKVM_ENGINE").is_some() {
        return;
    }
    const ROUNDS: u64 = 10_000;
    let names = ["jit_interpreted", "page_walks", "tlb_flush"];
    for roots in [2, 8, 40] {
        let m = machine(roots);
        let mut vcpu = vcpu(&m, 0);
        enable(&m, &mut vcpu, 64);
        switches(&mut vcpu, roots, 2000);
        let [left, walks, flushes] = counted(&mut vcpu, names, |vcpu| {
            switches(vcpu, roots, ROUNDS);
        });
        // A place in the table of switches may be two roots'.
        assert!(left < ROUNDS * roots / 4, "{roots}: {left}");
        assert_eq!((walks, flushes), (0, 0), "{roots}");
        if roots == 2 {
            assert!(left < 100, "{left}");
        }
    }
}

#[test]
fn translations_go_when_the_guest_says_so() {
    let m = machine(3);
    let mut vcpu = vcpu(&m, 0);
    enable(&m, &mut vcpu, 8);
    let other = DATA + 0x10_000;
    put(&m, other, 7);
    let entry_of = |n: u64| {
        let is_it = |e: &u64| u64::from_le_bytes(m.read(FIRST + 16 * e)) == root(n);
        FIRST + 16 * (0..8).find(is_it).unwrap()
    };
    let kept = |n: u64| root(n) | KEEP;
    let reset = |vcpu: &mut VcpuFd| {
        show(&m, 0, DATA);
        assert_eq!(look(vcpu, root(0)), value(0));
        assert_eq!(look(vcpu, kept(1)), value(1));
        show(&m, 0, other);
        // As the guest has promised to say it, it is not looked for.
        assert_eq!(look(vcpu, kept(0)), value(0));
        assert_eq!(look(vcpu, kept(1)), value(1));
    };
    // A load without bit 63.
    reset(&mut vcpu);
    assert_eq!(look(&mut vcpu, root(0)), 7);
    // One of another root says nothing of this one.
    reset(&mut vcpu);
    assert_eq!(look(&mut vcpu, root(2)), value(2));
    assert_eq!(look(&mut vcpu, kept(0)), value(0));
    // INVLPG in the root.
    reset(&mut vcpu);
    let flush = |vcpu: &mut VcpuFd, n| run(vcpu, FLUSH, |r| r.rax = kept(n)).1.rdx;
    assert_eq!(flush(&mut vcpu, 0), 7);
    // The guest takes it back in the area, from any vCPU.
    reset(&mut vcpu);
    m.write(entry_of(0) + 8, &[0; 4]);
    assert_eq!(look(&mut vcpu, kept(0)), 7);
    assert_eq!(word(&m, entry_of(0) + 8), 1);
    // The page directory is freed.
    for (argument, want) in [(root(0), 1), (root(0), 0), (0x5000, 0), (root(0) | 8, -22)] {
        if want == 1 {
            reset(&mut vcpu);
        }
        let (_, regs) = run(&mut vcpu, CALL, |r| {
            (r.rax, r.rbx) = (0x616b_0002, argument);
        });
        assert_eq!(regs.rax as i64, want);
    }
    assert_eq!(look(&mut vcpu, kept(0)), 7);
    // CR4.PGE toggled, and the end of it all.
    reset(&mut vcpu);
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr4 ^= 1 << 7;
    vcpu.set_sregs(&sregs).unwrap();
    assert_eq!(look(&mut vcpu, kept(0)), 7);
    reset(&mut vcpu);
    assert!(write_msr(&mut vcpu, 0));
    assert_eq!(read_msr(&vcpu), 0);
    assert_eq!(look(&mut vcpu, root(0)), 7);
    let (port, regs) = run(&mut vcpu, LOOK, |r| r.rax = kept(1));
    assert_eq!((port, regs.rdx), (0x81, 0));
}

#[test]
fn what_is_wrong_is_refused() {
    let m = machine(2);
    let read_only = Ram::new(0x1000);
    add_slot(&m.vm, 5, 0x4000_0000, &read_only, KVM_MEM_READONLY);
    let mut vcpu = vcpu(&m, 0);
    // Reserved bits, no memory, a read-only slot, the LAPIC's page, no such address.
    for value in [
        AREA | 2,
        AREA | 0x801,
        AREA,
        0x7000_0001,
        0x4000_0001,
        0xfee0_0001,
        1 << 60 | 1,
    ] {
        ask(&m, AREA, [1, 0x1000, 16]);
        assert!(!write_msr(&mut vcpu, value), "{value:#x}");
        assert_eq!(read_msr(&vcpu), 0);
    }
    assert_eq!(read_only.read::<64>(0), [0; 64]);
    // Versions and sizes: what the guest says, and the answer.
    for (said, answered) in [
        ([0, 0x1000, 16], [1, 64, 0, 1]),
        ([2, 0x1000, 16], [1, 64, 0, 1]),
        ([u32::MAX; 3], [1, 64, 0, 1]),
        ([1, 0x1000, 0], [1, 64, 0, 2]),
        ([1, 79, 16], [1, 64, 0, 2]),
        ([1, 0, 16], [1, 64, 0, 2]),
        ([1, 80, 16], [1, 80, 1, 0]),
        ([1, 0x1000, 16], [1, 320, 16, 0]),
        ([1, u32::MAX, u32::MAX], [1, 2112, 128, 0]),
    ] {
        m.write(AREA + 0x1000, &[0x5a; 16]);
        ask(&m, AREA, said);
        assert!(write_msr(&mut vcpu, AREA | 1));
        assert_eq!(answer(&m, AREA), answered, "{said:?}");
        let is_on = answered[3] == 0;
        assert_eq!(read_msr(&vcpu), if is_on { AREA | 1 } else { 0 });
        let (port, _) = run(&mut vcpu, LOOK, |r| r.rax = root(0) | KEEP);
        assert_eq!(port, if is_on { 0x80 } else { 0x81 }, "{said:?}");
        assert_eq!(m.read(AREA + 0x1000), [0x5a; 16]);
    }
    // Without the leaf there is no such register, and no such hypercall.
    let all = m.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    let others = all
        .as_slice()
        .iter()
        .filter(|e| e.function & !0xff != 0x4000_0200);
    let others: Vec<_> = others.copied().collect();
    let mut plain = self::vcpu(&m, 1);
    plain
        .set_cpuid2(&CpuId::from_entries(&others).unwrap())
        .unwrap();
    ask(&m, AREA, [1, 0x1000, 16]);
    assert!(!write_msr(&mut plain, AREA | 1));
    let (_, regs) = run(&mut plain, CALL, |r| {
        (r.rax, r.rbx) = (0x616b_0002, root(0));
    });
    assert_eq!(regs.rax as i64, -1000);
}

#[test]
fn roots_that_lie_get_what_the_tables_say() {
    let m = machine(2);
    let shadowed = Ram::new(0x4000);
    for (at, entry) in [
        (0u64, 0x4000_1003u64),
        (0x1000, 0x4000_2003),
        (0x2000, 0x183),
        (0x2008, 0x4000_3003),
        (0x3000, DATA | 0x63),
    ] {
        shadowed.write(at, &entry.to_le_bytes());
    }
    add_slot(&m.vm, 5, 0x4000_0000, &shadowed, KVM_MEM_READONLY);
    let mut vcpu = vcpu(&m, 0);
    enable(&m, &mut vcpu, 4);
    // Tables in a read-only slot are as good as others; A and D stay as they are.
    for loaded in [0x4000_0000 | KEEP, root(1) | KEEP, 0x4000_0000 | KEEP] {
        let want = if loaded & !KEEP == root(1) {
            value(1)
        } else {
            value(0)
        };
        assert_eq!(look(&mut vcpu, loaded), want);
    }
    assert_eq!(shadowed.read::<8>(0), 0x4000_1003u64.to_le_bytes());
    // A root that points at itself at each level: the pages that its entries name.
    let itself = 0x18_0000;
    put(&m, itself, itself | 3);
    for page in 1..12 {
        put(&m, itself + 8 * page, page << 12 | 3);
    }
    put(&m, itself + 8 * 511, itself | 3);
    m.load(0x1200, |a| {
        a.mov(cr3, rax)?;
        a.mov(rdx, qword_ptr(0xffff_ffff_ffff_f000u64 as i64))?;
        a.out(0x80, al)
    });
    for _ in 0..3 {
        let (port, regs) = run(&mut vcpu, 0x1200, |r| r.rax = itself | KEEP);
        assert_eq!((port, regs.rdx & !0x60), (0x80, itself | 3));
        assert_eq!(look(&mut vcpu, root(0) | KEEP), value(0));
    }
    // One where nothing is: nothing can be fetched, nor any fault be handled.
    for at in [0x7000_0000u64, 0xfee0_0000, (1 << 36) - 0x1000] {
        start(&vcpu, LOOK);
        let mut regs = vcpu.get_regs().unwrap();
        regs.rax = at | KEEP;
        vcpu.set_regs(&regs).unwrap();
        assert!(matches!(vcpu.run().unwrap(), VcpuExit::Shutdown), "{at:#x}");
        let mut sregs = vcpu.get_sregs().unwrap();
        assert_eq!(sregs.cr3, at);
        sregs.cr3 = PML4;
        vcpu.set_sregs(&sregs).unwrap();
        assert_eq!(look(&mut vcpu, root(0) | KEEP), value(0));
    }
    // Reserved bits beside bit 63.
    let (port, _) = run(&mut vcpu, LOOK, |r| r.rax = root(0) | KEEP | 1 << 58);
    assert_eq!(port, 0x81);
    // The area may say what it will.
    for at in (0..64).step_by(4) {
        m.write(AREA + at, &u32::MAX.to_le_bytes());
    }
    for at in (0..0xfc0).step_by(8) {
        put(&m, FIRST + at, root(1));
    }
    assert_eq!(look(&mut vcpu, root(0) | KEEP), value(0));
    assert_eq!(look(&mut vcpu, root(1) | KEEP), value(1));
}

/// The area's slot goes and comes back; what the VMM restores comes into force when the guest runs.
#[test]
fn the_area_may_go_and_the_guest_may_move() {
    let at = 0x5000_0000;
    let (m, area) = (machine(3), Ram::new(0x1000));
    add_slot(&m.vm, 5, at, &area, KVM_MEM_LOG_DIRTY_PAGES);
    let said = [1u32, 0, 0x1000, 8, 0];
    let fill = |area: &Ram| {
        for (n, word) in said.into_iter().enumerate() {
            area.write(4 * n as u64, &word.to_le_bytes());
        }
    };
    fill(&area);
    let mut vcpu = vcpu(&m, 0);
    assert!(write_msr(&mut vcpu, at | 1));
    assert_eq!(look(&mut vcpu, root(0) | KEEP), value(0));
    // The root that was loaded when the guest asked came first.
    assert_eq!(area.read::<8>(64), PML4.to_le_bytes());
    assert_eq!(area.read::<8>(64 + 16), root(0).to_le_bytes());
    // What the hypervisor writes is logged.
    assert_eq!(m.vm.get_dirty_log(5, 0x1000).unwrap(), [1]);
    assert_eq!(look(&mut vcpu, root(0) | KEEP), value(0));
    assert_eq!(m.vm.get_dirty_log(5, 0x1000).unwrap(), [0]);
    // Without the slot nothing is kept, and all loads work.
    let remove = |slot| {
        let region = kvm_userspace_memory_region {
            slot,
            ..Default::default()
        };
        // SAFETY: nothing is mapped.
        unsafe { m.vm.set_user_memory_region(region) }.unwrap();
    };
    remove(5);
    show(&m, 0, DATA + 0x1000);
    assert_eq!(look(&mut vcpu, root(0) | KEEP), value(1));
    show(&m, 0, DATA);
    assert_eq!(look(&mut vcpu, root(0) | KEEP), value(0));
    // Another VM with the same memory.
    let saved = read_msr(&vcpu);
    let other = m.kvm.create_vm().unwrap();
    other.set_static_memory(m.memory).unwrap();
    let moved = Machine {
        memory: m.memory,
        kvm: anykvm_ioctls::Kvm::new().unwrap(),
        vm: other,
    };
    let mut there = self::vcpu(&moved, 0);
    assert!(set_msr(&there, ROOT_CACHE, saved));
    assert_eq!(read_msr(&there), saved);
    // Its memory comes after its registers.
    let copy = Ram::new(0x1000);
    copy.write(0, &area.read::<0x1000>(0));
    add_slot(&moved.vm, 5, at, &copy, 0);
    assert_eq!(look(&mut there, root(0) | KEEP), value(0));
    assert_eq!(copy.read::<8>(64 + 16), root(0).to_le_bytes());
    assert_eq!(u32::from_le_bytes(copy.read(64 + 24)), 1);
    assert_eq!(u32::from_le_bytes(copy.read(64 + 40)), 0);
    let sum: u64 = (0..3).map(value).sum();
    assert_eq!(switches(&mut there, 3, 100), 100 * sum);
    // A VMM's nonsense is refused, and where nothing can be agreed on any more all loads flush.
    assert!(!set_msr(&there, ROOT_CACHE, 0x803));
    assert!(set_msr(&there, ROOT_CACHE, 0x7000_0001));
    show(&m, 0, DATA + 0x1000);
    assert_eq!(look(&mut there, root(0) | KEEP), value(1));
    show(&m, 0, DATA);
    assert_eq!(look(&mut there, root(0) | KEEP), value(0));
}

/// Tables and areas that change while four vCPUs walk: each sees one of the two pages.
#[test]
fn tables_that_change_under_four_vcpus() {
    let m = machine(6);
    let two = DATA + 0x10_000;
    put(&m, two, value(0));
    let mut vcpus: Vec<VcpuFd> = (0..4).map(|id| vcpu(&m, id)).collect();
    for (n, vcpu) in vcpus.iter_mut().enumerate() {
        let area = AREA + 0x1000 * n as u64;
        ask(&m, area, [1, 0x1000, 4]);
        assert!(write_msr(vcpu, area | 1));
    }
    let (m, is_done) = (&m, &AtomicBool::new(false));
    let sum: u64 = (0..6).map(value).sum();
    thread::scope(|s| {
        let runners: Vec<_> = vcpus
            .iter_mut()
            .map(|vcpu| {
                s.spawn(move || (0..20).for_each(|_| assert_eq!(switches(vcpu, 6, 500), 500 * sum)))
            })
            .collect();
        s.spawn(move || {
            let mut turn = 0u64;
            while !is_done.load(Ordering::Relaxed) {
                turn += 1;
                show(m, 0, if turn.is_multiple_of(2) { DATA } else { two });
                for area in 0..4 {
                    let entry = AREA + 0x1000 * area + 64 + 16 * (turn % 4);
                    m.write(entry + 8, &(turn as u32 % 3).to_le_bytes());
                    m.write(entry, &(root(turn % 7) | (turn % 5)).to_le_bytes());
                }
            }
        });
        let results: Vec<_> = runners.into_iter().map(|r| r.join()).collect();
        is_done.store(true, Ordering::Relaxed);
        assert!(results.iter().all(|r| r.is_ok()));
    });
}

/// KVM_SET_NR_MMU_PAGES.
fn set_pages(m: &Machine, pages: u64) {
    assert_eq!(
        kvm_abi::ioctl(m.vm.as_raw_fd(), KVM_SET_NR_MMU_PAGES, pages).map_err(|e| e.get()),
        Ok(0)
    );
}

/// Contexts, tables and pages that a vCPU keeps.
fn kept(vcpu: &VcpuFd) -> [u64; 3] {
    let all = vcpu.statistics().unwrap();
    ["mmu_contexts", "mmu_tables", "mmu_pages"]
        .map(|name| all.iter().find(|(n, _)| *n == name).unwrap().1)
}

/// More roots than the VMM allows pages for: what is kept stays below, and each root has memory of its own.
#[test]
fn a_budget_holds_and_changes_nothing_else() {
    const ROOTS: u64 = 40;
    /// Four contexts and the tables of two views.
    const LEAST: u64 = 400;
    let all: u64 = (0..ROOTS).map(value).sum();
    let m = machine(ROOTS);
    let mut vcpu = vcpu(&m, 0);
    enable(&m, &mut vcpu, 64);
    assert_eq!(switches(&mut vcpu, ROOTS, 50), 50 * all);
    let [contexts, tables, pages] = kept(&vcpu);
    assert!(
        contexts > ROOTS && tables >= ROOTS && pages > 5000,
        "{contexts} {tables} {pages}"
    );
    let mut rounds = 50;
    for budget in [3000, 64, 500, 100_000, 1500] {
        set_pages(&m, budget);
        assert_eq!(switches(&mut vcpu, ROOTS, 20), 20 * all, "{budget}");
        rounds += 20;
        let [contexts, tables, pages] = kept(&vcpu);
        assert!(
            pages <= budget.max(LEAST),
            "{budget}: {contexts} {tables} {pages}"
        );
        if budget == 100_000 {
            assert!(tables >= ROOTS, "{tables}");
        }
    }
    for n in 0..ROOTS {
        assert_eq!(
            u64::from_le_bytes(m.read(DATA + n * 0x1000 + 8)),
            rounds,
            "{n}"
        );
    }
    // vCPUs share.
    set_pages(&m, 3000);
    let mut second = self::vcpu(&m, 1);
    ask(&m, AREA + 0x1000, [1, 0x1000, 64]);
    assert!(write_msr(&mut second, (AREA + 0x1000) | 1));
    switches(&mut second, ROOTS, 2);
    switches(&mut vcpu, ROOTS, 2);
    let [one, two] = [&vcpu, &second].map(|vcpu| kept(vcpu)[2]);
    assert!(one <= 1500 && two <= 1500, "{one} {two}");
}

/// It changes while the guest runs.
#[test]
fn a_budget_may_change_at_any_moment() {
    const ROOTS: u64 = 12;
    let m = machine(ROOTS);
    let mut vcpu = vcpu(&m, 0);
    enable(&m, &mut vcpu, 16);
    let all: u64 = (0..ROOTS).map(value).sum();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for budget in [64, 2000, 400, 100_000, 900].into_iter().cycle() {
                set_pages(&m, budget);
                thread::sleep(std::time::Duration::from_micros(300));
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for _ in 0..20 {
            assert_eq!(switches(&mut vcpu, ROOTS, 2000), 2000 * all);
        }
        is_over.store(true, Ordering::Relaxed);
    });
}
