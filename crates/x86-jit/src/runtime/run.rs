//! [`Jit`]: the dispatch loop between translated code, the interpreter and the run loop.

use x86_cpu::{CpuState, Shadow};
use x86_defs::{rflags, xsave};
use x86_interp::{Interp, RunStop};

use crate::{
    Jit, JitBus, RunLimit,
    runtime::Context,
    runtime::counting::settle,
    runtime::lockstep::turn,
    runtime::requests::tell_view,
    runtime::state::{
        drop_resume_flag, is_translatable, keep_resume_flag, needs_stepping, set_gs_base,
        target_key,
    },
};
use x86_codegen::{
    codegen::countdown,
    frame::exit::{Left, Reason},
    frame::state::{pack, unpack},
    ir::segment::page_of,
};

/// How many instructions the interpreter executes one by one before [`Interp::run`] goes on, which returns only after
/// many.
const PASSED: u32 = 32;

impl<B: JitBus> Jit<B> {
    /// Executes until something stops it, as [`Interp::run`] does, or until the run limit ends.
    pub fn run(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        run_limit: Option<RunLimit<'_>>,
    ) -> RunStop {
        let _turn = self.lockstep.is_some().then(|| {
            turn::wait(|| {
                // The vCPU whose turn it is may wait for a change that this vCPU has to acknowledge.
                if bus.mmu().needs_sync() {
                    bus.mmu().sync();
                }
            })
        });
        self.session.can_resume = false;
        set_gs_base(cpu);
        let frame = &mut cpu.engine;
        frame.host_mxcsr = xsave::MXCSR_DEFAULT.into();
        countdown::allow_polls(frame, true);
        frame.irq_waiting = bus.interrupt_waits().into();
        let tsc = bus.tsc_offset();
        frame.tsc_offset = tsc.unwrap_or(0);
        countdown::begin(frame, countdown::longest());
        let run_limit = run_limit.filter(|_| self.lockstep.is_none());
        frame.until = run_limit.map_or(0, |l| l.until_tsc);
        let overflow = run_limit.and_then(|l| l.overflow_tsc);
        countdown::approach::begin(frame, overflow, host::cpu::rdtsc);
        // SAFETY: translated code runs only below, while `self`, `bus` and `run_limit` are borrowed. The target table
        // belongs to `self` and never moves. The request word is that of `bus`, which stays the same, and the stop byte
        // is that of `run_limit`; without a limit `until` is 0, and the byte is not looked at. A log is only set in
        // lock-step.
        unsafe {
            frame.set_targets(self.code.cache.targets.as_ptr() as u64);
            frame.set_requests(bus.request_word().as_ptr() as u64);
            frame.set_log(0);
            frame.set_stop(run_limit.map_or(0, |l| l.stop.as_ptr() as u64));
        }
        self.session.plain_tsc = tsc.is_some() && self.lockstep.is_none();
        loop {
            if interp.resets() != self.session.resets {
                self.flush_all();
                self.session.resets = interp.resets();
            }
            if cpu.shadow == Shadow::None && bus.poll(cpu) {
                return RunStop::Poll;
            }
            self.session.resumed = drop_resume_flag(cpu);
            let stop = if self.profiles.mixes_tiers && self.is_time_to_follow(cpu) {
                self.follow_anew(interp, cpu, bus)
            } else if !is_translatable(cpu) {
                if self.session.resumed.take().is_some() {
                    cpu.rflags |= rflags::RF;
                }
                if needs_stepping(cpu) {
                    self.stats.interpreted += 1;
                    interp.one(cpu, bus)
                } else {
                    match self.pass(interp, cpu, bus) {
                        Some(stop) => stop,
                        None => return interp.run(cpu, bus),
                    }
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
                            self.session.can_resume =
                                stop == RunStop::Exit && self.lockstep.is_none();
                            stop
                        }
                    },
                }
            };
            if stop != RunStop::Poll {
                keep_resume_flag(cpu, stop, self.session.resumed);
                return stop;
            }
        }
    }

    /// Executes instructions one by one in a state that is not translated, as between two modes there are states of a
    /// few instructions. `None` if there are more: the interpreter is to execute them until it returns.
    fn pass(&mut self, interp: &mut Interp<B>, cpu: &mut CpuState, bus: &mut B) -> Option<RunStop> {
        for _ in 0..PASSED {
            self.stats.interpreted += 1;
            let stop = interp.one(cpu, bus);
            if stop != RunStop::Poll || is_translatable(cpu) || bus.must_return(cpu) {
                return Some(stop);
            }
        }
        None
    }

    /// Does what [`Self::run`] does, if nothing but general registers and RIP has changed since it stopped with
    /// [`Self::can_resume`], and [`JitBus::must_return`] is false.
    pub fn resume(&mut self, interp: &mut Interp<B>, cpu: &mut CpuState, bus: &mut B) -> RunStop {
        let rip = cpu.rip();
        let (key, salt) = target_key(cpu);
        let code = self.code.cache.target(rip, salt);
        let is_same = !self.session.stale
            && self.disturbance.flush_every == 0
            && interp.resets() == self.session.resets
            && key == self.target_key_of(cpu, bus);
        let Some(code) = code.filter(|_| is_same) else {
            return self.run(interp, cpu, bus, None);
        };
        set_gs_base(cpu);
        cpu.engine.page = page_of(cpu);
        // The stop byte may be gone. It is looked at only where `until` is not 0.
        cpu.engine.until = 0;
        countdown::approach::begin(&mut cpu.engine, None, host::cpu::rdtsc);
        self.session.resumed = None;
        match self.call(interp, cpu, bus, code) {
            Left::Poll => RunStop::Poll,
            Left::Again => self.run(interp, cpu, bus, None),
            Left::Interpreted(stop) => {
                self.session.can_resume = false;
                stop
            }
            Left::Stopped(stop) => {
                self.session.can_resume = stop == RunStop::Exit;
                keep_resume_flag(cpu, stop, self.session.resumed);
                stop
            }
        }
    }

    /// Executes translated code from the block at host address `entry` on, in lock-step if that is on.
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

    /// Executes translated code from the block at host address `entry` on, without lock-step.
    pub(crate) fn call(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        entry: u64,
    ) -> Left {
        self.stats.entries += 1;
        let first = countdown::first(&cpu.engine);
        let entry = self.counted(cpu, entry, first, false);
        let enter = self.code.address(self.code.trampolines.plain.enter);
        let mut context = Context {
            jit: &raw mut *self,
            interp: &raw mut *interp,
            cpu: &raw mut *cpu,
            bus: &raw mut *bus,
            left: Left::Again,
        };
        let frame = &mut cpu.engine;
        frame.no_salt = self.session.no_salt;
        frame.argument = 0;
        frame.flags = pack(cpu.rflags);
        // SAFETY: translated code runs until `f` returns, and `context` lives longer. `entry` is an entry of a block,
        // or a trampoline, in the code buffer of `self`. The tables belong to `self` and to the MMU, and neither moves
        // them.
        unsafe {
            frame.set_context(&raw mut context as u64);
            frame.set_entry(entry);
            frame.set_devices(bus.mmu().device_pages() as u64);
            frame.set_mixed(bus.mmu().mixed_pages().as_ptr() as u64);
            frame.set_keys(self.session.keys.address());
            frame.set_switches(self.session.switches.address());
            frame.set_levels(self.session.levels.address());
            frame.set_goes_on(self.session.goes_on);
            frame.set_switch_epochs(&raw const *bus.mmu().switch_epochs() as u64);
        }
        frame.wanted_root = 0;
        // SAFETY: GS addresses `cpu`, which meanwhile only the functions use that have `context`. The code at `enter`
        // was made by `trampolines::emit` and keeps the host's calling convention.
        unsafe {
            let f: extern "C" fn() = core::mem::transmute(enter as *const u8);
            f();
        }
        settle(cpu);
        countdown::exact::end(&mut cpu.engine);
        tell_view(cpu, bus);
        self.follow_mode(cpu);
        for _ in 0..core::mem::take(&mut cpu.engine.pauses) {
            bus.pause();
        }
        let frame = &mut cpu.engine;
        if Reason::of(frame.reason) != Reason::Poll {
            return context.left;
        }
        // Where RF was set, no poll comes before the instruction that it is for.
        self.session.resumed = None;
        countdown::approach::end(frame, host::cpu::rdtsc);
        let flags = unpack(frame.flags);
        cpu.rflags = cpu.rflags & !rflags::ARITH | flags;
        match self.sample(interp, cpu, bus) {
            RunStop::Poll => Left::Poll,
            stop => Left::Interpreted(stop),
        }
    }
}
