//! Exception vectors (SDM vol. 3, table 6-1).

/// Divide error.
pub const DE: u8 = 0;
/// Debug.
pub const DB: u8 = 1;
/// Non-maskable interrupt.
pub const NMI: u8 = 2;
/// Breakpoint.
pub const BP: u8 = 3;
/// INTO overflow.
pub const OF: u8 = 4;
/// BOUND range exceeded.
pub const BR: u8 = 5;
/// Undefined opcode.
pub const UD: u8 = 6;
/// Device not available.
pub const NM: u8 = 7;
/// Double fault.
pub const DF: u8 = 8;
/// Invalid TSS.
pub const TS: u8 = 10;
/// Segment not present.
pub const NP: u8 = 11;
/// Stack-segment fault.
pub const SS: u8 = 12;
/// General protection.
pub const GP: u8 = 13;
/// Page fault.
pub const PF: u8 = 14;
/// x87 floating-point error.
pub const MF: u8 = 16;
/// Alignment check.
pub const AC: u8 = 17;
/// Machine check.
pub const MC: u8 = 18;
/// SIMD floating-point exception.
pub const XM: u8 = 19;

/// True if delivery of `vector` as an exception pushes an error code.
pub const fn has_error_code(vector: u8) -> bool {
    matches!(vector, DF | TS | NP | SS | GP | PF | AC)
}

/// #PF error-code bits (SDM vol. 3, 4.7).
pub mod pf {
    /// The page was present.
    pub const P: u16 = 1 << 0;
    /// The access was a write.
    pub const W: u16 = 1 << 1;
    /// The access was a user access.
    pub const U: u16 = 1 << 2;
    /// A reserved bit was set.
    pub const RSVD: u16 = 1 << 3;
    /// Instruction fetch, with NX or SMEP enabled.
    pub const I: u16 = 1 << 4;
    /// Protection key.
    pub const PK: u16 = 1 << 5;
}
