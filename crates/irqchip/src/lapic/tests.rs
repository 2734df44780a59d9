//! Behaviour of the LAPIC: registers, modes, priorities, IPIs, timer.

use super::*;
use crate::{Now, Shorthand};
use proptest::prelude::*;

const NS: Now = Now::from_ns(0);

fn at(ns: u64) -> Now {
    Now::from_ns(ns)
}

/// Returns a software-enabled LAPIC in xAPIC mode.
fn lapic(vcpu_id: u32) -> Lapic {
    let mut l = Lapic::new(LapicConfig {
        vcpu_id,
        bsp: vcpu_id == 0,
        ..LapicConfig::default()
    });
    l.mmio_write(0xf0, 4, 0x1ff, NS);
    l
}

fn x2apic(vcpu_id: u32) -> Lapic {
    let mut l = lapic(vcpu_id);
    l.set_apic_base(l.apic_base() | apic_base::EXTD, false)
        .unwrap();
    l
}

fn read(l: &Lapic, offset: u64) -> u32 {
    l.mmio_read(offset, 4, NS).unwrap() as u32
}

#[test]
fn reset_state_is_kvms() {
    let bsp = Lapic::new(LapicConfig::default());
    for (offset, want) in [
        (0x20, 0),
        (0x30, 0x0005_0014),
        (0xe0, u32::MAX),
        (0xf0, 0xff),
        (0x320, 0x1_0000),
        (0x330, 0x1_0000),
        (0x340, 0x1_0000),
        (0x350, 0x700),
        (0x360, 0x1_0000),
        (0x370, 0x1_0000),
        (0x380, 0),
        (0x390, 0),
    ] {
        assert_eq!(read(&bsp, offset), want, "{offset:#x}");
    }
    assert_eq!(bsp.apic_base(), 0xfee0_0900);
    assert!(bsp.accepts_pic());
    let ap = Lapic::new(LapicConfig {
        vcpu_id: 3,
        bsp: false,
        ..LapicConfig::default()
    });
    assert_eq!((read(&ap, 0x20), read(&ap, 0x350)), (3 << 24, 0x1_0000));
    assert_eq!(ap.apic_base(), 0xfee0_0800);
    assert!(!ap.accepts_pic());
}

#[test]
fn mode_transitions() {
    const D: u64 = 0xfee0_0000;
    const X: u64 = D | 0x800;
    const X2: u64 = D | 0xc00;
    for (from, to, ok) in [
        (X, D, true),
        (X, X2, true),
        (X2, D, true),
        (X2, X, false),
        (D, X2, false),
        (D, X, true),
        (X, D | 0x400, false),
        (X, X | 1, false),
        (X, X | 1 << 9, false),
        (X, X | 1 << 46, false),
        (X, X | 1 << 45, true),
    ] {
        let mut l = lapic(1);
        l.set_apic_base(from, true).unwrap();
        assert_eq!(l.set_apic_base(to, false).is_ok(), ok, "{from:#x} {to:#x}");
    }
    // From x2APIC mode the VMM may return directly, and the id is then an xAPIC's again.
    let mut l = lapic(1);
    for (base, id) in [(X2, 1), (X, 1 << 24)] {
        l.set_apic_base(base, true).unwrap();
        assert_eq!((l.id(), l.save(NS, true).reg(2)), (1, id));
    }
    let mut l = lapic(1);
    l.set_config(LapicConfig {
        x2apic: false,
        ..*l.config()
    });
    assert_eq!(l.set_apic_base(X2, true), Err(InvalidAccess));
}

#[test]
fn mmio_is_a_hole_when_disabled_or_x2apic() {
    let mut l = x2apic(0);
    assert_eq!(l.mmio_read(0x30, 4, NS), None);
    assert_eq!(l.mmio_write(0x80, 4, 0xff, NS), Action::None);
    assert_eq!(l.tpr(), 0);
    assert!(lapic(0).msr_read(0x803, NS).is_err());
}

