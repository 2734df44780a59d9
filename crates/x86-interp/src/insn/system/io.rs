//! IN, OUT, INS, OUTS (SDM vol. 1, chapter 19).

use iced_x86::{Code, Instruction};
use x86_cpu::{Access, Exception, GuestBus, Privilege};
use x86_defs::{paging::PAGE_SIZE, reg, rflags};

use crate::{Exec, Flow, Handler, Insn, Step, Stop};

pub(super) fn select<B: GuestBus>(i: &Instruction, insn: &mut Insn<B>) -> Option<Handler<B>> {
    let (handler, size): (Handler<B>, u8) = match i.code() {
        Code::In_AL_imm8 => (input_imm, 1),
        Code::In_AX_imm8 => (input_imm, 2),
        Code::In_EAX_imm8 => (input_imm, 4),
        Code::In_AL_DX => (input_dx, 1),
        Code::In_AX_DX => (input_dx, 2),
        Code::In_EAX_DX => (input_dx, 4),
        Code::Out_imm8_AL => (output_imm, 1),
        Code::Out_imm8_AX => (output_imm, 2),
        Code::Out_imm8_EAX => (output_imm, 4),
        Code::Out_DX_AL => (output_dx, 1),
        Code::Out_DX_AX => (output_dx, 2),
        Code::Out_DX_EAX => (output_dx, 4),
        Code::Insb_m8_DX => (ins, 1),
        Code::Insw_m16_DX => (ins, 2),
        Code::Insd_m32_DX => (ins, 4),
        Code::Outsb_DX_m8 => (outs, 1),
        Code::Outsw_DX_m16 => (outs, 2),
        Code::Outsd_DX_m32 => (outs, 4),
        _ => return None,
    };
    insn.op_size = size;
    Some(handler)
}

/// #GP(0) unless IOPL or the TSS's bitmap allows `size` ports (vol. 1, 19.5).
fn check<B: GuestBus>(ex: &mut Exec<'_, B>, port: u16, size: u8) -> Result<(), Stop> {
    let cpu = &*ex.cpu;
    if !cpu.is_protected() || !cpu.is_v86() && cpu.cpl <= cpu.iopl() {
        return Ok(());
    }
    let tr = cpu.tr;
    // Only 32- and 64-bit TSSs have a bitmap, and its offset is at 0x66.
    if tr.attr.kind() & 8 == 0 || tr.limit < 0x67 {
        return Err(Exception::GP0.into());
    }
    let base = ex.system_gva(tr.base.wrapping_add(0x66));
    let bitmap = ex.bus.read::<u16>(ex.cpu, base, Privilege::System)?;
    let byte = u32::from(bitmap) + u32::from(port >> 3);
    // Two bytes are always read, which is why a byte of ones follows the bitmap.
    if byte + 1 > tr.limit {
        return Err(Exception::GP0.into());
    }
    let gva = ex.system_gva(tr.base.wrapping_add(u64::from(byte)));
    let bits = ex.bus.read::<u16>(ex.cpu, gva, Privilege::System)?;
    if bits >> (port & 7) & ((1 << size) - 1) != 0 {
        return Err(Exception::GP0.into());
    }
    Ok(())
}

fn input<B: GuestBus>(ex: &mut Exec<'_, B>, port: u16, size: u8) -> Step {
    check(ex, port, size)?;
    let value = ex.bus.port_in(ex.cpu, port, size)?;
    match size {
        1 => ex.reg_write::<u8>(reg::RAX as u8, value as u8),
        2 => ex.reg_write::<u16>(reg::RAX as u8, value as u16),
        _ => ex.reg_write::<u32>(reg::RAX as u8, value),
    }
    ex.note_io_watchpoints(port, u64::from(size));
    Ok(Flow::EndBlock)
}

fn output<B: GuestBus>(ex: &mut Exec<'_, B>, port: u16, size: u8) -> Step {
    check(ex, port, size)?;
    let value = cut(ex.cpu.gpr[reg::RAX] as u32, size);
    ex.bus.port_out(ex.cpu, port, size, value)?;
    ex.note_io_watchpoints(port, u64::from(size));
    Ok(Flow::EndBlock)
}

fn cut(value: u32, size: u8) -> u32 {
    match size {
        1 => value & 0xff,
        2 => value & 0xffff,
        _ => value,
    }
}

fn input_imm<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    input(ex, u16::from(insn.imm as u8), insn.op_size)
}

fn input_dx<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    input(ex, ex.cpu.gpr[reg::RDX] as u16, insn.op_size)
}

fn output_imm<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    output(ex, u16::from(insn.imm as u8), insn.op_size)
}

