//! Moves guests from one process to another, or into a file and out of it: `anykvm migrate`, `anykvm boot --incoming`.
//!
//! A running `anykvm boot --control PATH` listens for commands ([`control`]), which `anykvm migrate` sends
//! ([`client`]). [`source`] sends a guest by [`stream`], and [`target`] receives it. Each device and vCPU saves and
//! loads its own state.

mod chips;
mod client;
mod config;
mod control;
mod line;
mod memory;
mod source;
mod stream;
mod target;

pub(crate) use client::migrate;
pub(crate) use config::{Config, DiskInfo};
pub(crate) use control::listen;
pub(crate) use source::Machine;
pub(crate) use target::{Arrival, Built};
