//! The I/O APIC (Intel 82093AA datasheet), as KVM has it: version 0x11, 24
//! pins, no EOI register.
//!
//! Invariants: a level-triggered pin has at most one outstanding message (`remote IRR`), and if the line is still high
//! after its EOI, the pin sends again.

use crate::line::{Line, LineStatus};
use crate::{DeliveryMode, LapicIrq, Shorthand};

/// The datasheet.
mod spec {
    pub(super) const NR_PINS: usize = 24;
    pub(super) const DEFAULT_BASE: u64 = 0xfec0_0000;
    pub(super) const MMIO_LEN: u64 = 0x100;
    pub(super) const VERSION: u32 = 0x11 | (NR_PINS as u32 - 1) << 16;

    pub(super) const IOREGSEL: u64 = 0x00;
    pub(super) const IOWIN: u64 = 0x10;

    pub(super) const REG_ID: u32 = 0;
    pub(super) const REG_VERSION: u32 = 1;
    pub(super) const REG_ARB_ID: u32 = 2;
    pub(super) const REG_REDIR: u32 = 0x10;

    /// Redirection entry.
    pub(super) const LOGICAL: u64 = 1 << 11;
    pub(super) const DELIVERY_STATUS: u64 = 1 << 12;
    pub(super) const REMOTE_IRR: u64 = 1 << 14;
    pub(super) const LEVEL: u64 = 1 << 15;
    pub(super) const MASKED: u64 = 1 << 16;
    pub(super) const DEST_SHIFT: u32 = 56;
    /// Bits of a redirection entry that the guest cannot write.
    pub(super) const READ_ONLY: u64 = DELIVERY_STATUS | REMOTE_IRR;
}

/// Content of `struct kvm_ioapic_state`, field by field and with its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct IoapicState {
    /// gpa of the registers.
    pub base_address: u64,
    /// Register selected by IOREGSEL.
    pub ioregsel: u32,
    /// APIC id, 4 bits.
    pub id: u32,
    /// Pins with an interrupt that no LAPIC has accepted yet, or with a high level.
    pub irr: u32,
    /// Padding.
    pub pad: u32,
    /// Redirection entries.
    pub redirtbl: [u64; spec::NR_PINS],
}

impl Default for IoapicState {
    /// State after reset: everything masked.
    fn default() -> Self {
        Self {
            base_address: spec::DEFAULT_BASE,
            ioregsel: 0,
            id: 0,
            irr: 0,
            pad: 0,
            redirtbl: [spec::MASKED; spec::NR_PINS],
        }
    }
}

/// The I/O APIC. It sends messages by the `send` callback, which returns the outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ioapic {
    state: IoapicState,
    lines: [Line; spec::NR_PINS],
    /// Edges that were sent. They are not pending any more, even while the line is still high.
    delivered: u32,
}

impl Ioapic {
    /// gpa range of the registers.
    pub const fn mmio_range(&self) -> core::ops::Range<u64> {
        self.state.base_address..self.state.base_address.wrapping_add(spec::MMIO_LEN)
    }

    /// Reads a register; `offset` is from the base. The caller truncates to the access size.
    pub fn mmio_read(&self, offset: u64) -> u32 {
        match offset & 0xff {
            spec::IOREGSEL => self.state.ioregsel,
            spec::IOWIN => self.read_selected(),
            _ => 0,
        }
    }

    /// Writes a register; narrow writes are zero-extended as in KVM.
    pub fn mmio_write(
        &mut self,
        offset: u64,
        value: u32,
        send: &mut impl FnMut(&LapicIrq) -> LineStatus,
    ) {
        match offset & 0xff {
            spec::IOREGSEL => self.state.ioregsel = value & 0xff,
            spec::IOWIN => self.write_selected(value, send),
            _ => {}
        }
    }

    fn read_selected(&self) -> u32 {
        let sel = self.state.ioregsel;
        match sel {
            spec::REG_VERSION => spec::VERSION,
            spec::REG_ID | spec::REG_ARB_ID => (self.state.id & 0xf) << 24,
            _ => {
                let entry = selected_pin(sel).map_or(u64::MAX, |pin| self.state.redirtbl[pin]);
                if sel & 1 != 0 {
                    (entry >> 32) as u32
                } else {
                    entry as u32
                }
            }
        }
    }

    fn write_selected(&mut self, value: u32, send: &mut impl FnMut(&LapicIrq) -> LineStatus) {
        let sel = self.state.ioregsel;
        if sel == spec::REG_ID {
            self.state.id = value >> 24 & 0xf;
            return;
        }
        let Some(pin) = selected_pin(sel) else { return };
        let old = self.state.redirtbl[pin];
        let mut new = if sel & 1 != 0 {
            old & 0xffff_ffff | u64::from(value) << 32
        } else {
            old & !0xffff_ffff | u64::from(value)
        };
        new = new & !spec::READ_ONLY | old & spec::READ_ONLY;
        // The 82093AA has no EOI register, so guests acknowledge a stuck level interrupt by switching the pin to edge
        // and back.
        if new & spec::LEVEL == 0 {
            new &= !spec::REMOTE_IRR;
        }
        self.state.redirtbl[pin] = new;
        if new & spec::LEVEL != 0 && self.state.irr & 1 << pin != 0 {
            self.service(pin, send);
        }
    }

