//! Why a call was refused; one variant per errno that KVM documents.

/// A refused call. `kvm-abi` maps each variant to its errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// EINVAL.
    #[error("invalid argument")]
    InvalidArgument,
    /// ENOENT.
    #[error("no such entry")]
    NotFound,
    /// EEXIST.
    #[error("already exists")]
    Exists,
    /// ENXIO: the in-kernel chip does not exist.
    #[error("no such device")]
    NoSuchDevice,
    /// E2BIG: the list needs this many entries.
    #[error("the list needs {0} entries")]
    TooBig(usize),
    /// EBUSY.
    #[error("busy")]
    Busy,
    /// EAGAIN: the vCPU waits for a start-up IPI, or was unblocked.
    #[error("try again")]
    Again,
    /// EINTR.
    #[error("interrupted")]
    Interrupted,
    /// ENOMEM.
    #[error("out of memory")]
    NoMemory,
    /// ENOTTY: no such ioctl on this object.
    #[error("not supported")]
    NotSupported,
    /// EFAULT.
    #[error("bad address")]
    Fault,
    /// ENOSPC.
    #[error("no space")]
    NoSpace,
    /// EPERM.
    #[error("not permitted")]
    Permission,
    /// EBADF.
    #[error("bad file descriptor")]
    BadFd,
    /// EMFILE.
    #[error("too many open files")]
    TooManyFiles,
    /// EIO.
    #[error("input/output error")]
    Io,
}
