//! From decoded instructions to host code.
//!
//! ```text
//! outer:  cmp [generation], known      entered from elsewhere: is the code still the same?
//! saved:  (load FP state)              flags are in FLAGS
//!         sub r12, n; jl poll          entered from here by the block itself
//! body:   …
//! inner:  = saved, or flags saved first: entered by a link with flags in RFLAGS
//! ```
//!
//! A trace goes through several pages ([`inline`]). The other pages are compared at `saved`, too. Until then, only the
//! first page's code says which flags are live.
//!
//! An instruction that straddles two pages is a block of its own. It can be entered only from outside, where both pages
//! are checked; its other entries lead there through the target table.
//!
//! RFLAGS is free for the translator's own use wherever no guest flag is live.
//! DEVIATION: a fault of an instruction after which the block overwrites all arithmetic flags unread is delivered with
//! unspecified values of those flags in the saved RFLAGS. Execution after the fault overwrites them too, so that no
//! program can depend on them. (A program that overwrites the code right behind the instruction could: by code that
//! reads flags that nothing had read. In 16-bit code, where programs do that, flags are exact at each store.)

pub(crate) mod branch;
mod by_mode;
mod copy;
pub mod countdown;
mod counted;
mod crossing;
mod divide;
mod element;
mod far;
mod flags;
pub(crate) mod fp_state;
mod frames;
pub(crate) mod hoist;
pub(crate) mod inline;
mod interpret;
mod levels;
mod masked;
pub(crate) mod memory;
pub(crate) mod misses;
pub(crate) mod narrow;
mod recode;
mod registers;
mod segment;
mod sites;
mod stack;
mod state;
mod state_image;
pub(crate) mod string;
mod stub;
mod stubs;
mod switches;
mod system;
mod tally;
pub mod trampolines;
mod view_changes;
mod x87;

use flags::Flags;
use iced_x86::{Encoder, Register};
use memory::{Finds, Probe};
pub use sites::{Condition, CrossPageSite, Entries, How, LinkSite};
use state::{Allocation, Emission, Input};
use stub::Stub;

use crate::{
    asm::*,
    codegen::countdown::exact::{self, Cost},
    codegen::flags::save_flags,
    codegen::trampolines::{AllTrampolines, Trampolines},
    frame::words::*,
    ir::branch::{is_loop, target},
    ir::decoded::{Decoded, live_before_pages},
    ir::lowering::{Form, Forms, Lowering},
    ir::lowering::{has_short_address, has_short_words},
    ir::mode::Mode,
    ir::narrow::zeroes_vectors,
    ir::passed::{is_passed, keeps_cached},
    ir::source::Source,
    ir::streams::Streams,
};

/// Copies of the code that is emitted most often, with places to fill in.
#[derive(Debug)]
struct Templates {
    /// By [`Finds`], then as [`Probe::COMMON`].
    probe: [[Template<2>; 3]; 2],
    miss: [Template<2>; 3],
    /// Loads r13 with the number of a link and jumps: the places of the number and of the jump's displacement.
    link: Template<2>,
    /// By whether a page guard is compared, else the key's number; then by whether the gva of the target's page is
    /// known.
    cross_page: [[Template<4>; 2]; 2],
}

impl Templates {
    fn new(isa: Isa) -> Box<Self> {
        Box::new(Self {
            probe: [Finds::Address, Finds::Parts]
                .map(|finds| Probe::COMMON.map(|p| Template::new(isa, |a| p.emit(a, finds)))),
            miss: Probe::COMMON.map(|p| Template::new(isa, |a| p.emit_miss(a))),
            link: Template::new(isa, |a| {
                a.mov_imm(S1, 0);
                [a.here() - 4, a.jmp()]
            }),
            cross_page: [
                [false, true].map(|is_known| branch::by_key(isa, is_known)),
                [false, true].map(|is_known| branch::by_guard(isa, is_known)),
            ],
        })
    }
}

