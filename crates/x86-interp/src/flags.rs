//! Lazy arithmetic flags.
//!
//! An instruction stores its sign-extended result and its carry-out vector; a flag is computed when it is read. Any
//! combination of the six flags can be represented, so [`LazyFlags::set`] and [`LazyFlags::get`] are inverse.

use x86_defs::rflags;

use crate::Int;

/// Carry out of the most significant bit.
const CARRY: u64 = 1 << 63;
/// Carry into the most significant bit. OF is this bit XOR [`CARRY`].
const CARRY_IN: u64 = 1 << 62;
/// Carry out of bit 3.
const AUX: u64 = 1 << 3;
/// Inverts SF.
const SIGN_FLIP: u64 = 1;
/// Position of a byte that is XORed to the result's low byte for PF.
const PARITY_SHIFT: u32 = 8;

/// The six arithmetic flags of the executing instruction stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LazyFlags {
    /// Sign-extended result. It gives ZF and, together with `carries`, SF and PF.
    result: u64,
    /// Carries, shifted so that the operand's sign bit is bit 63, and corrections.
    carries: u64,
}

/// Returns the carries of an operand of `T`'s size, shifted to their places.
#[inline(always)]
fn place<T: Int>(carries: u64) -> u64 {
    carries << (64 - T::BITS) & (CARRY | CARRY_IN) | carries & AUX
}

#[inline(always)]
fn carry_bits(cf: bool, of: bool) -> u64 {
    u64::from(cf) << 63 | u64::from(cf ^ of) << 62
}

impl LazyFlags {
    /// The flags as RFLAGS bits.
    #[inline]
    pub fn get(&self) -> u64 {
        u64::from(self.cf())
            | u64::from(self.pf()) << 2
            | (self.carries & AUX) << 1
            | u64::from(self.zf()) << 6
            | u64::from(self.sf()) << 7
            | u64::from(self.of()) << 11
    }
    /// Sets all six from RFLAGS bits; others are ignored.
    #[inline]
    pub fn set(&mut self, bits: u64) {
        // A nonzero result whose low byte and sign bit are zero.
        self.result = u64::from(bits & rflags::ZF == 0) << 8;
        self.carries = carry_bits(bits & rflags::CF != 0, bits & rflags::OF != 0)
            | (bits & rflags::AF) >> 1
            | u64::from(bits & rflags::PF == 0) << PARITY_SHIFT
            | u64::from(bits & rflags::SF != 0);
    }

    /// CF.
    #[inline(always)]
    pub fn cf(&self) -> bool {
        self.carries & CARRY != 0
    }
    /// PF.
    #[inline(always)]
    pub fn pf(&self) -> bool {
        let byte = (self.result ^ self.carries >> PARITY_SHIFT) as u8;
        byte.count_ones() & 1 == 0
    }
    /// AF.
    #[inline(always)]
    pub fn af(&self) -> bool {
        self.carries & AUX != 0
    }
    /// ZF.
    #[inline(always)]
    pub fn zf(&self) -> bool {
        self.result == 0
    }
    /// SF.
    #[inline(always)]
    pub fn sf(&self) -> bool {
        (self.result >> 63 ^ self.carries & SIGN_FLIP) != 0
    }
    /// OF.
    #[inline(always)]
    pub fn of(&self) -> bool {
        (self.carries ^ self.carries << 1) & CARRY != 0
    }
    /// Condition `cc` as Jcc, SETcc and CMOVcc encode it (SDM vol. 1, appendix B).
    #[inline(always)]
    pub fn condition(&self, cc: u8) -> bool {
        let positive = match cc >> 1 & 7 {
            0 => self.of(),
            1 => self.cf(),
            2 => self.zf(),
            3 => self.cf() || self.zf(),
            4 => self.sf(),
            5 => self.pf(),
            6 => self.sf() != self.of(),
            _ => self.zf() || self.sf() != self.of(),
        };
        positive ^ (cc & 1 != 0)
    }

