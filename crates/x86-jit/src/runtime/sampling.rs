//! Samples, which are taken at polls, and what is done about the hot blocks that they find.

use core::ops::Range;

use x86_cpu::CpuState;
use x86_interp::{Interp, RunStop};

use crate::{
    Jit, JitBus,
    code::cache::TranslatedBlock,
    profile::hot::{EXECUTED, Found, Profile, REVALIDATED},
    runtime::state::keep_resume_flag,
};
use x86_codegen::{
    frame::requests, ir::hot::Turns, ir::mode::BlockKey, ir::segment::code_at,
    ir::source::TracePage,
};

impl<B: JitBus> Jit<B> {
    /// Takes a sample: translated code has just been left at a poll. Returns why the interpreter has stopped, which may
    /// have executed what comes next.
    pub(crate) fn sample(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
    ) -> RunStop {
        if self.builder.translator.knows_table_sizes() {
            bus.mmu().sample_misses(cpu);
        }
        if core::mem::take(&mut cpu.engine.site_entries_missed) != 0 {
            self.judge_site_entries(bus);
            return RunStop::Poll;
        }
        let Some((key, generation)) = self.key_at(cpu, bus) else {
            return RunStop::Poll;
        };
        match self.profiles.note(key) {
            Found::Nothing => {}
            Found::Hot => {
                self.translate_again(key, generation);
                return self.follow(interp, cpu, bus, key, true);
            }
            Found::New => return self.follow(interp, cpu, bus, key, false),
            Found::Settled => {
                let has_path = self.profiles.take_path(key);
                if self.learn_turns(key) || has_path {
                    self.translate_again(key, generation);
                }
            }
        }
        RunStop::Poll
    }

    /// Has the block at RIP translated along the path that the interpreter executes now, without waiting for samples.
    pub(crate) fn follow_anew(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
    ) -> RunStop {
        let Some((key, generation)) = self.key_at(cpu, bus) else {
            return RunStop::Poll;
        };
        let all = &self.profiles.hot;
        if all.get(&key).is_some_and(|p| p.before.len() >= 4) {
            return RunStop::Poll;
        }
        self.translate_again(key, generation);
        let stop = self.follow(interp, cpu, bus, key, true);
        self.profiles.take_path(key);
        stop
    }

    /// Has the interpreter execute what comes next, for [`Profile::path`]. `is_first`: the path is recorded; otherwise
    /// the known one is cut where the two begin to differ.
    pub(crate) fn follow(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        key: BlockKey,
        is_first: bool,
    ) -> RunStop {
        let known = self.profiles.hot.get(&key);
        // In lock-step, this is where a stretch ends.
        let may = key.mode.has_page_guards() && cpu.engine.log() == 0;
        if !known.is_some_and(|p| may && (is_first || !p.path.is_empty())) {
            return RunStop::Poll;
        }
        let resumed = self.session.resumed.take();
        let (path, stop) = self.record(interp, cpu, bus);
        keep_resume_flag(cpu, stop, resumed);
        if let Some(p) = self.profiles.hot.get_mut(&key) {
            if is_first {
                p.path = path;
            } else {
                let same = p.path.iter().zip(&path).take_while(|(a, b)| a == b).count();
                p.path.truncate(same);
            }
        }
        stop
    }

    /// Notes how many iterations the loops within the block make, where they were always left in the same one. Returns
    /// true if that is new for any.
    fn learn_turns(&mut self, key: BlockKey) -> bool {
        let Some(p) = self.profiles.hot.get_mut(&key).filter(|p| !p.is_due) else {
            return false;
        };
        let sites = self.builder.translator.links.get(p.links.clone());
        let taken = sites.unwrap_or_default().iter().filter(|s| s.is_taken);
        let known = p.hot.turns.len();
        for s in taken.clone().filter(|s| s.turn != 0) {
            let (end, turns) = (s.target, s.turn);
            let mut others = taken.clone().filter(|o| o.target == end);
            if others.all(|o| o.turn == turns) && p.hot.turns.iter().all(|t| t.end != end) {
                p.hot.turns.push(Turns { end, turns });
            }
        }
        let new = p.hot.turns.len() - known;
        self.stats.loops_known += new as u64;
        if new != 0 {
            // The next translation numbers instructions differently, so the bits of `without` are void.
            p.hot.without = 0;
        }
        new != 0
    }

