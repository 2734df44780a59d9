//! KVM's ioctl numbers, structures and errno over the hypervisor's typed calls.
//!
//! There are two users. [`ioctl`] decodes a raw `ioctl(fd, number, argument)`. `anykvm-ioctls` calls the typed
//! functions behind it ([`system`], [`Vm`], [`Vcpu`], [`Device`]) without numbers and pointers. Nothing else in the
//! project knows an ioctl number, `kvm_run`'s layout or an errno.

mod compat;
mod creation;
mod device;
mod dirty_ring;
mod dispatch;
mod engine;
mod errno;
mod fork;
pub mod host_memory;
mod internal;
mod irqfd;
mod lists;
mod mapped;
mod memfd;
mod nested;
pub mod numbers;
mod objects;
mod process;
mod ring;
mod run_page;
pub mod signals;
mod stats;
pub mod system;
pub mod trace;
mod user_memory;
mod vcpu;
mod vm;
mod xen;

pub use compat::compat_page;
pub use device::Device;
pub use dispatch::{Call, FdKind, calls, ioctl, refused_count};
pub use errno::{Errno, Result};
pub use fork::{in_child as after_fork, set_borrowed};
pub use host::faults;
pub use hypervisor::{Doorbell, DoorbellSpec, IrqTrigger, Space, Vcpu as TypedVcpu, Vm as TypedVm};
pub use irqfd::{forget_irqfds, is_irqfd, write_irqfd};
pub use mapped::{Patch, Verdict, judge_mapping};
pub use objects::{
    Object, close, duplicated, forget, forget_range, known_descriptors, lookup, trust_reports,
};
pub use run_page::VCPU_MMAP_SIZE;
pub use signals::interrupt_current_thread;
pub use vcpu::Vcpu;
pub use vm::Vm;
