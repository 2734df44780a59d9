//! Data movement: MOV, MOVZX, MOVSX, XCHG, XADD, CMPXCHG, BSWAP, MOVBE, LEA, CMOVcc, SETcc.

use iced_x86::{Instruction, Mnemonic, OpKind};
use x86_cpu::{Access, Feature, GuestBus, Privilege};
use x86_defs::reg;

use super::{Handler, Insn, Selector, read_rm, simd::aligned_linear, sized, write_rm};
use crate::{Exec, Flow, Int, Step};

const RAX: u8 = reg::RAX as u8;

/// By condition as encoded.
const SETCC: [Mnemonic; 16] = {
    use Mnemonic as M;
    [
        M::Seto,
        M::Setno,
        M::Setb,
        M::Setae,
        M::Sete,
        M::Setne,
        M::Setbe,
        M::Seta,
        M::Sets,
        M::Setns,
        M::Setp,
        M::Setnp,
        M::Setl,
        M::Setge,
        M::Setle,
        M::Setg,
    ]
};
/// By condition as encoded.
const CMOVCC: [Mnemonic; 16] = {
    use Mnemonic as M;
    [
        M::Cmovo,
        M::Cmovno,
        M::Cmovb,
        M::Cmovae,
        M::Cmove,
        M::Cmovne,
        M::Cmovbe,
        M::Cmova,
        M::Cmovs,
        M::Cmovns,
        M::Cmovp,
        M::Cmovnp,
        M::Cmovl,
        M::Cmovge,
        M::Cmovle,
        M::Cmovg,
    ]
};

fn mov_rr<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = ex.reg_read::<T>(insn.src);
    ex.reg_write(insn.dst, v);
    Ok(Flow::Next)
}
fn mov_ri<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    ex.reg_write(insn.dst, T::from_u64(insn.imm));
    Ok(Flow::Next)
}
fn mov_rm<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = ex.mem_read::<T>(insn)?;
    ex.reg_write(insn.dst, v);
    Ok(Flow::Next)
}
fn mov_mr<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = ex.reg_read::<T>(insn.dst);
    ex.mem_write(insn, v)?;
    Ok(Flow::Next)
}
fn mov_mi<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    ex.mem_write(insn, T::from_u64(insn.imm))?;
    Ok(Flow::Next)
}

/// MOVZX and MOVSX: `S` to `T`, register or memory.
fn movzx<B: GuestBus, T: Int, S: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = read_rm::<B, S>(ex, insn, insn.src)?;
    ex.reg_write(insn.dst, T::from_u64(v.to_u64()));
    Ok(Flow::Next)
}
fn movsx<B: GuestBus, T: Int, S: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = read_rm::<B, S>(ex, insn, insn.src)?;
    ex.reg_write(insn.dst, T::from_u64(v.sext()));
    Ok(Flow::Next)
}

fn lea<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = ex.effective_address(insn);
    ex.reg_write(insn.dst, T::from_u64(v));
    Ok(Flow::Next)
}

fn xchg<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    if insn.has_mem() {
        let new = ex.reg_read::<T>(insn.dst);
        let old = ex.mem_rmw(insn, |_: T| new)?;
        ex.reg_write(insn.dst, old);
    } else {
        let (a, b) = (ex.reg_read::<T>(insn.dst), ex.reg_read::<T>(insn.src));
        ex.reg_write(insn.dst, b);
        ex.reg_write(insn.src, a);
    }
    Ok(Flow::Next)
}

fn xadd<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let source = if insn.has_mem() { insn.dst } else { insn.src };
    let b = ex.reg_read::<T>(source);
    let sum = |a: T| T::from_u64(a.to_u64().wrapping_add(b.to_u64()));
    let a = if insn.has_mem() {
        let a = ex.mem_rmw(insn, sum)?;
        ex.reg_write(source, a);
        a
    } else {
        // The source is written first: if both operands are one register, it gets the sum.
        let a = ex.reg_read::<T>(insn.dst);
        ex.reg_write(source, a);
        ex.reg_write(insn.dst, sum(a));
        a
    };
    ex.flags.add(a, b, sum(a));
    Ok(Flow::Next)
}

fn cmpxchg<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let acc = ex.reg_read::<T>(RAX);
    let source = if insn.has_mem() { insn.dst } else { insn.src };
    let new = ex.reg_read::<T>(source);
    let old = if insn.has_mem() {
        // If the operands differ, the old value is written back (SDM), so the page must be writable.
        ex.mem_rmw(insn, |old: T| if old == acc { new } else { old })?
    } else {
        let old = ex.reg_read::<T>(insn.dst);
        if old == acc {
            ex.reg_write(insn.dst, new);
        }
        old
    };
    let r = T::from_u64(acc.to_u64().wrapping_sub(old.to_u64()));
    ex.flags.sub(acc, old, r);
    if old != acc {
        ex.reg_write(RAX, old);
    }
    Ok(Flow::Next)
}

fn cmpxchg8b<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let pair = |ex: &Exec<'_, B>, hi: usize, lo: usize| {
        ex.cpu.gpr[hi] << 32 | ex.cpu.gpr[lo] & 0xffff_ffff
    };
    let acc = pair(ex, reg::RDX, reg::RAX);
    let new = pair(ex, reg::RCX, reg::RBX);
    let old = ex.mem_rmw(insn, |old: u64| if old == acc { new } else { old })?;
    ex.flags.set_zf(old == acc);
    if old != acc {
        ex.cpu.gpr[reg::RAX] = old & 0xffff_ffff;
        ex.cpu.gpr[reg::RDX] = old >> 32;
    }
    Ok(Flow::Next)
}

