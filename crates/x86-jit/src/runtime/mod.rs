//! [`Jit`], a vCPU's translated code, and what that calls: the dispatch loop, translation on demand, and the requests of generated code.

mod counting;
mod disturb;
mod exits;
mod find;
mod flat;
mod given_up;
mod interrupt_return;
mod links;
pub(crate) mod lockstep;
mod record;
mod requests;
mod run;
mod sampling;
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
    asm::Isa,
    code::perf::Profiler,
    code::space::CodeSpace,
    codegen::Translator,
    frame::exit::Left,
    frame::keys::Keys,
    frame::switches::Switches,
    ir::cause::Cause,
    ir::decoded::Decoded,
    ir::lowering::Forms,
    ir::mode::Mode,
    plan::groups::Groups,
    profile::hot::Profiles,
    runtime::exits::handle,
    runtime::given_up::GivenUp,
    runtime::lockstep::{Lockstep, LockstepStats},
    runtime::requests::serve,
    runtime::stats::Stats,
};

/// Bytes of translated code of a vCPU: a compiler's is 80 MiB.
const CACHE_SIZE: usize = 128 << 20;

/// An instruction at which a block leaves for the interpreter.
#[derive(Debug)]
pub(crate) struct FallbackSite<B> {
    pub(crate) insn: Insn<B>,
    /// The same, if it is one.
    pub(crate) transfer: Option<Transfer>,
    /// Why it is left to it.
    pub(crate) cause: Cause,
}

/// What the functions that translated code calls work on.
pub(crate) struct Context<B: JitBus> {
    pub(crate) jit: *mut Jit<B>,
    pub(crate) interp: *mut Interp<B>,
    pub(crate) cpu: *mut CpuState,
    pub(crate) bus: *mut B,
    /// Why it was left, if that was [`handle`]'s decision.
    pub(crate) left: Left,
}

/// What makes blocks.
#[derive(Debug)]
pub(crate) struct Builder {
    /// The link site that leads to what is translated next.
    pub(crate) wanted_by: Option<usize>,
    pub(crate) forms: Forms,
    pub(crate) decoded: Vec<Decoded>,
    pub(crate) groups: Groups,
    pub(crate) translator: Translator,
}

/// What belongs to the vCPU that executes, and to its way through Rust.
#[derive(Debug)]
pub(crate) struct Session<B: JitBus> {
    /// Instructions at which blocks leave for the interpreter.
    pub(crate) interpreted: Vec<FallbackSite<B>>,
    /// Instructions that translated code gives up again and again.
    pub(crate) given_up: GivenUp<B>,
    /// [`Interp::resets`] that they belong to.
    pub(crate) resets: u64,
    /// The MMU's slots that generation page guards belong to.
    pub(crate) slots: u64,
    /// [`JitBus::tsc_offset`] has one.
    pub(crate) plain_tsc: bool,
    /// `JitBus::code_changes` when the host's stack was last looked at: [`handle`].
    pub(crate) changes: u64,
    /// The block that RIP's target leads to may be outdated.
    pub(crate) stale: bool,
    /// The translation with a probe for every access is to be executed.
    pub(crate) splits: bool,
    /// The page fault of the instruction that calls [`handle`] next.
    pub(crate) fault: Option<Exception>,
    /// See [`Jit::can_resume`].
    pub(crate) can_resume: bool,
    /// Where RF was set when translated code was last gone on with, if nothing has
    /// called for Rust since.
    pub(crate) resumed: Option<u64>,
    /// Instructions until the next poll at most, when code that does not count was last gone on with.
    pub(crate) left_to_poll: u64,
    /// Mode bits of the last [`Jit::select`].
    pub(crate) mode: Mode,
    pub(crate) code_segments: flat::CodeSegments,
    /// [`mmu::Front::views_made`] that `frame::words::VIEWS` belong to.
    pub(crate) views_made: u64,
    /// What generated code changes the mode by.
    pub(crate) keys: Keys,
    /// Loads of CR3 that generated code does by itself.
    pub(crate) switches: Switches,
}

/// What tests perturb.
#[derive(Debug)]
pub(crate) struct Disturbance {
    /// All code is dropped at random, once in so many blocks looked for; 0: never.
    pub(crate) flush_every: u64,
    pub(crate) random: u64,
}

