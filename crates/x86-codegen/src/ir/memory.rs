//! Questions about memory operands.

use iced_x86::{Instruction, Mnemonic, Register};

use super::lowering::Lowering;

/// Returns true if the operand is at a constant distance from RSP.
pub(crate) fn is_on_stack(i: &Instruction) -> bool {
    matches!(i.memory_base(), Register::RSP | Register::ESP)
        && i.memory_index() == Register::None
        && !matches!(i.memory_segment(), Register::FS | Register::GS)
}

/// Returns true if a page fault of the instruction's first access is what the instruction raises in any case. Masked
/// moves, for one, need not make their accesses.
pub(crate) fn raises_its_fault(kind: Lowering, i: &Instruction) -> bool {
    use Mnemonic as M;
    match kind {
        Lowering::Copy
        | Lowering::CopyAligned
        | Lowering::Push
        | Lowering::Pop
        | Lowering::Leave => true,
        Lowering::CopyFp | Lowering::CopyFpAligned => matches!(
            i.mnemonic(),
            M::Movaps
                | M::Movups
                | M::Movdqa
                | M::Movdqu
                | M::Movd
                | M::Movq
                | M::Vmovaps
                | M::Vmovups
                | M::Vmovdqa
                | M::Vmovdqu
                | M::Vmovd
                | M::Vmovq
        ),
        _ => false,
    }
}
