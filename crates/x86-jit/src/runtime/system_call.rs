//! SYSCALL and SYSRETQ between 64-bit levels, without leaving translated code (SDM vol. 2; AMD APM vol. 3). Every other
//! case returns 0 with nothing changed, and is left to the interpreter.

use x86_cpu::CpuState;
use x86_defs::{
    control::efer,
    reg, rflags,
    segment::{Attr, Segment},
};

use crate::JitBus;
use x86_codegen::frame::state::{pack, unpack};

/// Attributes of flat segments at level 0.
pub(crate) const CODE64: u32 = 0xa09b;
pub(crate) const DATA: u32 = 0xc093;

fn load_segments(cpu: &mut CpuState, cs: u16, ss: u16, cpl: u8) {
    let flat = |selector: u16, attr: u32| Segment {
        base: 0,
        limit: u32::MAX,
        attr: Attr(attr | u32::from(cpl) << 5),
        selector: selector & !3 | u16::from(cpl),
    };
    cpu.seg[reg::CS] = flat(cs, CODE64);
    cpu.seg[reg::SS] = flat(ss, DATA);
    cpu.cpl = cpl;
}

pub(crate) fn set_flags(cpu: &mut CpuState, flags: u64) {
    cpu.rflags = flags | rflags::FIXED1;
    cpu.engine.flags = pack(flags);
}

/// Executes SYSCALL at an offset of the current page. Returns the target.
pub(crate) fn enter<B: JitBus>(cpu: &mut CpuState, bus: &mut B, offset: u64) -> u64 {
    const NOT_TAKEN: u64 = rflags::NT | rflags::TF | rflags::AC;
    let frame = &cpu.engine;
    let flags = cpu.rflags & !rflags::ARITH | unpack(frame.flags);
    let after = flags & !cpu.msr.fmask;
    let is_taken = cpu.efer & efer::SCE != 0 && cpu.is_canonical(cpu.msr.lstar);
    if !is_taken || after & NOT_TAKEN != 0 {
        return 0;
    }
    cpu.gpr[reg::RCX] = frame.page + offset + 2;
    cpu.gpr[reg::R11] = flags & !rflags::RF;
    set_flags(cpu, after & !rflags::RF);
    let cs = (cpu.msr.star >> 32) as u16 & !3;
    load_segments(cpu, cs, cs.wrapping_add(8), 0);
    bus.select_view(cpu);
    cpu.msr.lstar
}

/// Returns true if a request or an interrupt has to be looked at before the guest goes on with interrupts enabled.
pub(crate) fn interrupt_waits<B: JitBus>(cpu: &CpuState, bus: &B) -> bool {
    cpu.engine.irq_waiting != 0
        || bus
            .request_word()
            .load(core::sync::atomic::Ordering::Relaxed)
            != 0
}

/// Executes SYSRETQ; RCX and R11 are in memory. Returns the target.
pub(crate) fn leave<B: JitBus>(cpu: &mut CpuState, bus: &mut B) -> u64 {
    const PLAIN: u64 =
        rflags::ARITH | rflags::DF | rflags::IF | rflags::IOPL | rflags::FIXED1 | rflags::ID;
    let flags = cpu.gpr[reg::R11];
    let target = cpu.gpr[reg::RCX];
    let waits = interrupt_waits(cpu, bus);
    if cpu.efer & efer::SCE == 0
        || flags & !PLAIN != 0
        || target >> 47 != 0
        || flags & rflags::IF != 0 && waits
    {
        return 0;
    }
    set_flags(cpu, flags);
    let base = (cpu.msr.star >> 48) as u16;
    load_segments(cpu, base.wrapping_add(16), base.wrapping_add(8), 3);
    bus.select_view(cpu);
    target
}
