//! Retired events: what counters of performance can count exactly in software.
//!
//! An instruction belongs to several streams at once: each has a bit in a mask. Far transfers are
//! far JMP, CALL and RET, INT n, IRET, SYSCALL, SYSRET, SYSENTER, SYSEXIT and RSM.

/// Instructions. One with a REP prefix is one, whatever its count.
pub const INSTRUCTIONS: usize = 0;
/// Branches of all kinds, taken or not.
pub const BRANCHES: usize = 1;
/// Conditional branches: Jcc, JrCXZ, LOOP.
pub const CONDITIONAL: usize = 2;
/// Those of them that are taken.
pub const CONDITIONAL_TAKEN: usize = 3;
/// Those that are not.
pub const CONDITIONAL_NOT_TAKEN: usize = 4;
/// Near branches that are taken: JMP, CALL and RET always are.
pub const NEAR_TAKEN: usize = 5;
/// The same, and far transfers.
pub const TAKEN: usize = 6;
/// Near calls.
pub const NEAR_CALLS: usize = 7;
/// Near returns.
pub const NEAR_RETURNS: usize = 8;
/// Near jumps and calls through a register or memory.
pub const NEAR_INDIRECT: usize = 9;
/// Far transfers.
pub const FAR: usize = 10;
/// Number of streams.
pub const STREAMS: usize = 11;

/// What there may be little of: calls, returns, indirect branches and far transfers. Each is of an instruction's form.
pub const RARE: u16 = bit(NEAR_CALLS) | bit(NEAR_RETURNS) | bit(NEAR_INDIRECT) | bit(FAR);

/// The mask's bit of a stream.
pub const fn bit(stream: usize) -> u16 {
    1 << stream
}
