//! What generated code and Rust both read and write: the vCPU's state as generated code addresses it, and why it is left.

pub(crate) mod exit;
pub(crate) mod keys;
pub(crate) mod page_guard;
pub(crate) mod requests;
pub(crate) mod state;
pub(crate) mod switches;
pub(crate) mod targets;
pub(crate) mod words;
