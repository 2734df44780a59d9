//! What generated code puts into r13 to ask for something.

/// Describes an access to the refill trampoline: the instruction's offset in its page, the size in bytes, whether it
/// writes.
pub(crate) const fn site(offset: u32, size: u32, write: bool) -> u32 {
    offset & 0xfff | size << 12 | (write as u32) << WRITES.trailing_zeros()
}

/// Bit of a [`site`]: the access is a write.
pub(crate) const WRITES: u32 = 1 << 20;

/// Bit of a [`site`]: if the access page-faults, that fault is what the instruction raises, whatever else it does.
pub const RAISES: u32 = 1 << 25;

/// Bit of a group's [`site`]: the address is that of the access that probes.
pub const FIRST: u32 = 1 << 26;

/// The answer for an access that the interpreter has to make, whose address is in `SPILL`. No host address is 1.
pub const ACCESS: u64 = 1;

/// Puts the number of an inline cache above a [`site`] or a [`branch`].
pub(crate) const fn with_inline_cache(site: u32, cache: usize) -> u64 {
    site as u64 | (cache as u64) << 32
}

/// The bits from here on of a per-site entry's [`site`] are the entry's number.
pub(crate) const SITE_ENTRY_SHIFT: u32 = 32;

/// How many misses of a per-site entry there are before Rust is told: a power of two.
pub const SITE_ENTRY_MISSES: u32 = 128;

/// Returns true if the access is a write.
pub const fn writes(site: u32) -> bool {
    site & WRITES != 0
}

/// Describes a branch to its trampoline: the instruction's offset in its page, and what is added to RSP.
pub(crate) const fn branch(offset: u32, pop: i32) -> u32 {
    offset & 0xfff | ((pop + 8) as u32) << 12
}

/// Bit of `Trampolines::switch`'s r13d, which stands for no access: RFLAGS.AC is to become 1. The bits below are of
/// this kind, too.
pub const SET_AC: u32 = 1 << 21;
/// RFLAGS.AC is to become 0.
pub const CLEAR_AC: u32 = 1 << 22;

/// CR0 is to become r14. Rust makes the change if they differ at most in WP; the interpreter makes others that
/// generated code has not made.
pub const SET_CR0: u32 = 1 << 28;
/// PKRU is to become r14.
pub const SET_PKRU: u32 = 1 << 29;
/// The answer to [`SET_AC`], [`CLEAR_AC`], [`SET_CR0`] and [`SET_PKRU`] if the target key has not changed.
pub const SAME_KEY: u64 = 1;
/// The answer to a change of CR0 after which the next instruction belongs to another mode.
pub(crate) const OTHER_MODE: u64 = 0;

/// SYSCALL: RCX and R11 are in memory, and the answer is the target.
pub const SYSCALL: u32 = 1 << 23;
/// SYSRETQ: as [`SYSCALL`].
pub const SYSRET: u32 = 1 << 24;

/// RDPMC: r14 is the counter's number. The answer is its value, or has bit 63 set if the interpreter has to execute the
/// instruction.
pub const RDPMC: u32 = 1 << 30;

/// The segment register whose number is in [`segment_of`] is to get the selector in r14; or with [`VERR`], [`VERW`],
/// [`LAR`] and [`LSL`], the selector is asked about. The answer to a load is [`SAME_KEY`] or [`OTHER_KEY`]. That to a
/// question has 0 or [`ZERO_FLAG`] in the lower half and LAR's or LSL's result in the upper one, or is [`NOT_KNOWN`].
pub const SEGMENT: u32 = 1 << 31;
/// The answer to a load of a segment register after which the next instruction belongs to another mode.
pub const OTHER_KEY: u64 = 2;
/// The number that stands for VERR.
pub const VERR: usize = 6;
/// The number that stands for VERW.
pub const VERW: usize = 7;
/// The number that stands for LAR.
pub const LAR: usize = 9;
/// The number that stands for LSL.
pub const LSL: usize = 10;
/// The answer that leaves VERR, VERW, LAR and LSL to the interpreter. No other answer has bit 0 set.
pub const NOT_KNOWN: u64 = 1;
/// The number that stands for a branch to another code segment in real mode: r14 has the selector, and from bit 16 on
/// the instruction pointer, which is the answer. The answer is 0 if the interpreter has to execute the instruction.
pub const FAR: usize = 8;
/// ZF where translated code has flags in memory.
pub const ZERO_FLAG: u64 = 1 << 14;

/// Describes an instruction with a selector.
pub(crate) const fn segment(offset: u32, n: usize) -> u32 {
    SEGMENT | offset & 0xfff | (n as u32) << 12
}

/// Returns the number that [`segment`] was given.
pub const fn segment_of(site: u32) -> usize {
    (site >> 12 & 15) as usize
}

/// IRETQ: r14 is RSP, which is in memory afterwards; the answer is the target.
pub const IRETQ: u32 = 1 << 27;

/// Bits of `Trampolines::save_image`'s and `Trampolines::restore_image`'s r13d, above the instruction's offset in its
/// page: what image the instruction saves or loads.
pub(crate) mod image {
    /// FXSAVE's, which has no header.
    pub(crate) const LEGACY: u32 = 1 << 12;
    /// The standard format of the XSAVE family.
    pub(crate) const STANDARD: u32 = 1 << 13;
    /// The compacted format.
    pub(crate) const COMPACT: u32 = 1 << 14;
    /// All requested components are saved, whether they are in use or not.
    pub(crate) const ALL: u32 = 1 << 15;
    /// Supervisor components may be requested, too.
    pub(crate) const SUPERVISOR: u32 = 1 << 16;
}
