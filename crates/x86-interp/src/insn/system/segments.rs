//! MOV, PUSH and POP of segment registers, LDS and friends, SWAPGS, FS/GS base.

use iced_x86::{Code, Instruction, Mnemonic};
use x86_cpu::{Exception, Feature, GuestBus, Shadow};
use x86_defs::{control::cr4, reg, segment::Segment};

use crate::{Exec, Flow, Handler, Insn, Step, Stop};

pub(super) fn select<B: GuestBus>(i: &Instruction) -> Option<Handler<B>> {
    Some(match i.code() {
        Code::Mov_Sreg_rm16 | Code::Mov_Sreg_r32m16 | Code::Mov_Sreg_r64m16 => load,
        Code::Mov_rm16_Sreg | Code::Mov_r32m16_Sreg | Code::Mov_r64m16_Sreg => store,
        Code::Pushw_ES
        | Code::Pushw_CS
        | Code::Pushw_SS
        | Code::Pushw_DS
        | Code::Pushw_FS
        | Code::Pushw_GS => push16,
        Code::Pushd_ES
        | Code::Pushd_CS
        | Code::Pushd_SS
        | Code::Pushd_DS
        | Code::Pushd_FS
        | Code::Pushd_GS => push32,
        Code::Pushq_FS | Code::Pushq_GS => push64,
        Code::Popw_ES | Code::Popw_SS | Code::Popw_DS | Code::Popw_FS | Code::Popw_GS => pop16,
        Code::Popd_ES | Code::Popd_SS | Code::Popd_DS | Code::Popd_FS | Code::Popd_GS => pop32,
        Code::Popq_FS | Code::Popq_GS => pop64,
        Code::Swapgs => swapgs,
        _ => match i.mnemonic() {
            Mnemonic::Les => load_far::<B, { reg::ES }>,
            Mnemonic::Lds => load_far::<B, { reg::DS }>,
            Mnemonic::Lss => load_far::<B, { reg::SS }>,
            Mnemonic::Lfs => load_far::<B, { reg::FS }>,
            Mnemonic::Lgs => load_far::<B, { reg::GS }>,
            Mnemonic::Rdfsbase => read_base::<B, { reg::FS }>,
            Mnemonic::Rdgsbase => read_base::<B, { reg::GS }>,
            Mnemonic::Wrfsbase => write_base::<B, { reg::FS }>,
            Mnemonic::Wrgsbase => write_base::<B, { reg::GS }>,
            _ => return None,
        },
    })
}

fn set<B: GuestBus>(ex: &mut Exec<'_, B>, sreg: usize, segment: Segment, shadow: bool) -> Step {
    ex.cpu.seg[sreg] = segment;
    if sreg == reg::SS && shadow {
        ex.cpu.shadow = Shadow::MovSs;
    }
    Ok(Flow::EndBlock)
}

/// Returns the register's index; only ES, SS, DS, FS and GS can be loaded.
fn loadable(sreg: u8) -> Result<usize, Stop> {
    match usize::from(sreg) {
        reg::CS | 6.. => Err(Exception::UD.into()),
        n => Ok(n),
    }
}

fn load<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let sreg = loadable(insn.dst)?;
    let selector = if insn.has_mem() {
        ex.mem_read::<u16>(insn)?
    } else {
        ex.reg_read::<u16>(insn.src)
    };
    let segment = ex.data_segment(sreg, selector)?;
    set(ex, sreg, segment, true)
}

fn store<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    if insn.has_mem() {
        let v = ex.cpu.seg[usize::from(insn.dst).min(5)].selector;
        ex.mem_write(insn, v)?;
        return Ok(Flow::Next);
    }
    let v = ex.cpu.seg[usize::from(insn.src).min(5)].selector;
    if insn.op_size == 2 {
        ex.reg_write(insn.dst, v);
    } else {
        ex.reg_write(insn.dst, u64::from(v));
    }
    Ok(Flow::Next)
}

fn push16<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = ex.cpu.seg[usize::from(insn.dst).min(5)].selector;
    ex.push(v)?;
    Ok(Flow::Next)
}

