//! [`PageCopy`]: what a page held.

/// Words of a page, as they were at some time.
#[derive(Debug)]
#[repr(align(64))]
pub struct PageCopy(pub(crate) [[u64; 8]; 64]);

impl PageCopy {
    /// A page of zeroes.
    pub const ZERO: Self = Self([[0; 8]; 64]);

    /// The 64 bytes from offset `64 * n` (modulo the page's size).
    pub fn chunk(&self, n: usize) -> [u64; 8] {
        self.0[n % 64]
    }

    /// Replaces the 64 bytes from offset `64 * n` (modulo the page's size).
    pub fn set_chunk(&mut self, n: usize, words: [u64; 8]) {
        self.0[n % 64] = words;
    }
}