#[test]
fn narrow_mmio() {
    let mut l = lapic(0);
    assert_eq!(l.mmio_read(0x30, 1, NS), Some(0x14));
    assert_eq!(l.mmio_read(0x32, 2, NS), Some(5));
    assert_eq!(l.mmio_read(0x32, 4, NS), Some(0), "crosses a word");
    l.mmio_write(0x80, 1, 0xff, NS);
    l.mmio_write(0x81, 4, 0xff, NS);
    assert_eq!(l.tpr(), 0);
    l.mmio_write(0x3f0, 4, 0x44, NS);
    assert_eq!(l.highest_irr(), None, "no self-IPI register in xAPIC mode");
}

#[test]
fn x2apic_msrs() {
    let mut l = x2apic(0x123);
    assert_eq!(l.msr_read(0x802, NS), Ok(0x123));
    assert_eq!(l.msr_read(0x80d, NS), Ok(0x0012_0008));
    for (index, ok) in [
        (0x803, true),
        (0x80a, true),
        (0x80b, false),
        (0x80e, false),
        (0x82f, false),
        (0x830, true),
        (0x831, false),
        (0x83f, false),
        (0x840, false),
        (0x8ff, false),
    ] {
        assert_eq!(l.msr_read(index, NS).is_ok(), ok, "{index:#x}");
    }
    for (index, value, ok) in [
        (0x802, 0, false),
        (0x803, 0, false),
        (0x808, 0x20, true),
        (0x808, 1 << 32, false),
        (0x80d, 0, false),
        (0x828, 0, true),
        (0x828, 1, false),
        (0x830, 1 << 13, false),
        (0x830, 1 << 20, false),
        (0x83f, 0x100, false),
        (0x83f, 0x45, true),
    ] {
        assert_eq!(l.msr_write(index, value, NS).is_ok(), ok, "{index:#x}");
    }
    assert_eq!(l.pending(), Some(0x45));
}

#[test]
fn icr_forms() {
    let mut l = lapic(0);
    l.mmio_write(0x310, 4, 0x0500_0000, NS);
    let Action::Ipi(irq) = l.mmio_write(0x300, 4, 0xc500 | 1 << 12, NS) else {
        panic!()
    };
    assert_eq!(
        (irq.dest, irq.mode, irq.assert, irq.level_triggered),
        (5, DeliveryMode::Init, true, true)
    );
    assert_eq!(read(&l, 0x300), 0xc500, "never busy");
    let mut l = x2apic(7);
    let Ok(Action::Ipi(irq)) = l.msr_write(0x830, 0x1234_5678_0000_0841, NS) else {
        panic!()
    };
    assert_eq!(
        (irq.dest, irq.logical, irq.vector),
        (0x1234_5678, true, 0x41)
    );
    assert_eq!(l.msr_read(0x830, NS), Ok(0x1234_5678_0000_0841));
    for (bits, want) in [
        (0u64, Shorthand::None),
        (2, Shorthand::All),
        (3, Shorthand::Others),
    ] {
        let Ok(Action::Ipi(irq)) = l.msr_write(0x830, bits << 18 | 0x41, NS) else {
            panic!()
        };
        assert_eq!(irq.shorthand, want);
    }
    assert_eq!(l.msr_write(0x830, 1 << 18 | 0x41, NS), Ok(Action::Recheck));
    assert_eq!(l.highest_irr(), Some(0x41));
}

#[test]
fn priorities() {
    // TPR, in service, requested → PPR, delivered
    for (tpr, isr, irr, ppr, delivered) in [
        (0x00, None, 0x31, 0x00, true),
        (0x2f, None, 0x31, 0x2f, true),
        (0x30, None, 0x3f, 0x30, false),
        (0x00, Some(0x35), 0x3f, 0x30, false),
        (0x00, Some(0x35), 0x40, 0x30, true),
        (0x3c, Some(0x35), 0x40, 0x3c, true),
        (0x4c, Some(0x35), 0x40, 0x4c, false),
        (0xff, None, 0xff, 0xff, false),
        (0x00, None, 0x10, 0x00, true),
        (0x00, None, 0x0f, 0x00, false),
    ] {
        let mut l = lapic(0);
        if let Some(v) = isr {
            l.set_irq(v, false);
            l.ack(v);
        }
        l.mmio_write(0x80, 4, tpr, NS);
        l.set_irq(irr, false);
        assert_eq!(read(&l, 0xa0), ppr, "{tpr:#x} {isr:?}");
        assert_eq!(
            l.pending().is_some(),
            delivered,
            "{tpr:#x} {isr:?} {irr:#x}"
        );
    }
}

