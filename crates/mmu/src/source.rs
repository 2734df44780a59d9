//! Where translations come from: the guest's tables, by way of what is kept of earlier walks.

use x86_cpu::{Access, CpuState, Exception, Privilege};
use x86_defs::{control::cr4, vector, vector::pf};

use crate::{
    Miss, Mmu, Mode, View,
    l2::Owner,
    view::Rights,
    walk::{Walk, WalkFault, Walker},
};

/// Where a translation comes from, if neither the first nor the second level has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// L2, the paging-structure caches, and a walk from where these lead.
    #[default]
    Kept,
    /// The guest's tables alone, from the root. Tests compare the other source with this one.
    Tables,
}

/// A translation. If it was walked for just now, the walk's trail is in `Mmu::trail`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Translated {
    pub walk: Walk,
    pub is_walked: bool,
}

impl Translated {
    fn kept(walk: Walk) -> Self {
        Self {
            walk,
            is_walked: false,
        }
    }
}

impl Mmu {
    /// Sets where translations come from, and forgets all translations.
    pub fn set_source(&mut self, source: Source) {
        self.flush_everything();
        self.source = source;
    }

    /// Returns the translation of `gva` for an access, with A and D bits set as the access sets them.
    #[inline(always)]
    pub(crate) fn translation(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        access: Access,
        who: Privilege,
    ) -> Result<Translated, Miss> {
        if self.paging.mode == Mode::None {
            return Ok(Translated::kept(Walk {
                gpa: gva,
                rights: Rights::ALL,
                global: false,
                dirty: true,
                level: 1,
            }));
        }
        if !self.paging.is_canonical(gva) {
            // Callers check; this keeps a translation from aliasing another.
            return Err(Miss::Exception(Exception::GP0));
        }
        let gva = if cpu.is_long_mode() {
            gva
        } else {
            gva & 0xffff_ffff
        };
        let view = View::of(cpu, who);
        let owner = self.owner();
        if self.source == Source::Kept
            && let Some(hit) = self.l2.find(gva, owner)
        {
            // A denied access walks again: the tables may allow more by now, and
            // no flush is needed for that (SDM vol. 3, 4.10.4.3).
            if view.check(hit.rights, access).is_ok() && (hit.dirty || access != Access::Write) {
                self.stats.l2_hits += 1;
                return Ok(Translated::kept(hit));
            }
        }
        self.walked(cpu, gva, access, who)
    }

    /// Returns the translation that the guest's tables have.
    #[inline(never)]
    fn walked(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        access: Access,
        who: Privilege,
    ) -> Result<Translated, Miss> {
        self.stats.walks += 1;
        let view = View::of(cpu, who);
        match self.walk(gva, view, access, self.owner()) {
            Ok(walk) => Ok(Translated {
                walk,
                is_walked: true,
            }),
            Err(WalkFault::Host(gpa)) => Err(Miss::Host { gpa }),
            Err(WalkFault::Page(bits)) => Err(self.page_fault(cpu, gva, access, who, bits)),
        }
    }

    /// Walks from the lowest table that is known. If that does not lead to a page that may be accessed so, walks from the
    /// root.
    pub(crate) fn walk(
        &mut self,
        gva: u64,
        view: View,
        access: Access,
        owner: Owner,
    ) -> Result<Walk, WalkFault> {
        let mode = self.paging.mode;
        let mut walker = Walker {
            slots: &self.table,
            paging: &self.paging,
            near: &mut self.near,
        };
        let trail = &mut self.trail;
        let mut from = None;
        if self.source == Source::Kept {
            from = self.structures.find(mode, gva, owner);
        }
        let known = match from {
            Some((1, table)) => walker.walk_last(gva, view, access, table, trail),
            _ => None,
        };
        let known = known.or_else(|| {
            from?;
            walker.walk(gva, view, access, from, trail).ok()
        });
        self.stats.short_walks += u64::from(known.is_some());
        let walk = match known {
            Some(walk) => walk,
            None => {
                from = None;
                walker.walk(gva, view, access, None, trail)?
            }
        };
        self.note_walk(gva, &walk);
        let tick = self.next_tick();
        self.l2.insert(gva, &walk, owner, tick);
        // In a tracked context only what `note_walk` has noted may be kept.
        let is_noted = !walk.global || self.contexts[self.current].derived.is_none();
        if is_noted {
            let first = usize::from(walk.level);
            let above = from.map_or(usize::MAX, |(level, _)| level);
            for level in first.max(1)..above.min(3) {
                if let Some(table) = self.trail.table(level) {
                    self.structures
                        .insert(mode, gva, (level, table), owner, tick);
                }
            }
        }
        Ok(walk)
    }

    fn page_fault(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        access: Access,
        who: Privilege,
        bits: u16,
    ) -> Miss {
        self.stats.permission_misses += u64::from(bits & pf::P != 0);
        self.forget_faulting(gva);
        cpu.fault_gva = gva;
        let mut code = bits;
        if access == Access::Write {
            code |= pf::W;
        }
        if cpu.cpl == 3 && who == Privilege::Current {
            code |= pf::U;
        }
        // CR4.SMEP changes without a new root.
        let is_told = self.paging.nxe || cpu.cr4 & cr4::SMEP != 0;
        if access == Access::Fetch && is_told {
            code |= pf::I;
        }
        Miss::Exception(Exception::with_code(vector::PF, code))
    }
}