/// A vCPU's translated code, its state by owner.
#[derive(Debug)]
pub struct Jit<B: JitBus> {
    pub(crate) code: CodeSpace,
    pub(crate) builder: Builder,
    pub(crate) profiles: Profiles,
    pub(crate) session: Session<B>,
    pub(crate) disturbance: Disturbance,
    /// What translated code does counts when the interpreter agrees.
    pub(crate) lockstep: Option<Box<Lockstep<B>>>,
    pub(crate) stats: Stats,
    /// For [`Stats::translate_ns`]: the clock takes longer to read.
    pub(crate) translate_ticks: u64,
}

impl<B: JitBus> Jit<B> {
    /// Maps the code buffer; `None` if the host does not allow that.
    pub fn new() -> Option<Self> {
        Self::with_capacity(CACHE_SIZE)
    }

    /// As [`Self::new`] with room for so many bytes of code: for tests, which
    /// need a cache that is full soon.
    pub fn with_capacity(bytes: usize) -> Option<Self> {
        let host = HostFeatures::detected();
        let isa = Isa::of_host(&host);
        let functions = [
            serve::<B> as *const () as u64,
            handle::<B> as *const () as u64,
        ];
        let code = CodeSpace::new(bytes, isa, functions)?;
        let trampolines = code.trampolines;
        let address = code.address(0);
        Some(Self {
            code,
            builder: Builder {
                wanted_by: None,
                forms: Forms::new(host),
                decoded: Vec::new(),
                groups: Groups::new(),
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
                fault: None,
                can_resume: false,
                resumed: None,
                left_to_poll: 0,
                mode: Mode::NONE,
                code_segments: flat::CodeSegments::default(),
                views_made: 0,
                keys: Keys::new(),
                switches: Switches::new(),
            },
            disturbance: Disturbance {
                flush_every: 0,
                random: 0x2545_f491_4f6c_dd1d,
            },
            lockstep: None,
            stats: Stats::default(),
            translate_ticks: 0,
        })
    }

    /// Compares everything that translated code does with the interpreter from now on, at a
    /// fraction of the speed. `planted`: translates one instruction wrongly, for a test of this.
    /// `tell` is told how much was compared when that ends.
    pub fn set_lockstep(&mut self, planted: bool, tell: fn(&str)) {
        self.lockstep = Some(Lockstep::new(planted, tell));
        self.code.keep_pieces();
        self.mix_tiers();
    }

    /// Names translated code for a profiler from now on. `tell` is told if that is impossible.
    pub fn set_profiler(&mut self, profiler: Profiler, tell: fn(&str)) {
        self.code.name_for(profiler, tell);
    }

    /// Translates every other block at once as if it were executed much, and now and then some of them again: for tests.
    pub fn mix_tiers(&mut self) {
        self.profiles.mixes_tiers = true;
        self.flush_all();
    }

    /// Drops all code at random, about once in `every` times that a block is looked for: whatever
    /// depends on code that stays shows. 0: never. As for [`Self::mix_tiers`].
    pub fn set_random_flushes(&mut self, every: u64) {
        self.profiles.mixes_tiers = every != 0;
        self.disturbance.flush_every = every;
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
        self.code.code_of(rip)
    }

    /// For a [`host::ServiceThread`].
    pub fn code_views(&self) -> &std::sync::Arc<CodeViews> {
        self.code.views()
    }

    /// Counters.
    pub fn stats(&self) -> Stats {
        let mhz = u64::from(host::cpu::tsc_khz() / 1000).max(1);
        Stats {
            translate_ns: self.translate_ticks.saturating_mul(1000) / mhz,
            ..self.stats
        }
    }

    /// Forgets all code.
    pub fn flush_all(&mut self) {
        self.code.clear();
        self.builder.translator.links.clear();
        self.builder.translator.cross_page_sites.clear();
        self.session.interpreted.clear();
        self.session.given_up = GivenUp::default();
        self.profiles.clear();
        self.session.switches.clear();
        if let Some(l) = &mut self.lockstep {
            l.flush();
        }
        self.stats.flushes += 1;
    }

    /// An instruction of translated code has stopped for the VMM.
    pub fn can_resume(&self) -> bool {
        self.session.can_resume
    }
}
