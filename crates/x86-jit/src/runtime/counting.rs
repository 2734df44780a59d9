//! Adds to the vCPU's counts what translated code has counted, and says how far such code may go.

use iced_x86::{Decoder, DecoderOptions};
use x86_cpu::{CpuState, Retired, retired::outcome};
use x86_defs::control::cr4;
use x86_interp::events_of;

use crate::{Jit, JitBus, runtime::state::is_countable};
use x86_codegen::{codegen::countdown::exact, frame::targets::salt_of};

/// What the instructions between two changes of level count for at least, where one of the two levels is counted. So a
/// guest that changes the level all the time comes to a poll, too.
pub(crate) const LEAST_EXECUTED: u64 = 64;

/// Adds to the vCPU's counts what translated code has counted, which has called Rust or has been left.
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
        frame.salt = salt_of(0);
        if frame.log() != 0 || counts && !is_countable {
            return;
        }
        let left = match counted {
            true => exact::left(frame),
            false => self.session.left_to_poll.saturating_sub(LEAST_EXECUTED),
        };
        let go_on = self.go_on(cpu, left);
        // SAFETY: `go_on` is the address of a trampoline of that purpose in the code buffer of `self`.
        unsafe { cpu.engine.set_counted_go_on(go_on) };
    }

    /// Takes back the count of the branch at RIP, which translated code has counted but which does not complete.
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
