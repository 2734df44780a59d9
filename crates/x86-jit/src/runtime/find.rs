//! From RIP to code: the keys of mapping and mode, the target table, and the blocks of a page.

use x86_cpu::CpuState;
use x86_interp::Interp;

use crate::code::source::source_of;
use crate::{
    Jit, JitBus,
    code::cache::TranslatedBlock,
    runtime::flat::set_bounds,
    runtime::lockstep::set_tables,
    runtime::state::{mode_of, target_key},
    runtime::system_call,
    runtime::translation::next_page,
};
use x86_codegen::{
    codegen::Condition,
    frame::targets::salt_of,
    ir::mode::Mode,
    ir::segment::{code_at, has_pages, page_of},
};

impl<B: JitBus> Jit<B> {
    /// Selects the tables and keys of the current mapping and mode.
    pub(crate) fn select(&mut self, cpu: &mut CpuState, bus: &mut B) {
        if bus.mmu().slots_generation() != self.session.slots {
            self.flush_all();
            self.session.slots = bus.mmu().slots_generation();
        }
        cpu.engine.forget_views();
        self.update_mode(cpu, bus);
    }

    /// Does the same after a change of mode or view, where mappings have not changed.
    pub(crate) fn update_mode(&mut self, cpu: &mut CpuState, bus: &mut B) {
        if bus.mmu().views_made() != self.session.views_made {
            cpu.engine.forget_views();
        }
        let plain_tsc = self.session.plain_tsc;
        self.session.mode = mode_of(cpu, plain_tsc);
        cpu.engine.level_facts = system_call::facts(cpu, plain_tsc, bus.follows_levels());
        self.set_view(cpu, bus);
    }

    /// Sets the tables and keys of the bus's live view.
    pub(crate) fn set_view(&mut self, cpu: &mut CpuState, bus: &mut B) {
        // Clears the view's page guards if they are of an older generation.
        bus.mmu()
            .live_page_guards(self.code.cache.page_guards_generation);
        set_tables(cpu, bus);
        cpu.engine.address_space = bus.mmu().address_space();
        if self.session.mode.has(Mode::SEGMENTED) {
            set_bounds(cpu);
        }
        let key = self.target_key_of(cpu, bus);
        let number = self.code.cache.number(key).unwrap_or_else(|| {
            self.session.switches.clear();
            self.session.keys.clear();
            self.session.levels.clear();
            for site in &self.builder.translator.cross_page_sites {
                if let Condition::BlockNumber { number, .. } = site.condition {
                    self.code.set_operand(number, 0);
                }
            }
            self.code.cache.number(key).unwrap_or(0)
        });
        let salt = salt_of(key);
        let frame = &mut cpu.engine;
        frame.key = key;
        frame.salt = salt;
        frame.number = number.into();
        if self.lockstep.is_none() {
            self.session.keys.set(key, salt, number);
        }
    }

    /// Takes the mode from the key: generated code may have changed both by itself.
    #[inline]
    pub(crate) fn follow_mode(&mut self, cpu: &CpuState) {
        self.session.mode = Mode::of_key(target_key(cpu).0);
    }

    /// Returns the mode bits of blocks for this state.
    pub(crate) fn mode_now(&self, cpu: &CpuState) -> Mode {
        mode_of(cpu, self.session.plain_tsc)
    }

    /// Returns the host address at which to enter the block at RIP, which is translated if it has not been. `None`: the
    /// code cannot be translated.
    pub(crate) fn find(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
    ) -> Option<u64> {
        let rip = cpu.rip();
        if self.profiles.mixes_tiers {
            self.disturb(cpu, bus);
        }
        self.heed_breakpoints(cpu, bus);
        bus.mmu().grow_tables(cpu);
        if bus.mmu().views_made() != self.session.views_made {
            // The live view may be to have other tables. (Not once code was fetched through these: its key is theirs.)
            bus.select_view(cpu);
            self.session.views_made = bus.mmu().views_made();
        }
        self.select(cpu, bus);
        self.note_places(cpu, bus);
        let page = page_of(cpu);
        cpu.engine.page = page;
        let (_, salt) = target_key(cpu);
        if core::mem::take(&mut self.session.splits) {
            return self.find_split(interp, cpu, bus);
        }
        // The outer entry checks that the code has not changed.
        if let Some(code) = self.code.cache.target(rip, salt)
            && !std::mem::take(&mut self.session.stale)
        {
            return Some(code);
        }
        self.session.stale = false;
        let mut block = self.find_block(interp, cpu, bus, false)?;
        if block.entries.outer == 0 {
            block = match self.complete_entries(cpu, bus, false, block) {
                Some(block) => block,
                None => {
                    self.flush_all();
                    let block = self.find_block(interp, cpu, bus, false);
                    block.filter(|b| b.entries.outer != 0)?
                }
            };
        }
        // Fetching may have filled tables.
        self.select(cpu, bus);
        let (key, salt) = target_key(cpu);
        let code = self.code.address(block.entries.outer as usize);
        self.code.cache.set_target((rip, page), key, salt, code);
        if let Some((at, generation)) = self.key_at(cpu, bus) {
            self.code.cache.blocks.note_target(at);
            if let Some(page_guard) = self.code.cache.page_guard(at) {
                self.code.cache.set_page_guard(bus, page_guard, rip);
            }
            if self.code.cache.is_new(page, key) {
                let what = (at.of_page(), generation);
                let code = self.code.address(0);
                self.code.cache.fill(what, (page, key, salt), code);
            }
        }
        Some(code)
    }

    /// Finds the split translation of the block at RIP, as [`Self::find`] does the other: for
    /// [`super::Session::splits`].
    pub(crate) fn find_split(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
    ) -> Option<u64> {
        let mut block = self.find_block(interp, cpu, bus, true)?;
        if block.entries.outer == 0 {
            block = self.complete_entries(cpu, bus, true, block)?;
        }
        self.select(cpu, bus);
        Some(self.code.address(block.entries.outer as usize))
    }

    /// Returns the block at RIP, translated if it has not been. `is_split`: its translation in which every access
    /// probes for itself.
    pub(crate) fn find_block(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        is_split: bool,
    ) -> Option<TranslatedBlock> {
        if self.session.mode.has(Mode::SEGMENTED) && !has_pages(cpu, 0) {
            return None;
        }
        let gva = code_at(cpu);
        let (key, generation) = self.key_at(cpu, bus)?;
        if self.session.breakpoints.stops_at(cpu, key.at) {
            return None;
        }
        let key = key.split(is_split);
        if let Some(b) = self.code.cache.blocks.get(key)
            && b.generation == generation
            // The next page may be mapped elsewhere, or not at all, by now.
            && (!b.straddles
                || bus.code_page(cpu, next_page(gva)).ok().as_ref() == self.code.cache.second.get(&key))
        {
            return Some(b);
        }
        let code = source_of(bus, key.page())?;
        let start = host::cpu::rdtsc();
        let what = (key, generation, code);
        let block = self.translate(interp, cpu, bus, gva, what, false);
        if block.is_some() {
            self.translate_ahead(interp, cpu, bus, what);
        }
        self.translate_ticks += host::cpu::rdtsc().saturating_sub(start);
        block
    }
}
