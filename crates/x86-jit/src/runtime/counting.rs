//! Code that counts what is retired: what it has counted becomes the vCPU's, and how far it may go.

use iced_x86::{Decoder, DecoderOptions};
use x86_cpu::{CpuState, Retired, retired::outcome};
use x86_defs::control::cr4;
use x86_interp::events_of;

use crate::{
    Jit, JitBus, codegen::countdown::exact, frame::targets::salt_of, runtime::state::is_countable,
};

/// What the instructions count for at least that are executed between two levels of which one is counted: a guest that goes from one to the
/// other and back all the time comes to a poll, too.
pub(crate) const LEAST_EXECUTED: u64 = 64;

/// Translated code has called Rust, or has been left: what it has counted is added to the counts.
#[inline]
pub(crate) fn settle(cpu: &mut CpuState) {
    if let Some(counted) = exact::take_counted(&mut cpu.engine) {
        add(cpu, &counted);
        cpu.retired.left = cpu.retired.left.saturating_sub(counted.left);
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

/// RDPMC of a counter, for translated code that has said what it has counted; bit 63: the interpreter is to do it.
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

impl<B: JitBus> Jit<B> {
    /// Where to go on for `code` of the current mode, for `left` instructions until the next poll if that is set now.
    /// `counted`: the code that has called Rust counts. Code 0 is none.
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
        // SAFETY: it is an entry of a block in the buffer of `self`.
        unsafe { cpu.engine.set_counted_entry(code) };
        self.go_on(cpu, left)
    }

    /// Where code of the current mode is gone on with, for so many instructions until the next poll.
    fn go_on(&mut self, cpu: &mut CpuState, left: u64) -> u64 {
        let streams = self.session.mode.streams();
        match streams {
            Some(streams) => {
                let level = Retired::level(cpu.cpl);
                let until = cpu.retired.left;
                exact::begin(&mut cpu.engine, (streams, level), left, until);
            }
            None => {
                cpu.engine.counted_to = left;
                self.session.left_to_poll = left;
            }
        }
        self.code.address(self.code.trampolines.go_on(streams))
    }

    /// Translated code has gone to another privilege level by an instruction that counts at the one before. If only one of the two
    /// is counted, code of the other kind comes next. Nothing is found by the salt of no key, so the branch that comes now goes by
    /// [`Trampolines::branch`](crate::codegen::trampolines::Trampolines::branch), which knows.
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
        frame.salt = salt_of(0);
        if frame.log() != 0 || counts && !is_countable {
            return;
        }
        let left = match counted {
            true => exact::left(frame),
            false => self.session.left_to_poll.saturating_sub(LEAST_EXECUTED),
        };
        let go_on = self.go_on(cpu, left);
        // SAFETY: it is that trampoline's address in the buffer of `self`.
        unsafe { cpu.engine.set_counted_go_on(go_on) };
    }

    /// The branch at RIP, which translated code has counted, does not complete.
    #[cold]
    pub(crate) fn take_back(&self, cpu: &mut CpuState, bus: &mut B) {
        let Some(streams) = self.session.mode.streams() else {
            return;
        };
        let mut bytes = [0; 15];
        let bits = if cpu.is_64bit() { 64 } else { 32 };
        let n = bus.code_bytes(cpu, cpu.rip(), &mut bytes).unwrap_or(0);
        let have = bytes.get(..n).unwrap_or(&bytes);
        let i = Decoder::new(bits, have, DecoderOptions::NONE).decode();
        let events = outcome(events_of(&i), true) & streams.covered();
        cpu.retired.take_back(Retired::level(cpu.cpl), events);
    }
}
