//! Behaviour of the 8259A pair, as a PC's firmware and kernels use it.

use super::*;
use crate::line::source::USERSPACE;
use proptest::prelude::*;

/// Linux's `init_8259A`: vectors 0x30 and 0x38, nothing masked.
fn linux(auto_eoi: bool) -> Pic {
    let mut pic = Pic::default();
    let icw4 = if auto_eoi { 3 } else { 1 };
    for (port, value) in [
        (0x20, 0x11),
        (0x21, 0x30),
        (0x21, 4),
        (0x21, icw4),
        (0xa0, 0x11),
        (0xa1, 0x38),
        (0xa1, 2),
        (0xa1, 1),
        (0x21, 0),
        (0xa1, 0),
    ] {
        pic.port_write(port, value);
    }
    pic
}

fn pulse(pic: &mut Pic, pin: u8) {
    pic.set_irq(pin, USERSPACE, true);
    pic.set_irq(pin, USERSPACE, false);
}

#[test]
fn vectors_of_all_inputs() {
    for pin in (0..16).filter(|&p| p != 2) {
        let mut pic = linux(false);
        pulse(&mut pic, pin);
        assert!(pic.intr(), "pin {pin}");
        assert_eq!(pic.ack(), 0x30 + pin);
        assert!(!pic.intr());
        if pin >= 8 {
            pic.port_write(0xa0, 0x60 | (pin & 7));
            pic.port_write(0x20, 0x62);
            assert_eq!(pic.take_acked() & !4, 1 << pin);
        } else {
            pic.port_write(0x20, 0x60 | pin);
            assert_eq!(pic.take_acked(), 1 << pin);
        }
        assert_eq!((pic.save(false).isr, pic.save(true).isr), (0, 0));
    }
}

#[test]
fn lower_priority_waits_for_eoi() {
    let mut pic = linux(false);
    pulse(&mut pic, 3);
    assert_eq!(pic.ack(), 0x33);
    pulse(&mut pic, 4);
    assert!(!pic.intr());
    pulse(&mut pic, 1);
    assert!(pic.intr());
    assert_eq!(pic.ack(), 0x31);
    pic.port_write(0x20, 0x20);
    assert!(!pic.intr());
    pic.port_write(0x20, 0x20);
    assert_eq!(pic.ack(), 0x34);
}

#[test]
fn masked_edges_are_remembered() {
    let mut pic = linux(false);
    pic.port_write(0x21, 0xff);
    assert_eq!(pic.set_irq(5, USERSPACE, true), LineStatus::IGNORED);
    assert!(!pic.intr());
    assert_eq!(pic.port_read(0x20), 1 << 5);
    pic.port_write(0x21, 0);
    assert_eq!(pic.ack(), 0x35);
}

#[test]
fn level_inputs_follow_the_line() {
    let mut pic = linux(false);
    pic.port_write(0x4d1, 0xff);
    assert_eq!(pic.port_read(0x4d1), 0xde);
    pic.set_irq(11, USERSPACE, true);
    assert_eq!(pic.ack(), 0x3b);
    pic.port_write(0xa0, 0x20);
    pic.port_write(0x20, 0x20);
    assert_eq!(pic.ack(), 0x3b, "still driven");
    pic.set_irq(11, USERSPACE, false);
    pic.port_write(0xa0, 0x20);
    pic.port_write(0x20, 0x20);
    assert_eq!(pic.save(true).irr, 0);
}

#[test]
fn spurious_interrupts_are_not_in_service() {
    let mut pic = linux(false);
    assert_eq!(pic.ack(), 0x37);
    assert_eq!(pic.save(false).isr, 0);
    pic.port_write(0x4d1, 0x08);
    pic.set_irq(11, USERSPACE, true);
    pic.set_irq(11, USERSPACE, false);
    assert_eq!(
        pic.ack(),
        0x3f,
        "the cascade was latched, the slave's request is gone"
    );
    assert_eq!(pic.save(true).isr, 0);
}

