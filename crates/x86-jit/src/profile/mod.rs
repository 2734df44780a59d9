//! Which blocks are hot, and what is known about them.

pub(crate) mod hot;
