//! The configuration that a target has to build before it can load a guest's state.

use crate::fields::{Malformed, Reader, Writer};
use crate::streams::Shape;
use crate::virtio::DiskHold;

/// Maximum number of disks in a stream: a bus has no more slots.
const DISKS_MAX: usize = 32;
/// Numbers of the streams' shapes.
const CONSOLE: u8 = 0;
const CONSOLE_AND_ERRORS: u8 = 1;
const STREAMS: u8 = 2;

/// A disk as the guest knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskInfo {
    /// Length in bytes.
    pub(crate) len: u64,
    pub(crate) is_read_only: bool,
    pub(crate) serial: String,
}

impl From<&DiskHold> for DiskInfo {
    fn from(hold: &DiskHold) -> Self {
        Self {
            len: hold.len,
            is_read_only: hold.is_read_only,
            serial: hold.serial.clone(),
        }
    }
}

/// The configuration of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    /// Size of the memory in bytes.
    pub(crate) mem: u64,
    pub(crate) cpus: u8,
    pub(crate) shape: Shape,
    /// True if the machine has a virtio console.
    pub(crate) uses_virtio: bool,
    /// Rows and columns that the console was made with.
    pub(crate) size: Option<(u16, u16)>,
    /// True if a command's status is awaited.
    pub(crate) awaits_status: bool,
    pub(crate) disks: Vec<DiskInfo>,
}

impl Config {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.put(&self.mem);
        w.put(&self.cpus);
        w.put(&match self.shape {
            Shape::Console { has_errors: false } => CONSOLE,
            Shape::Console { has_errors: true } => CONSOLE_AND_ERRORS,
            Shape::Streams => STREAMS,
        });
        w.flag(self.uses_virtio);
        w.flag(self.size.is_some());
        let (rows, columns) = self.size.unwrap_or_default();
        w.put(&[rows, columns]);
        w.flag(self.awaits_status);
        w.count(self.disks.len());
        for disk in &self.disks {
            w.put(&disk.len);
            w.flag(disk.is_read_only);
            w.bytes(disk.serial.as_bytes());
        }
        w.into_bytes()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self, Malformed> {
        let r = &mut Reader::new(bytes, "the machine");
        let mem = r.get()?;
        let cpus = r.get()?;
        let shape = match r.get::<u8>()? {
            CONSOLE => Shape::Console { has_errors: false },
            CONSOLE_AND_ERRORS => Shape::Console { has_errors: true },
            STREAMS => Shape::Streams,
            _ => return Err(r.wrong("streams of another kind")),
        };
        let uses_virtio = r.flag()?;
        let has_size = r.flag()?;
        let [rows, columns] = r.get()?;
        let awaits_status = r.flag()?;
        let mut disks = Vec::new();
        for _ in 0..r.count(DISKS_MAX)? {
            disks.push(DiskInfo {
                len: r.get()?,
                is_read_only: r.flag()?,
                serial: String::from_utf8_lossy(r.bytes()?).into_owned(),
            });
        }
        r.end()?;
        Ok(Self {
            mem,
            cpus,
            shape,
            uses_virtio,
            size: has_size.then_some((rows, columns)),
            awaits_status,
            disks,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_described() {
        let disk = DiskInfo {
            len: 1 << 20,
            is_read_only: true,
            serial: "x".into(),
        };
        let rows = [
            (Shape::Streams, None, vec![]),
            (
                Shape::Console { has_errors: true },
                Some((25, 80)),
                vec![disk],
            ),
        ];
        for (shape, size, disks) in rows {
            let config = Config {
                mem: 5 << 30,
                cpus: 3,
                shape,
                uses_virtio: true,
                size,
                awaits_status: false,
                disks,
            };
            let bytes = config.to_bytes();
            assert_eq!(Config::from_bytes(&bytes).unwrap(), config);
            for len in 0..bytes.len() {
                assert!(Config::from_bytes(&bytes[..len]).is_err());
            }
        }
    }
}
