//! A guest instruction as the translator sees it: decoded, of a kind, with the facts that are asked of it again and again.

pub(crate) mod branch;
pub(crate) mod cause;
pub(crate) mod decoded;
pub(crate) mod flags;
pub(crate) mod hot;
pub(crate) mod lowering;
pub(crate) mod member;
pub(crate) mod memory;
pub(crate) mod mode;
pub(crate) mod narrow;
pub(crate) mod passed;
pub(crate) mod segment;
pub(crate) mod source;
pub(crate) mod streams;
pub(crate) mod string;
