//! ADD to CMP, TEST, INC, DEC, NEG, NOT, ADCX, ADOX (SDM vol. 2).
//!
//! With LOCK the bus may call the replacing function more than once, so that function computes only the value. The
//! flags are computed from the old value afterwards.

use iced_x86::{Instruction, Mnemonic, OpKind};
use x86_cpu::GuestBus;

use super::{Handler, Insn, read_rm, sized, update_rm};
use crate::{Exec, Flow, Int, LazyFlags, Step};

/// A two-operand operation.
trait Op: 'static {
    fn value<T: Int>(a: T, b: T, cf: bool) -> T;
    fn flags<T: Int>(f: &mut LazyFlags, a: T, b: T, r: T);
}

macro_rules! op {
    ($name:ident, $how:ident, |$a:ident, $b:ident, $c:ident| $e:expr) => {
        struct $name;
        impl Op for $name {
            #[inline(always)]
            fn value<T: Int>(a: T, b: T, $c: bool) -> T {
                let ($a, $b) = (a.to_u64(), b.to_u64());
                T::from_u64($e)
            }
            #[inline(always)]
            fn flags<T: Int>(f: &mut LazyFlags, a: T, b: T, r: T) {
                op!(@ $how f a b r)
            }
        }
    };
    (@ logic $f:ident $a:ident $b:ident $r:ident) => {{ let _ = ($a, $b); $f.logic($r); }};
    (@ $how:ident $f:ident $a:ident $b:ident $r:ident) => { $f.$how($a, $b, $r) };
}
op!(Add, add, |a, b, _c| a.wrapping_add(b));
op!(Adc, add, |a, b, c| a
    .wrapping_add(b)
    .wrapping_add(u64::from(c)));
op!(Sub, sub, |a, b, _c| a.wrapping_sub(b));
op!(Sbb, sub, |a, b, c| a
    .wrapping_sub(b)
    .wrapping_sub(u64::from(c)));
op!(And, logic, |a, b, _c| a & b);
op!(Or, logic, |a, b, _c| a | b);
op!(Xor, logic, |a, b, _c| a ^ b);

#[inline(always)]
fn apply<B: GuestBus, T: Int, O: Op>(ex: &mut Exec<'_, B>, a: T, b: T) -> T {
    let r = O::value(a, b, ex.flags.cf());
    O::flags(&mut ex.flags, a, b, r);
    r
}

fn reg_reg<B: GuestBus, T: Int, O: Op>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let (a, b) = (ex.reg_read(insn.dst), ex.reg_read(insn.src));
    let r = apply::<B, T, O>(ex, a, b);
    ex.reg_write(insn.dst, r);
    Ok(Flow::Next)
}

fn reg_imm<B: GuestBus, T: Int, O: Op>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let a = ex.reg_read(insn.dst);
    let r = apply::<B, T, O>(ex, a, T::from_u64(insn.imm));
    ex.reg_write(insn.dst, r);
    Ok(Flow::Next)
}

fn reg_mem<B: GuestBus, T: Int, O: Op>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let b = ex.mem_read(insn)?;
    let a = ex.reg_read(insn.dst);
    let r = apply::<B, T, O>(ex, a, b);
    ex.reg_write(insn.dst, r);
    Ok(Flow::Next)
}

#[inline(always)]
fn mem_op<B: GuestBus, T: Int, O: Op>(ex: &mut Exec<'_, B>, insn: &Insn<B>, b: T) -> Step {
    let cf = ex.flags.cf();
    let a = ex.mem_rmw(insn, |a: T| O::value(a, b, cf))?;
    apply::<B, T, O>(ex, a, b);
    Ok(Flow::Next)
}

fn mem_reg<B: GuestBus, T: Int, O: Op>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let b = ex.reg_read::<T>(insn.dst);
    mem_op::<B, T, O>(ex, insn, b)
}

fn mem_imm<B: GuestBus, T: Int, O: Op>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    mem_op::<B, T, O>(ex, insn, T::from_u64(insn.imm))
}

/// CMP and TEST, by operand kinds.
fn compare_rr<B: GuestBus, T: Int, O: Op>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let (a, b) = (ex.reg_read(insn.dst), ex.reg_read(insn.src));
    apply::<B, T, O>(ex, a, b);
    Ok(Flow::Next)
}
fn compare_ri<B: GuestBus, T: Int, O: Op>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let a = ex.reg_read(insn.dst);
    apply::<B, T, O>(ex, a, T::from_u64(insn.imm));
    Ok(Flow::Next)
}
fn compare_rm<B: GuestBus, T: Int, O: Op>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let b = ex.mem_read(insn)?;
    let a = ex.reg_read(insn.dst);
    apply::<B, T, O>(ex, a, b);
    Ok(Flow::Next)
}
fn compare_mr<B: GuestBus, T: Int, O: Op>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let a = ex.mem_read(insn)?;
    let b = ex.reg_read(insn.dst);
    apply::<B, T, O>(ex, a, b);
    Ok(Flow::Next)
}
fn compare_mi<B: GuestBus, T: Int, O: Op>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let a = ex.mem_read(insn)?;
    apply::<B, T, O>(ex, a, T::from_u64(insn.imm));
    Ok(Flow::Next)
}

