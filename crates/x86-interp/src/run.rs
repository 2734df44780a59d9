//! [`Interp`]: the execution loop.
//!
//! Blocks are executed one after another, with a poll of the bus between two of them. With TF, RF, breakpoints or
//! interrupt shadows, the same decoded blocks are executed one instruction at a time (SDM vol. 3, 6.8.3 and 18.3.1).

use iced_x86::Code;
use x86_cpu::{CpuState, Event, Exception, Feature, GuestBus, Retired, Shadow, retired::outcome};
use x86_defs::{dr, rflags};
use x86_native::Native;

use crate::{
    Exec, Flow, Insn, Selector, Step, Stop, Transfer, blocks::DecodedBlocks, decode::decode,
    deliver, remainder::Remainder,
};

/// Why [`Interp::run`] returned. `CpuState` is exact in every case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStop {
    /// [`GuestBus::poll`] asked for it, or a step is complete.
    Poll,
    /// The bus has recorded an exit for the VMM.
    Exit,
    /// The guest executed HLT (RIP is after it).
    Halt,
    /// A triple fault.
    TripleFault,
}

/// The interpreter of one vCPU, with its decoded blocks.
#[derive(Debug)]
pub struct Interp<B> {
    native: Native,
    blocks: DecodedBlocks<B>,
    /// The remainder of the instruction that the last exit stopped.
    pub(crate) remainder: Remainder,
}

