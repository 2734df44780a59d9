//! Decisions about a whole block that are made before any of its code is emitted.

pub mod groups;
