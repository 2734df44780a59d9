//! Hot code counts as the interpreter does: traces, hoisted probes, loops that are left in always the same turn, overflows in the middle of them.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod guest;
mod long_mode;
mod stats_fd;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use guest::set_msr;
use iced_x86::code_asm::*;
use kvm_bindings::*;
use long_mode::{Machine, STACK};

const CODE: u64 = 0x1000;
const HANDLER: u64 = 0x2000;
/// Of the function that is called, and of those that it calls by a pointer.
const OUTER: u64 = 0x8000;
const INNER: [u64; 2] = [0x9000, 0xb000];
const POINTER: u64 = 0x500;
const ARRAY: u64 = 0x1_0000;
const WORDS: u32 = 512;
const TABLES: [u64; 2] = [0xc000, 0xd000];
/// Where the handler leaves what it was called for.
const SEEN: u64 = 0x6000;
const TURNS: u32 = 40_000;
/// Runs after which what is executed much has shown.
const RUNS: u32 = 40;

const PERFEVTSEL0: u32 = 0x186;
const PMC0: u32 = 0xc1;
const GLOBAL_STATUS: u32 = 0x38e;
const GLOBAL_CTRL: u32 = 0x38f;
/// EN, OS, USR.
const ON: u64 = 0x43_0000;
const INT: u64 = 1 << 20;
/// Instructions, and of Intel's branches: all, conditional, calls, returns, not taken, taken.
const EVENTS: [u64; 7] = [0xc0, 0xc4, 0x1c4, 0x2c4, 0x8c4, 0x10c4, 0x20c4];

/// Calls in a loop whose targets and turns are nearly always the same, and a walk over an array now and then.
fn program(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let [mut turn, mut on, mut usual, mut walk, mut back] = [(); 5].map(|()| a.create_label());
    a.mov(r12d, TURNS)?;
    a.set_label(&mut turn)?;
    a.mov(rdx, INNER[0])?;
    a.test(r12d, 0x3f)?;
    a.jne(usual)?;
    a.mov(rdx, INNER[1])?;
    a.set_label(&mut usual)?;
    a.mov(qword_ptr(POINTER), rdx)?;
    a.call(OUTER)?;
    a.test(r12d, 0x1f)?;
    a.jne(on)?;
    // Over the array, and back.
    a.mov(rdi, ARRAY)?;
    a.mov(ecx, WORDS)?;
    a.set_label(&mut walk)?;
    a.add(rbx, qword_ptr(rdi))?;
    a.mov(qword_ptr(rdi), rbx)?;
    a.add(rdi, 8)?;
    a.dec(ecx)?;
    a.jne(walk)?;
    a.set_label(&mut back)?;
    a.sub(rdi, 8)?;
    a.cmp(qword_ptr(rdi), 5)?;
    a.cmp(rdi, ARRAY as i32)?;
    a.ja(back)?;
    a.set_label(&mut on)?;
    a.dec(r12)?;
    a.jne(turn)?;
    a.out(0x10_u32, al)
}

fn outer(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut turn = a.create_label();
    a.push(rcx)?;
    a.mov(ecx, 3)?;
    a.set_label(&mut turn)?;
    a.add(rbx, rcx)?;
    a.dec(ecx)?;
    a.jne(turn)?;
    a.call(qword_ptr(POINTER))?;
    a.pop(rcx)?;
    a.ret()
}

fn inner(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut odd = a.create_label();
    a.test(bl, 1)?;
    a.jne(odd)?;
    a.inc(rbx)?;
    a.set_label(&mut odd)?;
    a.inc(qword_ptr(POINTER + 8))?;
    a.ret()
}

fn handler(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.push(rax)?;
    a.mov(rax, qword_ptr(rsp + 8))?;
    a.mov(qword_ptr(SEEN), rax)?;
    a.inc(qword_ptr(SEEN + 8))?;
    a.mov(qword_ptr(SEEN + 16), r12)?;
    a.mov(qword_ptr(SEEN + 24), rbx)?;
    a.pop(rax)?;
    a.iretq()
}

fn machine() -> (Machine, VcpuFd) {
    let m = Machine::new();
    m.vm.create_irq_chip().unwrap();
    m.load(CODE, program);
    m.load(OUTER, outer);
    INNER.iter().for_each(|at| m.load(*at, inner));
    m.load(HANDLER, handler);
    let vcpu = m.vcpu(0, CODE);
    let mut table = m.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
    let name = |i: usize| u32::from_le_bytes(b"GenuineIntel"[i..i + 4].try_into().unwrap());
    for e in table.as_mut_slice() {
        match e.function {
            0 | 0x8000_0000 => (e.ebx, e.edx, e.ecx) = (name(0), name(4), name(8)),
            1 => (e.eax, e.ecx) = (0xa_0655, e.ecx | 1 << 15),
            0xa => (e.eax, e.ebx, e.edx) = (0x0730_0802, 0x58, 1 << 15 | 48 << 5 | 3),
            _ => {}
        }
    }
    vcpu.set_cpuid2(&table).unwrap();
    m.handle_page_faults(&vcpu, TABLES, HANDLER);
    let gate = HANDLER | 8 << 16 | 0x8e << 40;
    m.write(TABLES[1] + 2 * 16, &gate.to_le_bytes());
    (m, vcpu)
}

