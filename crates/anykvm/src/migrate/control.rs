//! The control socket of a running guest. A command is one line; the answer is lines, the last of which is `ok …` or
//! `error …`.
//!
//! | command | |
//! | --- | --- |
//! | `status` | `ok running`, `ok paused` or `ok migrating` |
//! | `pause`, `resume` | |
//! | `migrate MILLISECONDS VERIFY PLACE` | `progress ROUND DONE ALL SENT` comes before the answer; the guest stays if the connection is closed |
//! | `cancel` | ends a migration that is on its way |
//! | `log MILLISECONDS` | logs what the guest writes until the connection is closed: `logging`, then `dirty PAGES` so often (0: never) |

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::line::{self, Line};
use super::memory;
use super::source::{Failure, Machine, Options, Progress, Report};
use super::stream::StreamError;
use crate::ending::Ending;
use crate::endpoint::Endpoint;
use crate::error::BootError;
use crate::lock::lock;

/// Maximum length of a command.
const COMMAND_MAX: u64 = 8192;
/// How often progress is reported.
const TELL: Duration = Duration::from_millis(100);

/// What the guest does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    Paused,
    /// The guest leaves. True if it stands still meanwhile.
    Leaving(bool),
    /// The guest runs, and its writes are logged.
    Logged,
    /// The guest belongs to another process.
    Gone,
}

struct Control {
    machine: Machine,
    phase: Mutex<Phase>,
    is_cancelled: Arc<AtomicBool>,
    endings: Sender<Ending>,
}

/// The socket's file, which is removed with the guest.
#[derive(Debug)]
pub(crate) struct Socket(PathBuf);

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Listens for commands at `path`.
pub(crate) fn listen(
    path: &Path,
    machine: Machine,
    endings: Sender<Ending>,
) -> Result<Socket, BootError> {
    let cannot =
        |error: std::io::Error| BootError::Usage(format!("--control {}: {error}", path.display()));
    let listener = line::listen(path).map_err(cannot)?;
    let socket = Socket(path.into());
    let control = Arc::new(Control {
        machine,
        phase: Mutex::new(Phase::Running),
        is_cancelled: Arc::default(),
        endings,
    });
    let serve = move || {
        for stream in listener.incoming().flatten() {
            let control = Arc::clone(&control);
            // If the thread cannot be started, nobody answers, and the guest goes on.
            let _ = thread::Builder::new()
                .name("control".into())
                .spawn(move || control.serve(stream));
        }
    };
    thread::Builder::new()
        .name("control".into())
        .spawn(serve)
        .map_err(BootError::host("cannot start a thread"))?;
    Ok(socket)
}

impl Control {
    fn serve(&self, mut stream: UnixStream) {
        let Ok(reader) = stream.try_clone() else {
            return;
        };
        let mut line = String::new();
        if BufReader::new(reader.take(COMMAND_MAX))
            .read_line(&mut line)
            .is_err()
        {
            return;
        }
        let (answer, ending) = match self.command(line.trim_end(), &mut stream) {
            Ok((text, ending)) => (format!("ok {text}\n"), ending),
            Err(why) => (format!("error {}\n", why.replace('\n', " ")), None),
        };
        let _ = stream.write_all(answer.as_bytes());
        if let Some(ending) = ending {
            let _ = self.endings.send(ending);
        }
    }

