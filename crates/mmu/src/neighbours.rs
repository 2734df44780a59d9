//! Neighbours: a walk to a page of 4 KiB has a line of its page table at hand, and takes the other pages of this line along.
//! A processor may translate any address at any time (SDM vol. 3, 4.10.3.1), as long as nobody sees it:
//!
//! * an entry is taken only if it is present and accessed, and has no reserved bit set. So no flag is to be set, and there
//!   is no fault;
//! * the page comes to the second level alone, for reads, and for writes only if that needs no bookkeeping: its entry is dirty,
//!   [`crate::written`] has both the page and the place that its write tag would have, the slot's log has it, and it is no
//!   code and no mixed page, whose tags are not looked for when it is given up. Nothing is noted, and no entry that may be
//!   needed loses its place;
//! * the page is in the slot of the page that was walked for, and is known to be readable, so that nobody is asked.
//!
//! In a tracked context, each translation has an entry that is compared at flushes: for pages that may never be
//! accessed this would not pay, so there only global ones are taken.

use crate::{Mmu, reach::Leaf, source::Source, walk::entry_size, written::SlotPage};

/// Size of a line of the page table in bytes.
const LINE: u64 = 64;

impl Mmu {
    /// Enters the neighbours of `gva` in the second level. The last walk was for `gva`, and has led to `found`.
    pub(crate) fn take_neighbours(&mut self, gva: u64, found: SlotPage) {
        let Some((table, offset)) = self.trail.small_leaf() else {
            return;
        };
        if self.source == Source::Tables {
            return;
        }
        let Some(slot) = self.table.slots(found.space).get(found.slot) else {
            return;
        };
        let keys = self.keys_of(self.current);
        let is_tracked = self.contexts[self.current].derived.is_some();
        let is_upper = gva >> 63 != 0;
        let size = u64::from(entry_size(&self.paging));
        let first = offset & !(LINE - 1);
        let first_gva = (gva & !0xfff).wrapping_sub(((offset - first) / size) << 12);
        for n in 0..LINE / size {
            let at = first + n * size;
            let value = table.page.load(at, size as usize).unwrap_or(0) as u64;
            let Some(walk) = self.paging.accessed_page(value, table.rights) else {
                continue;
            };
            let gva = first_gva + (n << 12);
            let key = keys[usize::from(walk.global && is_upper)];
            let Some(index) = slot.page_index(walk.gpa) else {
                continue;
            };
            if at == offset
                || is_tracked && !walk.global
                || self.apic_page == Some(walk.gpa)
                || self.is_watched(gva)
                || !self.reach.has_room(gva, key, keys)
            {
                continue;
            }
            let Some(host) = slot.known_page(index) else {
                continue;
            };
            let place = SlotPage { index, ..found };
            let leaf = Leaf {
                gva,
                hva: host.hva(),
                class: walk.rights.class(),
                global: walk.global,
                writable: walk.dirty
                    && self.written.has(place, gva)
                    && slot.is_noted(index)
                    && !self.mixed.has(place),
            };
            self.flushes.has_global_users |= walk.global && !is_upper;
            self.reach.insert(&leaf, key, keys);
            self.stats.neighbours += 1;
        }
    }
}