#[test]
fn accept_ack_eoi() {
    let mut l = lapic(0);
    assert!(l.set_irq(0x41, true));
    assert!(!l.set_irq(0x41, true));
    assert_eq!(l.pending(), Some(0x41));
    l.ack(0x41);
    assert_eq!((l.pending(), l.highest_isr()), (None, Some(0x41)));
    assert!(l.set_irq(0x41, true), "again while in service");
    let eoi = Eoi {
        vector: 0x41,
        level: true,
        broadcast: true,
        sints: 0,
    };
    assert_eq!(l.mmio_write(0xb0, 4, 0, NS), Action::Eoi(eoi));
    assert_eq!(l.pending(), Some(0x41));
    l.ack(0x41);
    l.eoi();
    assert_eq!(l.mmio_write(0xb0, 4, 0, NS), Action::None);
}

#[test]
fn directed_eoi_suppresses_the_broadcast() {
    let mut l = lapic(0);
    l.mmio_write(0xf0, 4, 0x11ff, NS);
    assert_eq!(read(&l, 0xf0), 0x1ff, "not offered");
    l.set_config(LapicConfig {
        directed_eoi: true,
        ..*l.config()
    });
    assert_eq!(read(&l, 0x30), 0x0105_0014);
    l.mmio_write(0xf0, 4, 0x11ff, NS);
    l.set_irq(0x41, true);
    l.ack(0x41);
    let eoi = l.eoi().unwrap();
    assert!(eoi.level && !eoi.broadcast);
}

#[test]
fn software_disable_masks_and_refuses() {
    let mut l = lapic(0);
    l.mmio_write(0x350, 4, 0x700, NS);
    l.set_irq(0x41, false);
    l.mmio_write(0xf0, 4, 0xff, NS);
    assert_eq!(read(&l, 0x350), 0x1_0700);
    l.mmio_write(0x350, 4, 0x700, NS);
    assert_eq!(read(&l, 0x350), 0x1_0700, "cannot be unmasked");
    let irq = Msi41.into_irq();
    assert_eq!(l.accept(&irq), Accepted::Ignored);
    assert_eq!(
        l.accept(&LapicIrq {
            mode: DeliveryMode::Nmi,
            ..irq
        }),
        Accepted::Nmi
    );
    assert_eq!(l.pending(), Some(0x41), "what was accepted stays");
}

/// A fixed message with vector 0x41.
struct Msi41;
impl Msi41 {
    fn into_irq(self) -> LapicIrq {
        crate::Msi {
            data: 0x41,
            ..crate::Msi::default()
        }
        .decode(false)
    }
}

#[test]
fn events() {
    let mut l = lapic(0);
    let irq = Msi41.into_irq();
    for (mode, want) in [
        (DeliveryMode::Fixed, Accepted::Interrupt),
        (DeliveryMode::LowestPriority, Accepted::Coalesced),
        (DeliveryMode::Smi, Accepted::Smi),
        (DeliveryMode::RemoteRead, Accepted::Unhalt),
        (DeliveryMode::Nmi, Accepted::Nmi),
        (DeliveryMode::Init, Accepted::Init),
        (DeliveryMode::Sipi, Accepted::Sipi(0x41)),
        (DeliveryMode::ExtInt, Accepted::Ignored),
    ] {
        assert_eq!(l.accept(&LapicIrq { mode, ..irq }), want, "{mode:?}");
    }
    let deassert = LapicIrq {
        mode: DeliveryMode::Init,
        level_triggered: true,
        assert: false,
        ..irq
    };
    assert_eq!(l.accept(&deassert), Accepted::Ignored);
}

#[test]
fn lvt_pmc_masks_itself() {
    let mut l = lapic(0);
    l.mmio_write(0x340, 4, 0x400, NS);
    assert_eq!(l.local(LocalSource::Pmc), Accepted::Nmi);
    assert_eq!(read(&l, 0x340), 0x1_0400);
    assert_eq!(l.local(LocalSource::Pmc), Accepted::Ignored);
    l.mmio_write(0x370, 4, u32::MAX, NS);
    assert_eq!(read(&l, 0x370), 0x1_10ff);
}

