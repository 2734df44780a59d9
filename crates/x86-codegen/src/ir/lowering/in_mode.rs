//! The lowering of an instruction in a mode.

use iced_x86::{Code, CpuidFeature, EncodingKind, Instruction, Mnemonic, OpKind, Register};

use super::{Form, Lowering, in_segments, of};
use crate::ir::mode::Mode;

/// Returns the lowering of an instruction in a mode.
#[inline]
pub(crate) fn kind_of(form: &Form, i: &Instruction, mode: Mode) -> Lowering {
    if !form.available {
        return Lowering::Interpret;
    }
    let long = mode.is_long();
    let mut kind = form.kind;
    let mut needs = form.needs;
    if mode.has(Mode::SEGMENTED) {
        (kind, needs) = in_segments::kind_of(form, i, mode);
        needs |= self::needs(kind, i.code());
    } else if form.checked || !long {
        kind = of(kind, i, long);
        if !long {
            needs |= match i.memory_segment() {
                Register::FS => Mode::FS,
                Register::GS => Mode::GS,
                _ => Mode::NONE,
            };
        }
    }
    // Without segments it is not virtual-8086 mode, the only one in which these two may fault.
    if matches!(kind, Lowering::Pushf | Lowering::Popf) && !mode.has(Mode::SEGMENTED) {
        needs = needs.without(Mode::KERNEL);
    }
    // LOCK is allowed with a memory destination only (#UD otherwise).
    if !mode.has(needs) || i.has_lock_prefix() && i.op0_kind() != OpKind::Memory {
        return Lowering::Interpret;
    }
    // The trampoline of CLTS leaves code that counts to the interpreter.
    if kind == Lowering::Clts && mode.has(Mode::COUNTS) {
        return Lowering::Interpret;
    }
    // The trampoline of SYSCALL returns behind two bytes: there is no prefix.
    if kind == Lowering::Syscall && i.len() != 2 {
        return Lowering::Interpret;
    }
    // With this mode bit no x87 exception can be pending.
    if form.waits && mode.has(Mode::FP) {
        return Lowering::Nop;
    }
    kind
}

/// Returns the mode bits without which the interpreter executes instructions of the lowering.
pub(crate) fn needs(kind: Lowering, code: Code) -> Mode {
    match kind {
        Lowering::CopyFp | Lowering::CopyFpAligned | Lowering::LoadFpControl => {
            if code.encoding() == EncodingKind::VEX {
                Mode::FP | Mode::AVX
            } else if is_older_than_sse(code) {
                Mode::FP
            } else {
                Mode::FP | Mode::SSE
            }
        }
        Lowering::Gather | Lowering::MaskedMove => Mode::FP | Mode::AVX,
        // It needs CR4.OSXSAVE.
        Lowering::ExtendedControl => Mode::AVX,
        Lowering::X87Environment => Mode::FP,
        Lowering::SaveState | Lowering::RestoreState | Lowering::RestoreStandard => {
            match code.mnemonic() {
                Mnemonic::Fxsave64 | Mnemonic::Fxrstor64 => Mode::FP | Mode::SSE,
                Mnemonic::Xsaves64 | Mnemonic::Xrstors64 => Mode::FP | Mode::AVX | Mode::KERNEL,
                _ => Mode::FP | Mode::AVX,
            }
        }
        Lowering::Rdtsc => Mode::TSC,
        Lowering::Pushf
        | Lowering::Popf
        | Lowering::Cli
        | Lowering::Sti
        | Lowering::Swapgs
        | Lowering::Sysret
        | Lowering::InterruptReturn
        | Lowering::FromControl
        | Lowering::StoreTable
        | Lowering::ToCr0
        | Lowering::Clts
        | Lowering::Ac => Mode::KERNEL,
        Lowering::ToSegment
        | Lowering::LoadPointer
        | Lowering::FarBranch
        | Lowering::PopSegment => Mode::REAL,
        _ => Mode::NONE,
    }
}

/// Returns true for instructions of x87 and MMX.
fn is_older_than_sse(code: Code) -> bool {
    use CpuidFeature as C;
    let is_older = |f: &C| matches!(f, C::FPU | C::FPU287 | C::FPU387 | C::CMOV | C::MMX);
    code.cpuid_features().iter().all(is_older)
}
