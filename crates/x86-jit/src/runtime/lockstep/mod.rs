//! Lock-step: the interpreter does again what translated code did, and must come to the same result.
//!
//! A *stretch* is one entry into translated code, up to its exit. Before it the registers are
//! copied; while it runs, the old content of every page that it writes is kept ([`log`]). Then
//! the writes are undone and the interpreter starts from the copy. It has to come to a state with
//! the same registers and the same memory; which of its instructions that is after does not
//! matter, so nothing depends on how translated code counts. The guest goes on with the state of
//! the translated code.
//!
//! What could make a difference without being an error, and what is done about it:
//!
//! - Devices, ports, and whatever else has effects outside of memory: leaves translated code
//!   before it happens, so no stretch contains it, and the second run cannot reach them
//!   ([`shadow`]). RDTSC is not translated in this mode.
//! - Other vCPUs: one vCPU at a time executes ([`turn`]).
//! - Devices' threads that write guest memory, and accessed and dirty bits, which a walk sets in
//!   the first run only: after a difference both are run once more, with empty TLBs. What then
//!   agrees is counted, not reported. Only words that a run has changed are undone.
//! - Flags that the manual leaves undefined, and flags that are overwritten before anything
//!   reads them (see `translate`): [`flags`].

mod flags;
mod log;
mod report;
mod shadow;
pub(crate) mod turn;

use core::fmt;

use engine_frame::EngineFrame;
use x86_cpu::{CpuState, Flush, Shadow};

use x86_defs::{reg, rflags};
use x86_interp::{Interp, RunStop};

pub(crate) use self::log::{Log, log_of, set_tables};
use self::shadow::Shadow as ShadowBus;
use crate::{Jit, JitBus, runtime::state::move_stack};
use x86_codegen::{
    codegen::countdown,
    frame::exit::{Left, Reason},
    frame::state::unpack,
    ir::decoded::Decoded,
    ir::mode::Mode,
    ir::segment::may_branch_to,
};

/// Maximum number of the interpreter's instructions per stretch, repetitions counted singly.
const PATIENCE: u32 = 100_000;
/// Instructions of the interpreter's path that the report shows.
const TRAIL: usize = 64;
/// Bytes of the FP state that are compared.
const FP_BYTES: usize = 832;

/// What lock-step has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockstepStats {
    /// Stretches compared.
    pub stretches: u64,
    /// Stretches that agreed only with empty TLBs and nothing else writing memory.
    pub again: u64,
}

/// The second engine, and what the comparison needs.
pub(crate) struct Lockstep<B: JitBus> {
    interp: Interp<ShadowBus<B>>,
    log: Log,
    /// Pages that the interpreter has written.
    second: Log,
    trail: [u64; TRAIL],
    /// Instructions that the interpreter has executed; `trail` has the last of them.
    steps: usize,
    flags: flags::Flags,
    random: u64,
    /// One instruction is translated wrongly, which proves that differences are found.
    pub(crate) planted: bool,
    tell: fn(&str),
    pub(crate) stats: LockstepStats,
    pub(crate) report: Option<String>,
}

impl<B: JitBus> fmt::Debug for Lockstep<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lockstep")
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

/// What is known when the interpreter has certainly not come to the same state.
struct Difference {
    /// A state of the interpreter at the address where translated code stopped, if it came there.
    nearest: Option<Box<CpuState>>,
    why: String,
}

/// The state in which a stretch begins.
struct Start<'a> {
    entry: u64,
    before: &'a CpuState,
    frame: &'a EngineFrame,
}

/// Why translated code stopped, and `x86_codegen::frame::words::ARGUMENT`.
type Outcome = (Reason, usize);

impl<B: JitBus> Drop for Lockstep<B> {
    /// Tells how much was compared.
    fn drop(&mut self) {
        let LockstepStats { stretches, again } = self.stats;
        (self.tell)(&format!(
            "lock-step: {stretches} stretches compared, {again} of them again"
        ));
    }
}

impl<B: JitBus> Lockstep<B> {
    pub(crate) fn new(planted: bool, tell: fn(&str)) -> Box<Self> {
        Box::new(Self {
            interp: Interp::new(),
            log: Log::default(),
            second: Log::default(),
            trail: [0; TRAIL],
            steps: 0,
            flags: flags::Flags::default(),
            random: 0x9e37_79b9_7f4a_7c15,
            planted,
            tell,
            stats: LockstepStats::default(),
            report: None,
        })
    }

    /// Forgets decoded instructions.
    pub(crate) fn flush(&mut self) {
        self.interp.flush_all();
        self.flags.clear();
    }

