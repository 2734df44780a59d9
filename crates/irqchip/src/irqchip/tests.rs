//! The chips together: from a GSI to a vector and back through EOI.

use super::*;
use crate::{Accepted, Entry, Lapic, LapicConfig, Now, routing::RouteRules};

/// LAPICs that record their notifications.
struct Set {
    lapics: Vec<Lapic>,
    notified: Vec<(usize, Accepted)>,
}

impl LapicSet for Set {
    fn nr_lapics(&self) -> usize {
        self.lapics.len()
    }
    fn with<R>(&mut self, index: usize, f: impl FnOnce(&mut Lapic) -> R) -> R {
        f(&mut self.lapics[index])
    }
    fn notify(&mut self, index: usize, what: Accepted) {
        self.notified.push((index, what));
    }
}

const NS: Now = Now::from_ns(0);

/// Returns `nr` enabled xAPICs, each with its bit in a flat logical destination.
fn lapics(nr: u32) -> Set {
    let lapics = (0..nr)
        .map(|vcpu_id| {
            let mut l = Lapic::new(LapicConfig {
                vcpu_id,
                bsp: vcpu_id == 0,
                ..LapicConfig::default()
            });
            l.mmio_write(0xf0, 4, 0x1ff, NS);
            l.mmio_write(0xd0, 4, 1 << (24 + (vcpu_id & 7)), NS);
            l
        })
        .collect();
    Set {
        lapics,
        notified: Vec::new(),
    }
}

fn redir(chip: &mut Irqchip, set: &mut Set, pin: u32, low: u32, high: u32) {
    for (reg, value) in [(0x11 + 2 * pin, high), (0x10 + 2 * pin, low)] {
        for (offset, value) in [(0, reg), (0x10, value)] {
            chip.ioapic_write(set, offset, value);
        }
    }
}

fn ipi(set: &mut Set, sender: usize, low: u32, dest: u32) -> LineStatus {
    set.lapics[sender].mmio_write(0x310, 4, dest << 24, NS);
    match set.lapics[sender].mmio_write(0x300, 4, low, NS) {
        crate::Action::Ipi(irq) => deliver(set, &irq, Some(sender)),
        _ => LineStatus::IGNORED,
    }
}

#[test]
fn a_level_interrupt_from_line_to_eoi() {
    let (mut chip, mut set) = (Irqchip::new(), lapics(2));
    redir(&mut chip, &mut set, 10, 0x8051, 1 << 24);
    let status = chip.set_gsi(&mut set, 10, source::USERSPACE, true);
    assert!(status.is_delivered());
    assert_eq!(set.notified, [(1, Accepted::Interrupt)]);
    set.lapics[1].ack(0x51);
    let eoi = set.lapics[1].eoi().unwrap();
    let mut ended = Vec::new();
    chip.eoi(&mut set, eoi, |gsi| ended.push(gsi));
    assert_eq!(ended, [10]);
    assert_eq!(
        set.lapics[1].pending(),
        Some(0x51),
        "the line is still high"
    );
    chip.set_gsi(&mut set, 10, source::USERSPACE, false);
    set.lapics[1].ack(0x51);
    let eoi = set.lapics[1].eoi().unwrap();
    chip.eoi(&mut set, eoi, |_| {});
    assert_eq!(set.lapics[1].pending(), None);
}

#[test]
fn resampling_lowers_the_line_first() {
    let (mut chip, mut set) = (Irqchip::new(), lapics(1));
    redir(&mut chip, &mut set, 10, 0x8051, 0);
    chip.set_gsi(&mut set, 10, source::RESAMPLE, true);
    set.lapics[0].ack(0x51);
    let eoi = set.lapics[0].eoi().unwrap();
    chip.eoi(&mut set, eoi, |_| {});
    assert_eq!(set.lapics[0].pending(), None);
}

#[test]
fn msi_route_and_falling_edge() {
    let (mut chip, mut set) = (Irqchip::new(), lapics(3));
    let route = Route::Msi(Msi {
        address_lo: 0xfee0_2000,
        address_hi: 0,
        data: 0x61,
    });
    let rules = RouteRules {
        split: false,
        x2apic_format: false,
    };
    chip.routing = Routing::new(&[Entry { gsi: 40, route }], rules).unwrap();
    assert_eq!(
        chip.pulse_gsi(&mut set, 40, source::USERSPACE),
        LineStatus::DELIVERED
    );
    assert_eq!(set.notified, [(2, Accepted::Interrupt)]);
    assert_eq!(
        chip.set_gsi(&mut set, 41, source::USERSPACE, true),
        LineStatus::IGNORED
    );
}

#[test]
fn pit_tick_reaches_pic_and_ioapic_and_is_reinjected() {
    let (mut chip, mut set) = (Irqchip::new(), lapics(1));
    let mut pit = Pit::new(true, 0);
    for (port, value) in [(0x43, 0x34), (0x40, 0x9c), (0x40, 0x2e)] {
        pit.port_write(port, value, 0);
    }
    let period = pit.next_event_ns().unwrap();
    chip.pit = Some(pit);
    redir(&mut chip, &mut set, 0, 0x30, 0);
    for n in 1..=3 {
        chip.advance_pit(&mut set, period * n);
    }
    assert!(chip.pic.intr());
    let mut ticks = 0;
    while let Some(vector) = set.lapics[0].pending() {
        set.lapics[0].ack(vector);
        let eoi = set.lapics[0].eoi().unwrap();
        chip.eoi(&mut set, eoi, |_| {});
        ticks += 1;
    }
    assert_eq!(ticks, 3);
}

