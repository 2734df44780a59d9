//! Which guest instructions become one block: a run of code within a page, or a trace through several.

pub(crate) mod block;
pub(crate) mod trace;
