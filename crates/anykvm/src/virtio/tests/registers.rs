//! Tests of configuration space, common configuration and interrupts.

use super::block::Image;
use super::{BUFFER, Driver, FEATURES_OK, QUEUE_LEN, WRITE, rings};
use crate::pci::Function;
use crate::virtio::Rng;

fn config32(driver: &Driver, at: u16) -> u32 {
    let mut data = [0; 4];
    driver.device.read_config(at, &mut data);
    u32::from_le_bytes(data)
}

/// Returns the capabilities as (offset, id, virtio type).
fn capabilities(driver: &Driver) -> Vec<(u16, u8, u8)> {
    let mut at = config32(driver, 0x34) as u16 & 0xff;
    let mut found = Vec::new();
    while at != 0 && found.len() < 20 {
        let [id, next, _, kind] = config32(driver, at).to_le_bytes();
        found.push((at, id, kind));
        at = u16::from(next);
    }
    found
}

#[test]
fn discovery() {
    let image = Image::new("discovery");
    let driver = Driver::new(image.backend(false));
    assert_eq!(config32(&driver, 0), 0x1042_1af4);
    assert_eq!(config32(&driver, 8), 0x0180_0001);
    let found = capabilities(&driver);
    let ids: Vec<u8> = found.iter().map(|(_, id, _)| *id).collect();
    assert_eq!(ids, [0x11, 9, 9, 9, 9, 9]);
    let mut kinds: Vec<u8> = found.iter().skip(1).map(|(.., kind)| *kind).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, [1, 2, 3, 4, 5]);
    // There are two vectors. Table and pending bits do not overlap.
    assert_eq!(config32(&driver, found[0].0) >> 16, 1);
    assert_eq!(driver.device.window(), Some((0xc001_0000, 0x1_0000)));
}

#[test]
fn features_must_be_a_subset_with_version_1() {
    let driver = Driver::new(Box::new(Rng));
    for (features, is_fine) in [
        (1u64 << 32, true),
        ((1 << 32) | (1 << 28) | (1 << 29), true),
        (0, false),
        (1 << 28, false),
        ((1 << 32) | 1, false),
        ((1 << 32) | (1 << 63), false),
    ] {
        driver.negotiate(features);
        let accepted = driver.status() & FEATURES_OK != 0;
        assert_eq!(accepted, is_fine, "{features:#x}");
        if !is_fine {
            driver.set_status(0xf);
            driver.notify(0);
        }
    }
}

#[test]
fn registers_read_back_within_their_limits() {
    let driver = Driver::new(Box::new(Rng));
    driver.negotiate(1 << 32);
    let read16 = |at| u16::from_le_bytes(driver.read(at));
    assert_eq!(read16(18), 1, "queues");
    assert_eq!(read16(24), 64, "largest size");
    for (size, want) in [(16u16, 16), (17, 16), (0, 16), (128, 16), (32, 32)] {
        driver.write(24, &size.to_le_bytes());
        assert_eq!(read16(24), want, "{size}");
    }
    for (vector, want) in [(0u16, 0u16), (1, 1), (2, 0xffff), (0xffff, 0xffff)] {
        driver.write(16, &vector.to_le_bytes());
        driver.write(26, &vector.to_le_bytes());
        assert_eq!((read16(16), read16(26)), (want, want), "{vector}");
    }
    driver.write(32, &0x1122_3344_5566_7788u64.to_le_bytes());
    assert_eq!(driver.read(32), 0x1122_3344_5566_7788u64.to_le_bytes());
    driver.write(28, &1u16.to_le_bytes());
    driver.write(36, &[0; 4]);
    assert_eq!(driver.read(36), 0x1122_3344u32.to_le_bytes(), "enabled");
    // A queue that does not exist has size 0.
    driver.write(22, &7u16.to_le_bytes());
    assert_eq!(read16(24), 0);
    driver.write(24, &16u16.to_le_bytes());
    driver.write(28, &1u16.to_le_bytes());
    driver.write(32, &[0xff; 8]);
    driver.set_status(0);
    assert_eq!(read16(28), 0, "disabled by the reset");
}

