//! A split irqchip (KVM_CAP_SPLIT_IRQCHIP): PIC and IOAPIC are in the VMM. The first GSIs of the routing table stand
//! for the pins of the VMM's IOAPIC, and the EOI of a level-triggered one must be passed on to it.

use super::Irqchip;
use crate::routing::Route;
use crate::{Eoi, Lapic, LapicIrq, dest};

impl Irqchip {
    /// Yields the level-triggered messages of the VMM's IOAPIC, which has `nr_pins` pins.
    fn user_pins(&self, nr_pins: u32) -> impl Iterator<Item = LapicIrq> {
        let entries = self.routing.entries().iter();
        entries
            .take_while(move |entry| entry.gsi < nr_pins)
            .filter_map(|entry| match entry.route {
                Route::Msi(msi) => Some(msi.decode(self.x2apic_format)),
                Route::Pic(_)
                | Route::Ioapic(_)
                | Route::HvSint { .. }
                | Route::XenEvent { .. } => None,
            })
            .filter(|irq| irq.level_triggered)
    }

    /// Returns the vectors whose EOI the VMM's IOAPIC may wait for, a bit each.
    pub fn user_vectors(&self, nr_pins: u32) -> [u64; 4] {
        let mut words = [0u64; 4];
        for irq in self.user_pins(nr_pins) {
            words[usize::from(irq.vector >> 6)] |= 1 << (irq.vector & 63);
        }
        words
    }

    /// True if the VMM must be told of this end of an interrupt of `lapic`: a pin sends the vector to this LAPIC, or
    /// did so when the interrupt began. As in KVM, it makes no difference whether the guest suppresses EOI broadcasts.
    pub fn user_waits(&self, nr_pins: u32, lapic: &Lapic, eoi: Eoi) -> bool {
        self.user_pins(nr_pins)
            .any(|irq| irq.vector == eoi.vector && (eoi.level || dest::matches(lapic, &irq, None)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::{Entry, RouteRules, Routing};
    use crate::{LapicConfig, Msi};

    const SPLIT: RouteRules = RouteRules {
        split: true,
        x2apic_format: false,
    };

    fn chip(routes: &[(u32, u32, u32)]) -> Irqchip {
        let entries: Vec<_> = routes
            .iter()
            .map(|&(gsi, dest, data)| Entry {
                gsi,
                route: Route::Msi(Msi {
                    address_lo: 0xfee0_0000 | dest << 12,
                    address_hi: 0,
                    data,
                }),
            })
            .collect();
        Irqchip {
            routing: Routing::new(&entries, SPLIT).expect("good routes"),
            ..Irqchip::default()
        }
    }

    #[test]
    fn only_level_triggered_pins_below_the_limit_count() {
        let chip = chip(&[
            (1, 0, 0x8031),
            (2, 0, 0x41),
            (24, 0, 0x8051),
            (3, 1, 0x80ff),
        ]);
        assert_eq!(chip.user_vectors(24), [1 << 0x31, 0, 0, 1 << 63]);
        assert_eq!(chip.user_vectors(25), [1 << 0x31, 1 << 0x11, 0, 1 << 63]);
        assert_eq!(chip.user_vectors(0), [0; 4]);
    }

    #[test]
    fn an_eoi_is_for_the_destination_or_whoever_had_it_as_a_level() {
        let chip = chip(&[(1, 1, 0x8031)]);
        let lapic = |vcpu_id| {
            Lapic::new(LapicConfig {
                vcpu_id,
                ..LapicConfig::default()
            })
        };
        let eoi = |vector, level| Eoi {
            vector,
            level,
            broadcast: level,
            sints: 0,
        };
        for (id, vector, level, waits) in [
            (1, 0x31, true, true),
            (1, 0x31, false, true),
            (0, 0x31, true, true),
            (0, 0x31, false, false),
            (1, 0x32, true, false),
        ] {
            let row = (id, vector, level);
            assert_eq!(
                chip.user_waits(24, &lapic(id), eoi(vector, level)),
                waits,
                "{row:?}"
            );
        }
    }
}
