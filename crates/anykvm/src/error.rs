//! What can go wrong before the guest runs, and while it does; each is one line for the user.

use std::path::PathBuf;

/// A failure of `anykvm boot` itself (never the guest's command).
#[derive(Debug, thiserror::Error)]
pub(crate) enum BootError {
    /// A file of the user's that cannot be read.
    #[error("cannot read {what} {}: {source}", path.display())]
    Unreadable {
        /// What the file was for: "kernel", "initrd", "disk" …
        what: &'static str,
        /// As given.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A kernel image that is not one, or not whole.
    #[error("{}: {reason}", path.display())]
    BadKernel {
        /// As given.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file that cannot be a disk.
    #[error("disk {}: {reason}", path.display())]
    BadDisk {
        /// As given.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// What the guest wrote is not all in the file.
    #[error("disk '{serial}': what was written is not all in the image")]
    DiskLost {
        /// As the guest knows it.
        serial: String,
        /// Why.
        source: std::io::Error,
    },
    /// An option whose value cannot be used.
    #[error("{0}")]
    Usage(String),
    /// The guest's memory cannot hold what must go into it.
    #[error(
        "guest memory of {have_mib} MiB is too small: {what} needs at least {need_mib} MiB (--mem {need_mib}M)"
    )]
    MemoryTooSmall {
        /// `--mem`, in MiB.
        have_mib: u64,
        /// Lower bound that would do, in MiB.
        need_mib: u64,
        /// What does not fit.
        what: &'static str,
    },
    /// The host would not give the memory.
    #[error("cannot allocate {mib} MiB of guest memory: {reason}")]
    Allocate {
        /// `--mem`, in MiB.
        mib: u64,
        /// The system's reason.
        reason: String,
    },
    /// Access to guest memory outside of RAM while preparing it.
    #[error("cannot write {what} into guest memory: {reason}")]
    GuestMemory {
        /// What was being written.
        what: &'static str,
        /// The reason.
        reason: String,
    },
    /// A KVM call that failed.
    #[error("{call} failed: {errno}")]
    Kvm {
        /// The ioctl.
        call: &'static str,
        /// Its errno.
        errno: anykvm_ioctls::Error,
    },
    /// No kernel, and none can be fetched.
    #[error("{0}")]
    NoImage(String),
    /// A vCPU stopped in a way that no guest may cause.
    #[error("vCPU {id} stopped: {reason} (rip {rip:#x})")]
    VcpuStopped {
        /// Which one.
        id: u8,
        /// The exit reason.
        reason: String,
        /// Where the guest was.
        rip: u64,
    },
    /// Threads, eventfds, terminals.
    #[error("{what}: {source}")]
    Host {
        /// What was attempted.
        what: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl BootError {
    /// For `map_err` on KVM calls.
    pub(crate) fn kvm(call: &'static str) -> impl FnOnce(anykvm_ioctls::Error) -> Self {
        move |errno| Self::Kvm { call, errno }
    }

    /// For `map_err` on host calls.
    pub(crate) fn host(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Host { what, source }
    }

    /// For `map_err` on writes to guest memory.
    pub(crate) fn guest(what: &'static str) -> impl FnOnce(vm_memory::GuestMemoryError) -> Self {
        move |e| Self::GuestMemory {
            what,
            reason: e.to_string(),
        }
    }
}
