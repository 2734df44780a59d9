//! Why translated code returned.

/// Reason of an exit; RIP is exact, flags are in [`crate::area::FLAGS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Reason {
    /// Something was requested, or it is time to look at the clock.
    Poll,
    /// The instruction at RIP is the interpreter's.
    Interpret,
    /// The code of the block at RIP has changed.
    Stale,
    /// A direct branch without a target yet (RIP is not set).
    Link,
    /// A branch at RIP whose target, in [`crate::area::SPILL`], is not in the
    /// table; it is complete but for what [`crate::area::ARGUMENT`] adds to RSP.
    Branch,
}

impl Reason {
    pub(crate) fn of(word: u64) -> Self {
        match word {
            0 => Self::Poll,
            2 => Self::Stale,
            3 => Self::Link,
            4 => Self::Branch,
            _ => Self::Interpret,
        }
    }
}
