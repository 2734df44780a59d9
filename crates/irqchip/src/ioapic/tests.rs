//! Behaviour of the IOAPIC's pins.

use super::*;
use crate::line::source::{RESAMPLE, USERSPACE};
use proptest::prelude::*;

const LEVEL: u32 = 1 << 15;
const MASKED: u32 = 1 << 16;

struct Bench {
    ioapic: Ioapic,
    sent: Vec<LapicIrq>,
    answer: LineStatus,
}

impl Bench {
    fn new() -> Self {
        Self {
            ioapic: Ioapic::default(),
            sent: Vec::new(),
            answer: LineStatus::DELIVERED,
        }
    }
    fn redir(&mut self, pin: u32, low: u32, high: u32) {
        self.write(0x11 + 2 * pin, high);
        self.write(0x10 + 2 * pin, low);
    }
    fn write(&mut self, reg: u32, value: u32) {
        let (sent, answer) = (&mut self.sent, self.answer);
        let mut send = |irq: &LapicIrq| {
            sent.push(*irq);
            answer
        };
        self.ioapic.mmio_write(0, reg, &mut send);
        self.ioapic.mmio_write(0x10, value, &mut send);
    }
    fn read(&mut self, reg: u32) -> u32 {
        self.ioapic.mmio_write(0, reg, &mut |_| LineStatus::IGNORED);
        self.ioapic.mmio_read(0x10)
    }
    fn line(&mut self, pin: u8, source: u8, level: bool) -> LineStatus {
        let (sent, answer) = (&mut self.sent, self.answer);
        self.ioapic.set_irq(pin, source, level, &mut |irq| {
            sent.push(*irq);
            answer
        })
    }
    fn eoi(&mut self, vector: u8) {
        let (sent, answer) = (&mut self.sent, self.answer);
        self.ioapic.eoi(vector, &mut |irq| {
            sent.push(*irq);
            answer
        });
    }
    fn take(&mut self) -> usize {
        core::mem::take(&mut self.sent).len()
    }
}

#[test]
fn registers() {
    let mut b = Bench::new();
    assert_eq!(b.read(1), 0x0017_0011);
    b.write(0, 0xff00_0000);
    assert_eq!((b.read(0), b.read(2)), (0x0f00_0000, 0x0f00_0000));
    assert_eq!(b.read(0x10), MASKED);
    b.redir(23, 0xffff_ffff, 0xab00_0000);
    assert_eq!(b.read(0x3e), 0xffff_afff, "read-only bits stay clear");
    assert_eq!(b.read(0x3f), 0xab00_0000);
    assert_eq!(b.read(0x40), u32::MAX, "no such pin");
    assert_eq!(b.ioapic.mmio_read(0x20), 0);
}

#[test]
fn message_fields() {
    let mut b = Bench::new();
    b.redir(4, 0x41 | 1 << 8 | 1 << 11, 0x0300_0000);
    assert_eq!(b.line(4, USERSPACE, true), LineStatus::DELIVERED);
    let irq = b.sent[0];
    assert_eq!((irq.vector, irq.dest, irq.logical), (0x41, 3, true));
    assert_eq!(irq.mode, DeliveryMode::LowestPriority);
    assert!(!irq.level_triggered && irq.assert);
}

#[test]
fn edges() {
    let mut b = Bench::new();
    b.redir(4, 0x41, 0);
    b.line(4, USERSPACE, true);
    assert_eq!(b.line(4, USERSPACE, true), LineStatus::COALESCED);
    assert_eq!(b.take(), 1);
    b.line(4, USERSPACE, false);
    b.line(4, USERSPACE, true);
    assert_eq!(b.take(), 1);
    assert_eq!(b.ioapic.save().irr, 0, "sent edges are not pending");
    b.redir(4, 0x41 | MASKED, 0);
    b.line(4, USERSPACE, false);
    assert_eq!(b.line(4, USERSPACE, true), LineStatus::IGNORED);
    b.redir(4, 0x41, 0);
    assert_eq!(b.take(), 0, "KVM does not replay a masked edge");
}

#[test]
fn levels_repeat_after_eoi_only() {
    let mut b = Bench::new();
    b.redir(9, 0x51 | LEVEL, 0);
    b.line(9, USERSPACE, true);
    b.line(9, USERSPACE, true);
    assert_eq!(b.take(), 1);
    assert_eq!(b.read(0x10 + 18), 0x51 | LEVEL | 1 << 14);
    b.eoi(0x50);
    assert_eq!(b.take(), 0);
    b.eoi(0x51);
    assert_eq!(b.take(), 1, "still high");
    b.line(9, USERSPACE, false);
    b.eoi(0x51);
    assert_eq!(b.take(), 0);
    b.line(9, USERSPACE, true);
    assert_eq!(b.take(), 1);
}

