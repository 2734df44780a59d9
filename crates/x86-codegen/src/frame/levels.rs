//! SYSCALL and SYSRETQ that generated code executes by itself.
//!
//! An entry says where a change of the privilege level from a view and a mode has led to before, and under which
//! conditions it leads there again: nothing has changed since ([`mmu::SwitchEpochs::flushing`]), CR0 and PKRU are what
//! they were, and so are the facts that [`super::words::LEVEL_FACTS`] has.

use core::mem::offset_of;

/// Number of entries; [`place`] selects one.
const LEN: usize = 256;
/// Multiplier of the lower half of the tables' address. The upper [`BITS`] bits of the product are the entry's index.
pub(crate) const HASH: u32 = 0x9e37_79b1;
pub(crate) const BITS: u32 = LEN.trailing_zeros();

/// An entry, as generated code reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LevelChange {
    /// Address of the tables of the view that is left. 0: no entry.
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
/// log2 of an entry's size.
pub(crate) const SHIFT: u8 = 6;
const _: () = assert!(size_of::<LevelChange>() == 1 << SHIFT);

const NONE: LevelChange = LevelChange {
    from: 0,
    from_key: 0,
    epoch: 0,
    cr0: 0,
    pkru: 0,
    tables: 0,
    key: 0,
    salt: 0,
    number: 0,
    facts: 0,
};

fn place(tables: u64) -> usize {
    ((tables as u32).wrapping_mul(HASH) >> (u32::BITS - BITS)) as usize
}

/// All entries of a vCPU. They do not move in memory.
#[derive(Debug)]
pub struct LevelChanges {
    all: Box<[LevelChange; LEN]>,
    is_used: bool,
}

impl Default for LevelChanges {
    /// Makes a table without changes of the level.
    fn default() -> Self {
        Self {
            all: Box::new([NONE; LEN]),
            is_used: false,
        }
    }
}

impl LevelChanges {
    /// Returns the table's address, for generated code.
    pub fn address(&self) -> u64 {
        self.all.as_ptr() as u64
    }

    /// Enters a change, in the place of another one if need be.
    pub fn set(&mut self, change: LevelChange) {
        self.is_used = true;
        self.all[place(change.from)] = change;
    }

    /// Forgets all changes.
    pub fn clear(&mut self) {
        if core::mem::take(&mut self.is_used) {
            self.all.fill(NONE);
        }
    }
}
