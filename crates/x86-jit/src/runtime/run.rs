//! [`Jit`]: the dispatch loop between translated code, the interpreter and the run loop.

use core::arch::asm;

use host::{CodeBuffer, CodeViews};
use x86_cpu::{CodeSize, CpuState, Exception, Shadow};
use x86_defs::{
    control::{cr0, cr4},
    dr, rflags, xsave,
};
use x86_interp::{Interp, RunStop};
use x86_native::HostFeatures;

use crate::{
    JitBus, Leash,
    asm::{Asm, Isa},
    code::cache::{Block, Cache, salt_of},
    code::perf::{self, Perf},
    code::room::Room,
    codegen::countdown,
    codegen::thunks::{self, Thunks},
    codegen::{Cell, Condition, Translator},
    frame::area::{self, index},
    frame::exit::{Left, Reason},
    ir::decoded::Decoded,
    ir::kind::Forms,
    plan::groups::Groups,
    profile::hot::Profiles,
    region::block::mode,
    runtime::flat,
    runtime::given_up::GivenUp,
    runtime::leave::{Site, handle},
    runtime::lockstep::{Lockstep, LockstepStats, Log, turn},
    runtime::refill::{forget_views, refill, tell_view},
    runtime::stats::Stats,
    runtime::translation::{Source, next_page},
};

/// Times that a block is looked for until, in tests, what is executed much is translated again, on average.
const AGAIN: u64 = 16;
/// Times that the run loop goes round until, in tests, a trace is made.
const FOLLOWED: u64 = 2;
/// Bytes of translated code of a vCPU: a compiler's is 80 MiB.
const CACHE_SIZE: usize = 128 << 20;

/// What the functions that translated code calls work on.
pub(crate) struct Context<B: JitBus> {
    pub(crate) jit: *mut Jit<B>,
    pub(crate) interp: *mut Interp<B>,
    pub(crate) cpu: *mut CpuState,
    pub(crate) bus: *mut B,
    /// Why it was left, if that was [`handle`]'s decision.
    pub(crate) left: Left,
}

/// A vCPU's translated code.
#[derive(Debug)]
pub struct Jit<B: JitBus> {
    pub(crate) buffer: CodeBuffer,
    pub(crate) room: Room,
    /// The link site that leads to what is translated next.
    pub(crate) wanted_by: Option<usize>,
    pub(crate) thunks: Thunks,
    pub(crate) cache: Cache,
    pub(crate) forms: Forms,
    pub(crate) decoded: Vec<Decoded>,
    pub(crate) groups: Groups,
    /// Instructions at which blocks leave for the interpreter.
    pub(crate) interpreted: Vec<Site<B>>,
    /// Instructions that translated code gives up again and again.
    pub(crate) given_up: GivenUp<B>,
    /// [`Interp::resets`] that they belong to.
    pub(crate) resets: u64,
    pub(crate) translator: Translator,
    pub(crate) profiles: Profiles,
    /// The MMU's slots that generation cells belong to.
    slots: u64,
    /// [`JitBus::tsc_offset`] has one.
    plain_tsc: bool,
    /// [`JitBus::code_changes`] when the host's stack was last looked at: [`handle`].
    pub(crate) changes: u64,
    /// The block that RIP's target leads to may be outdated.
    pub(crate) stale: bool,
    /// The translation with a probe for every access is to be executed.
    pub(crate) splits: bool,
    /// The page fault of the instruction that calls [`handle`] next.
    pub(crate) fault: Option<Exception>,
    /// See [`Self::can_resume`].
    can_resume: bool,
    /// Where RF was set when translated code was last gone on with, if nothing has
    /// called for Rust since.
    pub(crate) resumed: Option<u64>,
    /// Mode bits of the last [`Self::select`].
    pub(crate) mode: u8,
    /// [`mmu::Mmu::views_made`] that [`area::VIEWS`] belong to.
    pub(crate) views_made: u64,
    pub(crate) stats: Stats,
    /// For [`Stats::translate_ns`]: the clock takes longer to read.
    translate_ticks: u64,
    /// What translated code does counts when the interpreter agrees.
    pub(crate) lockstep: Option<Box<Lockstep<B>>>,
    /// Where the code of each block is, if somebody wants to know: offset, length, RIP.
    pub(crate) ranges: Vec<(usize, usize, u64)>,
    /// A profiler wants names.
    pub(crate) perf: Option<&'static Perf>,
    /// All code is dropped at random, once in so many blocks looked for; 0: never.
    pub(crate) flush_every: u64,
    random: u64,
}

