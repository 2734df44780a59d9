//! The one place where a refusal becomes an errno (KVM API document, the
//! "Errors" list of each ioctl).

use std::fmt;

/// A Linux error number, positive as in `errno(3)`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

impl Errno {
    /// The error a C caller reads as `E2BIG`, `EINVAL` …: `value` is one of `libc`'s constants.
    pub const fn new(value: i32) -> Self {
        Self(value)
    }

    /// The positive number.
    pub const fn get(self) -> i32 {
        self.0
    }

    /// The calling thread's `errno`, as a failed libc call left it.
    pub fn last() -> Self {
        std::io::Error::last_os_error().into()
    }

    /// Returns the name of the number, if KVM ever returns it.
    pub fn static_name(self) -> Option<&'static str> {
        let row = NAMES.iter().find(|(value, _)| *value == self.0);
        row.map(|(_, name)| *name)
    }

    /// Returns the name of the number for documents; the decimal number if KVM never returns it.
    pub fn name(self) -> String {
        self.static_name()
            .map_or_else(|| self.0.to_string(), str::to_owned)
    }
}

const NAMES: &[(i32, &str)] = &[
    (libc::E2BIG, "E2BIG"),
    (libc::EAGAIN, "EAGAIN"),
    (libc::EBADF, "EBADF"),
    (libc::EBUSY, "EBUSY"),
    (libc::EEXIST, "EEXIST"),
    (libc::EFAULT, "EFAULT"),
    (libc::EINTR, "EINTR"),
    (libc::EINVAL, "EINVAL"),
    (libc::EIO, "EIO"),
    (libc::EMFILE, "EMFILE"),
    (libc::ENODEV, "ENODEV"),
    (libc::ENOENT, "ENOENT"),
    (libc::ENOMEM, "ENOMEM"),
    (libc::ENOSPC, "ENOSPC"),
    (libc::ENOTTY, "ENOTTY"),
    (libc::ENXIO, "ENXIO"),
    (libc::EOPNOTSUPP, "EOPNOTSUPP"),
    (libc::EPERM, "EPERM"),
];

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl std::error::Error for Errno {}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<hypervisor::Error> for Errno {
    fn from(error: hypervisor::Error) -> Self {
        use hypervisor::Error;
        Self(match error {
            // "an argument is invalid", the general refusal of the API document.
            Error::InvalidArgument => libc::EINVAL,
            // KVM_IOEVENTFD deassign, KVM_GET_DIRTY_LOG of a slot without a log.
            Error::NotFound => libc::ENOENT,
            // KVM_CREATE_VCPU, KVM_SET_USER_MEMORY_REGION overlap, KVM_IOEVENTFD.
            Error::Exists => libc::EEXIST,
            // KVM_GET_IRQCHIP, KVM_IRQ_LINE … without the in-kernel chip.
            Error::NoSuchDevice => libc::ENXIO,
            // The FAM lists: KVM_GET_CPUID2, KVM_GET_MSR_INDEX_LIST …
            Error::TooBig(_) => libc::E2BIG,
            // KVM_IRQFD with an eventfd in use, KVM_SET_BOOT_CPU_ID after vCPUs.
            Error::Busy => libc::EBUSY,
            // KVM_RUN of a vCPU that waits for its start-up IPI.
            Error::Again => libc::EAGAIN,
            // KVM_RUN with a signal pending or immediate_exit set.
            Error::Interrupted => libc::EINTR,
            Error::NoMemory => libc::ENOMEM,
            // "ENOTTY: the ioctl is not defined for this fd".
            Error::NotSupported => libc::ENOTTY,
            Error::Fault => libc::EFAULT,
            // KVM_REGISTER_COALESCED_MMIO with too many zones, io bus full.
            Error::NoSpace => libc::ENOSPC,
            Error::Permission => libc::EPERM,
            Error::BadFd => libc::EBADF,
            Error::TooManyFiles => libc::EMFILE,
            Error::Io => libc::EIO,
        })
    }
}

/// Result of everything in this crate.
pub type Result<T> = std::result::Result<T, Errno>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_has_the_documented_errno() {
        use hypervisor::Error;
        let rows = [
            (Error::InvalidArgument, "EINVAL"),
            (Error::NotFound, "ENOENT"),
            (Error::Exists, "EEXIST"),
            (Error::NoSuchDevice, "ENXIO"),
            (Error::TooBig(3), "E2BIG"),
            (Error::Busy, "EBUSY"),
            (Error::Again, "EAGAIN"),
            (Error::Interrupted, "EINTR"),
            (Error::NoMemory, "ENOMEM"),
            (Error::NotSupported, "ENOTTY"),
            (Error::Fault, "EFAULT"),
            (Error::NoSpace, "ENOSPC"),
            (Error::Permission, "EPERM"),
            (Error::BadFd, "EBADF"),
            (Error::TooManyFiles, "EMFILE"),
            (Error::Io, "EIO"),
        ];
        for (error, name) in rows {
            assert_eq!(Errno::from(error).name(), name, "{error:?}");
        }
        assert_eq!(Errno::new(9999).name(), "9999");
    }
}
