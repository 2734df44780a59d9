//! The walk of the guest's page tables (SDM vol. 3, 4.3 to 4.8).

use guest_memory::{HostPage, SlotTable};
use x86_cpu::Access;
use x86_defs::{
    paging::{A, ADDR_MASK, D, G, NX, P, PAGE_SIZE, PKEY_SHIFT, PS, RW, US},
    vector::pf,
};

use crate::{Mode, Paging, View, view::Rights};

/// A translation found in the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walk {
    /// Guest-physical address of the byte.
    pub gpa: u64,
    /// What all levels together allow.
    pub rights: Rights,
    /// The leaf is global.
    pub global: bool,
    /// The leaf's D bit is set: writes need no further walk.
    pub dirty: bool,
    /// Level of the leaf: 1 for 4 KiB, 2 for 2 or 4 MiB, 3 for 1 GiB.
    pub level: u8,
}

/// Why there is no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkFault {
    /// The error-code bits that the tables are responsible for (P, RSVD, PK). The access's own bits are added by the caller.
    Page(u16),
    /// The process cannot access a table as the walk has to.
    Host,
}

/// An entry that the walk went through.
#[derive(Clone, Copy, Debug)]
struct Visited {
    slot: usize,
    index: usize,
    page: HostPage,
    offset: u64,
    value: u64,
}

/// The entries that a walk went through.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trail {
    /// By level.
    visited: [Option<Visited>; 6],
    size: u8,
}

/// One of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub level: u8,
    pub page: HostPage,
    pub offset: u64,
    /// Bytes.
    pub size: u8,
    /// As the walk saw it, with the flags that it has set.
    pub value: u64,
}

impl Trail {
    /// From the leaf upwards.
    pub(crate) fn steps(&self) -> impl Iterator<Item = Step> + use<'_> {
        self.visited.iter().zip(0..).filter_map(|(visited, level)| {
            visited.as_ref().map(|v| Step {
                level,
                page: v.page,
                offset: v.offset,
                size: self.size,
                value: v.value,
            })
        })
    }
}

/// One attempt's outcome, with A and D bits still to be set.
struct Found {
    walk: Walk,
    visited: [Option<Visited>; 6],
}

/// Walks for an access and, if it is allowed, sets the A and D bits that the
/// manual asks for. `gva` is canonical.
///
/// `near` is the slot that is looked at first, and the one used last afterwards.
///
/// A table outside the memslots counts as not present, and in a read-only slot
/// A and D stay as they are: both as in KVM.
///
/// # Errors
/// [`WalkFault`] for a page fault, or EFAULT of KVM_RUN.
pub fn walk(
    slots: &SlotTable,
    paging: &Paging,
    near: &mut usize,
    gva: u64,
    view: View,
    access: Access,
) -> Result<(Walk, Trail), WalkFault> {
    let size = entry_size(paging);
    loop {
        let mut found = find(slots, paging, near, gva)?;
        if let Err(denied) = view.check(found.walk.rights, access) {
            return Err(WalkFault::Page(
                pf::P | if denied.by_key { pf::PK } else { 0 },
            ));
        }
        if set_accessed_and_dirty(slots, paging, &mut found, access)? {
            let visited = found.visited;
            return Ok((found.walk, Trail { visited, size }));
        }
        // Somebody changed an entry under us: the walk starts again.
    }
}

/// Bytes of an entry.
fn entry_size(paging: &Paging) -> u8 {
    if paging.mode == Mode::Bits32 { 4 } else { 8 }
}

/// Walks without permission check or side effect: KVM_TRANSLATE, debuggers.
///
/// # Errors
/// [`WalkFault`] if there is no translation.
pub fn look_up(slots: &SlotTable, paging: &Paging, gva: u64) -> Result<Walk, WalkFault> {
    find(slots, paging, &mut 0, gva).map(|f| f.walk)
}