fn inc<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let one = T::from_u64(1);
    let a = update_rm(ex, insn, |a: T| Add::value(a, one, false))?;
    let cf = ex.flags.cf();
    ex.flags.add(a, one, Add::value(a, one, false));
    ex.flags.set_cf(cf);
    Ok(Flow::Next)
}

fn dec<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let one = T::from_u64(1);
    let a = update_rm(ex, insn, |a: T| Sub::value(a, one, false))?;
    let cf = ex.flags.cf();
    ex.flags.sub(a, one, Sub::value(a, one, false));
    ex.flags.set_cf(cf);
    Ok(Flow::Next)
}

fn neg<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let zero = T::from_u64(0);
    let a = update_rm(ex, insn, |a: T| Sub::value(zero, a, false))?;
    ex.flags.sub(zero, a, Sub::value(zero, a, false));
    Ok(Flow::Next)
}

fn not<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    update_rm(ex, insn, |a: T| T::from_u64(!a.to_u64()))?;
    Ok(Flow::Next)
}

/// ADCX (`OF` false) and ADOX: a carry chain in one flag, all others kept.
fn adx<B: GuestBus, T: Int>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    let overflow = insn.extra != 0;
    let b = u128::from(read_rm::<B, T>(ex, insn, insn.src)?.to_u64());
    let a = u128::from(ex.reg_read::<T>(insn.dst).to_u64());
    let carry = if overflow {
        ex.flags.of()
    } else {
        ex.flags.cf()
    };
    let r = a + b + u128::from(carry);
    ex.reg_write(insn.dst, T::from_u64(r as u64));
    let out = r >> T::BITS != 0;
    if overflow {
        ex.flags.set_of(out);
    } else {
        ex.flags.set_cf(out);
    }
    Ok(Flow::Next)
}

fn forms<B: GuestBus, O: Op>(i: &Instruction, size: u8) -> Option<Handler<B>> {
    match (i.op0_kind(), i.op1_kind()) {
        (OpKind::Register, OpKind::Register) => sized!(size, reg_reg, O),
        (OpKind::Register, OpKind::Memory) => sized!(size, reg_mem, O),
        (OpKind::Register, _) => sized!(size, reg_imm, O),
        (_, OpKind::Register) => sized!(size, mem_reg, O),
        _ => sized!(size, mem_imm, O),
    }
}

fn compare_forms<B: GuestBus, O: Op>(i: &Instruction, size: u8) -> Option<Handler<B>> {
    match (i.op0_kind(), i.op1_kind()) {
        (OpKind::Register, OpKind::Register) => sized!(size, compare_rr, O),
        (OpKind::Register, OpKind::Memory) => sized!(size, compare_rm, O),
        (OpKind::Register, _) => sized!(size, compare_ri, O),
        (_, OpKind::Register) => sized!(size, compare_mr, O),
        _ => sized!(size, compare_mi, O),
    }
}

/// The handler of an arithmetic or logic instruction.
pub(crate) fn select<B: GuestBus>(i: &Instruction, insn: &mut Insn<B>) -> Option<Handler<B>> {
    let size = insn.op_size;
    match i.mnemonic() {
        Mnemonic::Add => forms::<B, Add>(i, size),
        Mnemonic::Adc => forms::<B, Adc>(i, size),
        Mnemonic::Sub => forms::<B, Sub>(i, size),
        Mnemonic::Sbb => forms::<B, Sbb>(i, size),
        Mnemonic::And => forms::<B, And>(i, size),
        Mnemonic::Or => forms::<B, Or>(i, size),
        Mnemonic::Xor => forms::<B, Xor>(i, size),
        Mnemonic::Cmp => compare_forms::<B, Sub>(i, size),
        Mnemonic::Test => compare_forms::<B, And>(i, size),
        Mnemonic::Inc => sized!(size, inc),
        Mnemonic::Dec => sized!(size, dec),
        Mnemonic::Neg => sized!(size, neg),
        Mnemonic::Not => sized!(size, not),
        Mnemonic::Adcx => sized!(size, adx),
        Mnemonic::Adox => {
            insn.extra = 1;
            sized!(size, adx)
        }
        _ => None,
    }
}