impl<B: GuestBus> Default for Interp<B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B: GuestBus> Interp<B> {
    /// An interpreter with an empty block cache.
    pub fn new() -> Self {
        Self {
            native: Native::new(),
            blocks: DecodedBlocks::new(),
            remainder: Remainder::NOTHING,
        }
    }
    /// Drops all decoded instructions. To be called when `cpu.features` has changed, or code was replaced without the
    /// bus's knowledge.
    pub fn flush_all(&mut self) {
        self.native = Native::new();
        self.blocks.clear();
    }
    /// Executes until something stops it.
    pub fn run(&mut self, cpu: &mut CpuState, bus: &mut B) -> RunStop {
        let mut ex = Exec::new(cpu, bus, &mut self.native);
        ex.refresh();
        let counts = ex.cpu.retired.counts_at(ex.cpu.cpl);
        let stop = loop {
            // In a shadow nothing can be injected, so one more instruction is executed before the poll.
            if ex.cpu.shadow == Shadow::None && ex.bus.poll(ex.cpu) {
                break RunStop::Poll;
            }
            // If nothing is counted any more, another engine may be the better one.
            if ex.cpu.retired.counts_at(ex.cpu.cpl) != counts {
                break RunStop::Poll;
            }
            let result = if ex.needs_stepping() {
                let is_single = ex.needs_iterations();
                step_one(&mut self.blocks, &mut ex, is_single)
            } else if counts {
                run_counted(&mut self.blocks, &mut ex)
            } else {
                run_block::<B, false>(&mut self.blocks, &mut ex)
            };
            if let Err(stop) = result
                && let Err(stop) = handle(&mut ex, stop)
            {
                break finish(Err(stop));
            }
        };
        ex.sync_flags();
        if stop == RunStop::Exit {
            self.remainder = ex.remainder;
        }
        stop
    }
    /// Executes exactly one instruction (one iteration of a `rep` instruction), with debug traps and the end of an
    /// interrupt shadow as the manual has them.
    pub fn step(&mut self, cpu: &mut CpuState, bus: &mut B) -> RunStop {
        let mut ex = Exec::new(cpu, bus, &mut self.native);
        ex.refresh();
        let result =
            step_one(&mut self.blocks, &mut ex, true).or_else(|stop| handle(&mut ex, stop));
        ex.sync_flags();
        if result == Err(Stop::Exit) {
            self.remainder = ex.remainder;
        }
        finish(result)
    }
    /// Finishes the instruction after `RunStop::Exit`, when its one access of `len` bytes has its answer. Returns false
    /// if that takes more than writing a register; the caller then uses [`Self::step`] to execute it again.
    pub fn complete(&mut self, cpu: &mut CpuState, bus: &mut B, len: u8, value: u64) -> bool {
        let rest = core::mem::replace(&mut self.remainder, Remainder::NOTHING);
        let done = rest.finish(cpu, len, value);
        if done {
            if cpu.retired.counts_at(cpu.cpl) {
                cpu.retired.add(Retired::level(cpu.cpl), rest.events());
            }
            bus.commit();
        }
        done
    }
    /// Executes one whole instruction (a `rep` one until it is done, or the bus
    /// wants to be polled), or delivers the exception that it raises. For an
    /// engine that leaves single instructions to the interpreter.
    pub fn one(&mut self, cpu: &mut CpuState, bus: &mut B) -> RunStop {
        let mut ex = Exec::new(cpu, bus, &mut self.native);
        ex.refresh();
        let result = if ex.needs_stepping() {
            let is_single = ex.needs_iterations();
            step_one(&mut self.blocks, &mut ex, is_single)
        } else {
            run_first(&mut self.blocks, &mut ex)
        };
        let result = result.or_else(|stop| handle(&mut ex, stop));
        ex.sync_flags();
        if result == Err(Stop::Exit) {
            self.remainder = ex.remainder;
        }
        finish(result)
    }
    /// Decodes an instruction of the current mode for [`Self::execute`]; `None` if
    /// `bytes` are not one. What this returned is void when [`Self::resets`] or
    /// `cpu.features` change.
    pub fn prepare(&mut self, cpu: &CpuState, bytes: &[u8]) -> Option<Insn<B>> {
        let mut selector = Selector {
            native: &mut self.native,
            bytes: &[],
            features: &cpu.features,
            code_size: cpu.code_size,
        };
        let insn = decode(bytes, &mut selector).ok();
        if self.native.take_reset() {
            self.blocks.clear();
            self.blocks.resets += 1;
            return None;
        }
        insn
    }
    /// Changes when decoded instructions become void.
    pub fn resets(&self) -> u64 {
        self.blocks.resets
    }
    /// As [`Self::one`], with the instruction at RIP already decoded.
    pub fn execute(&mut self, cpu: &mut CpuState, bus: &mut B, insn: &Insn<B>) -> RunStop {
        let mut ex = Exec::new(cpu, bus, &mut self.native);
        ex.refresh();
        let result = if ex.needs_stepping() {
            let is_single = ex.needs_iterations();
            step_insn(&mut ex, insn, is_single)
        } else {
            run_insn(&mut ex, insn)
        };
        let result = result.or_else(|stop| handle(&mut ex, stop));
        ex.sync_flags();
        if result == Err(Stop::Exit) {
            self.remainder = ex.remainder;
        }
        finish(result)
    }
    /// As [`Self::execute`], where nothing is known that would need steps. Returns `None` if the instruction is complete,
    /// without an exception.
    pub fn execute_whole(
        &mut self,
        cpu: &mut CpuState,
        bus: &mut B,
        insn: &Insn<B>,
    ) -> Option<RunStop> {
        let rip = cpu.rip();
        let mut ex = Exec::new(cpu, bus, &mut self.native);
        ex.refresh();
        let result = run_insn(&mut ex, insn);
        let is_whole = result.is_ok();
        let result = result.or_else(|stop| handle(&mut ex, stop));
        ex.sync_flags();
        if result == Err(Stop::Exit) {
            self.remainder = ex.remainder;
        }
        // A repeated instruction may have stopped for a poll.
        (!is_whole || cpu.rip() == rip).then(|| finish(result))
    }
    /// Delivers an exception of the instruction at RIP, unless the VMM wants it.
    pub fn raise(&mut self, cpu: &mut CpuState, bus: &mut B, exception: Exception) -> RunStop {
        let mut ex = Exec::new(cpu, bus, &mut self.native);
        ex.refresh();
        let result = handle(&mut ex, exception.into());
        ex.sync_flags();
        self.remainder = Remainder::NOTHING;
        finish(result)
    }
    /// Delivers an event through the IDT. `Exit` means that delivery needs the
    /// VMM first: inject again afterwards.
    pub fn inject(&mut self, cpu: &mut CpuState, bus: &mut B, event: Event) -> Result<(), RunStop> {
        let mut ex = Exec::new(cpu, bus, &mut self.native);
        ex.refresh();
        let result = deliver::event(&mut ex, event);
        self.remainder = Remainder::NOTHING;
        if result.is_ok() {
            ex.bus.commit();
        }
        ex.sync_flags();
        result.map_err(|s| finish(Err(s)))
    }
}

fn finish(result: Result<(), Stop>) -> RunStop {
    match result {
        Ok(()) => RunStop::Poll,
        Err(Stop::Exit | Stop::Exception(_)) => RunStop::Exit,
        Err(Stop::Halt) => RunStop::Halt,
        Err(Stop::TripleFault) => RunStop::TripleFault,
    }
}

