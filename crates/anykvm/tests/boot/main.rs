//! `anykvm boot` from the outside: what it refuses, and how it ends.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod combinations;
mod confined;
mod disks;
mod endings;
mod errors;
mod fresh;
mod guest;
mod images;
mod linux;
mod migrate;
mod streams;
mod terminal;
