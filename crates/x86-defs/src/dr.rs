//! Debug registers (SDM vol. 3, 18.2).

/// DR6 value after reset, and the bits that read as one.
pub const DR6_FIXED1: u64 = 0xffff_0ff0;
/// DR6: debug-register access detected.
pub const DR6_BD: u64 = 1 << 13;
/// DR6: single step.
pub const DR6_BS: u64 = 1 << 14;
/// DR6: task switch.
pub const DR6_BT: u64 = 1 << 15;
/// DR6: restricted transactional memory, active low.
pub const DR6_RTM: u64 = 1 << 16;
/// DR7 value after reset.
pub const DR7_FIXED1: u64 = 0x400;
/// DR7: all local and global enables.
pub const DR7_ENABLES: u64 = 0xff;
/// DR7: general detect.
pub const DR7_GD: u64 = 1 << 13;
/// DR7 bits that a guest may set.
pub const DR7_WRITABLE: u64 = 0xffff_2bff;
