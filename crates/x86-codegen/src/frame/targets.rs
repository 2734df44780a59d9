//! The target table of indirect branches, as generated code reads it.

use std::{
    hash::{BuildHasher, RandomState},
    sync::LazyLock,
};

/// Number of entries in the target table.
pub const TARGETS_LEN: usize = 1 << 16;

/// An entry of the target table, as generated code reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Address in the guest, XORed with the key's salt, so that one comparison covers both.
    pub tag: u64,
    /// The mapping and mode that the entry is for.
    pub key: u64,
    /// Address of the block's outer entry.
    pub code: u64,
    /// Page of the guest address.
    pub page: u64,
}

const _: () = assert!(size_of::<Target>() == 32);

/// Returns an empty entry for an index: its tag belongs to another index, so no lookup finds it. No key is zero.
pub const fn empty(at: usize) -> Target {
    Target {
        tag: (at == 0) as u64,
        key: 0,
        code: 0,
        page: 0,
    }
}

/// Returns the index of a target. Functions are aligned, so low bits alone are no hash.
pub fn place(tag: u64) -> usize {
    (tag ^ tag >> 5) as usize & (TARGETS_LEN - 1)
}

/// The secret that salts are made from. [`make_secret`] asks the host for it, which vCPUs may not do.
static SECRET: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0));

/// Returns the salt that a key's targets are XORed with. Two targets under two keys have the same tag with a
/// probability of 2^-64, which a guest cannot improve: salts are as good as random to it.
pub fn salt_of(key: u64) -> u64 {
    let mut x = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ *SECRET;
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Asks the host for the secret that salts are made from, which vCPUs may not do.
pub fn make_secret() {
    LazyLock::force(&SECRET);
}
