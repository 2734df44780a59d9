//! Samples of cycles fall where the time is spent, not where many instructions are.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod counting;
mod guest;
mod long_mode;

use anykvm_ioctls::VcpuExit;
use counting::*;
use guest::set_msr;
use iced_x86::{IcedError, code_asm::*};
use long_mode::Machine;

const CODE: u64 = 0x1000;
/// Where the second half of the program is, which consists of many fast instructions.
const FAST: u64 = 0x1100;
/// Of each sample's half there is a number, and of each half's ticks.
const SAMPLES: [u64; 2] = [0x6000, 0x6008];
const TICKS: [u64; 2] = [0x6010, 0x6018];
const PORT: u32 = 0x10;
const LVTPC: u32 = 0x834;
const SVR: u32 = 0x80f;
/// Ticks between two samples, about.
const PERIOD: u32 = 150_000;
const TURNS: u32 = 5_000;
/// What a half's part of the samples may differ from its part of the time, in points. If the overflow were noticed at the
/// next look at the time, whenever that is, the difference would be several times as much.
const BAR: f64 = 8.0;
/// What takes more ticks than this was interrupted by something else on the host's processor. It is left out: there are
/// few such times, but they are long, and no sample more is taken in them.
const MOST_TICKS: i32 = 1_000_000;

/// Adds the ticks since the last time, which are in R13.
fn account(a: &mut CodeAssembler, to: u64) -> Result<(), IcedError> {
    a.rdtsc()?;
    a.shl(rdx, 32)?;
    a.or(rax, rdx)?;
    a.mov(rdx, rax)?;
    a.sub(rdx, r13)?;
    a.mov(r13, rax)?;
    let mut is_long = a.create_label();
    a.cmp(rdx, MOST_TICKS)?;
    a.ja(is_long)?;
    a.add(qword_ptr(to), rdx)?;
    a.set_label(&mut is_long)?;
    a.zero_bytes()
}

/// Divides, and goes on at [`FAST`].
fn slow(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut turn = a.create_label();
    a.mov(ebx, 2000)?;
    a.set_label(&mut turn)?;
    a.xor(edx, edx)?;
    a.mov(rax, -1_i64)?;
    a.div(rbx)?;
    a.xor(edx, edx)?;
    a.div(rbx)?;
    a.dec(ebx)?;
    a.jne(turn)?;
    account(a, TICKS[0])?;
    a.jmp(FAST)
}

/// Adds, and goes on at [`CODE`] for a number of turns.
fn fast(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut turn = a.create_label();
    a.mov(ebx, 4000)?;
    a.set_label(&mut turn)?;
    for r in [rsi, rdi, r8, r9, r10, r11, rsi, rdi, r8, r9, r10, r11] {
        a.add(r, 1)?;
    }
    a.dec(ebx)?;
    a.jne(turn)?;
    account(a, TICKS[1])?;
    a.dec(r12d)?;
    a.jne(CODE)?;
    a.out(PORT, al)
}

fn wrmsr(a: &mut CodeAssembler, index: u32, value: u64) -> Result<(), IcedError> {
    a.mov(ecx, index)?;
    a.mov(eax, value as u32)?;
    a.mov(edx, (value >> 32) as u32)?;
    a.wrmsr()
}

/// Counts the sample and begins the next period, of another length.
fn handler(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let [mut is_slow, mut on] = [(); 2].map(|()| a.create_label());
    a.push(rax)?;
    a.push(rcx)?;
    a.push(rdx)?;
    a.cmp(qword_ptr(rsp + 24), FAST as i32)?;
    a.jb(is_slow)?;
    a.inc(qword_ptr(SAMPLES[1]))?;
    a.jmp(on)?;
    a.set_label(&mut is_slow)?;
    a.inc(qword_ptr(SAMPLES[0]))?;
    a.set_label(&mut on)?;
    wrmsr(a, GLOBAL_OVF_CTRL, 1)?;
    a.rdtsc()?;
    a.and(eax, 0xffff)?;
    a.mov(ecx, PMC0)?;
    a.sub(eax, PERIOD)?;
    a.mov(edx, -1)?;
    a.wrmsr()?;
    wrmsr(a, LVTPC, 4 << 8)?;
    a.pop(rdx)?;
    a.pop(rcx)?;
    a.pop(rax)?;
    a.iretq()
}

#[test]
fn samples_fall_where_the_time_is_spent() {
    let m = Machine::new();
    m.vm.create_irq_chip().unwrap();
    m.load(CODE, slow);
    m.load(FAST, fast);
    let mut vcpu = Vendor::Intel.vcpu(&m, CODE);
    handle_nmis_by(&m, &vcpu, handler);
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.apic_base |= 0xc00;
    vcpu.set_sregs(&sregs).unwrap();
    for (index, value) in [
        (SVR, 0x1ff),
        (LVTPC, 4 << 8),
        (PMC0, u64::from(PERIOD).wrapping_neg() & 0xffff_ffff_ffff),
        (PERFEVTSEL0, ON | INT | 0x3c),
    ] {
        assert!(set_msr(&vcpu, index, value), "{index:#x}");
    }
    let mut regs = vcpu.get_regs().unwrap();
    regs.r12 = TURNS.into();
    vcpu.set_regs(&regs).unwrap();
    match vcpu.run().unwrap() {
        VcpuExit::IoOut(..) => {}
        other => panic!("{other:?}"),
    }
    let word = |at: u64| u64::from_le_bytes(m.read(at)) as f64;
    let [samples, ticks] = [SAMPLES, TICKS].map(|of| of.map(word));
    let part = |of: [f64; 2]| of[0] * 100.0 / (of[0] + of[1]);
    eprintln!("{samples:?} {ticks:?}: {} {}", part(samples), part(ticks));
    assert!(samples[0] + samples[1] > 1000.0, "{samples:?}");
    let off = part(samples) - part(ticks);
    assert!(off.abs() < BAR, "{off} points: {samples:?}, {ticks:?}");
}
