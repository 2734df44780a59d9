//! The walk of the guest's page tables (SDM vol. 3, 4.3 to 4.8).

use guest_memory::{HostPage, SlotTable};
use x86_cpu::Access;
use x86_defs::{
    paging::{A, ADDR_MASK, D, G, NX, P, PKEY_SHIFT, PS, RW, US},
    vector::pf,
};

use crate::{Mode, Paging, View, view::Rights};

/// A translation found in the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walk {
    /// Guest-physical address of the byte.
    pub gpa: u64,
    /// The rights that all levels together give.
    pub rights: Rights,
    /// True if the leaf is global.
    pub global: bool,
    /// True if the leaf's D bit is set, so that writes need no further walk.
    pub dirty: bool,
    /// Level of the leaf: 1 for 4 KiB, 2 for 2 or 4 MiB, 3 for 1 GiB.
    pub level: u8,
}

/// Why there is no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkFault {
    /// The error-code bits that the tables are responsible for (P, RSVD, PK). The access's own bits are added by the caller.
    Page(u16),
    /// The process cannot access the table in the page of this gpa as the walk has to.
    Host(u64),
}

/// A table of the guest's, and how the walk came to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    /// The table's place in the address space of slots that the walk is made in.
    pub slot: usize,
    pub index: usize,
    pub page: HostPage,
    /// The rights that the entries above the table give together.
    pub rights: Rights,
}

/// An entry that the walk went through.
#[derive(Clone, Copy, Debug)]
struct Visited {
    table: Table,
    offset: u64,
    /// The entry as the walk saw it, with the flags that the walk has set.
    value: u64,
}

/// The entries that a walk went through.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Trail {
    /// The entries by level.
    visited: [Option<Visited>; 6],
    size: u8,
}

/// One of these entries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub level: u8,
    pub page: HostPage,
    pub offset: u64,
    /// Size in bytes.
    pub size: u8,
    /// The entry as the walk saw it, with the flags that the walk has set.
    pub value: u64,
}

impl Trail {
    /// Returns the entries from the leaf upwards.
    pub(crate) fn steps(&self) -> impl Iterator<Item = Step> + use<'_> {
        self.visited.iter().zip(0..).filter_map(|(visited, level)| {
            visited.as_ref().map(|v| Step {
                level,
                page: v.table.page,
                offset: v.offset,
                size: self.size,
                value: v.value,
            })
        })
    }

    /// Returns the table of the lowest level, if the walk went through one, and the offset of the entry in the table.
    pub(crate) fn small_leaf(&self) -> Option<(Table, u64)> {
        self.visited[1].map(|v| (v.table, v.offset))
    }

    /// Returns the table of this level that the walk went through. `None` if there is none, or if an entry above it that the
    /// walk has seen lacks its accessed flag.
    pub(crate) fn table(&self, level: usize) -> Option<Table> {
        let table = self.visited.get(level)?.as_ref()?.table;
        let mut above = self.visited.iter().skip(level + 1).flatten();
        above.all(|v| v.value & A != 0).then_some(table)
    }
}

/// A walker of the guest's tables.
#[derive(Debug)]
pub(crate) struct Walker<'a> {
    pub slots: &'a SlotTable,
    pub paging: &'a Paging,
    /// The slot in which a table is looked for first. Afterwards it is the slot of the last table.
    pub near: &'a mut usize,
}