#[test]
fn auto_eoi_and_rotation() {
    let mut pic = linux(true);
    pulse(&mut pic, 3);
    assert_eq!(pic.ack(), 0x33);
    assert_eq!(pic.save(false).isr, 0);
    pic.port_write(0x20, 0x80);
    pulse(&mut pic, 4);
    pic.ack();
    assert_eq!(pic.save(false).priority_add, 5);
    pulse(&mut pic, 0);
    pulse(&mut pic, 6);
    assert_eq!(pic.ack(), 0x36, "input 5 has the highest priority now");
}

#[test]
fn rotate_on_eoi() {
    let mut pic = linux(false);
    pulse(&mut pic, 0);
    pic.ack();
    pic.port_write(0x20, 0xa0);
    pulse(&mut pic, 0);
    pulse(&mut pic, 1);
    assert_eq!(pic.ack(), 0x31);
}

#[test]
fn poll_returns_and_ends() {
    let mut pic = linux(false);
    pulse(&mut pic, 6);
    pic.port_write(0x20, 0x0c);
    assert_eq!(pic.port_read(0x20), 0x86);
    assert!(!pic.intr());
    pic.port_write(0x20, 0x0c);
    assert_eq!(pic.port_read(0x20), 7);
}

#[test]
fn special_fully_nested_lets_the_slave_through() {
    let mut pic = linux(false);
    for (port, value) in [(0x20, 0x11), (0x21, 0x30), (0x21, 4), (0x21, 0x11)] {
        pic.port_write(port, value);
    }
    pulse(&mut pic, 12);
    assert_eq!(pic.ack(), 0x3c);
    pulse(&mut pic, 9);
    assert_eq!(pic.ack(), 0x39);
}

#[test]
fn sources_of_a_line_are_ored() {
    let mut pic = linux(false);
    pic.port_write(0x4d1, 0x08);
    pic.set_irq(11, 0, true);
    pic.set_irq(11, 1, true);
    pic.set_irq(11, 0, false);
    assert!(pic.intr());
    pic.set_irq(11, 1, false);
    assert_eq!(pic.save(true).irr, 0);
}

/// Firmware that reads what is readable and writes anything.
#[derive(Clone, Debug)]
enum Op {
    Line(u8, bool),
    Ack,
    Write(u16, u8),
    Read(u16),
}

fn op() -> impl Strategy<Value = Op> {
    let port = prop::sample::select(vec![0x20u16, 0x21, 0xa0, 0xa1, 0x4d0, 0x4d1]);
    prop_oneof![
        // Input 2 is the cascade, which no device drives.
        4 => ((0..16u8).prop_filter("cascade", |&p| p != 2), any::<bool>())
            .prop_map(|(p, l)| Op::Line(p, l)),
        2 => Just(Op::Ack),
        2 => (port.clone(), any::<u8>()).prop_map(|(p, v)| Op::Write(p, v)),
        1 => port.prop_map(Op::Read),
    ]
}

proptest! {
    #[test]
    fn random_sequences(ops in prop::collection::vec(op(), 0..200)) {
        let mut pic = linux(false);
        for op in ops {
            match op {
                Op::Line(p, l) => { pic.set_irq(p, USERSPACE, l); }
                Op::Ack => {
                    let before = (pic.save(false).isr, pic.save(true).isr);
                    let intr = pic.intr();
                    pic.ack();
                    if !intr {
                        prop_assert_eq!(before, (pic.save(false).isr, pic.save(true).isr));
                    }
                }
                Op::Write(p, v) => pic.port_write(p, v),
                Op::Read(p) => { pic.port_read(p); }
            }
            let (m, s) = (pic.save(false), pic.save(true));
            // Without INTR nothing unmasked is requested, unless something is in service.
            if m.isr == 0 && m.irr & !m.imr != 0 {
                prop_assert!(pic.intr());
            }
            if m.irr & !m.imr == 0 {
                prop_assert!(!pic.intr());
            }
            let mut copy = Pic::default();
            copy.restore(true, &s);
            copy.restore(false, &m);
            prop_assert_eq!(copy.save(false), m);
            prop_assert_eq!(copy.intr(), pic.intr());
        }
    }
}
