//! Which instructions a trace goes on behind, and what translating them keeps.

use super::{decoded::Decoded, kind::Kind};

/// A trace goes on behind it.
pub(crate) fn is_passed(d: &Decoded) -> bool {
    d.page == 0 && !d.kind.ends_block() || knows_pages(d.kind)
}

/// What is translated by code that adds `Translator::beyond`, or leaves it to stubs.
pub(crate) fn knows_pages(kind: Kind) -> bool {
    keeps_cached(kind) || matches!(kind, Kind::Leave | Kind::Div | Kind::Idiv | Kind::BitString)
}

/// What is translated by code that knows of `Translator::cached`.
pub(crate) fn keeps_cached(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Nop
            | Kind::Followed
            | Kind::Copy
            | Kind::CopyFp
            | Kind::CopyAligned
            | Kind::CopyFpAligned
            | Kind::Lea
            | Kind::Push
            | Kind::Pop
            | Kind::Jcc
    )
}
