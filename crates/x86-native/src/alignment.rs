//! Which memory operands must be aligned to their size (SDM vol. 1, 14.9; vol. 2,
//! tables 2-19 to 2-22): #GP(0) otherwise.

use iced_x86::{EncodingKind, Instruction, Mnemonic};

/// Returns true if the memory operand must be aligned. Legacy SSE operands of 16 bytes must be, with few exceptions;
/// VEX operands need not be, with few exceptions. The answer depends only on the form, which has to be one that
/// [`crate::form`] knows.
pub fn must_be_aligned(i: &Instruction) -> bool {
    use Mnemonic as M;
    let legacy = i.code().encoding() == EncodingKind::Legacy
        && i.memory_size().size() == 16
        && !matches!(
            i.mnemonic(),
            M::Movups
                | M::Movupd
                | M::Movdqu
                | M::Lddqu
                | M::Pcmpestri
                | M::Pcmpestrm
                | M::Pcmpistri
                | M::Pcmpistrm
                | M::Pcmpestri64
                | M::Pcmpestrm64
        );
    legacy || is_aligned_move(i.mnemonic())
}

/// Returns true for moves that require alignment in every encoding, whatever MXCSR.MM says.
pub fn is_aligned_move(m: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        m,
        M::Movaps
            | M::Movapd
            | M::Movdqa
            | M::Movntps
            | M::Movntpd
            | M::Movntdq
            | M::Movntdqa
            | M::Vmovaps
            | M::Vmovapd
            | M::Vmovdqa
            | M::Vmovntps
            | M::Vmovntpd
            | M::Vmovntdq
            | M::Vmovntdqa
    )
}
