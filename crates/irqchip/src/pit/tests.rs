//! Behaviour of the 8254, as firmware and kernels use it.

use super::*;
use proptest::prelude::*;

fn program(pit: &mut Pit, control: u8, count: u16, now: u64) {
    pit.port_write(0x43, control, now);
    let port = 0x40 + u16::from(control >> 6);
    for byte in count.to_le_bytes() {
        pit.port_write(port, byte, now);
    }
}

fn read16(pit: &mut Pit, port: u16, now: u64) -> u16 {
    u16::from(pit.port_read(port, now)) | u16::from(pit.port_read(port, now)) << 8
}

#[test]
fn rate_generator_ticks() {
    let mut pit = Pit::new(true, 0);
    assert_eq!(pit.next_event_ns(), None);
    program(&mut pit, 0x34, 11932, 1_000);
    let first = pit.next_event_ns().unwrap();
    assert_eq!(first, 1_000 + 10_000_151);
    assert!(!pit.advance(first - 1));
    assert!(pit.advance(first));
    assert_eq!(pit.next_event_ns(), Some(first + 10_000_151));
}

#[test]
fn one_shot_expires_once() {
    let mut pit = Pit::new(true, 0);
    program(&mut pit, 0x30, 1193, 0);
    let due = pit.next_event_ns().unwrap();
    assert!(pit.advance(due + 5));
    assert_eq!(pit.next_event_ns(), None);
    assert!(!pit.advance(u64::MAX));
}

#[test]
fn unacknowledged_ticks_are_queued() {
    let mut pit = Pit::new(true, 0);
    program(&mut pit, 0x34, 11932, 0);
    let period = pit.next_event_ns().unwrap();
    assert!(pit.advance(period));
    assert!(!pit.advance(period * 2), "the first is not acknowledged");
    assert!(!pit.advance(period * 4), "two more");
    let mut reinjected = 0;
    while pit.acked() {
        reinjected += 1;
    }
    assert_eq!(reinjected, 3);
    pit.set_reinject(false);
    assert!(pit.advance(period * 5));
    assert!(pit.advance(period * 9), "not queued, not held back");
    assert!(!pit.acked());
}

#[test]
fn counts_down_and_latches() {
    let mut pit = Pit::new(true, 0);
    program(&mut pit, 0x34, 1000, 0);
    let at = |ticks: u64| (ticks * 1_000_000_000).div_ceil(1_193_182);
    for (ticks, want) in [(0, 1000), (1, 999), (999, 1), (1000, 1000), (1500, 500)] {
        assert_eq!(read16(&mut pit, 0x40, at(ticks)), want, "{ticks}");
    }
    pit.port_write(0x43, 0, at(100));
    assert_eq!(read16(&mut pit, 0x40, at(200)), 900, "latched");
    assert_eq!(read16(&mut pit, 0x40, at(200)), 800, "live again");
    program(&mut pit, 0xb0, 0xffff, 0);
    assert_eq!(read16(&mut pit, 0x42, at(0x1_0000)), 0xffff, "mode 0 wraps");
}

#[test]
fn square_wave_and_status() {
    let mut pit = Pit::new(true, 0);
    program(&mut pit, 0x36, 1000, 0);
    let at = |ticks: u64| (ticks * 1_000_000_000).div_ceil(1_193_182);
    assert_eq!(read16(&mut pit, 0x40, at(100)), 800);
    assert_eq!(read16(&mut pit, 0x40, at(600)), 800);
    pit.port_write(0x43, 0xe2, at(100));
    assert_eq!(pit.port_read(0x40, at(100)), 0x80 | 3 << 4 | 3 << 1);
    pit.port_write(0x43, 0xe2, at(600));
    assert_eq!(pit.port_read(0x40, at(600)), 3 << 4 | 3 << 1);
}

#[test]
fn bcd_counts_in_digits() {
    let mut pit = Pit::new(true, 0);
    program(&mut pit, 0x35, 0x1000, 0);
    let one = 1_000_000_000u64.div_ceil(1_193_182);
    assert_eq!(read16(&mut pit, 0x40, one), 0x0999);
    program(&mut pit, 0x35, 0, 0);
    assert_eq!(pit.save().channels[0].count, 10_000);
}

/// Linux and firmware calibrate the TSC with channel 2 in mode 0 behind port 0x61.
#[test]
fn speaker_port_shows_channel_two() {
    let mut pit = Pit::new(true, 0);
    pit.port_write(0x61, 1, 0);
    program(&mut pit, 0xb0, 59659, 0);
    assert_eq!(pit.port_read(0x61, 49_000_000) & 0x21, 1);
    assert_eq!(pit.port_read(0x61, 51_000_000) & 0x21, 0x21);
    assert_eq!(pit.port_read(0x61, 1 << 14) & 0x10, 0x10);
    pit.port_write(0x61, 2, 0);
    assert_eq!(pit.port_read(0x61, 0) & 3, 2);
    assert!(!Pit::new(false, 0).handles(0x61));
}

#[test]
fn hpet_legacy_silences_channel_zero() {
    let mut pit = Pit::new(true, 0);
    program(&mut pit, 0x34, 11932, 0);
    let mut state = pit.save();
    state.flags |= 1;
    pit.restore(&state, 7);
    assert_eq!(pit.next_event_ns(), None);
    assert_eq!(pit.save().flags, 1);
}

proptest! {
    #[test]
    fn random_sequences(ops in prop::collection::vec((0u8..3, 0u16..4, any::<u8>(), 0u64..3_000_000), 0..150)) {
        let mut pit = Pit::new(true, 0);
        let mut now = 0;
        for (kind, port, value, step) in ops {
            now += step;
            match kind {
                0 => pit.port_write(0x40 + port, value, now),
                1 => { pit.port_read(0x40 + port, now); }
                _ => { pit.port_write(0x61, value, now); pit.port_read(0x61, now); }
            }
            pit.advance(now);
            prop_assert!(pit.next_event_ns().is_none_or(|t| t > now));
            let saved = pit.save();
            let mut copy = Pit::new(true, 0);
            copy.restore(&saved, now);
            let mut expected = saved;
            for c in &mut expected.channels {
                c.count_load_time = now as i64;
            }
            prop_assert_eq!(copy.save(), expected);
        }
    }
}
