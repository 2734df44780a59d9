//! Which guest instructions become one block: a run of code within a page, or a trace through several.

pub mod block;
pub mod trace;
