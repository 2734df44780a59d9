//! Register numbers in instruction-encoding order (SDM vol. 2, table 2-8).

/// RAX.
pub const RAX: usize = 0;
/// RCX.
pub const RCX: usize = 1;
/// RDX.
pub const RDX: usize = 2;
/// RBX.
pub const RBX: usize = 3;
/// RSP.
pub const RSP: usize = 4;
/// RBP.
pub const RBP: usize = 5;
/// RSI.
pub const RSI: usize = 6;
/// RDI.
pub const RDI: usize = 7;
/// R8.
pub const R8: usize = 8;
/// R9.
pub const R9: usize = 9;
/// R10; R11 to R15 follow.
pub const R10: usize = 10;
/// R11, which SYSCALL fills with RFLAGS.
pub const R11: usize = 11;

/// ES.
pub const ES: usize = 0;
/// CS.
pub const CS: usize = 1;
/// SS.
pub const SS: usize = 2;
/// DS.
pub const DS: usize = 3;
/// FS.
pub const FS: usize = 4;
/// GS.
pub const GS: usize = 5;

/// Slot of the register file that always reads zero: an absent base or index.
pub const ZERO: usize = 16;
/// Slot of the register file that holds RIP.
pub const RIP: usize = 17;
/// Slots in the register file: a power of two, so that a masked index needs no bounds check.
pub const NR_SLOTS: usize = 32;
