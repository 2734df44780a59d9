//! Lowerings in code whose segments have bases and limits, and in 16-bit code.

use iced_x86::{Code, EncodingKind, Instruction, OpKind, Register};

use super::{Form, Lowering, of};
use crate::ir::{mode::Mode, string};

/// Returns the lowering of a form in such code. `kind`: its lowering where segments are flat.
pub(super) fn form(kind: Lowering, code: Code) -> Lowering {
    use Code as C;
    match code {
        C::Push_r16 | C::Push_rm16 | C::Push_imm16 | C::Pushw_imm8 => Lowering::Push,
        C::Pop_r16 | C::Pop_rm16 => Lowering::Pop,
        C::Leavew => Lowering::Leave,
        C::Enterw_imm16_imm8 => Lowering::Enter,
        C::Pushaw => Lowering::PushAll,
        C::Popaw => Lowering::PopAll,
        C::Pushfw => Lowering::Pushf,
        C::Popfw => Lowering::Popf,
        C::Jmp_rel8_16 | C::Jmp_rel16 => Lowering::Jmp,
        C::Jmp_rm16 => Lowering::JmpIndirect,
        C::Call_rel16 => Lowering::Call,
        C::Call_rm16 => Lowering::CallIndirect,
        C::Retnw | C::Retnw_imm16 => Lowering::Ret,
        C::Lea_r16_m => Lowering::Lea,
        C::Mov_Sreg_rm16 | C::Mov_Sreg_r32m16 => Lowering::ToSegment,
        _ if pointer_segment(code).is_some() => Lowering::LoadPointer,
        _ if far_word(code).is_some() => Lowering::FarBranch,
        C::Pushw_ES | C::Pushw_CS | C::Pushw_SS | C::Pushw_DS | C::Pushw_FS | C::Pushw_GS => {
            Lowering::PushSegment
        }
        C::Popw_ES | C::Popw_SS | C::Popw_DS | C::Popw_FS | C::Popw_GS => Lowering::PopSegment,
        _ if super::is_counted(code) => Lowering::Counted,
        _ if code.is_jcc_short_or_near() => Lowering::Jcc,
        _ => match kind {
            Lowering::String => Lowering::Element,
            Lowering::StoreTable
            | Lowering::LoadSegment
            | Lowering::PushSegment
            | Lowering::PushSelector
            | Lowering::AskAboutSelector
            | Lowering::KeyRights
            | Lowering::Ac
            | Lowering::ToCr0
            | Lowering::Clts => Lowering::Interpret,
            Lowering::X87Environment if code != C::Fninit => Lowering::Interpret,
            kind => kind,
        },
    }
}

/// Returns true if the instruction works on a word of 16 bits on the stack, or leads to an address of 16 bits.
pub(crate) fn has_short_words(code: Code) -> bool {
    use Code as C;
    matches!(
        code,
        C::Push_r16
            | C::Push_rm16
            | C::Push_imm16
            | C::Pushw_imm8
            | C::Pop_r16
            | C::Pop_rm16
            | C::Leavew
            | C::Enterw_imm16_imm8
            | C::Pushaw
            | C::Popaw
            | C::Pushfw
            | C::Popfw
            | C::Pushw_ES
            | C::Pushw_CS
            | C::Pushw_SS
            | C::Pushw_DS
            | C::Pushw_FS
            | C::Pushw_GS
            | C::Popw_ES
            | C::Popw_SS
            | C::Popw_DS
            | C::Popw_FS
            | C::Popw_GS
            | C::Jmp_rm16
            | C::Call_rel16
            | C::Call_rm16
            | C::Retnw
            | C::Retnw_imm16
    ) || far_word(code) == Some(2)
}

/// Returns the size in bytes of the instruction pointer of a branch to another code segment.
fn far_word(code: Code) -> Option<u32> {
    use Code as C;
    Some(match code {
        C::Jmp_ptr1616 | C::Jmp_m1616 | C::Call_ptr1616 | C::Call_m1616 => 2,
        C::Jmp_ptr1632 | C::Jmp_m1632 | C::Call_ptr1632 | C::Call_m1632 => 4,
        C::Retfw | C::Retfw_imm16 => 2,
        C::Retfd | C::Retfd_imm16 => 4,
        _ => return None,
    })
}

