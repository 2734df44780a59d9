//! Salts and numbers of target keys ([`crate::code::cache`]), for generated code that changes the mode by itself.
//!
//! What belongs to a key never changes, so an entry stays right whatever Rust does meanwhile.

use core::mem::offset_of;

/// Entries, by [`place`].
const LEN: usize = 32;
/// The lower half of the key times this, of which the upper [`BITS`] bits are an entry's place.
pub(crate) const HASH: u32 = 0x9e37_79b1;
pub(crate) const BITS: u32 = LEN.trailing_zeros();

/// An entry, as generated code reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Known {
    /// No key is 0.
    key: u64,
    salt: u64,
    number: u64,
    unused: u64,
}

/// Offsets of the fields.
pub(crate) const KEY: i32 = offset_of!(Known, key) as i32;
pub(crate) const SALT: i32 = offset_of!(Known, salt) as i32;
pub(crate) const NUMBER: i32 = offset_of!(Known, number) as i32;
/// log2 of the size.
pub(crate) const SHIFT: u8 = 5;
const _: () = assert!(size_of::<Known>() == 1 << SHIFT);

const NONE: Known = Known {
    key: 0,
    salt: 0,
    number: 0,
    unused: 0,
};

fn place(key: u64) -> usize {
    ((key as u32).wrapping_mul(HASH) >> (u32::BITS - BITS)) as usize
}

/// The keys of a vCPU that were current last. They do not move.
#[derive(Debug)]
pub(crate) struct Keys(Box<[Known; LEN]>);

impl Keys {
    pub(crate) fn new() -> Self {
        Self(Box::new([NONE; LEN]))
    }

    /// For generated code.
    pub(crate) fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub(crate) fn set(&mut self, key: u64, salt: u64, number: u32) {
        self.0[place(key)] = Known {
            key,
            salt,
            number: number.into(),
            unused: 0,
        };
    }

    /// Numbers begin anew.
    pub(crate) fn clear(&mut self) {
        self.0.fill(NONE);
    }
}
