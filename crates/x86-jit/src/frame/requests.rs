//! What generated code says in r13 when it asks for something.

/// What the refill trampoline has to know of an access.
pub(crate) const fn site(offset: u32, size: u32, write: bool) -> u32 {
    offset & 0xfff | size << 12 | (write as u32) << WRITES.trailing_zeros()
}

/// Bit of a [`site`].
pub(crate) const WRITES: u32 = 1 << 20;

/// Bit of a [`site`]: a page fault of the access is what the instruction raises, whatever else it does.
pub(crate) const RAISES: u32 = 1 << 25;

/// Bit of a group's [`site`]: its address is that of the access that probes.
pub(crate) const FIRST: u32 = 1 << 26;

/// The answer for an access that the interpreter makes, whose address is in `SPILL`. No host address.
pub(crate) const ACCESS: u64 = 1;

/// What stands above a [`site`] or a [`branch`] that has an inline cache: its number.
pub(crate) const fn with_inline_cache(site: u32, cache: usize) -> u64 {
    site as u64 | (cache as u64) << 32
}

/// The bits of a per-site entry's site from here on are its number.
pub(crate) const SITE_ENTRY_SHIFT: u32 = 32;

/// Misses of a per-site entry after which Rust is told: a power of two.
pub(crate) const SITE_ENTRY_MISSES: u32 = 128;

/// Whether it is a write.
pub(crate) const fn writes(site: u32) -> bool {
    site & WRITES != 0
}

/// What the branch trampoline has to know: the instruction's offset, and what is added to RSP.
pub(crate) const fn branch(offset: u32, pop: i32) -> u32 {
    offset & 0xfff | ((pop + 8) as u32) << 12
}

/// Bits of `Trampolines::switch`'s r13d that stand for something other than an
/// access: RFLAGS.AC becomes this.
pub(crate) const SET_AC: u32 = 1 << 21;

pub(crate) const CLEAR_AC: u32 = 1 << 22;

/// CR0 becomes r14, which differs from it in WP at most; else the interpreter does it, unless generated code has.
pub(crate) const SET_CR0: u32 = 1 << 28;
/// PKRU becomes r14.
pub(crate) const SET_PKRU: u32 = 1 << 29;
/// The result of [`SET_AC`], [`CLEAR_AC`], [`SET_CR0`] and [`SET_PKRU`] when mapping and mode have not changed.
pub(crate) const SAME_KEY: u64 = 1;
/// That of a change of CR0 after which what comes next belongs to another mode.
pub(crate) const OTHER_MODE: u64 = 0;

/// SYSCALL and SYSRETQ: RCX and R11 are in memory, the result is the target.
pub(crate) const SYSCALL: u32 = 1 << 23;

pub(crate) const SYSRET: u32 = 1 << 24;

/// RDPMC: r14 is the counter's number; the result is its value, or has bit 63 set: the interpreter does it.
pub(crate) const RDPMC: u32 = 1 << 30;

/// IRETQ: r14 is RSP, which is in memory afterwards; the result is the target.
pub(crate) const IRETQ: u32 = 1 << 27;