    /// Returns the block at RIP, and the generation of its code.
    pub(crate) fn key_at(&self, cpu: &mut CpuState, bus: &mut B) -> Option<(BlockKey, u32)> {
        let gva = code_at(cpu);
        let page = bus.code_page(cpu, gva).ok()?;
        let mode = self
            .code
            .cache
            .blocks
            .mode_at(gva, &page, self.session.mode);
        Some((BlockKey::new(page.id | gva & 0xfff, mode), page.generation))
    }

    /// Has blocks translated again whose per-site entries miss too often: the MMU has counted many misses.
    fn judge_site_entries(&mut self, bus: &mut B) {
        let mut worse: Vec<BlockKey> = Vec::new();
        for (site_entry, count) in bus.mmu().site_entry_counts().iter_mut().enumerate() {
            if *count < requests::SITE_ENTRY_MISSES {
                continue;
            }
            let missed = core::mem::take(count).into();
            self.stats.site_entry_misses += missed;
            if let Some(key) = self.profiles.judge(site_entry, missed) {
                self.stats.site_entries_dropped += 1;
                if !worse.contains(&key) {
                    worse.push(key);
                }
            }
        }
        for key in worse {
            if let Some(p) = self.profiles.hot.get(&key) {
                self.translate_again(key, p.generation);
            }
        }
    }

    /// Has the block at RIP translated again, and some hot blocks of its page.
    pub(crate) fn translate_some_again(&mut self, cpu: &mut CpuState, bus: &mut B) {
        let Some((here, generation)) = self.key_at(cpu, bus) else {
            return;
        };
        let all = &self.profiles.hot;
        let beside = all.keys().filter(|key| key.at >> 12 == here.at >> 12);
        // The entry of each earlier translation is kept, so their number is limited.
        let is_new = |key: &BlockKey| {
            let p = all.get(key);
            p.is_none_or(|p| !p.is_due && p.before.len() < 4)
        };
        let some = beside.copied().chain([here]).filter(is_new);
        let some: Vec<BlockKey> = some.take(8).collect();
        for key in some {
            self.learn_turns(key);
            self.translate_again(key, generation);
        }
    }

    /// Handles a trace at RIP that was not entered because its pages are not known to be where and what they were. If
    /// all of them are, their page guards are set again. If that cannot be told, the split translation is executed
    /// once. Otherwise the block is translated again as no trace.
    pub(crate) fn revalidate_trace(&mut self, cpu: &mut CpuState, bus: &mut B) {
        let Some((key, generation)) = self.key_at(cpu, bus) else {
            return;
        };
        let is_trace =
            |p: &&mut Profile| !p.is_due && p.generation == generation && p.pages.len() > 1;
        let Some(p) = self.profiles.hot.get_mut(&key).filter(is_trace) else {
            self.session.splits = true;
            return;
        };
        let now = host::cpu::rdtsc();
        p.revalidated = match p.revalidated {
            (last, n) if now.wrapping_sub(last) < REVALIDATED.0 => (now, n + 1),
            _ => (now, 0),
        };
        let first_page = cpu.rip() & !0xfff;
        let pages = p.pages.clone();
        let gva = |page: &TracePage| first_page.wrapping_add_signed(page.distance.into());
        let may_revalidate = p.revalidated.1 < REVALIDATED.1;
        if may_revalidate && !pages[1..].iter().all(|p| bus.mmu().is_fetched(gva(p))) {
            self.session.splits = true;
            return;
        }
        let is_there = |page: &TracePage| {
            let now = bus.code_page(cpu, gva(page));
            now.is_ok_and(|now| (now.id, now.generation) == (page.id, page.source.generation))
        };
        if may_revalidate && pages[1..].iter().all(is_there) {
            for page in &pages {
                if let Some(page_guard) = page.page_guard {
                    self.code.cache.set_page_guard(bus, page_guard, gva(page));
                }
            }
            return;
        }
        self.profiles.forget_path(key);
        self.translate_again(key, generation);
        if self.profiles.hot.get(&key).is_none_or(|p| !p.is_due) {
            // There is no room for the stub that would have the block translated.
            self.flush_all();
        }
    }

