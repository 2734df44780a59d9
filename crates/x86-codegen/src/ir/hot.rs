//! What is known of a hot block when it is translated again.

/// What makes the translation of a hot block different from that of a cold one.
#[derive(Clone, Debug, Default)]
pub struct Hot {
    /// Bit per instruction whose access is not to get a per-site entry, because it missed too often.
    pub without: u128,
    /// The per-site entries that the block has got, and the numbers of the instructions that they are for.
    pub site_entries: Vec<(u16, u8)>,
    /// Loops within the block that always make the same number of iterations.
    pub turns: Vec<Turns>,
    /// The path that was executed from the block on, which may go through calls: distances from the block's page.
    pub path: Vec<i32>,
}

/// How many iterations a loop makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turns {
    /// Offset in the page of what follows the loop.
    pub end: u32,
    /// The number of iterations.
    pub turns: u8,
}
