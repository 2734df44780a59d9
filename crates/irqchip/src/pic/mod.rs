//! The pair of 8259A interrupt controllers of a PC (Intel 8259A datasheet),
//! with KVM's edge/level control registers.
//!
//! The pair's output is a level ([`Pic::intr`]); the CPU's two INTA cycles are [`Pic::ack`]. Invariant: `intr` is true
//! exactly if some unmasked request has a higher priority than all interrupts in service.

mod chip;

pub use chip::PicState;

use crate::line::{Line, LineStatus};
use chip::Chip;

/// The datasheet, and the PC's ports.
mod spec {
    pub(super) const MASTER: u16 = 0x20;
    pub(super) const SLAVE: u16 = 0xa0;
    pub(super) const ELCR_MASTER: u16 = 0x4d0;
    pub(super) const ELCR_SLAVE: u16 = 0x4d1;
    /// Inputs of the master that may be level-triggered: all but timer, keyboard and cascade.
    pub(super) const ELCR_MASK_MASTER: u8 = 0xf8;
    /// Inputs of the slave that may be level-triggered: all but clock and coprocessor.
    pub(super) const ELCR_MASK_SLAVE: u8 = 0xde;
    /// Master input that the slave drives.
    pub(super) const CASCADE: u8 = 2;
    /// Input that is reported if the request has gone away.
    pub(super) const SPURIOUS: u8 = 7;
    pub(super) const NR_PINS: usize = 16;
}

/// Master and slave.
#[derive(Clone, Debug, PartialEq)]
pub struct Pic {
    chips: [Chip; 2],
    lines: [Line; spec::NR_PINS],
    intr: bool,
    acked: u16,
}

impl Default for Pic {
    fn default() -> Self {
        Self {
            chips: [
                Chip::new(spec::ELCR_MASK_MASTER),
                Chip::new(spec::ELCR_MASK_SLAVE),
            ],
            lines: [Line::default(); spec::NR_PINS],
            intr: false,
            acked: 0,
        }
    }
}

impl Pic {
    /// True if `port` belongs to the pair.
    pub const fn handles(port: u16) -> bool {
        matches!(
            port,
            spec::MASTER..=0x21 | spec::SLAVE..=0xa1 | spec::ELCR_MASTER | spec::ELCR_SLAVE
        )
    }

    /// The INTR output.
    pub const fn intr(&self) -> bool {
        self.intr
    }

    /// Drives an input, 0 to 15, from one of its sources.
    pub fn set_irq(&mut self, pin: u8, source: u8, level: bool) -> LineStatus {
        let Some(line) = self.lines.get_mut(usize::from(pin)) else {
            return LineStatus::IGNORED;
        };
        let level = line.drive(source, level);
        let status = self.chips[usize::from(pin >> 3)].set_irq(pin & 7, level);
        self.update();
        status
    }

    /// Executes the interrupt-acknowledge cycles and returns the vector. If the request has gone away, that is IRQ 7 or
    /// 15, which is then not in service.
    pub fn ack(&mut self) -> u8 {
        let [master, slave] = &mut self.chips;
        let vector = match master.pending(true) {
            Some(spec::CASCADE) => {
                let cleared = master.intack(spec::CASCADE);
                let (irq, slave_cleared) = match slave.pending(false) {
                    Some(irq) => (irq, slave.intack(irq)),
                    None => (spec::SPURIOUS, 0),
                };
                let vector = slave.vector(irq);
                self.note(cleared, slave_cleared);
                vector
            }
            Some(irq) => {
                let cleared = master.intack(irq);
                let vector = master.vector(irq);
                self.note(cleared, 0);
                vector
            }
            None => master.vector(spec::SPURIOUS),
        };
        self.update();
        vector
    }

    /// Reads a port.
    pub fn port_read(&mut self, port: u16) -> u8 {
        let index = usize::from(port & 0x80 != 0);
        match port {
            spec::MASTER..=0x21 | spec::SLAVE..=0xa1 => {
                let (value, polled) = self.chips[index].read(port & 1 != 0, index == 0);
                if let Some(cleared) = polled {
                    if index == 1 {
                        // A poll of the slave acknowledges the cascade input, too.
                        self.chips[0].finish_cascade(spec::CASCADE);
                        self.note(0, cleared);
                    } else {
                        self.note(cleared, 0);
                    }
                    self.update();
                }
                value
            }
            spec::ELCR_MASTER => self.chips[0].elcr(),
            spec::ELCR_SLAVE => self.chips[1].elcr(),
            _ => 0xff,
        }
    }

    /// Writes a port.
    pub fn port_write(&mut self, port: u16, value: u8) {
        let index = usize::from(port & 0x80 != 0);
        match port {
            spec::MASTER..=0x21 | spec::SLAVE..=0xa1 => {
                let cleared = self.chips[index].write(port & 1 != 0, value);
                if index == 0 {
                    self.note(cleared, 0);
                } else {
                    self.note(0, cleared);
                }
            }
            spec::ELCR_MASTER => self.chips[0].set_elcr(value),
            spec::ELCR_SLAVE => self.chips[1].set_elcr(value),
            _ => return,
        }
        self.update();
    }

    /// True if the input is masked by its own chip.
    pub fn is_masked(&self, pin: u8) -> bool {
        self.chips
            .get(usize::from(pin >> 3))
            .is_none_or(|c| c.save().imr >> (pin & 7) & 1 != 0)
    }

    /// Returns the inputs whose interrupt has ended since the last call, as a bit mask. The caller signals their
    /// resample irqfds, and tells the PIT of input 0.
    pub fn take_acked(&mut self) -> u16 {
        core::mem::take(&mut self.acked)
    }

    /// KVM_GET_IRQCHIP: `slave` selects the chip.
    pub const fn save(&self, slave: bool) -> PicState {
        if slave {
            self.chips[1].save()
        } else {
            self.chips[0].save()
        }
    }

    /// KVM_SET_IRQCHIP.
    pub fn restore(&mut self, slave: bool, state: &PicState) {
        self.chips[usize::from(slave)].restore(state);
        self.update();
    }

    fn note(&mut self, master: u8, slave: u8) {
        self.acked |= u16::from(master) | u16::from(slave) << 8;
    }

    fn update(&mut self) {
        let [master, slave] = &mut self.chips;
        if slave.pending(false).is_some() {
            // A new edge for each interrupt: the master's request must not be lost when the slave keeps its output high
            // for the next one.
            master.set_irq(spec::CASCADE, true);
            master.set_irq(spec::CASCADE, false);
        }
        self.intr = master.pending(true).is_some();
    }
}

#[cfg(test)]
mod tests;
