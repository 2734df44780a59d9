//! Vector moves and logic that are frequent in compiled code, without native stubs.

use iced_x86::{Code, Instruction, OpKind};
use x86_cpu::{Access, GuestBus, Privilege, Word};

use super::{aligned_linear, available, class};
use crate::insn::{Handler, Insn};
use crate::{Exec, Flow, Step, Stop};

const SSE: u8 = class::SSE;
const VEX: u8 = class::VEX;

const XOR: u8 = 0;
const OR: u8 = 1;
const AND: u8 = 2;

/// Returns the handler of a frequent move.
pub(super) fn select<B: GuestBus>(i: &Instruction) -> Option<Handler<B>> {
    if (0..i.op_count()).any(|n| i.op_kind(n) == OpKind::Memory) {
        select_memory(i.code())
    } else {
        select_register(i.code())
    }
}

fn select_memory<B: GuestBus>(code: Code) -> Option<Handler<B>> {
    use Code as C;
    let h: Handler<B> = match code {
        C::Movaps_xmm_xmmm128 | C::Movapd_xmm_xmmm128 | C::Movdqa_xmm_xmmm128 => {
            load::<B, u128, SSE, true>
        }
        C::Movups_xmm_xmmm128
        | C::Movupd_xmm_xmmm128
        | C::Movdqu_xmm_xmmm128
        | C::Lddqu_xmm_m128 => load::<B, u128, SSE, false>,
        C::Movaps_xmmm128_xmm
        | C::Movapd_xmmm128_xmm
        | C::Movdqa_xmmm128_xmm
        | C::Movntps_m128_xmm
        | C::Movntpd_m128_xmm
        | C::Movntdq_m128_xmm => store::<B, u128, SSE, true>,
        C::Movups_xmmm128_xmm | C::Movupd_xmmm128_xmm | C::Movdqu_xmmm128_xmm => {
            store::<B, u128, SSE, false>
        }
        C::Movss_xmm_xmmm32 | C::Movd_xmm_rm32 => load::<B, u32, SSE, false>,
        C::Movsd_xmm_xmmm64 | C::Movq_xmm_xmmm64 | C::Movq_xmm_rm64 => load::<B, u64, SSE, false>,
        C::Movss_xmmm32_xmm | C::Movd_rm32_xmm => store::<B, u32, SSE, false>,
        C::Movsd_xmmm64_xmm
        | C::Movq_xmmm64_xmm
        | C::Movq_rm64_xmm
        | C::Movlps_m64_xmm
        | C::Movlpd_m64_xmm => store::<B, u64, SSE, false>,
        C::VEX_Vmovaps_xmm_xmmm128 | C::VEX_Vmovapd_xmm_xmmm128 | C::VEX_Vmovdqa_xmm_xmmm128 => {
            load::<B, u128, VEX, true>
        }
        C::VEX_Vmovups_xmm_xmmm128 | C::VEX_Vmovupd_xmm_xmmm128 | C::VEX_Vmovdqu_xmm_xmmm128 => {
            load::<B, u128, VEX, false>
        }
        C::VEX_Vmovaps_xmmm128_xmm | C::VEX_Vmovapd_xmmm128_xmm | C::VEX_Vmovdqa_xmmm128_xmm => {
            store::<B, u128, VEX, true>
        }
        C::VEX_Vmovups_xmmm128_xmm | C::VEX_Vmovupd_xmmm128_xmm | C::VEX_Vmovdqu_xmmm128_xmm => {
            store::<B, u128, VEX, false>
        }
        C::VEX_Vmovss_xmm_m32 | C::VEX_Vmovd_xmm_rm32 => load::<B, u32, VEX, false>,
        C::VEX_Vmovsd_xmm_m64 | C::VEX_Vmovq_xmm_xmmm64 | C::VEX_Vmovq_xmm_rm64 => {
            load::<B, u64, VEX, false>
        }
        C::VEX_Vmovss_m32_xmm | C::VEX_Vmovd_rm32_xmm => store::<B, u32, VEX, false>,
        C::VEX_Vmovsd_m64_xmm | C::VEX_Vmovq_xmmm64_xmm | C::VEX_Vmovq_rm64_xmm => {
            store::<B, u64, VEX, false>
        }
        C::VEX_Vmovups_ymm_ymmm256 | C::VEX_Vmovupd_ymm_ymmm256 | C::VEX_Vmovdqu_ymm_ymmm256 => {
            load_ymm::<B, false>
        }
        C::VEX_Vmovaps_ymm_ymmm256 | C::VEX_Vmovapd_ymm_ymmm256 | C::VEX_Vmovdqa_ymm_ymmm256 => {
            load_ymm::<B, true>
        }
        C::VEX_Vmovups_ymmm256_ymm | C::VEX_Vmovupd_ymmm256_ymm | C::VEX_Vmovdqu_ymmm256_ymm => {
            store_ymm::<B, false>
        }
        C::VEX_Vmovaps_ymmm256_ymm | C::VEX_Vmovapd_ymmm256_ymm | C::VEX_Vmovdqa_ymmm256_ymm => {
            store_ymm::<B, true>
        }
        _ => return None,
    };
    Some(h)
}

