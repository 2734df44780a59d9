//! KVM_RUN: requests, injection, execution, exits.

use std::sync::atomic::Ordering;

use kvm_bindings::{
    KVM_GUESTDBG_SINGLESTEP, KVM_MP_STATE_HALTED, KVM_MP_STATE_INIT_RECEIVED,
    KVM_MP_STATE_RUNNABLE, KVM_MP_STATE_UNINITIALIZED, KVM_X86_DISABLE_EXITS_HLT,
    KVM_X86_DISABLE_EXITS_PAUSE, KVM_X86_QUIRK_OUT_7E_INC_RIP,
};
use x86_cpu::{Exception, GuestBus, Shadow};
use x86_defs::{dr, rflags};
use x86_interp::RunStop;
use x86_jit::{JitBus, RunLimit};

use super::{Inner, linear_rip, pmu::NEVER, replay::DeviceAccess};
use crate::{Answer, Error, Exit, Result, RunInput, RunStatus, shared::request};

/// A look at the clock is a quarter of the cost of an exit, so most entries after a device's answer
/// do without: the timers wait for the next look while the guest runs.
const ENTRIES_PER_LOOK: u8 = 16;
/// Longest time between two looks while translated code runs: what an estimated gap in steal time may be wrong by.
const RUN_LIMIT_NS: u64 = 100_000;

impl Inner {
    /// KVM_RUN on the calling thread.
    /// Leaves the exit in `bus.exit`: it is large, and copying it about would cost as much as
    /// all the rest.
    pub(super) fn run(&mut self, input: &RunInput<'_>) -> Result<()> {
        self.bus.note_pause();
        self.bus.note_entry(&mut self.cpu);
        self.bus.advance_steal_version();
        self.bus.note_running();
        self.bus.start_cycles(&mut self.cpu);
        let result = self.run_here(input);
        self.bus.stop_polling();
        self.bus.stop_cycles();
        self.bus.sync_lapic();
        self.bus.unshare_tpr();
        self.count_exit(&result);
        result
    }

    fn run_here(&mut self, input: &RunInput<'_>) -> Result<()> {
        self.take_answer(&input.answer);
        if std::mem::take(&mut self.resumes) && self.can_resume(input) && self.resume() {
            return Ok(());
        }
        self.signals_checked_ns = 0;
        // A CPU that left HLT for the host goes on behind it, as AMD's do.
        self.sleeps_in_guest = false;
        if !self.bus.has_lapic() {
            self.bus.cr8 = input.cr8 & 0xf;
        }
        self.bus.sync_memory();
        self.bus.restore_root_cache(&self.cpu);
        // After an access to a device the VMM answers; after anything else it may also set
        // breakpoints, load code or reset the machine.
        let goes_on = std::mem::take(&mut self.is_device_exit);
        let may_have_new_code = std::mem::take(&mut self.may_have_new_code);
        if may_have_new_code || !goes_on {
            self.bus.mmu.recheck_code();
        } else {
            self.bus.mmu.recheck_exposed();
        }
        if matches!(
            self.mp_state,
            KVM_MP_STATE_UNINITIALIZED | KVM_MP_STATE_INIT_RECEIVED
        ) {
            return self.wait_for_startup(input);
        }
        self.complete_instruction()?;
        if self.bus.exit.is_none() {
            self.run_until_exit(input, goes_on)?;
        }
        if matches!(self.bus.exit, Some(Exit::MemoryFault { .. })) {
            return Err(Error::Fault);
        }
        self.note_exit();
        Ok(())
    }

    fn note_exit(&mut self) {
        if let Some(Exit::Io {
            is_in: false,
            port: 0x7e,
            ..
        }) = self.bus.exit
            && self.bus.vm.options.has_quirk(KVM_X86_QUIRK_OUT_7E_INC_RIP)
        {
            self.finish_early();
        }
        self.is_device_exit = matches!(
            self.bus.exit,
            Some(Exit::Io { .. } | Exit::Mmio { .. } | Exit::Rdmsr { .. } | Exit::Wrmsr { .. })
        );
        self.resumes = self.is_device_exit && self.jit.as_ref().is_some_and(|jit| jit.can_resume());
    }

    /// KVM_X86_QUIRK_OUT_7E_INC_RIP: the VMM is to see RIP behind the OUT that it has been left for.
    #[cold]
    fn finish_early(&mut self) {
        self.bus.replay.answer(0, false);
        if let Some((len, value)) = self.bus.replay.sole() {
            // Where that is not enough, the instruction runs again when the guest goes on.
            self.interp
                .complete(&mut self.cpu, &mut self.bus, len, value);
        }
    }

