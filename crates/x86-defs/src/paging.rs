//! Page-table entries (SDM vol. 3, 4.3 to 4.6).

/// Bytes in a page.
pub const PAGE_SIZE: u64 = 4096;
/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;

/// Present.
pub const P: u64 = 1 << 0;
/// Writable.
pub const RW: u64 = 1 << 1;
/// User.
pub const US: u64 = 1 << 2;
/// Write-through.
pub const PWT: u64 = 1 << 3;
/// Cache disable.
pub const PCD: u64 = 1 << 4;
/// Accessed.
pub const A: u64 = 1 << 5;
/// Dirty.
pub const D: u64 = 1 << 6;
/// Large page (in a non-leaf level).
pub const PS: u64 = 1 << 7;
/// Global.
pub const G: u64 = 1 << 8;
/// No execute.
pub const NX: u64 = 1 << 63;
/// Position of the protection key in a leaf.
pub const PKEY_SHIFT: u32 = 59;
/// Address field of an 8-byte entry, before MAXPHYADDR.
pub const ADDR_MASK: u64 = 0x000f_ffff_ffff_f000;
