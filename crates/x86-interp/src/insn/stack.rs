//! PUSH, POP, PUSHA, POPA, ENTER, LEAVE.
//!
//! RSP changes after the last access that can fault. `op_size` is the operand size, which may differ from the stack's
//! size and from the register's.

use iced_x86::{Instruction, Mnemonic, OpKind, Register};
use x86_cpu::{Access, GuestBus, Privilege};
use x86_defs::reg;

use super::{Handler, Insn};
use crate::{Exec, Flow, Int, Step};

const SS: u8 = reg::SS as u8;
const RBP: u8 = reg::RBP as u8;

fn push_reg<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    ex.push(ex.reg_read::<T>(insn.dst))?;
    Ok(Flow::Next)
}
fn push_imm<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    ex.push(T::from_u64(insn.imm))?;
    Ok(Flow::Next)
}
fn push_mem<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = ex.mem_read::<T>(insn)?;
    ex.push(v)?;
    Ok(Flow::Next)
}
/// PUSH of a segment register: zero-extended selector.
fn push_segment<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let selector = ex.cpu.seg[usize::from(insn.dst).min(5)].selector;
    ex.push(T::from_u64(selector.into()))?;
    Ok(Flow::Next)
}
fn pop_reg<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = ex.pop::<T>()?;
    ex.reg_write(insn.dst, v);
    Ok(Flow::Next)
}
/// POP to memory. An address that is based on RSP uses its value after the pop.
fn pop_mem<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let before = ex.cpu.gpr[reg::RSP];
    let v = ex.pop::<T>()?;
    if let Err(stop) = ex.mem_write(insn, v) {
        ex.cpu.gpr[reg::RSP] = before;
        return Err(stop);
    }
    Ok(Flow::Next)
}

fn pusha<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let size = T::SIZE as u64;
    for n in 0..8u8 {
        let at = ex.sp_plus((size * (u64::from(n) + 1)).wrapping_neg());
        let v = ex.reg_read::<T>(n);
        ex.write_at(SS, at, v)?;
    }
    let sp = ex.sp_plus((size * 8).wrapping_neg());
    ex.set_sp(sp);
    Ok(Flow::Next)
}

fn popa<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let size = T::SIZE as u64;
    // At a fault, registers that were popped before keep their new values, as on AMD processors. The instruction is
    // restarted with the same stack pointer.
    for (n, r) in (0..8u8).rev().enumerate() {
        let v = ex.read_at::<T>(SS, ex.sp_plus(size * n as u64))?;
        if usize::from(r) != reg::RSP {
            ex.reg_write(r, v);
        }
    }
    let sp = ex.sp_plus(size * 8);
    ex.set_sp(sp);
    Ok(Flow::Next)
}

/// `imm` is the size of the locals, `imm2` the nesting level.
fn enter<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let size = T::SIZE as u64;
    let level = u64::from(insn.imm2 & 31);
    let rsp = ex.cpu.gpr[reg::RSP];
    let result = (|| {
        let bp = ex.reg_read::<T>(RBP);
        ex.push(bp)?;
        let frame = ex.cpu.gpr[reg::RSP];
        let rbp = ex.cpu.gpr[reg::RBP];
        for n in 1..level {
            // rBP, cut to the stack's size, moves down the enclosing frames.
            let from_top = rbp
                .wrapping_sub(size * n)
                .wrapping_sub(ex.cpu.gpr[reg::RSP]);
            let at = ex.sp_plus(from_top);
            let v = ex.read_at::<T>(SS, at)?;
            ex.push(v)?;
        }
        if level > 0 {
            ex.push(T::from_u64(frame))?;
        }
        let sp = ex.sp_plus((insn.imm & 0xffff).wrapping_neg());
        // The new top of the stack must be writable (SDM: a fault leaves everything as it was).
        let gva = ex.linear(SS, sp, size, Access::Write)?;
        ex.bus
            .probe(ex.cpu, gva, size, Access::Write, Privilege::Current)?;
        ex.set_sp(sp);
        Ok(frame)
    })();
    match result {
        Ok(frame) => {
            ex.reg_write(RBP, T::from_u64(frame));
            Ok(Flow::Next)
        }
        Err(stop) => {
            ex.cpu.gpr[reg::RSP] = rsp;
            Err(stop)
        }
    }
}

fn leave<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    let rsp = ex.cpu.gpr[reg::RSP];
    let rbp = ex.cpu.gpr[reg::RBP];
    ex.set_sp(rbp);
    match ex.pop::<T>() {
        Ok(v) => {
            ex.reg_write(RBP, v);
            Ok(Flow::Next)
        }
        Err(stop) => {
            ex.cpu.gpr[reg::RSP] = rsp;
            Err(stop)
        }
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

/// Returns the handler of a stack instruction. POP of a segment register, and PUSHF and POPF, belong to the system
/// family.
pub(crate) fn select<B: GuestBus>(i: &Instruction, _insn: &mut Insn<B>) -> Option<Handler<B>> {
    let moved = i.stack_pointer_increment().unsigned_abs();
    match (i.mnemonic(), i.op0_kind()) {
        (Mnemonic::Push, OpKind::Register) if i.op0_register().is_segment_register() => {
            by_size!(moved, push_segment)
        }
        (Mnemonic::Push, OpKind::Register) => by_size!(moved, push_reg),
        (Mnemonic::Push, OpKind::Memory) => by_size!(moved, push_mem),
        (Mnemonic::Push, _) => by_size!(moved, push_imm),
        (Mnemonic::Pop, OpKind::Register) if i.op0_register().is_segment_register() => None,
        (Mnemonic::Pop, OpKind::Register) if i.op0_register() != Register::None => {
            by_size!(moved, pop_reg)
        }
        (Mnemonic::Pop, OpKind::Memory) => by_size!(moved, pop_mem),
        (Mnemonic::Pusha, _) => Some(pusha::<B, u16>),
        (Mnemonic::Pushad, _) => Some(pusha::<B, u32>),
        (Mnemonic::Popa, _) => Some(popa::<B, u16>),
        (Mnemonic::Popad, _) => Some(popa::<B, u32>),
        (Mnemonic::Enter, _) => match i.code() {
            iced_x86::Code::Enterw_imm16_imm8 => Some(enter::<B, u16>),
            iced_x86::Code::Enterd_imm16_imm8 => Some(enter::<B, u32>),
            _ => Some(enter::<B, u64>),
        },
        (Mnemonic::Leave, _) => match i.code() {
            iced_x86::Code::Leavew => Some(leave::<B, u16>),
            iced_x86::Code::Leaved => Some(leave::<B, u32>),
            _ => Some(leave::<B, u64>),
        },
        _ => None,
    }
}
