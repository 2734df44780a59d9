//! The vCPU's side of the in-kernel LAPIC: register accesses, timers, start-up, and the choice of the next interrupt.

use irqchip::{
    Accepted, Action, Eoi, Now,
    lapic::{InvalidAccess, Lapic, LocalSource},
};
use kvm_bindings::{
    KVM_MP_STATE_INIT_RECEIVED, KVM_MP_STATE_RUNNABLE, KVM_X86_QUIRK_LAPIC_MMIO_HOLE,
};
use x86_cpu::{CpuState, GuestBus};
use x86_defs::{
    control::cr0,
    reg,
    segment::{Attr, Segment},
};

use super::{Bus, pv_eoi::PvEoi};
use crate::vcpu::Inner;

/// The LAPIC registers that KVM_RUN shows to the VMM.
#[derive(Clone, Copy, Debug)]
pub(in crate::vcpu) struct LapicView {
    pub(in crate::vcpu) apic_base: u64,
    pub(in crate::vcpu) cr8: u8,
}

/// A time that never comes: no timer is armed.
pub(in crate::vcpu) const NEVER: u64 = u64::MAX;

impl Bus {
    /// The present time on the chips' clocks.
    pub(in crate::vcpu) fn now(&self) -> Now {
        Now {
            ns: host::clock::monotonic_ns(),
            tsc: self.tsc.guest(host::cpu::rdtsc()),
            tsc_khz: self.tsc.real_khz(),
        }
    }
    /// Returns the time for a LAPIC register access. The clock is read only if the register depends on time: few do,
    /// and reading it costs as much as the rest of the access.
    fn now_if(&self, is_timed: bool) -> Now {
        if is_timed { self.now() } else { Now::default() }
    }
    /// True if the VM has in-kernel LAPICs.
    #[inline]
    pub(in crate::vcpu) fn has_lapic(&self) -> bool {
        self.vm.chips().is_some()
    }
    /// Carries out what a register write asked for. The caller does not hold the LAPIC's lock.
    pub(in crate::vcpu) fn act(&mut self, action: Action) {
        match action {
            Action::None => {}
            Action::Renumbered => self.vm.note_renumbered(),
            Action::Recheck => self.recheck = true,
            Action::Priority => self.task_priority_changed(),
            Action::Timer => {
                self.update_timer();
                // A deadline that has passed fires before the next instruction. One that comes before the clock would
                // be read next needs an earlier read.
                let unseen = self.unseen_until_ns.max(host::clock::monotonic_ns());
                self.recheck |= self.timer_ns <= unseen;
            }
            Action::Ipi(irq) => {
                let index = self.shared.index;
                let vm = std::sync::Arc::clone(&self.vm);
                let vcpus = vm.vcpus();
                irqchip::deliver(&mut vm.lapics(&vcpus), &irq, Some(index));
                self.recheck = true;
            }
            Action::Eoi(eoi) => {
                self.end_of_interrupt(eoi);
                self.recheck = true;
            }
        }
    }
    /// Passes an end of interrupt on to the chips, or queues it for the VMM.
    fn end_of_interrupt(&mut self, eoi: Eoi) {
        if eoi.sints != 0 {
            self.sints_ended(eoi.sints);
        }
        let vm = std::sync::Arc::clone(&self.vm);
        let Some(chips) = vm.chips() else { return };
        let of_pin = chips.has_vector(eoi.vector);
        if let Some(pins) = chips.split_pins() {
            let shared = std::sync::Arc::clone(&self.shared);
            let waits = of_pin
                && vm
                    .with_routing(|chip, _| chip.user_waits(pins, &shared.lapic(), eoi))
                    .unwrap_or(false);
            if waits {
                self.user_eois[usize::from(eoi.vector >> 6)] |= 1 << (eoi.vector & 63);
            }
        } else if eoi.level || of_pin {
            // An edge-triggered interrupt of a pin must be passed on, too: the PIT queues its ticks.
            vm.with_chips(|chip, lapics| chip.eoi(lapics, eoi, |gsi| vm.resample(gsi)));
        }
    }
    /// Takes the next vector whose EOI the VMM's IOAPIC must be told of.
    #[inline]
    pub(in crate::vcpu) fn take_user_eoi(&mut self) -> Option<u8> {
        if self.user_eois == [0; 4] {
            return None;
        }
        let word = self.user_eois.iter().rposition(|w| *w != 0)?;
        let bit = self.user_eois[word].ilog2();
        self.user_eois[word] &= !(1 << bit);
        Some((word as u32 * 64 + bit) as u8)
    }
    /// Updates the cached deadline of the LAPIC's timer.
    pub(in crate::vcpu) fn update_timer(&mut self) {
        let now = self.now();
        self.timer_ns = self.shared.lapic().timer_deadline(now).unwrap_or(NEVER);
    }
    /// Returns when the next timer is due, on the monotonic clock.
    #[inline]
    pub(in crate::vcpu) fn next_timer_ns(&self) -> u64 {
        let due = self.timer_ns.min(self.hv.timers.due_ns);
        let due = due.min(self.xen_due_ns());
        due.min(self.vm.chips().map_or(NEVER, |chips| chips.pit_next_ns()))
    }
    /// Fires the timers that are due. Returns the time on the monotonic clock.
    pub(in crate::vcpu) fn service_timers(&mut self) -> u64 {
        let ns = host::clock::monotonic_ns();
        self.looked = (ns, host::cpu::rdtsc());
        self.service_xen_timer(ns);
        if !self.has_lapic() {
            return ns;
        }
        if self.timer_ns <= ns {
            let now = self.now();
            let accepted = self.shared.lapic().timer_fire(now);
            if accepted != Accepted::Ignored {
                self.is_quiet = false;
                self.shared.accepted(accepted);
            }
            self.update_timer();
        }
        self.service_synthetic_timers(ns);
        self.vm.service_pit(ns);
        ns
    }
    /// Returns the LAPIC registers that only the vCPU itself changes, without taking the LAPIC's lock.
    #[inline]
    pub(in crate::vcpu) fn lapic_view(&mut self) -> LapicView {
        if !self.has_lapic() {
            return LapicView {
                apic_base: self.apic_base,
                cr8: self.cr8,
            };
        }
        if let Some(view) = self.lapic {
            return view;
        }
        let view = self.read_lapic();
        self.lapic = Some(view);
        view
    }
    fn read_lapic(&self) -> LapicView {
        let lapic = self.shared.lapic();
        LapicView {
            apic_base: lapic.apic_base(),
            cr8: lapic.cr8(),
        }
    }
    /// Drops cached LAPIC state. Called when the vCPU, or the VMM in its place, has written to the LAPIC.
    #[inline]
    pub(in crate::vcpu) fn lapic_changed(&mut self) {
        self.lapic = None;
        self.is_quiet = false;
        self.show_tpr();
        self.follow_lapic_for_xen();
    }
    /// Delivers what an LVT entry says. Without a LAPIC here there is none.
    #[cold]
    pub(in crate::vcpu) fn deliver_local(&mut self, source: LocalSource) {
        if !self.has_lapic() {
            return;
        }
        let accepted = self.shared.lapic().local(source);
        self.lapic_changed();
        if accepted != Accepted::Ignored {
            self.shared.accepted(accepted);
        }
    }
    /// Follows up the guest's write of a register.
    pub(super) fn lapic_written(&mut self, action: Action) {
        if action != Action::Priority {
            self.lapic_changed();
        }
        self.act(action);
    }
    /// Follows up the guest's write of the task priority. Windows writes it at each change of IRQL, so nothing but what
    /// depends on it is looked at again.
    pub(super) fn task_priority_changed(&mut self) {
        let lapic = self.shared.lapic();
        let (cr8, pending) = (lapic.cr8(), lapic.pending());
        drop(lapic);
        if let Some(view) = &mut self.lapic {
            view.cr8 = cr8;
        }
        if pending.is_some() {
            self.is_quiet = false;
            self.recheck = true;
        }
        self.show_tpr();
    }
    /// IA32_APIC_BASE.
    pub(in crate::vcpu) fn apic_base(&self) -> u64 {
        if self.has_lapic() {
            self.lapic
                .map_or_else(|| self.read_lapic().apic_base, |v| v.apic_base)
        } else {
            self.apic_base
        }
    }
    /// CR8.
    pub(in crate::vcpu) fn current_cr8(&self) -> u8 {
        if self.has_lapic() {
            self.lapic.map_or_else(|| self.read_lapic().cr8, |v| v.cr8)
        } else {
            self.cr8
        }
    }
    /// Tells the MMU which page xAPIC accesses go to, so that it keeps the page out of its TLBs.
    pub(in crate::vcpu) fn update_apic_page(&mut self) {
        let page = self.has_lapic().then(|| {
            let lapic = self.shared.lapic();
            (lapic.is_enabled() && !lapic.is_x2apic()).then(|| lapic.base_gpa())
        });
        self.mmu.set_apic_page(page.flatten());
    }
    /// Loads from a register of the LAPIC or IOAPIC; `None` if the address belongs to neither.
    pub(in crate::vcpu) fn chip_load(&mut self, cpu: &CpuState, gpa: u64, len: u8) -> Option<u64> {
        let is_lapic = self.is_lapic_page(gpa);
        if !is_lapic && !self.vm.may_be_ioapic(gpa) {
            return None;
        }
        self.sync_lapic();
        if is_lapic {
            let now = self.now_if(Lapic::is_timed(gpa & 0xfff));
            let lapic = self.shared.lapic();
            // The LAPIC does not answer in x2APIC mode or while disabled; the load then gives all ones.
            let is_hole = self.vm.options.has_quirk(KVM_X86_QUIRK_LAPIC_MMIO_HOLE);
            let value = lapic.mmio_read(gpa & 0xfff, len, now);
            drop(lapic);
            if value.is_some() {
                self.note_lapic_access(cpu.rip(), gpa, false);
            }
            return value.or(is_hole.then_some(u64::MAX));
        }
        self.vm.with_chips(|chip, _| {
            let range = chip.ioapic.mmio_range();
            range
                .contains(&gpa)
                .then(|| u64::from(chip.ioapic.mmio_read(gpa - range.start)))
        })?
    }
    /// Stores to a register of the LAPIC or IOAPIC; false if the address belongs to neither.
    pub(in crate::vcpu) fn chip_store(
        &mut self,
        cpu: &CpuState,
        gpa: u64,
        len: u8,
        value: u64,
    ) -> bool {
        let is_lapic = self.is_lapic_page(gpa);
        if !is_lapic && !self.vm.may_be_ioapic(gpa) {
            return false;
        }
        self.sync_lapic();
        if is_lapic {
            let now = self.now_if(Lapic::is_timed(gpa & 0xfff));
            let mut lapic = self.shared.lapic();
            let is_mapped = lapic.is_enabled() && !lapic.is_x2apic();
            if !is_mapped && !self.vm.options.has_quirk(KVM_X86_QUIRK_LAPIC_MMIO_HOLE) {
                return false;
            }
            let action = lapic.mmio_write(gpa & 0xfff, len, value as u32, now);
            drop(lapic);
            self.lapic_written(action);
            if is_mapped && len == 4 && gpa & 0xf == 0 {
                self.note_lapic_access(cpu.rip(), gpa, true);
            }
            return true;
        }
        let taken = self.vm.with_chips(|chip, lapics| {
            let range = chip.ioapic.mmio_range();
            let hit = range.contains(&gpa);
            if hit {
                chip.ioapic_write(lapics, gpa - range.start, value as u32);
            }
            hit
        });
        if taken == Some(true) {
            self.vm.publish_vectors();
            return true;
        }
        false
    }
    /// True if `gpa` is in the page of the LAPIC's registers.
    #[inline]
    fn is_lapic_page(&mut self, gpa: u64) -> bool {
        // Bits 12 to 51 are the address (SDM vol. 3, 11.4.4).
        self.has_lapic() && self.lapic_view().apic_base & 0xf_ffff_ffff_f000 == gpa & !0xfff
    }
    /// Executes an IN from a port of the PIC or PIT. Wider accesses are split into bytes.
    pub(in crate::vcpu) fn chip_in(&mut self, port: u16, size: u8) -> Option<u32> {
        if !may_be_chip_port(port) {
            return None;
        }
        let vm = &self.vm;
        vm.with_chips(|chip, lapics| {
            let mut value = 0;
            for i in 0..u16::from(size) {
                let at = port.wrapping_add(i);
                let byte = if irqchip::Pic::handles(at) {
                    chip.pic_read(lapics, at, |gsi| vm.resample(gsi))
                } else {
                    chip.pit
                        .as_mut()
                        .filter(|p| p.handles(at))?
                        .port_read(at, host::clock::monotonic_ns())
                };
                value |= u32::from(byte) << (8 * i);
            }
            Some(value)
        })?
    }
    /// Executes an OUT to a port of the PIC or PIT; false if the port belongs to neither.
    pub(in crate::vcpu) fn chip_out(&mut self, port: u16, size: u8, value: u32) -> bool {
        if !may_be_chip_port(port) {
            return false;
        }
        let vm = &self.vm;
        let taken = vm.with_chips(|chip, lapics| {
            for i in 0..u16::from(size) {
                let at = port.wrapping_add(i);
                let byte = (value >> (8 * i)) as u8;
                if irqchip::Pic::handles(at) {
                    chip.pic_write(lapics, at, byte, |gsi| vm.resample(gsi));
                } else if let Some(pit) = chip.pit.as_mut().filter(|p| p.handles(at)) {
                    pit.port_write(at, byte, host::clock::monotonic_ns());
                } else {
                    return false;
                }
            }
            true
        });
        // The PIT may be due before the clock is read next.
        self.recheck |= vm
            .chips()
            .is_some_and(|c| c.pit_next_ns() <= self.unseen_until_ns);
        taken.unwrap_or(false)
    }
    /// RDMSR of an x2APIC register.
    pub(in crate::vcpu) fn x2apic_read(&mut self, index: u32) -> Option<u64> {
        self.sync_lapic();
        let now = self.now_if(Lapic::is_msr_timed(index));
        self.has_lapic()
            .then(|| self.shared.lapic().msr_read(index, now).ok())
            .flatten()
    }
    /// WRMSR of an x2APIC register.
    pub(in crate::vcpu) fn x2apic_write(&mut self, index: u32, value: u64) -> bool {
        if !self.has_lapic() {
            return false;
        }
        self.sync_lapic();
        let now = self.now_if(Lapic::is_msr_timed(index));
        let result: Result<Action, InvalidAccess> =
            self.shared.lapic().msr_write(index, value, now);
        result.map(|action| self.lapic_written(action)).is_ok()
    }
    /// Returns the source of the interrupt that would be taken now: an upcall of Xen's comes first, then the PIC's through
    /// LINT0, then the LAPIC's.
    #[inline]
    pub(in crate::vcpu) fn pending_interrupt(&mut self) -> Option<Source> {
        if let Some(vector) = self.upcall()
            && self.has_lapic()
        {
            return Some(Source::Upcall(vector));
        }
        if self.is_quiet {
            return None;
        }
        let source = self.find_interrupt();
        self.is_quiet = source.is_none();
        source
    }
    fn find_interrupt(&self) -> Option<Source> {
        let chips = self.vm.chips()?;
        let lapic = self.shared.lapic();
        // KVM asks the PIC first, because an ExtINT has no priority class.
        let pic = match chips.split_pins() {
            Some(_) => self.user_extint.map(Source::User),
            None => chips.is_pic_intr().then_some(Source::Pic),
        };
        if pic.is_some() && lapic.accepts_pic() {
            return pic;
        }
        if !lapic.is_enabled() {
            return None;
        }
        lapic.pending().map(Source::Lapic)
    }
    /// Acknowledges the interrupt of `source` and returns its vector, or `None` if the interrupt is gone.
    pub(in crate::vcpu) fn acknowledge(&mut self, source: Source) -> Option<u8> {
        match source {
            Source::Lapic(vector) => {
                self.shared.lapic().ack(vector);
                Some(vector)
            }
            Source::User(_) => self.user_extint.take(),
            // The guest clears what announces it.
            Source::Upcall(vector) => Some(vector),
            Source::Pic => {
                let vm = std::sync::Arc::clone(&self.vm);
                vm.with_chips(|chip, lapics| {
                    let vector = chip.pic.intr().then(|| chip.pic.ack());
                    chip.pic_acked(lapics, |gsi| vm.resample(gsi));
                    vector
                })?
            }
        }
    }
}