    /// Returns the address of the write log, for refills of generated code.
    pub(crate) fn log_address(&mut self) -> u64 {
        &raw mut self.log as u64
    }

    /// Chooses about how many instructions the next stretch has: long ones go through links, short ones through exits.
    fn length(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        match self.random >> 60 {
            0 => 1 + (self.random >> 50 & 31),
            1..=4 => 200,
            _ => countdown::longest(),
        }
    }

    /// Has the interpreter execute from `before` on until its state is like `end`. Memory is as before the stretch.
    /// `whole`: it executes whole blocks where that is possible, without a trail.
    fn replay(
        &mut self,
        before: &CpuState,
        end: &CpuState,
        bus: &mut B,
        whole: bool,
    ) -> Result<(), Difference> {
        let mut cpu = Box::new(before.clone());
        let controls = |c: &CpuState| (c.cr0, c.cr3, c.cr4, c.efer);
        if controls(before) != controls(end) && bus.load_root(&mut cpu).is_err() {
            return Err(Difference {
                nearest: None,
                why: "the address space cannot be restored".into(),
            });
        }
        bus.select_view(&mut cpu);
        self.second.clear();
        self.steps = 0;
        let mut nearest = None;
        let mut why =
            String::from("the interpreter does not come to where translated code stopped");
        let mut shadow = ShadowBus::new(bus, &mut self.second, end.rip());
        for _ in 0..PATIENCE {
            if whole && cpu.shadow == Shadow::None {
                let stop = self.interp.run(&mut cpu, &mut shadow);
                if stop != RunStop::Poll {
                    why += &format!("; the interpreter stops: {stop:?} at {:#x}", cpu.rip());
                    break;
                }
            }
            if cpu.rip() == end.rip() {
                match self.compare(&cpu, end, &mut shadow, whole) {
                    Ok(()) => return Ok(()),
                    Err(what) if nearest.is_none() || shadow::is_close(&cpu, end) => {
                        why = what;
                        nearest = Some(cpu.clone());
                    }
                    Err(_) => {}
                }
            }
            self.trail[self.steps % TRAIL] = cpu.rip();
            self.steps += 1;
            // Translated code may stop between two repetitions.
            let stop = if cpu.rip() == end.rip() {
                self.interp.step(&mut cpu, &mut shadow)
            } else {
                self.interp.one(&mut cpu, &mut shadow)
            };
            if stop != RunStop::Poll {
                if nearest.is_none() {
                    why = format!("the interpreter stops: {stop:?} at {:#x}", cpu.rip());
                    nearest = Some(cpu);
                }
                break;
            }
        }
        Err(Difference { nearest, why })
    }

    /// Compares the interpreter's state with the end of the stretch. The error says what differs.
    fn compare(
        &mut self,
        cpu: &CpuState,
        end: &CpuState,
        shadow: &mut ShadowBus<B>,
        whole: bool,
    ) -> Result<(), String> {
        if let Some(n) = (0..16).find(|n| cpu.gpr[*n] != end.gpr[*n]) {
            return Err(format!("register {n}"));
        }
        let (a, b) = (normal(cpu), normal(end));
        if a.rflags & !rflags::ARITH != b.rflags & !rflags::ARITH {
            return Err("RFLAGS".into());
        }
        if a.fp.area[..FP_BYTES] != b.fp.area[..FP_BYTES] {
            return Err("FP state".into());
        }
        let differing = (a.rflags ^ b.rflags) & rflags::ARITH;
        if (CpuState { rflags: 0, ..a }) != (CpuState { rflags: 0, ..b }) {
            return Err("system registers".into());
        }
        if let Some(gpa) = self
            .log
            .differs_from_new()
            .or_else(|| shadow.log().differs_from_old(&self.log))
        {
            return Err(format!("memory at host address {gpa:#x}"));
        }
        if differing != 0 {
            let last = self.steps.saturating_sub(TRAIL)..self.steps;
            let path: Vec<u64> = last.map(|n| self.trail[n % TRAIL]).collect();
            let mut cpu = cpu.clone();
            let mut matter = self.flags.live(&mut cpu, shadow, differing);
            if matter != 0 && !whole {
                matter = self.flags.defined(&mut cpu, shadow, &path, matter);
            }
            if matter != 0 {
                return Err(format!("flags {matter:#x}"));
            }
        }
        Ok(())
    }
}

