//! Failures before the guest runs, and while it does. Each is one line for the user.

use std::path::PathBuf;

/// A failure of `anykvm boot` itself (never the guest's command).
#[derive(Debug, thiserror::Error)]
pub(crate) enum BootError {
    /// A file of the user's that cannot be read.
    #[error("cannot read {what} {}: {source}", path.display())]
    Unreadable {
        /// What the file was for: "kernel", "initrd", "disk" …
        what: &'static str,
        /// The file's path, as the user wrote it.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file that is not a kernel image, or not a whole one.
    #[error("{}: {reason}", path.display())]
    BadKernel {
        /// The file's path, as the user wrote it.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file that cannot be a disk.
    #[error("disk {}: {reason}", path.display())]
    BadDisk {
        /// The file's path, as the user wrote it.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The file does not have all that the guest wrote.
    #[error("disk '{serial}': what was written is not all in the image")]
    DiskLost {
        /// The disk's serial number, by which the guest knows it.
        serial: String,
        /// The system's reason.
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
        /// A size that would be enough, in MiB.
        need_mib: u64,
        /// What does not fit.
        what: &'static str,
    },
    /// The host has refused the memory.
    #[error("cannot allocate {mib} MiB of guest memory: {reason}")]
    Allocate {
        /// `--mem`, in MiB.
        mib: u64,
        /// The system's reason.
        reason: String,
    },
    /// The RAM does not reach to where something is to be written before the guest starts.
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
    /// There is no kernel, and none can be fetched.
    #[error("{0}")]
    NoImage(String),
    /// A vCPU has stopped in a way that no guest may cause.
    #[error("vCPU {id} stopped: {reason} (rip {rip:#x})")]
    VcpuStopped {
        /// The vCPU's number.
        id: u8,
        /// The exit reason.
        reason: String,
        /// The guest's RIP.
        rip: u64,
    },
    /// A call of the host has failed, for a thread, an eventfd or a terminal.
    #[error("{what}: {source}")]
    Host {
        /// What was attempted.
        what: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl BootError {
    /// Makes an error of a KVM call, for `map_err`.
    pub(crate) fn kvm(call: &'static str) -> impl FnOnce(anykvm_ioctls::Error) -> Self {
        move |errno| Self::Kvm { call, errno }
    }

    /// Makes an error of a host call, for `map_err`.
    pub(crate) fn host(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Host { what, source }
    }

    /// Makes an error of a write to guest memory, for `map_err`.
    pub(crate) fn guest(what: &'static str) -> impl FnOnce(vm_memory::GuestMemoryError) -> Self {
        move |e| Self::GuestMemory {
            what,
            reason: e.to_string(),
        }
    }
}
