//! x87, MMX, SSE and AVX instructions: selection and availability (SDM vol. 1,
//! chapters 8 to 14; vol. 3, 2.5 and 14).
//!
//! Computations are executed by the host (`native`). Moves that are too frequent for that, control registers, and
//! instructions that access memory element by element have handlers of their own.

mod elements;
mod moves;
mod native;
mod x87;

use iced_x86::Instruction;
use x86_cpu::{Access, Exception, GuestBus};
use x86_defs::{
    control::{cr0, cr4},
    reg, vector, xsave,
};

use super::{Handler, Insn, Selector, xsave as xsave_insn};
use crate::{Exec, Stop};

/// State that an instruction needs, as a const parameter of its handler.
pub(super) mod class {
    /// x87.
    pub(crate) const X87: u8 = 0;
    /// MMX registers only.
    pub(crate) const MMX: u8 = 1;
    /// MMX and XMM registers.
    pub(crate) const MMX_XMM: u8 = 2;
    /// XMM registers, legacy encoding.
    pub(crate) const SSE: u8 = 3;
    /// VEX encoding.
    pub(crate) const VEX: u8 = 4;
}

/// Returns the handler of an FP/SIMD/XSAVE instruction, or `None` if the instruction is not one of them or the host
/// cannot execute it. May use `insn.extra`, `imm` and `imm2` for its own purposes.
pub(crate) fn select<B: GuestBus>(
    i: &Instruction,
    insn: &mut Insn<B>,
    s: &mut Selector<'_>,
) -> Option<Handler<B>> {
    moves::select(i)
        .or_else(|| x87::select(i))
        .or_else(|| elements::select(i))
        .or_else(|| xsave_insn::select(i))
        .or_else(|| native::select(i, insn, s))
}

/// XCR0 enables SSE and AVX state.
const AVX_STATE: u64 = xsave::SSE | xsave::AVX;

/// #UD and #NM of an instruction that uses FP/SIMD state, and #MF of a pending
/// x87 exception (SDM vol. 3, 2.5 and 14.1; vol. 2, 2.4 for VEX).
#[inline(always)]
pub(super) fn available<B: GuestBus, const CLASS: u8>(e: &Exec<'_, B>) -> Result<(), Stop> {
    let c0 = e.cpu.cr0;
    let usable = match CLASS {
        class::X87 | class::MMX => c0 & (cr0::EM | cr0::TS) == 0,
        class::VEX => {
            c0 & (cr0::TS | cr0::PE) == cr0::PE
                && e.cpu.cr4 & cr4::OSXSAVE != 0
                && e.cpu.xcr0 & AVX_STATE == AVX_STATE
                && !e.cpu.is_v86()
        }
        _ => c0 & (cr0::EM | cr0::TS) == 0 && e.cpu.cr4 & cr4::OSFXSR != 0,
    };
    if !usable {
        return Err(unavailable::<B, CLASS>(e));
    }
    if matches!(CLASS, class::X87 | class::MMX | class::MMX_XMM) {
        no_pending_x87(e)?;
    }
    Ok(())
}

#[cold]
fn unavailable<B: GuestBus, const CLASS: u8>(e: &Exec<'_, B>) -> Stop {
    let em = e.cpu.cr0 & cr0::EM != 0;
    let undefined = match CLASS {
        class::X87 => false,
        class::MMX => em,
        class::VEX => {
            e.cpu.is_real_or_v86()
                || e.cpu.cr4 & cr4::OSXSAVE == 0
                || e.cpu.xcr0 & AVX_STATE != AVX_STATE
        }
        _ => em || e.cpu.cr4 & cr4::OSFXSR == 0,
    };
    if undefined {
        Exception::UD.into()
    } else {
        Exception::NM.into()
    }
}

/// Raises #MF if an unmasked x87 exception is pending (SDM vol. 1, 8.6).
// DEVIATION: with CR0.NE clear hardware signals FERR# (IRQ 13) instead; #MF is raised all the same.
#[inline(always)]
pub(super) fn no_pending_x87<B: GuestBus>(e: &Exec<'_, B>) -> Result<(), Stop> {
    let fp = &e.cpu.fp;
    if fp.u16_at(xsave::FSW) & !fp.u16_at(xsave::FCW) & 0x3f != 0 {
        return Err(Exception::new(vector::MF).into());
    }
    Ok(())
}

/// Returns the linear address of a memory operand that must be aligned to `mask + 1` bytes. Alignment is checked before
/// canonicality, whose violation may be #SS.
#[inline(always)]
pub(super) fn aligned_linear<B: GuestBus>(
    e: &mut Exec<'_, B>,
    insn: &Insn<B>,
    mask: u64,
    access: Access,
) -> Result<u64, Stop> {
    match e.mem_linear(insn, mask + 1, access) {
        Ok(gva) if gva & mask == 0 => Ok(gva),
        Ok(_) => Err(Exception::GP0.into()),
        Err(stop) => Err(misaligned_first(e, insn, mask, stop)),
    }
}

/// Raises #GP instead of the fault of [`Exec::mem_linear`] if the operand is misaligned, too.
#[cold]
pub(super) fn misaligned_first<B: GuestBus>(
    e: &Exec<'_, B>,
    insn: &Insn<B>,
    mask: u64,
    stop: Stop,
) -> Stop {
    let base = match usize::from(insn.seg) {
        n if n >= reg::FS => e.cpu.seg[n.min(5)].base,
        _ => 0,
    };
    let misaligned = e.effective_address(insn).wrapping_add(base) & mask != 0;
    let checked = matches!(stop, Stop::Exception(x) if x.vector == vector::AC);
    if misaligned && (checked || e.cpu.is_64bit()) {
        Exception::GP0.into()
    } else {
        stop
    }
}
