//! Standard input on its way to the guest. Handles the escape key, and passes bytes to a command unchanged.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use crate::devices::{Connection, Devices};
use crate::ending::Ending;
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

/// The guest's inputs. Nothing is sent before its init reads, because a UART that is being probed drops bytes.
#[derive(Default)]
pub(crate) struct Destination {
    state: Mutex<State>,
    opened: Condvar,
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

    /// Saves where bytes go, and those that the guest has not taken yet.
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
                self.wait_for_room(connection);
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

    /// Waits while too many bytes have not been taken.
    fn wait_for_room(&self, connection: Connection) {
        let index = match connection {
            Connection::Port => return self.port.wait_for_room(PORT_BACKLOG_MAX),
            Connection::VirtioConsole => return self.hvc.wait_for_room(BACKLOG_MAX),
            Connection::Serial => 0,
            Connection::SerialInput => 2,
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
    let mut buffer = vec![0; CHUNK];
    let mut escape = Escape::default();
    loop {
        if source.is_terminal && !source.is_raw {
            terminal::wait_for_line(LOOK);
        }
        let read = match rustix::io::read(rustix::stdio::stdin(), &mut buffer) {
            Ok(n) => buffer.get(..n).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::AGAIN) => {
                // Another program has made our terminal non-blocking.
                thread::sleep(LOOK);
                continue;
            }
            Err(_) => &[],
        };
        if read.is_empty() {
            break;
        }
        if source.is_terminal {
            let (bytes, quits) = escape.filter(read);
            if quits {
                // The receiver is gone only if the machine has ended already.
                let _ = endings.send(Ending::Quit);
                return;
            }
            destination.feed(&bytes);
        } else {
            destination.feed(read);
        }
    }
    // A raw terminal that reports its end was closed. SIGHUP does the rest.
    if !source.is_raw {
        destination.end();
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
