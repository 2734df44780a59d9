//! Small guests and builders for tests.

#![forbid(unsafe_code)]

pub mod flat_bus;

pub use flat_bus::{FlatBus, PortAccess};
