//! The control port (COM4), by which the init of our initramfs talks to us.
//!
//! The guest sends lines of text: `ready NAME` when init has opened its input, which is the device of that name, and
//! `exit N` when the command has ended with status N. All other lines are ignored, so that a probe of the port does no
//! harm. We send lines `size ROWS COLUMNS` when the terminal's size has changed.

use crate::fields::{Malformed, Reader, Writer};

/// Maximum length of a line. A longer one is not init's.
const LINE_MAX: usize = 64;

/// The device that the guest's init has connected our standard input to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Connection {
    /// COM1, as a terminal.
    Serial,
    /// hvc0, as a terminal.
    VirtioConsole,
    /// A port of the virtio console, for a command's input.
    Port,
    /// COM3, for a command's input on a kernel without virtio.
    SerialInput,
}

impl Connection {
    /// Returns the number in a saved machine; 0 stands for none.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Serial => 1,
            Self::VirtioConsole => 2,
            Self::Port => 3,
            Self::SerialInput => 4,
        }
    }

    /// Returns the connection of a number.
    pub(crate) fn numbered(number: u8) -> Option<Self> {
        let all = [
            Self::Serial,
            Self::VirtioConsole,
            Self::Port,
            Self::SerialInput,
        ];
        all.into_iter().find(|one| one.number() == number)
    }

    fn named(name: &str) -> Option<Self> {
        match name {
            "ttyS0" => Some(Self::Serial),
            "hvc0" => Some(Self::VirtioConsole),
            "port" => Some(Self::Port),
            "ttyS2" => Some(Self::SerialInput),
            _ => None,
        }
    }
}

/// A message that the machine has to react to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ControlMessage {
    /// The command's status.
    Exit(u8),
}

pub(crate) struct Control {
    line: Vec<u8>,
    message: Option<ControlMessage>,
    on_ready: Box<dyn Fn(Connection) + Send>,
}

impl Control {
    pub(super) fn new(on_ready: Box<dyn Fn(Connection) + Send>) -> Self {
        Self {
            line: Vec::new(),
            message: None,
            on_ready,
        }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            match byte {
                b'\n' | b'\r' => self.end_line(),
                _ if self.line.len() < LINE_MAX => self.line.push(*byte),
                _ => {}
            }
        }
    }

    /// Saves a line that has only begun.
    pub(super) fn save(&self, w: &mut Writer) {
        w.bytes(&self.line);
    }

    pub(super) fn load(&mut self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        self.line = r.bytes()?.to_vec();
        self.line.truncate(LINE_MAX);
        Ok(())
    }

    pub(super) fn take(&mut self) -> Option<ControlMessage> {
        self.message.take()
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next()) {
            (Some("ready"), Some(name)) => {
                if let Some(connection) = Connection::named(name) {
                    (self.on_ready)(connection);
                }
            }
            (Some("exit"), Some(status)) => {
                self.message = status.parse().ok().map(ControlMessage::Exit);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn lines() {
        let ready = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&ready);
        let mut control = Control::new(Box::new(move |connection| {
            assert_eq!(connection, Connection::Port);
            count.fetch_add(1, Ordering::Relaxed);
        }));
        let rows: [(&[u8], Option<u8>); 9] = [
            (b"ready port\r\n", None),
            (b"ready\n", None),
            (b"ready lp0\n", None),
            (b"exit 7\n", Some(7)),
            (b"exit 256\n", None),
            (b"exit\n", None),
            (b"\xff\xfe\n", None),
            (&[b'a'; 1000], None),
            (b"\nexit 0\r\n", Some(0)),
        ];
        for (bytes, want) in rows {
            control.push(bytes);
            assert_eq!(control.take(), want.map(ControlMessage::Exit));
        }
        assert_eq!(ready.load(Ordering::Relaxed), 1);
    }
}