    /// The VMM has given its answer and has made no other call since the guest's device access, and
    /// nothing waits to be looked at before the guest goes on.
    fn can_resume(&mut self, input: &RunInput<'_>) -> bool {
        let is_quick = self.quick_entries < ENTRIES_PER_LOOK
            && self.dirty_ring.is_none()
            && input.blocked_signals.is_none()
            && !input.request_interrupt_window
            && input.immediate_exit.load(Ordering::Relaxed) == 0
            && (self.bus.has_lapic() || self.bus.cr8 == input.cr8 & 0xf)
            && !self.bus.must_return(&self.cpu)
            && self.bus.upcall().is_none()
            && !self.bus.has_device_events();
        if is_quick {
            self.quick_entries += 1;
        }
        is_quick
    }

    /// Finishes a device access and goes on with the guest as if it had not been left. True if the
    /// guest has exited again; false if there is more to be done first, or now.
    fn resume(&mut self) -> bool {
        let Some(jit) = &mut self.jit else {
            return false;
        };
        let (cpu, bus) = (&mut *self.cpu, &mut self.bus);
        bus.mmu.recheck_exposed();
        let (len, value) = match bus.replay.sole() {
            Some(sole) if bus.replay.is_mid_instruction(linear_rip(cpu)) => sole,
            _ => return false,
        };
        if !self.interp.complete(cpu, bus, len, value) {
            return false;
        }
        let stop = jit.resume(&mut self.interp, cpu, bus);
        if !self.stopped(stop) || matches!(self.bus.exit, Some(Exit::MemoryFault { .. })) {
            return false;
        }
        self.note_exit();
        true
    }

    /// The VMM's answer becomes the result of the access that waits.
    fn take_answer(&mut self, answer: &Answer<'_>) {
        if let Answer::Debugger(status) = *answer {
            self.bus.set_debugger_status(status);
        }
        let Some(pending) = self.bus.replay.pending() else {
            return;
        };
        let (value, error) = match (pending, answer) {
            (DeviceAccess::PortInString { size, .. }, Answer::Io(bytes)) => {
                self.bus.read_ahead.fill(bytes, size);
                (0, false)
            }
            (DeviceAccess::PortIn { .. } | DeviceAccess::Load { .. }, Answer::Word(word)) => {
                (*word, false)
            }
            (
                DeviceAccess::MsrRead { .. } | DeviceAccess::MsrWrite { .. },
                Answer::Msr { data, error },
            ) => (*data, *error),
            (DeviceAccess::Hypercall { .. }, Answer::Hypercall(result)) => (*result, false),
            _ => (0, false),
        };
        self.bus.replay.answer(value, error);
    }

    /// Finishes the instruction that the previous exit interrupted, before
    /// anything else may happen to the guest. Leaves `bus.exit` set if it needs
    /// the VMM once more.
    fn complete_instruction(&mut self) -> Result<()> {
        let rip = linear_rip(&self.cpu);
        if self.bus.replay.is_mid_instruction(rip) {
            if let Some((len, value)) = self.bus.replay.sole()
                && !self.is_single_stepped()
                && self
                    .interp
                    .complete(&mut self.cpu, &mut self.bus, len, value)
            {
                return Ok(());
            }
            loop {
                let stop = self.interp.step(&mut self.cpu, &mut self.bus);
                if !self.stopped(stop) && self.is_single_stepped() && self.is_step_wanted() {
                    // The step ends with the instruction, not with its exit: the bus has it.
                    break;
                }
                let goes_on = self.bus.exit.is_none()
                    && self.bus.read_ahead.has_more()
                    && linear_rip(&self.cpu) == rip;
                if !goes_on {
                    break;
                }
            }
        }
        // An element on its way to a device stays for the rest of its instruction.
        if self.bus.exit.is_none() {
            self.bus.read_ahead.forget();
        }
        Ok(())
    }