    /// Has the block translated again when it is executed next.
    fn translate_again(&mut self, key: BlockKey, generation: u32) {
        let is_current =
            |b: &TranslatedBlock| b.generation == generation && b.may_gain && !b.straddles;
        let Some(old) = self.code.cache.blocks.get(key).filter(is_current) else {
            return;
        };
        let from = old.entries.saved as usize;
        let Some(stub) = self.stale_stub(key.at as u32 & 0xfff, key.mode) else {
            return;
        };
        self.code.redirect(from, stub);
        let outdated = TranslatedBlock {
            generation: generation.wrapping_sub(1),
            ..old
        };
        self.code.cache.blocks.insert(key, outdated);
        self.forget(old.entries.outer as usize);
        let p = self.profiles.hot.entry(key).or_default();
        p.is_due = true;
        p.is_linked = old.entries.outer == 0 || old.entries.outer > old.entries.saved;
        p.before.push(from);
        self.stats.hot += 1;
    }

    /// Notes that the block that was to be translated again has been.
    pub(crate) fn translated_again(
        &mut self,
        key: BlockKey,
        links: Range<usize>,
        block: TranslatedBlock,
    ) {
        let Some(p) = self.profiles.hot.get_mut(&key) else {
            return;
        };
        p.hot = self.builder.translator.input.hot.take().unwrap_or_default();
        p.missed = vec![0; p.hot.site_entries.len()];
        p.len = self.builder.decoded.len().clamp(1, EXECUTED) as u64;
        (p.samples, p.is_due) = (0, false);
        (p.links, p.generation) = (links, block.generation);
        p.pages.clear();
        if self.builder.translator.input.pages.len() > 1 {
            p.pages.extend(&self.builder.translator.input.pages);
        }
        for (site_entry, _) in &p.hot.site_entries {
            self.profiles.owners[usize::from(*site_entry)] = Some(key);
        }
        // Jumps that lead to an older translation go on with the new one.
        for from in &p.before {
            self.code.redirect(*from, block.entries.saved as usize);
        }
        let is_watched = p.is_watched;
        self.link_hot(key, block);
        if !is_watched {
            self.watch_next(key);
        }
    }

    /// Watches the blocks that a hot block branches forward to: has them translated with a poll, as a forward branch
    /// has none and samples would not find them.
    fn watch_next(&mut self, key: BlockKey) {
        let Some(p) = self.profiles.hot.get(&key) else {
            return;
        };
        let generation = p.generation;
        let sites = self.builder.translator.links.get(p.links.clone());
        let sites = sites.unwrap_or_default().iter();
        let sites = sites.filter(|s| !s.split && !s.is_away);
        let all: Vec<BlockKey> = sites.map(|s| key.beside(s.target.into())).collect();
        for key in all {
            let next = self.code.cache.blocks.get(key);
            if next.is_some_and(|b| b.entries.polled != b.entries.saved)
                && !self.profiles.hot.contains_key(&key)
            {
                self.translate_again(key, generation);
                if let Some(p) = self.profiles.hot.get_mut(&key) {
                    p.is_watched = true;
                }
            }
        }
    }

    /// Links branches of the page's other hot blocks to the hot block `to`.
    fn link_hot(&mut self, key: BlockKey, to: TranslatedBlock) {
        let is_beside = |of: &BlockKey| of.at >> 12 == key.at >> 12 && of.mode == key.mode;
        let all = &self.builder.translator.links;
        let to_it = |n: &usize| {
            let site = all.get(*n);
            site.is_some_and(|s| {
                u64::from(s.target) == key.at & 0xfff
                    && !s.split
                    && !s.is_away
                    && !s.is_of_interest()
            })
        };
        let mut sites = Vec::new();
        for (of, p) in &self.profiles.hot {
            // The block's branches to itself are linked already.
            if is_beside(of) && *of != key && !p.is_due && p.generation == to.generation {
                sites.extend(p.links.clone().filter(to_it));
            }
        }
        for site in sites {
            self.link(site, to);
        }
    }
}
