//! How parts of the vCPU's state are stored while translated code runs: arithmetic flags, FP control.

use x86_defs::rflags;

/// Bits of the x87 control word that mask all exceptions.
pub const X87_MASKED: u16 = 0x3f;

/// Bit of the x87 status word: an exception waits. A state image may have it set whatever the masks say.
pub const X87_PENDING: u16 = 0x80;

/// Bits of MXCSR that translated code runs with whatever they are: flags, DAZ, rounding, FTZ. The others are the masks,
/// MM, and reserved bits.
pub const MXCSR_FREE: u32 = 0x3f | 0x40 | 0x6000 | 0x8000;

/// Flags that SYSRETQ may load without the interpreter.
pub const SYSRET_FLAGS: u64 =
    rflags::ARITH | rflags::DF | rflags::IF | rflags::IOPL | rflags::FIXED1 | rflags::ID;

/// Packs RFLAGS' arithmetic flags as LAHF and SETO leave them in AX.
pub fn pack(f: u64) -> u64 {
    (f & 0xd5 | 2) << 8 | f >> 11 & 1
}

/// The inverse of [`pack`].
pub fn unpack(ax: u64) -> u64 {
    ax >> 8 & 0xd5 | (ax & 1) << 11
}
