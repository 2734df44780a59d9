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
/// Bit of the level in [`engine_frame::EngineFrame::counted_as`].
const LEVEL: u64 = 1 << 8;

/// Translated code has called Rust, or has been left: what it has counted is added to the counts.
#[inline]
pub(crate) fn settle(cpu: &mut CpuState) {
    if let Some(counted) = exact::take_counted(&mut cpu.engine) {
        let as_what = cpu.engine.counted_as;
        cpu.retired.add_counted(
            usize::from(as_what & LEVEL != 0),
            counted.instructions,
            (as_what & 0xff) as usize,
            counted.events,
            counted.left,
        );
    }
}

/// RDPMC of a counter, for translated code that has said what it has counted; bit 63: the interpreter is to do it.
pub(crate) fn read<B: JitBus>(cpu: &mut CpuState, bus: &mut B, counter: u32) -> u64 {
    const REFUSED: u64 = 1 << 63;
    let is_allowed = cpu.cpl == 0 || cpu.cr4 & cr4::PCE != 0;
    if !is_allowed || cpu.engine.log() != 0 {
        return REFUSED;
    }
    let counts = cpu.retired.counts;
    if let Some((instructions, events)) = exact::counted(&cpu.engine) {
        let as_what = cpu.engine.counted_as;
        let level = usize::from(as_what & LEVEL != 0);
        let stream = (as_what & 0xff) as usize;
        cpu.retired
            .add_counted(level, instructions, stream, events, 0);
    }
    let value = bus.read_pmc(cpu, counter);
    cpu.retired.counts = counts;
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
        let stream = self.session.mode.stream();
        if code == 0 || stream.is_none() && !counted {
            return code;
        }
        let frame = &mut cpu.engine;
        // SAFETY: it is an entry of a block in the buffer of `self`.
        unsafe { frame.set_counted_entry(code) };
        let place = match stream {
            Some(stream) => {
                self.begin_counting(cpu, stream, left);
                self.code.counting.go_on_counting
            }
            None => {
                frame.counted_to = left;
                self.session.left_to_poll = left;
                self.code.counting.go_on_plainly
            }
        };
        self.code.address(place)
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
                let level = Retired::level(cpu.cpl) as u64 * LEVEL;
                let as_what = &mut frame.counted_as;
                *as_what = *as_what & !LEVEL | level;
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
        let go_on = match self.session.mode.stream() {
            Some(stream) => {
                self.begin_counting(cpu, stream, left);
                self.code.counting.go_on_counting
            }
            None => {
                frame.counted_to = left;
                self.session.left_to_poll = left;
                self.code.counting.go_on_plainly
            }
        };
        // SAFETY: it is that trampoline's address in the buffer of `self`.
        unsafe { cpu.engine.set_counted_go_on(self.code.address(go_on)) };
    }

    fn begin_counting(&self, cpu: &mut CpuState, stream: usize, left: u64) {
        exact::begin(&mut cpu.engine, left, cpu.retired.left);
        let level = Retired::level(cpu.cpl) as u64 * LEVEL;
        cpu.engine.counted_as = stream as u64 | level;
    }

    /// The branch at RIP, which translated code has counted, does not complete.
    #[cold]
    pub(crate) fn take_back(&self, cpu: &mut CpuState, bus: &mut B) {
        let Some(stream) = self.session.mode.stream() else {
            return;
        };
        let mut bytes = [0; 15];
        let bits = if cpu.is_64bit() { 64 } else { 32 };
        let n = bus.code_bytes(cpu, cpu.rip(), &mut bytes).unwrap_or(0);
        let have = bytes.get(..n).unwrap_or(&bytes);
        let i = Decoder::new(bits, have, DecoderOptions::NONE).decode();
        let events = outcome(events_of(&i), true);
        cpu.retired
            .take_back(Retired::level(cpu.cpl), stream, events);
    }
}