    fn run_until_exit(&mut self, input: &RunInput<'_>, goes_on: bool) -> Result<()> {
        let mut is_quick =
            goes_on && input.blocked_signals.is_none() && self.quick_entries < ENTRIES_PER_LOOK;
        self.quick_entries = if is_quick { self.quick_entries + 1 } else { 0 };
        let mut is_answer = goes_on;
        loop {
            if self.bus.counters_are_due(&self.cpu) {
                self.bus.settle_counters(&mut self.cpu);
            }
            let mut requests = 0;
            if self.bus.shared.is_requested() {
                requests = self.bus.shared.take();
                self.serve(requests);
            }
            if input.immediate_exit.load(Ordering::Relaxed) != 0 || requests & request::KICK != 0 {
                return Err(Error::Interrupted);
            }
            if self.dirty_ring.as_ref().is_some_and(|ring| ring.is_full()) {
                return self.exit_with(Exit::DirtyRingFull);
            }
            if self.cpu.events.latched_init && !self.cpu.events.in_smm {
                self.init();
            }
            if std::mem::take(&mut self.cpu.events.triple_fault) {
                return self.exit_with(Exit::Shutdown);
            }
            self.bus.recheck = false;
            if std::mem::take(&mut self.bus.tpr_lowered) {
                return self.exit_with(Exit::SetTpr);
            }
            let told = self
                .bus
                .take_tpr_access()
                .or_else(|| self.bus.take_hyperv_exit());
            if let Some(exit) = told {
                return self.exit_with(exit);
            }
            if let Some(kind) = self.bus.system_event.take() {
                return self.exit_with(Exit::SystemEvent { kind });
            }
            if let Some(vector) = self.bus.take_user_eoi() {
                return self.exit_with(Exit::IoapicEoi { vector });
            }
            self.bus.sync_memory();
            self.bus.sync_code();
            self.bus.sync_lapic();
            if !std::mem::take(&mut is_quick) {
                let now_ns = self.bus.service_timers();
                self.bus.note_time(now_ns);
                self.show_stats_at(now_ns);
                self.check_signals(input, now_ns)?;
            }
            if self.inject() {
                return Ok(());
            }
            // With LINT0 masked no window opens, and waiting for RFLAGS.IF would never end.
            let wants_window = input.request_interrupt_window
                && !self.bus.vm.has_pic()
                && (!self.bus.has_lapic() || self.bus.shared.lapic().accepts_pic());
            if wants_window && self.accepts_injection() {
                return self.exit_with(Exit::IrqWindowOpen);
            }
            let is_halted = self.mp_state == KVM_MP_STATE_HALTED || self.sleeps_in_guest;
            if is_halted || self.bus.is_polling() {
                // A sleeping processor's counters of cycles stand still.
                self.bus.stop_cycles();
                let slept = self.sleep(input);
                self.bus.start_cycles(&mut self.cpu);
                slept?;
                continue;
            }
            if matches!(
                self.mp_state,
                KVM_MP_STATE_UNINITIALIZED | KVM_MP_STATE_INIT_RECEIVED
            ) {
                return Err(Error::Again);
            }
            self.has_run = true;
            self.bus.share_tpr();
            self.bus.irq_waiting = wants_window || self.bus.pending_interrupt().is_some();
            let single = self.is_single_stepped();
            let is_spinning = self.bus.is_spinning(std::mem::take(&mut is_answer));
            if is_spinning && !self.bus.vm.options.keeps(KVM_X86_DISABLE_EXITS_PAUSE) {
                self.bus.give_way(&mut self.cpu);
            }
            // The end of an interrupt shadow has to be seen if something waits for it.
            let stop = if single || self.cpu.shadow != Shadow::None {
                self.interp.step(&mut self.cpu, &mut self.bus)
            } else {
                self.execute(input)
            };
            if self.stopped(stop) || single && self.is_step_wanted() {
                return Ok(());
            }
        }
    }

    #[cold]
    fn exit_with(&mut self, exit: Exit) -> Result<()> {
        self.bus.exit = Some(exit);
        Ok(())
    }

    /// Executes until something stops it.
    fn execute(&mut self, input: &RunInput<'_>) -> RunStop {
        let run_limit = self.run_limit(input);
        match &mut self.jit {
            Some(jit) => {
                let stop = jit.run(&mut self.interp, &mut self.cpu, &mut self.bus, run_limit);
                if stop == RunStop::Exit
                    && let Some(report) = jit.take_difference()
                {
                    // The VMM sees an emulation failure; this is for whoever asked for lock-step.
                    (self.bus.vm.engine.messages.0)(&report);
                }
                stop
            }
            None => self.interp.run(&mut self.cpu, &mut self.bus),
        }
    }

