//! [`Int`]: the four operand sizes of integer instructions.

use x86_cpu::Word;

/// An operand size of the integer instructions.
pub trait Int: Word {
    /// Width in bits.
    const BITS: u32;
    /// The low bits of `v`.
    fn from_u64(v: u64) -> Self;
    /// Zero-extended.
    fn to_u64(self) -> u64;
    /// Sign-extended.
    fn sext(self) -> u64;
}

macro_rules! int {
    ($($t:ty, $s:ty);*) => { $(impl Int for $t {
        const BITS: u32 = <$t>::BITS;
        #[inline(always)]
        fn from_u64(v: u64) -> Self { v as $t }
        #[inline(always)]
        fn to_u64(self) -> u64 { u64::from(self) }
        #[inline(always)]
        fn sext(self) -> u64 { self as $s as i64 as u64 }
    })* };
}
int!(u8, i8; u16, i16; u32, i32; u64, i64);