impl<B: JitBus> Jit<B> {
    /// Maps the code buffer; `None` if the host does not allow that.
    pub fn new() -> Option<Self> {
        Self::with_capacity(CACHE_SIZE)
    }

    /// As [`Self::new`] with room for so many bytes of code: for tests, which
    /// need a cache that is full soon.
    pub fn with_capacity(bytes: usize) -> Option<Self> {
        let mut buffer = CodeBuffer::new(bytes.max(Room::LEAST)).ok()?;
        let host = HostFeatures::detected();
        let isa = Isa::of_host(&host);
        let mut a = Asm::new(isa);
        let thunks = {
            let refill = refill::<B> as *const () as u64;
            thunks::emit(&mut a, refill, handle::<B> as *const () as u64)
        };
        let thunks_end = a.here().next_multiple_of(64);
        buffer.write(0, a.parts()?.0);
        let code = buffer.rx() as u64;
        Some(Self {
            wanted_by: None,
            room: Room::new(thunks_end..buffer.len()),
            buffer,
            thunks,
            cache: Cache::new(),
            forms: Forms::new(host),
            decoded: Vec::new(),
            groups: Groups::new(),
            interpreted: Vec::new(),
            given_up: GivenUp::default(),
            resets: 0,
            translator: Translator::new(isa, thunks, code),
            profiles: Profiles::new(),
            slots: u64::MAX,
            plain_tsc: false,
            changes: 0,
            stale: false,
            splits: false,
            fault: None,
            can_resume: false,
            resumed: None,
            mode: 0,
            views_made: 0,
            stats: Stats::default(),
            translate_ticks: 0,
            lockstep: None,
            ranges: Vec::new(),
            perf: perf::wanted(),
            flush_every: 0,
            random: 0x2545_f491_4f6c_dd1d,
        })
    }

    /// Compares everything that translated code does with the interpreter from now on, at a
    /// fraction of the speed. `planted`: translates one instruction wrongly, for a test of this.
    pub fn set_lockstep(&mut self, planted: bool) {
        self.lockstep = Some(Lockstep::new(planted));
        self.set_mixed();
    }

    /// Translates every other block at once as if it were executed much, and now and then some of them again: for tests.
    pub fn set_mixed(&mut self) {
        self.profiles.is_mixed = true;
        self.flush_all();
    }

    /// Drops all code at random, about once in `every` times that a block is looked for: whatever
    /// depends on code that stays shows. 0: never. As for [`Self::set_mixed`].
    pub fn set_random_flushes(&mut self, every: u64) {
        self.profiles.is_mixed = every != 0;
        self.flush_every = every;
    }

    /// The first difference that lock-step has found: [`Self::run`] has returned `Exit` then.
    pub fn take_difference(&mut self) -> Option<String> {
        self.lockstep.as_mut()?.report.take()
    }

    /// What lock-step has compared.
    pub fn lockstep_stats(&self) -> Option<LockstepStats> {
        self.lockstep.as_ref().map(|l| l.stats)
    }

    /// The code made of the blocks at an address: its offset in the buffer, and its bytes.
    pub(crate) fn code_of(&self, rip: u64) -> Vec<(usize, Vec<u8>)> {
        let of = self.ranges.iter().filter(|(_, _, at)| *at == rip);
        of.map(|(offset, len, _)| (*offset, self.buffer.read(*offset, *len)))
            .collect()
    }

    /// For a [`host::Keeper`].
    pub fn code_views(&self) -> &std::sync::Arc<CodeViews> {
        self.buffer.views()
    }

    /// Counters.
    pub fn stats(&self) -> Stats {
        let mhz = u64::from(host::cpu::tsc_khz() / 1000).max(1);
        Stats {
            translate_ns: self.translate_ticks.saturating_mul(1000) / mhz,
            ..self.stats
        }
    }

