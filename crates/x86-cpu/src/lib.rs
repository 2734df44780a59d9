//! A vCPU's architectural state, the events pending on it, its CPUID and MSR model, and the trait through which
//! execution reaches the world.
//!
//! All engines that execute guest code work on one [`CpuState`]. They reach memory, ports, MSRs that are not CPU
//! registers, and the hypervisor through one trait, [`GuestBus`].

#![forbid(unsafe_code)]

pub mod breakpoint;
pub mod bus;
pub mod event;
pub mod features;
pub mod fp;
pub mod msr_model;
pub mod msrs;
pub mod retired;
pub mod state;

pub use breakpoint::{Breakpoint, BreakpointKind};
pub use bus::{Access, CodePage, Fault, Flush, GuestBus, HypercallForm, Privilege, Word};
pub use event::{Event, Events, Exception, PendingException, PendingInterrupt};
pub use features::{Feature, Features};
pub use fp::FpState;
pub use msrs::Msrs;
pub use retired::Retired;
pub use state::{CodeSize, CpuState, Shadow, VmmDebug};
