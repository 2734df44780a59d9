//! Changes of context and view, and flushes (SDM vol. 3, 4.10.4).

use std::sync::atomic::{Ordering, fence};

use x86_cpu::{CpuState, Exception, Flush};
use x86_defs::{
    control::{cr4, efer},
    paging::P,
};

use crate::{Mmu, Mode, Paging, context::SPACE_SHIFT, paging::Controls};

impl Mmu {
    /// Selects the context after a change of CR0, CR3, CR4 or EFER, and in PAE mode loads the PDPTEs. Flushes nothing by
    /// itself.
    ///
    /// # Errors
    /// #GP(0) for PDPTEs with reserved bits or outside RAM; nothing has changed then.
    pub fn load_root(&mut self, cpu: &mut CpuState) -> Result<(), Exception> {
        self.load_pdptes(cpu)?;
        self.set_root(cpu);
        Ok(())
    }

    pub(crate) fn load_pdptes(&self, cpu: &mut CpuState) -> Result<(), Exception> {
        if Mode::of(cpu) == Mode::Pae {
            let mut raw = [0; 32];
            if !self
                .table
                .read_bytes(cpu.events.in_smm.into(), cpu.cr3 & 0xffff_ffe0, &mut raw)
            {
                return Err(Exception::GP0);
            }
            let reserved = Paging::reserved_pdpte(cpu);
            let mut pdpte = [0; 4];
            for (entry, bytes) in pdpte.iter_mut().zip(raw.chunks_exact(8)) {
                *entry = bytes
                    .iter()
                    .rev()
                    .fold(0, |v: u64, b| v << 8 | u64::from(*b));
                if *entry & P != 0 && *entry & reserved != 0 {
                    return Err(Exception::GP0);
                }
            }
            cpu.pdpte = pdpte;
        }
        Ok(())
    }

    /// As [`Self::load_root`] with the PDPTEs that `cpu` has: after the VMM or a
    /// reset has set registers. The caller flushes [`Flush::All`] as well.
    pub fn set_root(&mut self, cpu: &CpuState) {
        self.take_root(cpu, false);
    }

    /// Takes over the registers. `flushes` says that the new PCID's translations that are not global are flushed.
    pub(crate) fn take_root(&mut self, cpu: &CpuState, flushes: bool) {
        let controls = Some(Controls::of(cpu));
        let is_long = matches!(self.paging.mode, Mode::Level4 | Mode::Level5);
        if is_long && controls == self.controls {
            self.paging.set_long_root(cpu);
        } else {
            self.paging = Paging::of(cpu);
            self.paging.global_pages &= !self.globals.are_ignored;
            self.controls = controls;
            self.note_fetch_controls(cpu);
            // The same CR3 means something else now.
            self.forget_switches();
        }
        let flushes = self.take_promised(cpu) || flushes;
        if flushes {
            if self.is_promised() {
                self.forget_keeping_switches();
            }
            self.leave_context();
            let tick = self.next_tick();
            self.flushes.note_non_global(Some(self.paging.pcid), tick);
        }
        self.select_context(flushes);
        self.switch_epochs.note_load(cpu.cr3);
        self.select_tables(cpu);
    }

    /// Selects the views after a change of CPL, RFLAGS.AC, CR0.WP, CR4.SMEP/SMAP/PKE/PKS, PKRU or PKRS.
    #[inline]
    pub fn select_view(&mut self, cpu: &CpuState) {
        self.select_tables(cpu);
    }

    /// Takes over what paging depends on after a change of CR0, CR3, CR4 or EFER, or of SMM.
    fn note_fetch_controls(&mut self, cpu: &CpuState) {
        if self.fetch_space != self.paging.space {
            self.fetch_space = self.paging.space;
            core::mem::swap(&mut self.global_fetch, &mut self.other_fetch);
        }
        let cr4 = if self.paging.global_pages {
            cpu.cr4
        } else {
            cpu.cr4 & !cr4::PGE
        };
        let controls = cr4 | (cpu.efer & efer::NXE) << 32 | (self.paging.mode as u64) << 48;
        if controls != self.global_fetch.controls {
            self.global_fetch.controls = controls;
            self.flush_global_fetch(None);
        }
    }

