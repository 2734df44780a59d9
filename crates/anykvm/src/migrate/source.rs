//! The side that a guest leaves.
//!
//! The guest's memory is sent while it runs, then the pages that it has written since, again and again, until the rest
//! takes no longer than the guest may stand still. Then it stands still, and the rest and its state are sent. Until the
//! target has been told to go on, the guest is ours: after any failure, it goes on here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anykvm_ioctls::VmFd;

use super::chips;
use super::config::Config;
use super::line::Line;
use super::memory::{self, Logging, PAGE};
use super::stream::{self, MessageKind, StreamError};
use crate::devices::Devices;
use crate::error::BootError;
use crate::fields::{Malformed, Writer};
use crate::input::Destination;
use crate::memory::GuestMemory;
use crate::vcpu::Gate;
use crate::virtio::DiskHold;

/// Maximum number of rounds. After these, a guest that writes faster than pages can be sent stands still all the same.
const ROUNDS_MAX: u32 = 30;
/// Assumed speed before the first round, in bytes per second.
const GUESS: f64 = 1e9;

/// A machine that may leave.
pub(crate) struct Machine {
    pub(crate) vm: Arc<VmFd>,
    pub(crate) memory: &'static GuestMemory,
    pub(crate) devices: Arc<Devices>,
    pub(crate) destination: Arc<Destination>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) config: Config,
    pub(crate) disks: Arc<[DiskHold]>,
}

/// How the guest is to leave.
#[derive(Debug, Clone, Copy)]
pub(super) struct Options {
    /// How long the guest may stand still for the rest of its memory.
    pub(super) downtime: Duration,
    /// True if both sides compare a digest of all memory, while the guest stands still.
    pub(super) verifies: bool,
}

/// The progress of a migration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Progress {
    pub(super) round: u32,
    /// Bytes of the round that are done, and all bytes of the round.
    pub(super) done: u64,
    pub(super) all: u64,
    /// Number of bytes written.
    pub(super) sent: u64,
}

/// What a migration took.
#[derive(Debug, Clone, Copy)]
pub(super) struct Report {
    pub(super) downtime: Duration,
    pub(super) total: Duration,
    /// What dirty logging has taken of the vCPUs' time, all vCPUs together, since the machine stood still last.
    pub(super) stall: Duration,
    pub(super) rounds: u32,
    pub(super) sent: u64,
}

/// How a migration has failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The guest goes on here.
    Stays(StreamError),
    /// The target was told to go on, and did not answer: the guest may run there.
    Unknown(StreamError),
}

impl<E: Into<StreamError>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Stays(error.into())
    }
}

impl From<BootError> for StreamError {
    fn from(error: BootError) -> Self {
        Malformed::new(error.to_string()).into()
    }
}

impl Machine {
    /// Makes everything stand still. Returns the states that the vCPUs have left.
    pub(super) fn pause(&self) -> Result<Vec<Vec<u8>>, BootError> {
        let vcpus = self.gate.close(|| self.devices.pause());
        // If that failed, the gate is open.
        vcpus.inspect_err(|_| self.devices.resume())
    }

    /// Makes everything go on.
    pub(super) fn resume(&self) {
        self.destination.release();
        self.devices.resume();
        self.gate.open();
    }

    fn state(&self, vcpus: &[Vec<u8>], verifies: bool) -> Result<Vec<u8>, StreamError> {
        let mut w = Writer::default();
        chips::save(&self.vm, &mut w)?;
        w.count(vcpus.len());
        vcpus.iter().for_each(|vcpu| w.bytes(vcpu));
        self.devices.save(&mut w);
        self.destination.save(&mut w);
        w.flag(verifies);
        if verifies {
            w.put(&memory::digest(self.memory)?);
        }
        Ok(w.into_bytes())
    }

