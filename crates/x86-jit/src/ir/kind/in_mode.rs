//! What is done with an instruction in a mode.

use iced_x86::{EncodingKind, Instruction, OpKind, Register};

use super::{Form, Kind, in_segments, of};
use crate::ir::mode::Mode;

/// What is done with an instruction in a mode.
#[inline]
pub(crate) fn kind_of(form: &Form, i: &Instruction, mode: Mode) -> Kind {
    if !form.available {
        return Kind::Interpret;
    }
    let long = mode.is_long();
    let mut kind = form.kind;
    let mut needs = form.needs;
    if mode.has(Mode::SEGMENTED) {
        (kind, needs) = in_segments::kind_of(form, i, mode);
        needs |= self::needs(kind, i.code().encoding() == EncodingKind::VEX);
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
    // LOCK is allowed with a memory destination only (#UD otherwise).
    if !mode.has(needs) || i.has_lock_prefix() && i.op0_kind() != OpKind::Memory {
        return Kind::Interpret;
    }
    // What may change the privilege level counts at the one that it begins at; LOOP and JCXZ branch or not by other
    // code than a conditional branch's; single elements of strings and MOV to CR3 may be left from a trampoline.
    let is_interpreted = matches!(
        kind,
        Kind::Syscall
            | Kind::Sysret
            | Kind::InterruptReturn
            | Kind::Counted
            | Kind::Element
            | Kind::ToCr3
    );
    if is_interpreted && mode.has(Mode::COUNTS) {
        return Kind::Interpret;
    }
    // DF is clear, and no x87 exception can be pending.
    if kind == Kind::Cld && mode.has(Mode::KERNEL) || form.waits && mode.has(Mode::FP) {
        return Kind::Nop;
    }
    kind
}

/// Mode bits without which the interpreter executes instructions of the kind.
pub(crate) fn needs(kind: Kind, vex: bool) -> Mode {
    match kind {
        Kind::CopyFp | Kind::CopyFpAligned | Kind::LoadFpControl if vex => Mode::FP | Mode::AVX,
        Kind::CopyFp | Kind::CopyFpAligned | Kind::LoadFpControl => Mode::FP,
        Kind::Rdtsc => Mode::TSC,
        Kind::Pushf
        | Kind::Popf
        | Kind::Cli
        | Kind::Sti
        | Kind::Swapgs
        | Kind::Sysret
        | Kind::InterruptReturn
        | Kind::FromControl
        | Kind::StoreTable
        | Kind::ToCr0
        | Kind::Element
        | Kind::Ac => Mode::KERNEL,
        Kind::ToSegment | Kind::PopSegment => Mode::KERNEL.with(Mode::REAL),
        _ => Mode::NONE,
    }
}
