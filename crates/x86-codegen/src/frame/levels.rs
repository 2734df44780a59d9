//! SYSCALL and SYSRETQ that generated code executes by itself.
//!
//! An entry says where a change of the privilege level from a view and a mode has led to before, and under which
//! conditions it leads there again: nothing has changed since ([`mmu::SwitchEpochs`]), CR0 and PKRU are what
//! they were, and so are the facts that [`super::words::LEVEL_FACTS`] has.

use core::mem::offset_of;

use zerocopy::FromZeros;

use super::entries::Entry;

/// An entry, as generated code reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromZeros)]
pub struct LevelChange {
    /// Address of the tables of the view that is left, plus the number of the address space ([`Self::from`]). 0: no entry.
    pub from: u64,
    /// The key of targets that is left.
    pub from_key: u64,
    /// The number that vouches for the change.
    pub epoch: u64,
    /// The lower half of CR0.
    pub cr0: u32,
    /// PKRU.
    pub pkru: u32,
    /// Address of the tables of the view that the change leads to.
    pub tables: u64,
    /// That view's key of targets.
    pub key: u64,
    /// The key's salt ([`super::targets::salt_of`]).
    pub salt: u64,
    /// The key's number.
    pub number: u32,
    /// Other facts that the change depends on.
    pub facts: u32,
}

/// Offsets of the fields.
pub(crate) const FROM: i32 = offset_of!(LevelChange, from) as i32;
pub(crate) const FROM_KEY: i32 = offset_of!(LevelChange, from_key) as i32;
pub(crate) const EPOCH: i32 = offset_of!(LevelChange, epoch) as i32;
pub(crate) const CR0: i32 = offset_of!(LevelChange, cr0) as i32;
pub(crate) const PKRU: i32 = offset_of!(LevelChange, pkru) as i32;
pub(crate) const TABLES: i32 = offset_of!(LevelChange, tables) as i32;
pub(crate) const KEY: i32 = offset_of!(LevelChange, key) as i32;
pub(crate) const SALT: i32 = offset_of!(LevelChange, salt) as i32;
pub(crate) const NUMBER: i32 = offset_of!(LevelChange, number) as i32;
pub(crate) const FACTS: i32 = offset_of!(LevelChange, facts) as i32;

const _: () = assert!(FROM == 0);

impl LevelChange {
    /// Identifies a view in an address space. Address spaces may have the same tables.
    pub fn from(tables: u64, address_space: u64) -> u64 {
        // The low 16 bits of all tables' addresses are equal, and too small to carry.
        debug_assert!(address_space < 1 << 15);
        tables + address_space
    }
}

impl Entry for LevelChange {
    fn by(&self) -> u64 {
        self.from
    }
}