    /// Has the direct branch `number` lead to the outer entry at `to` when its condition is met.
    pub(crate) fn lead_far(&mut self, number: usize, to: usize) {
        let Some(site) = self.translator.fars.get_mut(number) else {
            return;
        };
        let from = core::mem::replace(&mut site.to, to);
        let rel = (to as i64 - (site.jump as i64 + 4)) as i32;
        self.buffer.write(site.jump, &rel.to_le_bytes());
        self.stats.far_links += 1;
        let all = &mut self.cache.remembered;
        if from != to {
            if let Some(sites) = all.get_mut(&from) {
                sites.retain(|n| *n as usize != number);
            }
            all.entry(to).or_default().push(number as u32);
        }
    }

    /// The block whose outer entry is at `code` is replaced. What goes there by itself would
    /// find out each time.
    pub(crate) fn forget(&mut self, code: usize) {
        for n in self.cache.remembered.remove(&code).unwrap_or_default() {
            if let Some(site) = self.translator.fars.get_mut(n as usize) {
                site.to = 0;
                let (at, never) = site.condition.never();
                self.buffer.write(at, &never.to_le_bytes());
            }
        }
    }

    /// Forgets all code.
    pub fn flush_all(&mut self) {
        self.cache.clear();
        self.translator.links.clear();
        self.translator.fars.clear();
        self.interpreted.clear();
        self.given_up = GivenUp::default();
        self.profiles.clear();
        self.ranges.clear();
        if let Some(l) = &mut self.lockstep {
            l.flush();
        }
        self.room.clear();
        self.stats.flushes += 1;
    }

    /// Executes until something stops it, as [`Interp::run`] does, or until the leash ends.
    pub fn run(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        leash: Option<Leash<'_>>,
    ) -> RunStop {
        let _turn = self.lockstep.is_some().then(turn::wait);
        self.can_resume = false;
        set_gs_base(cpu);
        let words = &mut cpu.engine.words;
        words[index(area::HOST_MXCSR)] = xsave::MXCSR_DEFAULT.into();
        words[index(area::TARGETS)] = self.cache.targets.as_ptr() as u64;
        words[index(area::REQUESTS)] = bus.request_word().as_ptr() as u64;
        countdown::allow_polls(words, true);
        words[index(area::IRQ_WAITING)] = bus.interrupt_waits().into();
        let tsc = bus.tsc_offset();
        words[index(area::TSC_OFFSET)] = tsc.unwrap_or(0);
        countdown::begin(words, countdown::longest());
        words[index(area::LOG)] = 0;
        let leash = leash.filter(|_| self.lockstep.is_none());
        words[index(area::UNTIL)] = leash.map_or(0, |l| l.until_tsc);
        words[index(area::STOP)] = leash.map_or(0, |l| l.stop.as_ptr() as u64);
        self.plain_tsc = tsc.is_some() && self.lockstep.is_none();
        loop {
            if interp.resets() != self.resets {
                self.flush_all();
                self.resets = interp.resets();
            }
            if cpu.shadow == Shadow::None && bus.poll(cpu) {
                return RunStop::Poll;
            }
            self.resumed = drop_resume_flag(cpu);
            let stop = if self.profiles.is_mixed && self.is_time_to_follow(cpu) {
                self.follow_anew(interp, cpu, bus)
            } else if !is_translatable(cpu) {
                if needs_stepping(cpu) {
                    interp.one(cpu, bus)
                } else {
                    return interp.run(cpu, bus);
                }
            } else {
                match self.find(interp, cpu, bus) {
                    None => {
                        self.stats.interpreted += 1;
                        interp.one(cpu, bus)
                    }
                    Some(entry) => match self.enter(interp, cpu, bus, entry) {
                        Left::Poll => return RunStop::Poll,
                        Left::Again => RunStop::Poll,
                        Left::Interpreted(stop) => stop,
                        Left::Stopped(stop) => {
                            self.can_resume = stop == RunStop::Exit && self.lockstep.is_none();
                            stop
                        }
                    },
                }
            };
            if stop != RunStop::Poll {
                keep_resume_flag(cpu, stop, self.resumed);
                return stop;
            }
        }
    }