fn output_dx<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    output(ex, ex.cpu.gpr[reg::RDX] as u16, insn.op_size)
}

/// Returns a mask of the bits of rCX, rSI and rDI that the address size uses.
fn address_mask<B>(insn: &Insn<B>) -> u64 {
    match insn.addr_size {
        2 => 0xffff,
        4 => 0xffff_ffff,
        _ => u64::MAX,
    }
}

/// Writes a counter or index: 16 bits keep the rest of the register, 32 bits clear its upper half.
fn set_indexed<B: GuestBus>(ex: &mut Exec<'_, B>, r: usize, value: u64, mask: u64) {
    let slot = &mut ex.cpu.gpr[r];
    *slot = if mask == 0xffff {
        *slot & !mask | value & mask
    } else {
        value & mask
    };
}

/// True if there is a REP prefix and the count is zero.
fn is_done<B: GuestBus>(ex: &Exec<'_, B>, insn: &Insn<B>) -> bool {
    repeats(insn) && ex.cpu.gpr[reg::RCX] & address_mask(insn) == 0
}

fn repeats<B>(insn: &Insn<B>) -> bool {
    insn.prefix & (Insn::<B>::REP | Insn::<B>::REPNE) != 0
}

/// Advances the index register and the count. Each call does one iteration, so that each device access is one
/// restartable step.
fn advance<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, index: usize) -> Step {
    let mask = address_mask(insn);
    let size = u64::from(insn.op_size);
    let by = if ex.cpu.rflags & rflags::DF != 0 {
        size.wrapping_neg()
    } else {
        size
    };
    let next = ex.cpu.gpr[index].wrapping_add(by);
    set_indexed(ex, index, next, mask);
    if repeats(insn) {
        let count = ex.cpu.gpr[reg::RCX].wrapping_sub(1);
        set_indexed(ex, reg::RCX, count, mask);
        if count & mask != 0 {
            return Ok(Flow::Again);
        }
    }
    Ok(Flow::EndBlock)
}

/// Returns how many elements of an INS can be fetched at once: those up to the page's end, at most as many as KVM's
/// emulator takes.
fn elements_ahead<B: GuestBus>(ex: &Exec<'_, B>, insn: &Insn<B>, gva: u64) -> u32 {
    const MOST_BYTES: u64 = 1024;
    if !repeats(insn) || ex.is_stepped() {
        return 1;
    }
    let size = u64::from(insn.op_size);
    let in_page = if ex.cpu.rflags & rflags::DF != 0 {
        gva % PAGE_SIZE
    } else {
        PAGE_SIZE - gva % PAGE_SIZE
    };
    let count = ex.cpu.gpr[reg::RCX] & address_mask(insn);
    count.min(in_page.min(MOST_BYTES) / size).max(1) as u32
}

fn ins<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    if is_done(ex, insn) {
        return Ok(Flow::Next);
    }
    let port = ex.cpu.gpr[reg::RDX] as u16;
    let len = u64::from(insn.op_size);
    check(ex, port, insn.op_size)?;
    let offset = ex.cpu.gpr[reg::RDI] & address_mask(insn);
    let gva = ex.linear(reg::ES as u8, offset, len, Access::Write)?;
    // A fault must be raised before the device is read.
    ex.bus
        .probe(ex.cpu, gva, len, Access::Write, Privilege::Current)?;
    let count = elements_ahead(ex, insn, gva);
    let value = ex.bus.port_in_repeated(ex.cpu, port, insn.op_size, count)?;
    match insn.op_size {
        1 => ex.bus.write(ex.cpu, gva, value as u8, Privilege::Current)?,
        2 => ex
            .bus
            .write(ex.cpu, gva, value as u16, Privilege::Current)?,
        _ => ex.bus.write(ex.cpu, gva, value, Privilege::Current)?,
    }
    ex.note_io_watchpoints(port, len);
    advance(ex, insn, reg::RDI)
}

fn outs<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    if is_done(ex, insn) {
        return Ok(Flow::Next);
    }
    let port = ex.cpu.gpr[reg::RDX] as u16;
    check(ex, port, insn.op_size)?;
    let offset = ex.cpu.gpr[reg::RSI] & address_mask(insn);
    let value = match insn.op_size {
        1 => u32::from(ex.read_at::<u8>(insn.seg, offset)?),
        2 => u32::from(ex.read_at::<u16>(insn.seg, offset)?),
        _ => ex.read_at::<u32>(insn.seg, offset)?,
    };
    ex.bus.port_out(ex.cpu, port, insn.op_size, value)?;
    ex.note_io_watchpoints(port, u64::from(insn.op_size));
    advance(ex, insn, reg::RSI)
}
