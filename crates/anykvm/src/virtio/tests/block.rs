//! Requests to a disk.

use std::path::PathBuf;

use super::{BUFFER, Driver, NEXT, WRITE};
use crate::virtio::BlockDevice;
use crate::virtio::disk::Disk;

pub(super) const SECTORS: u64 = 64;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;
const STATUS: u64 = BUFFER + 0x800;
const DATA: u64 = BUFFER + 0x1000;

/// A disk whose sector `n` is full of bytes `n`. The file is removed when this is dropped.
pub(super) struct Image(PathBuf);

impl Image {
    pub(super) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("anykvm-{name}-{}.img", std::process::id()));
        let bytes: Vec<u8> = (0..SECTORS).flat_map(|n| [n as u8; 512]).collect();
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }

    pub(super) fn backend(&self, is_read_only: bool) -> Box<BlockDevice> {
        Box::new(BlockDevice::new(Disk::for_test(&self.0, is_read_only)))
    }

    fn sector(&self, n: usize) -> Vec<u8> {
        std::fs::read(&self.0).unwrap()[n * 512..][..512].to_vec()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Makes one request: type, sector, data. Returns its status and the used length.
fn request(driver: &Driver, count: u16, kind: u32, sector: u64, len: u32, write: u16) -> (u8, u32) {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend([0; 4]);
    header.extend(sector.to_le_bytes());
    driver.put(BUFFER, &header);
    driver.put(STATUS, &[0xee]);
    let mut chain = vec![(BUFFER, 16, NEXT, 1)];
    if len > 0 {
        chain.push((DATA, len, NEXT | write, 2));
    }
    chain.push((STATUS, 1, WRITE, 0));
    driver.submit(0, 0, &chain);
    let used = driver.used(0, count);
    (driver.get(STATUS, 1)[0], used)
}

#[test]
fn reads_and_writes() {
    let image = Image::new("rw");
    let driver = Driver::ready(image.backend(false), 1);
    assert_eq!(request(&driver, 1, 0, 5, 1024, WRITE), (OK, 1025));
    assert_eq!(driver.get(DATA, 512), [5; 512]);
    assert_eq!(driver.get(DATA + 512, 512), [6; 512]);
    driver.put(DATA, &[0xab; 512]);
    assert_eq!(request(&driver, 2, 1, 7, 512, 0), (OK, 1));
    assert_eq!(image.sector(7), [0xab; 512]);
    assert_eq!(image.sector(8), [8; 512]);
    assert_eq!(request(&driver, 3, 4, 0, 0, 0), (OK, 1), "flush");
}

#[test]
fn what_does_not_fit_the_disk_is_an_error() {
    let image = Image::new("limits");
    let driver = Driver::ready(image.backend(false), 1);
    let rows = [
        (0, SECTORS - 1, 512, OK),
        (0, SECTORS - 1, 1024, IOERR),
        (0, SECTORS, 512, IOERR),
        (0, u64::MAX, 512, IOERR),
        (0, u64::MAX / 512, 512, IOERR),
        (0, 0, 100, IOERR),
        (1, SECTORS, 512, IOERR),
        (1, 0, 511, IOERR),
        (99, 0, 512, UNSUPP),
    ];
    for (count, (kind, sector, len, want)) in (1..).zip(rows) {
        let write = if kind == 1 { 0 } else { WRITE };
        let (status, _) = request(&driver, count, kind, sector, len, write);
        assert_eq!(status, want, "type {kind} sector {sector} len {len}");
    }
    for n in 0..SECTORS as usize {
        assert_eq!(image.sector(n), [n as u8; 512]);
    }
}

#[test]
fn a_read_only_disk_stays_as_it_is() {
    let image = Image::new("ro");
    let driver = Driver::ready(image.backend(true), 1);
    driver.write(0, &0u32.to_le_bytes());
    let features = u32::from_le_bytes(driver.read(4));
    assert_ne!(features & (1 << 5), 0, "VIRTIO_BLK_F_RO");
    assert_eq!(features & (1 << 13 | 1 << 14), 0, "no discard");
    assert_eq!(request(&driver, 1, 1, 0, 512, 0).0, IOERR);
    assert_eq!(request(&driver, 2, 13, 0, 16, 0).0, IOERR);
    assert_eq!(request(&driver, 3, 0, 3, 512, WRITE).0, OK);
    assert_eq!(image.sector(0), [0; 512]);
}

#[test]
fn serial_number_and_configuration() {
    let image = Image::new("id");
    let driver = Driver::ready(image.backend(false), 1);
    assert_eq!(request(&driver, 1, 8, 0, 20, WRITE), (OK, 21));
    assert_eq!(driver.get(DATA, 20), b"test-disk\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(u64::from_le_bytes(driver.read(0x2000)), SECTORS);
    assert_eq!(u32::from_le_bytes(driver.read(0x2000 + 20)), 512);
    assert_eq!(driver.read(0x2000 + 36), (1u32 << 22).to_le_bytes());
    assert_eq!(driver.read(0x2000 + 56), [1u8], "zeroes may unmap");
}

#[test]
fn discard_and_write_zeroes() {
    let image = Image::new("zeroes");
    let driver = Driver::ready(image.backend(false), 1);
    let range = |sector: u64, sectors: u32, flags: u32| {
        let mut range = sector.to_le_bytes().to_vec();
        range.extend(sectors.to_le_bytes());
        range.extend(flags.to_le_bytes());
        range
    };
    let rows = [
        (13, range(8, 2, 0), OK),
        (13, range(16, 2, 1), OK),
        (11, range(24, 1, 1), UNSUPP),
        (13, range(24, 1, 2), UNSUPP),
        (13, range(SECTORS, 1, 0), IOERR),
        (13, range(u64::MAX, u32::MAX, 0), IOERR),
        (11, range(32, 1, 0), OK),
        (11, range(0, 0, 0), OK),
    ];
    for (count, (kind, range, want)) in (1..).zip(rows) {
        driver.put(DATA, &range);
        let (status, _) = request(&driver, count, kind, 0, 16, 0);
        assert_eq!(status, want, "{kind} {range:?}");
    }
    for n in [8, 9, 16, 17] {
        assert_eq!(image.sector(n), [0; 512], "{n}");
    }
    for n in [7, 10, 15, 18, 24] {
        assert_eq!(image.sector(n), [n as u8; 512], "{n}");
    }
}

#[test]
fn a_disk_that_shrinks_is_an_error_and_no_more() {
    let image = Image::new("shrinks");
    let driver = Driver::ready(image.backend(false), 1);
    let file = std::fs::OpenOptions::new().write(true).open(&image.0);
    file.unwrap().set_len(512).unwrap();
    assert_eq!(request(&driver, 1, 0, 5, 512, WRITE).0, IOERR);
    assert_eq!(request(&driver, 2, 0, 0, 512, WRITE).0, OK);
}
