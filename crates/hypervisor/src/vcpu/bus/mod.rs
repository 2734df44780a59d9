//! [`Bus`]: the `GuestBus` of a vCPU under KVM semantics.
//!
//! Memory accesses go to the MMU. An access to a port, or to an address without a memslot, goes to the doorbell or chip
//! that has it; if none has, it is an exit to the VMM, through [`Replay`].

pub(super) mod apic;
pub(super) mod debug;
mod device;
mod hypercall;
pub(super) mod hyperv;
mod misses;
mod pv_eoi;
mod pvclock;
mod roots;
pub(super) mod stats;
mod steal;
mod vapic;
pub(super) mod xen;

use std::sync::{
    Arc,
    atomic::{Ordering, fence},
};

use io_bus::Space;
use kvm_bindings::{
    KVM_X86_DISABLE_EXITS_HLT, KVM_X86_QUIRK_FIX_HYPERCALL_INSN,
    KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT, KVM_X86_QUIRK_MWAIT_NEVER_UD_FAULTS, kvm_cpuid_entry2,
};
use mmu::{Front, Miss, Mmu, Ram};
use x86_cpu::{
    Access, CodePage, CpuState, Exception, Fault, Flush, GuestBus, HypercallForm, Privilege, Word,
};
use x86_defs::rflags;

use self::{
    device::{is_in_page, mask},
    pvclock::Paravirt,
};
use super::{
    read_ahead::ReadAhead,
    replay::{DeviceAccess, Replay},
};
use crate::{
    Exit, IoData,
    shared::VcpuShared,
    vm::{VmState, clock::TscParams, options::KnownMsrFilter},
};

/// A hypercall's result: -EINVAL.
const EINVAL: u64 = 22u64.wrapping_neg();
/// A hypercall's result: -EFAULT.
const EFAULT: u64 = 14u64.wrapping_neg();
/// Blocks between two reads of the clock and of immediate_exit.
const POLL_BLOCKS: u32 = 128;

/// The connection of a vCPU to memory, devices and the VMM.
#[derive(Debug)]
pub(crate) struct Bus {
    pub(super) mmu: Mmu,
    pub(super) vm: Arc<VmState>,
    pub(super) shared: Arc<VcpuShared>,
    pub(super) replay: Replay,
    pub(super) read_ahead: ReadAhead,
    /// The exit that [`Fault::Exit`] announces.
    pub(super) exit: Option<Exit>,
    pub(super) cpuid: Vec<kvm_cpuid_entry2>,
    pub(super) msr_filter: KnownMsrFilter,
    pub(super) tsc: TscParams,
    /// IA32_TSC_ADJUST.
    pub(super) tsc_adjust: u64,
    /// Task priority of a vCPU without an in-kernel LAPIC.
    pub(super) cr8: u8,
    /// The guest lowered the task priority: KVM_EXIT_SET_TPR.
    pub(super) tpr_lowered: bool,
    pub(super) apic_base: u64,
    /// Vector of KVM_INTERRUPT with a split irqchip: it waits for LINT0 and RFLAGS.IF.
    pub(super) user_extint: Option<u8>,
    /// Bit per vector whose EOI the VMM's IOAPIC must be told of (KVM_EXIT_IOAPIC_EOI).
    pub(super) user_eois: [u64; 4],
    /// An interrupt waits for RFLAGS.IF, or the VMM asked for the window.
    pub(super) irq_waiting: bool,
    /// KVM_CAP_ENFORCE_PV_FEATURE_CPUID: only paravirtual features that CPUID promises work.
    pub(super) enforces_pv: bool,
    /// KVM_GUESTDBG_* of KVM_SET_GUEST_DEBUG.
    pub(super) guest_debug: u32,
    pub(super) pv: Paravirt,
    /// The host's figure of the thread's run-queue delay, for steal time.
    pub(super) run_delay: Arc<host::RunDelay>,
    pub(super) hv: hyperv::HyperV,
    /// KVM_SYSTEM_EVENT_* that the guest has asked for, which will be the next exit.
    pub(super) system_event: Option<u32>,
    pub(super) xen: xen::XenVcpu,
    pub(super) mce: super::mce::Mce,
    pub(super) vapic: vapic::Vapic,
    pub(super) pmu: super::pmu::VirtualPmu,
    /// Pending interrupts must be evaluated before the next block.
    pub(super) recheck: bool,
    /// [`Bus::lapic_view`], unless the LAPIC's registers were written since it was read.
    pub(super) lapic: Option<apic::LapicView>,
    /// No interrupt was pending at the last evaluation, and nothing has happened since.
    pub(super) is_quiet: bool,
    /// When the LAPIC's timer is due, on the monotonic clock.
    pub(super) timer_ns: u64,
    /// The last reading of the clocks: monotonic time, and the host's TSC.
    pub(super) looked: (u64, u64),
    /// Until when, on the monotonic clock, the clock may not be read again.
    pub(super) unseen_until_ns: u64,
    budget: u32,
    /// PAUSEs since spinning was last checked for ([`Bus::is_spinning`]).
    pub(super) pauses: u32,
    /// How many times the vCPU has given way since the guest began to wait.
    pub(super) ways_given: u8,
    /// Generator for RDRAND and RDSEED.
    random: Option<host::random::Generator>,
    pub(super) counters: stats::Counters,
    /// The translator's statistics as of the last return from it.
    pub(super) jit: x86_jit::Stats,
    /// The value of [`VmState::device_events`] at which code was last compared.
    seen_device_events: u64,
}

