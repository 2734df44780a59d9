//! The block device (virtio 1.2, 5.2): read, write, flush, discard, write zeroes, serial number.

use std::io::{Read, Write};

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK,
    VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use virtio_queue::Queue;

use super::disk::{Disk, SECTOR, SERIAL_MAX};
use super::queue::{Broken, Chain, Progress, Reader, Step, Writer, serve_chains};
use super::{Backend, Profile};
use crate::memory::GuestMemory;

mod spec {
    pub(super) const QUEUE_SIZE: u16 = 256;
    /// Maximum number of data segments. A chain also has a header and a status.
    pub(super) const SEG_MAX: u32 = 254;
    /// Length of the header: request type, reserved, first sector.
    pub(super) const HEADER_LEN: usize = 16;
    /// Length of a range: first sector, number of sectors, flags.
    pub(super) const RANGE_LEN: usize = 16;
    pub(super) const RANGES_MAX: usize = 64;
    pub(super) const RANGE_SECTORS_MAX: u32 = 1 << 22;
    /// Flag of a range that lets the disk give the space back.
    pub(super) const UNMAP: u32 = 1;
}

/// Number of bytes that are moved at once.
const CHUNK: usize = 1 << 17;

/// A disk, and the buffer between it and guest memory.
#[derive(Debug)]
pub(crate) struct BlockDevice {
    disk: Disk,
    buffer: Vec<u8>,
}

/// How a request ends that does not succeed.
enum Refusal {
    /// With this status, which the driver gets.
    Status(u32),
    /// With a broken device, because the chain is not a request at all.
    Broken(Broken),
}

impl From<std::io::Error> for Refusal {
    fn from(_: std::io::Error) -> Self {
        Self::Status(VIRTIO_BLK_S_IOERR)
    }
}

impl BlockDevice {
    /// Makes a device of a disk.
    pub(crate) fn new(disk: Disk) -> Self {
        Self {
            disk,
            buffer: vec![0; CHUNK],
        }
    }

    /// Carries out one request. Returns the number of bytes written to guest memory.
    fn request(&mut self, chain: Chain<'_>, memory: &GuestMemory) -> Result<u32, Broken> {
        let mut reader = chain.clone().reader(memory)?;
        let mut writer = chain.writer(memory)?;
        let status_at = writer
            .available_bytes()
            .checked_sub(1)
            .ok_or_else(|| Broken("no room for the status".into()))?;
        let mut status = writer.split_at(status_at)?;
        let mut header = [0; spec::HEADER_LEN];
        reader
            .read_exact(&mut header)
            .map_err(|_| Broken("no request header".into()))?;
        let [a, b, c, d, _, _, _, _, sector @ ..] = header;
        let kind = u32::from_le_bytes([a, b, c, d]);
        let sector = u64::from_le_bytes(sector);
        let result = match kind {
            VIRTIO_BLK_T_IN => self.read(sector, &mut writer),
            VIRTIO_BLK_T_OUT => self.write(sector, &mut reader),
            VIRTIO_BLK_T_FLUSH => self.disk.flush().map_err(Refusal::from),
            VIRTIO_BLK_T_GET_ID => self.identify(&mut writer),
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                self.ranges(kind == VIRTIO_BLK_T_DISCARD, &mut reader)
            }
            _ => Err(Refusal::Status(VIRTIO_BLK_S_UNSUPP)),
        };
        let code = match result {
            Ok(()) => VIRTIO_BLK_S_OK,
            Err(Refusal::Status(code)) => code,
            Err(Refusal::Broken(broken)) => return Err(broken),
        };
        status
            .write_all(&[u8::try_from(code).unwrap_or(1)])
            .map_err(|_| Broken("the status cannot be written".into()))?;
        // The status is the last byte, whatever was written before it.
        u32::try_from(writer.bytes_written() + 1)
            .map_err(|_| Broken("a chain of more than 4 GiB".into()))
    }

    /// Returns the offset on the disk of `len` bytes from `sector` on, if they are whole sectors of the disk.
    fn place(&self, sector: u64, len: u64) -> Result<u64, Refusal> {
        let at = sector.checked_mul(SECTOR);
        at.filter(|at| {
            len.is_multiple_of(SECTOR)
                && at.checked_add(len).is_some_and(|end| end <= self.disk.len)
        })
        .ok_or(Refusal::Status(VIRTIO_BLK_S_IOERR))
    }

    fn read(&mut self, sector: u64, writer: &mut Writer<'_>) -> Result<(), Refusal> {
        let mut at = self.place(sector, writer.available_bytes() as u64)?;
        while writer.available_bytes() > 0 {
            let len = writer.available_bytes().min(CHUNK);
            let chunk = self.buffer.get_mut(..len).unwrap_or_default();
            self.disk.read(chunk, at)?;
            writer.write_all(chunk)?;
            at = at.saturating_add(len as u64);
        }
        Ok(())
    }

    fn write(&mut self, sector: u64, reader: &mut Reader<'_>) -> Result<(), Refusal> {
        self.check_writable()?;
        let mut at = self.place(sector, reader.available_bytes() as u64)?;
        while reader.available_bytes() > 0 {
            let len = reader.available_bytes().min(CHUNK);
            let chunk = self.buffer.get_mut(..len).unwrap_or_default();
            reader.read_exact(chunk)?;
            self.disk.write(chunk, at)?;
            at = at.saturating_add(len as u64);
        }
        Ok(())
    }

    fn identify(&self, writer: &mut Writer<'_>) -> Result<(), Refusal> {
        let mut id = [0; SERIAL_MAX];
        for (to, from) in id.iter_mut().zip(self.disk.serial.bytes()) {
            *to = from;
        }
        let len = writer.available_bytes().min(SERIAL_MAX);
        Ok(writer.write_all(id.get(..len).unwrap_or_default())?)
    }

    fn ranges(&self, discards: bool, reader: &mut Reader<'_>) -> Result<(), Refusal> {
        self.check_writable()?;
        let len = reader.available_bytes();
        if len == 0 || !len.is_multiple_of(spec::RANGE_LEN) {
            return Err(Refusal::Broken(Broken("not a list of ranges".into())));
        }
        if len > spec::RANGE_LEN * spec::RANGES_MAX {
            return Err(Refusal::Status(VIRTIO_BLK_S_IOERR));
        }
        while reader.available_bytes() > 0 {
            let mut range = [0; spec::RANGE_LEN];
            reader.read_exact(&mut range)?;
            let [a, b, c, d, e, f, g, h, i, j, k, l, flags @ ..] = range;
            let sector = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
            let sectors = u32::from_le_bytes([i, j, k, l]);
            let flags = u32::from_le_bytes(flags);
            // Unknown flags are unsupported, and so is UNMAP for a discard (5.2.6.2).
            if flags & !spec::UNMAP != 0 || (discards && flags != 0) {
                return Err(Refusal::Status(VIRTIO_BLK_S_UNSUPP));
            }
            if sectors > spec::RANGE_SECTORS_MAX {
                return Err(Refusal::Status(VIRTIO_BLK_S_IOERR));
            }
            let len = u64::from(sectors) * SECTOR;
            let at = self.place(sector, len)?;
            if len == 0 {
                continue;
            }
            if discards {
                self.disk.discard(at, len)?;
            } else {
                self.disk.write_zeroes(at, len, flags & spec::UNMAP != 0)?;
            }
        }
        Ok(())
    }

    fn check_writable(&self) -> Result<(), Refusal> {
        if self.disk.is_read_only {
            return Err(Refusal::Status(VIRTIO_BLK_S_IOERR));
        }
        Ok(())
    }
}