#[test]
fn one_shot_timer() {
    let mut l = lapic(0);
    l.mmio_write(0x3e0, 4, 0b1011, NS);
    l.mmio_write(0x320, 4, 0x40, NS);
    assert_eq!(l.mmio_write(0x380, 4, 1000, at(50)), Action::Timer);
    assert_eq!(l.timer_deadline(at(50)), Some(1050));
    assert_eq!(l.mmio_read(0x390, 4, at(300)), Some(750));
    assert_eq!(l.timer_fire(at(1049)), Accepted::Ignored);
    assert_eq!(l.timer_fire(at(1050)), Accepted::Interrupt);
    assert_eq!(l.timer_deadline(at(1050)), None);
    assert_eq!(l.mmio_read(0x390, 4, at(1051)), Some(0));
    assert_eq!(l.pending(), Some(0x40));
}

#[test]
fn divider_scales_the_timer() {
    for (tdcr, divide) in [
        (0, 2),
        (1, 4),
        (2, 8),
        (3, 16),
        (8, 32),
        (9, 64),
        (10, 128),
        (11, 1),
    ] {
        let mut l = lapic(0);
        l.mmio_write(0x3e0, 4, tdcr, NS);
        l.mmio_write(0x380, 4, 1000, NS);
        assert_eq!(l.timer_deadline(NS), Some(1000 * divide), "{tdcr}");
        assert_eq!(l.mmio_read(0x390, 4, at(400 * divide)), Some(600));
    }
    let mut l = lapic(0);
    l.mmio_write(0x380, 4, 1000, NS);
    l.mmio_write(0x3e0, 4, 1, at(1000));
    assert_eq!(l.timer_deadline(NS), Some(1000 + 500 * 4));
}

#[test]
fn periodic_timer_coalesces_missed_periods() {
    let mut l = lapic(0);
    l.mmio_write(0x3e0, 4, 0b1011, NS);
    l.mmio_write(0x320, 4, 0x40 | 1 << 17, NS);
    l.mmio_write(0x380, 4, 1_000_000, NS);
    assert_eq!(l.timer_fire(at(3_500_000)), Accepted::Interrupt);
    assert_eq!(l.timer_deadline(NS), Some(4_000_000));
    l.mmio_write(0x380, 4, 10, at(0));
    assert_eq!(l.timer_deadline(NS), Some(200_000), "KVM's shortest period");
    l.mmio_write(0x380, 4, 0, at(0));
    assert_eq!(l.timer_deadline(NS), None);
}

#[test]
fn tsc_deadline_timer() {
    let now = |tsc: u64| Now {
        ns: tsc / 2,
        tsc,
        tsc_khz: 2_000_000,
    };
    let mut l = lapic(0);
    assert_eq!(l.set_tsc_deadline(500), Action::None, "wrong mode");
    l.mmio_write(0x320, 4, 0x40 | 2 << 17, NS);
    l.mmio_write(0x380, 4, 77, NS);
    assert_eq!(read(&l, 0x380), 0, "no initial count in this mode");
    assert_eq!(l.set_tsc_deadline(5000), Action::Timer);
    assert_eq!(l.timer_deadline(now(1000)), Some(2500));
    assert_eq!(l.timer_fire(now(4999)), Accepted::Ignored);
    assert_eq!(l.tsc_deadline(), 5000);
    assert_eq!(l.timer_fire(now(5000)), Accepted::Interrupt);
    assert_eq!((l.tsc_deadline(), l.timer_deadline(now(5000))), (0, None));
    l.set_tsc_deadline(9000);
    l.mmio_write(0x320, 4, 0x40, NS);
    assert_eq!(l.tsc_deadline(), 0, "leaving the mode disarms");
}

