//! What is decided about a whole block before any of its code is emitted.

pub(crate) mod groups;
