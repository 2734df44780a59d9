//! Loads of CR3 that generated code does by itself.
//!
//! An entry says where a load has led to before, and under which conditions it leads there again: the same view, the
//! same mode, and nothing changed since ([`mmu::SwitchEpochs`]). A load that flushes nothing also needs a word that the
//! guest or the MMU has not taken back meanwhile. One that flushes needs the guest's tables to say what they said
//! ([`mmu::compared`]): the flush would lead to the same translations.

use core::mem::offset_of;

use x86_defs::control::cr3;
use zerocopy::FromZeros;

use super::entries::Entry;

/// An entry, as generated code reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromZeros)]
pub struct Switch {
    /// What the load is found by ([`Self::by`]). 0: no entry.
    pub by: u64,
    /// The sum of numbers of [`mmu::SwitchEpochs`] that vouches for such loads.
    pub epoch: u64,
    /// For a load that flushes, [`mmu::Front::compared`]; for another, the host address of a word that has to be 1, or 0: the
    /// root has to be the one that its PCID was last loaded with.
    pub kept: u64,
    /// Address of the view's tables.
    pub tables: u64,
    /// The key of targets.
    pub key: u64,
    /// The key's salt ([`super::targets::salt_of`]).
    pub salt: u64,
    /// The key's number.
    pub number: u32,
    /// The lower half of the view's number ([`mmu::l1::VIEW`]). No two views had the same since the epoch began.
    pub view: u32,
    /// The number of the address space.
    pub address_space: u32,
    /// Where the tables are with RFLAGS.AC set ([`Self::place`]), if the view is the supervisor's with CR0.WP and
    /// without RFLAGS.AC. 0: not known.
    pub access: u32,
}

/// log2 of what all addresses of tables are equal modulo.
pub(crate) const PLACE_SHIFT: u8 = 16;

impl Switch {
    /// Returns what a load of `value` is found by. One that flushes is found by its root: it leads to that root's context,
    /// whatever the PCID. One that does not may lead to the context of its PCID.
    pub const fn by(value: u64) -> u64 {
        let flushes = value & cr3::NO_FLUSH == 0;
        let ignored = if flushes { cr3::PCID } else { 0 };
        (value & !ignored).rotate_left(1)
    }

    /// Returns the bits of the tables' address that others do not have in common with it. `None`: they are too many.
    pub fn place(tables: u64) -> Option<u32> {
        u32::try_from(tables >> PLACE_SHIFT).ok()
    }
}

/// Offsets of the fields.
pub(crate) const BY: i32 = offset_of!(Switch, by) as i32;
pub(crate) const EPOCH: i32 = offset_of!(Switch, epoch) as i32;
pub(crate) const VIEW: i32 = offset_of!(Switch, view) as i32;
pub(crate) const KEPT: i32 = offset_of!(Switch, kept) as i32;
pub(crate) const TABLES: i32 = offset_of!(Switch, tables) as i32;
pub(crate) const KEY: i32 = offset_of!(Switch, key) as i32;
pub(crate) const SALT: i32 = offset_of!(Switch, salt) as i32;
pub(crate) const ADDRESS_SPACE: i32 = offset_of!(Switch, address_space) as i32;
pub(crate) const ACCESS: i32 = offset_of!(Switch, access) as i32;
pub(crate) const NUMBER: i32 = offset_of!(Switch, number) as i32;

const _: () = assert!(BY == 0);

impl Entry for Switch {
    fn by(&self) -> u64 {
        self.by
    }
}
