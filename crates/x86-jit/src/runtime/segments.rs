//! Loads of segment registers, VERR, VERW, LAR and LSL in code without segments, and far branches of real mode, without
//! leaving translated code (SDM vol. 2). What raises an exception, or has to be looked at in another way, is left to the
//! interpreter with nothing changed.

use x86_cpu::{CpuState, Privilege};
use x86_defs::reg;
use x86_interp::selectors::{self, About};

use crate::{
    Jit, JitBus,
    runtime::{breakpoints::is_enabled, flat::is_whole, state::is_translatable},
};
use x86_codegen::frame::requests;

/// Answers [`requests::SEGMENT`].
pub(crate) fn serve<B: JitBus>(
    jit: &mut Jit<B>,
    cpu: &mut CpuState,
    bus: &mut B,
    operand: u64,
    n: usize,
) -> u64 {
    let selector = operand as u16;
    // In lock-step, and with data breakpoints, the interpreter makes the access to the descriptor.
    let is_left = cpu.engine.log() != 0 || is_enabled(cpu);
    let read = |gva| bus.mmu().read_hit(gva, Privilege::System);
    let about = match n {
        requests::VERR => Some(About::Readable),
        requests::VERW => Some(About::Writable),
        requests::LAR => Some(About::AccessRights),
        requests::LSL => Some(About::Limit),
        _ => None,
    };
    if let Some(about) = about {
        return match selectors::ask(cpu, selector, about, read) {
            Some(answer) if !is_left => {
                answer.map_or(0, |value| u64::from(value) << 32 | requests::ZERO_FLAG)
            }
            _ => requests::NOT_KNOWN,
        };
    }
    if is_left {
        return 0;
    }
    if n == requests::FAR {
        return branch(jit, cpu, bus, operand);
    }
    let Some(segment) = selectors::data_segment(cpu, selector, read) else {
        return 0;
    };
    let before = core::mem::replace(&mut cpu.seg[n], segment);
    let is_same = match n {
        _ if cpu.is_64bit() => true,
        reg::ES | reg::DS => segment.base == 0 && is_whole(&segment),
        _ => is_whole(&segment) == is_whole(&before),
    };
    if is_same {
        return requests::SAME_KEY;
    }
    if !is_translatable(cpu) {
        cpu.seg[n] = before;
        return 0;
    }
    jit.update_mode(cpu, bus);
    requests::OTHER_KEY
}

/// Loads CS in real mode or virtual-8086 mode. Returns the instruction pointer in the far pointer, if there may be
/// translated code.
fn branch<B: JitBus>(jit: &mut Jit<B>, cpu: &mut CpuState, bus: &mut B, pointer: u64) -> u64 {
    let (selector, rip) = (pointer as u16, pointer >> 16);
    let cs = selectors::code_in_real_mode(cpu, selector);
    if rip == 0 || rip > cs.limit.into() {
        return 0;
    }
    let before = core::mem::replace(&mut cpu.seg[reg::CS], cs);
    cpu.update_mode();
    if !is_translatable(cpu) {
        cpu.seg[reg::CS] = before;
        cpu.update_mode();
        return 0;
    }
    jit.update_mode(cpu, bus);
    rip
}
