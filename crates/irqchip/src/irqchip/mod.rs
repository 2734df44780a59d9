//! The chips of a VM wired together: a GSI in, messages and the INTR line out.
//!
//! LAPICs are not in here: each belongs to a vCPU and is reached through
//! [`LapicSet`]. Lock order: this struct's lock first, then one LAPIC at a time.

mod split;

use crate::line::source;
use crate::routing::{Route, Routing};
use crate::{Eoi, Ioapic, LapicSet, LineStatus, Msi, Pic, Pit, deliver, dest::raise_sint};

/// PIC, IOAPIC, PIT and routing.
#[derive(Clone, Debug, Default)]
pub struct Irqchip {
    /// The 8259A pair.
    pub pic: Pic,
    /// The IOAPIC.
    pub ioapic: Ioapic,
    /// The PIT, if KVM_CREATE_PIT2 was called.
    pub pit: Option<Pit>,
    /// GSI routing.
    pub routing: Routing,
    /// KVM_X2APIC_API_USE_32BIT_IDS.
    pub x2apic_format: bool,
}

impl Irqchip {
    /// Makes the chips of KVM_CREATE_IRQCHIP.
    pub fn new() -> Self {
        Self {
            routing: Routing::default_kvm(),
            ..Self::default()
        }
    }

    /// Drives a GSI from one of its sources (KVM_IRQ_LINE, irqfd, PIT).
    /// Afterwards [`Pic::intr`] may have changed.
    pub fn set_gsi<S: LapicSet + ?Sized>(
        &mut self,
        lapics: &mut S,
        gsi: u32,
        source: u8,
        level: bool,
    ) -> LineStatus {
        let mut status = LineStatus::IGNORED;
        // As in KVM, the last route of a GSI comes first.
        for entry in self.routing.routes(gsi).iter().rev() {
            status = status.merge(match entry.route {
                Route::Pic(pin) => self.pic.set_irq(pin, source, level),
                Route::Ioapic(pin) => self
                    .ioapic
                    .set_irq(pin, source, level, &mut |irq| deliver(lapics, irq, None)),
                // A message has no falling edge.
                Route::Msi(_) if !level => LineStatus::IGNORED,
                Route::Msi(msi) => deliver(lapics, &msi.decode(self.x2apic_format), None),
                Route::HvSint { .. } | Route::XenEvent { .. } if !level => LineStatus::IGNORED,
                Route::HvSint { vp, sint } => raise_sint(lapics, vp, sint),
                Route::XenEvent { vcpu, port } => lapics.send_event(vcpu, port),
            });
        }
        status
    }

    /// KVM_SIGNAL_MSI.
    pub fn signal_msi<S: LapicSet + ?Sized>(&self, lapics: &mut S, msi: Msi) -> LineStatus {
        deliver(lapics, &msi.decode(self.x2apic_format), None)
    }

    /// Raises and lowers a GSI.
    pub fn pulse_gsi<S: LapicSet + ?Sized>(
        &mut self,
        lapics: &mut S,
        gsi: u32,
        source: u8,
    ) -> LineStatus {
        let status = self.set_gsi(lapics, gsi, source, true);
        self.set_gsi(lapics, gsi, source, false);
        status
    }

    /// Handles a LAPIC's EOI. `resample` is called with each GSI whose interrupt has ended, after its
    /// [`source::RESAMPLE`] line was lowered. It signals the resample eventfds, and devices that still need service
    /// raise the line again.
    pub fn eoi<S: LapicSet + ?Sized>(
        &mut self,
        lapics: &mut S,
        eoi: Eoi,
        mut resample: impl FnMut(u32),
    ) {
        let pins = self.ioapic.pins_of(eoi.vector);
        for pin in (0..24u8).filter(|pin| pins >> pin & 1 != 0) {
            if let Some(gsi) = self.routing.gsi_of(Route::Ioapic(pin)) {
                self.ended(lapics, gsi, &mut resample);
            }
        }
        if eoi.broadcast {
            self.ioapic
                .eoi(eoi.vector, &mut |irq| deliver(lapics, irq, None));
        }
    }

