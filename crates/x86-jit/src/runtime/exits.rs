//! Calls of translated code into Rust, which do not leave it: instructions of the interpreter, branches to targets that
//! are not known yet, changed code.
//!
//! Registers and flags are in `CpuState`. FP state may be in the host's registers still
//! (`x86_codegen::frame::words::FP_LIVE`). Only instructions that use it would notice, and they come by
//! [`x86_codegen::codegen::trampolines::Trampolines::bail`], which saves it.

use x86_cpu::{CpuState, Exception, Shadow};
use x86_defs::rflags;
use x86_interp::{Interp, RunStop};

use crate::{
    Jit, JitBus,
    runtime::Context,
    runtime::breakpoints::is_enabled,
    runtime::counting::settle,
    runtime::quiet::Change,
    runtime::requests::tell_view,
    runtime::state::{
        drop_resume_flag, is_translatable, keep_resume_flag, may_poll_first, move_stack, word_mask,
    },
};
use x86_codegen::{
    codegen::{Condition, countdown},
    frame::exit::{Left, Reason},
    frame::state::{pack, unpack},
    ir::cause::Cause,
    ir::mode::Mode,
    ir::segment::{may_branch_to, page_of},
};

/// Direct branches to other pages that go by the target table before one of them is linked to another target than
/// before: code that several address spaces share at different addresses would be linked anew all the time.
const CROSS_PAGE_MISSES: u64 = 64;

/// Answers what translated code asks for by its [`Reason`]. Returns the host address at which translated code goes on,
/// or 0 if it is left.
pub(crate) extern "C" fn handle<B: JitBus>(context: *mut Context<B>) -> u64 {
    // SAFETY: `Jit::call` made the context from its own references, and uses none of them until translated code
    // returns.
    let (jit, interp, cpu, bus, left) = unsafe {
        let c = &mut *context;
        (
            &mut *c.jit,
            &mut *c.interp,
            &mut *c.cpu,
            &mut *c.bus,
            &mut c.left,
        )
    };
    settle(cpu);
    jit.session.left_to_poll = countdown::left(&cpu.engine);
    let counted = countdown::exact::end(&mut cpu.engine);
    tell_view(cpu, bus);
    jit.follow_mode(cpu);
    if cpu.engine.log() != 0 {
        jit.session.fault = None;
        jit.end_stretch(cpu, bus);
        *left = Left::Again;
        return 0;
    }
    let before = (cpu.engine.key, jit.stats.flushes);
    let wanted = core::mem::take(&mut cpu.engine.wanted_root);
    let code = answer(jit, interp, cpu, bus, left);
    if wanted != 0 && code != 0 {
        jit.note_switch(cpu, bus, wanted);
    }
    let frame = &mut cpu.engine;
    // Returns do not check whether the code that they lead to has changed. So frames of calls are dropped if any code
    // has.
    let changes = bus.code_changes();
    let changed = core::mem::replace(&mut jit.session.changes, changes) != changes;
    if changed || (frame.key, jit.stats.flushes) != before {
        frame.drop_calls();
    }
    let left = jit.left_to_poll(cpu);
    jit.counted(cpu, code, left, counted)
}