impl Bus {
    pub(super) fn new(vm: Arc<VmState>, shared: Arc<VcpuShared>, mmu: Mmu) -> Self {
        Self {
            mmu,
            tsc: vm.clock.default_tsc(),
            run_delay: vm.service_thread.run_delay(),
            apic_base: 0xfee0_0000 | 1 << 11 | u64::from(shared.is_bsp) << 8,
            vm,
            xen: xen::XenVcpu::new(shared.index),
            shared,
            random: host::random::Generator::new().ok(),
            replay: Replay::default(),
            read_ahead: ReadAhead::default(),
            exit: None,
            cpuid: Vec::new(),
            msr_filter: KnownMsrFilter::default(),
            tsc_adjust: 0,
            cr8: 0,
            tpr_lowered: false,
            user_extint: None,
            user_eois: [0; 4],
            irq_waiting: false,
            enforces_pv: false,
            guest_debug: 0,
            pv: Paravirt::default(),
            hv: hyperv::HyperV::default(),
            system_event: None,
            mce: super::mce::Mce::default(),
            vapic: vapic::Vapic::default(),
            pmu: super::pmu::VirtualPmu::default(),
            recheck: false,
            lapic: None,
            is_quiet: false,
            timer_ns: apic::NEVER,
            looked: (0, 0),
            unseen_until_ns: 0,
            budget: POLL_BLOCKS,
            pauses: 0,
            ways_given: 0,
            counters: stats::Counters::default(),
            jit: x86_jit::Stats::default(),
            seen_device_events: 0,
        }
    }

    /// The state that the guest's CPUID depends on, besides the CPU's.
    pub(super) fn cpuid_follows(&mut self) -> super::cpuid::Follows {
        super::cpuid::Follows {
            apic_enabled: self.apic_base() >> 11 & 1 != 0,
            misc_enable: !self
                .vm
                .options
                .has_quirk(KVM_X86_QUIRK_MISC_ENABLE_NO_MWAIT),
            keeps_hlt: self.vm.options.keeps(KVM_X86_DISABLE_EXITS_HLT),
        }
    }

    /// True if CPUID promises MONITOR and MWAIT.
    fn shows_monitor(&mut self, cpu: &CpuState) -> bool {
        let follows = self.cpuid_follows();
        super::cpuid::lookup(&self.cpuid, cpu, follows, 1, 0)[2] >> 3 & 1 != 0
    }

    /// Has fetched code compared if a device of the VMM's has interrupted since the last call: the device may have
    /// written code.
    pub(super) fn sync_code(&mut self) {
        let events = self.vm.device_events.load(Ordering::Acquire);
        if events != self.seen_device_events {
            self.seen_device_events = events;
            self.mmu.recheck_exposed();
        }
    }

    /// True if [`Self::sync_code`] has something to do.
    pub(super) fn has_device_events(&self) -> bool {
        self.vm.device_events.load(Ordering::Acquire) != self.seen_device_events
    }
}

/// Returns the processor's own hypercall instruction.
fn hypercall_instruction(cpu: &CpuState) -> [u8; 3] {
    const VMCALL: [u8; 3] = [0x0f, 0x01, 0xc1];
    const VMMCALL: [u8; 3] = [0x0f, 0x01, 0xd9];
    if cpu.features.has(x86_cpu::Feature::Amd) {
        VMMCALL
    } else {
        VMCALL
    }
}