/// Returns the lowering of the instruction, and the mode bits without which the interpreter executes it, besides those
/// of the lowering.
pub(super) fn kind_of(form: &Form, i: &Instruction, mode: Mode) -> (Lowering, Mode) {
    let is_vex = i.code().encoding() == EncodingKind::VEX;
    if is_vex && mode.has(Mode::REAL) {
        // VEX encodings raise #UD.
        return (Lowering::Interpret, Mode::NONE);
    }
    let kind = match of(form.in_segments, i, true) {
        Lowering::BitString
        | Lowering::Syscall
        | Lowering::PopMemory
        | Lowering::Gather
        | Lowering::MaskedMove => Lowering::Interpret,
        // The interpreter executes repeated ones, and does many repetitions at once.
        Lowering::Element if string::repeats(i) || string::operation(i).is_none() => {
            Lowering::Interpret
        }
        Lowering::ToSegment if i.op0_register() == Register::CS => Lowering::Interpret,
        kind => kind,
    };
    let needs = match i.memory_segment() {
        Register::FS => Mode::FS,
        Register::GS => Mode::GS,
        // In protected mode CS cannot be written.
        Register::CS if form.memory(i) == Some(true) => return (Lowering::Interpret, Mode::NONE),
        _ => Mode::NONE,
    };
    let loaded = match kind {
        Lowering::ToSegment | Lowering::PopSegment => Some(i.op0_register()),
        Lowering::LoadPointer => pointer_segment(i.code()),
        _ => None,
    };
    let needs = match loaded {
        // A segment register that has no plain segment is loaded in another way.
        Some(Register::FS) => needs | Mode::FS,
        Some(Register::GS) => needs | Mode::GS,
        _ => needs,
    };
    (kind, needs)
}

/// Returns the segment register that LDS, or another of its kind, loads.
pub(crate) fn pointer_segment(code: Code) -> Option<Register> {
    use Code as C;
    Some(match code {
        C::Lds_r16_m1616 | C::Lds_r32_m1632 => Register::DS,
        C::Les_r16_m1616 | C::Les_r32_m1632 => Register::ES,
        C::Lfs_r16_m1616 | C::Lfs_r32_m1632 => Register::FS,
        C::Lgs_r16_m1616 | C::Lgs_r32_m1632 => Register::GS,
        C::Lss_r16_m1616 | C::Lss_r32_m1632 => Register::SS,
        _ => return None,
    })
}

/// Returns true if the memory operand has an address of 16 bits.
pub(crate) fn has_short_address(i: &Instruction) -> bool {
    let (base, index) = (i.memory_base(), i.memory_index());
    base.is_gpr16()
        || index.is_gpr16()
        || base == Register::None && index == Register::None && i.memory_displ_size() == 2
}

/// Returns true if the instruction has a memory operand with an address of 16 bits.
pub(crate) fn is_short(i: &Instruction) -> bool {
    (0..i.op_count()).any(|n| i.op_kind(n) == OpKind::Memory) && has_short_address(i)
}

/// Returns true for MOV to a segment register, and POP of one that moves RSP by the mode's full size.
pub(super) fn loads_segment(code: Code) -> bool {
    matches!(
        code,
        Code::Mov_Sreg_rm16
            | Code::Mov_Sreg_r32m16
            | Code::Mov_Sreg_r64m16
            | Code::Popd_ES
            | Code::Popd_DS
            | Code::Popd_FS
            | Code::Popd_GS
            | Code::Popq_FS
            | Code::Popq_GS
    )
}

/// Returns true for PUSH of a segment register that moves RSP by the mode's full size.
pub(super) fn pushes_segment(code: Code) -> bool {
    matches!(
        code,
        Code::Pushd_ES
            | Code::Pushd_CS
            | Code::Pushd_SS
            | Code::Pushd_DS
            | Code::Pushd_FS
            | Code::Pushd_GS
            | Code::Pushq_FS
            | Code::Pushq_GS
    )
}
