//! Small guests and builders for tests.

#![forbid(unsafe_code)]

pub mod boot;
mod flat_bus;

pub use flat_bus::FlatBus;
