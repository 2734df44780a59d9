//! Retired events that software can count exactly for performance counters.
//!
//! An instruction belongs to several streams at once: each has a bit in a mask. Far transfers are
//! far JMP, CALL and RET, INT n, IRET, SYSCALL, SYSRET, SYSENTER, SYSEXIT and RSM.

/// Instructions. One with a REP prefix counts once, however often it repeats.
pub const INSTRUCTIONS: usize = 0;
/// Branches of all kinds, taken or not.
pub const BRANCHES: usize = 1;
/// Conditional branches: Jcc, JrCXZ, LOOP.
pub const CONDITIONAL: usize = 2;
/// Conditional branches that are taken.
pub const CONDITIONAL_TAKEN: usize = 3;
/// Conditional branches that are not taken.
pub const CONDITIONAL_NOT_TAKEN: usize = 4;
/// Near branches that are taken. JMP, CALL and RET always are.
pub const NEAR_TAKEN: usize = 5;
/// Near branches that are taken, and far transfers.
pub const TAKEN: usize = 6;
/// Near calls.
pub const NEAR_CALLS: usize = 7;
/// Near returns.
pub const NEAR_RETURNS: usize = 8;
/// Near jumps and calls through a register or memory.
pub const NEAR_INDIRECT: usize = 9;
/// Far transfers.
pub const FAR: usize = 10;
/// Instructions that read memory, also a stack, and are not [`UPDATES`].
pub const LOADS: usize = 11;
/// Instructions that write memory, also a stack, and are not [`UPDATES`].
pub const STORES: usize = 12;
/// Instructions that read a place in memory and write it again.
pub const UPDATES: usize = 13;
/// Instructions that read or write memory. One that reads one place and writes another belongs to [`LOADS`] and to
/// [`STORES`], and is one here.
pub const MEMORY: usize = 14;
/// Number of streams.
pub const STREAMS: usize = 15;

/// Streams with few events in most programs: calls, returns, indirect branches and far transfers. Whether an
/// instruction belongs to one follows from its form alone.
pub const RARE: u16 = bit(NEAR_CALLS) | bit(NEAR_RETURNS) | bit(NEAR_INDIRECT) | bit(FAR);

/// Returns the stream's bit in a mask.
pub const fn bit(stream: usize) -> u16 {
    1 << stream
}
