//! Makes a block: it is decoded, grouped and emitted, and with it the next blocks that it certainly leads to.

use x86_cpu::{CodePage, CpuState};
use x86_interp::{Interp, Transfer};

use crate::code::source::source_of;
use crate::{
    Jit, JitBus, code::cache::TranslatedBlock, code::space::REL32, runtime::FallbackSite,
    runtime::quiet::Change,
};
use x86_codegen::{
    asm::CACHE_LINE,
    codegen::{Entries, How},
    frame::words::S1,
    ir::decoded::Decoded,
    ir::lowering::Lowering,
    ir::mode::{BlockKey, Mode},
    ir::segment::code_at,
    ir::source::{Source, TracePage},
    region::block,
};

/// Maximum number of blocks that are translated ahead because one is translated.
const MAX_AHEAD: u32 = 3;

/// The place of a jump in the buffer, which the block that it leads to may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JumpPlace {
    /// The jump's number among link sites.
    link: usize,
    at: usize,
    /// True if flags are in RFLAGS there.
    live: bool,
}

/// Who demands a block, and how it will be entered.
#[derive(Clone, Copy, Debug)]
struct Demand {
    /// The jump whose place the block takes, if nothing comes before the block's entry.
    place: Option<JumpPlace>,
    /// True if the block replaces its own translation because it is hot.
    is_again: bool,
    /// True if a branch back leads to the block.
    is_loop: bool,
    /// True if a branch of its page leads to the block.
    is_linked: bool,
    /// True if code can be executed without end by the branch that leads to the block.
    polls: bool,
    /// The gva of the block's page, if the block is executed at no other address.
    bound: Option<i32>,
}

/// What a block is made from, besides the decoded instructions.
#[derive(Clone, Copy, Debug)]
struct Origin {
    /// The sources of the block's page and of the second page; twice the same if there is no second page.
    sources: [Source; 2],
    /// The second page of the one instruction that straddles two.
    second: Option<CodePage>,
    /// True if the block is a trace, which follows a recorded path.
    is_trace: bool,
}

impl<B: JitBus> Jit<B> {
    /// Translates the block at `gva`. `None` if its code cannot be fetched now, or there is no room.
    pub(crate) fn translate(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        gva: u64,
        (key, generation, code): (BlockKey, u32, Source),
        is_ahead: bool,
    ) -> Option<TranslatedBlock> {
        let demand = self.take_demand(key, gva);
        let links = self.builder.translator.links.len();
        let origin = self.read((cpu, bus), gva, (key, code), &demand, is_ahead)?;
        let mut block = TranslatedBlock {
            entries: Entries::default(),
            generation,
            straddles: origin.second.is_some(),
            is_target: false,
            may_gain: self.form_groups(key.mode, origin.is_trace),
            len: self.builder.decoded.len().min(u8::MAX.into()) as u8,
        };
        if let Some(second) = origin.second {
            self.code.cache.second.insert(key, second);
        }
        let interpreted = self.prepare(interp, cpu, bus, gva);
        // A block that is linked has nothing before its entry, so it may take the jump's place.
        let place = demand.place.filter(|_| demand.is_linked);
        let place = place.filter(|_| origin.second.is_none());
        let base = self.base(place);
        block.entries = self.emit(
            (key, generation),
            base,
            &origin,
            interpreted,
            &demand,
            place,
        );
        self.publish(key, gva, base)?;
        if let Some(place) = place
            && let Some(site) = self.builder.translator.links.get_mut(place.link)
        {
            // The block is where the jump was: the site links no more, except to hot blocks below.
            site.patch = 0;
            self.stats.links += 1;
        }
        if let Some(old) = self.code.cache.blocks.insert(key, block) {
            self.forget(old.entries.outer as usize);
        }
        if demand.is_again {
            self.translated_again(key, links..self.builder.translator.links.len(), block);
        }
        Some(block)
    }

    /// Returns who demands the block of `key`, at `gva`. Afterwards the translator has what the profile knows of the
    /// block, and there is room for the block.
    fn take_demand(&mut self, key: BlockKey, gva: u64) -> Demand {
        let number = self.builder.wanted_by.take();
        let site = number.and_then(|n| self.builder.translator.links.get(n).copied());
        let mut place = number.and_then(|n| self.place_of(n));
        if self.code.is_full() {
            self.flush_all();
            place = None;
        }
        let bound = key.mode.bound(gva);
        if let Some(page) = bound {
            self.bind(key, page);
        }
        let hot = self.profiles.begin(key);
        let is_again = hot.as_ref().is_some_and(|(_, linked)| linked.is_some());
        let (is_loop, is_linked) = match hot {
            Some((_, Some(is_linked))) => (true, is_linked),
            _ => (site.is_some_and(|s| s.is_back), site.is_some()),
        };
        self.builder.translator.input.hot = hot.and_then(|(hot, _)| hot);
        Demand {
            place,
            is_again,
            is_loop,
            is_linked,
            polls: is_again || site.is_some_and(|s| s.polls),
            bound,
        }
    }

