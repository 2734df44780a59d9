//! What generated code and Rust both read and write: the vCPU's state as generated code addresses it, and why it is left.

pub mod entries;
pub mod exit;
pub mod keys;
pub mod levels;
pub mod page_guard;
pub mod requests;
pub mod state;
pub mod switches;
pub mod targets;
pub mod words;