    /// Handles the end of a synthetic source's interrupt on a processor of Hyper-V's interface; `resample` as in
    /// [`Self::eoi`].
    pub fn sint_ended<S: LapicSet + ?Sized>(
        &mut self,
        lapics: &mut S,
        (vp, sint): (u32, u32),
        mut resample: impl FnMut(u32),
    ) {
        if let Some(gsi) = self.routing.gsi_of(Route::HvSint { vp, sint }) {
            self.ended(lapics, gsi, &mut resample);
        }
    }

    /// Handles a guest's write to the IOAPIC, `offset` from its base.
    pub fn ioapic_write<S: LapicSet + ?Sized>(&mut self, lapics: &mut S, offset: u64, value: u32) {
        let was_masked = self.is_pit_masked();
        self.ioapic
            .mmio_write(offset, value, &mut |irq| deliver(lapics, irq, None));
        self.note_pit_mask(was_masked);
    }

    /// Handles a guest's write to a PIC port; `resample` as in [`Self::eoi`].
    pub fn pic_write<S: LapicSet + ?Sized>(
        &mut self,
        lapics: &mut S,
        port: u16,
        value: u8,
        resample: impl FnMut(u32),
    ) {
        let was_masked = self.is_pit_masked();
        self.pic.port_write(port, value);
        self.note_pit_mask(was_masked);
        self.pic_acked(lapics, resample);
    }

    /// Handles a guest's read of a PIC port, which may be a poll.
    pub fn pic_read<S: LapicSet + ?Sized>(
        &mut self,
        lapics: &mut S,
        port: u16,
        resample: impl FnMut(u32),
    ) -> u8 {
        let value = self.pic.port_read(port);
        self.pic_acked(lapics, resample);
        value
    }

    /// Returns for each route of GSI 0 whether its pin is masked: the PIC's, then the IOAPIC's.
    fn is_pit_masked(&self) -> [bool; 2] {
        let mut masked = [true; 2];
        for entry in self.routing.routes(0) {
            match entry.route {
                Route::Pic(pin) => masked[0] = self.pic.is_masked(pin),
                Route::Ioapic(pin) => masked[1] = self.ioapic.is_masked(pin),
                Route::Msi(_) | Route::HvSint { .. } | Route::XenEvent { .. } => {}
            }
        }
        masked
    }

    /// Drops a tick that was raised while IRQ 0 was masked, when it is unmasked. The tick is never acknowledged, so
    /// otherwise no tick would ever come again.
    fn note_pit_mask(&mut self, was: [bool; 2]) {
        let is = self.is_pit_masked();
        let unmasked = was.iter().zip(is).any(|(&was, is)| was && !is);
        if let Some(pit) = self.pit.as_mut().filter(|_| unmasked) {
            pit.unmasked();
        }
    }

    /// Does for the PIC's inputs what [`Self::eoi`] does for the IOAPIC's. Call this after [`Pic::ack`], where an
    /// automatic EOI ends the interrupt.
    pub fn pic_acked<S: LapicSet + ?Sized>(
        &mut self,
        lapics: &mut S,
        mut resample: impl FnMut(u32),
    ) {
        let pins = self.pic.take_acked();
        for pin in (0..16u8).filter(|pin| pins >> pin & 1 != 0) {
            if let Some(gsi) = self.routing.gsi_of(Route::Pic(pin)) {
                self.ended(lapics, gsi, &mut resample);
            }
        }
    }

    /// Advances the PIT to `now_ns`, and pulses IRQ 0 if it expired.
    pub fn advance_pit<S: LapicSet + ?Sized>(&mut self, lapics: &mut S, now_ns: u64) {
        if self.pit.as_mut().is_some_and(|pit| pit.advance(now_ns)) {
            self.pulse_gsi(lapics, 0, source::PIT);
        }
    }

    fn ended<S: LapicSet + ?Sized>(
        &mut self,
        lapics: &mut S,
        gsi: u32,
        resample: &mut impl FnMut(u32),
    ) {
        if gsi == 0 && self.pit.as_mut().is_some_and(Pit::acked) {
            self.pulse_gsi(lapics, 0, source::PIT);
        }
        self.set_gsi(lapics, gsi, source::RESAMPLE, false);
        resample(gsi);
    }
}

#[cfg(test)]
mod tests;