/// Emits the host code of blocks.
pub struct Translator {
    /// The code of the last block, which is to be copied.
    pub asm: Asm,
    /// Branches within pages, of all blocks in the buffer.
    pub links: Vec<LinkSite>,
    /// Direct branches to other pages, of all blocks in the buffer.
    pub cross_page_sites: Vec<CrossPageSite>,
    /// Numbers of the last block's links that are followed always or nearly always: their targets are translated at
    /// once.
    pub ahead: Vec<u32>,
    stubs: Vec<Stub>,
    encoder: Encoder,
    /// The trampolines of the kind of code that is translated now: plain, or counting what is retired.
    trampolines: Trampolines,
    all_trampolines: AllTrampolines,
    templates: Box<Templates>,
    /// Host address of the code buffer.
    code: u64,
    next: Allocation,
    /// What the block is translated from.
    pub input: Input,
    state: Emission,
}

impl core::fmt::Debug for Translator {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Translator")
            .field("links", &self.links.len())
            .finish_non_exhaustive()
    }
}

/// The error of an instruction that cannot be translated after all.
struct Unsupported;

type Emit = Result<(), Unsupported>;

/// Length in bytes of the comparison of a page's generation, if its address is near.
const CHECK_LEN: usize = 10;

impl Translator {
    /// `code`: host address at which the code buffer is executed.
    pub fn new(isa: Isa, all_trampolines: AllTrampolines, code: u64) -> Self {
        Self {
            asm: Asm::new(isa),
            links: Vec::new(),
            cross_page_sites: Vec::new(),
            ahead: Vec::new(),
            stubs: Vec::new(),
            encoder: Encoder::new(64),
            trampolines: all_trampolines.plain,
            all_trampolines,
            templates: Templates::new(isa),
            code,
            next: Allocation::new(),
            input: Input::new(),
            state: Emission::new(),
        }
    }

    /// Returns true if generated code works with tables of each size: it has BEXTR.
    pub fn knows_table_sizes(&self) -> bool {
        self.asm.isa().bmi1
    }

    /// Emits at offset `base` of the buffer those entries that the block at `offset`, of `len` instructions, does not
    /// have yet.
    pub fn complete_entries(
        &mut self,
        base: usize,
        source: Source,
        offset: u32,
        (entries, len): (&mut Entries, u8),
        counts: Option<Streams>,
    ) {
        // No instructions are needed for a poll that counts: a block that counts has had its entry with a poll from the
        // first.
        self.count(&[], counts);
        self.asm.start(base);
        self.stubs.clear();
        self.begin_trace();
        if entries.outer == 0 {
            entries.outer = self.asm.here() as u32;
            self.check(&[source], offset);
        }
        if entries.polled == 0 {
            entries.polled = self.asm.here() as u32;
            self.poll(len.into(), offset, None);
        }
        self.asm.jmp_to(entries.saved as usize);
        self.emit_stubs(None, |_, _, _| None);
    }

    /// Emits the countdown for a block of `len` instructions. After a poll, execution goes on behind it, or at `after`.
    fn poll(&mut self, len: usize, offset: u32, after: Option<usize>) {
        if self.state.tally.counts() {
            return self.counted_poll(offset, after);
        }
        let a = &mut self.asm;
        let from = countdown::enter(a, len);
        let resume = after.unwrap_or(a.here());
        self.stubs.push(Stub::Poll {
            from: [from; _],
            resume,
            offset,
            cost: Cost::default(),
        });
    }