    /// Forgets translations.
    pub fn flush(&mut self, cpu: &CpuState, what: Flush) {
        // What flushes is a barrier (SDM vol. 3, 9.3).
        fence(Ordering::SeqCst);
        self.stats.flushes += 1;
        self.forget_pages();
        self.forget_switches();
        let tick = self.next_tick();
        match self.own(what) {
            Flush::Page(gva) => self.flush_page(gva, None),
            Flush::PcidPage(pcid, gva) => self.flush_page(gva, Some(pcid)),
            Flush::Pcid(pcid) => self.flush_non_global(tick, Some(pcid)),
            Flush::NonGlobal => self.flush_non_global(tick, None),
            // SMM has translations of its own.
            Flush::Global | Flush::All if self.paging.space != 0 => self.flush_space(tick),
            Flush::Global => self.flush_globals(cpu, tick),
            Flush::All => self.flush_everything(),
        }
        // The caller may have changed registers that select the view as well.
        self.select_tables(cpu);
    }

    /// Drops the page in L2 and, at once or when they are next used, in the
    /// contexts of `pcid` (all, if none is given: the page may be global).
    fn flush_page(&mut self, gva: u64, pcid: Option<u16>) {
        self.l2.flush_page(gva);
        self.flush_global_fetch(Some(gva));
        let current = self.paging.pcid;
        if pcid.is_none_or(|p| p == current) {
            self.flush_current_page(gva);
        }
        self.flushes.note_page(gva, current, pcid);
    }

    pub(crate) fn flush_non_global(&mut self, tick: u64, pcid: Option<u16>) {
        self.flushes.note_non_global(pcid, tick);
        if pcid.is_none_or(|p| p == self.paging.pcid) {
            self.catch_up();
        }
        self.next_tick();
    }

    /// Flushes all translations of SMM's address space of slots.
    fn flush_space(&mut self, tick: u64) {
        self.l2.flush_all(tick);
        self.structures.flush_all(tick);
        self.flush_global_fetch(None);
        for i in 0..self.contexts.len() {
            let world = usize::from(self.contexts[i].key.world);
            if world >> SPACE_SHIFT & 1 != 0 && i != self.current {
                // The last flush of this world came later.
                self.contexts[i].left = 0;
                self.renew_global_key(world);
            }
        }
        let world = usize::from(self.contexts[self.current].key.world);
        self.renew_global_key(world);
        self.flush_shared(Some(1));
        self.drop_current();
    }

    pub(crate) fn flush_everything(&mut self) {
        self.forget_pages();
        self.forget_switches();
        let tick = self.next_tick();
        self.l2.flush_all(tick);
        self.structures.flush_all(tick);
        self.flush_global_fetch(None);
        core::mem::swap(&mut self.global_fetch, &mut self.other_fetch);
        self.flush_global_fetch(None);
        core::mem::swap(&mut self.global_fetch, &mut self.other_fetch);
        self.flushes.everything = tick;
        self.families.clear();
        self.renew_global_keys();
        self.flush_shared(None);
        self.drop_current();
    }

    /// Drops the page in the second level.
    pub(crate) fn flush_reach_of(&self, gva: u64, context: usize) {
        let shift = self.region_shift(context, gva);
        for key in self.keys_of(context) {
            self.reach.flush_page(gva, key);
            if let Some(shift) = shift {
                self.reach.flush_region(gva, shift, key);
            }
        }
    }

    /// Forgets the page of a page fault, as processors do (SDM vol. 3, 4.10.4.1).
    #[inline(never)]
    pub(crate) fn forget_faulting(&mut self, gva: u64) {
        self.flush_reach_of(gva, self.current);
        for i in 0..self.contexts[self.current].nr_views() {
            let tables = self.contexts[self.current].tables_of_view(i);
            self.views[tables].l1.flush_page(gva);
        }
        self.forget_shared_page(gva);
    }

    /// Makes the next write of each page be noted again.
    pub(crate) fn begin_round(&mut self) {
        self.stats.rounds += 1;
        self.writes_epoch += 1;
        self.reach.begin_round();
        self.publish_reach();
    }
}