#[test]
fn every_access_of_the_bar_is_harmless() {
    let image = Image::new("bar");
    let driver = Driver::new(image.backend(false));
    for at in (0u64..0x1_0000).step_by(2).chain([0xffff, u64::MAX]) {
        for len in [1, 2, 4, 8] {
            // The status is left out: it would activate queues without memory, which is tested elsewhere.
            let mut data = vec![0xa5; len];
            driver.device.write(at, &data);
            driver.device.read(at, &mut data);
        }
    }
    for at in 0..0x1000 {
        let mut data = [0xff; 4];
        driver.device.read_config(at, &mut data);
        driver.device.write_config(at, &[0xff; 4]);
        driver.device.write_config(at, &[0; 4]);
    }
}

#[test]
fn intx_follows_the_isr() {
    let driver = Driver::ready(Box::new(Rng), 1);
    driver.submit(0, 0, &[(BUFFER, 64, WRITE, 0)]);
    driver.used(0, 1);
    driver.wait("the ISR bit", || config32(&driver, 4) & (1 << 19) != 0);
    assert_eq!(driver.read(0x1000), [1u8]);
    assert_eq!(driver.read(0x1000), [0u8], "reading clears it");
    assert_eq!(config32(&driver, 4) & (1 << 19), 0);
}

#[test]
fn msix_pending_bits_show_masked_interrupts() {
    let driver = Driver::new(Box::new(Rng));
    let (at, ..) = capabilities(&driver)[0];
    // MSI-X is enabled, with all vectors masked.
    driver.device.write_config(at + 2, &0xc000u16.to_le_bytes());
    driver.negotiate(1 << 32);
    driver.write(26, &1u16.to_le_bytes());
    driver.set_queue(0, QUEUE_LEN, rings(0));
    driver.set_status(0xf);
    driver.submit(0, 0, &[(BUFFER, 64, WRITE, 0)]);
    driver.wait("the pending bit", || driver.read(0xc000) == [2u8]);
    assert_eq!(driver.read(0x1000), [0u8], "no ISR with MSI-X");
}

#[test]
fn the_configuration_window_reaches_the_bar() {
    let driver = Driver::new(Box::new(Rng));
    let (at, ..) = *capabilities(&driver).last().unwrap();
    let access = |offset: u32, len: u32| {
        driver.device.write_config(at + 8, &offset.to_le_bytes());
        driver.device.write_config(at + 12, &len.to_le_bytes());
    };
    access(20, 1);
    driver.device.write_config(at + 16, &[1, 0, 0, 0]);
    assert_eq!(driver.status(), 1);
    assert_eq!(config32(&driver, at + 16) & 0xff, 1);
    access(18, 2);
    assert_eq!(config32(&driver, at + 16) & 0xffff, 1, "one queue");
    for (offset, len) in [(0x1_0000, 4), (u32::MAX, 4), (0, 3), (0, 0)] {
        access(offset, len);
        config32(&driver, at + 16);
        driver.device.write_config(at + 16, &[0xff; 4]);
    }
    assert_eq!(driver.status(), 1);
}

#[test]
fn the_bar_moves_with_its_doorbells() {
    let driver = Driver::new(Box::new(Rng));
    let config = |at, value: u32| driver.device.write_config(at, &value.to_le_bytes());
    config(4, 0);
    assert_eq!(driver.device.window(), None);
    config(0x10, u32::MAX);
    assert_eq!(config32(&driver, 0x10), 0xffff_0000, "size");
    config(0x10, 0xd000_0000);
    config(4, 6);
    assert_eq!(driver.device.window(), Some((0xd000_0000, 0x1_0000)));
    driver.start(1);
    driver.submit(0, 0, &[(BUFFER, 8, WRITE, 0)]);
    assert_eq!(driver.used(0, 1), 8);
}
