//! Hot code counts as the interpreter does: traces, hoisted probes, loops that are left in always the same turn, overflows in the middle of them.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod counting;
mod guest;
mod long_mode;
mod stats_fd;

use anykvm_ioctls::{VcpuExit, VcpuFd};
use counting::*;
use guest::set_msr;
use iced_x86::code_asm::*;
use kvm_bindings::*;
use long_mode::{Machine, STACK};

const CODE: u64 = 0x1000;
/// Of the function that is called, and of those that it calls by a pointer.
const OUTER: u64 = 0x8000;
const INNER: [u64; 2] = [0x9000, 0xb000];
const POINTER: u64 = 0x500;
const ARRAY: u64 = 0x1_0000;
const WORDS: u32 = 512;
const TURNS: u32 = 40_000;
/// Runs after which what is executed much has shown. The interpreter executes all of it as at first.
fn runs() -> u32 {
    if is_translated() { 40 } else { 1 }
}

/// Instructions; of Intel's branches: all, conditional, calls, returns, not taken, taken; and of its accesses to memory:
/// loads, stores, all.
const EVENTS: [u64; 10] = [
    0xc0, 0xc4, 0x1c4, 0x2c4, 0x8c4, 0x10c4, 0x20c4, 0x81d0, 0x82d0, 0x83d0,
];
/// Number of counters.
const COUNTERS: usize = 8;

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

fn machine() -> (Machine, VcpuFd) {
    let m = Machine::new();
    m.vm.create_irq_chip().unwrap();
    m.load(CODE, program);
    m.load(OUTER, outer);
    INNER.iter().for_each(|at| m.load(*at, inner));
    let vcpu = Vendor::Intel.vcpu(&m, CODE);
    handle_nmis(&m, &vcpu);
    (m, vcpu)
}

/// Runs the program while these events are counted, from `first` on by the first counter, which interrupts if it overflows. What they have
/// counted, and what the handler has seen.
fn run(m: &Machine, vcpu: &mut VcpuFd, events: &[u64], first: u64) -> (Vec<u64>, [u64; 4]) {
    route_to_nmi(m, vcpu);
    m.write(ARRAY, &[0; 8 * WORDS as usize]);
    for n in 0..COUNTERS as u32 {
        assert!(set_msr(vcpu, PERFEVTSEL0 + n, 0));
    }
    assert!(set_msr(vcpu, GLOBAL_CTRL, 0xff));
    for (n, event) in (0..).zip(events) {
        let (value, interrupts) = if n == 0 { (first, INT) } else { (0, 0) };
        assert!(set_msr(vcpu, PMC0 + n, value));
        assert!(set_msr(vcpu, PERFEVTSEL0 + n, ON | interrupts | event));
    }
    // As programs are executed, by NT: kernels' calls are not followed.
    vcpu.set_regs(&kvm_regs {
        rip: CODE,
        rsp: STACK,
        rflags: 0x4002,
        ..Default::default()
    })
    .unwrap();
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(..) => {}
        other => panic!("{other:?}"),
    }
    let counts = (0..).zip(events).map(|(n, _)| msr(vcpu, PMC0 + n));
    (counts.collect(), seen(m))
}

fn is_translated() -> bool {
    std::env::var("ANYKVM_ENGINE").as_deref() != Ok("interp")
}

/// What the interpreter counts.
fn run_interpreted(
    m: &Machine,
    vcpu: &mut VcpuFd,
    events: &[u64],
    first: u64,
) -> (Vec<u64>, [u64; 4]) {
    interpret(vcpu, true);
    let entries = stats_fd::counter(vcpu, "jit_entries");
    let result = run(m, vcpu, events, first);
    assert_eq!(stats_fd::counter(vcpu, "jit_entries"), entries);
    interpret(vcpu, false);
    result
}

#[test]
fn hot_code_counts_as_the_interpreter_does() {
    let (m, mut vcpu) = machine();
    freeze_in_smm(&vcpu, true);
    let (mut expected, _) = run_interpreted(&m, &mut vcpu, &EVENTS[..COUNTERS], 0);
    let (rest, _) = run_interpreted(&m, &mut vcpu, &EVENTS[COUNTERS..], 0);
    expected.extend(rest);
    assert!(expected[0] > 1_000_000);
    // Each stream alone; then several, without those that depend on what is taken, and with them; with and without
    // accesses to memory.
    let alone = (1..EVENTS.len()).map(|n| vec![0, n]);
    let several = [
        vec![0, 1, 2],
        vec![0, 1, 2, 3, 4],
        (0..7).collect(),
        vec![0, 1, 7],
        vec![0, 1, 3, 4, 7, 8, 9],
        (2..10).collect(),
    ];
    for which in alone.chain(several) {
        let pick = |of: &[u64]| which.iter().map(|n| of[*n]).collect::<Vec<_>>();
        for n in 0..runs() {
            let (counts, _) = run(&m, &mut vcpu, &pick(&EVENTS), 0);
            assert_eq!(counts, pick(&expected), "{which:?}, run {n}");
        }
    }
    assert!(!is_translated() || stats_fd::counter(&vcpu, "jit_inlined") > 0);
    let insns = stats_fd::counter(&vcpu, "jit_interpreted");
    run(&m, &mut vcpu, &EVENTS[..COUNTERS], 0);
    let interpreted = stats_fd::counter(&vcpu, "jit_interpreted") - insns;
    assert!(!is_translated() || interpreted < expected[0] / 100);
}

#[test]
fn overflows_in_hot_code_are_exact() {
    let (m, mut vcpu) = machine();
    for events in [&EVENTS[..1], &EVENTS[..3], &EVENTS[..7], &EVENTS[2..]] {
        for _ in 0..runs() {
            run(&m, &mut vcpu, events, 0);
        }
    }
    assert!(!is_translated() || stats_fd::counter(&vcpu, "jit_inlined") > 0);
    let mut random = 1_u64;
    for n in 0..2 * EVENTS.len() + 4 {
        random = random.wrapping_mul(6_364_136_223_846_793_005) + 1;
        let most = if n % 2 == 0 { 1_000_000 } else { 2_000 };
        // Instructions, or one of the other streams, which there are fewer of.
        let mut events = EVENTS;
        let stream = n / 2 % EVENTS.len();
        events.swap(0, stream);
        let most = if stream == 0 { most } else { most / 50 };
        let after = 1 + (random >> 33) % most;
        let from = after.wrapping_neg() & 0xffff_ffff_ffff;
        let (_, interpreted) = run_interpreted(&m, &mut vcpu, &events[..1], from);
        assert_eq!(interpreted[1], 1);
        for events in [&events[..1], &events[..3], &events[..7], &events[..8]] {
            let (_, translated) = run(&m, &mut vcpu, events, from);
            assert_eq!(translated, interpreted, "after {after} of {events:x?}");
            assert_eq!(msr(&vcpu, GLOBAL_STATUS) & 1, 1);
            assert!(set_msr(&vcpu, GLOBAL_OVF_CTRL, 1));
        }
    }
}