impl Walker<'_> {
    /// Walks for an access and, if it is allowed, sets the A and D bits that the
    /// manual asks for. `gva` is canonical.
    ///
    /// With `from`, the walk begins at this table of this level. `trail` becomes the entries that the walk has gone through
    /// from there.
    ///
    /// A table outside the memslots counts as not present, and in a read-only slot
    /// A and D stay as they are: both as in KVM.
    ///
    /// # Errors
    /// [`WalkFault`] for a page fault, or EFAULT of KVM_RUN.
    pub(crate) fn walk(
        &mut self,
        gva: u64,
        view: View,
        access: Access,
        from: Option<(usize, Table)>,
        trail: &mut Trail,
    ) -> Result<Walk, WalkFault> {
        trail.size = entry_size(self.paging);
        loop {
            let mut walk = self.find(gva, from, trail)?;
            if let Err(denied) = view.check(walk.rights, access) {
                return Err(WalkFault::Page(
                    pf::P | if denied.by_key { pf::PK } else { 0 },
                ));
            }
            if self.set_accessed_and_dirty(&mut walk, access, trail)? {
                return Ok(walk);
            }
            // Another processor has changed an entry meanwhile: the walk starts again.
        }
    }

    /// Walks from a table of the lowest level. `None` if there is no page, if a flag has to be set, or if the access is
    /// denied.
    #[inline]
    pub(crate) fn walk_last(
        &self,
        gva: u64,
        view: View,
        access: Access,
        table: Table,
        trail: &mut Trail,
    ) -> Option<Walk> {
        let size = entry_size(self.paging);
        let offset = if size == 8 {
            (gva >> 12 & 0x1ff) * 8
        } else {
            (gva >> 12 & 0x3ff) * 4
        };
        let value = table.page.load(offset, size.into())? as u64;
        let mut walk = self.paging.accessed_page(value, table.rights)?;
        let is_ready = walk.dirty || access != Access::Write;
        if !is_ready || view.check(walk.rights, access).is_err() {
            return None;
        }
        walk.gpa |= gva & 0xfff;
        trail.size = size;
        trail.visited = [None; 6];
        trail.visited[1] = Some(Visited {
            table,
            offset,
            value,
        });
        Some(walk)
    }

    fn find(
        &mut self,
        gva: u64,
        from: Option<(usize, Table)>,
        trail: &mut Trail,
    ) -> Result<Walk, WalkFault> {
        let paging = self.paging;
        trail.visited = [None; 6];
        if paging.mode == Mode::None {
            return Ok(Walk {
                gpa: gva,
                rights: Rights::ALL,
                global: false,
                dirty: true,
                level: 1,
            });
        }
        let (mut level, mut table) = match from {
            Some(from) => from,
            None => (paging.top_level(), self.top_table(gva)?),
        };
        let wide = paging.mode != Mode::Bits32;
        let (index_bits, entry_size) = if wide { (9, 8) } else { (10, 4) };
        loop {
            let shift = 12 + index_bits * (level as u32 - 1);
            let offset = (gva >> shift & ((1 << index_bits) - 1)) * entry_size;
            let value = table.page.load(offset, entry_size as usize);
            let value = value.ok_or(NOT_PRESENT)? as u64;
            trail.visited[level] = Some(Visited {
                table,
                offset,
                value,
            });
            if value & P == 0 {
                return Err(NOT_PRESENT);
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
            let rights = paging.rights(value, table.rights, leaf);
            if !leaf {
                table = self.table_at(value & ADDR_MASK, rights)?;
                level -= 1;
                continue;
            }
            let in_page = gva & ((1 << shift) - 1);
            let base = if wide || level == 1 {
                value & ADDR_MASK & !((1 << shift) - 1)
            } else {
                // PSE-36: bits 20:13 are address bits 39:32.
                value & 0xffc0_0000 | (value >> 13 & 0xff) << 32
            };
            return Ok(Walk {
                gpa: base | in_page,
                rights,
                global: value & G != 0 && paging.global_pages,
                dirty: value & D != 0,
                level: level as u8,
            });
        }
    }

    /// Returns the table at which a walk from the root begins.
    fn top_table(&mut self, gva: u64) -> Result<Table, WalkFault> {
        let mut gpa = self.paging.root;
        if self.paging.mode == Mode::Pae {
            let pdpte = self.paging.pdpte[(gva >> 30 & 3) as usize];
            if pdpte & P == 0 {
                return Err(NOT_PRESENT);
            }
            gpa = pdpte & ADDR_MASK;
        }
        self.table_at(gpa, Rights::ALL)
    }

    fn table_at(&mut self, gpa: u64, rights: Rights) -> Result<Table, WalkFault> {
        let space = self.paging.space.into();
        let found = self.slots.find_near(space, gpa, *self.near);
        let slot = found.ok_or(NOT_PRESENT)?;
        *self.near = slot;
        let pages = self.slots.slots(space).get(slot).ok_or(NOT_PRESENT)?;
        let index = pages.page_index(gpa).ok_or(NOT_PRESENT)?;
        let page = pages
            .page(index)
            .ok_or(WalkFault::Host(pages.page_gpa(index)))?;
        Ok(Table {
            slot,
            index,
            page,
            rights,
        })
    }

    /// Sets the A and D bits that the access asks for. Returns false if an entry is no longer what the walk saw.
    fn set_accessed_and_dirty(
        &self,
        walk: &mut Walk,
        access: Access,
        trail: &mut Trail,
    ) -> Result<bool, WalkFault> {
        let leaf = walk.level as usize;
        let size = usize::from(trail.size);
        // Hardware sets them from the root down.
        for level in (leaf..=self.paging.top_level()).rev() {
            let Some(entry) = &mut trail.visited[level] else {
                continue;
            };
            let mut want = A;
            if level == leaf && access == Access::Write {
                want |= D;
            }
            if entry.value & want == want {
                continue;
            }
            let Table {
                slot, index, page, ..
            } = entry.table;
            let Some(slot) = self.slots.slots(self.paging.space.into()).get(slot) else {
                return Ok(false);
            };
            if slot.is_readonly() {
                continue;
            }
            if slot.writable_page(index).is_none() {
                return Err(WalkFault::Host(slot.page_gpa(index)));
            }
            if !page.compare_exchange(entry.offset, size, entry.value, entry.value | want) {
                return Ok(false);
            }
            slot.note_write(index, entry.offset, size as u64);
            entry.value |= want;
        }
        walk.dirty = trail.visited[leaf].is_none_or(|e| e.value & D != 0);
        Ok(true)
    }
}