/// Counters raise an NMI, once.
fn route_to_nmi(vcpu: &VcpuFd) {
    let mut lapic = vcpu.get_lapic().unwrap();
    for (at, value) in [(0xf0, 0x1ff_u32), (0x340, 4 << 8)] {
        for (to, from) in lapic.regs[at..].iter_mut().zip(value.to_le_bytes()) {
            *to = from as _;
        }
    }
    vcpu.set_lapic(&lapic).unwrap();
}

fn msr(vcpu: &VcpuFd, index: u32) -> u64 {
    let entry = kvm_msr_entry {
        index,
        ..Default::default()
    };
    let mut msrs = Msrs::from_entries(&[entry]).unwrap();
    assert_eq!(vcpu.get_msrs(&mut msrs).unwrap(), 1, "{index:#x}");
    msrs.as_slice()[0].data
}

/// Runs the program while these events are counted, from `first` on by the first counter, which interrupts if it overflows. What they have
/// counted, and what the handler has seen.
fn run(m: &Machine, vcpu: &mut VcpuFd, events: &[u64], first: u64) -> (Vec<u64>, [u64; 4]) {
    route_to_nmi(vcpu);
    m.write(SEEN, &[0; 32]);
    m.write(ARRAY, &[0; 8 * WORDS as usize]);
    for n in 0..8 {
        assert!(set_msr(vcpu, PERFEVTSEL0 + n, 0));
    }
    assert!(set_msr(vcpu, GLOBAL_CTRL, 0xff));
    for (n, event) in (0..).zip(events) {
        let (value, interrupts) = if n == 0 { (first, INT) } else { (0, 0) };
        assert!(set_msr(vcpu, PMC0 + n, value));
        assert!(set_msr(vcpu, PERFEVTSEL0 + n, ON | interrupts | event));
    }
    // As programs are executed, by IOPL 3: kernels' calls are not followed.
    vcpu.set_regs(&kvm_regs {
        rip: CODE,
        rsp: STACK,
        rflags: 0x3002,
        ..Default::default()
    })
    .unwrap();
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(..) => {}
        other => panic!("{other:?}"),
    }
    let counts = (0..).zip(events).map(|(n, _)| msr(vcpu, PMC0 + n));
    let counts = counts.collect();
    (
        counts,
        [0, 8, 16, 24].map(|at| u64::from_le_bytes(m.read(SEEN + at))),
    )
}

fn is_translated() -> bool {
    std::env::var("ANYKVM_ENGINE").as_deref() != Ok("interp")
}

#[test]
fn hot_code_counts_as_the_interpreter_does() {
    let (m, mut vcpu) = machine();
    // Several events besides instructions: the interpreter executes.
    let (expected, _) = run(&m, &mut vcpu, &EVENTS, 0);
    let expected_instructions = expected[0];
    assert!(expected_instructions > 1_000_000);
    for (event, expected) in EVENTS.iter().zip(&expected).skip(1) {
        for n in 0..RUNS {
            let (counts, _) = run(&m, &mut vcpu, &[EVENTS[0], *event], 0);
            assert_eq!(
                counts,
                [expected_instructions, *expected],
                "{event:#x}, run {n}"
            );
        }
    }
    assert!(!is_translated() || stats_fd::counter(&vcpu, "jit_inlined") > 0);
}

#[test]
fn overflows_in_hot_code_are_exact() {
    let (m, mut vcpu) = machine();
    for _ in 0..RUNS {
        run(&m, &mut vcpu, &[EVENTS[0]], 0);
    }
    assert!(!is_translated() || stats_fd::counter(&vcpu, "jit_inlined") > 0);
    let mut random = 1_u64;
    for n in 0..24 {
        random = random.wrapping_mul(6_364_136_223_846_793_005) + 1;
        let after = 1 + (random >> 33) % if n % 2 == 0 { 1_000_000 } else { 2_000 };
        let from = after.wrapping_neg() & 0xffff_ffff_ffff;
        let (_, interpreted) = run(&m, &mut vcpu, &EVENTS, from);
        let (_, translated) = run(&m, &mut vcpu, &EVENTS[..1], from);
        assert_eq!(interpreted[1], 1);
        assert_eq!(translated, interpreted, "after {after}");
        assert_eq!(msr(&vcpu, GLOBAL_STATUS) & 1, 1);
        assert!(set_msr(&vcpu, 0x390, 1));
    }
}
