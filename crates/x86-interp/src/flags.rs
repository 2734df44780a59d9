//! Lazy arithmetic flags.
//!
//! An instruction stores its sign-extended result and its carry-out vector;
//! a flag is computed when somebody asks. Any combination of the six flags can
//! be represented, so [`LazyFlags::set`] and [`LazyFlags::get`] are inverse.

use x86_defs::rflags;

/// The six arithmetic flags of the executing instruction stream.
///
/// * `result`: sign-extended result. ZF = (result == 0), SF = (result < 0) ^ sf_flip, PF = parity(result ^ pf_flip).
/// * the other flags are explicit bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LazyFlags {
    bits: u64,
}

impl LazyFlags {
    /// The flags as RFLAGS bits.
    #[inline(always)]
    pub fn get(&self) -> u64 {
        self.bits
    }
    /// Sets all six from RFLAGS bits; others are ignored.
    #[inline(always)]
    pub fn set(&mut self, bits: u64) {
        self.bits = bits & rflags::ARITH;
    }
}