#[test]
fn masked_timer_expires_silently() {
    let mut l = lapic(0);
    l.mmio_write(0x320, 4, 0x1_0040, NS);
    l.mmio_write(0x380, 4, 10, NS);
    assert_eq!(l.timer_fire(at(1000)), Accepted::Ignored);
    assert_eq!((l.highest_irr(), l.timer_deadline(NS)), (None, None));
}

#[test]
fn logical_destinations() {
    // DFR, LDR, destination, matches
    for (dfr, ldr, dest, want) in [
        (0xf, 0x02, 0x02, true),
        (0xf, 0x02, 0x03, true),
        (0xf, 0x02, 0x01, false),
        (0xf, 0x00, 0xff, true),
        (0x0, 0x21, 0x21, true),
        (0x0, 0x21, 0x23, true),
        (0x0, 0x21, 0x31, false),
        (0x0, 0x21, 0x22, false),
        (0x5, 0x21, 0x21, false),
    ] {
        let mut l = lapic(1);
        l.mmio_write(0xe0, 4, dfr << 28, NS);
        l.mmio_write(0xd0, 4, ldr << 24, NS);
        assert_eq!(l.matches_logical(dest), want, "{dfr:#x} {ldr:#x} {dest:#x}");
    }
    let l = x2apic(0x25);
    for (dest, want) in [
        (0x0002_0020, true),
        (0x0002_ffff, true),
        (0x0002_0001, false),
        (0x0001_0020, false),
        (0xffff_ffff, true),
        (0xff, false),
    ] {
        assert_eq!(l.matches_logical(dest), want, "{dest:#x}");
    }
}

#[test]
fn physical_destinations() {
    assert!(lapic(3).matches_physical(3) && lapic(3).matches_physical(0xff));
    assert!(!lapic(3).matches_physical(4) && !lapic(3).matches_physical(0xffff_ffff));
    assert!(x2apic(0x103).matches_physical(0x103) && !x2apic(0x103).matches_physical(3));
    assert!(x2apic(3).matches_physical(0xffff_ffff) && !x2apic(3).matches_physical(0xff));
    assert!(lapic(0x103).matches_physical(0x103), "before x2APIC is on");
}

#[test]
fn init_keeps_id_and_mode() {
    let mut l = x2apic(5);
    l.set_irq(0x41, true);
    l.init();
    assert!(l.is_x2apic());
    assert_eq!((l.id(), l.highest_irr()), (5, None));
    assert_eq!(l.msr_read(0x80d, NS), Ok(1 << 5));
}

#[test]
fn pv_eoi_only_when_nobody_waits() {
    let mut l = lapic(0);
    l.set_irq(0x41, false);
    l.ack(0x41);
    assert_eq!(l.pv_eoi_candidate(|_| false), Some(0x41));
    assert_eq!(l.pv_eoi_candidate(|v| v == 0x41), None);
    l.set_irq(0x31, false);
    assert_eq!(l.pv_eoi_candidate(|_| false), None, "another is requested");
}

#[test]
fn ids_in_saved_state() {
    for (mut l, wide, want) in [
        (lapic(3), false, 3 << 24),
        (lapic(3), true, 3 << 24),
        (x2apic(3), false, 3 << 24),
        (x2apic(0x103), true, 0x103),
    ] {
        let mut state = l.save(NS, wide);
        assert_eq!(state.reg(2), want);
        let before = l.clone();
        l.restore(&state, NS, wide).unwrap();
        assert_eq!(l, before);
        if !wide && l.is_x2apic() {
            state.regs[0x23] ^= 1;
            l.restore(&state, NS, wide).unwrap();
            assert_eq!(l, before);
            state.regs[0x23] ^= 1;
        }
        if wide && l.is_x2apic() {
            state.regs[0x20] ^= 1;
            let error = l.restore(&state, NS, wide).unwrap_err();
            assert_eq!((error.found, error.expected), (0x102, 0x103));
            assert_eq!(l, before);
        }
    }
    assert_eq!(
        size_of::<LapicState>(),
        size_of::<kvm_bindings::kvm_lapic_state>()
    );
}

