//! Adds to the vCPU's counts what translated code has counted, and says how far such code may go.

use iced_x86::{Decoder, DecoderOptions};
use x86_cpu::{CpuState, Retired, retired::outcome};
use x86_defs::{
    control::cr4,
    retired::{BRANCHES, INSTRUCTIONS, RARE, STREAMS},
};
use x86_interp::{Interp, RunStop, events_of};

use crate::{
    Jit, JitBus,
    code::space::CodeSpace,
    runtime::state::{is_countable, is_translatable},
};
use x86_codegen::{
    codegen::countdown::{self, exact},
    frame::exit::Reason,
    ir::streams::Streams,
};

/// Fewest events before a counter's overflow for which another translation of a block is tried.
const LEAST_EVENTS: i64 = 4;

/// Adds to the vCPU's counts what translated code has counted, which has called Rust or has been left.
#[inline]
pub(crate) fn settle(cpu: &mut CpuState) {
    if let Some(counted) = exact::take_counted(&mut cpu.engine) {
        add(cpu, &counted);
        cpu.retired.left = cpu.retired.left.saturating_sub(counted.left);
        if cpu.retired.bounded != 0 {
            let (streams, _) = exact::counts_as(&cpu.engine);
            let events = streams.events(&counted.sums);
            cpu.retired.approach(|stream| events[stream]);
            exact::set_bounds(&mut cpu.engine, &cpu.retired);
        }
    }
}

fn add(cpu: &mut CpuState, counted: &exact::Counted) {
    let (streams, level) = exact::counts_as(&cpu.engine);
    match (streams.are_several(), streams.sums()) {
        (false, [stream, ..]) => {
            cpu.retired
                .add_single(level, counted.instructions, *stream, counted.sums[0]);
        }
        _ => {
            let events = streams.events(&counted.sums);
            cpu.retired
                .add_counted(level, counted.instructions, &events);
        }
    }
}

/// Reads a counter for RDPMC in translated code, which has stored what it has counted. Bit 63 of the answer is set if
/// the interpreter has to execute the instruction.
pub(crate) fn read<B: JitBus>(cpu: &mut CpuState, bus: &mut B, counter: u32) -> u64 {
    const REFUSED: u64 = 1 << 63;
    let is_allowed = cpu.cpl == 0 || cpu.cr4 & cr4::PCE != 0;
    if !is_allowed || cpu.engine.log() != 0 {
        return REFUSED;
    }
    let counted = exact::counted(&cpu.engine);
    if let Some(counted) = &counted {
        add(cpu, counted);
    }
    let value = bus.read_pmc(cpu, counter);
    if let Some(counted) = &counted {
        add(cpu, &counted.negative());
    }
    value.unwrap_or(REFUSED)
}

/// How much the interpreter has executed because blocks were too long.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shortened {
    /// The number of instructions retired until it ended last.
    until: u64,
    /// At least so many instructions were executed then.
    least: u64,
}

impl Shortened {
    /// Returns the least number of instructions to execute from `now` on, by the number of those retired: twice as many
    /// as before, if the block behind these was too long as well, as in a loop that an event ends.
    fn least(&mut self, now: u64) -> u64 {
        const NEAR: u64 = 32;
        const MOST: u64 = 1024;
        self.least = match now.wrapping_sub(self.until) {
            ..NEAR => (2 * self.least).clamp(8, MOST),
            _ => 0,
        };
        self.least
    }
}

/// Returns the trampolines by which code goes on: see [`engine_frame::EngineFrame::set_goes_on`].
pub(crate) fn goes_on(code: &CodeSpace) -> [u64; 4] {
    const ALL: u16 = (1 << STREAMS) - 1;
    let streams = [
        None,
        Some(Streams::of(0, 0)),
        Some(Streams::of(RARE, 0)),
        Some(Streams::of(ALL, 0)),
    ];
    streams.map(|streams| code.address(code.trampolines.go_on(streams)))
}

impl<B: JitBus> Jit<B> {
    /// Returns where to go on for `code` of the current mode, with `left` instructions until the next poll. `counted`:
    /// the code that has called Rust counts. Code 0 is returned as it is.
    pub(crate) fn counted(
        &mut self,
        cpu: &mut CpuState,
        code: u64,
        left: u64,
        counted: bool,
    ) -> u64 {
        if code == 0 || self.session.mode.streams().is_none() && !counted {
            return code;
        }
        // SAFETY: `code` is the address of a block's entry in the code buffer of `self`, which translated code of
        // `self` goes on at.
        unsafe { cpu.engine.set_counted_entry(code) };
        self.go_on(cpu, left)
    }

