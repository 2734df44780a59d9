//! Which instructions a trace goes on behind, and what translating them keeps.

use super::{decoded::Decoded, lowering::Lowering};

/// A trace goes on behind it.
pub(crate) fn is_passed(d: &Decoded) -> bool {
    d.page == 0 && !d.kind.ends_block() || knows_pages(d.kind)
}

/// What is translated by code that adds `Translator::beyond`, or leaves it to stubs.
pub(crate) fn knows_pages(kind: Lowering) -> bool {
    keeps_cached(kind)
        || matches!(
            kind,
            Lowering::Leave | Lowering::Div | Lowering::Idiv | Lowering::BitString
        )
}

/// What is translated by code that knows of `Translator::cached`.
pub(crate) fn keeps_cached(kind: Lowering) -> bool {
    matches!(
        kind,
        Lowering::Nop
            | Lowering::Followed
            | Lowering::Copy
            | Lowering::CopyFp
            | Lowering::CopyAligned
            | Lowering::CopyFpAligned
            | Lowering::Lea
            | Lowering::Push
            | Lowering::Pop
            | Lowering::Jcc
    )
}
