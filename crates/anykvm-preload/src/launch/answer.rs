//! [`Answer`]: how a system call of the program is answered.

/// How a system call is answered.
pub(super) enum Answer {
    /// With this result.
    Is(isize),
    /// By the kernel: the program makes the call itself, with its registers as the frame has them.
    Kernel,
    /// The thread ends.
    Exit,
}