/// True for the ports of the PICs and the PIT.
const fn may_be_chip_port(port: u16) -> bool {
    irqchip::Pic::handles(port) || matches!(port, 0x40..=0x43 | 0x61)
}

/// The source of an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vcpu) enum Source {
    Lapic(u8),
    Pic,
    /// The VMM's PIC, by KVM_INTERRUPT, with this vector.
    User(u8),
    /// Events of Xen's, with this vector.
    Upcall(u8),
}

impl Inner {
    /// INIT: sets the state of the INIT column of SDM vol. 3, table 10-1.
    #[cold]
    #[inline(never)]
    pub(in crate::vcpu) fn init(&mut self) {
        let old = &self.cpu;
        let fresh = CpuState {
            cr0: cr0::ET | old.cr0 & (cr0::CD | cr0::NW),
            fp: old.fp.clone(),
            pkru: old.pkru,
            pkrs: old.pkrs,
            msr: old.msr,
            xcr0: old.xcr0,
            xss: old.xss,
            features: old.features,
            retired: old.retired,
            ..CpuState::default()
        };
        *self.cpu = fresh;
        self.bus.replay.forget();
        self.bus.sync_lapic();
        self.bus.pv.eoi = PvEoi::default();
        self.pv_unhalted = false;
        self.sleeps_in_guest = false;
        self.bus.shared.lapic().init();
        self.bus.lapic_changed();
        self.bus.update_timer();
        self.bus.update_apic_page();
        self.reload();
        self.mp_state = if self.bus.shared.lapic().is_bsp() {
            KVM_MP_STATE_RUNNABLE
        } else {
            KVM_MP_STATE_INIT_RECEIVED
        };
    }
    /// SIPI: execution starts at `page << 12`. Ignored unless an INIT came before.
    pub(in crate::vcpu) fn startup(&mut self, page: u8) {
        if self.mp_state != KVM_MP_STATE_INIT_RECEIVED {
            return;
        }
        self.cpu.seg[reg::CS] = Segment {
            base: u64::from(page) << 12,
            limit: 0xffff,
            attr: Attr(0x9b),
            selector: u16::from(page) << 8,
        };
        self.cpu.set_rip(0);
        self.cpu.update_mode();
        self.bus.select_view(&mut self.cpu);
        self.mp_state = KVM_MP_STATE_RUNNABLE;
    }
}