const NOT_PRESENT: WalkFault = WalkFault::Page(0);

impl Paging {
    /// Returns the page that an entry of the lowest level maps, if a processor may keep the translation without setting a
    /// flag: the entry is present and accessed, and has no reserved bit set. `above` are the rights that the entries above
    /// it give.
    #[inline]
    pub(crate) fn accessed_page(&self, value: u64, above: Rights) -> Option<Walk> {
        let is_usable = value & (P | A) == P | A && value & self.reserved_leaf[1] == 0;
        is_usable.then(|| Walk {
            gpa: value & ADDR_MASK,
            rights: self.rights(value, above, true),
            global: value & G != 0 && self.global_pages,
            dirty: value & D != 0,
            level: 1,
        })
    }

    /// Returns the rights that an entry gives together with those above it.
    #[inline]
    fn rights(&self, value: u64, above: Rights, is_leaf: bool) -> Rights {
        let has_keys = is_leaf && matches!(self.mode, Mode::Level4 | Mode::Level5);
        Rights {
            write: above.write && value & RW != 0,
            user: above.user && value & US != 0,
            // Without NXE, and in 32-bit paging, entries have no such bit.
            no_execute: above.no_execute || self.nxe && value & NX != 0,
            pkey: if has_keys {
                (value >> PKEY_SHIFT & 15) as u8
            } else {
                above.pkey
            },
        }
    }
}

/// Returns the size of an entry in bytes.
pub(crate) fn entry_size(paging: &Paging) -> u8 {
    if paging.mode == Mode::Bits32 { 4 } else { 8 }
}

/// Walks without permission check and side effect, for KVM_TRANSLATE and debuggers.
///
/// # Errors
/// [`WalkFault`] if there is no translation.
pub fn look_up(slots: &SlotTable, paging: &Paging, gva: u64) -> Result<Walk, WalkFault> {
    let near = &mut 0;
    let mut walker = Walker {
        slots,
        paging,
        near,
    };
    walker.find(gva, None, &mut Trail::default())
}
