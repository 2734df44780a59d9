//! MOV to and from debug registers (SDM vol. 3, 18.2).

use iced_x86::{Code, Instruction};
use x86_cpu::{Exception, GuestBus};
use x86_defs::{control::cr4, dr};

use crate::{Exec, Flow, Handler, Insn, Step, Stop};

/// DR6 bits that software may change: B0 to B3, BD, BS, BT.
const DR6_WRITABLE: u64 = 0xe00f;

pub(super) fn select<B: GuestBus>(i: &Instruction) -> Option<Handler<B>> {
    Some(match i.code() {
        Code::Mov_r32_dr | Code::Mov_r64_dr => read,
        Code::Mov_dr_r32 | Code::Mov_dr_r64 => write,
        _ => return None,
    })
}

/// Returns the register after resolving the aliases DR4 and DR5; raises #DB for general detect.
fn check<B: GuestBus>(ex: &mut Exec<'_, B>, n: u8) -> Result<u8, Stop> {
    let n = match n {
        4 | 5 if ex.cpu.cr4 & cr4::DE != 0 => return Err(Exception::UD.into()),
        4 | 5 => n + 2,
        0..=7 => n,
        _ => return Err(Exception::UD.into()),
    };
    ex.require_cpl0()?;
    if ex.cpu.effective_dr7() & dr::DR7_GD != 0 {
        ex.cpu.fault_dr6 = dr::DR6_BD;
        return Err(Exception::DB.into());
    }
    Ok(n)
}

fn read<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = match check(ex, insn.src)? {
        6 => ex.cpu.dr6,
        7 => ex.cpu.dr7,
        n => ex.cpu.dr[usize::from(n) & 3],
    };
    if insn.op_size == 4 {
        ex.reg_write(insn.dst, v as u32);
    } else {
        ex.reg_write(insn.dst, v);
    }
    Ok(Flow::Next)
}

fn write<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let n = check(ex, insn.dst)?;
    let v = if ex.cpu.is_64bit() {
        ex.reg_read::<u64>(insn.src)
    } else {
        u64::from(ex.reg_read::<u32>(insn.src))
    };
    if n >= 6 && v >> 32 != 0 {
        return Err(Exception::GP0.into());
    }
    match n {
        6 => ex.cpu.dr6 = v & DR6_WRITABLE | dr::DR6_FIXED1,
        7 => ex.cpu.dr7 = v & dr::DR7_WRITABLE | dr::DR7_FIXED1,
        n => ex.cpu.dr[usize::from(n) & 3] = v,
    }
    ex.serialize();
    Ok(Flow::EndBlock)
}