    /// Translates a block to the two offsets `base` of the buffer: of what is executed, and of the stubs behind it. The
    /// code is in `self.asm` afterwards. `sources` are the block's page, or the two pages that its only instruction
    /// straddles. `interpreted` is the number of the instruction at the block's end that is left to the interpreter.
    /// `known` returns the entries of blocks that links may lead to, by the page's index in [`Input::pages`], the
    /// offset in the page, and [`LinkSite::split`].
    pub fn block(
        &mut self,
        (insns, forms): (&[Decoded], &Forms),
        base: (usize, usize),
        sources: &[Source],
        interpreted: u32,
        how: How,
        known: impl Fn(u8, u32, bool) -> Option<Entries>,
    ) -> Entries {
        self.input.interpreted = interpreted;
        self.input.mode = how.mode;
        self.input.long = how.mode.is_long();
        self.input.word = if self.input.long { 8 } else { 4 };
        self.input.bound = how.bound;
        self.input.by_guard = how.by_guard;
        self.count(insns, how.counts);
        self.asm.start(base.0);
        self.stubs.clear();
        self.ahead.clear();
        self.state.current = None;
        self.state.flags = Flags::Memory;
        self.state.cached = None;
        self.begin_trace();
        self.input.source = sources.first().copied().unwrap_or_default();
        let offset = insns.first().map_or(0, |d| d.offset);
        let live = insns.first().map_or(0, |d| d.live_in);
        let live_before_pages = live_before_pages(insns);
        // A block that only links lead to gets no outer entry yet.
        let is_apart = how.is_linked && sources.len() == 1;
        let outer = if is_apart { 0 } else { self.asm.here() };
        if !is_apart {
            self.check(sources, offset);
        }
        let mut inner = (how.falls && live_before_pages != 0).then(|| self.asm.here());
        if inner.is_some() {
            save_flags(&mut self.asm);
        }
        let mut saved = self.asm.here();
        if insns.iter().any(|d| d.kind.is_fp()) {
            self.need_fp();
        }
        self.compare_pages(offset);
        if self.input.hot.is_some() && is_loop(insns) {
            self.asm.align();
        }
        // A branch from the block to itself finds FP state loaded.
        let again = self.asm.here();
        let goes_back = insns.windows(2).any(|w| w[1].offset <= w[0].offset);
        let counts = self.state.tally.counts();
        let polls = !is_apart || how.polls || goes_back || live_before_pages != 0 || counts;
        if polls {
            self.poll(insns.len(), offset, None);
        }
        let is_complete = self.body(insns, forms);
        let (mut next, mut hoist) = (again, None);
        if is_complete && polls && live == 0 && sources.len() == 1 && !how.is_split {
            next = self.hold(insns, forms, again).unwrap_or(again);
            hoist = self.hoist_probes(insns, forms, (again, next));
        }
        if sources.len() > 1 {
            saved = self.asm.here();
            self.cross_page(offset, offset as i32);
        }
        if live_before_pages == 0 {
            inner = Some(saved);
        }
        let inner = inner.unwrap_or_else(|| {
            let here = self.asm.here();
            save_flags(&mut self.asm);
            self.asm.jmp_to(saved);
            here
        });
        self.asm.go_on_at(base.1);
        let entries = Entries {
            outer: outer as u32,
            polled: if polls { saved as u32 } else { 0 },
            saved: saved as u32,
            inner: inner as u32,
        };
        let is_itself =
            |page, at, split| sources.len() == 1 && (page, at, split) == (0, offset, how.is_split);
        let (again, hoisted) = match hoist {
            Some((start, hoisted, stubs)) => (start, Some((hoisted, stubs))),
            None => (next, None),
        };
        let again = Entries {
            polled: if polls { again as u32 } else { 0 },
            saved: again as u32,
            inner: if live == 0 { again } else { inner } as u32,
            ..entries
        };
        self.emit_stubs(hoisted.as_ref(), |page, at, split| {
            if is_itself(page, at, split) {
                return Some(again);
            }
            known(page, at, split)
        });
        entries
    }

    /// Emits what the block executes. Returns true if all of it could be translated.
    fn body(&mut self, insns: &[Decoded], forms: &Forms) -> bool {
        let (mut ended, mut is_complete) = (false, true);
        let mut rest = insns;
        while let Some(d) = rest.first() {
            self.state.position = insns.len() - rest.len();
            self.state.tally.mark(self.stubs.len(), self.state.position);
            self.begin_turn();
            if !stack::needs_no_rsp(d) {
                self.settle_stack();
            }
            if rest.len() == 1 {
                self.push_frames();
                if !is_passed(d) {
                    self.settle_page();
                }
            }
            let run = stack::run_length(rest);
            if run > 1 {
                self.stack_run(&rest[..run]);
                rest = &rest[run..];
                continue;
            }
            rest = &rest[1..];
            let (code, stubs) = (self.asm.len(), self.stubs.len());
            let (links, cross_page_sites) = (self.links.len(), self.cross_page_sites.len());
            let flags = self.state.flags;
            let keeps_cached = keeps_cached(d.kind);
            if !keeps_cached {
                self.state.cached = None;
            }
            match self.instruction(d, forms.of(&d.i)) {
                Ok(ends) => {
                    ended = ends;
                    if d.member.is_none() && d.takes_pointer {
                        self.state.current = None;
                    }
                    if !keeps_cached {
                        self.state.cached = None;
                    }
                }
                Err(Unsupported) => {
                    self.asm.truncate(code);
                    self.stubs.truncate(stubs);
                    self.state.tally.truncate(stubs);
                    self.links.truncate(links);
                    self.ahead.retain(|n| (*n as usize) < links);
                    self.cross_page_sites.truncate(cross_page_sites);
                    self.state.flags = flags;
                    self.settle_stack();
                    self.settle_page();
                    self.give_registers_back();
                    let rest = self.state.tally.from(self.state.position);
                    exact::refund(&mut self.asm, rest, S1);
                    self.interpret(d.offset);
                    (ended, is_complete) = (true, false);
                }
            }
            if ended {
                break;
            }
        }
        self.settle_stack();
        if !ended && let Some(d) = insns.last() {
            self.push_frames();
            self.settle_page();
            match d.kind {
                Lowering::Followed => self.direct(d.offset, target(&d.i)),
                _ => {
                    let refund = self.state.tally.falls();
                    exact::refund(&mut self.asm, refund, S1);
                    self.fall_through(d.end());
                }
            }
        }
        is_complete
    }

