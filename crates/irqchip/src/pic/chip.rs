//! One 8259A.

use crate::line::LineStatus;

/// The datasheet: command words.
mod spec {
    /// ICW1: distinguishes it from OCW2 and OCW3.
    pub(super) const ICW1: u8 = 0x10;
    pub(super) const ICW1_NEEDS_ICW4: u8 = 0x01;
    pub(super) const ICW2_BASE: u8 = 0xf8;
    pub(super) const ICW4_AUTO_EOI: u8 = 0x02;
    pub(super) const ICW4_SPECIAL_FULLY_NESTED: u8 = 0x10;
    pub(super) const OCW3: u8 = 0x08;
    pub(super) const OCW3_POLL: u8 = 0x04;
    pub(super) const OCW3_READ: u8 = 0x02;
    pub(super) const OCW3_READ_ISR: u8 = 0x01;
    pub(super) const OCW3_SET_SPECIAL_MASK: u8 = 0x40;
    pub(super) const OCW3_SPECIAL_MASK: u8 = 0x20;
    /// OCW2's top three bits.
    pub(super) const ROTATE_IN_AUTO_EOI_CLEAR: u8 = 0;
    pub(super) const EOI: u8 = 1;
    pub(super) const SPECIFIC_EOI: u8 = 3;
    pub(super) const ROTATE_IN_AUTO_EOI_SET: u8 = 4;
    pub(super) const ROTATE_ON_EOI: u8 = 5;
    pub(super) const SET_PRIORITY: u8 = 6;
    pub(super) const ROTATE_ON_SPECIFIC_EOI: u8 = 7;
}

/// Which initialization word comes next.
mod init {
    pub(super) const READY: u8 = 0;
    pub(super) const ICW2: u8 = 1;
    pub(super) const ICW3: u8 = 2;
    pub(super) const ICW4: u8 = 3;
}

/// KVM_GET_IRQCHIP and KVM_SET_IRQCHIP of one 8259A.
pub use kvm_bindings::kvm_pic_state as PicState;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chip {
    state: PicState,
}

impl Chip {
    pub(super) fn new(elcr_mask: u8) -> Self {
        Self {
            state: PicState {
                elcr_mask,
                ..PicState::default()
            },
        }
    }

    pub(super) const fn vector(&self, irq: u8) -> u8 {
        self.state.irq_base.wrapping_add(irq)
    }
    pub(super) const fn elcr(&self) -> u8 {
        self.state.elcr
    }
    pub(super) const fn set_elcr(&mut self, value: u8) {
        self.state.elcr = value & self.state.elcr_mask;
    }
    pub(super) const fn save(&self) -> PicState {
        self.state
    }
    pub(super) fn restore(&mut self, state: &PicState) {
        // The mask of ELCR is restored as well: KVM takes it from the VMM.
        self.state = PicState {
            priority_add: state.priority_add & 7,
            ..*state
        };
    }

    pub(super) fn set_irq(&mut self, irq: u8, level: bool) -> LineStatus {
        let s = &mut self.state;
        let bit = 1u8 << (irq & 7);
        let mut status = LineStatus::DELIVERED;
        if level {
            if s.elcr & bit != 0 || s.last_irr & bit == 0 {
                if s.irr & bit != 0 {
                    status = LineStatus::COALESCED;
                }
                s.irr |= bit;
            }
            s.last_irr |= bit;
        } else {
            s.last_irr &= !bit;
            if s.elcr & bit != 0 {
                s.irr &= !bit;
            }
        }
        if s.imr & bit != 0 {
            LineStatus::IGNORED
        } else {
            status
        }
    }

    /// Returns the priority of the most urgent input in `mask`: 0 is the highest, 8 means that there is none.
    fn priority(&self, mask: u8) -> u32 {
        mask.rotate_right(u32::from(self.state.priority_add))
            .trailing_zeros()
    }
    fn input_at(&self, priority: u32) -> u8 {
        ((priority + u32::from(self.state.priority_add)) & 7) as u8
    }

    /// Returns the input that would be acknowledged now.
    pub(super) fn pending(&self, master: bool) -> Option<u8> {
        let s = &self.state;
        let wanted = self.priority(s.irr & !s.imr);
        let mut in_service = s.isr;
        if s.special_mask != 0 {
            in_service &= !s.imr;
        }
        // In special fully nested mode the slave may interrupt its own handler.
        if s.special_fully_nested_mode != 0 && master {
            in_service &= !(1 << super::spec::CASCADE);
        }
        (wanted < self.priority(in_service)).then(|| self.input_at(wanted))
    }

    /// Takes an input into service; returns the inputs whose interrupt ended with it.
    pub(super) fn intack(&mut self, irq: u8) -> u8 {
        let s = &mut self.state;
        let bit = 1u8 << (irq & 7);
        s.isr |= bit;
        // A level input stays requested as long as it is driven.
        if s.elcr & bit == 0 {
            s.irr &= !bit;
        }
        if s.auto_eoi == 0 {
            return 0;
        }
        if s.rotate_on_auto_eoi != 0 {
            s.priority_add = (irq + 1) & 7;
        }
        self.end(bit)
    }