    /// Returns the trampoline by which code of the current mode goes on, with `left` instructions until the next poll.
    fn go_on(&mut self, cpu: &mut CpuState, left: u64) -> u64 {
        let streams = self.session.mode.streams();
        match streams {
            Some(streams) => {
                let level = Retired::level(cpu.cpl);
                exact::begin(&mut cpu.engine, (streams, level), left, &cpu.retired);
            }
            None => {
                cpu.engine.counted_to = left;
            }
        }
        self.code.address(self.code.trampolines.go_on(streams))
    }

    /// Follows a change of the privilege level by an instruction that counts at the level it begins at. If only one of
    /// the two levels is counted, code of the other kind comes next. The salt is then that of no key, so the target
    /// table has no target for the branch that comes next, and it goes by
    /// [`Trampolines::branch`](x86_codegen::codegen::trampolines::Trampolines::branch), which changes to the other kind of
    /// code.
    pub(crate) fn follow_level(&mut self, cpu: &mut CpuState) {
        let counted = cpu.engine.counted_from != 0;
        settle(cpu);
        let counts = cpu.retired.counts_at(cpu.cpl);
        let is_countable = is_countable(cpu);
        let frame = &mut cpu.engine;
        if counted == counts {
            if counts {
                exact::set_level(frame, Retired::level(cpu.cpl));
            }
            return;
        }
        frame.counted_salt = frame.salt;
        frame.salt = frame.no_salt;
        if frame.log() != 0 || counts && !is_countable {
            return;
        }
        let left = countdown::left(frame);
        let go_on = self.go_on(cpu, left);
        // SAFETY: `go_on` is the address of a trampoline of that purpose in the code buffer of `self`.
        unsafe { cpu.engine.set_counted_go_on(go_on) };
    }

    /// Returns true if translated code is left before `reason` is answered.
    pub(crate) fn has_to_leave(&self, cpu: &CpuState, reason: Reason) -> bool {
        match reason {
            // A counter may have overflowed with the instruction before: its interrupt comes first.
            Reason::Interpret | Reason::Access => cpu.retired.is_due(),
            // A new budget is all that is needed.
            Reason::TooLong => self.session.left_to_poll < exact::LEAST,
            _ => false,
        }
    }

    /// Answers a block that is longer than what is left until a counter may overflow, though its budget was new: its
    /// split translation comes next, or the interpreter executes instructions up to the next branch. `resumed` is the
    /// RIP at which RF was set, until an instruction has been executed.
    #[cold]
    pub(crate) fn shorten(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        resumed: &mut Option<u64>,
    ) -> RunStop {
        if bus.must_return(cpu) {
            return RunStop::Poll;
        }
        let (streams, _) = exact::counts_as(&cpu.engine);
        let here = (cpu.rip(), cpu.retired.total(INSTRUCTIONS));
        let is_far = streams
            .bounds(&cpu.retired)
            .iter()
            .all(|left| *left >= LEAST_EVENTS);
        if is_far && core::mem::replace(&mut self.session.split_at, here) != here {
            self.session.splits = true;
            return RunStop::Poll;
        }
        let (branches, insns) = (cpu.retired.total(BRANCHES), here.1);
        let least = self.session.shortened.least(insns);
        loop {
            self.stats.interpreted += 1;
            let stop = interp.one(cpu, bus);
            let executed = cpu.retired.total(INSTRUCTIONS);
            self.session.shortened.until = executed;
            if stop != RunStop::Poll {
                return stop;
            }
            *resumed = None;
            let is_enough = cpu.retired.total(BRANCHES) != branches
                && (executed - insns >= least || !cpu.retired.counts_at(cpu.cpl));
            if is_enough || !is_translatable(cpu) || bus.must_return(cpu) {
                return stop;
            }
        }
    }

    /// Takes back the count of the branch at RIP, which translated code has counted but which does not complete.
    #[cold]
    pub(crate) fn take_back(&self, cpu: &mut CpuState, bus: &mut B) {
        let Some(streams) = self.session.mode.streams() else {
            return;
        };
        let mut bytes = [0; 15];
        let bits = if cpu.is_64bit() { 64 } else { 32 };
        let n = bus.peek_code(cpu, cpu.rip(), &mut bytes).unwrap_or(0);
        let have = bytes.get(..n).unwrap_or(&bytes);
        let i = Decoder::new(bits, have, DecoderOptions::NONE).decode();
        let events = outcome(events_of(&i), true) & streams.covered();
        cpu.retired.take_back(Retired::level(cpu.cpl), events);
    }
}