    /// Until a timer is due there is nothing for the run loop to look at but what is a request. (A
    /// dirty ring fills up by itself.)
    fn run_limit<'a>(&mut self, input: &RunInput<'a>) -> Option<RunLimit<'a>> {
        if self.dirty_ring.is_some() {
            return None;
        }
        let (looked_ns, looked_tsc) = self.bus.looked;
        let ns = self.bus.next_timer_ns().saturating_sub(looked_ns);
        let ns = ns.min(RUN_LIMIT_NS);
        self.bus.unseen_until_ns = looked_ns + ns;
        let until_tsc = looked_tsc + ns * u64::from(host::cpu::tsc_khz()) / 1_000_000;
        let due_tsc = self.bus.pmu.due_tsc;
        Some(RunLimit {
            until_tsc: until_tsc.min(due_tsc),
            overflow_tsc: (due_tsc != NEVER).then_some(due_tsc),
            stop: input.immediate_exit,
        })
    }

    /// KVM_GUESTDBG_SINGLESTEP.
    fn is_single_stepped(&self) -> bool {
        self.bus.guest_debug & KVM_GUESTDBG_SINGLESTEP != 0
    }

    /// True if the VMM gets the end of a single step; the bus has the exit then.
    fn is_step_wanted(&mut self) -> bool {
        self.cpu.fault_dr6 = dr::DR6_BS;
        self.bus.intercept(&mut self.cpu, Exception::DB)
    }

    /// Queued NMIs become pending: one while NMIs are masked, two else.
    pub(super) fn take_nmis(&mut self) {
        let events = &mut self.cpu.events;
        let limit = if events.nmi_masked { 1 } else { 2 };
        let queued = self.bus.shared.take_nmis().min(limit);
        if queued != 0 {
            let pending = u32::from(events.nmi_pending) + queued;
            events.nmi_pending = pending.min(limit) as u8;
        }
    }

    /// Serves what other threads asked for.
    pub(super) fn serve(&mut self, requests: u32) {
        // `request::MEMORY` only wakes: the run loop looks at the epoch each time.
        if requests & request::EVENT != 0 {
            self.bus.is_quiet = false;
            self.bus.tell_untold_events();
        }
        if requests & request::FLUSH != 0 {
            self.bus.serve_flushes(&mut self.cpu);
        }
        if requests & request::CLOCK != 0 {
            self.bus.update_clock();
        }
        if requests & request::FILTER != 0 {
            self.bus.follow_filter(&mut self.cpu);
        }
        if requests & request::MMU_PAGES != 0 {
            self.bus.follow_mmu_pages(&self.cpu);
        }
        if requests & request::NMI != 0 {
            self.take_nmis();
        }
        if requests & request::SMI != 0 {
            self.cpu.events.smi_pending = true;
        }
        if requests & request::INIT != 0 {
            if self.cpu.events.in_smm {
                self.cpu.events.latched_init = true;
            } else {
                self.init();
            }
        }
        if requests & request::SIPI != 0 {
            self.startup(self.bus.shared.sipi_page());
        }
        if requests & request::UNHALT != 0 {
            if self.sleeps_in_guest {
                self.sleeps_in_guest = false;
            } else if self.mp_state == KVM_MP_STATE_HALTED {
                self.mp_state = KVM_MP_STATE_RUNNABLE;
            } else {
                self.pv_unhalted = true;
            }
        }
    }

    /// What the interpreter's stop means to the VMM: true if it is an exit, which the bus has
    /// then; else the vCPU goes on.
    #[inline]
    pub(super) fn stopped(&mut self, stop: RunStop) -> bool {
        match stop {
            RunStop::Poll => false,
            RunStop::Exit if self.bus.exit.is_some() => true,
            _ => self.stopped_otherwise(stop),
        }
    }

    #[cold]
    fn stopped_otherwise(&mut self, stop: RunStop) -> bool {
        let exit = match stop {
            RunStop::Poll => None,
            RunStop::Exit => Some(Exit::InternalError {
                suberror: kvm_bindings::KVM_INTERNAL_ERROR_EMULATION,
                data: vec![self.cpu.rip()],
            }),
            // Without an in-kernel LAPIC the VMM waits for interrupts.
            // KVM_X86_DISABLE_EXITS_HLT: the CPU sleeps, and to the VMM it runs.
            RunStop::Halt if self.bus.vm.options.keeps(KVM_X86_DISABLE_EXITS_HLT) => {
                self.sleeps_in_guest = true;
                None
            }
            RunStop::Halt if !self.bus.has_lapic() => Some(Exit::Hlt),
            RunStop::Halt if std::mem::take(&mut self.pv_unhalted) => None,
            RunStop::Halt => {
                self.bus.counters.halt_exits += 1;
                self.mp_state = KVM_MP_STATE_HALTED;
                None
            }
            RunStop::TripleFault => Some(Exit::Shutdown),
        };
        let is_exit = exit.is_some();
        if is_exit {
            self.bus.exit = exit;
        }
        is_exit
    }

    /// What kvm_run shows after every KVM_RUN.
    pub(super) fn status(&mut self) -> RunStatus {
        let lapic = self.bus.lapic_view();
        RunStatus {
            // Nobody injects where the PIC is in here; KVM says yes all the same.
            ready_for_interrupt_injection: self.bus.vm.has_pic() || self.accepts_injection(),
            if_flag: self.cpu.rflags & rflags::IF != 0,
            cr8: lapic.cr8,
            apic_base: lapic.apic_base,
            in_smm: self.cpu.events.in_smm,
        }
    }

    /// KVM_INTERRUPT would be taken now.
    fn accepts_injection(&self) -> bool {
        self.is_interruptible()
            && !self.cpu.events.nmi_injected
            && (!self.bus.has_lapic() || self.bus.shared.lapic().accepts_pic())
    }
}