/// A kernel unmasks the timer's interrupt long after the firmware left the timer running.
#[test]
fn ticks_lost_to_a_mask_do_not_stop_the_pit() {
    let pit = || {
        let mut pit = Pit::new(true, 0);
        for (port, value) in [(0x43, 0x34), (0x40, 0x9c), (0x40, 0x2e)] {
            pit.port_write(port, value, 0);
        }
        pit
    };
    let period = pit().next_event_ns().unwrap();

    let (mut chip, mut set) = (Irqchip::new(), lapics(1));
    chip.pit = Some(pit());
    chip.advance_pit(&mut set, period);
    redir(&mut chip, &mut set, 0, 0x30, 0);
    chip.advance_pit(&mut set, 2 * period);
    assert_eq!(set.lapics[0].pending(), Some(0x30));

    let mut chip = Irqchip::new();
    for (port, value) in [
        (0x20, 0x11),
        (0x21, 0x30),
        (0x21, 4),
        (0x21, 1),
        (0x21, 0xff),
    ] {
        chip.pic_write(&mut set, port, value, |_| {});
    }
    chip.pit = Some(pit());
    chip.advance_pit(&mut set, period);
    assert!(!chip.pic.intr());
    chip.pic_write(&mut set, 0x21, 0xfe, |_| {});
    assert_eq!(chip.pic.ack(), 0x30, "the edge was latched");
    chip.pic_write(&mut set, 0x20, 0x20, |_| {});
    chip.advance_pit(&mut set, 2 * period);
    assert_eq!(chip.pic.ack(), 0x30);
    assert_eq!(chip.pic_read(&mut set, 0x21, |_| {}), 0xfe);
}

#[test]
fn ipi_destinations() {
    // Low word of the ICR, destination, receivers (the sender is 1)
    for (low, dest, want) in [
        (0x41, 2, vec![2]),
        (0x41, 0xff, vec![0, 1, 2, 3]),
        (0x41, 9, vec![]),
        (0x841, 0b0101, vec![0, 2]),
        (0x8_0041, 0, vec![0, 1, 2, 3]),
        (0xc_0041, 0, vec![0, 2, 3]),
        (0x941, 0b1100, vec![3]),
        (0x940, 0b1100, vec![2]),
        (0x141, 0xff, vec![0, 1, 2, 3]),
    ] {
        let mut set = lapics(4);
        let status = ipi(&mut set, 1, low, dest);
        let got: Vec<_> = set.notified.iter().map(|n| n.0).collect();
        assert_eq!(got, want, "{low:#x} {dest:#x}");
        assert_eq!(status.is_delivered(), !want.is_empty());
    }
}

#[test]
fn start_up_sequence() {
    let mut set = lapics(2);
    ipi(&mut set, 0, 0xc500, 1);
    ipi(&mut set, 0, 0x8500, 1);
    ipi(&mut set, 0, 0x0699, 1);
    assert_eq!(
        set.notified,
        [(1, Accepted::Init), (1, Accepted::Sipi(0x99))]
    );
}

#[test]
fn disabled_lapics_hear_nothing() {
    let mut set = lapics(2);
    set.lapics[1].set_apic_base(0xfee0_0000, false).unwrap();
    assert_eq!(ipi(&mut set, 0, 0x400, 1), LineStatus::IGNORED);
    assert!(set.notified.is_empty());
}

#[test]
fn device_broadcast_reaches_x2apics_with_the_quirk() {
    for (quirk, want) in [(true, 2), (false, 1)] {
        let mut set = lapics(2);
        let l = &mut set.lapics[1];
        l.set_config(LapicConfig {
            broadcast_quirk: quirk,
            ..*l.config()
        });
        l.set_apic_base(0xfee0_0c00, false).unwrap();
        let msi = Msi {
            address_lo: 0xfeef_f000,
            data: 0x41,
            ..Msi::default()
        };
        assert_eq!(Irqchip::new().signal_msi(&mut set, msi), LineStatus(want));
    }
}

#[test]
fn all_that_have_an_id_listen_to_it() {
    let mut set = lapics(3);
    for (index, id) in [(0, 2), (1, 7), (2, 7)] {
        let write = set.lapics[index].mmio_write(0x20, 4, id << 24, NS);
        assert_eq!(write, crate::Action::Renumbered);
    }
    for (dest, expected) in [(7, vec![1, 2]), (2, vec![0]), (1, vec![])] {
        set.notified.clear();
        ipi(&mut set, 0, 0x51, dest);
        let who: Vec<usize> = set.notified.iter().map(|n| n.0).collect();
        assert_eq!(who, expected, "{dest}");
        for lapic in &mut set.lapics {
            lapic.ack(0x51);
            lapic.eoi();
        }
    }
}
