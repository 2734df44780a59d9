//! The `anykvm` command.

#![forbid(unsafe_code)]

fn main() {}
