//! [`Jit`], a vCPU's translated code, with what runs it: the dispatch loop, translation on demand, and answers to
//! requests of generated code.

mod breakpoints;
mod counting;
mod disturb;
mod exits;
mod find;
mod flat;
mod given_up;
mod interrupt_return;
mod links;
pub(crate) mod lockstep;
mod quiet;
mod record;
mod requests;
mod run;
mod sampling;
mod segments;
mod state;
pub(crate) mod stats;
mod switches;
mod system_call;
mod translation;

use host::CodeViews;
use x86_cpu::{CpuState, Exception};
use x86_interp::{Insn, Interp, Transfer};
use x86_native::HostFeatures;

use crate::{
    JitBus,
    code::perf::Profiler,
    code::space::CodeSpace,
    profile::hot::Profiles,
    runtime::breakpoints::Breakpoints,
    runtime::exits::handle,
    runtime::given_up::GivenUp,
    runtime::lockstep::{Lockstep, LockstepStats},
    runtime::quiet::Change,
    runtime::requests::serve,
    runtime::stats::Stats,
};
use x86_codegen::{
    asm::Isa, codegen::Translator, frame::entries::Entries, frame::exit::Left, frame::keys::Keys,
    frame::levels::LevelChange, frame::switches::Switch, frame::targets::salt_of, ir::cause::Cause,
    ir::decoded::Decoded, ir::lowering::Forms, ir::mode::Mode, plan::groups::Groups,
};

/// Bytes of translated code per vCPU. A compiler's takes 80 MiB.
pub const CACHE_SIZE: usize = 128 << 20;

/// An instruction at which a block leaves for the interpreter.
#[derive(Debug)]
pub(crate) struct FallbackSite<B> {
    pub(crate) insn: Insn<B>,
    /// The instruction as a transfer, if it is one.
    pub(crate) transfer: Option<Transfer>,
    /// What it may change of what translated code depends on.
    pub(crate) change: Change,
    /// Why the instruction is left to the interpreter.
    pub(crate) cause: Cause,
}

/// The objects that the functions work on that translated code calls.
pub(crate) struct Context<B: JitBus> {
    pub(crate) jit: *mut Jit<B>,
    pub(crate) interp: *mut Interp<B>,
    pub(crate) cpu: *mut CpuState,
    pub(crate) bus: *mut B,
    /// Why translated code was left, if [`handle`] decided that.
    pub(crate) left: Left,
}

/// The objects that make blocks.
#[derive(Debug)]
pub(crate) struct Builder {
    /// The link site that leads to the block that is translated next.
    pub(crate) wanted_by: Option<usize>,
    pub(crate) forms: Forms,
    pub(crate) decoded: Vec<Decoded>,
    pub(crate) groups: Groups,
    pub(crate) translator: Translator,
}

/// The state of the vCPU that executes, and of its calls into Rust.
#[derive(Debug)]
pub(crate) struct Session<B: JitBus> {
    /// Instructions at which blocks leave for the interpreter, by number.
    pub(crate) interpreted: Vec<FallbackSite<B>>,
    /// Instructions that translated code gives up again and again.
    pub(crate) given_up: GivenUp<B>,
    /// The value of [`Interp::resets`] that the decoded instructions belong to.
    pub(crate) resets: u64,
    /// The generation of the MMU's slots that all translated code belongs to.
    pub(crate) slots: u64,
    /// True if the guest's TSC is the host's plus a constant.
    pub(crate) plain_tsc: bool,
    /// The value of `JitBus::code_changes` when frames of calls on the host's stack were last known to lead to current
    /// code.
    pub(crate) changes: u64,
    /// True if the entry of RIP in the target table may lead to an outdated block.
    pub(crate) stale: bool,
    /// True if the split translation of the block at RIP is to be executed next.
    pub(crate) splits: bool,
    /// RIP and the number of instructions retired when the split translation was last chosen because the other was too
    /// long.
    pub(crate) split_at: (u64, u64),
    pub(crate) shortened: counting::Shortened,
    /// The number of instructions until the next poll when translated code last called [`handle`].
    pub(crate) left_to_poll: u64,
    /// The page fault that the instruction at which [`handle`] is called next raises.
    pub(crate) fault: Option<Exception>,
    /// What [`Jit::can_resume`] returns.
    pub(crate) can_resume: bool,
    /// The RIP at which RF was set when translated code was last gone on with, if translated code has not called Rust
    /// since.
    pub(crate) resumed: Option<u64>,
    /// The mode of the last [`Jit::select`].
    pub(crate) mode: Mode,
    pub(crate) code_segments: flat::CodeSegments,
    pub(crate) breakpoints: Breakpoints,
    /// The value of [`mmu::Front::views_made`] that `frame::words::VIEWS` belong to.
    pub(crate) views_made: u64,
    /// Target keys that generated code changes to by itself.
    pub(crate) keys: Keys,
    /// Loads of CR3 that generated code makes by itself.
    pub(crate) switches: Entries<Switch>,
    /// Changes of the privilege level that generated code makes by itself.
    pub(crate) levels: Entries<LevelChange>,
    /// What [`counting::goes_on`] returns.
    pub(crate) goes_on: [u64; 4],
    /// The salt that no key has.
    pub(crate) no_salt: u64,
}

/// What tests disturb.
#[derive(Debug)]
pub(crate) struct Disturbance {
    /// All code is dropped at random, about once in so many searches for a block; 0: never.
    pub(crate) flush_every: u64,
    pub(crate) random: u64,
}

