//! Standard input on its way to the guest: the escape key, and bytes through a tty unchanged.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use crate::devices::Devices;
use crate::ending::Ending;
use crate::virtio::ConsoleInput;

/// Ctrl-A, as in QEMU.
const ESCAPE: u8 = 0x01;
/// The tty characters that init sets on the input port of a command: end-of-file, literal-next.
const EOF: u8 = 0x04;
const LITERAL_NEXT: u8 = 0x16;
/// A tty in canonical mode keeps at most 4095 bytes of a line.
const CHUNK: usize = 1024;
/// Bytes that may wait for the guest.
const BACKLOG_MAX: usize = 1 << 16;

/// Where standard input goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// To the console, as typed.
    Console {
        /// Ctrl-A is the escape key.
        has_escape: bool,
    },
    /// To a command's standard input (COM3), quoted for the tty in between.
    Pipe,
}

/// The guest's ends of the routes.
pub(crate) struct Destination {
    /// COM1 is the console, COM3 a command's standard input.
    pub(crate) devices: Arc<Devices>,
    /// The console if it is not COM1.
    pub(crate) hvc: Option<Arc<ConsoleInput>>,
}

impl Destination {
    fn feed(&self, route: Route, bytes: &[u8]) {
        match (route, &self.hvc) {
            (Route::Console { .. }, Some(hvc)) => hvc.feed(bytes),
            (Route::Console { .. }, None) => self.devices.feed(0, bytes),
            (Route::Pipe, _) => self.devices.feed(2, bytes),
        }
    }

    fn backlog(&self, route: Route) -> usize {
        match (route, &self.hvc) {
            (Route::Console { .. }, Some(hvc)) => hvc.backlog(),
            (Route::Console { .. }, None) => self.devices.backlog(0),
            (Route::Pipe, _) => self.devices.backlog(2),
        }
    }
}

/// Reads standard input to its end.
pub(crate) fn forward(route: Route, destination: &Destination, endings: &Sender<Ending>) {
    let mut buffer = [0; CHUNK];
    let mut escape = Escape::default();
    loop {
        let read = match rustix::io::read(rustix::stdio::stdin(), &mut buffer) {
            Ok(n) => buffer.get(..n).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => &[],
        };
        if read.is_empty() {
            break;
        }
        let bytes = match route {
            Route::Pipe => quote(read),
            Route::Console { has_escape: false } => read.to_vec(),
            Route::Console { has_escape: true } => {
                let (bytes, quits) = escape.filter(read);
                if quits {
                    // The receiver is gone only when the machine has ended already.
                    let _ = endings.send(Ending::Quit);
                    return;
                }
                bytes
            }
        };
        destination.feed(route, &bytes);
        while destination.backlog(route) > BACKLOG_MAX {
            thread::sleep(Duration::from_millis(5));
        }
    }
    match route {
        Route::Pipe | Route::Console { has_escape: false } => destination.feed(route, &[EOF]),
        // A terminal that reports its end was closed; SIGHUP says the rest.
        Route::Console { has_escape: true } => {}
    }
}

/// Makes a canonical-mode tty deliver exactly `bytes`: specials are quoted with literal-next, and
/// an unfinished line is handed over with an end-of-file character (which, after at least one
/// byte, only ends the read).
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

/// Ctrl-A X quits, Ctrl-A Ctrl-A is one Ctrl-A, Ctrl-A and anything else is nothing.
#[derive(Debug, Default)]
struct Escape {
    is_pending: bool,
}

impl Escape {
    /// What remains for the guest, and whether the user asked to quit.
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
