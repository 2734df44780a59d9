//! RFLAGS (SDM vol. 1, 3.4.3).

/// Carry.
pub const CF: u64 = 1 << 0;
/// Always one.
pub const FIXED1: u64 = 1 << 1;
/// Parity of the low result byte.
pub const PF: u64 = 1 << 2;
/// Carry out of bit 3.
pub const AF: u64 = 1 << 4;
/// Zero.
pub const ZF: u64 = 1 << 6;
/// Sign.
pub const SF: u64 = 1 << 7;
/// Trap: single step.
pub const TF: u64 = 1 << 8;
/// Interrupts enabled.
pub const IF: u64 = 1 << 9;
/// String operations go down.
pub const DF: u64 = 1 << 10;
/// Signed overflow.
pub const OF: u64 = 1 << 11;
/// I/O privilege level, two bits.
pub const IOPL: u64 = 3 << 12;
/// Position of IOPL.
pub const IOPL_SHIFT: u32 = 12;
/// Nested task.
pub const NT: u64 = 1 << 14;
/// Resume: suppresses instruction breakpoints once.
pub const RF: u64 = 1 << 16;
/// Virtual-8086 mode.
pub const VM: u64 = 1 << 17;
/// Alignment check; with CR4.SMAP also the supervisor's user-access override.
pub const AC: u64 = 1 << 18;
/// Virtual interrupt flag.
pub const VIF: u64 = 1 << 19;
/// Virtual interrupt pending.
pub const VIP: u64 = 1 << 20;
/// CPUID available.
pub const ID: u64 = 1 << 21;

/// The six flags that arithmetic writes.
pub const ARITH: u64 = CF | PF | AF | ZF | SF | OF;
/// Every bit that can be one.
pub const DEFINED: u64 = ARITH | FIXED1 | TF | IF | DF | IOPL | NT | RF | VM | AC | VIF | VIP | ID;