/// Runs the first instruction of the block at RIP.
fn run_first<B: GuestBus>(blocks: &mut DecodedBlocks<B>, ex: &mut Exec<'_, B>) -> Result<(), Stop> {
    let block = blocks.find_single(ex)?;
    let Some(insn) = blocks.insns(&block).first() else {
        return Err(Exception::UD.into());
    };
    if !ex.cpu.is_64bit() {
        ex.check_fetch(ex.cpu.rip(), insn.len.into())?;
    }
    run_insn(ex, insn)
}

/// The index in [`Retired::counts`] at which the next instruction counts, if it does. To be asked
/// before it is executed: it may change privilege, and what is counted.
#[inline(always)]
fn counted<B: GuestBus>(ex: &Exec<'_, B>) -> Option<usize> {
    let cpl = ex.cpu.cpl;
    let counts = ex.cpu.retired.counts_at(cpl);
    counts.then_some(Retired::level(cpl))
}

/// Adds the instruction to the counts, if it has completed.
#[inline]
fn retire<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>, level: usize, result: &Step) {
    match result {
        Ok(Flow::Again) => {}
        Ok(flow) => {
            let has_branched = matches!(flow, Flow::Near | Flow::Jump);
            ex.cpu
                .retired
                .add(level, outcome(insn.events, has_branched));
        }
        Err(Stop::Halt) => ex.cpu.retired.add(level, insn.events),
        Err(_) => {}
    }
}

fn run_insn<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) -> Result<(), Stop> {
    let level = counted(ex);
    let result = (insn.handler)(ex, insn);
    if let Some(level) = level {
        retire(ex, insn, level, &result);
    }
    if let Ok(Flow::Next | Flow::EndBlock) = result {
        let next = ex.next_rip(insn);
        ex.cpu.set_rip(next);
    }
    match result {
        Ok(_) | Err(Stop::Halt) => ex.bus.commit(),
        Err(Stop::Exit) => stopped_at(ex, insn),
        Err(_) => {}
    }
    result.map(|_| ())
}

/// [`run_block`] that counts, up to the instruction that a counter may overflow with.
#[inline(never)]
fn run_counted<B: GuestBus>(
    blocks: &mut DecodedBlocks<B>,
    ex: &mut Exec<'_, B>,
) -> Result<(), Stop> {
    run_block::<B, true>(blocks, ex)
}

/// Runs the block at RIP to its end, or until it ends early.
#[inline(always)]
fn run_block<B: GuestBus, const COUNTS: bool>(
    blocks: &mut DecodedBlocks<B>,
    ex: &mut Exec<'_, B>,
) -> Result<(), Stop> {
    let block = blocks.find(ex)?;
    let insns = blocks.insns(&block);
    let changes = ex.bus.code_changes();
    if !ex.cpu.is_64bit() && ex.check_fetch(ex.cpu.rip(), block.bytes.into()).is_err() {
        return step_one(blocks, ex, true);
    }
    let level = Retired::level(ex.cpu.cpl);
    for insn in insns {
        let result = (insn.handler)(ex, insn);
        if COUNTS {
            retire(ex, insn, level, &result);
        }
        let flow = match result {
            Ok(flow) => flow,
            Err(stop) => {
                match stop {
                    Stop::Halt => ex.bus.commit(),
                    Stop::Exit => stopped_at(ex, insn),
                    _ => {}
                }
                return Err(stop);
            }
        };
        if insn.prefix & Insn::<B>::QUIET == 0 {
            ex.bus.commit();
        }
        match flow {
            Flow::Next => {
                let next = ex.next_rip(insn);
                ex.cpu.set_rip(next);
                if insn.prefix & Insn::<B>::WRITES != 0
                    && (ex.bus.is_event_due()
                        || ex.bus.code_changes() != changes && !blocks.is_current(ex.bus, &block))
                {
                    return Ok(());
                }
                if COUNTS && ex.cpu.retired.is_due() {
                    return Ok(());
                }
            }
            Flow::Near | Flow::Again => return Ok(()),
            Flow::EndBlock => {
                let next = ex.next_rip(insn);
                ex.cpu.set_rip(next);
                ex.refresh();
                return Ok(());
            }
            Flow::Jump => {
                ex.refresh();
                return Ok(());
            }
        }
    }
    Ok(())
}

/// The VMM has to answer first.
fn stopped_at<B: GuestBus>(ex: &mut Exec<'_, B>, insn: &Insn<B>) {
    ex.remainder = Transfer::rest_of(insn, ex.cpu.rip(), ex.has_wide_rip());
}