    /// Sets the flags of `r = a + b` or `a + b + CF`.
    #[inline(always)]
    pub fn add<T: Int>(&mut self, a: T, b: T, r: T) {
        let (a, b, v) = (a.to_u64(), b.to_u64(), r.to_u64());
        self.result = r.sext();
        self.carries = place::<T>(a & b | (a | b) & !v);
    }
    /// Sets the flags of `r = a - b` or `a - b - CF`.
    #[inline(always)]
    pub fn sub<T: Int>(&mut self, a: T, b: T, r: T) {
        let (a, b, v) = (a.to_u64(), b.to_u64(), r.to_u64());
        self.result = r.sext();
        self.carries = place::<T>(!a & b | (!a | b) & v);
    }
    /// Sets the flags of AND, OR, XOR, TEST: CF, OF and AF are clear.
    #[inline(always)]
    pub fn logic<T: Int>(&mut self, r: T) {
        self.result = r.sext();
        self.carries = 0;
    }
    /// Sets ZF, SF and PF of a result and the given CF and OF; clears AF.
    #[inline(always)]
    pub fn result<T: Int>(&mut self, r: T, cf: bool, of: bool) {
        self.result = r.sext();
        self.carries = carry_bits(cf, of);
    }
    /// As [`Self::result`], with AF set.
    #[inline(always)]
    pub fn result_af<T: Int>(&mut self, r: T, cf: bool, of: bool) {
        self.result = r.sext();
        self.carries = carry_bits(cf, of) | AUX;
    }
    /// Changes CF alone.
    #[inline(always)]
    pub fn set_cf(&mut self, cf: bool) {
        if cf != self.cf() {
            self.carries ^= CARRY | CARRY_IN;
        }
    }
    /// Changes CF and OF alone.
    #[inline(always)]
    pub fn set_cf_of(&mut self, cf: bool, of: bool) {
        self.carries = self.carries & !(CARRY | CARRY_IN) | carry_bits(cf, of);
    }
    /// Changes OF alone.
    #[inline(always)]
    pub fn set_of(&mut self, of: bool) {
        self.set_cf_of(self.cf(), of);
    }
    /// Changes ZF alone.
    #[inline]
    pub fn set_zf(&mut self, zf: bool) {
        let rest = self.get() & !rflags::ZF;
        self.set(rest | u64::from(zf) << 6);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_survives() {
        for n in 0..4096u64 {
            let bits = n & rflags::ARITH;
            let mut f = LazyFlags::default();
            f.set(n);
            assert_eq!(f.get(), bits);
            for cf in [false, true] {
                let mut g = f;
                g.set_cf(cf);
                assert_eq!(g.get(), bits & !rflags::CF | u64::from(cf));
                g = f;
                g.set_of(cf);
                assert_eq!(g.get(), bits & !rflags::OF | u64::from(cf) << 11);
                g = f;
                g.set_zf(cf);
                assert_eq!(g.get(), bits & !rflags::ZF | u64::from(cf) << 6);
            }
        }
    }

    /// Compares every 8-bit addition and subtraction with the flags' definition.
    #[test]
    fn bytes_exhaustively() {
        for a in 0..=255u8 {
            for b in 0..=255u8 {
                for c in [false, true] {
                    let parts = |r: u8, cf: bool, of: bool, af: bool| {
                        u64::from(cf)
                            | u64::from(r.count_ones() & 1 == 0) << 2
                            | u64::from(af) << 4
                            | u64::from(r == 0) << 6
                            | u64::from(r >> 7) << 7
                            | u64::from(of) << 11
                    };
                    let carry = u16::from(c);
                    let wide = u16::from(a) + u16::from(b) + carry;
                    let signed = i16::from(a as i8) + i16::from(b as i8) + carry as i16;
                    let r = wide as u8;
                    let mut f = LazyFlags::default();
                    f.add(a, b, r);
                    let af = u16::from(a & 15) + u16::from(b & 15) + carry > 15;
                    let of = signed != i16::from(r as i8);
                    assert_eq!(f.get(), parts(r, wide > 255, of, af), "{a}+{b}+{c}");

                    let r = a.wrapping_sub(b).wrapping_sub(u8::from(c));
                    let signed = i16::from(a as i8) - i16::from(b as i8) - carry as i16;
                    f.sub(a, b, r);
                    let af = u16::from(a & 15) < u16::from(b & 15) + carry;
                    let of = signed != i16::from(r as i8);
                    let cf = u16::from(a) < u16::from(b) + carry;
                    assert_eq!(f.get(), parts(r, cf, of, af), "{a}-{b}-{c}");
                }
            }
        }
    }
}