impl Backend for BlockDevice {
    fn profile(&self) -> Profile {
        let mut features =
            (1 << VIRTIO_BLK_F_SEG_MAX) | (1 << VIRTIO_BLK_F_BLK_SIZE) | (1 << VIRTIO_BLK_F_FLUSH);
        if self.disk.is_read_only {
            features |= 1 << VIRTIO_BLK_F_RO;
        } else {
            features |= (1 << VIRTIO_BLK_F_DISCARD) | (1 << VIRTIO_BLK_F_WRITE_ZEROES);
        }
        Profile {
            name: "virtio-blk",
            kind: u16::try_from(VIRTIO_ID_BLOCK).unwrap_or(0),
            class: 0x01_80_00,
            features,
            queue_sizes: vec![spec::QUEUE_SIZE],
            config: config(self.disk.len / SECTOR),
        }
    }

    fn serve(
        &mut self,
        _index: usize,
        queue: &mut Queue,
        memory: &GuestMemory,
    ) -> Result<Progress, Broken> {
        serve_chains(queue, memory, |chain| {
            self.request(chain, memory).map(Step::Done)
        })
    }
}

/// Returns `struct virtio_blk_config`.
fn config(sectors: u64) -> Vec<u8> {
    let ranges = u32::try_from(spec::RANGES_MAX).unwrap_or(1);
    let mut config = sectors.to_le_bytes().to_vec();
    config.extend([0; 4]); // largest segment: not limited
    config.extend(spec::SEG_MAX.to_le_bytes());
    config.extend([0; 4]); // geometry
    config.extend(u32::try_from(SECTOR).unwrap_or(0).to_le_bytes());
    config.extend([0; 8]); // topology
    config.extend([0, 0, 1, 0]); // write-back, reserved, one queue
    // Discard: maximum number of sectors in a range, of ranges, and the alignment.
    for value in [spec::RANGE_SECTORS_MAX, ranges, 1] {
        config.extend(value.to_le_bytes());
    }
    // Write zeroes: maximum number of sectors in a range, of ranges, and whether it may unmap.
    for value in [spec::RANGE_SECTORS_MAX, ranges, 1] {
        config.extend(value.to_le_bytes());
    }
    config
}
