//! [`Answer`]: what becomes of a system call of the program.

/// What becomes of a call.
pub(super) enum Answer {
    /// This is its result.
    Is(isize),
    /// The program makes it itself, with its registers as the frame has them.
    Kernel,
    /// The thread ends.
    Exit,
}