    /// Decodes the block, along its path if it has one.
    fn read(
        &mut self,
        (cpu, bus): (&mut CpuState, &mut B),
        gva: u64,
        (key, code): (BlockKey, Source),
        demand: &Demand,
        is_ahead: bool,
    ) -> Option<Origin> {
        let own = TracePage::own(code, demand.bound, key.at);
        let is_trace = self.follow_path(cpu, bus, (gva, key.mode), own);
        let second = match is_trace {
            true => None,
            false => {
                let stops = self.session.breakpoints.offsets_in(key.page());
                let how = (key.mode, demand.is_loop, is_ahead);
                self.decode((cpu, bus), gva, how, &stops)?
            }
        };
        self.builder.decoded.first()?;
        if self.lockstep.as_ref().is_some_and(|l| l.planted) {
            crate::runtime::lockstep::plant(&mut self.builder.decoded);
        }
        Some(Origin {
            sources: [code, second.map_or(code, |(_, source)| source)],
            second: second.map(|(page, _)| page),
            is_trace,
        })
    }

    /// Finds accesses that share a probe. Returns true if the block gains by being translated again once it is hot.
    fn form_groups(&mut self, mode: Mode, is_trace: bool) -> bool {
        if !mode.has_groups() {
            return false;
        }
        let b = &mut self.builder;
        let is_hot = b.translator.input.hot.is_some();
        b.groups.form(&mut b.decoded, mode.is_long(), is_hot);
        let calls = |d: &Decoded| matches!(d.kind, Lowering::Call | Lowering::CallIndirect);
        is_trace
            || b.decoded.iter().any(Decoded::may_have_site_entry)
            || mode.has_page_guards() && b.decoded.last().is_some_and(calls)
    }

    /// Returns the offsets of the two parts of the next block. Its first part begins at `place` if there is one.
    fn base(&self, place: Option<JumpPlace>) -> (usize, usize) {
        let (hot, cold) = self.code.next();
        let hot = match place {
            Some(place) => place.at,
            None if self.builder.translator.input.hot.is_some() => hot.next_multiple_of(CACHE_LINE),
            None => hot,
        };
        (hot, cold)
    }

    /// Emits the block, which is in [`Translator::asm`](x86_codegen::codegen::Translator::asm) afterwards.
    fn emit(
        &mut self,
        (key, generation): (BlockKey, u32),
        base: (usize, usize),
        origin: &Origin,
        interpreted: u32,
        demand: &Demand,
        place: Option<JumpPlace>,
    ) -> Entries {
        let blocks = &self.code.cache.blocks;
        let own = [false, true].map(|is_split| blocks.page(key.split(is_split)));
        let others: Vec<_> = self.builder.translator.input.pages[1..].to_vec();
        let known = |page: u8, target: u32, split: bool| {
            let (blocks, generation) = match usize::from(page).checked_sub(1) {
                None => (own[usize::from(split)]?, generation),
                Some(n) => {
                    let page = others.get(n)?;
                    let key = BlockKey::new(page.id, key.mode.split(split));
                    (blocks.page(key)?, page.source.generation)
                }
            };
            let b = blocks.get(target.into())?;
            let is_current = b.generation == generation && !b.straddles;
            is_current.then_some(b.entries)
        };
        self.builder.translator.block(
            (&self.builder.decoded, &self.builder.forms),
            base,
            &origin.sources[..1 + usize::from(origin.second.is_some())],
            interpreted,
            How {
                mode: key.mode,
                is_linked: demand.is_linked,
                polls: demand.polls,
                is_split: key.mode.has(Mode::SPLIT),
                falls: place.is_some_and(|p| p.live),
                bound: demand.bound,
                by_guard: key.mode.has_page_guards(),
                counts: key.mode.streams(),
            },
            known,
        )
    }

    /// Publishes the block that was emitted. `None` if there is no room for it.
    fn publish(&mut self, key: BlockKey, gva: u64, base: (usize, usize)) -> Option<()> {
        let parts = self.builder.translator.asm.parts();
        let written = parts.filter(|parts| self.code.publish(gva, base, *parts));
        let Some((hot, cold)) = written else {
            self.profiles.forget_path(key);
            return None;
        };
        let profile = self.builder.translator.input.hot.as_ref();
        self.stats.count_block(
            profile.map_or(0, |h| h.site_entries.len()),
            self.builder.decoded.len(),
            hot.len() + cold.len(),
        );
        Some(())
    }

    /// Decodes a block. Returns the second page of an instruction that straddles two, and its source. `None` if the
    /// second page cannot be fetched.
    fn decode(
        &mut self,
        (cpu, bus): (&mut CpuState, &mut B),
        gva: u64,
        how: (Mode, bool, bool),
        stops: &[u16],
    ) -> Option<Option<(CodePage, Source)>> {
        let b = &mut self.builder;
        let turns = b.translator.input.hot.as_ref().map(|h| &h.turns[..]);
        let mut decode = |bus: &mut B, cpu: &mut CpuState| {
            block::decode(
                &mut b.decoded,
                &mut b.forms,
                (cpu, bus),
                gva,
                how,
                stops,
                turns,
            )
        };
        if !decode(bus, cpu) {
            return Some(None);
        }
        // The generation is read before the bytes, so that a change in between makes the block stale.
        let page = bus.code_page(cpu, next_page(gva)).ok()?;
        let source = source_of(bus, page.id)?;
        decode(bus, cpu).then_some(Some((page, source)))
    }

