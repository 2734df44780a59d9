//! KVM's semantics: VM, vCPU and device objects, run loop, paravirtualisation, clock.
//!
//! Typed calls in, typed exits out: methods are named after the ioctls and take
//! `kvm-bindings` structures, but no fd, errno, ioctl number or raw pointer
//! appears here, and no environment variable (`kvm-abi` has those).

#![forbid(unsafe_code)]

mod bell;
mod engine_options;
mod error;
mod exit;
mod limits;
mod shared;
mod sink;
pub mod system;
mod vcpu;
mod vm;

pub use engine_options::{Engine, EngineOptions, Harvest, Messages, Policy, Profiler};
pub use error::Error;
pub use io_bus::{DoorbellSpec, RingEntry, RingMemory, Space};
pub use irqchip::IoapicState;

pub use guest_memory::{DirtyRingMemory, HostChange};

/// Largest number of events of KVM_SET_PMU_EVENT_FILTER.
pub const MAX_FILTERED_EVENTS: usize = pmu::MAX_EVENTS;

pub use bell::Subscriber;
pub use exit::{Answer, Exit, HyperVExit, IoData, Question, RunInput, RunPage, RunStatus};
pub use sink::{StatKind, StatsSink};
pub use system::hv_msrs::index::SYNDBG_CONTROL;
pub use vcpu::{VCPU_STATS, Vcpu, XenRunstate, XenVcpuAttr};
pub use vm::irqfd_direct;
pub use vm::{
    Doorbell, EventFilter, IrqTrigger, MsrRange, Route, RouteTarget, VM_STATS, Vm, XEN_PRIORITY,
    XenAttr, XenPort,
};

/// Result of a hypervisor call.
pub type Result<T> = core::result::Result<T, Error>;