    /// An instruction of translated code has stopped for the VMM.
    pub fn can_resume(&self) -> bool {
        self.can_resume
    }

    /// As [`Self::run`], when nothing but general registers and RIP has changed since that stopped
    /// with [`Self::can_resume`], and [`JitBus::must_return`] is false.
    pub fn resume(&mut self, interp: &mut Interp<B>, cpu: &mut CpuState, bus: &mut B) -> RunStop {
        let rip = cpu.rip();
        let (key, salt) = target_key(cpu);
        let code = self.cache.target(rip, salt);
        let is_same = !self.stale
            && self.flush_every == 0
            && interp.resets() == self.resets
            && key == target_key_of(cpu, bus, self.mode);
        let Some(code) = code.filter(|_| is_same) else {
            return self.run(interp, cpu, bus, None);
        };
        set_gs_base(cpu);
        cpu.engine.words[index(area::PAGE)] = rip & !0xfff;
        // The byte is no longer anyone's.
        cpu.engine.words[index(area::UNTIL)] = 0;
        self.resumed = None;
        match self.call(interp, cpu, bus, code) {
            Left::Poll => RunStop::Poll,
            Left::Again => self.run(interp, cpu, bus, None),
            Left::Interpreted(stop) => {
                self.can_resume = false;
                stop
            }
            Left::Stopped(stop) => {
                self.can_resume = stop == RunStop::Exit;
                keep_resume_flag(cpu, stop, self.resumed);
                stop
            }
        }
    }

    /// Makes tables and keys those of the current mapping and mode.
    pub(crate) fn select(&mut self, cpu: &mut CpuState, bus: &mut B) {
        if bus.mmu().slots_generation() != self.slots {
            self.flush_all();
            self.slots = bus.mmu().slots_generation();
        }
        forget_views(cpu);
        self.update_mode(cpu, bus);
    }

    /// After a change of mode or view, and none of mappings.
    pub(crate) fn update_mode(&mut self, cpu: &mut CpuState, bus: &mut B) {
        if bus.mmu().views_made() != self.views_made {
            forget_views(cpu);
        }
        self.mode = mode_of(cpu, self.plain_tsc);
        self.set_view(cpu, bus);
    }

    /// Tables and keys of the bus's live view.
    pub(crate) fn set_view(&mut self, cpu: &mut CpuState, bus: &mut B) {
        // What the view has of before is cleared.
        bus.mmu().live_cells(self.cache.cells_generation);
        set_tables(cpu, bus);
        let key = target_key_of(cpu, bus, self.mode);
        let number = self.cache.number(key).unwrap_or_else(|| {
            for site in &self.translator.fars {
                if let Condition::Key { number, .. } = site.condition {
                    self.buffer.write(number, &[0; 4]);
                }
            }
            self.cache.number(key).unwrap_or(0)
        });
        let words = &mut cpu.engine.words;
        words[index(area::KEY)] = key;
        words[index(area::SALT)] = salt_of(key);
        words[index(area::NUMBER)] = number.into();
    }

    /// The mode bits of blocks for this state.
    pub(crate) fn mode_now(&self, cpu: &CpuState) -> u8 {
        mode_of(cpu, self.plain_tsc)
    }