    /// Returns the gva at an offset from the page, if it is known and is a sign-extended number of 32 bits.
    fn constant(&self, offset: i64) -> Option<i32> {
        i32::try_from(i64::from(self.input.bound?).checked_add(offset)?).ok()
    }

    /// Emits checks that leave for `offset` if the code of a page is no longer what it was.
    fn check(&mut self, sources: &[Source], offset: u32) {
        for source in sources {
            let from = check_generation(&mut self.asm, self.code, source);
            self.stubs.push(Stub::Stale { from, offset });
        }
    }

    /// Emits one instruction. Returns true if the block ends with it.
    fn instruction(&mut self, d: &Decoded, form: &Form) -> Result<bool, Unsupported> {
        if let Some(onto) = d.onto {
            self.inline(d, onto)?;
            return Ok(false);
        }
        if matches!(
            d.kind,
            Lowering::Ac
                | Lowering::ToCr0
                | Lowering::KeyRights
                | Lowering::LoadSegment
                | Lowering::Syscall
                | Lowering::Sysret
                | Lowering::InterruptReturn
                | Lowering::ToCr3
        ) {
            self.note_refund();
        }
        if self.input.mode.has(Mode::SEGMENTED) {
            self.input.word = if has_short_words(d.i.code()) { 2 } else { 4 };
        }
        match d.kind {
            Lowering::Nop | Lowering::Followed => {}
            Lowering::CopyFp if !self.input.long && zeroes_vectors(&d.i) => self.zero_vectors(d),
            Lowering::Copy | Lowering::CopyFp => self.copy(d, form, false)?,
            Lowering::CopyAligned | Lowering::CopyFpAligned => self.copy(d, form, true)?,
            Lowering::BitString => self.bit_string(d)?,
            Lowering::Gather => self.gather(d)?,
            Lowering::MaskedMove => self.masked_move(d, form)?,
            Lowering::FromSegment => self.segment_to_general(d)?,
            Lowering::FromControl | Lowering::StoreTable => self.read_system_register(d)?,
            Lowering::SegmentBase => self.segment_base_access(d)?,
            Lowering::Cld | Lowering::Std => self.direction(d),
            Lowering::Pause => self.pause(),
            Lowering::String => self.string(d),
            Lowering::LoadFpControl => self.load_fp_control(d)?,
            Lowering::Rdtsc => self.rdtsc(d),
            Lowering::Rdpmc => self.rdpmc(d),
            Lowering::Pushf => self.pushf(d),
            Lowering::Popf => self.popf(d),
            Lowering::Cli => self.cli(d),
            Lowering::Sti => self.sti(d),
            Lowering::Swapgs => self.swapgs(),
            Lowering::Ac | Lowering::ToCr0 | Lowering::KeyRights => self.change_view(d),
            Lowering::Lea => self.lea(d)?,
            Lowering::Push => self.push(d)?,
            Lowering::Pop => self.pop(d),
            Lowering::PopMemory => self.pop_to_memory(d)?,
            Lowering::Leave => self.leave(d),
            Lowering::Enter | Lowering::PushAll | Lowering::PopAll => self.frame(d)?,
            Lowering::TranslateByte => self.translate_byte(d)?,
            Lowering::FlushLine => self.flush_line(d)?,
            Lowering::ProcessorId | Lowering::ExtendedControl => self.processor_state(d),
            Lowering::X87Environment => self.x87_environment(d)?,
            Lowering::SaveState => self.save_state(d)?,
            Lowering::Div | Lowering::Idiv => self.divide(d)?,
            Lowering::Jcc => self.jcc(d)?,
            Lowering::Counted => self.counted(d)?,
            Lowering::Element => self.element(d)?,
            Lowering::ToSegment | Lowering::LoadPointer => self.load_real_segment(d)?,
            Lowering::PushSegment | Lowering::PushSelector | Lowering::PopSegment => {
                self.segment_on_stack(d);
            }
            Lowering::LoadSegment => self.load_data_segment(d)?,
            Lowering::AskAboutSelector => self.ask_about_selector(d)?,
            Lowering::Jmp => self.jmp(d),
            Lowering::Syscall
            | Lowering::Sysret
            | Lowering::ToCr3
            | Lowering::Clts
            | Lowering::InterruptReturn => self.system_branch(d),
            Lowering::RestoreState | Lowering::RestoreStandard => self.restore_state(d)?,
            Lowering::Call => self.call(d)?,
            Lowering::JmpIndirect
            | Lowering::CallIndirect
            | Lowering::Ret
            | Lowering::FarBranch => {
                self.flags_in_memory();
                match d.kind {
                    Lowering::Ret => self.ret(d),
                    Lowering::FarBranch => self.far_branch(d)?,
                    _ => self.indirect(d)?,
                }
            }
            Lowering::Unknown | Lowering::Interpret => self.leave_to_interpreter(d),
        }
        Ok(d.kind.ends_block())
    }

