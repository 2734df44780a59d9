//! KVM's semantics: VM, vCPU and device objects, run loop, paravirtualisation, clock.
//!
//! Typed calls in, typed exits out: methods are named after the ioctls and take
//! `kvm-bindings` structures, but no fd, errno, ioctl number or raw pointer
//! appears here (`kvm-abi` has those).

#![forbid(unsafe_code)]

mod error;
mod exit;
pub mod system;
mod vcpu;
mod vm;

pub use error::Error;
pub use io_bus::{RingEntry, RingMemory};
pub use irqchip::IoapicState;

pub use exit::{Answer, Exit, IoData, RunInput, RunOutput, RunStatus};
pub use vcpu::{
    Vcpu,
    stats::{StatKind, StatsSink, VCPU_STATS},
};
pub use vm::{MsrRange, Route, RouteTarget, VM_STATS, Vm};

/// Result of a hypervisor call.
pub type Result<T> = core::result::Result<T, Error>;