/// Returns the state with everything cleared that is not compared.
fn normal(cpu: &CpuState) -> CpuState {
    let mut cpu = cpu.clone();
    // Translated code goes from STI, or a load of SS, to the next instruction, which the stretch may end before.
    cpu.shadow = Shadow::None;
    // Streams that nobody counts may differ.
    for counts in &mut cpu.retired.counts {
        for (stream, count) in counts.iter_mut().enumerate() {
            if cpu.retired.streams >> stream & 1 == 0 {
                *count = 0;
            }
        }
    }
    // These belong to the last exception raised, delivered or not.
    cpu.fault_gva = 0;
    cpu.fault_dr6 = 0;
    // The header, MXCSR_MASK and the last x87 instruction's addresses (see `trampolines`).
    cpu.fp.area[512..576].fill(0);
    cpu.fp.area[6..24].fill(0);
    cpu.fp.area[28..32].fill(0);
    cpu
}

impl<B: JitBus> Jit<B> {
    /// Executes stretches, and does what has to be done where each ends.
    #[cold]
    pub(crate) fn enter_checked(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        entry: u64,
    ) -> Left {
        let mut entry = entry;
        loop {
            let Some((reason, argument)) = self.call_checked(interp, cpu, bus, entry) else {
                return Left::Stopped(RunStop::Exit);
            };
            match reason {
                Reason::Poll => return Left::Poll,
                Reason::Link => {
                    entry = self.follow_link(interp, cpu, bus, argument);
                    if entry != 0 {
                        continue;
                    }
                }
                Reason::CrossPage => {
                    entry = self.follow_cross_page(interp, cpu, bus, argument);
                    if entry != 0 {
                        continue;
                    }
                }
                // A counter has overflowed: its interrupt comes first.
                Reason::Interpret | Reason::Access if cpu.retired.is_due() => {}
                Reason::Interpret | Reason::Access => {
                    let stop = self.interpret(interp, cpu, bus, argument);
                    if stop != RunStop::Poll {
                        return Left::Stopped(stop);
                    }
                }
                Reason::Branch => {}
                Reason::TooLong => {
                    let stop = self.shorten(interp, cpu, bus, &mut None);
                    if stop != RunStop::Poll {
                        return Left::Stopped(stop);
                    }
                }
                Reason::Stale => {
                    if argument != 0 {
                        self.revalidate_trace(cpu, bus);
                    }
                    self.session.stale = true;
                }
            }
            return Left::Again;
        }
    }

    /// Ends the stretch before what translated code asks for is done. Makes the state exact.
    pub(crate) fn end_stretch(&mut self, cpu: &mut CpuState, bus: &mut B) {
        let frame = &cpu.engine;
        let reason = Reason::of(frame.reason);
        let argument = frame.argument;
        let (page, target) = (frame.page, frame.spill[0]);
        let flags = unpack(frame.flags);
        cpu.rflags = cpu.rflags & !rflags::ARITH | flags;
        match reason {
            Reason::Branch if may_branch_to(cpu, target) => {
                move_stack(cpu, argument.wrapping_sub(8));
                cpu.set_rip(target);
            }
            Reason::Branch => {
                // #GP(0) at the branch, if it is one.
                if target == page.wrapping_add(0x1000) && !self.session.mode.has(Mode::SEGMENTED) {
                    cpu.set_rip(target);
                } else {
                    self.take_back(cpu, bus);
                }
                cpu.engine.reason = Reason::Interpret as u64;
                cpu.engine.argument = 0;
            }
            Reason::Link => {
                if let Some(site) = self.builder.translator.links.get(argument as usize) {
                    cpu.set_rip(page.wrapping_add(site.target.into()));
                }
            }
            Reason::CrossPage => {
                let number = frame.spill[1];
                let words = if self.complete_cross_page(cpu, bus) {
                    (Reason::CrossPage, number)
                } else {
                    (Reason::Interpret, 0)
                };
                cpu.engine.reason = words.0 as u64;
                cpu.engine.argument = words.1;
            }
            Reason::Poll | Reason::Interpret | Reason::Access | Reason::Stale | Reason::TooLong => {
            }
        }
    }

    /// Does what [`Self::call`] does, and compares it with the interpreter. `None`: they differ, and the report is
    /// ready.
    fn call_checked(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        entry: u64,
    ) -> Option<Outcome> {
        let mut l = self.lockstep.take()?;
        let before = cpu.clone();
        let frame = cpu.engine.snapshot();
        let start = Start {
            entry,
            before: &before,
            frame: &frame,
        };
        let length = l.length();
        l.stats.stretches += 1;
        let mut found = self.stretch(&mut l, interp, cpu, bus, (entry, length, true));
        if found.is_err() {
            l.stats.again += 1;
            self.rewind(cpu, bus, &start);
            found = self.stretch(&mut l, interp, cpu, bus, (entry, length, false));
        }
        let outcome = match found {
            Ok(outcome) => Some(outcome),
            Err(difference) => {
                let report = self.narrow(&mut l, interp, cpu, bus, &start, difference);
                l.report = Some(report);
                None
            }
        };
        self.lockstep = Some(l);
        outcome
    }

