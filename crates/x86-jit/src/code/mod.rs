//! Translated code: where it is in the buffer, which block is where, and what a profiler is told about it.

pub(crate) mod cache;
pub(crate) mod layout;
pub(crate) mod perf;
pub(crate) mod source;
pub(crate) mod space;
pub(crate) mod targets;
