//! Near control transfers, and the undefined opcode.
//!
//! A conditional branch that is not taken does not end a block.

use iced_x86::{Instruction, Mnemonic, OpKind};
use x86_cpu::{Access, Exception, GuestBus, Privilege};
use x86_defs::reg;

use super::{Handler, Insn, Selector, read_rm};
use crate::{Exec, Flow, Int, Step, Stop};

/// Raises #UD: for UD0, UD1, UD2, reserved encodings, and instructions that CPUID does not promise.
pub(crate) fn undefined<B: GuestBus>(_: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    Err(Exception::UD.into())
}

/// Returns the target of a relative branch; `op_size` is the branch's operand size.
#[inline(always)]
fn target<B: GuestBus>(ex: &Exec<'_, B>, insn: &Insn<B>) -> u64 {
    let to = ex.cpu.rip().wrapping_add(insn.imm);
    match insn.op_size {
        2 => to & 0xffff,
        4 => to & 0xffff_ffff,
        _ => to,
    }
}

fn jmp_rel<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    ex.branch_to(target(ex, insn))
}

fn jmp_rm<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let to = read_rm::<B, T>(ex, insn, insn.dst)?;
    ex.branch_to(to.to_u64())
}

fn jcc<B: GuestBus, const CC: u8>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    if ex.flags.condition(CC) {
        ex.branch_to(target(ex, insn))
    } else {
        Ok(Flow::Next)
    }
}

#[inline(always)]
fn call<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>, to: u64) -> Step {
    if let Err(stop) = ex.check_branch(to) {
        return Err(bad_target(ex, T::SIZE as u64, stop));
    }
    ex.push(T::from_u64(ex.next_rip(insn)))?;
    ex.branch_to(to)
}

/// A fault of the push has precedence over a fault of the target.
#[cold]
fn bad_target<B: GuestBus>(ex: &mut Exec<'_, B>, size: u64, stop: Stop) -> Stop {
    let sp = ex.sp_plus(size.wrapping_neg());
    let probed = ex
        .linear(reg::SS as u8, sp, size, Access::Write)
        .and_then(|gva| {
            let checked = ex
                .bus
                .probe(ex.cpu, gva, size, Access::Write, Privilege::Current);
            checked.map_err(Stop::from)
        });
    probed.err().unwrap_or(stop)
}

fn call_rel<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    call::<B, T>(ex, insn, target(ex, insn))
}

fn call_rm<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let to = read_rm::<B, T>(ex, insn, insn.dst)?;
    call::<B, T>(ex, insn, to.to_u64())
}

fn ret<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let to = ex.read_at::<T>(reg::SS as u8, ex.sp())?.to_u64();
    ex.check_branch(to)?;
    let sp = ex.sp_plus((T::SIZE as u64).wrapping_add(insn.imm));
    ex.set_sp(sp);
    ex.branch_to(to)
}

/// Returns rCX, cut to the address size.
fn counter<B: GuestBus>(ex: &Exec<'_, B>, insn: &Insn<B>) -> u64 {
    ex.cpu.gpr[reg::RCX] & u64::MAX >> (insn.addr_shift & 63)
}

/// LOOP (0), LOOPE (1), LOOPNE (2) by [`Insn::extra`].
fn loop_cx<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let count = counter(ex, insn).wrapping_sub(1) & u64::MAX >> (insn.addr_shift & 63);
    let taken = count != 0
        && match insn.extra {
            1 => ex.flags.zf(),
            2 => !ex.flags.zf(),
            _ => true,
        };
    let to = target(ex, insn);
    if taken {
        ex.check_branch(to)?;
    }
    set_counter(ex, insn, count);
    if taken {
        ex.branch_to(to)
    } else {
        Ok(Flow::Next)
    }
}

fn set_counter<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, count: u64) {
    let rcx = reg::RCX as u8;
    match insn.addr_size {
        2 => ex.reg_write(rcx, count as u16),
        4 => ex.reg_write(rcx, count as u32),
        _ => ex.reg_write(rcx, count),
    }
}

fn jcxz<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    if counter(ex, insn) == 0 {
        ex.branch_to(target(ex, insn))
    } else {
        Ok(Flow::Next)
    }
}

macro_rules! by_size {
    ($size:expr, $f:ident) => {
        Some(match $size {
            2 => $f::<B, u16> as Handler<B>,
            4 => $f::<B, u32>,
            _ => $f::<B, u64>,
        })
    };
}

fn jcc_handler<B: GuestBus>(cc: u32) -> Handler<B> {
    match cc {
        0 => jcc::<B, 0>,
        1 => jcc::<B, 1>,
        2 => jcc::<B, 2>,
        3 => jcc::<B, 3>,
        4 => jcc::<B, 4>,
        5 => jcc::<B, 5>,
        6 => jcc::<B, 6>,
        7 => jcc::<B, 7>,
        8 => jcc::<B, 8>,
        9 => jcc::<B, 9>,
        10 => jcc::<B, 10>,
        11 => jcc::<B, 11>,
        12 => jcc::<B, 12>,
        13 => jcc::<B, 13>,
        14 => jcc::<B, 14>,
        _ => jcc::<B, 15>,
    }
}

/// The handler of a near control transfer.
pub(crate) fn select<B: GuestBus>(
    i: &Instruction,
    insn: &mut Insn<B>,
    _s: &mut Selector<'_>,
) -> Option<Handler<B>> {
    let relative = match i.op0_kind() {
        OpKind::NearBranch16 => 2,
        OpKind::NearBranch32 => 4,
        OpKind::NearBranch64 => 8,
        _ => 0,
    };
    if i.is_jcc_short_or_near() {
        insn.op_size = relative;
        return Some(jcc_handler((i.condition_code() as u32).wrapping_sub(1)));
    }
    let pushed = i.stack_pointer_increment().unsigned_abs();
    match i.mnemonic() {
        Mnemonic::Jmp if relative != 0 => {
            insn.op_size = relative;
            Some(jmp_rel::<B>)
        }
        Mnemonic::Jmp if i.is_jmp_near_indirect() => by_size!(insn.op_size, jmp_rm),
        Mnemonic::Call if relative != 0 => {
            insn.op_size = relative;
            by_size!(pushed, call_rel)
        }
        Mnemonic::Call if i.is_call_near_indirect() => by_size!(insn.op_size, call_rm),
        Mnemonic::Ret => {
            let size = u64::from(pushed).wrapping_sub(insn.imm & 0xffff);
            by_size!(size, ret)
        }
        m @ (Mnemonic::Loop | Mnemonic::Loope | Mnemonic::Loopne) => {
            counted(i, insn, relative);
            insn.extra = match m {
                Mnemonic::Loop => 0,
                Mnemonic::Loope => 1,
                _ => 2,
            };
            Some(loop_cx::<B>)
        }
        Mnemonic::Jcxz | Mnemonic::Jecxz | Mnemonic::Jrcxz => {
            counted(i, insn, relative);
            Some(jcxz::<B>)
        }
        _ => None,
    }
}

/// Sets the counter's width, which is the address size and no operand's.
fn counted<B>(i: &Instruction, insn: &mut Insn<B>, relative: u8) {
    insn.op_size = relative;
    insn.addr_size = match i.op_code().address_size() {
        16 => 2,
        32 => 4,
        _ => 8,
    };
    insn.addr_shift = 64 - 8 * insn.addr_size;
}
