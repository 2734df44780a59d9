//! Which instructions a trace goes on behind, and what the translator still knows after them.

use super::{decoded::Decoded, lowering::Lowering};

/// Returns true if a trace can go on behind the instruction.
pub(crate) fn is_passed(d: &Decoded) -> bool {
    d.page == 0 && !d.kind.ends_block() || knows_pages(d.kind)
}

/// Returns true for lowerings whose code adds `Emission::beyond`, or leaves that to stubs: they are right in every page
/// of a trace.
pub(crate) fn knows_pages(kind: Lowering) -> bool {
    keeps_cached(kind)
        || matches!(
            kind,
            Lowering::Leave | Lowering::Div | Lowering::Idiv | Lowering::BitString
        )
}

/// Returns true for lowerings whose code uses or updates `Emission::cached`.
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