    /// Host address at which to enter for RIP; the block is translated if need
    /// be. `None`: not translatable.
    pub(crate) fn find(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
    ) -> Option<u64> {
        let rip = cpu.rip();
        if self.profiles.is_mixed {
            self.disturb(cpu, bus);
        }
        self.select(cpu, bus);
        cpu.engine.words[index(area::PAGE)] = rip & !0xfff;
        let (_, salt) = target_key(cpu);
        if core::mem::take(&mut self.splits) {
            return self.find_split(interp, cpu, bus);
        }
        // The outer entry checks that the code has not changed.
        if let Some(code) = self.cache.target(rip, salt)
            && !std::mem::take(&mut self.stale)
        {
            return Some(code);
        }
        self.stale = false;
        let mut block = self.find_block(interp, cpu, bus, 0)?;
        if block.entries.outer == 0 {
            block = match self.complete_entries(cpu, bus, 0, block) {
                Some(block) => block,
                None => {
                    self.flush_all();
                    let block = self.find_block(interp, cpu, bus, 0);
                    block.filter(|b| b.entries.outer != 0)?
                }
            };
        }
        // Fetching may have filled tables.
        self.select(cpu, bus);
        let (key, salt) = target_key(cpu);
        let code = self.buffer.rx() as u64 + block.entries.outer as u64;
        self.cache.set_target(rip, key, salt, code);
        if let Some(((at, mode), generation)) = self.key_at(cpu, bus) {
            self.cache.blocks.note_target((at, mode));
            if let Some(cell) = self.cache.cell((at, mode)) {
                self.set_cell(bus, cell, rip);
            }
            if self.cache.is_new(rip, key) {
                let what = (at & !0xfff, mode, generation);
                let code = self.buffer.rx() as u64;
                self.cache.fill(what, (rip, key, salt), code);
            }
        }
        Some(code)
    }

    /// As [`Self::find`], for [`Self::splits`].
    fn find_split(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
    ) -> Option<u64> {
        let mut block = self.find_block(interp, cpu, bus, mode::SPLIT)?;
        if block.entries.outer == 0 {
            block = self.complete_entries(cpu, bus, mode::SPLIT, block)?;
        }
        self.select(cpu, bus);
        Some(self.buffer.rx() as u64 + u64::from(block.entries.outer))
    }

    /// The page that the cell belongs to is that of `rip` in the live view.
    pub(crate) fn set_cell(&self, bus: &mut B, cell: Cell, rip: u64) {
        let tables = bus.mmu().live_cells(self.cache.cells_generation);
        tables.set_cell(
            cell.number,
            (rip & !0xfff) + u64::from(cell.tag.unsigned_abs()),
        );
    }

    fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Now and then, where [`Self::set_mixed`] asks for it.
    fn is_time_to_follow(&mut self, cpu: &CpuState) -> bool {
        is_translatable(cpu) && self.next_random().is_multiple_of(FOLLOWED)
    }

    /// What [`Self::set_mixed`] and [`Self::set_random_flushes`] are for.
    fn disturb(&mut self, cpu: &mut CpuState, bus: &mut B) {
        self.next_random();
        if self.flush_every != 0 && self.random.is_multiple_of(self.flush_every) {
            self.flush_all();
        } else if self.random.is_multiple_of(AGAIN) {
            self.translate_some_again(cpu, bus);
        }
    }

    /// The block at RIP, translated if need be; `split` is [`mode::SPLIT`] or 0.
    pub(crate) fn find_block(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        split: u8,
    ) -> Option<Block> {
        let rip = cpu.rip();
        let ((at, mode), generation) = self.key_at(cpu, bus)?;
        let key = (at, mode | split);
        if let Some(b) = self.cache.blocks.get(key)
            && b.generation == generation
            // The neighbour may be mapped elsewhere, or not at all, by now.
            && (!b.straddles
                || bus.code_page(cpu, next_page(rip)).ok().as_ref() == self.cache.second.get(&key))
        {
            return Some(b);
        }
        let code = Source::of(bus, at & !0xfff)?;
        let start = host::cpu::rdtsc();
        let what = (key, generation, code);
        let block = self.translate(interp, cpu, bus, rip, what, false);
        if block.is_some() {
            self.translate_ahead(interp, cpu, bus, what);
        }
        self.translate_ticks += host::cpu::rdtsc().saturating_sub(start);
        block
    }

    /// Runs translated code from the block at host address `entry` on.
    fn enter(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        entry: u64,
    ) -> Left {
        if self.lockstep.is_some() {
            return self.enter_checked(interp, cpu, bus, entry);
        }
        self.call(interp, cpu, bus, entry)
    }

