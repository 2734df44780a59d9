//! Standard input on its way to the guest. Handles the escape key, and passes bytes to a command unchanged.
//!
//! Bytes that were read are the guest's, and go with it when it moves. So nothing is read from when its state is saved: it may
//! go on in another process, which has standard input from then on.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::devices::{Connection, Devices};
use crate::ending::Ending;
use crate::error::BootError;
use crate::fields::{Malformed, Reader, Writer};
use crate::lock::lock;
use crate::terminal;
use crate::virtio::PortInput;

/// Ctrl-A, the escape key, as in QEMU.
const ESCAPE: u8 = 0x01;
/// Characters that init sets on a serial port for a command's input: end-of-file, literal-next.
const EOF: u8 = 0x04;
const LITERAL_NEXT: u8 = 0x16;
/// Number of bytes that are read at once.
const CHUNK: usize = 1 << 16;
/// Bytes that are sent to a tty at once. In canonical mode it keeps at most 4095 bytes of a line.
const TTY_CHUNK: usize = 1024;
/// Maximum number of bytes that wait for the guest at a serial port.
const BACKLOG_MAX: usize = 1 << 16;
/// Maximum number of bytes that wait for the guest at a port of the virtio console.
const PORT_BACKLOG_MAX: usize = 1 << 20;
/// How often a terminal is looked at that another program uses.
const LOOK: Duration = Duration::from_millis(50);
/// How long a read may take that is not to wait.
const READ_LIMIT: Duration = Duration::from_secs(1);

/// The kind of our standard input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Source {
    /// True if Ctrl-A is the escape key.
    pub(crate) is_terminal: bool,
    /// True if the terminal is raw and its keys are the guest's from the start. Otherwise it stays as it is, and a
    /// pager behind us may take it.
    pub(crate) is_raw: bool,
}

#[derive(Default)]
struct State {
    connection: Option<Connection>,
    /// Bytes that were typed before the guest could read.
    early: Vec<u8>,
}

/// Who may take bytes from standard input.
#[derive(Default)]
struct Turn {
    /// True while bytes are on their way from standard input to the guest.
    is_reading: bool,
    /// True if nobody may take bytes, because the guest is about to go.
    is_held: bool,
}

/// The guest's inputs. Nothing is sent before its init reads, because a UART that is being probed drops bytes.
#[derive(Default)]
pub(crate) struct Destination {
    state: Mutex<State>,
    opened: Condvar,
    turn: Mutex<Turn>,
    turned: Condvar,
    /// The devices. COM1 is the console, COM3 a command's standard input.
    pub(crate) devices: OnceLock<Arc<Devices>>,
    /// The virtio console.
    pub(crate) hvc: Arc<PortInput>,
    /// The port of the virtio console that is a command's standard input.
    pub(crate) port: Arc<PortInput>,
}

impl Destination {
    /// Notes that the guest reads, and passes on what was typed before.
    pub(crate) fn open(&self, connection: Connection) {
        let mut state = lock(&self.state);
        state.connection = Some(connection);
        let early = std::mem::take(&mut state.early);
        // A vCPU's thread calls this, which must not wait for its guest.
        self.pass(connection, &early);
        self.opened.notify_all();
    }

