//! Generators and oracles shared by tests and fuzz targets.

#![forbid(unsafe_code)]

pub mod differential;
pub mod forms;
mod random;
mod state;

pub use random::Random;