/// Does the work of [`handle`] outside of lock-step.
fn answer<B: JitBus>(
    jit: &mut Jit<B>,
    interp: &mut Interp<B>,
    cpu: &mut CpuState,
    bus: &mut B,
    left: &mut Left,
) -> u64 {
    let frame = &mut cpu.engine;
    let flags = unpack(frame.flags);
    let reason = Reason::of(frame.reason);
    let argument = core::mem::take(&mut frame.argument);
    countdown::charge_nothing(frame);
    let page = frame.page;
    let [target, far] = frame.spill;
    cpu.rflags = cpu.rflags & !rflags::ARITH | flags;
    let mut resumed = jit.session.resumed.take();
    let fault = jit.session.fault.take();
    let stop = match reason {
        _ if jit.has_to_leave(cpu, reason) => {
            if resumed == Some(cpu.rip()) {
                cpu.rflags |= rflags::RF;
            }
            *left = Left::Again;
            return 0;
        }
        Reason::Interpret | Reason::Access => {
            let operand = (reason == Reason::Access).then_some(target);
            match fault {
                Some(e) => jit.raise(interp, cpu, bus, e),
                None => match jit.transfer(interp, cpu, bus, argument as usize, operand) {
                    Some(RunStop::Poll) => match jit.after_transfer(interp, cpu, bus) {
                        0 => RunStop::Poll,
                        code => return code,
                    },
                    Some(stop) => stop,
                    None => match jit.interpret_quiet(interp, cpu, bus, argument as usize) {
                        Quiet::Completed(0) => RunStop::Poll,
                        Quiet::Completed(code) => return code,
                        Quiet::Stopped(stop) => stop,
                        Quiet::Other => jit.interpret(interp, cpu, bus, argument as usize),
                    },
                },
            }
        }
        Reason::Branch if may_branch_to(cpu, target) => {
            jit.stats.branches += 1;
            move_stack(cpu, argument.wrapping_sub(8));
            cpu.set_rip(target);
            RunStop::Poll
        }
        Reason::Branch => jit.refuse_branch(interp, cpu, bus, (page, target)),
        Reason::CrossPage if jit.complete_cross_page(cpu, bus) => {
            let code = jit.follow_cross_page(interp, cpu, bus, far as usize);
            if code != 0 {
                jit.session.resumed = resumed.filter(|&at| at == cpu.rip());
                return code;
            }
            RunStop::Poll
        }
        Reason::CrossPage => jit.interpret(interp, cpu, bus, 0),
        Reason::Link => {
            let code = jit.follow_link(interp, cpu, bus, argument as usize);
            if code != 0 {
                jit.session.resumed = resumed.filter(|&at| at == cpu.rip());
                return code;
            }
            RunStop::Poll
        }
        Reason::TooLong => jit.shorten(interp, cpu, bus, &mut resumed),
        Reason::Stale | Reason::Poll => {
            if argument != 0 {
                jit.revalidate_trace(cpu, bus);
            }
            jit.stats.stale += 1;
            jit.session.stale = true;
            // Remembered branches would lead to the outdated block again and again.
            bus.mmu().forget_branches();
            RunStop::Poll
        }
    };
    if stop != RunStop::Poll {
        keep_resume_flag(cpu, stop, resumed);
        *left = Left::Stopped(stop);
        return 0;
    }
    // IRET has led to a target without code: the instruction that RF is for is still to come.
    let is_to_come = matches!(
        reason,
        Reason::Branch | Reason::CrossPage | Reason::Link | Reason::Stale | Reason::TooLong
    );
    if is_to_come && resumed == Some(cpu.rip()) {
        cpu.rflags |= rflags::RF;
    }
    let code = jit.proceed(interp, cpu, bus);
    *left = Left::Again;
    code
}

/// Returns numbers that change with the mapping, and when engines have to look for code again after it was compared.
fn mapping<B: JitBus>(bus: &mut B) -> (u64, u64, u64) {
    let epoch = bus.fetch_epoch();
    let mmu = bus.mmu();
    (mmu.views_made(), mmu.slots_generation(), epoch)
}

/// What [`Jit::interpret_quiet`] has done.
enum Quiet {
    /// Nothing: the instruction may change anything.
    Other,
    /// The instruction is complete; the host address at which to go on, or 0 if that is to be looked up.
    Completed(u64),
    /// As [`Jit::interpret`].
    Stopped(RunStop),
}

impl<B: JitBus> Jit<B> {
    /// Makes the one access of the instruction at RIP, if the instruction does nothing else. `site` is its number, or
    /// 0, and `operand` the linear address of its memory operand, if that is known.
    fn transfer(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        site: usize,
        operand: Option<u64>,
    ) -> Option<RunStop> {
        if is_enabled(cpu) {
            return None;
        }
        let (transfer, cause) = match self.session.interpreted.get(site.wrapping_sub(1)) {
            Some(site) => (site.transfer.as_ref()?, site.cause),
            None => (self.session.given_up.transfer(cpu, bus)?, Cause::Slow),
        };
        let stop = interp.transfer(cpu, bus, transfer, operand)?;
        self.stats.interpreted += 1;
        self.stats.causes[cause as usize] += 1;
        countdown::charge_interpreted(&mut cpu.engine);
        Some(stop)
    }

    /// Returns where to go on after [`Self::transfer`], which changes neither mapping nor mode; 0 if a lookup in the
    /// target table is not enough.
    fn after_transfer(&mut self, interp: &Interp<B>, cpu: &mut CpuState, bus: &mut B) -> u64 {
        let is_quick = interp.resets() == self.session.resets
            && bus.mmu().views_made() == self.session.views_made
            && !bus.must_return(cpu)
            && !self.session.stale
            && self.disturbance.flush_every == 0;
        let rip = cpu.rip();
        match self.code.cache.target(rip, cpu.engine.salt) {
            Some(code) if is_quick => {
                cpu.engine.page = page_of(cpu);
                code
            }
            _ => 0,
        }
    }