    /// Goes back to the start of the stretch, with empty TLBs; memory is there already.
    fn rewind(&mut self, cpu: &mut CpuState, bus: &mut B, start: &Start<'_>) {
        *cpu = start.before.clone();
        cpu.engine = start.frame.snapshot();
        // The interpreter may have gone anywhere. This root was loaded before: it cannot fail.
        let _ = bus.load_root(cpu);
        bus.select_view(cpu);
        bus.flush(cpu, Flush::All);
        // The interpreter may have written code, too, which was put back.
        bus.ram().recheck_code();
        self.select(cpu, bus);
        cpu.engine.page = start.frame.page;
    }

    /// Executes one stretch with both engines, from an entry on, of about `length` instructions. The interpreter
    /// executes `whole` blocks or single instructions. If the two differ, memory is as before.
    fn stretch(
        &mut self,
        l: &mut Lockstep<B>,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        (entry, length, whole): (u64, u64, bool),
    ) -> Result<Outcome, Difference> {
        let before = cpu.clone();
        l.log.clear();
        let frame = &mut cpu.engine;
        // SAFETY: the log belongs to `l`, and is taken out of the frame below, before `l` can be dropped.
        unsafe { frame.set_log(l.log_address()) };
        countdown::begin(frame, length);
        countdown::allow_polls(frame, false);
        set_tables(cpu, bus);
        self.call(interp, cpu, bus, entry);
        let frame = &mut cpu.engine;
        // SAFETY: the frame has no log from now on.
        unsafe { frame.set_log(0) };
        let outcome = (Reason::of(frame.reason), frame.argument as usize);
        l.log.undo();
        let result = l.replay(&before, cpu, bus, whole);
        bus.select_view(cpu);
        set_tables(cpu, bus);
        match result {
            Ok(()) => Ok(outcome),
            Err(difference) => {
                l.second.undo();
                Err(difference)
            }
        }
    }

    /// Finds the shortest stretch that shows the difference, and returns the report of it.
    fn narrow(
        &mut self,
        l: &mut Lockstep<B>,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        start: &Start<'_>,
        difference: Difference,
    ) -> String {
        let mut end = cpu.clone();
        let mut good = start.before.clone();
        let mut shown = difference;
        for length in 1..=countdown::longest() + 64 {
            self.rewind(cpu, bus, start);
            match self.stretch(l, interp, cpu, bus, (start.entry, length, false)) {
                Ok(_) => {
                    good = cpu.clone();
                    // Memory is as the interpreter left it, which is as translated code left it.
                    l.log.undo();
                }
                Err(difference) => {
                    end = cpu.clone();
                    shown = difference;
                    break;
                }
            }
        }
        report::text(self, l, bus, (start.before, &good, &end), &shown)
    }
}

/// Plants a translator's error for a test: SAR by a constant becomes SHR.
pub(crate) fn plant(decoded: &mut [Decoded]) {
    use iced_x86::Code;
    for d in decoded {
        let wrong = match d.i.code() {
            Code::Sar_rm64_imm8 => Code::Shr_rm64_imm8,
            Code::Sar_rm32_imm8 => Code::Shr_rm32_imm8,
            _ => continue,
        };
        d.i.set_code(wrong);
        // C1 /7 and C1 /5: no prefix is C1.
        if let Some(at) = d.raw.iter().position(|b| *b == 0xc1)
            && let Some(modrm) = d.raw.get_mut(at + 1)
        {
            *modrm &= !0x10;
        }
    }
}

/// Returns a line of registers.
fn registers(cpu: &CpuState) -> String {
    use fmt::Write as _;
    let mut text = format!(
        "rip {:x} rflags {:x} cpl {}",
        cpu.rip(),
        cpu.rflags,
        cpu.cpl
    );
    for n in 0..16 {
        let _ = write!(text, " r{n} {:x}", cpu.gpr[n]);
    }
    let _ = write!(
        text,
        " fs {:x} gs {:x}",
        cpu.seg[reg::FS].base,
        cpu.seg[reg::GS].base
    );
    text
}
