//! A hash for keys that are identities of pages: nothing that a guest could gain by choosing them.

use core::hash::{BuildHasherDefault, Hasher};

/// For a `HashMap`.
pub(crate) type ByIdentity = BuildHasherDefault<Identity>;

/// One multiplication.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u64(u64::from(*b)));
    }
    fn write_u64(&mut self, v: u64) {
        self.0 = (self.0 ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }
}