/// PUSH of a segment register in 32-bit code: Intel's processors move the stack pointer by four but write two bytes
/// (SDM vol. 2, PUSH); AMD's write four.
fn push32<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = ex.cpu.seg[usize::from(insn.dst).min(5)].selector;
    if ex.cpu.features.has(Feature::Amd) {
        ex.push(u32::from(v))?;
        return Ok(Flow::Next);
    }
    let sp = ex.sp_plus(4u64.wrapping_neg());
    ex.write_at(reg::SS as u8, sp, v)?;
    ex.set_sp(sp);
    Ok(Flow::Next)
}

fn push64<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = ex.cpu.seg[usize::from(insn.dst).min(5)].selector;
    ex.push(u64::from(v))?;
    Ok(Flow::Next)
}

/// POP of a segment register reads only the selector; the stack pointer moves by the operand size.
fn pop<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, size: u64) -> Step {
    let sreg = loadable(insn.dst)?;
    let selector = ex.read_at::<u16>(reg::SS as u8, ex.sp())?;
    let segment = ex.data_segment(sreg, selector)?;
    let sp = ex.sp_plus(size);
    ex.set_sp(sp);
    set(ex, sreg, segment, true)
}

fn pop16<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    pop(ex, insn, 2)
}

fn pop32<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    pop(ex, insn, 4)
}

fn pop64<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    pop(ex, insn, 8)
}

fn load_far<B: GuestBus, const SREG: usize>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let at = ex.effective_address(insn);
    let mask = u64::MAX >> (insn.addr_shift & 63);
    let selector_at = |n: u64| at.wrapping_add(n) & mask;
    match insn.op_size {
        2 => {
            let offset = ex.read_at::<u16>(insn.seg, at)?;
            let selector = ex.read_at::<u16>(insn.seg, selector_at(2))?;
            let segment = ex.data_segment(SREG, selector)?;
            ex.reg_write(insn.dst, offset);
            set(ex, SREG, segment, false)
        }
        4 => {
            let offset = ex.read_at::<u32>(insn.seg, at)?;
            let selector = ex.read_at::<u16>(insn.seg, selector_at(4))?;
            let segment = ex.data_segment(SREG, selector)?;
            ex.reg_write(insn.dst, offset);
            set(ex, SREG, segment, false)
        }
        _ => {
            let offset = ex.read_at::<u64>(insn.seg, at)?;
            let selector = ex.read_at::<u16>(insn.seg, selector_at(8))?;
            let segment = ex.data_segment(SREG, selector)?;
            ex.reg_write(insn.dst, offset);
            set(ex, SREG, segment, false)
        }
    }
}

fn swapgs<B: GuestBus>(ex: &mut Exec<'_, B>, _: &Insn<B>) -> Step {
    if !ex.cpu.is_64bit() {
        return Err(Exception::UD.into());
    }
    ex.require_cpl0()?;
    core::mem::swap(
        &mut ex.cpu.seg[reg::GS].base,
        &mut ex.cpu.msr.kernel_gs_base,
    );
    Ok(Flow::Next)
}

fn check_fsgsbase<B: GuestBus>(ex: &Exec<'_, B>) -> Result<(), Stop> {
    if !ex.cpu.is_64bit() || ex.cpu.cr4 & cr4::FSGSBASE == 0 {
        return Err(Exception::UD.into());
    }
    Ok(())
}

fn read_base<B: GuestBus, const SREG: usize>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    check_fsgsbase(ex)?;
    let base = ex.cpu.seg[SREG].base;
    if insn.op_size == 4 {
        ex.reg_write(insn.dst, base as u32);
    } else {
        ex.reg_write(insn.dst, base);
    }
    Ok(Flow::Next)
}

fn write_base<B: GuestBus, const SREG: usize>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    check_fsgsbase(ex)?;
    let base = if insn.op_size == 4 {
        u64::from(ex.reg_read::<u32>(insn.dst))
    } else {
        ex.reg_read::<u64>(insn.dst)
    };
    if !ex.cpu.is_canonical(base) {
        return Err(Exception::GP0.into());
    }
    ex.cpu.seg[SREG].base = base;
    Ok(Flow::Next)
}
