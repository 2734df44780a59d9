//! A guest instruction as the translator sees it: decoded, of a kind, with the facts that are asked of it again and again.

pub mod branch;
pub mod cause;
pub mod decoded;
pub mod flags;
pub mod hot;
pub mod lowering;
pub mod member;
pub mod memory;
pub mod mode;
pub mod narrow;
pub mod passed;
pub mod segment;
pub mod source;
pub mod streams;
pub mod string;