fn find(
    slots: &SlotTable,
    paging: &Paging,
    near: &mut usize,
    gva: u64,
) -> Result<Found, WalkFault> {
    let mut visited = [None; 6];
    let mut rights = Rights::ALL;
    let (mut table, wide) = match paging.mode {
        Mode::None => {
            return Ok(Found {
                walk: Walk {
                    gpa: gva,
                    rights,
                    global: false,
                    dirty: true,
                    level: 1,
                },
                visited,
            });
        }
        Mode::Bits32 => (paging.root, false),
        Mode::Pae => {
            let pdpte = paging.pdpte[(gva >> 30 & 3) as usize];
            if pdpte & P == 0 {
                return Err(WalkFault::Page(0));
            }
            (pdpte & ADDR_MASK, true)
        }
        Mode::Level4 | Mode::Level5 => (paging.root, true),
    };
    let (index_bits, entry_size) = if wide { (9, 8) } else { (10, 4) };
    let mut level = paging.top_level();
    loop {
        let shift = 12 + index_bits * (level as u32 - 1);
        let index = gva >> shift & ((1 << index_bits) - 1);
        let entry = visit(
            slots,
            paging,
            near,
            table + index * entry_size,
            entry_size as usize,
        )?;
        let value = entry.value;
        visited[level] = Some(entry);
        if value & P == 0 {
            return Err(WalkFault::Page(0));
        }
        let leaf = level == 1
            || value & PS != 0 && (level == 2 && (wide || paging.pse) || level == 3 && wide);
        let reserved = if leaf {
            paging.reserved_leaf[level]
        } else {
            paging.reserved_table[level]
        };
        if value & reserved != 0 {
            return Err(WalkFault::Page(pf::P | pf::RSVD));
        }
        rights.write &= value & RW != 0;
        rights.user &= value & US != 0;
        rights.no_execute |= wide && paging.nxe && value & NX != 0;
        if !leaf {
            table = value & ADDR_MASK;
            level -= 1;
            continue;
        }
        if matches!(paging.mode, Mode::Level4 | Mode::Level5) {
            rights.pkey = (value >> PKEY_SHIFT & 15) as u8;
        }
        let in_page = gva & ((1 << shift) - 1);
        let base = if wide || level == 1 {
            value & ADDR_MASK & !((1 << shift) - 1)
        } else {
            // PSE-36: bits 20:13 are address bits 39:32.
            value & 0xffc0_0000 | (value >> 13 & 0xff) << 32
        };
        return Ok(Found {
            walk: Walk {
                gpa: base | in_page,
                rights,
                global: value & G != 0 && paging.global_pages,
                dirty: value & D != 0,
                level: level as u8,
            },
            visited,
        });
    }
}

fn visit(
    slots: &SlotTable,
    paging: &Paging,
    near: &mut usize,
    gpa: u64,
    size: usize,
) -> Result<Visited, WalkFault> {
    const NOT_PRESENT: WalkFault = WalkFault::Page(0);
    let space = paging.space.into();
    let slot_index = slots.find_near(space, gpa, *near).ok_or(NOT_PRESENT)?;
    *near = slot_index;
    let slot = slots.slots(space).get(slot_index).ok_or(NOT_PRESENT)?;
    let index = slot.page_index(gpa).ok_or(NOT_PRESENT)?;
    let page = slot.page(index).ok_or(WalkFault::Host)?;
    let offset = gpa % PAGE_SIZE;
    Ok(Visited {
        slot: slot_index,
        index,
        page,
        offset,
        value: page.load(offset, size).ok_or(NOT_PRESENT)? as u64,
    })
}

/// False if an entry is no longer what the walk saw.
fn set_accessed_and_dirty(
    slots: &SlotTable,
    paging: &Paging,
    found: &mut Found,
    access: Access,
) -> Result<bool, WalkFault> {
    let leaf = found.walk.level as usize;
    let size = usize::from(entry_size(paging));
    // From the root down, as hardware comes by.
    for level in (1..=5).rev() {
        let Some(entry) = &mut found.visited[level] else {
            continue;
        };
        let mut want = A;
        if level == leaf && access == Access::Write {
            want |= D;
        }
        if entry.value & want != want {
            let Some(slot) = slots.slots(paging.space.into()).get(entry.slot) else {
                return Ok(false);
            };
            if slot.is_readonly() {
                continue;
            }
            if slot.writable_page(entry.index).is_none() {
                return Err(WalkFault::Host);
            }
            if !entry
                .page
                .compare_exchange(entry.offset, size, entry.value, entry.value | want)
            {
                return Ok(false);
            }
            slot.note_write(entry.index, entry.offset, size as u64);
            entry.value |= want;
        }
        if level == leaf {
            found.walk.dirty = entry.value & D != 0;
        }
    }
    Ok(true)
}
