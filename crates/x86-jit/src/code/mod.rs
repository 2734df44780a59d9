//! Translated code: where it is in the buffer, which block is where, and what is told about it to a profiler.

pub(crate) mod cache;
pub(crate) mod layout;
pub(crate) mod perf;
pub(crate) mod space;
