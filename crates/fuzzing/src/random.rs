//! [`Random`]: a small generator with a seed, so that the seed is all there is to a case.

/// An xorshift64* generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Makes a generator from any seed.
    pub fn new(seed: u64) -> Self {
        let mut r = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..4 {
            r.next();
        }
        r
    }
    /// Returns 64 random bits.
    #[allow(
        clippy::should_implement_trait,
        reason = "an endless source, not an iterator"
    )]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    /// Returns a number less than `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n.max(1)
    }
    /// Returns true once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    /// Returns one of `list`.
    pub fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len() as u64) as usize]
    }
    /// Returns an integer that is often a border case.
    pub fn integer(&mut self) -> u64 {
        match self.below(8) {
            0 => self.below(4),
            1 => self.below(256),
            2 => self.pick(&[
                0,
                1,
                u64::MAX,
                1 << 63,
                i64::MAX as u64,
                0x7fff_ffff,
                0x8000_0000,
                0xffff_ffff,
                0x8000,
                0x7f,
                0x80,
            ]),
            3 => self.next() >> self.below(64),
            4 => !(self.next() >> self.below(64)),
            _ => self.next(),
        }
    }
}
