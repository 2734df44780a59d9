//! Salts and numbers of target keys (`code::cache` of x86-jit), for generated code that changes the mode by itself.
//!
//! A key's salt and number never change, so an entry stays right whatever Rust does meanwhile.

use core::mem::offset_of;

/// Number of entries; [`place`] selects one.
const LEN: usize = 32;
/// Multiplier of the lower half of a key. The upper [`BITS`] bits of the product are the entry's index.
pub(crate) const HASH: u32 = 0x9e37_79b1;
pub(crate) const BITS: u32 = LEN.trailing_zeros();

/// An entry, as generated code reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Known {
    /// The key; no key is 0.
    key: u64,
    salt: u64,
    number: u64,
    unused: u64,
}

/// Offsets of the fields.
pub(crate) const KEY: i32 = offset_of!(Known, key) as i32;
pub(crate) const SALT: i32 = offset_of!(Known, salt) as i32;
pub(crate) const NUMBER: i32 = offset_of!(Known, number) as i32;
/// log2 of an entry's size.
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

/// The keys that were current last on a vCPU. They do not move in memory.
#[derive(Debug)]
pub struct Keys(Box<[Known; LEN]>);

impl Default for Keys {
    /// Makes a table without keys.
    fn default() -> Self {
        Self(Box::new([NONE; LEN]))
    }
}

impl Keys {
    /// Returns the table's address, for generated code.
    pub fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    /// Enters a key, in the place of another one if need be.
    pub fn set(&mut self, key: u64, salt: u64, number: u32) {
        self.0[place(key)] = Known {
            key,
            salt,
            number: number.into(),
            unused: 0,
        };
    }

    /// Forgets all keys, because numbers are given anew.
    pub fn clear(&mut self) {
        self.0.fill(NONE);
    }
}