#[test]
fn shared_level_line_is_an_or() {
    let mut b = Bench::new();
    b.redir(9, 0x51 | LEVEL, 0);
    b.line(9, USERSPACE, true);
    b.line(9, RESAMPLE, true);
    b.line(9, USERSPACE, false);
    b.eoi(0x51);
    assert_eq!(b.take(), 2);
    b.line(9, RESAMPLE, false);
    b.eoi(0x51);
    assert_eq!(b.take(), 0);
}

#[test]
fn unmasking_sends_a_waiting_level() {
    let mut b = Bench::new();
    b.redir(9, 0x51 | LEVEL | MASKED, 0);
    assert_eq!(b.line(9, USERSPACE, true), LineStatus::IGNORED);
    b.redir(9, 0x51 | LEVEL, 0);
    assert_eq!(b.take(), 1);
}

#[test]
fn switching_to_edge_clears_remote_irr() {
    let mut b = Bench::new();
    b.redir(9, 0x51 | LEVEL, 0);
    b.line(9, USERSPACE, true);
    b.redir(9, 0x51 | MASKED, 0);
    assert_eq!(b.read(0x22), 0x51 | MASKED);
    b.redir(9, 0x51 | LEVEL, 0);
    assert_eq!(b.take(), 2);
}

#[test]
fn a_level_nobody_takes_has_no_remote_irr() {
    let mut b = Bench::new();
    b.answer = LineStatus::IGNORED;
    b.redir(9, 0x51 | LEVEL, 0);
    b.line(9, USERSPACE, true);
    assert_eq!(b.read(0x22), 0x51 | LEVEL);
}

#[test]
fn restore_sends_what_was_pending() {
    let mut b = Bench::new();
    b.redir(9, 0x51 | LEVEL | MASKED, 0);
    b.line(9, USERSPACE, true);
    let mut state = b.ioapic.save();
    state.redirtbl[9] &= !u64::from(MASKED);
    let mut sent = 0;
    let mut other = Ioapic::default();
    other.restore(&state, &mut |_| {
        sent += 1;
        LineStatus::DELIVERED
    });
    assert_eq!(sent, 1);
    assert_eq!(other.save().irr, 1 << 9);
}

#[test]
fn state_has_the_abi_layout() {
    use kvm_bindings::kvm_ioapic_state as abi;
    assert_eq!(size_of::<IoapicState>(), size_of::<abi>());
    assert_eq!(
        core::mem::offset_of!(IoapicState, redirtbl),
        core::mem::offset_of!(abi, redirtbl)
    );
    assert_eq!(
        core::mem::offset_of!(IoapicState, irr),
        core::mem::offset_of!(abi, irr)
    );
}

proptest! {
    /// Each level pin has a model device that holds the line until it is served. No interrupt may be lost, and none may
    /// come while one is outstanding.
    #[test]
    fn level_interrupts_are_neither_lost_nor_doubled(ops in prop::collection::vec((0u8..4, 0u8..5), 0..200)) {
        let mut b = Bench::new();
        for pin in 0..4u32 {
            b.redir(pin, (0x40 + pin) | LEVEL, 0);
        }
        let (mut high, mut masked, mut outstanding) = ([false; 4], [false; 4], [0u32; 4]);
        for (pin, op) in ops {
            let p = usize::from(pin);
            let vector = 0x40 + u32::from(pin);
            match op {
                0 => { high[p] = true; b.line(pin, USERSPACE, true); }
                1 => { high[p] = false; b.line(pin, USERSPACE, false); }
                2 => { masked[p] = true; b.redir(pin.into(), vector | LEVEL | MASKED, 0); }
                3 => { masked[p] = false; b.redir(pin.into(), vector | LEVEL, 0); }
                _ => if outstanding[p] > 0 { outstanding[p] = 0; b.eoi(vector as u8); }
            }
            for irq in core::mem::take(&mut b.sent) {
                outstanding[usize::from(irq.vector - 0x40)] += 1;
            }
            for i in 0..4 {
                prop_assert!(outstanding[i] <= 1);
                prop_assert!(!high[i] || masked[i] || outstanding[i] == 1, "lost {}", i);
            }
            let mut copy = Ioapic::default();
            copy.restore(&b.ioapic.save(), &mut |_| LineStatus::IGNORED);
            prop_assert_eq!(copy.save(), b.ioapic.save());
        }
    }
}
