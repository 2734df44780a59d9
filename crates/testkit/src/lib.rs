//! Small guests and builders for tests.

#![forbid(unsafe_code)]

pub mod boot;
mod flat_bus;
mod mmu_bus;
mod surroundings;

pub use flat_bus::FlatBus;
pub use mmu_bus::MmuBus;