fn cmpxchg16b<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let pair = |ex: &Exec<'_, B>, hi: usize, lo: usize| {
        u128::from(ex.cpu.gpr[hi]) << 64 | u128::from(ex.cpu.gpr[lo])
    };
    let acc = pair(ex, reg::RDX, reg::RAX);
    let new = pair(ex, reg::RCX, reg::RBX);
    let gva = aligned_linear(ex, insn, 15, Access::Write)?;
    let lock = insn.prefix & Insn::<B>::LOCK != 0;
    let old = ex
        .bus
        .rmw(ex.cpu, gva, Privilege::Current, lock, |old: u128| {
            if old == acc { new } else { old }
        })?;
    ex.flags.set_zf(old == acc);
    if old != acc {
        ex.cpu.gpr[reg::RAX] = old as u64;
        ex.cpu.gpr[reg::RDX] = (old >> 64) as u64;
    }
    Ok(Flow::Next)
}

/// Bytes of `v` in reverse order.
#[inline(always)]
fn swap<T: Int>(v: T) -> T {
    T::from_u64(v.to_u64().swap_bytes() >> (64 - T::BITS))
}

fn bswap<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    // Undefined for 16 bits; processors give zero.
    let v = if T::BITS == 16 {
        T::from_u64(0)
    } else {
        swap(ex.reg_read::<T>(insn.dst))
    };
    ex.reg_write(insn.dst, v);
    Ok(Flow::Next)
}

fn movbe_load<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = ex.mem_read::<T>(insn)?;
    ex.reg_write(insn.dst, swap(v));
    Ok(Flow::Next)
}
fn movbe_store<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = swap(ex.reg_read::<T>(insn.dst));
    ex.mem_write(insn, v)?;
    Ok(Flow::Next)
}

/// CMOVcc reads the source, and zero-extends a 32-bit destination, whatever the condition.
fn cmov<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let new = read_rm::<B, T>(ex, insn, insn.src)?;
    let v = if ex.flags.condition(insn.extra as u8) {
        new
    } else {
        ex.reg_read(insn.dst)
    };
    ex.reg_write(insn.dst, v);
    Ok(Flow::Next)
}

fn setcc<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let v = u8::from(ex.flags.condition(insn.extra as u8));
    write_rm(ex, insn, insn.dst, v)?;
    Ok(Flow::Next)
}

/// XLAT. The decoder names AL as the index, which is not a whole register.
fn xlat<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let al = ex.cpu.gpr[reg::RAX] & 0xff;
    let offset = ex.cpu.gpr[reg::RBX].wrapping_add(al) & u64::MAX >> (insn.addr_shift & 63);
    let v = ex.read_at::<u8>(insn.seg, offset)?;
    ex.reg_write(RAX, v);
    Ok(Flow::Next)
}

fn mov<B: GuestBus>(i: &Instruction, size: u8) -> Option<Handler<B>> {
    // Segment, control and debug registers belong to the system family.
    let general = |op: u32| i.op_kind(op) != OpKind::Register || i.op_register(op).is_gpr();
    if !general(0) || !general(1) {
        return None;
    }
    match (i.op0_kind(), i.op1_kind()) {
        (OpKind::Register, OpKind::Register) => sized!(size, mov_rr),
        (OpKind::Register, OpKind::Memory) => sized!(size, mov_rm),
        (OpKind::Register, _) => sized!(size, mov_ri),
        (_, OpKind::Register) => sized!(size, mov_mr),
        _ => sized!(size, mov_mi),
    }
}

/// The handler of a data movement.
pub(crate) fn select<B: GuestBus>(
    i: &Instruction,
    insn: &mut Insn<B>,
    s: &Selector<'_>,
) -> Option<Handler<B>> {
    let size = insn.op_size;
    let source = || {
        if i.op1_kind() == OpKind::Register {
            i.op1_register().size()
        } else {
            i.memory_size().size()
        }
    };
    match i.mnemonic() {
        Mnemonic::Mov => mov(i, size),
        Mnemonic::Movnti | Mnemonic::Movdiri => sized!(size, mov_mr),
        Mnemonic::Movzx if source() == 1 => sized!(size, movzx, u8),
        Mnemonic::Movzx => sized!(size, movzx, u16),
        // AMD processors read four bytes and use two.
        Mnemonic::Movsxd if size == 2 && insn.has_mem() && s.features.has(Feature::Amd) => {
            Some(movsx::<B, u16, u32>)
        }
        Mnemonic::Movsx | Mnemonic::Movsxd => match source() {
            1 => sized!(size, movsx, u8),
            2 => sized!(size, movsx, u16),
            _ => sized!(size, movsx, u32),
        },
        Mnemonic::Lea => sized!(size, lea),
        Mnemonic::Xchg => {
            if insn.has_mem() {
                insn.prefix |= Insn::<B>::LOCK;
            }
            sized!(size, xchg)
        }
        Mnemonic::Xadd => sized!(size, xadd),
        Mnemonic::Cmpxchg => sized!(size, cmpxchg),
        Mnemonic::Cmpxchg8b => Some(cmpxchg8b::<B>),
        Mnemonic::Cmpxchg16b => Some(cmpxchg16b::<B>),
        Mnemonic::Bswap => sized!(size, bswap),
        Mnemonic::Movbe if i.op0_kind() == OpKind::Register => sized!(size, movbe_load),
        Mnemonic::Movbe => sized!(size, movbe_store),
        Mnemonic::Xlatb => Some(xlat::<B>),
        _ if i.is_jcc_short_or_near() => None,
        m => {
            let cc = i.condition_code();
            insn.extra = (cc as u32).checked_sub(1)?;
            if m == SETCC[insn.extra as usize & 15] {
                Some(setcc::<B>)
            } else if m == CMOVCC[insn.extra as usize & 15] {
                sized!(size, cmov)
            } else {
                None
            }
        }
    }
}