    /// Has the interpreter execute the instruction at RIP, if that changes nothing that translated code depends on.
    fn interpret_quiet(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        site: usize,
    ) -> Quiet {
        let known = match self.session.interpreted.get(site.wrapping_sub(1)) {
            Some(site) => Some((&site.insn, site.change, site.cause)),
            None => {
                let known = self.session.given_up.known(cpu, bus);
                known.map(|(insn, change)| (insn, change, Cause::Slow))
            }
        };
        let Some((insn, change, cause)) =
            known.filter(|known| known.1.is_quiet(cpu) && !is_enabled(cpu))
        else {
            return Quiet::Other;
        };
        self.stats.interpreted += 1;
        self.stats.causes[cause as usize] += 1;
        let before = mapping(bus);
        let rip = cpu.rip();
        let stop = interp.execute_whole(cpu, bus, insn);
        // See `Self::interpret`.
        if cpu.rip() == rip {
            countdown::charge_all(&mut cpu.engine);
        } else {
            countdown::charge_interpreted(&mut cpu.engine);
        }
        if let Some(stop) = stop {
            return Quiet::Stopped(stop);
        }
        cpu.engine.flags = pack(cpu.rflags);
        let mut is_same = cpu.shadow == Shadow::None;
        if matches!(change, Change::Mode | Change::XState) {
            is_same &= is_translatable(cpu);
            self.update_mode(cpu, bus);
        }
        Quiet::Completed(if is_same && mapping(bus) == before {
            self.after_transfer(interp, cpu, bus)
        } else {
            0
        })
    }

    /// Has the interpreter execute the instruction at RIP; `site` is its number, or 0.
    pub(crate) fn interpret(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        site: usize,
    ) -> RunStop {
        let site = self.session.interpreted.get(site.wrapping_sub(1));
        self.stats.interpreted += 1;
        self.stats.causes[site.map_or(Cause::Slow, |s| s.cause) as usize] += 1;
        let rip = cpu.rip();
        let stop = match site {
            Some(site) => interp.execute(cpu, bus, &site.insn),
            None => match self
                .session
                .given_up
                .find(interp, cpu, bus, self.session.mode)
            {
                Some(insn) => interp.execute(cpu, bus, insn),
                None => interp.one(cpu, bus),
            },
        };
        // A repeated instruction that is not finished has made many repetitions: a poll is due.
        if cpu.rip() == rip {
            countdown::charge_all(&mut cpu.engine);
        } else {
            countdown::charge_interpreted(&mut cpu.engine);
        }
        stop
    }

    /// Raises the exception that the instruction at RIP was found to raise.
    fn raise(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        exception: Exception,
    ) -> RunStop {
        self.stats.interpreted += 1;
        self.stats.causes[Cause::Slow as usize] += 1;
        countdown::charge_interpreted(&mut cpu.engine);
        interp.raise(cpu, bus, exception)
    }

    /// Returns the host address of the block that link site `number` leads to, and links the site to it; 0 if there is
    /// none.
    pub(crate) fn follow_link(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        number: usize,
    ) -> u64 {
        let Some(site) = self.builder.translator.links.get_mut(number) else {
            self.session.stale = true;
            return 0;
        };
        site.is_taken = true;
        let site = *site;
        let page = cpu.engine.page;
        cpu.set_rip(page.wrapping_add(site.target.into()));
        let flushes = self.stats.flushes;
        self.select(cpu, bus);
        let split = site.split;
        self.builder.wanted_by = Some(number);
        let next = self.find_block(interp, cpu, bus, split);
        self.builder.wanted_by = None;
        let Some(mut next) = next else {
            return 0;
        };
        if site.polls && next.entries.polled == 0 {
            let Some(with_poll) = self.complete_entries(cpu, bus, split, next) else {
                self.flush_all();
                return 0;
            };
            next = with_poll;
        }
        self.select(cpu, bus);
        if self.stats.flushes == flushes {
            self.link(number, next);
        }
        self.code.address(next.entries.saved as usize)
    }

    /// Has the interpreter raise #GP(0) for a target that may not be branched to: at the branch, or at the target if it
    /// is just what follows the page. `page`: where the code was.
    fn refuse_branch(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        (page, target): (u64, u64),
    ) -> RunStop {
        if target == page.wrapping_add(0x1000) && !self.session.mode.has(Mode::SEGMENTED) {
            cpu.set_rip(target);
        } else {
            self.take_back(cpu, bus);
        }
        self.interpret(interp, cpu, bus, 0)
    }

    /// Completes the direct branch to another page that `frame::words::SPILL` describes. Returns false if the
    /// interpreter has to raise its exception, at RIP.
    pub(crate) fn complete_cross_page(&mut self, cpu: &mut CpuState, bus: &mut B) -> bool {
        let frame = &cpu.engine;
        let page = frame.page;
        let target = frame.spill[0] & word_mask(cpu);
        let number = frame.spill[1] as usize;
        let Some(site) = self.builder.translator.cross_page_sites.get(number) else {
            unreachable!("a site of dropped code")
        };
        if may_branch_to(cpu, target) {
            move_stack(cpu, i64::from(site.pop) as u64);
            cpu.set_rip(target);
            return true;
        }
        // The branch raises #GP(0); an instruction that is reached without a branch raises its own.
        let falls = i64::from(site.target) == i64::from(site.offset) + 1;
        if falls {
            cpu.set_rip(target);
        } else {
            cpu.set_rip(page.wrapping_add(site.offset.into()));
            self.take_back(cpu, bus);
        }
        false
    }

