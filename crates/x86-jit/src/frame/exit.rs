//! Why translated code calls for Rust, and what it left for.

use x86_interp::RunStop;

/// Reason of a call: RIP is exact, flags are in [`crate::frame::words::FLAGS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Reason {
    /// Something was requested, or it is time to look at the clock. (Never a call.)
    Poll,
    /// The instruction at RIP is the interpreter's.
    Interpret,
    /// The code of the block at RIP has changed.
    Stale,
    /// A direct branch without a target yet (RIP is not set).
    Link,
    /// A branch at RIP whose target, in [`crate::frame::words::SPILL`], is not in the
    /// table; it is complete but for what [`crate::frame::words::ARGUMENT`] adds to RSP.
    Branch,
    /// A direct branch to another page, to the target in [`crate::frame::words::SPILL`] and from
    /// the site in the word after it, that is not in the table or is to be remembered.
    CrossPage,
    /// The instruction at RIP is the interpreter's, and the linear address of its operand is in
    /// [`crate::frame::words::SPILL`].
    Access,
    /// The block at RIP is longer than it is until a counter may overflow: another translation of it is shorter.
    TooLong,
}

impl Reason {
    pub(crate) fn of(word: u64) -> Self {
        match word {
            0 => Self::Poll,
            2 => Self::Stale,
            3 => Self::Link,
            4 => Self::Branch,
            5 => Self::CrossPage,
            6 => Self::Access,
            7 => Self::TooLong,
            _ => Self::Interpret,
        }
    }
}

/// Why translated code was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// Something was requested, or it is time to look at the clock.
    Poll,
    /// The state is not one for translated code, or the code was dropped.
    Again,
    /// An instruction of the interpreter's stopped.
    /// An instruction of the interpreter's stopped.
    Stopped(RunStop),
    /// One that it executed after translated code was left.
    Interpreted(RunStop),
}