    /// Logs the guest's writes until the result is dropped.
    pub(super) fn log(&self) -> Result<Logging<'_>, BootError> {
        Logging::start(&self.vm, self.memory)
    }

    /// Sends the guest. `is_paused`: the guest stands still from the start.
    pub(super) fn leave(
        &self,
        line: &mut Line,
        options: Options,
        is_paused: bool,
        show: &mut dyn FnMut(Progress),
    ) -> Result<Report, Failure> {
        let begin = Instant::now();
        let stalled = self.gate.stalled();
        if let Some(own) = self.disks.iter().find(|disk| !disk.is_shared) {
            let why = format!(
                "its disk '{}' is a copy that no other process can open",
                own.serial
            );
            return Err(Malformed::new(why).into());
        }
        stream::begin(line)?;
        stream::send(line, MessageKind::Config, &self.config.to_bytes())?;
        let logging = self.log().map_err(StreamError::from)?;
        let mut shown = Progress::default();
        let mut pages = memory::all(self.memory);
        let mut rate = GUESS;
        for round in 0..ROUNDS_MAX {
            let bytes = memory::count(&pages) * PAGE;
            let is_small = bytes as f64 / rate < options.downtime.as_secs_f64();
            if round > 0 && (is_small || is_paused) {
                break;
            }
            shown = Progress {
                round,
                all: bytes,
                ..shown
            };
            let (start, before) = (Instant::now(), line.sent);
            self.send(line, &pages, &mut shown, show)?;
            // Pages of zeros take little time, so the speed is that of the other pages.
            let seconds = start.elapsed().as_secs_f64().max(1e-6);
            rate = ((line.sent - before).max(bytes / 16) as f64 / seconds).max(1e6);
            pages = logging.harvest().map_err(StreamError::from)?;
        }
        let stopped = Instant::now();
        self.destination.hold().map_err(StreamError::from)?;
        let vcpus = self.pause().inspect_err(|_| self.destination.release());
        let vcpus = vcpus.map_err(StreamError::from)?;
        let handed = self.hand_over(line, options, &logging, (pages, &vcpus), &mut shown, show);
        let downtime = stopped.elapsed();
        drop(logging);
        if matches!(handed, Err(Failure::Stays(_))) {
            self.destination.release();
            if !is_paused {
                self.resume();
            }
        }
        handed.map(|()| Report {
            downtime,
            total: begin.elapsed(),
            stall: self.gate.stalled().saturating_sub(stalled),
            rounds: shown.round + 1,
            sent: line.sent,
        })
    }

    fn send(
        &self,
        line: &mut Line,
        pages: &memory::Pages,
        shown: &mut Progress,
        show: &mut dyn FnMut(Progress),
    ) -> Result<(), StreamError> {
        shown.done = 0;
        let is_first = shown.round == 0;
        let mut progress = |count: u64, line: &Line| {
            shown.done += count * PAGE;
            shown.sent = line.sent;
            show(*shown);
        };
        memory::send(line, self.memory, pages, is_first, &mut progress)
    }

    /// Releases the disks, so that the target can have them.
    fn give(&self) -> Result<(), StreamError> {
        let given = self.disks.iter().try_for_each(DiskHold::give);
        if given.is_err() && !self.takes_back() {
            return Err(Malformed::new("a disk could not be given, and is lost").into());
        }
        Ok(given?)
    }

    fn takes_back(&self) -> bool {
        self.disks
            .iter()
            .all(|disk| matches!(disk.take(), Ok(true)))
    }

    /// Sends the rest of a guest that stands still, and has the target go on.
    fn hand_over(
        &self,
        line: &mut Line,
        options: Options,
        logging: &Logging<'_>,
        (mut pages, vcpus): (memory::Pages, &[Vec<u8>]),
        shown: &mut Progress,
        show: &mut dyn FnMut(Progress),
    ) -> Result<(), Failure> {
        let last = logging.harvest().map_err(StreamError::from)?;
        for (to, from) in pages.iter_mut().flatten().zip(last.into_iter().flatten()) {
            *to |= from;
        }
        shown.round += 1;
        shown.all = memory::count(&pages) * PAGE;
        self.send(line, &pages, shown, show)?;
        stream::send(
            line,
            MessageKind::State,
            &self.state(vcpus, options.verifies)?,
        )?;
        stream::send(line, MessageKind::End, &[])?;
        if line.is_file() {
            line.finish()?;
            self.give()?;
            return Ok(());
        }
        expect(line, MessageKind::Ready)?;
        self.give()?;
        let gone = stream::send(line, MessageKind::Go, &[])
            .map_err(StreamError::from)
            .and_then(|()| expect(line, MessageKind::Running));
        match gone {
            Ok(()) => Ok(()),
            // The target says that the guest does not run there.
            Err(refused @ StreamError::Refused(_)) if self.takes_back() => {
                Err(Failure::Stays(refused))
            }
            Err(error) => Err(Failure::Unknown(error)),
        }
    }
}

/// Waits for a message of the target.
pub(super) fn expect(line: &mut Line, want: MessageKind) -> Result<(), StreamError> {
    let mut buffer = Vec::new();
    match stream::receive(line, &mut buffer)? {
        kind if kind == want => Ok(()),
        MessageKind::Failed | MessageKind::Abort => Err(StreamError::Refused(
            String::from_utf8_lossy(&buffer).into_owned(),
        )),
        _ => Err(Malformed::new("an answer that was not asked for").into()),
    }
}