    /// The same without another engine beside it.
    pub(crate) fn call(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        entry: u64,
    ) -> Left {
        self.stats.entries += 1;
        let enter = self.buffer.rx() as u64 + self.thunks.enter as u64;
        let mut context = Context {
            jit: &raw mut *self,
            interp: &raw mut *interp,
            cpu: &raw mut *cpu,
            bus: &raw mut *bus,
            left: Left::Again,
        };
        let words = &mut cpu.engine.words;
        words[index(area::CONTEXT)] = &raw mut context as u64;
        words[index(area::ARGUMENT)] = 0;
        words[index(area::FLAGS)] = pack(cpu.rflags);
        words[index(area::ENTRY)] = entry;
        words[index(area::DEVICES)] = bus.mmu().device_pages() as u64;
        // SAFETY: GS addresses `cpu`, which nothing else uses meanwhile but the
        // functions that have `context`; the code is what `translator` made,
        // which keeps the host's calling convention (`thunks::emit`).
        unsafe {
            let f: extern "C" fn() = core::mem::transmute(enter as *const u8);
            f();
        }
        tell_view(cpu, bus);
        for _ in 0..core::mem::take(&mut cpu.engine.words[index(area::PAUSES)]) {
            bus.pause();
        }
        let words = &cpu.engine.words;
        if Reason::of(words[index(area::REASON)]) != Reason::Poll {
            return context.left;
        }
        let flags = unpack(words[index(area::FLAGS)]);
        cpu.rflags = cpu.rflags & !rflags::ARITH | flags;
        match self.look(interp, cpu, bus) {
            RunStop::Poll => Left::Poll,
            stop => Left::Interpreted(stop),
        }
    }

    /// Has link site `number` lead to a block, if that has not taken its place.
    pub(crate) fn link(&mut self, number: usize, to: Block) {
        let Some(site) = self.translator.links.get(number) else {
            return;
        };
        let entry = to.entries.of(site);
        if site.patch == 0 || entry == 0 {
            return;
        }
        let rel = (entry as i64 - (site.patch as i64 + 4)) as i32;
        self.buffer.write(site.patch, &rel.to_le_bytes());
        self.stats.links += 1;
    }
}

/// What [`Jit::set_view`] has set: the key of targets, and its salt.
pub(crate) fn target_key(cpu: &CpuState) -> (u64, u64) {
    let words = &cpu.engine.words;
    (words[index(area::KEY)], words[index(area::SALT)])
}

/// RFLAGS' arithmetic flags as LAHF and SETO leave them in AX.
pub(crate) fn pack(f: u64) -> u64 {
    (f & 0xd5 | 2) << 8 | f >> 11 & 1
}

pub(crate) fn unpack(ax: u64) -> u64 {
    ax >> 8 & 0xd5 | (ax & 1) << 11
}

/// 64-bit code, or flat 32-bit code, with nothing to be looked at, or counted, between two instructions.
pub(crate) fn is_translatable(cpu: &CpuState) -> bool {
    (cpu.code_size == CodeSize::Bits64 || flat::is_flat(cpu))
        && !(needs_stepping(cpu) || cpu.retired.counts_at(cpu.cpl))
        && !(cpu.cpl == 3 && cpu.cr0 & cr0::AM != 0 && cpu.rflags & rflags::AC != 0)
}

/// RF only matters while breakpoints are enabled: without any, the instruction
/// that begins now ends it. (An interrupt before it would show it in its frame;
/// callers have just looked for one.)
/// If it was set, its instruction's address is returned: see [`keep_resume_flag`].
pub(crate) fn drop_resume_flag(cpu: &mut CpuState) -> Option<u64> {
    if cpu.rflags & (rflags::TF | rflags::RF) == rflags::RF
        && cpu.effective_dr7() & dr::DR7_ENABLES == 0
        && cpu.shadow == Shadow::None
    {
        cpu.rflags &= !rflags::RF;
        return Some(cpu.rip());
    }
    None
}

/// An exit to the VMM in the middle of the instruction at `resumed`, which
/// [`drop_resume_flag`] returned: it begins again, with RF set.
pub(crate) fn keep_resume_flag(cpu: &mut CpuState, stop: RunStop, resumed: Option<u64>) {
    if stop == RunStop::Exit && resumed == Some(cpu.rip()) {
        cpu.rflags |= rflags::RF;
    }
}

fn needs_stepping(cpu: &CpuState) -> bool {
    cpu.shadow != Shadow::None
        || cpu.rflags & (rflags::TF | rflags::RF) != 0
        || cpu.effective_dr7() & dr::DR7_ENABLES != 0
}