    /// Nothing is read any more until [`Self::release`], and what was read has been passed on.
    ///
    /// # Errors
    /// A read goes on and on: another process has taken the bytes that it was for. All is as before.
    pub(crate) fn hold(&self) -> Result<(), BootError> {
        let begin = Instant::now();
        let mut turn = lock(&self.turn);
        turn.is_held = true;
        while turn.is_reading {
            let Some(left) = READ_LIMIT.checked_sub(begin.elapsed()) else {
                turn.is_held = false;
                self.turned.notify_all();
                return Err(BootError::Usage(
                    "standard input is being read, and another process reads it, too".into(),
                ));
            };
            let waited = self.turned.wait_timeout(turn, left);
            turn = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Reads go on.
    pub(crate) fn release(&self) {
        lock(&self.turn).is_held = false;
        self.turned.notify_all();
    }

    /// Calls `read` while the guest is not about to go.
    fn while_it_is_here<T>(&self, read: impl FnOnce() -> T) -> T {
        let mut turn = lock(&self.turn);
        while turn.is_held {
            turn = self
                .turned
                .wait(turn)
                .unwrap_or_else(PoisonError::into_inner);
        }
        turn.is_reading = true;
        drop(turn);
        let done = read();
        lock(&self.turn).is_reading = false;
        self.turned.notify_all();
        done
    }

    /// Where bytes go, and those that the guest has not taken yet.
    pub(crate) fn save(&self, w: &mut Writer) {
        let state = lock(&self.state);
        w.put(&state.connection.map_or(0, Connection::number));
        w.bytes(&state.early);
        self.hvc.save(w);
        self.port.save(w);
    }

    /// Restores what was saved. Bytes that go to a serial port are part of the devices' state.
    pub(crate) fn load(&self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        let mut state = lock(&self.state);
        let number: u8 = r.part("the input").get()?;
        state.connection = Connection::numbered(number);
        if state.connection.is_none() && number != 0 {
            return Err(r.wrong("a way in that there is not"));
        }
        state.early = r.bytes()?.to_vec();
        self.hvc.load(r)?;
        self.port.load(r)?;
        self.opened.notify_all();
        Ok(())
    }

    /// Returns true if the input has ended, and the guest was told so before it came here.
    pub(crate) fn has_ended(&self) -> bool {
        self.port.has_ended()
    }

    fn wait(&self) -> Connection {
        let mut state = lock(&self.state);
        loop {
            if let Some(connection) = state.connection {
                return connection;
            }
            state = self
                .opened
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn feed(&self, bytes: &[u8]) {
        let mut state = lock(&self.state);
        match state.connection {
            Some(connection) => {
                drop(state);
                self.pass(connection, bytes);
            }
            None if state.early.len() < BACKLOG_MAX => state.early.extend(bytes),
            // Nobody types so much at a guest that does not start.
            None => {}
        }
    }

    fn pass(&self, connection: Connection, bytes: &[u8]) {
        match connection {
            Connection::Port => self.port.feed(bytes),
            Connection::VirtioConsole => self.hvc.feed(bytes),
            Connection::Serial => self.serial(0, bytes),
            Connection::SerialInput => {
                for chunk in bytes.chunks(TTY_CHUNK) {
                    self.serial(2, &quote(chunk));
                }
            }
        }
    }

    fn serial(&self, index: usize, bytes: &[u8]) {
        if let Some(devices) = self.devices.get() {
            devices.feed(index, bytes);
        }
    }

    /// Waits while too many bytes are not taken.
    fn wait_for_room(&self) {
        let index = match lock(&self.state).connection {
            None => return,
            Some(Connection::Port) => return self.port.wait_for_room(PORT_BACKLOG_MAX),
            Some(Connection::VirtioConsole) => return self.hvc.wait_for_room(BACKLOG_MAX),
            Some(Connection::Serial) => 0,
            Some(Connection::SerialInput) => 2,
        };
        let backlog = || {
            self.devices
                .get()
                .map_or(0, |devices| devices.backlog(index))
        };
        while backlog() > BACKLOG_MAX {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Tells the guest that nothing more comes.
    fn end(&self) {
        match self.wait() {
            Connection::Port => self.port.end(),
            Connection::SerialInput => self.serial(2, &[EOF]),
            // A program that reads a terminal takes this character for the end, if the terminal is in the mode for it.
            connection => self.pass(connection, &[EOF]),
        }
    }
}

/// Reads standard input to its end.
pub(crate) fn forward(source: Source, destination: &Destination, endings: &Sender<Ending>) {
    // Ctrl-A X on a raw terminal has to work before the guest reads anything.
    if !source.is_raw {
        destination.wait();
    }
    let mut reader = Reading {
        source,
        buffer: vec![0; CHUNK],
        escape: Escape::default(),
    };
    loop {
        if source.is_terminal && !source.is_raw {
            terminal::wait_for_line(LOOK);
        } else {
            terminal::wait_for_input(None);
        }
        match destination.while_it_is_here(|| reader.step(destination)) {
            Step::Passed => destination.wait_for_room(),
            Step::Nothing => {}
            Step::Ended => return,
            Step::Quit => {
                // The receiver is gone only when the machine has ended already.
                let _ = endings.send(Ending::Quit);
                return;
            }
        }
    }
}

/// What came of a read.
enum Step {
    Passed,
    Nothing,
    Ended,
    /// The user wants to leave.
    Quit,
}

struct Reading {
    source: Source,
    buffer: Vec<u8>,
    escape: Escape,
}

impl Reading {
    /// Passes on what has come. Does not wait, unless another process takes it at this moment.
    fn step(&mut self, destination: &Destination) -> Step {
        // Another process with the same standard input may have been quicker: the guest's next one.
        if !terminal::wait_for_input(Some(Duration::ZERO)) {
            return Step::Nothing;
        }
        let read = match rustix::io::read(rustix::stdio::stdin(), &mut self.buffer) {
            Ok(n) => self.buffer.get(..n).unwrap_or_default(),
            // Somebody made our terminal non-blocking.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => return Step::Nothing,
            Err(_) => &[],
        };
        if read.is_empty() {
            // A raw terminal that reports its end was closed; SIGHUP says the rest.
            if !self.source.is_raw {
                destination.end();
            }
            return Step::Ended;
        }
        if !self.source.is_terminal {
            destination.feed(read);
            return Step::Passed;
        }
        let (bytes, quits) = self.escape.filter(read);
        if quits {
            return Step::Quit;
        }
        destination.feed(&bytes);
        Step::Passed
    }
}

/// Makes a tty in canonical mode deliver exactly `bytes`. Special characters are quoted with literal-next. An
/// unfinished line is followed by an end-of-file character, which after at least one byte only ends the read.
fn quote(bytes: &[u8]) -> Vec<u8> {
    let mut quoted = Vec::with_capacity(bytes.len() + 8);
    for byte in bytes {
        if matches!(*byte, EOF | LITERAL_NEXT) {
            quoted.push(LITERAL_NEXT);
        }
        quoted.push(*byte);
    }
    if bytes.last().is_some_and(|byte| *byte != b'\n') {
        quoted.push(EOF);
    }
    quoted
}

/// Finds the escape key: Ctrl-A X quits, Ctrl-A Ctrl-A is one Ctrl-A, and Ctrl-A with another key is nothing.
#[derive(Debug, Default)]
struct Escape {
    is_pending: bool,
}

impl Escape {
    /// Returns the bytes that are left for the guest, and whether the user wants to quit.
    fn filter(&mut self, bytes: &[u8]) -> (Vec<u8>, bool) {
        let mut rest = Vec::with_capacity(bytes.len());
        for byte in bytes {
            match (self.is_pending, *byte) {
                (false, ESCAPE) => self.is_pending = true,
                (false, byte) => rest.push(byte),
                (true, b'x' | b'X') => return (rest, true),
                (true, byte) => {
                    self.is_pending = false;
                    if byte == ESCAPE {
                        rest.push(ESCAPE);
                    }
                }
            }
        }
        (rest, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_key() {
        type Row<'a> = (&'a [&'a [u8]], &'a [u8], bool);
        let rows: [Row<'_>; 6] = [
            (&[b"ls\r"], b"ls\r", false),
            (&[b"ab\x01x"], b"ab", true),
            (&[b"\x01", b"X"], b"", true),
            (&[b"a\x01\x01b"], b"a\x01b", false),
            (&[b"\x01\x01x"], b"\x01x", false),
            (&[b"\x01cx"], b"x", false),
        ];
        for (reads, want, want_quit) in rows {
            let mut escape = Escape::default();
            let mut got = Vec::new();
            let mut quit = false;
            for read in reads {
                let (bytes, quits) = escape.filter(read);
                got.extend(bytes);
                quit |= quits;
            }
            assert_eq!((got.as_slice(), quit), (want, want_quit), "{reads:?}");
        }
    }

    #[test]
    fn quoting_for_a_tty() {
        let rows: [(&[u8], &[u8]); 5] = [
            (b"line\n", b"line\n"),
            (b"part", b"part\x04"),
            (b"\x04\n", b"\x16\x04\n"),
            (b"a\x16b", b"a\x16\x16b\x04"),
            (b"\0\xff\n", b"\0\xff\n"),
        ];
        for (bytes, want) in rows {
            assert_eq!(quote(bytes), want);
        }
    }
}
