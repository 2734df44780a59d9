//! The side that a guest comes to.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anykvm_ioctls::{VcpuFd, VmFd};

use super::chips::Chips;
use super::config::Config;
use super::line::Line;
use super::memory;
use super::source::expect;
use super::stream::{self, MessageKind, StreamError};
use crate::devices::Devices;
use crate::endpoint::Endpoint;
use crate::error::BootError;
use crate::fields::{Malformed, Reader};
use crate::input::Destination;
use crate::memory::GuestMemory;
use crate::vcpu;
use crate::virtio::DiskHold;

/// Maximum number of vCPUs in a state.
const VCPUS_MAX: usize = 254;
/// How long the target waits until a disk is free.
const DISK_PATIENCE: Duration = Duration::from_secs(3);

/// A guest that is on its way here.
pub(crate) struct Arrival {
    line: Line,
    place: Endpoint,
    /// The machine that the guest needs.
    pub(crate) config: Config,
    state: Vec<u8>,
}

/// The machine that the guest's state goes into.
pub(crate) struct Built<'a> {
    pub(crate) vm: &'a VmFd,
    pub(crate) vcpus: &'a [(u8, VcpuFd)],
    pub(crate) devices: &'a Arc<Devices>,
    pub(crate) destination: &'a Destination,
}

impl Arrival {
    /// Waits for a guest.
    pub(crate) fn wait(place: &Endpoint) -> Result<Self, BootError> {
        let failed = |error: StreamError| came_wrong(place, &error);
        let mut line = Line::from(place).map_err(|error| failed(error.into()))?;
        stream::expect_begin(&mut line).map_err(failed)?;
        let mut buffer = Vec::new();
        let config = match stream::receive(&mut line, &mut buffer).map_err(failed)? {
            MessageKind::Config => {
                Config::from_bytes(&buffer).map_err(|error| failed(error.into()))?
            }
            _ => return Err(failed(Malformed::new("it does not say what it is").into())),
        };
        Ok(Self {
            line,
            place: place.clone(),
            config,
            state: Vec::new(),
        })
    }

    /// Does a part of the work. If it fails, the source gets the reason.
    pub(crate) fn attempt<T>(
        &mut self,
        part: impl FnOnce(&mut Self) -> Result<T, StreamError>,
    ) -> Result<T, BootError> {
        part(self).map_err(|error| {
            self.refuse(&error.to_string());
            came_wrong(&self.place, &error)
        })
    }

    /// Tells the source that the guest cannot come.
    pub(crate) fn refuse(&mut self, why: &str) {
        if !self.line.is_file() {
            // The source may be gone.
            let _ = stream::send(&mut self.line, MessageKind::Failed, why.as_bytes());
        }
    }

    /// Receives the guest's memory and state.
    pub(crate) fn receive(&mut self, memory: &GuestMemory) -> Result<(), StreamError> {
        let mut frame = Vec::new();
        loop {
            match stream::receive(&mut self.line, &mut frame)? {
                kind @ (MessageKind::Pages | MessageKind::Zeros) => {
                    memory::put(memory, kind, &frame)?;
                }
                MessageKind::State => self.state = std::mem::take(&mut frame),
                MessageKind::End => return Ok(()),
                MessageKind::Abort => {
                    let why = String::from_utf8_lossy(&frame).into_owned();
                    return Err(StreamError::Refused(why));
                }
                _ => return Err(Malformed::new("a part that does not belong there").into()),
            }
        }
    }

    /// Loads the state into the machine.
    pub(crate) fn settle(
        &mut self,
        built: &Built<'_>,
        memory: &GuestMemory,
    ) -> Result<(), StreamError> {
        let r = &mut Reader::new(&self.state, "the machine");
        let chips = Chips::read(r)?;
        let count = r.part("the vCPUs").count(VCPUS_MAX)?;
        if count != built.vcpus.len() {
            return Err(r.wrong("another number of vCPUs").into());
        }
        let khz = built.vcpus.first().map(|(_, vcpu)| vcpu.get_tsc_khz());
        let khz = khz.and_then(Result::ok).unwrap_or(0);
        let shift = chips.set_clock(built.vm, khz)?;
        let vcpus: Vec<&[u8]> = (0..count).map(|_| r.bytes()).collect::<Result<_, _>>()?;
        built.devices.load(r)?;
        built.destination.load(r)?;
        if r.flag()? {
            let there: [u8; 32] = r.get()?;
            if memory::digest(memory)? != there {
                return Err(Malformed::new("memory is not what it was there").into());
            }
        }
        r.end()?;
        for ((_, vcpu), bytes) in built.vcpus.iter().zip(vcpus) {
            vcpu::state::load(vcpu, bytes, shift)?;
        }
        chips.set(built.vm)?;
        self.state = Vec::new();
        Ok(())
    }

    /// Waits until the source gives the guest away, and takes its disks.
    pub(crate) fn take_over(&mut self, disks: &[DiskHold]) -> Result<(), StreamError> {
        if !self.line.is_file() {
            stream::send(&mut self.line, MessageKind::Ready, &[])?;
            expect(&mut self.line, MessageKind::Go)?;
        }
        let begin = Instant::now();
        loop {
            let taken = disks.iter().map(DiskHold::take);
            let taken: Vec<bool> = taken.collect::<Result<_, _>>()?;
            if taken.iter().all(|taken| *taken) {
                break;
            }
            if begin.elapsed() > DISK_PATIENCE {
                return Err(Malformed::new("a disk is in use by another process").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Tells the source that the guest runs here.
    pub(crate) fn tell(&mut self) {
        if !self.line.is_file() {
            // The guest is ours now, even if nobody hears that.
            let _ = stream::send(&mut self.line, MessageKind::Running, &[]);
        }
    }
}

fn came_wrong(place: &Endpoint, error: &StreamError) -> BootError {
    BootError::Usage(format!("no guest came from {place}: {error}"))
}