    fn command(
        &self,
        line: &str,
        stream: &mut UnixStream,
    ) -> Result<(String, Option<Ending>), String> {
        let done = |text: &str| Ok((text.to_owned(), None));
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "status" => done(match *lock(&self.phase) {
                Phase::Running => "running",
                Phase::Paused => "paused",
                Phase::Leaving(_) => "migrating",
                Phase::Logged => "logged",
                Phase::Gone => "gone",
            }),
            "pause" => {
                let mut phase = lock(&self.phase);
                if *phase == Phase::Running {
                    self.machine.pause().map_err(|error| error.to_string())?;
                }
                self.turn(&mut phase, Phase::Paused)?;
                done("paused")
            }
            "resume" => {
                let mut phase = lock(&self.phase);
                if *phase == Phase::Paused {
                    self.machine.resume();
                }
                self.turn(&mut phase, Phase::Running)?;
                done("running")
            }
            "cancel" => {
                if !matches!(*lock(&self.phase), Phase::Leaving(_)) {
                    return Err("no migration is on its way".into());
                }
                self.is_cancelled.store(true, Ordering::Release);
                done("cancelled")
            }
            "migrate" => self.migrate(rest, stream),
            "log" => self.log(rest, stream),
            _ => Err(format!("'{word}' is no command")),
        }
    }

    fn turn(&self, phase: &mut Phase, to: Phase) -> Result<(), String> {
        match *phase {
            Phase::Leaving(_) => Err("a migration is on its way".into()),
            Phase::Logged => Err("what the guest writes is being logged".into()),
            Phase::Gone => Err("the guest is gone".into()),
            _ => {
                *phase = to;
                Ok(())
            }
        }
    }

    fn migrate(
        &self,
        arguments: &str,
        stream: &mut UnixStream,
    ) -> Result<(String, Option<Ending>), String> {
        let mut words = arguments.splitn(3, ' ');
        let mut word = || words.next().ok_or("migrate MILLISECONDS VERIFY PLACE");
        let milliseconds: u64 = word()?.parse().map_err(|_| "not a number")?;
        let verifies = word()? == "1";
        let place: Endpoint = word()?.parse()?;
        let options = Options {
            downtime: Duration::from_millis(milliseconds),
            verifies,
        };
        let was_paused = {
            let mut phase = lock(&self.phase);
            let was_paused = *phase == Phase::Paused;
            self.turn(&mut phase, Phase::Leaving(was_paused))?;
            // The flag is cleared before anybody can cancel this migration.
            self.is_cancelled.store(false, Ordering::Release);
            was_paused
        };
        let left = self.leave(&place, options, was_paused, stream);
        let (next, answer) = match left {
            Ok(report) => (
                Phase::Gone,
                Ok((in_words(&report), Some(Ending::Left(place.to_string())))),
            ),
            Err(Failure::Stays(error)) => {
                let before = if was_paused {
                    Phase::Paused
                } else {
                    Phase::Running
                };
                (before, Err(format!("{error}; the guest stays here")))
            }
            Err(Failure::Unknown(error)) => (
                Phase::Paused,
                Err(format!(
                    "{error}; the target was told to go on, so the guest stands still here: \
                     resume it only if the target has not started it"
                )),
            ),
        };
        *lock(&self.phase) = next;
        answer
    }

    /// As a migration does it before the guest stands still.
    fn log(
        &self,
        arguments: &str,
        stream: &mut UnixStream,
    ) -> Result<(String, Option<Ending>), String> {
        let milliseconds: u64 = arguments.parse().map_err(|_| "log MILLISECONDS")?;
        {
            let mut phase = lock(&self.phase);
            if *phase == Phase::Paused {
                return Err("the guest stands still".into());
            }
            self.turn(&mut phase, Phase::Logged)?;
        }
        let found = self.harvests(Duration::from_millis(milliseconds), stream);
        *lock(&self.phase) = Phase::Running;
        let pages = found.map_err(|error| error.to_string())?;
        Ok((format!("{pages} pages"), None))
    }

    /// How many pages they find until the connection is closed.
    fn harvests(&self, period: Duration, stream: &mut UnixStream) -> Result<u64, StreamError> {
        let logging = self.machine.log()?;
        let look = if period.is_zero() { TELL } else { period };
        stream.set_read_timeout(Some(look))?;
        stream.write_all(b"logging\n")?;
        let mut all = 0;
        loop {
            match stream.read(&mut [0; 1]) {
                Ok(0) => return Ok(all),
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error.into()),
                _ => {}
            }
            if !period.is_zero() {
                let pages = memory::count(&logging.harvest()?);
                all += pages;
                stream.write_all(format!("dirty {pages}\n").as_bytes())?;
            }
        }
    }

    fn leave(
        &self,
        place: &Endpoint,
        options: Options,
        was_paused: bool,
        stream: &mut UnixStream,
    ) -> Result<Report, Failure> {
        let is_cancelled = Arc::clone(&self.is_cancelled);
        let watch = stream.try_clone()?;
        // If the client closes the connection, the migration is cancelled.
        watch.set_nonblocking(true)?;
        let is_off = move || {
            let gone = matches!((&watch).read(&mut [0; 1]), Ok(0));
            is_cancelled.load(Ordering::Acquire) || gone
        };
        let mut told = Instant::now();
        let mut show = |p: Progress| {
            if told.elapsed() >= TELL {
                told = Instant::now();
                let line = format!("progress {} {} {} {}\n", p.round, p.done, p.all, p.sent);
                // A slow client misses some lines.
                let _ = (&*stream).write(line.as_bytes());
            }
        };
        let mut line = Line::to(place, Box::new(is_off))
            .map_err(|error| std::io::Error::new(error.kind(), format!("{place}: {error}")))?;
        let left = self
            .machine
            .leave(&mut line, options, was_paused, &mut show);
        // The answer goes to the same socket.
        stream.set_nonblocking(false)?;
        match left {
            // A reason that the target has sent before it closed the connection says more than this error.
            Err(Failure::Stays(error @ StreamError::Io(_))) => {
                Err(Failure::Stays(line.last_words().unwrap_or(error)))
            }
            left => left,
        }
    }
}

fn in_words(report: &Report) -> String {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    format!(
        "downtime {:.1} ms, in all {:.1} ms, vCPUs stalled {:.2} ms, {} rounds, {:.1} MiB sent",
        ms(report.downtime),
        ms(report.total),
        ms(report.stall),
        report.rounds,
        report.sent as f64 / f64::from(1 << 20)
    )
}