    /// Binds the blocks of the page to this address. Blocks that were bound to another are forgotten.
    fn bind(&mut self, key: BlockKey, page: i32) {
        let old = self.code.cache.blocks.bind(key, page);
        if !old.is_empty() {
            self.profiles.forget(key.at);
        }
        for outer in old {
            self.forget(outer as usize);
        }
    }

    /// Decodes the block's last instruction for the interpreter, if it is left to it. Returns its number plus one, or 0
    /// if there is none.
    fn prepare(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        gva: u64,
    ) -> u32 {
        let Some(d) = self
            .builder
            .decoded
            .last()
            .filter(|d| d.kind == Lowering::Interpret && !d.i.is_invalid())
        else {
            return 0;
        };
        let mut bytes = [0; 15];
        let bytes = &mut bytes[..d.i.len()];
        let page = (gva & !0xfff).wrapping_add_signed(d.distance.into());
        let gva = page | u64::from(d.offset);
        if bus.code_bytes(cpu, gva, bytes) != Ok(bytes.len()) {
            return 0;
        }
        let Some(insn) = interp.prepare(cpu, bytes) else {
            return 0;
        };
        self.session.interpreted.push(FallbackSite {
            cause: self.builder.forms.of(&d.i).cause,
            transfer: Transfer::of(&insn),
            change: Change::of(&insn),
            insn,
        });
        self.session.interpreted.len() as u32
    }

    /// Translates the targets that the last block leads to always or nearly always, and links them. To do so now saves
    /// a call of Rust, and is faster while the processor's caches have what translation needs.
    pub(crate) fn translate_ahead(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        (key, generation, code): (BlockKey, u32, Source),
    ) {
        let page = code_at(cpu) & !0xfff;
        let mut left = MAX_AHEAD;
        while left > 0
            && !self.code.is_full()
            && let Some(number) = self.builder.translator.ahead.pop()
            && let Some(site) = self.builder.translator.links.get(number as usize).copied()
        {
            left -= 1;
            let target = u64::from(site.target);
            let key = key.beside(target).split(false);
            let known = self.code.cache.blocks.get(key);
            let known = known.filter(|b| b.generation == generation);
            let next = known.or_else(|| {
                self.builder.wanted_by = Some(number as usize);
                let gva = page | target;
                self.translate(interp, cpu, bus, gva, (key, generation, code), true)
            });
            if let Some(next) = next {
                self.link(number as usize, next);
            }
        }
        self.builder.translator.ahead.clear();
    }

    /// Returns the place of the jump of link site `number`, if that jump is the last code that was made: its target can
    /// take its place.
    fn place_of(&self, number: usize) -> Option<JumpPlace> {
        let site = self.builder.translator.links.get(number)?;
        let is_last = site.is_jump && site.patch + REL32 == self.code.end();
        is_last.then_some(JumpPlace {
            link: number,
            at: site.patch - 1,
            live: !site.saved,
        })
    }

    /// Emits the entries that the block at RIP does not have yet: most blocks that branches of their page lead to need
    /// no others. `None` if there is no room, or the code has changed.
    pub(crate) fn complete_entries(
        &mut self,
        cpu: &mut CpuState,
        bus: &mut B,
        is_split: bool,
        mut block: TranslatedBlock,
    ) -> Option<TranslatedBlock> {
        let (key, _) = self.key_at(cpu, bus)?;
        let key = key.split(is_split);
        // The generation is read first, and then compared with the block's.
        let source = source_of(bus, key.page())?;
        let (_, generation) = self.key_at(cpu, bus)?;
        if self.code.is_full() || generation != block.generation {
            return None;
        }
        let (_, cold) = self.code.next();
        let offset = key.at as u32 & 0xfff;
        self.builder.translator.complete_entries(
            cold,
            source,
            offset,
            (&mut block.entries, block.len),
            key.mode.streams(),
        );
        self.stats.bytes += self.write_cold()? as u64;
        self.code.cache.blocks.insert(key, block);
        Some(block)
    }

    /// Emits a stub that looks for the block at an offset of its page. Returns its offset; `None` if there is no room.
    pub(crate) fn stale_stub(&mut self, offset: u32, mode: Mode) -> Option<usize> {
        if self.code.is_full() {
            return None;
        }
        let (_, cold) = self.code.next();
        let a = &mut self.builder.translator.asm;
        a.start(cold);
        a.mov_imm(S1, offset.into());
        a.jmp_to(self.code.trampolines.of(mode.streams()).stale);
        self.write_cold()?;
        Some(cold)
    }

    /// Publishes emitted code that is no block. Returns its length.
    fn write_cold(&mut self) -> Option<usize> {
        let (code, _) = self.builder.translator.asm.parts()?;
        self.code.publish_cold(code);
        Some(code.len())
    }
}

pub(crate) fn next_page(rip: u64) -> u64 {
    (rip | 0xfff).wrapping_add(1)
}
