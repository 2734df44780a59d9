//! Loads of CR3 that generated code does by itself.
//!
//! An entry says where a load has led to before, and under which conditions it leads there again: the same view, the
//! same mode, and nothing changed since ([`mmu::SwitchEpochs`]). A load that flushes nothing also needs a word that the
//! guest has not taken back meanwhile. One that flushes needs the guest's tables to say what they said
//! ([`mmu::compared`]): the flush would lead to the same translations.

use core::mem::offset_of;

/// Number of entries; [`place`] selects one.
pub(crate) const LEN: usize = 256;
/// Multiplier of the lower half of CR3. The upper [`BITS`] bits of the product are the entry's index.
pub(crate) const HASH: u32 = 0x9e37_79b1;
pub(crate) const BITS: u32 = LEN.trailing_zeros();

/// An entry, as generated code reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Switch {
    /// The value that is loaded, bit 63 included: without it, the load flushes. 0: no entry.
    pub value: u64,
    /// The number of [`mmu::SwitchEpochs`] that vouches for such loads.
    pub epoch: u64,
    /// Number of the view ([`mmu::l1::VIEW`]).
    pub view: u64,
    /// Host address of a word that has to be 1; for a load that flushes, [`mmu::Front::compared`].
    pub kept: u64,
    /// Address of the view's tables.
    pub tables: u64,
    /// The key of targets.
    pub key: u64,
    /// The key's salt ([`super::targets::salt_of`]).
    pub salt: u64,
    /// The key's number.
    pub number: u64,
}

/// Offsets of the fields.
pub(crate) const VALUE: i32 = offset_of!(Switch, value) as i32;
pub(crate) const EPOCH: i32 = offset_of!(Switch, epoch) as i32;
pub(crate) const VIEW: i32 = offset_of!(Switch, view) as i32;
pub(crate) const KEPT: i32 = offset_of!(Switch, kept) as i32;
pub(crate) const TABLES: i32 = offset_of!(Switch, tables) as i32;
pub(crate) const KEY: i32 = offset_of!(Switch, key) as i32;
pub(crate) const SALT: i32 = offset_of!(Switch, salt) as i32;
pub(crate) const NUMBER: i32 = offset_of!(Switch, number) as i32;
/// log2 of an entry's size.
pub(crate) const SHIFT: u8 = 6;
const _: () = assert!(size_of::<Switch>() == 1 << SHIFT);

const NONE: Switch = Switch {
    value: 0,
    epoch: 0,
    view: 0,
    kept: 0,
    tables: 0,
    key: 0,
    salt: 0,
    number: 0,
};

fn place(value: u64) -> usize {
    ((value as u32).wrapping_mul(HASH) >> (32 - BITS)) as usize
}

/// All entries of a vCPU. They do not move in memory.
#[derive(Debug)]
pub struct Switches {
    all: Box<[Switch; LEN]>,
    is_used: bool,
}

impl Default for Switches {
    /// Makes a table without loads of CR3.
    fn default() -> Self {
        Self {
            all: Box::new([NONE; LEN]),
            is_used: false,
        }
    }
}

impl Switches {
    /// Returns the table's address, for generated code.
    pub fn address(&self) -> u64 {
        self.all.as_ptr() as u64
    }

    /// Enters a load, in the place of another one if need be.
    pub fn set(&mut self, switch: Switch) {
        self.is_used = true;
        self.all[place(switch.value)] = switch;
    }

    /// Forgets all loads.
    pub fn clear(&mut self) {
        if core::mem::take(&mut self.is_used) {
            self.all.fill(NONE);
        }
    }
}
