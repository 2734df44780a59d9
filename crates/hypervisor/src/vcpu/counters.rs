//! How a vCPU uses its performance counters: registers, interrupts, and what the engines are told.

use irqchip::lapic::LocalSource;
use pmu::{Config, Refused, Tally, Vendor, Wants};
use x86_cpu::{CpuState, Exception, Fault, Retired};
use x86_defs::{msr::*, retired::INSTRUCTIONS};

use super::{
    bus::Bus,
    pmu::{NEVER, VirtualPmu},
};
use crate::limits::PERF_CAPABILITIES;

/// IA32_DEBUGCTL.FREEZE_WHILE_SMM. It works for guests with Intel's counters, and Linux sets it. As in KVM,
/// IA32_PERF_CAPABILITIES does not show it.
const FREEZE_WHILE_SMM: u64 = 1 << 14;
/// IA32_PERF_CAPABILITIES.FW_WRITE.
const FULL_WIDTH: u64 = 1 << 13;
/// Fewer than this many instructions are interpreted before a counter of cycles interrupts.
const LANDING: u64 = 1 << 8;
/// True for the registers of either vendor's counters. A VMM saves them whether or not the guest has any.
fn is_counter(index: u32) -> bool {
    [
        (IA32_PMC0, 8),
        (IA32_PERFEVTSEL0, 8),
        (IA32_FIXED_CTR0, 3),
        (IA32_FIXED_CTR_CTRL, 4),
        (K7_EVNTSEL0, 8),
        (AMD64_PERFEVTSEL0_CORE, 12),
        (AMD64_PERF_CNTR_GLOBAL_STATUS, 4),
    ]
    .iter()
    .any(|(first, n)| index.wrapping_sub(*first) < *n)
}
/// True for the registers by which general counters are written in full width, which no VMM saves.
fn is_in_full_width(index: u32) -> bool {
    index.wrapping_sub(IA32_A_PMC0) < 8
}

impl Bus {
    /// Reconfigures the counters after KVM_SET_CPUID2 or a write of IA32_PERF_CAPABILITIES.
    pub(super) fn configure_counters(&mut self, cpu: &mut CpuState) {
        let config = if self.vm.options.has_counters() {
            super::cpuid::pmu_config(&self.cpuid, &cpu.features)
        } else {
            Config::default()
        };
        let config = Config {
            full_width: self.perf_capabilities() & FULL_WIDTH != 0,
            ..config
        };
        self.pmu.state.set_config(config);
        self.follow_filter(cpu);
        self.counters_changed(cpu, &Tally::default(), 0);
    }
    /// Returns IA32_PERF_CAPABILITIES as far as CPUID shows it.
    fn perf_capabilities(&self) -> u64 {
        if super::cpuid::shows_perf_capabilities(&self.cpuid) {
            self.pmu.capabilities
        } else {
            0
        }
    }
    /// True if IA32_DEBUGCTL.FREEZE_WHILE_SMM can be set.
    fn can_freeze_in_smm(&self) -> bool {
        self.pmu.state.config().vendor == Vendor::Intel
    }
    /// Applies the VM's present event filter.
    pub(super) fn follow_filter(&mut self, cpu: &mut CpuState) {
        let (filter, generation) = self.vm.options.event_filter();
        if generation != self.pmu.filter_generation {
            let c = &mut self.pmu;
            c.filter_generation = generation;
            let now = c.tally(&cpu.retired);
            c.state.set_filter(filter, &now);
            self.counters_changed(cpu, &now, 0);
        }
    }