impl GuestBus for Bus {
    #[inline(always)]
    fn read<T: Word>(&mut self, cpu: &mut CpuState, gva: u64, who: Privilege) -> Result<T, Fault> {
        match self.mmu.read_hit(gva, who) {
            Some(v) => Ok(v),
            None => self.read_miss(cpu, gva, who),
        }
    }
    #[inline(always)]
    fn write<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        value: T,
        who: Privilege,
    ) -> Result<(), Fault> {
        if self.mmu.write_hit(gva, value, who) {
            return Ok(());
        }
        self.write_miss(cpu, gva, value, who)
    }
    #[inline]
    fn read_device(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        size: u8,
        who: Privilege,
    ) -> Option<Result<u64, Fault>> {
        let gpa = self.mmu.known_device(gva, false, who)?;
        if !is_in_page(gva, size.into()) || !self.replay.is_empty() {
            return None;
        }
        // The load is all that the instruction does, so a replay log would be dropped at once.
        Some(match self.chip_load(cpu, gpa, size) {
            Some(value) => Ok(value & mask(size)),
            None => self.ask_load(cpu, gpa, size),
        })
    }
    #[inline]
    fn write_device(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        size: u8,
        value: u64,
        who: Privilege,
    ) -> Option<Result<(), Fault>> {
        let gpa = self.mmu.known_device(gva, true, who)?;
        if !is_in_page(gva, size.into()) || !self.replay.is_empty() {
            return None;
        }
        let is_done =
            self.ring(Space::Mmio, gpa, size, value) || self.chip_store(cpu, gpa, size, value);
        Some(if is_done {
            Ok(())
        } else {
            self.ask_store(cpu, gpa, size, value)
        })
    }
    #[inline]
    fn rmw<T: Word>(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        who: Privilege,
        lock: bool,
        mut f: impl FnMut(T) -> T,
    ) -> Result<T, Fault> {
        match self.mmu.rmw(cpu, gva, who, lock, &mut f) {
            Ok(old) => Ok(old),
            Err(Miss::Exception(e)) => Err(e.into()),
            Err(Miss::Host { gpa }) => self.host_fault(gpa),
            // A device sees a read and a write, as on a bus without atomics.
            Err(Miss::Device { .. }) => {
                let mut bytes = [0; 16];
                self.load_pieces(cpu, gva, &mut bytes[..T::SIZE], who)?;
                let old = T::from_le(&bytes[..T::SIZE]);
                self.store_pieces(cpu, gva, &f(old).to_le()[..T::SIZE], who)?;
                Ok(old)
            }
        }
    }
    fn read_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &mut [u8],
        who: Privilege,
    ) -> Result<(), Fault> {
        match self.mmu.read_bytes(cpu, gva, buf, who) {
            Ok(()) => Ok(()),
            Err(Miss::Exception(e)) => Err(e.into()),
            Err(Miss::Host { gpa }) => self.host_fault(gpa),
            Err(Miss::Device { .. }) => self.load_pieces(cpu, gva, buf, who),
        }
    }
    fn write_bytes(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        buf: &[u8],
        who: Privilege,
    ) -> Result<(), Fault> {
        match self.mmu.write_bytes(cpu, gva, buf, who) {
            Ok(()) => Ok(()),
            Err(Miss::Exception(e)) => Err(e.into()),
            Err(Miss::Host { gpa }) => self.host_fault(gpa),
            Err(Miss::Device { .. }) => self.store_pieces(cpu, gva, buf, who),
        }
    }
    fn probe(
        &mut self,
        cpu: &mut CpuState,
        gva: u64,
        len: u64,
        access: Access,
        who: Privilege,
    ) -> Result<(), Fault> {
        match self.mmu.probe(cpu, gva, len, access, who) {
            Ok(()) | Err(Miss::Device { .. }) => Ok(()),
            Err(Miss::Exception(e)) => Err(e.into()),
            Err(Miss::Host { gpa }) => self.host_fault(gpa),
        }
    }
    fn bulk_copy(&mut self, cpu: &mut CpuState, dst: u64, src: u64, len: u64, unit: u64) -> u64 {
        self.mmu.bulk_copy(cpu, dst, src, len, unit)
    }
    fn bulk_copy_down(
        &mut self,
        cpu: &mut CpuState,
        dst: u64,
        src: u64,
        len: u64,
        unit: u64,
    ) -> u64 {
        self.mmu.bulk_copy_down(cpu, dst, src, len, unit)
    }
    fn bulk_fill(&mut self, cpu: &mut CpuState, dst: u64, value: u64, len: u64, unit: u64) -> u64 {
        self.mmu.bulk_fill(cpu, dst, value, len, unit)
    }
    fn bulk_read(&mut self, cpu: &mut CpuState, src: u64, buf: &mut [u8]) -> usize {
        self.mmu.bulk_read(cpu, src, buf)
    }
    fn code_page(&mut self, cpu: &mut CpuState, gva: u64) -> Result<CodePage, Fault> {
        let r = self.mmu.code_page(cpu, gva);
        self.fetch_result(cpu, r)
    }
    fn code_bytes(&mut self, cpu: &mut CpuState, gva: u64, buf: &mut [u8]) -> Result<usize, Fault> {
        let r = self.mmu.code_bytes(cpu, gva, buf);
        self.fetch_result(cpu, r)
    }
    fn peek_code(&mut self, cpu: &mut CpuState, gva: u64, buf: &mut [u8]) -> Result<usize, Fault> {
        let r = self.mmu.peek_code(cpu, gva, buf);
        self.fetch_result(cpu, r)
    }
    fn code_generation(&mut self, id: u64) -> u32 {
        self.mmu.code_generation(id)
    }
    #[inline(always)]
    fn code_changes(&self) -> u64 {
        self.mmu.code_changes()
    }
    #[inline(always)]
    fn fetch_epoch(&self) -> u64 {
        self.mmu.fetch_epoch()
    }
    fn load_root(&mut self, cpu: &mut CpuState) -> Result<(), Fault> {
        Ok(self.mmu.load_root(cpu)?)
    }
    fn load_cr3(&mut self, cpu: &mut CpuState, flushes: bool) -> Result<(), Fault> {
        Ok(self.mmu.load_cr3(cpu, flushes)?)
    }
    fn keeps_roots(&self) -> bool {
        self.mmu.has_promise()
    }
    fn select_view(&mut self, cpu: &mut CpuState) {
        self.follow_privilege(cpu);
    }
    fn flush(&mut self, cpu: &mut CpuState, what: Flush) {
        self.mmu.flush(cpu, what);
    }
    fn port_in(&mut self, cpu: &mut CpuState, port: u16, size: u8) -> Result<u32, Fault> {
        let access = DeviceAccess::PortIn { port, size };
        if self.replay.is_new(access)
            && let Some(value) = self.chip_in(port, size)
        {
            self.replay.made(access, value.into());
            return Ok(value);
        }
        let exit = || Exit::Io {
            is_in: true,
            port,
            size,
            count: 1,
            data: IoData::default(),
        };
        Ok((self.ask(cpu, access, exit)?.value & mask(size)) as u32)
    }
    fn port_in_repeated(
        &mut self,
        cpu: &mut CpuState,
        port: u16,
        size: u8,
        count: u32,
    ) -> Result<u32, Fault> {
        if let Some(value) = self.read_ahead.next(size) {
            return Ok(value);
        }
        if count == 1 {
            return self.port_in(cpu, port, size);
        }
        let access = DeviceAccess::PortInString { port, size };
        if self.replay.is_new(access)
            && let Some(value) = self.chip_in(port, size)
        {
            self.replay.made(access, value.into());
            return Ok(value);
        }
        let exit = || Exit::Io {
            is_in: true,
            port,
            size,
            count,
            data: IoData::default(),
        };
        self.ask(cpu, access, exit)?;
        // The elements came with the VMM's answer. If the VMM gave none, zeros are stored.
        Ok(self.read_ahead.next(size).unwrap_or(0))
    }
    fn port_out(
        &mut self,
        cpu: &mut CpuState,
        port: u16,
        size: u8,
        value: u32,
    ) -> Result<(), Fault> {
        let access = DeviceAccess::PortOut { port, size };
        if self.replay.is_new(access)
            && (self.chip_out(port, size, value)
                || self.ring(Space::Pio, port.into(), size, value.into()))
        {
            self.replay.made(access, 0);
            return Ok(());
        }
        let exit = || Exit::Io {
            is_in: false,
            port,
            size,
            count: 1,
            data: IoData::new(value, size),
        };
        self.ask(cpu, access, exit)?;
        Ok(())
    }
    fn read_msr(&mut self, cpu: &mut CpuState, index: u32) -> Result<u64, Fault> {
        self.guest_read_msr(cpu, index)
    }
    fn write_msr(&mut self, cpu: &mut CpuState, index: u32, value: u64) -> Result<(), Fault> {
        self.guest_write_msr(cpu, index, value)
    }
    fn cpuid(&mut self, cpu: &mut CpuState, leaf: u32, subleaf: u32) -> [u32; 4] {
        // A serializing instruction is a barrier, and makes code written by others visible (SDM vol. 3, 9.1.3, 9.3).
        fence(Ordering::SeqCst);
        self.mmu.serialize();
        let follows = self.cpuid_follows();
        let mut registers = super::cpuid::lookup(&self.cpuid, cpu, follows, leaf, subleaf);
        if leaf == 0x8000_0007 && self.hides_invariant_tsc() {
            registers[3] &= !(1 << 8);
        }
        registers
    }
    fn tsc(&mut self, _cpu: &mut CpuState) -> u64 {
        self.tsc.guest(host::cpu::rdtsc())
    }
    fn read_pmc(&mut self, cpu: &mut CpuState, index: u32) -> Result<u64, Fault> {
        self.counter(cpu, index)
    }
    fn task_priority(&mut self, _cpu: &mut CpuState) -> u8 {
        self.current_cr8()
    }
    fn set_task_priority(&mut self, _cpu: &mut CpuState, priority: u8) {
        if self.has_lapic() {
            self.sync_lapic();
            self.shared.lapic().set_cr8(priority);
            self.task_priority_changed();
        } else {
            let priority = priority & 0xf;
            // The VMM's LAPIC may have an interrupt that waited for a lower priority.
            self.tpr_lowered |= priority < self.cr8;
            self.recheck |= self.tpr_lowered;
            self.cr8 = priority;
        }
    }
    fn has_monitor(&mut self, cpu: &CpuState) -> bool {
        self.vm
            .options
            .has_quirk(KVM_X86_QUIRK_MWAIT_NEVER_UD_FAULTS)
            || self.shows_monitor(cpu)
    }
    fn hypercall_form(&mut self, is_vmcall: bool) -> HypercallForm {
        if is_vmcall != crate::system::is_amd() {
            HypercallForm::Native
        } else if self.vm.options.has_quirk(KVM_X86_QUIRK_FIX_HYPERCALL_INSN) {
            HypercallForm::Replaced
        } else {
            HypercallForm::Undefined
        }
    }
    fn hypercall(&mut self, cpu: &mut CpuState) -> Result<(), Fault> {
        hypercall::execute(self, cpu)
    }
    fn random(&mut self) -> u64 {
        // There is a generator on every host that has finished booting.
        match &mut self.random {
            Some(generator) => generator.next_u64(),
            None => host::cpu::rdtsc(),
        }
    }
    fn delivery_stopped(&mut self, cpu: &CpuState) {
        self.stop_delivery(cpu);
    }
    fn intercept(&mut self, cpu: &mut CpuState, exception: Exception) -> bool {
        debug::intercept(self, cpu, exception)
    }
    fn nmi_unmasked(&mut self) {
        // A second NMI may wait.
        self.recheck = true;
    }
    #[inline]
    fn pause(&mut self) {
        self.pauses = self.pauses.saturating_add(1);
    }
    #[inline]
    fn commit(&mut self) {
        self.replay.forget();
        self.read_ahead.commit();
    }
    #[inline(always)]
    fn is_event_due(&self) -> bool {
        self.recheck
    }
    #[inline]
    fn poll(&mut self, cpu: &CpuState) -> bool {
        if x86_jit::JitBus::must_return(self, cpu) {
            return true;
        }
        self.budget -= 1;
        if self.budget == 0 {
            self.budget = POLL_BLOCKS;
            return true;
        }
        false
    }
}

impl x86_jit::JitBus for Bus {
    fn mmu(&mut self) -> Front<'_> {
        self.mmu.front()
    }
    fn ram(&mut self) -> Ram<'_> {
        self.mmu.ram()
    }
    fn request_word(&self) -> &std::sync::atomic::AtomicU32 {
        self.shared.request_word()
    }
    fn interrupt_waits(&self) -> bool {
        self.irq_waiting
    }
    #[inline(always)]
    fn must_return(&self, cpu: &CpuState) -> bool {
        self.shared.is_requested()
            || (self.recheck | cpu.retired.is_due())
            || self.mmu.needs_sync()
            || self.irq_waiting && cpu.rflags & rflags::IF != 0
    }
    #[inline(always)]
    fn follows_levels(&self) -> bool {
        self.pmu.splits_cycles
    }
    fn tsc_offset(&self) -> Option<u64> {
        self.tsc.plain_offset()
    }
}