/// A vCPU's translated code. Each field is the state of one owner.
#[derive(Debug)]
pub struct Jit<B: JitBus> {
    pub(crate) code: CodeSpace,
    pub(crate) builder: Builder,
    pub(crate) profiles: Profiles,
    pub(crate) session: Session<B>,
    pub(crate) disturbance: Disturbance,
    /// The comparison with the interpreter, in lock-step.
    pub(crate) lockstep: Option<Box<Lockstep<B>>>,
    pub(crate) stats: Stats,
    /// Ticks of the TSC that translation took, for [`Stats::translate_ns`]. The TSC is faster to read than a clock.
    pub(crate) translate_ticks: u64,
}

impl<B: JitBus> Jit<B> {
    /// Maps the code buffer. `None` if the host does not allow that.
    pub fn new() -> Option<Box<Self>> {
        Self::with_capacity(CACHE_SIZE)
    }

    /// Does what [`Self::new`] does with room for `bytes` of code: tests need a cache that is soon full.
    ///
    /// Boxed, as the thread's stack may be small.
    pub fn with_capacity(bytes: usize) -> Option<Box<Self>> {
        let host = HostFeatures::detected();
        let isa = Isa::of_host(&host);
        let functions = [
            serve::<B> as *const () as u64,
            handle::<B> as *const () as u64,
        ];
        let code = CodeSpace::new(bytes, isa, functions)?;
        let trampolines = code.trampolines;
        let address = code.address(0);
        let goes_on = counting::goes_on(&code);
        Some(Box::new(Self {
            code,
            builder: Builder {
                wanted_by: None,
                forms: Forms::new(host),
                decoded: Vec::new(),
                groups: Groups::default(),
                translator: Translator::new(isa, trampolines, address),
            },
            profiles: Profiles::new(),
            session: Session {
                interpreted: Vec::new(),
                given_up: GivenUp::default(),
                resets: 0,
                slots: u64::MAX,
                plain_tsc: false,
                changes: 0,
                stale: false,
                splits: false,
                split_at: (0, 0),
                shortened: counting::Shortened::default(),
                left_to_poll: 0,
                fault: None,
                can_resume: false,
                resumed: None,
                mode: Mode::NONE,
                code_segments: flat::CodeSegments::default(),
                breakpoints: Breakpoints::default(),
                views_made: 0,
                keys: Keys::default(),
                switches: Entries::default(),
                levels: Entries::default(),
                goes_on,
                no_salt: salt_of(0),
            },
            disturbance: Disturbance {
                flush_every: 0,
                random: 0x2545_f491_4f6c_dd1d,
            },
            lockstep: None,
            stats: Stats::default(),
            translate_ticks: 0,
        }))
    }

    /// Turns lock-step on: everything that translated code does is compared with the interpreter from now on, at a
    /// fraction of the speed. `planted`: one instruction is translated wrongly, to test lock-step itself. `tell` is
    /// called at the end with how much was compared.
    pub fn set_lockstep(&mut self, planted: bool, tell: fn(&str)) {
        self.lockstep = Some(Lockstep::new(planted, tell));
        self.code.keep_pieces();
        self.mix_tiers();
    }

    /// Names translated code for a profiler from now on. `tell` is called if that is impossible.
    pub fn set_profiler(&mut self, profiler: Profiler, tell: fn(&str)) {
        self.code.name_for(profiler, tell);
    }

    /// Translates every other block at once as if it were hot, and now and then some blocks again. For tests.
    pub fn mix_tiers(&mut self) {
        self.profiles.mixes_tiers = true;
        self.flush_all();
    }

    /// Drops all code at random, about once in `every` searches for a block, which shows what wrongly depends on code
    /// that stays. 0: never. For tests, like [`Self::mix_tiers`].
    pub fn set_random_flushes(&mut self, every: u64) {
        self.profiles.mixes_tiers = every != 0;
        self.disturbance.flush_every = every;
    }

    /// Takes the first difference that lock-step has found. [`Self::run`] returned `Exit` at it.
    pub fn take_difference(&mut self) -> Option<String> {
        self.lockstep.as_mut()?.report.take()
    }

    /// Returns what lock-step has compared.
    pub fn lockstep_stats(&self) -> Option<LockstepStats> {
        self.lockstep.as_ref().map(|l| l.stats)
    }

    /// Returns the code of the blocks at an address: the offset in the buffer and the bytes of each.
    pub(crate) fn code_of(&self, rip: u64) -> Vec<(usize, Vec<u8>)> {
        self.code.code_of(rip)
    }

    /// Returns the views of the code buffer, for a [`host::ServiceThread`].
    pub fn code_views(&self) -> &std::sync::Arc<CodeViews> {
        self.code.views()
    }

    /// Returns the counters.
    pub fn stats(&self) -> Stats {
        let mhz = u64::from(host::cpu::tsc_khz() / 1000).max(1);
        Stats {
            translate_ns: self.translate_ticks.saturating_mul(1000) / mhz,
            ..self.stats
        }
    }

    /// Drops all code.
    pub fn flush_all(&mut self) {
        self.code.clear();
        self.builder.translator.links.clear();
        self.builder.translator.cross_page_sites.clear();
        self.session.interpreted.clear();
        self.session.given_up = GivenUp::default();
        self.profiles.clear();
        self.session.switches.clear();
        self.session.levels.clear();
        if let Some(l) = &mut self.lockstep {
            l.flush();
        }
        self.stats.flushes += 1;
    }

    /// Returns true if an instruction that translated code has called for has stopped for the VMM: [`Self::resume`] may
    /// go on.
    pub fn can_resume(&self) -> bool {
        self.session.can_resume
    }
}
