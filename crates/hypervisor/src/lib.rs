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
pub use io_bus::{DoorbellSpec, RingEntry, RingMemory, Space};
pub use irqchip::IoapicState;

pub use guest_memory::DirtyRingMemory;

/// Events of KVM_SET_PMU_EVENT_FILTER at most.
pub const MAX_FILTERED_EVENTS: usize = pmu::MAX_EVENTS;

pub use exit::{Answer, Exit, HyperVExit, IoData, Question, RunInput, RunPage, RunStatus};
pub use vcpu::hyperv::index::SYNDBG_CONTROL;
pub use vcpu::{
    Vcpu,
    stats::{StatKind, StatsSink, VCPU_STATS},
};
pub use vm::irqfd_direct;
pub use vm::{
    Doorbell, EventFilter, IrqTrigger, MsrRange, Route, RouteTarget, Subscriber, VM_STATS, Vm,
};

/// Result of a hypervisor call.
pub type Result<T> = core::result::Result<T, Error>;