    fn interpret(&mut self, offset: u32) {
        self.flags_in_memory();
        self.asm.mov_imm(S1, offset.into());
        self.asm.jmp_to(self.trampolines.bail);
    }

    fn lea(&mut self, d: &Decoded) -> Emit {
        let r = d.i.op0_register();
        if self.input.mode.has(Mode::SEGMENTED) {
            return self.lea_in_segment(d);
        }
        if r.size() < 4 {
            return Err(Unsupported);
        }
        let n = r.full_register().number() as u8;
        let to = host_reg(n).unwrap_or(S1);
        if d.i.memory_base() == Register::RIP {
            let disp =
                i32::try_from(d.i.memory_displacement64() as i64).map_err(|_| Unsupported)?;
            if let Some(address) = self.constant(disp.into()) {
                self.asm.mov_signed(r.size() == 8, to, address);
            } else {
                let disp = disp.checked_add(self.state.beyond).ok_or(Unsupported)?;
                self.asm.load(S0, SHORT_PAGE);
                self.asm.rm(r.size() == 8, &[0x8d], to, at(S0, disp));
            }
        } else {
            let (m, wide) = self.effective(&d.i, 0, false)?;
            // An address of 32 bits is zero-extended.
            self.asm.rm(wide && r.size() == 8, &[0x8d], to, m);
        }
        if host_reg(n).is_none() {
            self.asm.store(gpr_slot(n), to);
            self.state.cached = Some(n);
        }
        Ok(())
    }
}

/// Emits the comparison of the page's generation with the one that was translated. `code`: as [`Translator::code`].
/// Returns the branch to take if they differ. May change r13.
fn check_generation(a: &mut Asm, code: u64, source: &Source) -> usize {
    // A page's generation and the code buffer are rarely far from each other.
    let next = code + (a.here() + CHECK_LEN) as u64;
    if let Ok(near) = i32::try_from(source.page_guard.wrapping_sub(next) as i64) {
        a.bytes(&[0x81, 0x3d]); // cmp dword [rip + …], imm32
        a.bytes(&near.to_le_bytes());
    } else {
        a.mov_imm(S1, source.page_guard);
        a.rm(false, &[0x81], 7, at(S1, 0));
    }
    a.bytes(&source.generation.to_le_bytes());
    a.jcc(cc::NE)
}
