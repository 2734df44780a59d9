//! The API of `kvm-ioctls` without a kernel.
//!
//! Types, methods, file layout and errors are those of `kvm-ioctls` 0.25, so a VMM
//! changes one line of its manifest:
//!
//! ```toml
//! kvm-ioctls = { package = "anykvm-ioctls", path = "…" }
//! ```
//!
//! Every object is a real file descriptor ([`std::os::fd::AsRawFd`]); a vCPU's can be
//! mapped as KVM's can. No `/dev/kvm` is ever opened.
//!
//! ```
//! use anykvm_ioctls::{Cap, Kvm};
//!
//! let kvm = Kvm::new()?;
//! assert_eq!(kvm.get_api_version(), 12);
//! assert!(kvm.check_extension(Cap::UserMemory));
//! # Ok::<(), anykvm_ioctls::Error>(())
//! ```

mod cap;
mod ioctls;
mod kvm_ioctls;

pub use cap::Cap;
pub use ioctls::KvmRunWrapper;
pub use ioctls::device::DeviceFd;
pub use ioctls::dirty::DirtyRing;
pub use ioctls::doorbell::{Doorbell, DoorbellQueue, DoorbellSpec, IrqTrigger, Space};
pub use ioctls::memory_change::{MemoryChange, begin_memory_change};
pub use ioctls::system::Kvm;
pub use ioctls::vcpu::{
    HypercallExit, KvmNestedStateBuffer, MsrExitReason, ReadMsrExit, SyncReg, VcpuExit, VcpuFd,
    VcpuStopper, WriteMsrExit, reg_size,
};
pub use ioctls::vm::{
    IoEventAddress, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, NoDatamatch, VmFd,
};
pub use kvm_abi::interrupt_current_thread;
pub use vmm_sys_util::errno::Error;