    /// Drives a pin from one of its sources.
    pub fn set_irq(
        &mut self,
        pin: u8,
        source: u8,
        level: bool,
        send: &mut impl FnMut(&LapicIrq) -> LineStatus,
    ) -> LineStatus {
        let pin = usize::from(pin);
        let Some(line) = self.lines.get_mut(pin) else {
            return LineStatus::IGNORED;
        };
        let level = line.drive(source, level);
        self.set_level(pin, level, send)
    }

    fn set_level(
        &mut self,
        pin: usize,
        level: bool,
        send: &mut impl FnMut(&LapicIrq) -> LineStatus,
    ) -> LineStatus {
        let bit = 1u32 << pin;
        if !level {
            self.state.irr &= !bit;
            return LineStatus::DELIVERED;
        }
        let was_high = self.state.irr & bit != 0;
        self.state.irr |= bit;
        if self.state.redirtbl[pin] & spec::LEVEL == 0 {
            self.delivered &= !bit;
            if was_high {
                return LineStatus::COALESCED;
            }
        }
        self.service(pin, send)
    }

    /// Sends a pin's message unless it is masked or one is outstanding.
    fn service(
        &mut self,
        pin: usize,
        send: &mut impl FnMut(&LapicIrq) -> LineStatus,
    ) -> LineStatus {
        let entry = self.state.redirtbl[pin];
        let level = entry & spec::LEVEL != 0;
        if entry & spec::MASKED != 0 || level && entry & spec::REMOTE_IRR != 0 {
            return LineStatus::IGNORED;
        }
        if !level {
            self.delivered |= 1 << pin;
        }
        let status = send(&message(entry));
        // A level message that no LAPIC accepted stays pending. One that was merged with a pending one of the same
        // vector is acknowledged by the same EOI.
        if level && status.is_accepted() {
            self.state.redirtbl[pin] |= spec::REMOTE_IRR;
        }
        status
    }

    /// True if some pin sends `vector`. Its EOI must then come here, and PV EOI must not skip it.
    pub fn handles_vector(&self, vector: u8) -> bool {
        self.state
            .redirtbl
            .iter()
            .any(|&e| e as u8 == vector && mode(e) != DeliveryMode::ExtInt)
    }

    /// Returns the pins that send `vector`, as a bit mask. Their resample irqfds must be signalled, and the lines that
    /// those drive lowered, *before* [`Self::eoi`], or every interrupt would come twice.
    pub fn pins_of(&self, vector: u8) -> u32 {
        (0..spec::NR_PINS)
            .filter(|&pin| self.state.redirtbl[pin] as u8 == vector)
            .fold(0u32, |pins, pin| pins | 1 << pin)
    }

    /// Handles a LAPIC's broadcast of the EOI of a level-triggered `vector`: pins whose lines are still high send
    /// again.
    pub fn eoi(&mut self, vector: u8, send: &mut impl FnMut(&LapicIrq) -> LineStatus) {
        for pin in 0..spec::NR_PINS {
            let entry = &mut self.state.redirtbl[pin];
            if *entry as u8 != vector || *entry & spec::LEVEL == 0 {
                continue;
            }
            *entry &= !spec::REMOTE_IRR;
            if self.state.irr & 1 << pin != 0 {
                self.service(pin, send);
            }
        }
    }

    /// True if the pin is masked. Irqfd resamplers and the PIT depend on it.
    pub fn is_masked(&self, pin: u8) -> bool {
        self.state
            .redirtbl
            .get(usize::from(pin))
            .is_none_or(|e| e & spec::MASKED != 0)
    }

    /// KVM_GET_IRQCHIP.
    pub fn save(&self) -> IoapicState {
        IoapicState {
            irr: self.state.irr & !self.delivered,
            ..self.state
        }
    }

    /// KVM_SET_IRQCHIP: interrupts that were pending are sent again.
    pub fn restore(&mut self, state: &IoapicState, send: &mut impl FnMut(&LapicIrq) -> LineStatus) {
        let irr = state.irr;
        self.state = IoapicState { irr: 0, ..*state };
        self.delivered = 0;
        for pin in (0..spec::NR_PINS).filter(|pin| irr & 1 << pin != 0) {
            self.set_level(pin, true, send);
        }
    }
}

fn selected_pin(sel: u32) -> Option<usize> {
    let pin = (sel.checked_sub(spec::REG_REDIR)? >> 1) as usize;
    (pin < spec::NR_PINS).then_some(pin)
}

const fn mode(entry: u64) -> DeliveryMode {
    DeliveryMode::from_bits((entry >> 8) as u32)
}

fn message(entry: u64) -> LapicIrq {
    LapicIrq {
        dest: (entry >> spec::DEST_SHIFT) as u32,
        logical: entry & spec::LOGICAL != 0,
        shorthand: Shorthand::None,
        mode: mode(entry),
        vector: entry as u8,
        assert: true,
        level_triggered: entry & spec::LEVEL != 0,
        redirection_hint: false,
    }
}

#[cfg(test)]
mod tests;
