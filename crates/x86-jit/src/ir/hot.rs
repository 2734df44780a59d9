//! What is known of a block that is executed much when it is translated again.

/// What makes the translation of a block that is executed much another one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hot {
    /// Bit per instruction: its access is no good for a per-site entry.
    pub(crate) without: u128,
    /// The per-site entries that it has got, and the instructions that they are for.
    pub(crate) site_entries: Vec<(u16, u8)>,
    /// Loops within the block that make always as many turns.
    pub(crate) turns: Vec<Turns>,
    /// The way that was executed from the block on, relative to its page: it may go through calls.
    pub(crate) path: Vec<i32>,
}

/// How many turns a loop makes, and the offset of what follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turns {
    pub(crate) end: u32,
    pub(crate) turns: u8,
}