#[test]
fn a_restored_timer_without_a_current_count_fires_at_once_or_begins_a_period() {
    for (periodic, wait) in [(0, 0), (1 << 17, 1_000_000)] {
        let mut l = lapic(0);
        l.mmio_write(0x3e0, 4, 0b1011, NS);
        l.mmio_write(0x320, 4, 0x40 | periodic, NS);
        l.mmio_write(0x380, 4, 1_000_000, NS);
        let mut state = l.save(NS, false);
        state.set_reg(0x39, 0);
        let mut other = lapic(0);
        other.restore(&state, at(5_000_000), false).unwrap();
        assert_eq!(other.timer_deadline(NS), Some(5_000_000 + wait));
    }
}

#[test]
fn saved_timer_goes_on() {
    let mut l = lapic(0);
    l.mmio_write(0x3e0, 4, 0b1011, NS);
    l.mmio_write(0x320, 4, 0x40 | 1 << 17, NS);
    l.mmio_write(0x380, 4, 1_000_000, at(0));
    let state = l.save(at(400_000), false);
    assert_eq!(state.reg(0x39), 600_000);
    let mut other = lapic(0);
    other.restore(&state, at(5_000_000), false).unwrap();
    assert_eq!(other.timer_deadline(NS), Some(5_600_000));
}

#[derive(Clone, Debug)]
enum Op {
    Irq(u8, bool),
    Take,
    Eoi,
    Write(u64, u32),
    Advance(u32),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (any::<u8>(), any::<bool>()).prop_map(|(v, l)| Op::Irq(v, l)),
        4 => Just(Op::Take),
        2 => Just(Op::Eoi),
        1 => (0u64..0x100, any::<u32>()).prop_map(|(r, v)| Op::Write(r * 16, v)),
        1 => any::<u32>().prop_map(Op::Advance),
    ]
}

proptest! {
    /// Compares with a model of sets: no interrupt is lost, none comes twice, and the classes of those in service
    /// ascend.
    #[test]
    fn interrupts_are_neither_lost_nor_doubled(ops in prop::collection::vec(op(), 0..300)) {
        let mut l = lapic(0);
        let (mut requested, mut in_service) = ([false; 256], Vec::<u8>::new());
        let mut now = NS;
        for op in ops {
            match op {
                Op::Irq(v, level) => {
                    let newly = l.set_irq(v, level);
                    prop_assert_eq!(newly, !requested[usize::from(v)]);
                    requested[usize::from(v)] = true;
                }
                Op::Take => if let Some(v) = l.pending() {
                    prop_assert!(requested[usize::from(v)]);
                    requested[usize::from(v)] = false;
                    if let Some(&top) = in_service.last() {
                        prop_assert!(top >> 4 < v >> 4);
                    }
                    l.ack(v);
                    in_service.push(v);
                },
                Op::Eoi => prop_assert_eq!(l.eoi().map(|e| e.vector), in_service.pop()),
                // Writes of EOI and ICR would change the model; those of TPR, LVTs, timer and invalid registers do not.
                Op::Write(0xb0 | 0x300, _) => {}
                Op::Write(offset, value) => { l.mmio_write(offset, 4, value, now); }
                Op::Advance(ns) => {
                    now.ns += u64::from(ns);
                    if l.timer_fire(now) == Accepted::Interrupt {
                        let v = read(&l, 0x320) as u8;
                        requested[usize::from(v)] = true;
                    }
                    if l.tsc_deadline() == 0 {
                        prop_assert!(l.timer_deadline(now).is_none_or(|t| t > now.ns));
                    }
                }
            }
            prop_assert_eq!(l.highest_irr(), (0..=255u8).rev().find(|&v| requested[usize::from(v)]));
            prop_assert_eq!(l.highest_isr(), in_service.last().copied());
            let isrv = in_service.last().copied().unwrap_or(0);
            prop_assert_eq!(l.ppr() & 0xf0, (l.tpr() & 0xf0).max(isrv & 0xf0));
            let mut copy = lapic(0);
            let saved = l.save(now, false);
            copy.restore(&saved, now, false).unwrap();
            let mut again = copy.save(now, false);
            if saved.reg(0x39) == 0 {
                // A new period has begun, or the timer fires.
                again.set_reg(0x39, 0);
            }
            prop_assert_eq!(again, saved);
            prop_assert_eq!(copy.pending(), l.pending());
        }
    }
}
