//! The decoder's bits of flags, and RFLAGS'.

use iced_x86::RflagsBits;
use x86_defs::rflags;

/// The arithmetic flags among the decoder's bits (x87 condition codes are others).
pub const DECODED_ARITH: u32 = RflagsBits::OF
    | RflagsBits::SF
    | RflagsBits::ZF
    | RflagsBits::AF
    | RflagsBits::CF
    | RflagsBits::PF;

/// Returns RFLAGS' bits of the arithmetic flags among the decoder's `bits`.
pub fn decoded_flags(bits: u32) -> u64 {
    [
        (RflagsBits::OF, rflags::OF),
        (RflagsBits::SF, rflags::SF),
        (RflagsBits::ZF, rflags::ZF),
        (RflagsBits::AF, rflags::AF),
        (RflagsBits::CF, rflags::CF),
        (RflagsBits::PF, rflags::PF),
    ]
    .into_iter()
    .filter(|(bit, _)| bits & bit != 0)
    .fold(0, |all, (_, flag)| all | flag)
}
