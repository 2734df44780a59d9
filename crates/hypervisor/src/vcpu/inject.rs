//! Injection of events at the entry to the guest (SDM vol. 3, 6.9; KVM's order).

use x86_cpu::{Event, Exception, PendingInterrupt, Shadow};
use x86_defs::{rflags, vector};
use x86_interp::{RunStop, Stop, smm};

use super::{
    Inner,
    bus::{apic::Source, debug},
};
use kvm_bindings::KVM_MP_STATE_RUNNABLE;

impl Inner {
    /// True if RFLAGS.IF is set, there is no interrupt shadow, and no event is already being injected.
    pub(super) fn is_interruptible(&self) -> bool {
        self.cpu.rflags & rflags::IF != 0
            && self.cpu.shadow == Shadow::None
            && self.cpu.events.interrupt.is_none()
            && self.cpu.events.exception.is_none()
    }

    /// Injects events in KVM's order: one whose delivery had begun, then an SMI, an NMI, interrupts. Returns true if
    /// the delivery ended in an exit.
    pub(super) fn inject(&mut self) -> bool {
        if let Some(x) = self.cpu.events.exception {
            match (x.vector, x.payload) {
                (vector::PF, payload) => self.cpu.fault_gva = payload.unwrap_or(self.cpu.cr2),
                (vector::DB, payload) => self.cpu.fault_dr6 = payload.unwrap_or(0),
                _ => {}
            }
            let dr6 = self.cpu.dr6;
            let error_code = x.error_code.map(|c| c as u16);
            let exit = self.deliver(Event::Exception(Exception {
                vector: x.vector,
                error_code,
            }));
            if x.vector == vector::DB && x.payload.is_none() {
                // The VMM has set DR6 itself, or means to leave it as it is.
                self.cpu.dr6 = dr6;
            }
            if exit {
                return true;
            }
            self.cpu.events.exception = None;
        }
        if debug::blocks_interrupts(&self.bus) {
            return false;
        }
        if self.cpu.events.smi_pending
            && !self.cpu.events.in_smm
            && !self.cpu.events.nmi_injected
            && self.cpu.events.interrupt.is_none()
            && self.cpu.shadow == Shadow::None
            && self.enter_smm()
        {
            return true;
        }
        let nmi = self.cpu.events.nmi_pending > 0
            && !self.cpu.events.nmi_masked
            && self.cpu.shadow == Shadow::None;
        if self.cpu.events.nmi_injected || nmi {
            let exit = self.deliver(Event::Nmi);
            if exit {
                self.cpu.events.nmi_injected = true;
                return true;
            }
            if !std::mem::take(&mut self.cpu.events.nmi_injected) {
                self.cpu.events.nmi_pending -= 1;
            }
            self.cpu.events.nmi_masked = true;
            self.bus.counters.nmi_injections += 1;
        }
        if let Some(interrupt) = self.cpu.events.interrupt {
            // KVM_INTERRUPT queues an interrupt only when the VMM saw the window open.
            let event = if interrupt.soft {
                Event::Software {
                    vector: interrupt.vector,
                    next_rip: self.cpu.rip(),
                    privileged: true,
                }
            } else {
                Event::Interrupt(interrupt.vector)
            };
            let exit = self.deliver(event);
            if exit {
                return true;
            }
            self.cpu.events.interrupt = None;
        }
        if self.is_interruptible()
            && let Some(source) = self.bus.pending_interrupt()
            && let Some(vector) = self.bus.acknowledge(source)
        {
            self.bus.counters.irq_injections += 1;
            if matches!(source, Source::Lapic(_)) {
                self.bus.arm_pv_eoi();
            }
            let exit = self.deliver(Event::Interrupt(vector));
            if exit {
                self.cpu.events.interrupt = Some(PendingInterrupt {
                    vector,
                    soft: false,
                });
                return true;
            }
        }
        false
    }

    /// Enters SMM: the handler starts at SMBASE + 0x8000.
    fn enter_smm(&mut self) -> bool {
        match smm::enter(&mut self.cpu, &mut self.bus) {
            Ok(()) => {
                self.wake();
                false
            }
            Err(Stop::TripleFault) => self.stopped(RunStop::TripleFault),
            Err(_) => self.stopped(RunStop::Exit),
        }
    }

    /// Ends HLT, and the wait for an event of Xen's.
    fn wake(&mut self) {
        self.bus.stop_polling();
        self.mp_state = KVM_MP_STATE_RUNNABLE;
        self.sleeps_in_guest = false;
    }

    fn deliver(&mut self, event: Event) -> bool {
        match self.interp.inject(&mut self.cpu, &mut self.bus, event) {
            Ok(()) => {
                self.wake();
                false
            }
            Err(stop) => self.stopped(stop),
        }
    }
}