/// The mode bits of blocks for this state.
fn mode_of(cpu: &CpuState, plain_tsc: bool) -> u8 {
    let mut mode = flat::mode_of(cpu);
    if has_plain_fp(cpu) {
        mode |= mode::FP;
    }
    if cpu.cr4 & cr4::OSXSAVE != 0 && cpu.xcr0 & 7 == 7 {
        mode |= mode::AVX;
    }
    if cpu.cpl == 0 && cpu.rflags & (rflags::IOPL | rflags::NT | rflags::DF) == 0 {
        mode |= mode::KERNEL;
    }
    if plain_tsc && (cpu.cpl == 0 || cpu.cr4 & cr4::TSD == 0) {
        mode |= mode::TSC;
    }
    mode
}

/// Bits of the x87 control word that mask all exceptions.
pub(crate) const X87_MASKED: u16 = 0x3f;
/// Bits of MXCSR that translated code may have in any way: flags, DAZ, rounding,
/// FTZ. The others are the masks, MM, and reserved ones.
pub(crate) const MXCSR_FREE: u32 = 0x3f | 0x40 | 0x6000 | 0x8000;

/// FP and SIMD instructions are enabled, and raise no exceptions.
fn has_plain_fp(cpu: &CpuState) -> bool {
    /// ES: a state image may have it set whatever the masks say.
    const X87_PENDING: u16 = 0x80;
    // What is in the host's registers got there because it is plain.
    let live = cpu.engine.words[index(area::FP_LIVE)] != 0;
    let plain = live
        || cpu.fp.mxcsr() & !MXCSR_FREE == xsave::MXCSR_DEFAULT
            && cpu.fp.u16_at(xsave::FCW) & X87_MASKED == X87_MASKED
            && cpu.fp.u16_at(xsave::FSW) & X87_PENDING == 0;
    plain && cpu.cr0 & (cr0::EM | cr0::TS) == 0 && cpu.cr4 & cr4::OSFXSR != 0
}

/// No key is zero.
fn target_key_of<B: JitBus>(cpu: &CpuState, bus: &mut B, mode: u8) -> u64 {
    (bus.mmu().target_epoch(cpu) + 1) << 8 | u64::from(mode)
}

pub(crate) fn set_tables<B: JitBus>(cpu: &mut CpuState, bus: &mut B) {
    let tables = match log_of(cpu) {
        Some(log) => {
            // The mapping may have changed, too.
            log.clear_tables();
            log.set_cells(bus.mmu().live_tables());
            log.tables()
        }
        None => bus.mmu().live_tables().base(),
    };
    cpu.engine.words[index(area::TABLES)] = tables;
}

/// Where writes have to be noted, in lock-step.
pub(crate) fn log_of(cpu: &mut CpuState) -> Option<&mut Log> {
    // SAFETY: zero, or what `Jit::stretch` put there, which nothing else uses while translated
    // code runs.
    unsafe { (cpu.engine.words[index(area::LOG)] as *mut Log).as_mut() }
}

/// Makes GS address `cpu`.
fn set_gs_base(cpu: &CpuState) {
    let base = &raw const *cpu as u64;
    if has_fsgsbase() {
        let now: u64;
        // SAFETY: reading GS's base has no effect; the kernel allows it.
        unsafe { asm!("rdgsbase {}", out(reg) now, options(nomem, nostack, preserves_flags)) };
        if now != base {
            // SAFETY: user space on x86-64 Linux does not use GS.
            unsafe { asm!("wrgsbase {}", in(reg) base, options(nostack, preserves_flags)) };
        }
        return;
    }
    const ARCH_SET_GS: i32 = 0x1001;
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, base) };
}

/// The kernel lets user space execute RDGSBASE (AT_HWCAP2 bit 1).
fn has_fsgsbase() -> bool {
    static ALLOWED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    // SAFETY: getauxval reads the process's auxiliary vector.
    *ALLOWED.get_or_init(|| unsafe { libc::getauxval(libc::AT_HWCAP2) } & 2 != 0)
}
