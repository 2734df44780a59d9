//! A guest instruction as the translator sees it: decoded, of a kind, with the facts that are asked of it again and again.

pub(crate) mod decoded;
pub(crate) mod kind;