    /// Ends the cascade input after a poll of the slave: it is neither requested nor in service.
    pub(super) const fn finish_cascade(&mut self, irq: u8) {
        let bit = 1u8 << (irq & 7);
        self.state.isr &= !bit;
        self.state.irr &= !bit;
    }

    fn end(&mut self, bit: u8) -> u8 {
        let ended = self.state.isr & bit;
        self.state.isr &= !bit;
        ended
    }

    /// Reads a port. Returns the value and, for a poll, the inputs whose interrupt ended.
    pub(super) fn read(&mut self, odd: bool, master: bool) -> (u8, Option<u8>) {
        if self.state.poll != 0 {
            self.state.poll = 0;
            return match self.pending(master) {
                Some(irq) => {
                    let mut ended = self.intack(irq);
                    // KVM ends a polled interrupt at once. The EOI that polling guests send afterwards has no effect.
                    ended |= self.end(1 << irq);
                    (0x80 | irq, Some(ended))
                }
                None => (super::spec::SPURIOUS, Some(0)),
            };
        }
        let s = &self.state;
        let value = match (odd, s.read_reg_select != 0) {
            (true, _) => s.imr,
            (false, true) => s.isr,
            (false, false) => s.irr,
        };
        (value, None)
    }

    /// Writes a port; returns the inputs whose interrupt ended.
    pub(super) fn write(&mut self, odd: bool, value: u8) -> u8 {
        if odd {
            self.write_data(value);
            0
        } else if value & spec::ICW1 != 0 {
            self.begin_init(value)
        } else if value & spec::OCW3 != 0 {
            self.write_ocw3(value);
            0
        } else {
            self.write_ocw2(value)
        }
    }

    fn begin_init(&mut self, icw1: u8) -> u8 {
        let s = &mut self.state;
        // Edge requests and interrupts in service are dropped. Devices that wait for their end must be told.
        let ended = (s.irr & !s.elcr) | s.isr;
        s.init4 = icw1 & spec::ICW1_NEEDS_ICW4;
        s.last_irr = 0;
        s.irr &= s.elcr;
        s.imr = 0;
        s.isr = 0;
        s.priority_add = 0;
        s.special_mask = 0;
        s.read_reg_select = 0;
        if s.init4 == 0 {
            s.special_fully_nested_mode = 0;
            s.auto_eoi = 0;
        }
        s.init_state = init::ICW2;
        ended
    }

    const fn write_ocw3(&mut self, value: u8) {
        let s = &mut self.state;
        if value & spec::OCW3_POLL != 0 {
            s.poll = 1;
        }
        if value & spec::OCW3_READ != 0 {
            s.read_reg_select = value & spec::OCW3_READ_ISR;
        }
        if value & spec::OCW3_SET_SPECIAL_MASK != 0 {
            s.special_mask = (value & spec::OCW3_SPECIAL_MASK != 0) as u8;
        }
    }

    fn write_ocw2(&mut self, value: u8) -> u8 {
        let irq = value & 7;
        let next = (irq + 1) & 7;
        match value >> 5 {
            cmd @ (spec::ROTATE_IN_AUTO_EOI_CLEAR | spec::ROTATE_IN_AUTO_EOI_SET) => {
                self.state.rotate_on_auto_eoi = cmd >> 2;
                0
            }
            cmd @ (spec::EOI | spec::ROTATE_ON_EOI) => {
                let priority = self.priority(self.state.isr);
                if priority == 8 {
                    return 0;
                }
                let irq = self.input_at(priority);
                if cmd == spec::ROTATE_ON_EOI {
                    self.state.priority_add = (irq + 1) & 7;
                }
                self.end(1 << irq)
            }
            spec::SPECIFIC_EOI => self.end(1 << irq),
            spec::SET_PRIORITY => {
                self.state.priority_add = next;
                0
            }
            spec::ROTATE_ON_SPECIFIC_EOI => {
                self.state.priority_add = next;
                self.end(1 << irq)
            }
            _ => 0,
        }
    }

    const fn write_data(&mut self, value: u8) {
        let s = &mut self.state;
        match s.init_state {
            init::ICW2 => {
                s.irq_base = value & spec::ICW2_BASE;
                s.init_state = init::ICW3;
            }
            init::ICW3 => {
                s.init_state = if s.init4 != 0 {
                    init::ICW4
                } else {
                    init::READY
                };
            }
            init::ICW4 => {
                s.special_fully_nested_mode = (value & spec::ICW4_SPECIAL_FULLY_NESTED != 0) as u8;
                s.auto_eoi = (value & spec::ICW4_AUTO_EOI != 0) as u8;
                s.init_state = init::READY;
            }
            _ => s.imr = value,
        }
    }
}