/// Executes the first instruction of the block at RIP, with debug exceptions. `is_single`: one iteration of a repeated
/// instruction.
fn step_one<B: GuestBus>(
    blocks: &mut DecodedBlocks<B>,
    ex: &mut Exec<'_, B>,
    is_single: bool,
) -> Result<(), Stop> {
    let before = ex.cpu.rflags;
    let rip = ex.cpu.rip();
    // Only Intel's processors hold these up after MOV SS and POP SS.
    let is_held = ex.cpu.shadow == Shadow::MovSs && !ex.cpu.features.has(Feature::Amd);
    if before & rflags::RF == 0 && !is_held {
        let hits = ex.code_breakpoints(ex.code_linear(rip));
        if hits != 0 {
            ex.cpu.fault_dr6 = hits | core::mem::take(&mut ex.cpu.held_dr6);
            return Err(Exception::DB.into());
        }
    }
    // The interrupt that waits for the program is one that it takes now (SDM vol. 3, 21.3.2).
    let taken = rflags::VIF | rflags::VIP;
    if before & taken == taken && ex.cpu.has_virtual_interrupts() {
        return Err(Exception::GP0.into());
    }
    let block = blocks.find(ex)?;
    let Some(insn) = blocks.insns(&block).first() else {
        return Err(Exception::UD.into());
    };
    ex.check_fetch(rip, insn.len.into())?;
    step_insn(ex, insn, is_single)
}

/// Executes `insn`, which is at RIP and at no breakpoint, with the debug exceptions that follow it.
fn step_insn<B: GuestBus>(
    ex: &mut Exec<'_, B>,
    insn: &Insn<B>,
    is_single: bool,
) -> Result<(), Stop> {
    let before = ex.cpu.rflags;
    let shadow = ex.cpu.shadow;
    let held = ex.cpu.held_dr6;
    ex.watch_hits = 0;
    ex.single_step = is_single;
    let level = counted(ex);
    let result = (insn.handler)(ex, insn);
    if let Some(level) = level {
        retire(ex, insn, level, &result);
    }
    ex.single_step = false;
    let halted = match result {
        Ok(Flow::Next | Flow::EndBlock) => {
            let next = ex.next_rip(insn);
            ex.cpu.set_rip(next);
            false
        }
        Ok(_) => false,
        Err(Stop::Halt) => true,
        Err(stop) => return Err(stop),
    };
    ex.bus.commit();
    ex.cpu.held_dr6 = 0;
    let code = insn.code;
    if shadow == ex.cpu.shadow {
        ex.cpu.shadow = Shadow::None;
    }
    // RF lasts for one instruction, or for all iterations of a repeated one.
    if result != Ok(Flow::Again) && !matches!(code, Code::Iretw | Code::Iretd | Code::Iretq) {
        ex.cpu.rflags &= !rflags::RF;
    }
    ex.refresh();
    let mut dr6 = core::mem::take(&mut ex.watch_hits);
    // INT n clears TF before its handler's first instruction: no trap. An INTO may be no interrupt.
    let software_interrupt = result == Ok(Flow::Jump)
        && matches!(code, Code::Int3 | Code::Int_imm8 | Code::Into | Code::Int1);
    // What SYSCALL and SYSRET have made of TF counts.
    let tf = match code {
        Code::Syscall | Code::Sysretd | Code::Sysretq => ex.cpu.rflags,
        _ => before,
    };
    if tf & rflags::TF != 0 && !software_interrupt {
        dr6 |= dr::DR6_BS;
    }
    if ex.cpu.shadow == Shadow::MovSs {
        // The next instruction comes first, INT n and its delivery included.
        ex.cpu.held_dr6 = dr6 & !dr::DR6_BS;
    } else if code == Code::Int1 {
        // One #DB has been delivered already, which says both.
        ex.cpu.dr6 |= held;
    } else {
        dr6 |= held;
        if dr6 != 0 {
            ex.cpu.fault_dr6 = dr6;
            return Err(Exception::DB.into());
        }
    }
    if halted { Err(Stop::Halt) } else { Ok(()) }
}

/// Delivers an exception, unless the VMM wants it; anything else leaves execution.
#[cold]
#[inline(never)]
fn handle<B: GuestBus>(ex: &mut Exec<'_, B>, stop: Stop) -> Result<(), Stop> {
    let Stop::Exception(e) = stop else {
        return Err(stop);
    };
    if ex.bus.intercept(ex.cpu, e) {
        return Err(Stop::Exit);
    }
    deliver::exception(ex, e)?;
    ex.cpu.shadow = Shadow::None;
    ex.bus.commit();
    ex.refresh();
    Ok(())
}