    /// Returns the host address of the target of the direct branch `number`, which is at RIP, and links the branch to
    /// it if that is due. 0 if the target is not translated.
    pub(crate) fn follow_cross_page(
        &mut self,
        interp: &mut Interp<B>,
        cpu: &mut CpuState,
        bus: &mut B,
        number: usize,
    ) -> u64 {
        self.stats.branches += 1;
        let flushes = self.stats.flushes;
        let Some(code) = self.find(interp, cpu, bus) else {
            return 0;
        };
        if self.stats.flushes == flushes {
            self.remember(cpu, bus, number, code);
        }
        code
    }

    /// Links the direct branch `number`, which has led to `code` at RIP, to it under the condition that it leads there,
    /// if that is due.
    fn remember(&mut self, cpu: &mut CpuState, bus: &mut B, number: usize, code: u64) {
        let rip = cpu.rip();
        let mask = word_mask(cpu);
        let page = page_of(cpu);
        let frame = &mut cpu.engine;
        let due = frame.cross_page_left as i64 <= 0;
        if due {
            frame.cross_page_left = CROSS_PAGE_MISSES;
        }
        let key = frame.number as i32;
        let Some(site) = self
            .builder
            .translator
            .cross_page_sites
            .get(number)
            .copied()
        else {
            return;
        };
        let to = self.code.offset(code);
        match site.condition {
            Condition::BlockNumber {
                number: at,
                page: place,
            } if due || site.to == 0 => {
                let is_segmented = self.session.mode.has(Mode::SEGMENTED);
                let from = rip.wrapping_sub(i64::from(site.target) as u64);
                // The page in which CS begins starts below instruction pointer 0.
                let from = if is_segmented { from } else { from & mask };
                // A branch around the end of 16-bit addresses goes by the target table.
                let beyond = i64::from(site.target & !0xfff) as u64;
                if is_segmented && from.wrapping_add(beyond) != page {
                    return;
                }
                if let Some(place) = place {
                    self.code.set_gva(place, from);
                }
                self.code.set_operand(at, key);
                self.link_cross_page(number, to);
            }
            Condition::PageGuard {
                page_guard: place,
                tagged,
                untagged,
                untag,
            } => {
                let Some((key, _)) = self.key_at(cpu, bus) else {
                    return;
                };
                // A page guard covers one page only.
                if self.code.cache.blocks.get(key).is_none_or(|b| b.straddles) {
                    return;
                }
                let Some(page_guard) = self.code.cache.take_page_guard(key) else {
                    return;
                };
                self.code.cache.set_page_guard(bus, page_guard, rip);
                if site.to == 0 || due && site.to != to {
                    let displacement = mmu::l1::page_guard(page_guard.number);
                    self.code.set_operand(place, displacement);
                    let tag = i32::from(page_guard.tag);
                    self.code.set_operand(tagged, untagged + tag);
                    if let Some(at) = untag {
                        self.code.set_short_operand(at, -page_guard.tag);
                    }
                    self.link_cross_page(number, to);
                }
            }
            Condition::BlockNumber { .. } => {}
        }
    }

    /// Returns the number of instructions until the next poll, less what [`handle`] has charged.
    fn left_to_poll(&self, cpu: &CpuState) -> u64 {
        let charged = countdown::charged(&cpu.engine);
        self.session.left_to_poll.saturating_sub(charged)
    }

    /// Returns the host address at which to go on at RIP; 0 if translated code is to be left.
    fn proceed(&mut self, interp: &mut Interp<B>, cpu: &mut CpuState, bus: &mut B) -> u64 {
        if interp.resets() != self.session.resets
            || bus.must_return(cpu) && cpu.shadow == Shadow::None
        {
            return 0;
        }
        self.session.resumed = drop_resume_flag(cpu);
        let may_poll =
            self.session.resumed.is_some() && may_poll_first(cpu, self.left_to_poll(cpu));
        let code = if is_translatable(cpu) && !may_poll {
            cpu.engine.flags = pack(cpu.rflags);
            self.find(interp, cpu, bus)
        } else {
            None
        };
        if code.is_none() && self.session.resumed.take().is_some() {
            // The instruction that RF is for is still to come.
            cpu.rflags |= rflags::RF;
        }
        code.unwrap_or(0)
    }
}