    /// Reads a counter's register for RDMSR or KVM_GET_MSRS; `None` if the MSR is not one of them.
    pub(super) fn counter_msr(
        &mut self,
        cpu: &mut CpuState,
        index: u32,
        host: bool,
    ) -> Option<Option<u64>> {
        if index == IA32_PERF_CAPABILITIES {
            let shown = super::cpuid::shows_perf_capabilities(&self.cpuid);
            return Some((host || shown).then(|| self.perf_capabilities()));
        }
        if !is_counter(index) && !is_in_full_width(index) {
            return None;
        }
        let now = self.pmu.tally(&cpu.retired);
        match self.pmu.state.read(index, host, &now) {
            Some(value) => {
                self.counters_changed(cpu, &now, 0);
                Some(value.ok())
            }
            // A VMM can read every register that it saves.
            None => host.then_some(Some(0)),
        }
    }
    /// Writes a counter's register for WRMSR or KVM_SET_MSRS; `None` if the MSR is not one of them.
    pub(super) fn set_counter_msr(
        &mut self,
        cpu: &mut CpuState,
        index: u32,
        value: u64,
        host: bool,
    ) -> Option<bool> {
        if index == IA32_PERF_CAPABILITIES {
            let shown = super::cpuid::shows_perf_capabilities(&self.cpuid);
            let possible = if shown { PERF_CAPABILITIES } else { 0 };
            let good = host && value & !possible == 0;
            if good && shown && value != self.pmu.capabilities {
                self.pmu.capabilities = value;
                self.configure_counters(cpu);
            }
            return Some(good);
        }
        if index == IA32_DEBUGCTL && self.can_freeze_in_smm() {
            // LBR and BTF are accepted, as without counters.
            let good = value & !(FREEZE_WHILE_SMM | 3) == 0;
            if good {
                cpu.msr.debugctl = value & FREEZE_WHILE_SMM;
                let (now, own) = self.tally_at_write(cpu, host);
                let state = &mut self.pmu.state;
                state.set_in_smm(cpu.events.in_smm, &now);
                state.set_freezes_in_smm(cpu.msr.debugctl != 0, &now);
                self.counters_changed(cpu, &now, own);
            }
            return Some(good);
        }
        if !is_counter(index) && !is_in_full_width(index) {
            return None;
        }
        let (now, own) = self.tally_at_write(cpu, host);
        let state = &mut self.pmu.state;
        match state.write(index, value, host, &now) {
            Some(done) => {
                self.counters_changed(cpu, &now, own);
                Some(done.is_ok())
            }
            // A VMM can restore every register that it saves.
            None => (host && value == 0).then_some(true),
        }
    }
    /// Returns the tally as it will be when the writing instruction has retired, and by how many instructions it is
    /// ahead of the present tally.
    fn tally_at_write(&mut self, cpu: &CpuState, host: bool) -> (Tally, u64) {
        let mut now = self.pmu.tally(&cpu.retired);
        let own = u64::from(!host && cpu.retired.counts_at(cpu.cpl));
        now.0[Retired::level(cpu.cpl)][INSTRUCTIONS] += own;
        (now, own)
    }
    /// RDPMC.
    pub(super) fn counter(&mut self, cpu: &CpuState, index: u32) -> Result<u64, Fault> {
        let now = self.pmu.tally(&cpu.retired);
        let value = self.pmu.state.rdpmc(index, &now);
        value.map_err(|Refused| Exception::GP0.into())
    }

