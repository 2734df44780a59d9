//! Why translated code calls Rust, and why it is left.

use x86_interp::RunStop;

/// The reason of a call. RIP is exact unless said otherwise, and flags are in [`crate::frame::words::FLAGS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Reason {
    /// Something was requested, or it is time to look at the clock. (Never the reason of a call.)
    Poll,
    /// The interpreter has to execute the instruction at RIP.
    Interpret,
    /// The code of the block at RIP has changed.
    Stale,
    /// A direct branch is not linked yet. (RIP is not set.)
    Link,
    /// A branch at RIP has a target, in [`crate::frame::words::SPILL`], that is not in the target table. The branch is
    /// complete but for what [`crate::frame::words::ARGUMENT`] adds to RSP.
    Branch,
    /// A direct branch to another page has a target, in [`crate::frame::words::SPILL`], that is not in the target table
    /// or is to be linked. The next word of the frame has its site's number.
    CrossPage,
    /// The interpreter has to execute the instruction at RIP, whose operand's linear address is in
    /// [`crate::frame::words::SPILL`].
    Access,
    /// The block at RIP is longer than the rest until a counter may overflow: its split translation is shorter.
    TooLong,
}

impl Reason {
    /// Returns the reason that generated code has left a number for.
    pub fn of(word: u64) -> Self {
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
pub enum Left {
    /// Something was requested, or it is time to look at the clock.
    Poll,
    /// The state is not one for translated code, or the code was dropped.
    Again,
    /// An instruction that the interpreter executed for translated code has stopped.
    Stopped(RunStop),
    /// An instruction that the interpreter executed after translated code was left has stopped.
    Interpreted(RunStop),
}