fn select_register<B: GuestBus>(code: Code) -> Option<Handler<B>> {
    use Code as C;
    const LOW: u64 = 0xffff_ffff;
    const ALL: u64 = u64::MAX;
    let h: Handler<B> = match code {
        C::Movaps_xmm_xmmm128
        | C::Movapd_xmm_xmmm128
        | C::Movdqa_xmm_xmmm128
        | C::Movups_xmm_xmmm128
        | C::Movupd_xmm_xmmm128
        | C::Movdqu_xmm_xmmm128 => copy::<B>,
        C::Movd_xmm_rm32 => from_gpr::<B, SSE, LOW>,
        C::Movq_xmm_rm64 => from_gpr::<B, SSE, ALL>,
        C::Movd_rm32_xmm => to_gpr::<B, SSE, LOW>,
        C::Movq_rm64_xmm => to_gpr::<B, SSE, ALL>,
        C::VEX_Vmovd_xmm_rm32 => from_gpr::<B, VEX, LOW>,
        C::VEX_Vmovq_xmm_rm64 => from_gpr::<B, VEX, ALL>,
        C::VEX_Vmovd_rm32_xmm => to_gpr::<B, VEX, LOW>,
        C::VEX_Vmovq_rm64_xmm => to_gpr::<B, VEX, ALL>,
        C::Pxor_xmm_xmmm128 | C::Xorps_xmm_xmmm128 | C::Xorpd_xmm_xmmm128 => logic::<B, XOR>,
        C::Por_xmm_xmmm128 | C::Orps_xmm_xmmm128 | C::Orpd_xmm_xmmm128 => logic::<B, OR>,
        C::Pand_xmm_xmmm128 | C::Andps_xmm_xmmm128 | C::Andpd_xmm_xmmm128 => logic::<B, AND>,
        _ => return None,
    };
    Some(h)
}

/// Returns the linear address of a memory operand of `len` bytes, which may have to be aligned.
#[inline(always)]
fn operand<B: GuestBus, const ALIGNED: bool>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
    len: usize,
    access: Access,
) -> Result<u64, Stop> {
    let len = len as u64;
    if ALIGNED {
        aligned_linear(e, insn, len - 1, access)
    } else {
        e.mem_linear(insn, len, access)
    }
}

fn load<B: GuestBus, T: Word, const CLASS: u8, const ALIGNED: bool>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
) -> Step {
    available::<B, CLASS>(e)?;
    let gva = operand::<B, ALIGNED>(e, insn, T::SIZE, Access::Read)?;
    let v: T = e.bus.read(e.cpu, gva, Privilege::Current)?;
    let n = usize::from(insn.dst);
    e.cpu.fp.set_xmm(n, v.to_u128());
    if CLASS == VEX {
        e.cpu.fp.set_ymm_hi(n, 0);
    }
    Ok(Flow::Next)
}

/// A store: the only register operand, `dst`, is the source.
fn store<B: GuestBus, T: Word, const CLASS: u8, const ALIGNED: bool>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
) -> Step {
    available::<B, CLASS>(e)?;
    let gva = operand::<B, ALIGNED>(e, insn, T::SIZE, Access::Write)?;
    let v = T::from_u128(e.cpu.fp.xmm(usize::from(insn.dst)));
    e.bus.write(e.cpu, gva, v, Privilege::Current)?;
    Ok(Flow::Next)
}

fn load_ymm<B: GuestBus, const ALIGNED: bool>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    available::<B, VEX>(e)?;
    let gva = operand::<B, ALIGNED>(e, insn, 32, Access::Read)?;
    let mut b = [[0; 16]; 2];
    e.bus
        .read_bytes(e.cpu, gva, b.as_flattened_mut(), Privilege::Current)?;
    let n = usize::from(insn.dst);
    e.cpu.fp.set_xmm(n, u128::from_le_bytes(b[0]));
    e.cpu.fp.set_ymm_hi(n, u128::from_le_bytes(b[1]));
    Ok(Flow::Next)
}

fn store_ymm<B: GuestBus, const ALIGNED: bool>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    available::<B, VEX>(e)?;
    let gva = operand::<B, ALIGNED>(e, insn, 32, Access::Write)?;
    let n = usize::from(insn.dst);
    let fp = &e.cpu.fp;
    let b = [fp.xmm(n).to_le_bytes(), fp.ymm_hi(n).to_le_bytes()];
    e.bus
        .write_bytes(e.cpu, gva, b.as_flattened(), Privilege::Current)?;
    Ok(Flow::Next)
}

fn copy<B: GuestBus>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    available::<B, SSE>(e)?;
    let (n, from) = operands(e, insn);
    e.cpu.fp.set_xmm(n, from);
    Ok(Flow::Next)
}

/// Returns the destination's number and the source's value.
#[inline(always)]
fn operands<B: GuestBus>(e: &Exec<'_, B>, insn: &Insn<B>) -> (usize, u128) {
    (usize::from(insn.dst), e.cpu.fp.xmm(usize::from(insn.src)))
}

fn from_gpr<B: GuestBus, const CLASS: u8, const MASK: u64>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
) -> Step {
    available::<B, CLASS>(e)?;
    let v = e.cpu.gpr[usize::from(insn.src) & 31] & MASK;
    let n = usize::from(insn.dst);
    e.cpu.fp.set_xmm(n, u128::from(v));
    if CLASS == VEX {
        e.cpu.fp.set_ymm_hi(n, 0);
    }
    Ok(Flow::Next)
}

fn to_gpr<B: GuestBus, const CLASS: u8, const MASK: u64>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
) -> Step {
    available::<B, CLASS>(e)?;
    let v = e.cpu.fp.xmm(usize::from(insn.src)) as u64 & MASK;
    e.cpu.gpr[usize::from(insn.dst) & 31] = v;
    Ok(Flow::Next)
}

fn logic<B: GuestBus, const OP: u8>(e: &mut Exec<'_, B>, insn: &Insn<B>) -> Step {
    available::<B, SSE>(e)?;
    let (n, b) = operands(e, insn);
    let a = e.cpu.fp.xmm(n);
    let v = match OP {
        XOR => a ^ b,
        OR => a | b,
        _ => a & b,
    };
    e.cpu.fp.set_xmm(n, v);
    Ok(Flow::Next)
}