    /// Has the engines tally what the counters want from now on, and sends an interrupt that is due. The tally `now` is
    /// ahead of the present by `own` instructions.
    fn counters_changed(&mut self, cpu: &mut CpuState, now: &Tally, own: u64) {
        let interrupts = self.pmu.state.take_interrupt();
        if interrupts {
            self.deliver_local(LocalSource::Pmc);
        }
        let c = &mut self.pmu;
        let due_before = c.due_tsc;
        let Wants {
            levels,
            streams,
            events_left: mut left,
            has_cycles,
            splits_cycles,
            cycles_left,
        } = c.state.wants(now);
        c.levels = levels;
        cpu.retired.levels = levels;
        cpu.retired.streams = streams;
        let instructions = &mut left[INSTRUCTIONS];
        *instructions = instructions.saturating_add(own);
        if !c.has_cycles && has_cycles {
            c.since = c.since.map(|_| host::cpu::rdtsc());
            c.level = Retired::level(cpu.cpl);
        }
        c.has_cycles = has_cycles;
        c.splits_cycles = splits_cycles;
        c.due_tsc = match (cycles_left, c.since) {
            (Some(cycles), Some(since)) if c.landing.is_none() => since.saturating_add(cycles),
            _ => NEVER,
        };
        if let Some(end) = c.landing {
            cpu.retired.levels = 3;
            let landing = end.saturating_sub(VirtualPmu::instructions(&cpu.retired));
            *instructions = (*instructions).min(landing);
        }
        cpu.retired.bound(&left);
        // Engines read levels, streams and the number of events left whenever an instruction was interpreted. They are
        // told of a point in time only when they are entered.
        self.recheck |= interrupts || c.due_tsc < due_before || c.landing.is_some();
    }

    /// True if a counter may have overflowed, or if SMM may have begun or ended.
    #[inline]
    pub(super) fn counters_are_due(&self, cpu: &CpuState) -> bool {
        let c = &self.pmu;
        cpu.retired.is_due()
            || c.due_tsc != NEVER && c.due_tsc <= host::cpu::rdtsc()
            || c.state.is_behind_smm(cpu.events.in_smm)
    }
    /// Settles counters that have overflowed, and notes the begin and end of SMM.
    #[cold]
    pub(super) fn settle_counters(&mut self, cpu: &mut CpuState) {
        let c = &mut self.pmu;
        let now = c.tally(&cpu.retired);
        let total = VirtualPmu::instructions(&cpu.retired);
        let is_time = c.due_tsc != NEVER && c.since.is_some_and(|since| since >= c.due_tsc);
        match c.landing {
            Some(end) if total >= end => c.landing = None,
            None if is_time => {
                c.random = c
                    .random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                c.landing = Some(total + (c.random >> 33) % LANDING);
            }
            _ => {}
        }
        if c.landing.is_none_or(|end| end <= total) {
            c.landing = None;
            c.state.settle(&now);
        }
        c.state.set_in_smm(cpu.events.in_smm, &now);
        self.counters_changed(cpu, &now, 0);
    }

    /// Starts counting cycles: the guest begins to run, or goes on.
    #[inline]
    pub(super) fn start_cycles(&mut self, cpu: &mut CpuState) {
        let c = &mut self.pmu;
        if !c.has_cycles {
            c.since = Some(0);
            return;
        }
        c.since = Some(host::cpu::rdtsc());
        c.level = Retired::level(cpu.cpl);
        self.set_due(cpu);
    }
    /// Stops counting cycles: the guest does not run any more.
    #[inline]
    pub(super) fn stop_cycles(&mut self) {
        let c = &mut self.pmu;
        if c.has_cycles {
            c.count_cycles();
        }
        c.since = None;
        c.due_tsc = NEVER;
    }
    #[cold]
    fn set_due(&mut self, cpu: &CpuState) {
        let c = &mut self.pmu;
        if c.landing.is_none() {
            let now = c.tally(&cpu.retired);
            let left = c.state.wants(&now).cycles_left;
            let since = c.since.unwrap_or(NEVER);
            c.due_tsc = left.map_or(NEVER, |left| since.saturating_add(left));
        }
    }
    /// Selects the view after privilege may have changed or SMM may have ended.
    #[inline]
    pub(super) fn follow_privilege(&mut self, cpu: &mut CpuState) {
        let c = &mut self.pmu;
        if c.splits_cycles {
            c.count_cycles();
            c.level = Retired::level(cpu.cpl);
        }
        if c.state.is_behind_smm(cpu.events.in_smm) {
            let now = c.tally(&cpu.retired);
            c.state.set_in_smm(cpu.events.in_smm, &now);
            self.counters_changed(cpu, &now, 0);
        }
        self.mmu.select_view(cpu);
    }
}
